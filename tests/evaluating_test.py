"""Tests of main/evaluating.py, trained.py and leaks.py, on a small policy."""

import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from brorl_jax import checkpoints, evaluate, hf, metrics, sampler, sharding
from brorl_jax.main import (
  evaluating,
  exporting,
  folder,
  leaks,
  reporting,
  settings,
  trained,
)
from brorl_jax.tasks import dataset, gym, heldout
from brorl_jax.types import State
from configs import base

ROOT = pathlib.Path(__file__).parents[1]
FAMILIES = ("gcd", "count_primes", "spell_backward")


def config(**changes):
  """Three families of 4 held-out prompts x 4, in chunks of 4."""
  c = base.get_config()
  with c.unlocked():
    for name in [name for name in c.families if name not in FAMILIES]:
      del c.families[name]
  c.n, c.samples, c.in_flight = 16, 64, 16
  c.eval_prompts, c.eval_n, c.mesh_data = 4, 4, 1
  c.update_from_flattened_dict(changes)
  return c


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
  """Programs for a mesh of eight take longer to compile than to run."""
  make = lambda data, model: jax.make_mesh(
    (1, 1),
    ("data", "model"),
    axis_types=(jax.sharding.AxisType.Auto,) * 2,
    devices=jax.devices()[:1],
  )
  monkeypatch.setattr(sharding, "make_mesh", make)


def run(workdir, **changes):
  evaluating.run(config(**changes), workdir)
  return (workdir / "eval" / "records.jsonl").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """The records of an evaluation that nobody disturbed."""
  with pytest.MonkeyPatch.context() as patch:
    one_device.__wrapped__(patch)
    workdir = tmp_path_factory.mktemp("whole") / "run"
    return workdir, run(workdir)


def refused(workdir, **changes) -> str:
  before = {
    path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()
  }
  with pytest.raises(settings.UserError) as error:
    run(workdir, **changes)
  after = {
    path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()
  }
  before.pop(workdir / ".lock", None), after.pop(workdir / ".lock", None)
  assert after == before
  assert "\n" not in str(error.value)
  return str(error.value)


def make_run(workdir, steps, **changes):
  """The folder of a run with checkpoints that differ from each other."""
  c = config(**changes)
  workdir.mkdir(exist_ok=True)
  files = dataset.file_digests(c.data.files) if c.data.files else {}
  folder.write_config(c, workdir, files=files)
  _, params = hf.load(settings.ASSETS)
  store = checkpoints.Store(workdir / "checkpoints", keep=9)
  for step in steps:
    moved = jax.tree.map(lambda x, s=step: x * (1 + 0.01 * s), params)
    store.save(step, State(np.int32(step), moved, {}, None), {})
  store.close()
  return workdir


# ------------------------------------------------------------- what is written


def test_an_evaluation_leaves_what_it_promises(whole):
  workdir, _ = whole
  records = metrics.read_lines(workdir / "eval" / "records.jsonl")
  said = json.loads((workdir / "eval" / "summary.json").read_text())
  assert len(records) == 3 * 4 * 4
  assert [r["sample"] for r in records] == [0, 1, 2, 3] * 12
  ids = [f"{task}/heldout" for task in sorted(FAMILIES)]
  assert sorted({r["id"].rpartition("/")[0] for r in records}) == ids
  assert {r["step"] for r in records} == {0}
  assert records[0].keys() == set(
    "step id domain task sample tokens truncated score pass status reason "
    "answer".split()
  )
  assert said["source"] == str(settings.ASSETS)
  assert said["run"] is said["step"] is None
  assert said["sampling"]["eval_temperature"] == 0.6
  assert said["sampling"]["eval_top_p"] == 0.95
  assert said["all"]["prompts"] == 12 and said["all"]["samples"] == 4
  mean = np.mean([r["pass"] for r in records])
  assert said["all"]["pass_at_k"]["1"] == pytest.approx(mean)
  assert said["by_domain"]["gym"]["by_task"].keys() == set(FAMILIES)
  told = json.loads((workdir / "config.json").read_text())
  assert told["mode"] == "evaluate" and told["config"]["eval_n"] == 4
  assert told["evaluated"]["weights"] == said["weights"]


