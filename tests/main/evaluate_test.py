"""--mode=evaluate: records, resuming, what was trained on, sources."""

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
import one_step
import pytest
import runs_for_tests as made
from messages import mentions, refuses
from runs_for_tests import problems

from brorl_jax import config as sections
from brorl_jax.configs import base
from brorl_jax.data import dataset
from brorl_jax.errors import StorageError, UserError
from brorl_jax.main import evaluate as evaluate_command
from brorl_jax.main import export, recorder, report, settings
from brorl_jax.many import meshes
from brorl_jax.model import huggingface, tokenizer
from brorl_jax.plan import checkpoint_source, resolve
from brorl_jax.rollout import prefixes
from brorl_jax.runs import folder, metrics
from brorl_jax.stages import examples, sampling
from brorl_jax.verdicts import gym, own
from brorl_jax.verdicts.domains import DOMAINS

ROOT = pathlib.Path(__file__).parents[2]
FAMILIES = ("gcd", "count_primes", "spell_backward")
FILES_ALONE = {"data.domains.gym.weight": 0.0, "prompt_tokens": 80}


def config(**changes):
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
  with pytest.MonkeyPatch.context() as patch:
    one_device.__wrapped__(patch)
    workdir = tmp_path_factory.mktemp("whole") / "run"
    return workdir, run(workdir)


def refused(workdir, **changes) -> str:
  files = lambda: {path: path.read_bytes() for path in workdir.rglob("*")
    if path.is_file() and path.name != ".lock"}  # fmt: skip
  before = files()
  with pytest.raises(UserError) as error:
    run(workdir, **changes)
  assert files() == before
  assert "\n" not in str(error.value)
  return str(error.value)


def make_run(workdir, steps, **changes):
  c = config(**changes)
  files = dataset.file_digests(c.data.files) if c.data.files else {}
  found = {"files": files, "forms": {path: ["", ""] for path in files}}
  return made.with_checkpoints(workdir, c, steps, **found)


# ------------------------------------------------------------- what is written


def test_an_evaluation_leaves_what_it_promises(whole):
  workdir, _ = whole
  records = metrics.read_lines(workdir / "eval" / "records.jsonl")
  said = json.loads((workdir / "eval" / "summary.json").read_text())
  assert [r["sample"] for r in records] == [0, 1, 2, 3] * 12
  ids = [f"{task}/heldout" for task in sorted(FAMILIES)]
  assert sorted({r["id"].rpartition("/")[0] for r in records}) == ids
  assert {r["step"] for r in records} == {0}
  # Text of the first sample alone.
  assert records[0].keys() - records[1].keys() == {"prompt", "response"}
  assert said["source"] == str(huggingface.ASSETS)
  assert said["run"] is said["step"] is None
  assert said["sampling"]["eval.temperature"] == 0.6
  assert said["sampling"]["eval.top_p"] == 0.95
  assert {*said["sampling"]} == {
    *("run.seed", "policy.dtype", "data.prompt_tokens"),
    *("sampling.max_new_tokens", "sampling.int8_cache"),
    *("eval.prompts", "eval.n", "eval.temperature", "eval.top_p"),
    "eval.max_new_tokens",
  }
  mean = np.mean([r["pass"] for r in records])
  assert said["all"]["pass_at_k"]["1"] == pytest.approx(mean)
  about = json.loads((workdir / "config.json").read_text())
  assert about["mode"] == "evaluate" and about["config"]["eval"]["n"] == 4
  assert about["evaluated"]["weights"] == said["weights"]


def test_an_evaluation_has_a_length_of_its_own(whole, tmp_path):
  _, records = whole
  length = config().sampling.max_new_tokens
  changes = dict(max_new_tokens=2, eval_max_new_tokens=length)
  assert run(tmp_path, **changes) == records


