"""--mode=evaluate: records, resuming, contamination, checkpoint sources."""

import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import compiling
import configured
import jax
import numpy as np
import pytest
import runs_for_tests as made
import tiers
from messages import mentions

from brorl_jax.configs import base
from brorl_jax.data import dataset
from brorl_jax.errors import StorageError, UserError
from brorl_jax.main import evaluate as evaluate_command
from brorl_jax.main import export, report, settings
from brorl_jax.many import meshes
from brorl_jax.model import huggingface
from brorl_jax.plan import checkpoint_source, resolve
from brorl_jax.rollout import prefixes
from brorl_jax.runs import metrics

ROOT = pathlib.Path(__file__).parents[2]
FAMILIES = ("gcd", "count_primes", "spell_backward")


def config(**changes):
  """Three families of 4 held-out prompts x 4, in chunks of 4."""
  c = base.get_config()
  with c.unlocked():
    for name in [name for name in c.data.families if name not in FAMILIES]:
      del c.data.families[name]
  small = dict(n=16, samples=64, in_flight=16, mesh_fsdp=1)
  small |= dict(eval_prompts=4, eval_n=4)
  return settings.typed(configured.changed(c, **small | changes))


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
  """Programs for a mesh of eight take longer to compile than to run."""
  make = lambda **_: meshes.over([jax.devices()[:1]], meshes.ONE)
  monkeypatch.setattr(meshes, "make_mesh", make)


def run(workdir, **changes):
  c = config(**changes)
  this = resolve.evaluation(c, resolve.here(c.devices), workdir)
  evaluate_command.run(this, workdir)
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
  with pytest.raises(UserError) as error:
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
  files = dataset.file_digests(c.data.files) if c.data.files else {}
  return made.with_checkpoints(workdir, c, steps, files=files)


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
  fields = set(
    "step id domain task sample tokens truncated score pass status reason "
    "answer".split()
  )
  # Text of the first sample alone.
  assert records[0].keys() == fields | {"prompt", "response"}
  assert records[1].keys() == fields
  assert said["source"] == str(huggingface.ASSETS)
  assert said["run"] is said["step"] is None
  assert said["sampling"]["eval.temperature"] == 0.6
  assert said["sampling"]["eval.top_p"] == 0.95
  assert {*said["sampling"]} == {
    *("run.seed", "policy.dtype", "data.prompt_tokens"),
    *("sampling.max_new_tokens", "sampling.int8_cache"),
    *("eval.prompts", "eval.n", "eval.temperature", "eval.top_p"),
  }
  assert said["all"]["prompts"] == 12 and said["all"]["samples"] == 4
  mean = np.mean([r["pass"] for r in records])
  assert said["all"]["pass_at_k"]["1"] == pytest.approx(mean)
  assert said["by_domain"]["gym"]["by_task"].keys() == set(FAMILIES)
  told = json.loads((workdir / "config.json").read_text())
  assert told["mode"] == "evaluate" and told["config"]["eval"]["n"] == 4
  assert told["evaluated"]["weights"] == said["weights"]


def test_the_table_shows_the_summary(whole, capsys):
  workdir, _ = whole
  said = json.loads((workdir / "eval" / "summary.json").read_text())
  head, everything, domain, *tasks = evaluate_command.table(said).splitlines()
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


def test_the_same_command_again_samples_nothing(whole, monkeypatch, capsys):
  workdir, records = whole
  monkeypatch.setattr(
    prefixes, "rollouts", lambda *_, **__: pytest.fail("samples")
  )
  said = (workdir / "eval" / "summary.json").read_bytes()
  assert run(workdir) == records
  assert (workdir / "eval" / "summary.json").read_bytes() == said
  assert "pass@1" in capsys.readouterr().out


@pytest.mark.ci
def test_two_evaluations_are_identical_whatever_the_chunk(whole, tmp_path):
  changes = {"in_flight": 32, "samples": 64}  # 8 prompts at a time
  assert run(tmp_path / "run", **changes) == whole[1]


@pytest.mark.ci
def test_greedy_samples_are_all_the_same(tmp_path):
  run(tmp_path / "run", eval_temperature=0.0)
  records = metrics.read_lines(tmp_path / "run" / "eval" / "records.jsonl")
  for _, mine in itertools.groupby(records, lambda r: r["id"]):
    assert len({(r["answer"], r["tokens"]) for r in mine}) == 1


@pytest.mark.ci
def test_one_prompt_is_enough_and_has_no_interval(tmp_path, capsys):
  a = made.problems(tmp_path / "a.jsonl", [5])
  b = made.problems(tmp_path / "b.jsonl", [9], prefix="b")
  changes = {"data.files": (a,), "data.heldout_files": (b,)}
  changes |= {"data.domains.gym.weight": 0.0, "prompt_tokens": 80}
  run(tmp_path / "e", **changes)
  text = (tmp_path / "e" / "eval" / "summary.json").read_text()
  said = json.loads(text)["all"]
  assert (said["prompts"], said["low"], said["high"]) == (1, None, None)
  assert "NaN" not in text
  assert "nan" not in capsys.readouterr().out.lower()
  report.run([tmp_path / "e"])