def test_the_table_shows_the_summary(whole, capsys):
  workdir, _ = whole
  said = json.loads((workdir / "eval" / "summary.json").read_text())
  head, everything, domain, *tasks = evaluating.table(said).splitlines()
  names = "prompts pass@1=mean@4 95 % pass@4 majority@4 score tokens cut "
  names += "invalid"
  assert " ".join(head.split()) == names
  assert domain.split()[0] == "gym" and len(tasks) == 3
  for line, s in (
    (everything, said["all"]),
    (domain, said["by_domain"]["gym"]),
  ):
    assert line.split()[1:] == [
      "12",
      f"{s['pass_at_k']['1']:.3f}",
      f"{s['low']:.3f}-{s['high']:.3f}",
      f"{s['pass_at_k']['4']:.3f}",
      f"{s['majority_at_k']['4']:.3f}",
      f"{s['mean_score']:.3f}",
      f"{s['tokens_mean']:.1f}",
      f"{s['truncated_fraction']:.1%}",
      "0",
    ]
  assert len({len(line) for line in (head, everything, domain, *tasks)}) == 1


def test_the_table_of_one_sample_says_everything_once(whole):
  records = metrics.read_lines(whole[0] / "eval" / "records.jsonl")
  said = evaluate.summary([r for r in records if r["sample"] == 0])
  head, line, *_ = evaluating.table(said).splitlines()
  names = "prompts pass@1 95 % score tokens cut invalid"
  assert " ".join(head.split()) == names
  assert len(line.split()) == 1 + len(names.split()) - 1


def test_the_same_command_again_samples_nothing(whole, monkeypatch, capsys):
  workdir, records = whole
  monkeypatch.setattr(
    sampler, "rollouts", lambda *_, **__: pytest.fail("samples")
  )
  said = (workdir / "eval" / "summary.json").read_bytes()
  assert run(workdir) == records
  assert (workdir / "eval" / "summary.json").read_bytes() == said
  assert "pass@1" in capsys.readouterr().out


def test_two_evaluations_are_identical_whatever_the_chunk(whole, tmp_path):
  changes = {"in_flight": 32, "samples": 64}  # 8 prompts at a time
  assert run(tmp_path / "run", **changes) == whole[1]


def test_another_seed_is_another_evaluation(whole, tmp_path):
  assert run(tmp_path / "run", seed=1) != whole[1]


def test_greedy_samples_are_all_the_same(tmp_path):
  run(tmp_path / "run", eval_temperature=0.0)
  records = metrics.read_lines(tmp_path / "run" / "eval" / "records.jsonl")
  for _, mine in itertools.groupby(records, lambda r: r["id"]):
    assert len({(r["answer"], r["tokens"]) for r in mine}) == 1


def test_one_prompt_is_enough_and_has_no_interval(tmp_path, capsys):
  a = problems(tmp_path / "a.jsonl", [5])
  b = problems(tmp_path / "b.jsonl", [9], prefix="b")
  changes = {"data.files": (a,), "data.heldout_files": (b,)}
  changes |= {"domains.gym.weight": 0.0, "prompt_tokens": 80}
  run(tmp_path / "e", **changes)
  text = (tmp_path / "e" / "eval" / "summary.json").read_text()
  said = json.loads(text)["all"]
  assert (said["prompts"], said["low"], said["high"]) == (1, None, None)
  assert "NaN" not in text
  assert "nan" not in capsys.readouterr().out.lower()
  reporting.run([tmp_path / "e"])


# ------------------------------------------------------------------ killed


def killed(workdir, monkeypatch, chunks):
  """Stops a run of it after so many chunks."""

  class Killed(BaseException):
    pass

  calls, rollouts = itertools.count(), sampler.rollouts

  def doomed(*args, **named):
    if next(calls) == chunks:
      raise Killed
    return rollouts(*args, **named)

  with monkeypatch.context() as patch:
    patch.setattr(sampler, "rollouts", doomed)
    with pytest.raises(Killed):
      run(workdir)