def test_the_table_shows_the_summary(whole):
  said = json.loads((whole[0] / "eval" / "summary.json").read_text())
  head, every, domain, *tasks = evaluate_command.table(said).splitlines()
  names = "prompts pass@1=mean@4 95 % pass@4 majority@4 score tokens cut "
  assert " ".join(head.split()) == names + "invalid"
  assert domain.split()[0] == "gym" and len(tasks) == 3
  for line, s in ((every, said["all"]), (domain, said["by_domain"]["gym"])):
    assert line.split()[1:] == [
      "12", f"{s['pass_at_k']['1']:.3f}", f"{s['low']:.3f}-{s['high']:.3f}",
      f"{s['pass_at_k']['4']:.3f}", f"{s['majority_at_k']['4']:.3f}",
      f"{s['mean_score']:.3f}", f"{s['tokens_mean']:.1f}",
      f"{s['truncated_fraction']:.1%}", "0",
    ]  # fmt: skip
  assert len({len(line) for line in (head, every, domain, *tasks)}) == 1


def test_the_same_command_again_samples_nothing(whole, monkeypatch, capsys):
  workdir, records = whole
  fail = lambda *_, **__: pytest.fail("samples")
  monkeypatch.setattr(prefixes, "rollouts", fail)
  said = (workdir / "eval" / "summary.json").read_bytes()
  assert run(workdir) == records
  assert (workdir / "eval" / "summary.json").read_bytes() == said
  assert "pass@1" in capsys.readouterr().out


@pytest.mark.ci
def test_one_prompt_is_enough_and_has_no_interval(tmp_path, capsys):
  a = made.problems(tmp_path / "a.jsonl", [5])
  b = made.problems(tmp_path / "b.jsonl", [9], prefix="b")
  files = {"data.files": (a,), "data.heldout_files": (b,)}
  run(tmp_path / "e", **FILES_ALONE, **files)
  text = (tmp_path / "e" / "eval" / "summary.json").read_text()
  said = json.loads(text)["all"]
  assert (said["prompts"], said["low"], said["high"]) == (1, None, None)
  assert "NaN" not in text
  assert "nan" not in capsys.readouterr().out.lower()
  report.run([tmp_path / "e"])


# ------------------------------------------------------------------ killed


class Killed(BaseException):
  pass


def stopped(workdir, chunks, do, error, **how):
  """An evaluation that ends once so many chunks are sampled, and `do` ran."""
  calls, rollouts = itertools.count(), prefixes.rollouts

  def doomed(*args, **named):
    if next(calls) == chunks:
      do()
    return rollouts(*args, **named)

  with pytest.MonkeyPatch.context() as patch, pytest.raises(error, **how) as e:
    patch.setattr(prefixes, "rollouts", doomed)
    run(workdir)
  return e.value


@pytest.mark.ci
@pytest.mark.parametrize("chunks, tear", [(1, 0), (2, 400), (1, 10**6)],
  ids=["between chunks", "inside a chunk", "all of it"])  # fmt: skip
def test_a_killed_evaluation_ends_as_if_it_had_not_been(
  whole, tmp_path, chunks, tear, capsys
):
  workdir = tmp_path / "run"

  def killed():
    raise Killed

  stopped(workdir, chunks, killed, Killed)
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
  same = [(folder / "eval" / "summary.json").read_bytes()
    for folder in (workdir, whole[0])]  # fmt: skip
  assert same[0] == same[1]


def test_a_folder_that_goes_is_a_storage_fault(whole, tmp_path):
  workdir = tmp_path / "run"
  gone = lambda: shutil.rmtree(workdir / "eval")
  e = stopped(workdir, 1, gone, StorageError, match=r"records\.jsonl.*again")
  assert e.status == 74 and "\n" not in str(e)
  assert run(workdir) == whole[1]


@pytest.mark.slow
def test_kill_9_at_any_time(tmp_path):
  command = [sys.executable, "-m", "brorl_jax.main", "--mode=evaluate"]
  command += ["--config=configs/smoke.py", "--config.eval.prompts=20"]
  command += ["--config.sampling.in_flight=128"]  # 20 chunks of 8
  quick = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": compiling.QUICK}
  environment = os.environ | quick
  start = lambda name: subprocess.Popen(
    [*command, f"--workdir={tmp_path / name}"], cwd=ROOT, env=environment,
    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
  )  # fmt: skip
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