# ------------------------------------------------------------------ killed


def killed(workdir, monkeypatch, chunks):
  """Stops a run of it after so many chunks."""

  class Killed(BaseException):
    pass

  calls, rollouts = itertools.count(), prefixes.rollouts

  def doomed(*args, **named):
    if next(calls) == chunks:
      raise Killed
    return rollouts(*args, **named)

  with monkeypatch.context() as patch:
    patch.setattr(prefixes, "rollouts", doomed)
    with pytest.raises(Killed):
      run(workdir)


@pytest.mark.ci
@pytest.mark.parametrize(
  "chunks, tear",
  [
    (0, 0),
    (1, 0),
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


def test_a_folder_that_goes_is_a_fault_of_the_storage(
  whole, tmp_path, monkeypatch
):
  workdir = tmp_path / "run"
  calls, rollouts = itertools.count(), prefixes.rollouts

  def vanished(*args, **named):
    if next(calls) == 1:
      shutil.rmtree(workdir / "eval")
    return rollouts(*args, **named)

  with monkeypatch.context() as patch:
    patch.setattr(prefixes, "rollouts", vanished)
    with pytest.raises(StorageError, match=r"records\.jsonl.*again") as error:
      run(workdir)
  assert error.value.status == 74 and "\n" not in str(error.value)
  assert run(workdir) == whole[1]


@pytest.mark.slow
def test_kill_9_at_any_time(tmp_path):
  command = [sys.executable, "-m", "brorl_jax.main", "--mode=evaluate"]
  command += ["--config=configs/smoke.py", "--config.eval.prompts=20"]
  command += ["--config.sampling.in_flight=128"]  # 20 chunks of 8
  environment = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": compiling.QUICK,
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
  assert "eval.n = 4 (now 8)" in refused(workdir, eval_n=8)
  line = refused(workdir, eval_top_p=1.0)
  assert mentions(line, "eval.top_p = 0.95 (now 1.0)")
  assert "--allow_config_change" not in line  # which would not help


def test_a_folder_of_a_training_run_is_refused(tmp_path):
  workdir = make_run(tmp_path / "run", [3])
  assert mentions(refused(workdir), "--mode=train ... --mode=evaluate")


@pytest.mark.ci
def test_records_that_were_edited_are_refused(tmp_path, monkeypatch):
  workdir = tmp_path / "run"
  killed(workdir, monkeypatch, 2)
  path = workdir / "eval" / "records.jsonl"
  lines = path.read_text().splitlines(keepends=True)
  path.write_text("".join(lines[:5] + lines[6:]))
  line = refused(workdir)
  assert mentions(line, f"{path}, line 6 ... 1 of 'count_primes/heldout/1'")
  assert mentions(line, "eval/")


@pytest.mark.parametrize(
  "line, said",
  tiers.some(
    [
      ('{"step": 0}', "'sample'"),
      ({"step": 1}, "1 of 'count_primes/heldout/0' at step 0"),
      (b"\xff", "'utf-8' ... 0xff ... 0"),
    ],
    1,
  ),
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
  assert mentions(line, f"{path}, line 2 ... {said}")
  assert mentions(line, "eval/")


def test_records_beyond_the_end_are_refused(whole, tmp_path):
  """Of a file as long as it may be, nothing is cut silently."""
  workdir = tmp_path / "run"
  shutil.copytree(whole[0], workdir)
  path = workdir / "eval" / "records.jsonl"
  lines = path.read_bytes().splitlines(keepends=True)
  path.write_bytes(b"".join([*lines, lines[-1]]))
  line = refused(workdir)
  assert mentions(line, f"{path}, line 49 ... evaluation")


@pytest.mark.parametrize("name", ["records.jsonl", "summary.json"])
def test_a_folder_in_the_place_of_a_file_is_refused_at_once(
  whole, tmp_path, monkeypatch, name
):
  monkeypatch.setattr(
    huggingface, "load", lambda *_, **__: pytest.fail("loads")
  )
  workdir = tmp_path / "run"
  shutil.copytree(whole[0], workdir)
  path = workdir / "eval" / name
  path.unlink(), path.mkdir()
  assert mentions(refused(workdir), f"{path} is a folder")


@pytest.mark.parametrize(
  "changes, said",
  [
    ({"eval_top_p": 0.0}, "config.eval.top_p = 0.0 must be above 0"),
    ({"checkpoint": "/no/such"}, "'/no/such' ... checkpoint ... directory"),
    (
      {"memory_bytes": 10**6},
      "evaluations: config.devices.memory_bytes = 1000000",
    ),
    ({"eval_prompts": 10**4}, "config.eval.prompts = 10000 ... count_primes"),
  ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
  tmp_path, monkeypatch, changes, said
):
  monkeypatch.setattr(
    huggingface, "load", lambda *_, **__: pytest.fail("loads")
  )
  assert mentions(refused(tmp_path / "run", **changes), said)
  assert not (tmp_path / "run").exists()


# -------------------------------------------------------------------- of a run


@pytest.mark.ci
def test_a_run_is_evaluated_at_its_newest_step_or_at_one(tmp_path):
  training = make_run(tmp_path / "training", [3, 5])
  newest = run(tmp_path / "a", checkpoint=str(training))
  said = json.loads((tmp_path / "a" / "eval" / "summary.json").read_text())
  assert (said["run"], said["step"]) == (str(training), 5)
  assert said["source"] == str(huggingface.ASSETS)
  records = metrics.read_lines(tmp_path / "a" / "eval" / "records.jsonl")
  assert {record["step"] for record in records} == {5}
  one = run(tmp_path / "b", checkpoint=str(training / "checkpoints" / "5"))
  assert one == newest
  other = run(tmp_path / "c", checkpoint=str(training / "checkpoints" / "3"))
  assert other.replace(b'"step": 3', b'"step": 5') != newest
  # What is exported is the same policy.
  c = config(checkpoint=str(training))
  export.run(c.policy, tmp_path / "exported")
  again = run(tmp_path / "d", checkpoint=str(tmp_path / "exported"))
  assert again.replace(b'"step": 0', b'"step": 5') == newest


@pytest.mark.ci
def test_a_run_keeps_its_chat_template(tmp_path):
  training = make_run(tmp_path / "training", [3])
  plain = run(tmp_path / "plain", checkpoint=str(training))
  path = training / "config.json"
  body = "{{ messages[-1].content }}<|im_end|>"
  path.write_text(
    json.dumps({**json.loads(path.read_text()), "chat_template": body})
  )
  which = checkpoint_source.locate(str(training))
  assert checkpoint_source.read_tokenizer(which).template == (
    str(training),
    body,
  )
  assert (
    checkpoint_source.read_tokenizer(checkpoint_source.locate("")).template
    is None
  )
  own = run(tmp_path / "own", checkpoint=str(training))
  assert own != plain
  # The same file, given; another one is another evaluation.
  file = tmp_path / "t.jinja"
  file.write_text(body)
  again = run(
    tmp_path / "again", checkpoint=str(training), chat_template=str(file)
  )
  assert again == own
  file.write_text("{{ messages[-1].content }}.")
  line = refused(
    tmp_path / "again", checkpoint=str(training), chat_template=str(file)
  )
  assert mentions(line, "data has changed ... chat template")
  # What is exported has it.
  export.run(config(checkpoint=str(training)).policy, tmp_path / "policy")
  assert (tmp_path / "policy" / "chat_template.jinja").read_text() == body
  exported = run(tmp_path / "e", checkpoint=str(tmp_path / "policy"))
  assert exported.replace(b'"step": 0', b'"step": 3') == own


@pytest.mark.ci
def test_an_evaluation_stays_with_its_step_if_the_run_goes_on(tmp_path):
  training = make_run(tmp_path / "training", [3])
  first = run(tmp_path / "a", checkpoint=str(training))
  make_run(training, [5])
  assert run(tmp_path / "a", checkpoint=str(training)) == first
  assert run(tmp_path / "b", checkpoint=str(training)) != first


@pytest.mark.ci
def test_other_weights_in_the_same_place_are_refused(tmp_path):
  training = make_run(tmp_path / "training", [3])
  export.run(config(checkpoint=str(training)).policy, tmp_path / "policy")
  checkpoint = str(tmp_path / "policy")
  run(tmp_path / "a", checkpoint=checkpoint)
  policy, params = huggingface.load(checkpoint)
  params["embed"]["embedding"] = params["embed"]["embedding"] * 1.01
  for path in (tmp_path / "policy").iterdir():
    path.rename(tmp_path / path.name)
  (tmp_path / "policy").rmdir()
  huggingface.save(tmp_path / "policy", policy, params, source=tmp_path)
  line = refused(tmp_path / "a", checkpoint=checkpoint)
  assert mentions(line, f"{tmp_path / 'a'} ... evaluation")
  assert line.count("(weights ") == 2


@pytest.mark.ci
def test_a_checkpoint_that_is_not_there_is_refused(tmp_path):
  training = make_run(tmp_path / "training", [3])
  line = refused(tmp_path / "a", checkpoint=f"{training}/checkpoints/4")
  assert mentions(line, "checkpoint 4") and mentions(line, "there are: 3")
  (training / "config.json").write_text("{}")
  line = refused(tmp_path / "a", checkpoint=str(training))
  assert mentions(line, f"{training / 'config.json'} ... run")