@pytest.mark.parametrize(
  "chunks, tear",
  [
    (0, 0),
    (1, 0),
    (2, 3),  # inside the last line
    (2, 400),  # inside a chunk
    (1, 10**6),  # all of it
  ],
)
def test_a_killed_evaluation_ends_as_if_it_had_not_been(
  whole, tmp_path, monkeypatch, chunks, tear, capsys
):
  workdir = tmp_path / "run"
  killed(workdir, monkeypatch, chunks)
  path = workdir / "eval" / "records.jsonl"
  written = path.read_bytes()
  assert written == whole[1][: len(written)]
  assert written.count(b"\n") == 16 * chunks
  assert not (workdir / "eval" / "summary.json").exists()
  path.write_bytes(written[: max(len(written) - tear, 0)])
  capsys.readouterr()
  assert run(workdir) == whole[1]
  # Whole chunks stay, torn ones are sampled again.
  stay = chunks - (tear > 0)
  lines = capsys.readouterr().err.splitlines()
  assert [line.split()[1] for line in lines] == [
    f"{4 * i}/12" for i in range(stay + 1, 4)
  ]
  same = [
    (folder / "eval" / "summary.json").read_bytes()
    for folder in (workdir, whole[0])
  ]
  assert same[0] == same[1]


@pytest.mark.slow
def test_kill_9_at_any_time(tmp_path):
  command = [sys.executable, "-m", "brorl_jax.main", "--mode=evaluate"]
  command += ["--config=configs/n16.py", "--config.eval_prompts=20"]
  command += ["--config.in_flight=128"]  # 20 chunks of 8
  environment = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "",
  }
  start = lambda name: subprocess.Popen(
    [*command, f"--workdir={tmp_path / name}"],
    cwd=ROOT,
    env=environment,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  )
  records = lambda name: tmp_path / name / "eval" / "records.jsonl"
  size = lambda: records("b").stat().st_size if records("b").exists() else 0
  assert start("a").wait(timeout=240) == 0
  for part in (0.0, 0.2, 0.6):
    process = start("b")
    enough, end = part * records("a").stat().st_size, time.monotonic() + 120
    while size() <= enough and process.poll() is None:
      assert time.monotonic() < end
      time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert size() < records("a").stat().st_size
  assert start("b").wait(timeout=240) == 0
  assert records("b").read_bytes() == records("a").read_bytes()


# ------------------------------------------------------------------ refused


def test_a_folder_of_another_evaluation_is_refused(whole):
  workdir = whole[0]
  assert "eval_n = 4 (now 8)" in refused(workdir, eval_n=8)
  line = refused(workdir, eval_top_p=1.0)
  assert "eval_top_p = 0.95 (now 1.0); choose another, or give these" in line
  assert "--allow_config_change" not in line  # which would not help


def test_other_prompts_of_the_same_files_are_refused(tmp_path):
  a = problems(tmp_path / "a.jsonl", range(20))
  changes = {"data.files": (a,), "domains.gym.weight": 0.0}
  changes |= {"data.heldout_one_in": 3, "prompt_tokens": 80}
  run(tmp_path / "e", **changes)
  problems(tmp_path / "a.jsonl", range(21))
  line = refused(tmp_path / "e", **changes)
  assert line.startswith("the run's data has changed: ")
  assert line.endswith("give it back as it was, or choose another workdir")


def test_a_folder_of_a_training_run_is_refused(tmp_path):
  workdir = make_run(tmp_path / "run", [3])
  assert "belongs to --mode=train, this is --mode=evaluate" in refused(workdir)


def test_records_that_were_edited_are_refused(tmp_path, monkeypatch):
  workdir = tmp_path / "run"
  killed(workdir, monkeypatch, 2)
  path = workdir / "eval" / "records.jsonl"
  lines = path.read_text().splitlines(keepends=True)
  path.write_text("".join(lines[:5] + lines[6:]))
  line = refused(workdir)
  assert f"{path}, line 6: is not sample 1 of 'count_primes/heldout/1'" in line
  assert "without eval/, begins again" in line