@pytest.mark.parametrize("line, said", [
  (b'{"step": 0}', "line 2 ... 'sample'"),
  ({"step": 1}, "line 2 ... 1 of 'count_primes/heldout/0' at step 0"),
  (b"\xff", "line 2 ... 'utf-8' ... 0xff ... 0"),
  (None, "line 2 ... 1 of 'count_primes/heldout/0'"),  # left out
  ("again", "line 49"),  # nothing is cut silently
])  # fmt: skip
def test_other_records_are_refused(whole, tmp_path, line, said):
  workdir = tmp_path / "run"
  shutil.copytree(whole[0], workdir)
  path = workdir / "eval" / "records.jsonl"
  lines = path.read_bytes().splitlines()
  if line == "again":
    lines.append(lines[-1])
  elif isinstance(line, dict):
    lines[1] = json.dumps(json.loads(lines[1]) | line).encode()
  else:
    lines[1:2] = [] if line is None else [line]
  path.write_bytes(b"\n".join(lines) + b"\n")
  assert mentions(refused(workdir), f"{path} ... eval/ ... {said}")


@pytest.mark.parametrize("changes, said", [
  ({"eval_top_p": 0.0}, "config.eval.top_p = 0.0 must be above 0"),
  ({"checkpoint": "/no/such"}, "'/no/such' ... checkpoint ... directory"),
  ({"memory_bytes": 10**6}, "evaluations: ... config.devices.memory_bytes"),
  ({"eval_prompts": 10**4}, "config.eval.prompts = 10000 ... count_primes"),
])  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_is_written(
  tmp_path, monkeypatch, changes, said
):
  monkeypatch.setattr(huggingface, "load", lambda *_, **__: pytest.fail("it"))
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
  export.run(config(checkpoint=str(training)).policy, tmp_path / "exported")
  again = run(tmp_path / "d", checkpoint=str(tmp_path / "exported"))
  assert again.replace(b'"step": 0', b'"step": 5') == newest


@pytest.mark.ci
def test_a_run_keeps_its_chat_template(tmp_path):
  training = make_run(tmp_path / "training", [3])
  plain = run(tmp_path / "plain", checkpoint=str(training))
  path, body = training / "config.json", "{{ messages[-1].content }}<|im_end|>"
  about = json.loads(path.read_text()) | {"chat_template": body}
  path.write_text(json.dumps(about))
  own = run(tmp_path / "own", checkpoint=str(training))
  assert own != plain
  # The same file, given; another one is another evaluation.
  file = tmp_path / "t.jinja"
  file.write_text(body)
  given = dict(checkpoint=str(training), chat_template=str(file))
  assert run(tmp_path / "again", **given) == own
  file.write_text("{{ messages[-1].content }}.")
  line = refused(tmp_path / "again", **given)
  assert mentions(line, "data has changed ... chat template")
  # What is exported has it.
  export.run(config(checkpoint=str(training)).policy, tmp_path / "policy")
  assert (tmp_path / "policy" / "chat_template.jinja").read_text() == body


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


# ------------------------------------------------------------ held-out prompts


class Sampled(Exception):
  """Ends an evaluation where it samples."""


@pytest.fixture
def sampled(monkeypatch):
  """What the first chunk of an evaluation is sampled with."""

  def sample(this, c, how, params, prompts, key, _):
    raise Sampled(c, how, params, prompts, key)

  monkeypatch.setattr(sampling, "sample_heldout", sample)

  def of(chunks):
    with pytest.raises(Sampled) as e:
      next(chunks)
    return e.value.args

  return of


@pytest.mark.parametrize("first", [0, 3])
def test_a_prompt_draws_by_number_with_the_key_of_step_0(wired, sampled, first):
  this, examples, scorer, *_ = wired
  c, how = this.config, this.phases[0].memory.heldout.only(5)
  prompts, params = examples.heldout(), {"w": np.arange(3.0)}
  told, fits, own, drawn, key = sampled(recorder.records(
    this, c, how, examples, scorer, params, prompts, first=first
  ))  # fmt: skip
  assert (told, fits) == (c, how)
  np.testing.assert_array_equal(own["w"], params["w"])
  index = np.arange(first, first + 5)
  np.testing.assert_array_equal(drawn.index, index)
  want = examples.pad(prompts[first : first + 5], index.astype(np.int32))
  np.testing.assert_array_equal(drawn.tokens, want.tokens)
  assert key == jax.random.fold_in(jax.random.key(c.run.seed), 0)