@pytest.mark.parametrize(
  "line, said",
  [
    ("7", "there is no 'step'"),
    ('{"step": 0}', "there is no 'sample'"),
    ({"status": None}, "'status' is null, which is not one of pass, fail, inv"),
    ({"score": "1"}, "'score' is \"1\", which is not a finite number"),
    ({"step": 1}, "is not sample 1 of 'count_primes/heldout/0' at step 0"),
    ({"tokens": -1}, "'tokens' is -1, which is not an integer of at least 0"),
    (b"\xff", "'utf-8' codec can't decode byte 0xff in position 0"),
  ],
)
def test_records_of_another_make_are_refused(whole, tmp_path, line, said):
  workdir = tmp_path / "run"
  shutil.copytree(whole[0], workdir)
  path = workdir / "eval" / "records.jsonl"
  lines = path.read_bytes().splitlines()
  if isinstance(line, dict):
    line = json.dumps(json.loads(lines[1]) | line)
  lines[1] = line if isinstance(line, bytes) else line.encode()
  path.write_bytes(b"\n".join(lines) + b"\n")
  line = refused(workdir)
  assert line.startswith(f"{path}, line 2: {said}")
  assert "without eval/, begins again" in line


def test_records_beyond_the_end_are_refused(whole, tmp_path):
  """Of a file as long as it may be, nothing is cut silently."""
  workdir = tmp_path / "run"
  shutil.copytree(whole[0], workdir)
  path = workdir / "eval" / "records.jsonl"
  lines = path.read_bytes().splitlines(keepends=True)
  path.write_bytes(b"".join([*lines, lines[-1]]))
  line = refused(workdir)
  assert line.startswith(f"{path}, line 49: this evaluation ends before it; ")


@pytest.mark.parametrize("name", ["records.jsonl", "summary.json"])
def test_a_folder_in_the_place_of_a_file_is_refused_at_once(
  whole, tmp_path, monkeypatch, name
):
  monkeypatch.setattr(hf, "load", lambda *_, **__: pytest.fail("loads"))
  workdir = tmp_path / "run"
  shutil.copytree(whole[0], workdir)
  path = workdir / "eval" / name
  path.unlink(), path.mkdir()
  assert refused(workdir) == f"{path} is a folder; remove it"