def test_a_step_is_evaluated_as_its_phase_samples(wired, sampled):
  this = one_step.resolved(
    one_step.config(phases=(
      {"from_step": 3, "sampling.max_new_tokens": 9},
      {"from_step": 5, "sampling.max_new_tokens": 5},
    ))
  )  # fmt: skip
  _, examples, scorer, *_ = wired
  sizes = {}
  for step in range(7):
    chunks = recorder.records_of_step(
      this, examples, scorer, step, {}, examples.heldout()
    )
    c, how, *_ = sampled(chunks)
    sizes[step] = c.sampling.max_new_tokens
    assert how in [p.memory.heldout for p in this.phases if p.config == c]
  assert [*sizes.values()] == [6, 6, 6, 9, 9, 5, 5]


def run_on(
  workdir, *files, held_out=(), one_in=10, earlier=(), gym_weight=0.0, **more
):
  workdir.mkdir()
  for some in (*earlier, files):
    c = config(**{
      "data.domains.gym.weight": gym_weight, "data.files": tuple(some),
      "data.heldout_files": tuple(held_out), "data.heldout_one_in": one_in,
      **more,
    })  # fmt: skip
    there = [path for path in some if os.path.exists(path)]
    files = dict.fromkeys(some, "not there any more")
    files |= dataset.file_digests(there) if there else {}
    forms = {path: [c.data.fields, ""] for path in some}
    found = {"files": files, "forms": forms, "dropped": []}
    folder.write_config(sections.as_dict(c), workdir, **found)
  return workdir


def refuse(run, evaluated):
  source = checkpoint_source.CheckpointSource(huggingface.ASSETS, run)
  starts = checkpoint_source.starts(source)
  return evaluate_command.refuse_trained_on(starts, evaluated)


def held(path, which=slice(None)):
  data = dataset.read(path, domains=DOMAINS)
  return dataset.Data(data.examples[which], data.places[which])


def test_a_prompt_that_a_run_trained_on_is_refused_by_id_and_by_text(tmp_path):
  a = problems(tmp_path / "a.jsonl", range(40))
  trained_on = run_on(tmp_path / "run", a, held_out=["b.jsonl"])
  for i in range(40):  # with held-out files, all of these are trained on
    with pytest.raises(ValueError, match=f"'q-{i}' is also the"):
      refuse(trained_on, held(a, slice(i, i + 1)))
  fine = problems(tmp_path / "c.jsonl", range(100, 110), prefix="c")
  assert refuse(trained_on, held(fine)) == []
  same_id = problems(tmp_path / "d.jsonl", range(7, 8), prefix="q")
  (tmp_path / "d.jsonl").write_text(
    (tmp_path / "d.jsonl").read_text().replace("What is 7", "How much is 7")
  )
  said = f"of {trained_on} ... {same_id}, line 1 ... 'q-7' ... {a}, line 8"
  with refuses(ValueError, said):
    refuse(trained_on, held(same_id))
  same_text = problems(tmp_path / "e.jsonl", (200, 9), prefix="e")
  said = f"of {trained_on} ... {same_text}, line 2 ... {a}, line 10"
  with refuses(ValueError, said):
    refuse(trained_on, held(same_text))


def test_its_own_held_out_part_may_be_evaluated_and_no_other(tmp_path):
  a = problems(tmp_path / "a.jsonl", range(60))
  trained_on = run_on(tmp_path / "run", a, one_in=3)
  data = dataset.read(a, domains=DOMAINS)
  _, mine = dataset.split(data, one_in=3)
  assert refuse(trained_on, mine) == []
  _, other = dataset.split(data, one_in=4)
  with pytest.raises(ValueError, match=r"had this prompt: .*'q-\d+'"):
    refuse(trained_on, other)


def test_files_that_are_gone_are_named_and_do_not_stop_it(tmp_path):
  a = problems(tmp_path / "a.jsonl", range(10), prefix="a")
  gone = str(tmp_path / "gone.jsonl")
  # Files of earlier starts count too.
  first = run_on(tmp_path / "first", gone, held_out=["x.jsonl"], earlier=[[a]])
  with pytest.raises(ValueError, match=r"'a-0' is also the training example"):
    refuse(first, held(a))
  trained_on = run_on(tmp_path / "run", gone, a, held_out=["x.jsonl"])
  c = held(problems(tmp_path / "c.jsonl", range(90, 95), prefix="c"))
  (line,) = refuse(trained_on, c)
  assert mentions(line, f"{trained_on} ... {gone}")
  with pytest.raises(ValueError, match=r"'a-0' is also the training example"):
    refuse(trained_on, held(a))


def test_stored_puzzles_that_a_run_may_have_drawn_are_refused(tmp_path):
  family = gym.Family("gcd", {"min_value": 1, "max_value": 40})
  generated = dataset.Data([gym.puzzle(family, "train", 7, seed=11)], ["there"])
  trained_on = run_on(tmp_path / "a", gym_weight=1.0)
  with refuses(ValueError, f"training of {trained_on} ... gcd ... held-out"):
    refuse(trained_on, generated)
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
  c, held_out = tmp_path / "c", ["x.jsonl"]
  trained_on = run_on(c, str(path), held_out=held_out, gym_weight=1.0)
  assert refuse(trained_on, generated) == []
  with refuses(ValueError, "h: held-out prompt is also the training prompt"):
    refuse(trained_on, dataset.Data(other, ["h"] * 30))


def test_the_command_refuses_what_a_run_was_trained_on(tmp_path, capsys):
  a = problems(tmp_path / "a.jsonl", range(60))
  changes = FILES_ALONE | {"data.files": (a,), "data.heldout_one_in": 3}
  training = make_run(tmp_path / "training", [3], **changes)
  changes["checkpoint"] = str(training)
  line = refused(tmp_path / "e", **changes | {"data.heldout_one_in": 4})
  assert mentions(line, f"of {training} ... {a}")
  assert not (tmp_path / "e").exists()
  run(tmp_path / "e", **changes)
  (tmp_path / "a.jsonl").rename(tmp_path / "b.jsonl")
  changes["data.files"] = (str(tmp_path / "b.jsonl"),)
  capsys.readouterr()
  run(tmp_path / "f", **changes | {"data.heldout_one_in": 4})
  assert mentions(capsys.readouterr().out, f"of {training}: {a}")


def test_lines_of_another_form_are_compared_as_they_were_read(tmp_path):
  path, other = tmp_path / "a.jsonl", tmp_path / "x" / "a.jsonl"
  other.parent.mkdir()
  rows = [{"question": f"{i} + 1 = ?", "label": i + 1} for i in range(30)]
  made.dump(path, rows)
  fields = "prompt:question,answer:label"
  how = {"data.fields": fields, "data.domain": "math", "gym_weight": 1.0}
  trained_on = run_on(tmp_path / "run", str(path), one_in=3, **how)
  [start] = checkpoint_source.starts(
    checkpoint_source.CheckpointSource(huggingface.ASSETS, trained_on)
  )
  assert start.forms == {str(path): [fields, ""]}
  assert (start.domain, start.made) == ("math", [])
  form = examples.file_form(fields, "math", own=False)
  read = lambda path: dataset.read(str(path), form=form, domains=DOMAINS)
  _, held_out = dataset.split(read(path), one_in=4)
  with pytest.raises(ValueError, match=f"of {trained_on} had this prompt"):
    refuse(trained_on, held_out)
  # Another file of that name shares its ids, and none of its prompts.
  made.dump(other, [{"question": "7 * 6 = ?", "label": 42}])
  assert refuse(trained_on, read(other)) == []