@pytest.mark.parametrize(
  "changes, said",
  [
    ({"eval_top_p": 0.0}, "config.eval_top_p = 0.0 must be above 0"),
    ({"checkpoint": "/no/such"}, "checkpoint '/no/such' is not a directory"),
    ({"memory_bytes": 10**6}, "evaluations: config.memory_bytes = 1000000"),
    ({"max_new_tokens": 40_000}, "the positions of this checkpoint"),
    ({"prompt_tokens": 4}, "prompt tokens, config.prompt_tokens = 4"),
    ({"eval_prompts": 10**4}, "config.eval_prompts = 10000: family 'count"),
  ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
  tmp_path, monkeypatch, changes, said
):
  monkeypatch.setattr(hf, "load", lambda *_, **__: pytest.fail("loads"))
  assert said in refused(tmp_path / "run", **changes)
  assert not (tmp_path / "run").exists()


# -------------------------------------------------------------------- of a run


def test_a_run_is_evaluated_at_its_newest_step_or_at_one(tmp_path):
  training = make_run(tmp_path / "training", [3, 5])
  newest = run(tmp_path / "a", checkpoint=str(training))
  said = json.loads((tmp_path / "a" / "eval" / "summary.json").read_text())
  assert (said["run"], said["step"]) == (str(training), 5)
  assert said["source"] == str(settings.ASSETS)
  records = metrics.read_lines(tmp_path / "a" / "eval" / "records.jsonl")
  assert {record["step"] for record in records} == {5}
  one = run(tmp_path / "b", checkpoint=str(training / "checkpoints" / "5"))
  assert one == newest
  other = run(tmp_path / "c", checkpoint=str(training / "checkpoints" / "3"))
  assert other.replace(b'"step": 3', b'"step": 5') != newest
  # What is exported is the same policy.
  c = config(checkpoint=str(training))
  exporting.run(c, tmp_path / "exported")
  again = run(tmp_path / "d", checkpoint=str(tmp_path / "exported"))
  assert again.replace(b'"step": 0', b'"step": 5') == newest


def test_an_evaluation_stays_with_its_step_if_the_run_goes_on(tmp_path):
  training = make_run(tmp_path / "training", [3])
  first = run(tmp_path / "a", checkpoint=str(training))
  make_run(training, [5])
  assert run(tmp_path / "a", checkpoint=str(training)) == first
  assert run(tmp_path / "b", checkpoint=str(training)) != first


def test_other_weights_in_the_same_place_are_refused(tmp_path):
  training = make_run(tmp_path / "training", [3])
  exporting.run(config(checkpoint=str(training)), tmp_path / "policy")
  checkpoint = str(tmp_path / "policy")
  run(tmp_path / "a", checkpoint=checkpoint)
  policy, params = hf.load(checkpoint)
  params["embed"]["embedding"] = params["embed"]["embedding"] * 1.01
  for path in (tmp_path / "policy").iterdir():
    path.rename(tmp_path / path.name)
  (tmp_path / "policy").rmdir()
  hf.save(tmp_path / "policy", policy, params, source=tmp_path)
  line = refused(tmp_path / "a", checkpoint=checkpoint)
  assert f"workdir {tmp_path / 'a'} belongs to an evaluation of " in line
  assert line.count("(weights ") == 2


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path):
  training = make_run(tmp_path / "training", [3])
  line = refused(tmp_path / "a", checkpoint=f"{training}/checkpoints/4")
  assert "there is no checkpoint 4 in" in line and "there are: 3" in line
  (training / "config.json").write_text("{}")
  line = refused(tmp_path / "a", checkpoint=str(training))
  assert line == f"{training / 'config.json'} is not that of a run"


# ----------------------------------------------------------------------- leaks


def problems(path, numbers, *, prefix="q", domain="math"):
  lines = [
    {
      "id": f"{prefix}-{i}",
      "domain": domain,
      "prompt": f"What is {i} + 5?",
      "answer": str(i + 5),
    }
    for i in numbers
  ]
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  return str(path)


def run_on(
  workdir,
  *files,
  held_out=(),
  one_in=10,
  earlier=(),
  gym_weight=0.0,
  digests=True,
):
  """config.json of a run that was trained on files."""
  workdir.mkdir()
  for some in (*earlier, files):
    c = config()
    c.domains.gym.weight = gym_weight
    c.data.files, c.data.heldout_files = tuple(some), tuple(held_out)
    c.data.heldout_one_in = one_in
    there = [path for path in some if os.path.exists(path)]
    files = dict.fromkeys(some, "not there any more")
    files |= dataset.file_digests(there) if there else {}
    folder.write_config(c, workdir, **({"files": files} if digests else {}))
  return workdir


def refuse(run, evaluated):
  return leaks.refuse(
    trained.starts(trained.Trained(settings.ASSETS, run)), evaluated
  )


def held(path, which=slice(None)):
  data = dataset.read(path)
  return dataset.Data(data.examples[which], data.places[which])


def test_a_prompt_that_a_run_trained_on_is_refused_by_id_and_by_text(tmp_path):
  a = problems(tmp_path / "a.jsonl", range(40))
  trained_on = run_on(tmp_path / "run", a, held_out=["b.jsonl"])
  for i in range(40):  # with held-out files, all of these are trained on
    with pytest.raises(ValueError, match=f"id 'q-{i}' is also in"):
      refuse(trained_on, held(a, slice(i, i + 1)))
  fine = problems(tmp_path / "c.jsonl", range(100, 110), prefix="c")
  assert refuse(trained_on, held(fine)) == []
  same_id = problems(tmp_path / "d.jsonl", range(7, 8), prefix="q")
  (tmp_path / "d.jsonl").write_text(
    (tmp_path / "d.jsonl").read_text().replace("What is 7", "How much is 7")
  )
  with pytest.raises(ValueError) as error:
    refuse(trained_on, held(same_id))
  assert str(error.value) == (
    f"the training of {trained_on} had this prompt: {same_id}, line 1, held "
    f"out: id 'q-7' is also in {a}, line 8, trained on; remove it from one"
  )
  same_text = problems(tmp_path / "e.jsonl", (200, 9), prefix="e")
  with pytest.raises(ValueError) as error:
    refuse(trained_on, held(same_text))
  assert str(error.value) == (
    f"the training of {trained_on} had this prompt: {same_text}, line 2, held "
    f"out: asks the same as {a}, line 10, trained on; remove it from one"
  )


def test_its_own_held_out_part_may_be_evaluated_and_no_other(tmp_path):
  a = problems(tmp_path / "a.jsonl", range(60))
  trained_on = run_on(tmp_path / "run", a, one_in=3)
  data = dataset.read(a)
  _, mine = heldout.split(data, one_in=3)
  assert refuse(trained_on, mine) == []
  _, other = heldout.split(data, one_in=4)
  with pytest.raises(ValueError, match=r"id 'q-\d+' is also in .*trained on"):
    refuse(trained_on, other)


def test_files_of_earlier_starts_count_too(tmp_path):
  a = problems(tmp_path / "a.jsonl", range(10), prefix="a")
  b = problems(tmp_path / "b.jsonl", range(50, 60), prefix="b")
  trained_on = run_on(tmp_path / "run", b, held_out=["x.jsonl"], earlier=[[a]])
  with pytest.raises(ValueError, match="id 'a-0' is also in"):
    refuse(trained_on, held(a))


def test_files_that_are_gone_are_named_and_do_not_stop_it(tmp_path):
  a = problems(tmp_path / "a.jsonl", range(10), prefix="a")
  gone = str(tmp_path / "gone.jsonl")
  trained_on = run_on(tmp_path / "run", gone, a, held_out=["x.jsonl"])
  c = held(problems(tmp_path / "c.jsonl", range(90, 95), prefix="c"))
  assert refuse(trained_on, c) == [
    f"not compared with the training of {trained_on}: {gone}: there is no "
    "such file"
  ]
  with pytest.raises(ValueError, match="id 'a-0' is also in"):
    refuse(trained_on, held(a))


def test_stored_puzzles_that_a_run_may_have_drawn_are_refused(tmp_path):
  family = gym.Family("gcd", {"min_value": 1, "max_value": 40})
  drawn = gym.puzzle(family, "train", 7, seed=11)
  generated = dataset.Data([drawn], ["there"])
  trained_on = run_on(tmp_path / "a", gym_weight=1.0)
  with pytest.raises(ValueError) as error:
    refuse(trained_on, generated)
  assert str(error.value) == (
    f"the training of {trained_on} may have drawn this prompt: there, held "
    "out: asks what gcd, which is generated for training, may draw; remove it "
    "from the held-out file"
  )
  # Of another seed, by the same generator: the split holds for all of them.
  other = gym.heldout([family], per_family=30, seed=11)
  assert refuse(trained_on, dataset.Data(other, ["h"] * 30)) == []
  # A run without puzzles, or with stored ones alone, has drawn none.
  assert refuse(run_on(tmp_path / "b"), generated) == []
  stored = [
    {"id": f"s-{i}", "domain": "gym", "entry": p.entry, "prompt": p.question}
    for i, p in enumerate(other)
  ]
  path = tmp_path / "stored.jsonl"
  path.write_text("".join(json.dumps(line) + "\n" for line in stored))
  trained_on = run_on(
    tmp_path / "c", str(path), held_out=["x.jsonl"], gym_weight=1.0
  )
  assert refuse(trained_on, generated) == []
  with pytest.raises(ValueError, match="h, held out: asks the same as"):
    refuse(trained_on, dataset.Data(other, ["h"] * 30))