def test_a_run_that_read_by_a_function_and_dropped_prompts(tmp_path):
  mine, path = tmp_path / "mine.py", tmp_path / "a.jsonl"
  mine.write_text('def row(r): return {"prompt": r["q"], "answer": "4"}')
  made.dump(path, [{"q": f"{i} + 1 = x?"} for i in range(9)])
  rows = lambda *numbers: made.dump(tmp_path / "b.jsonl",
    [{"prompt": f"{i} +1 = X?", "answer": "4"} for i in numbers])  # fmt: skip
  rows(3, 50)
  changes = {"data.files": (str(path),), "data.skip_bad": True}
  changes |= {"data.heldout_files": (str(tmp_path / "b.jsonl"),)}
  changes |= {"data.fields": f"{path}={mine}:row", "data.domain": "math"}
  c, text = config(**changes), tokenizer.Tokenizer(huggingface.ASSETS)
  some = examples.Examples(config(**changes, prompt_tokens=80), text)
  trained, held_out = some._train["math"], some.placed(some._heldout)
  assert len(trained) == 8 and "1: also a held-out" in some.log_lines[1]
  run = tmp_path / "run"
  run.mkdir()
  found = {"files": some.files, "forms": some.forms, "dropped": some.dropped}
  folder.write_config(sections.as_dict(c), run, **found)
  assert refuse(run, held_out) == []
  with refuses(ValueError, "h: held-out prompt ... line 1; remove one"):
    refuse(run, dataset.Data(trained, ["h"] * 8))
  mine.write_text(f"{mine.read_text()}  # changed")
  own._run.cache_clear()
  with refuses(ValueError, f"{mine}:row has changed since {run}"):
    refuse(run, held_out)
  read = lambda c: examples.read_files(c.data, own=False)
  flag = "remove one, or set --config.data.skip_bad=True"
  with refuses(ValueError, f"b.jsonl, line 1 ... a.jsonl, line 4; {flag}"):
    read(config(**changes | {"data.skip_bad": False}))
  rows(*range(9))
  with refuses(ValueError, "every prompt of data.files is held out"):
    read(c)


def test_a_file_that_was_edited_after_training_is_refused(tmp_path):
  a = problems(tmp_path / "a.jsonl", range(10))
  trained_on = run_on(tmp_path / "run", a, held_out=["x.jsonl"])
  c = held(problems(tmp_path / "c.jsonl", range(2, 3), prefix="c"))
  with pytest.raises(ValueError, match="held-out prompt is also"):
    refuse(trained_on, c)
  for damage in (lambda: problems(tmp_path / "a.jsonl", range(5, 10)),
    lambda: (tmp_path / "a.jsonl").write_text("")):  # fmt: skip
    damage()
    with refuses(ValueError, f"{a} ... {trained_on}"):
      refuse(trained_on, c)


@pytest.mark.ci
def test_what_an_exported_policy_was_trained_on_is_refused(tmp_path):
  a = problems(tmp_path / "a.jsonl", range(60))
  changes = FILES_ALONE | {"data.files": (a,), "data.heldout_one_in": 3}
  training = make_run(tmp_path / "training", [3], **changes)
  export.run(config(checkpoint=str(training)).policy, tmp_path / "policy")
  changes["checkpoint"] = str(tmp_path / "policy")
  line = refused(tmp_path / "e", **changes | {"data.heldout_one_in": 4})
  assert mentions(line, f"of {training} ... {a}")
  # What was trained further knows what it began with, exported again or not.
  b = problems(tmp_path / "b.jsonl", range(100, 160), prefix="b")
  changes["data.files"] = (b,)
  further = make_run(tmp_path / "further", [3], **changes)
  export.run(config(checkpoint=str(further)).policy, tmp_path / "again")
  both = [str(further), str(training)]
  for run_or_policy in (further, tmp_path / "again"):
    source = checkpoint_source.locate(str(run_or_policy))
    assert [start.run for start in checkpoint_source.starts(source)] == both
  (tmp_path / "policy" / "trained_on.json").write_text('{"starts": [7]}')
  line = refused(tmp_path / "e", **changes | {"checkpoint": str(further)})
  assert mentions(
    line, f"{tmp_path / 'policy' / 'trained_on.json'} ... --mode=export"
  )


@pytest.mark.ci
def test_an_evaluation_needs_no_files_to_train_on(tmp_path, capsys):
  a = problems(tmp_path / "a.jsonl", range(4))
  changes = FILES_ALONE | {"data.heldout_files": (a,)}
  run(tmp_path / "e", **changes)
  assert "files: none to train on; held out 4;" in capsys.readouterr().out
  records = metrics.read_lines(tmp_path / "e" / "eval" / "records.jsonl")
  assert {r["id"] for r in records} == {f"q-{i}" for i in range(4)}
  # Other held-out prompts are another evaluation.
  problems(tmp_path / "a.jsonl", range(5))
  assert refused(tmp_path / "e", **changes).startswith("the run's data has ch")