def test_the_command_refuses_what_a_run_was_trained_on(tmp_path, capsys):
  a = problems(tmp_path / "a.jsonl", range(60))
  changes = {"data.files": (a,), "domains.gym.weight": 0.0}
  changes |= {"data.heldout_one_in": 3, "prompt_tokens": 80}
  training = make_run(tmp_path / "training", [3], **changes)
  changes["checkpoint"] = str(training)
  line = refused(tmp_path / "e", **changes | {"data.heldout_one_in": 4})
  assert line.startswith(f"the training of {training} had this prompt: {a}, li")
  assert not (tmp_path / "e").exists()
  run(tmp_path / "e", **changes)
  (tmp_path / "a.jsonl").rename(tmp_path / "b.jsonl")
  changes["data.files"] = (str(tmp_path / "b.jsonl"),)
  capsys.readouterr()
  run(tmp_path / "f", **changes | {"data.heldout_one_in": 4})
  said = f"not compared with the training of {training}: {a}: there is no such"
  assert said in capsys.readouterr().out


def test_a_file_that_was_edited_after_training_is_refused(tmp_path):
  a = problems(tmp_path / "a.jsonl", range(10))
  trained_on = run_on(tmp_path / "run", a, held_out=["x.jsonl"])
  c = held(problems(tmp_path / "c.jsonl", range(2, 3), prefix="c"))
  with pytest.raises(ValueError, match="asks the same as"):
    refuse(trained_on, c)
  for damage in (
    lambda: problems(tmp_path / "a.jsonl", range(5, 10)),
    lambda: (tmp_path / "a.jsonl").write_text(""),
  ):
    damage()
    with pytest.raises(ValueError) as error:
      refuse(trained_on, c)
    assert str(error.value) == (
      f"{a} is not what {trained_on} was trained on: it was changed since; "
      "bring it back as it was, so that held-out prompts can be compared"
    )


def test_files_that_came_later_were_not_trained_on(tmp_path):
  problems(tmp_path / "a.jsonl", range(10), prefix="a")
  c = config(**{"data.files": (str(tmp_path / "*.jsonl"),)})
  (tmp_path / "run").mkdir()
  files = dataset.file_digests(c.data.files)
  folder.write_config(c, tmp_path / "run", files=files)
  b = held(problems(tmp_path / "b.jsonl", range(20, 30), prefix="b"))
  assert refuse(tmp_path / "run", b) == []


def test_all_of_the_files_of_an_older_run_counts(tmp_path):
  """Which part it held out, and what the files were, is not known."""
  a = problems(tmp_path / "a.jsonl", range(60))
  trained_on = run_on(tmp_path / "run", a, one_in=3, digests=False)
  _, mine = heldout.split(dataset.read(a), one_in=3)
  with pytest.raises(ValueError, match=r"may have had this prompt: .*trained"):
    refuse(trained_on, mine)
  c = held(problems(tmp_path / "c.jsonl", range(90, 95), prefix="c"))
  assert refuse(trained_on, c) == [
    f"not compared with the training of {trained_on}: its files as they were, "
    "of which it kept no digests"
  ]


def test_what_an_exported_policy_was_trained_on_is_refused(tmp_path):
  a = problems(tmp_path / "a.jsonl", range(60))
  changes = {"data.files": (a,), "domains.gym.weight": 0.0}
  changes |= {"data.heldout_one_in": 3, "prompt_tokens": 80}
  training = make_run(tmp_path / "training", [3], **changes)
  exporting.run(config(checkpoint=str(training)), tmp_path / "policy")
  changes["checkpoint"] = str(tmp_path / "policy")
  line = refused(tmp_path / "e", **changes | {"data.heldout_one_in": 4})
  assert line.startswith(f"the training of {training} had this prompt: {a}, li")
  # What was trained further knows what it began with, exported again or not.
  b = problems(tmp_path / "b.jsonl", range(100, 160), prefix="b")
  changes["data.files"] = (b,)
  further = make_run(tmp_path / "further", [3], **changes)
  exporting.run(config(checkpoint=str(further)), tmp_path / "again")
  both = [str(further), str(training)]
  for run_or_policy in (further, tmp_path / "again"):
    starts = trained.starts(trained.locate(str(run_or_policy)))
    assert [start.run for start in starts] == both
  (tmp_path / "policy" / "trained_on.json").write_text('{"starts": [7]}')
  line = refused(tmp_path / "e", **changes | {"checkpoint": str(further)})
  assert line == (
    f"{tmp_path / 'policy' / 'trained_on.json'} is not as --mode=export "
    "writes it"
  )


def test_an_evaluation_needs_no_files_to_train_on(tmp_path, capsys):
  a = problems(tmp_path / "a.jsonl", range(4))
  changes = {"data.heldout_files": (a,), "domains.gym.weight": 0.0}
  changes |= {"prompt_tokens": 80}
  run(tmp_path / "e", **changes)
  assert "files: none to train on; held out 4;" in capsys.readouterr().out
  records = metrics.read_lines(tmp_path / "e" / "eval" / "records.jsonl")
  assert {r["id"] for r in records} == {f"q-{i}" for i in range(4)}
  # Against what the policy was trained on.
  b = problems(tmp_path / "b.jsonl", range(3, 9), prefix="b")
  trained_on = {"data.files": (b,), "domains.gym.weight": 0.0}
  trained_on["data.heldout_files"] = ("x.jsonl",)
  training = make_run(tmp_path / "training", [3], **trained_on)
  line = refused(tmp_path / "f", **changes, checkpoint=str(training))
  assert line.endswith(
    f"asks the same as {b}, line 1, trained on; remove it from one"
  )
  # Other held-out prompts are another evaluation.
  problems(tmp_path / "a.jsonl", range(5))
  assert refused(tmp_path / "e", **changes).startswith("the run's data has ch")


def test_stored_puzzles_are_evaluated_as_they_are(tmp_path):
  family = gym.Family("gcd", {"min_value": 1, "max_value": 40})
  some = [gym.puzzle(family, "train", i, seed=11) for i in range(3)]
  lines = [
    {"id": f"s-{i}", "domain": "gym", "entry": p.entry, "prompt": p.question}
    for i, p in enumerate(some)
  ]
  path = tmp_path / "stored.jsonl"
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  run(tmp_path / "e", **{"data.heldout_files": (str(path),)})
  records = metrics.read_lines(tmp_path / "e" / "eval" / "records.jsonl")
  assert {r["id"] for r in records} == {"s-0", "s-1", "s-2"}


def test_what_a_checkpoint_names(tmp_path):
  training = make_run(tmp_path / "training", [3])
  assets = settings.ASSETS
  assert trained.locate("") == (assets, None, None)
  assert trained.locate(str(assets)) == (assets, None, None)
  assert trained.locate(str(training)) == (assets, training, None)
  one = trained.locate(f"{training}/checkpoints/3")
  assert one == (assets, training, 3)
  around = f"{training}/../x/../training/checkpoints/3"
  (tmp_path / "x").mkdir()
  assert trained.locate(around) == one  # messages name the folder as it is
  assert trained.of_a_run(str(assets)) is None
  assert trained.of_a_run("") is None


def test_weights_of_another_run_are_not_read(tmp_path):
  run = make_run(tmp_path / "run", [1])
  path = run / "config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | {"run": "mine"}))
  _, params = hf.load(settings.ASSETS)
  store = checkpoints.Store(run / "checkpoints", keep=9, run="yours")
  store.save(2, State(np.int32(2), params, {}, None), {})
  store.close()
  mesh = sharding.make_mesh(1, 1)
  which = trained.locate(str(run))
  with pytest.raises(ValueError, match=r"checkpoint 2 .*it is of another run"):
    trained.load(which, mesh, dtype="float32")
  older = trained.locate(str(run / "checkpoints" / "1"))  # it does not say
  assert trained.load(older, mesh, dtype="float32")[2] == 1
