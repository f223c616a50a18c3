"""The files of a run, and which of many processes writes them."""

import contextlib
import dataclasses
import itertools
import json
from types import SimpleNamespace

import chex
import jax
import numpy as np
import pytest
from messages import mentions, refuses

from brorl_jax import evaluate
from brorl_jax.errors import UserError
from brorl_jax.main import recorder as record
from brorl_jax.main.recorder import KILLED, NO_WORD, Recorder, this_process
from brorl_jax.many import processes
from brorl_jax.model import spec
from brorl_jax.report import stats
from brorl_jax.rollout.dynamic_sampling import SampledGroups
from brorl_jax.runs import metrics, trackers
from brorl_jax.types import Credit, RunState
from brorl_jax.verdicts.base import Verdict


def made(wired, workdir, *, changed=None, entries=None, **more):
  return Recorder(wired.run.config, workdir, wired.examples,
    [], lambda *_: None, changed or {}, entries or {}, **more)  # fmt: skip


def measure(*_):
  one = {"id": "q", "domain": "math", "task": "m", "tokens": 3, "reason": ""}
  one |= {"truncated": False, "score": 1.0, "pass": True, "status": "pass"}
  yield [one | {"sample": n, "answer": "8"} for n in range(2)]


@pytest.mark.ci
def test_wandb_gets_all_of_a_run(wired, tmp_path, monkeypatch):
  c = wired.run.config
  c = dataclasses.replace(c, run=dataclasses.replace(c.run, wandb="mine"))
  told = []

  class Board:
    where = "somewhere"
    close = lambda self: told.append("closed")

    def __init__(self, workdir, project, *, config, warn):
      told.append((workdir, project, config["run"]["wandb"]))

    def write(self, step, values):
      told.append({k: v for k, v in values.items() if isinstance(v, float)})

  monkeypatch.setattr(trackers, "Wandb", Board)
  with Recorder(c, tmp_path, wired.examples, [], measure, {}, {}) as recorder:
    recorder.start(-1)
    recorder.evaluate(0, None)
    line = {"reward/mean": 0.5, "policy/kl_ref": None}
    recorder.step(1, line, wired.kept, drawn(wired.kept))
  score = {"eval/pass_at_1/m": 1.0, "eval/pass_at_1": 1.0}
  began = (tmp_path, "mine", "mine")
  assert told == [began, score, {"reward/mean": 0.5}, "closed"]
  (curve,) = metrics.read_lines(tmp_path / "eval" / "curve.jsonl")
  assert (curve["pass_at_1"], curve["half_width"]) == (1.0, None)  # one prompt


def drawn(kept):
  """As if these were all that a step drew, the first of them rejected."""
  good = np.arange(len(kept.prompts.index)) > 0
  return SampledGroups(kept, good, len(good) - 1, {}, [1.0])


def test_what_was_sampled_of_a_step_is_kept_for_that_step(wired, tmp_path):
  kept, c = wired.kept, wired[0].config
  found = drawn(kept).chunks(2)
  assert len(found) == len(kept.prompts.index) * kept.rollouts.mask.shape[1] / 2
  how = tmp_path, wired.examples, [], lambda *_: [], {}
  of = lambda c, **more: Recorder(c, *how, more)
  recorder = of(c)
  recorder._open = True
  recorder.keep(4, found)
  (path,) = (tmp_path / "sampled").iterdir()
  again = recorder.sampled(4)
  assert again.keys() == found.keys()
  for chunk, rollouts in found.items():
    chex.assert_trees_all_equal(again[chunk], jax.device_get(rollouts))
  steps = sum(float(x.slot_steps.sum()) for x in found.values())
  assert steps == float(kept.rollouts.slot_steps.sum())
  assert of(c, data={"digest": "other"}).sampled(4) == {}
  path.write_bytes(path.read_bytes()[:-40])
  warned = []
  recorder.warn = warned.append
  assert recorder.sampled(4) == {} and "is not used" in warned[0]
  recorder.sampled(5)
  assert not path.exists()


@pytest.fixture
def crossing(wired, tmp_path):
  """A recorder of a run of which samples cross a step, and such samples."""
  c = wired[0].config
  c = dataclasses.replace(c, run=dataclasses.replace(c.run, max_age=1))
  how, old = (c, tmp_path, wired.examples, [], lambda *_: []), {}
  for chunk, x in drawn(jax.device_get(wired.kept)).chunks(2).items():
    old[chunk] = dataclasses.replace(x, age=x.mask.astype(np.int8))
  return lambda changed={}: Recorder(*how, changed, {}), old


def test_what_crosses_stays_as_long_as_the_checkpoint(crossing, tmp_path):
  of, found = crossing
  recorder = of()
  recorder._open = True
  for step in (3, 5, 7):
    recorder.keep(step + 1, found)  # that of step 5 may not be there yet
    if step == 3:
      (tmp_path / "checkpoints" / "3").mkdir(parents=True)
  chex.assert_trees_all_equal(recorder.sampled(8), found)
  names = lambda: sorted(x.name for x in (tmp_path / "sampled").iterdir())
  assert names() == ["step_4.0.npz", "step_6.0.npz", "step_8.0.npz"]
  (tmp_path / "checkpoints" / "3").rmdir()
  recorder.keep(10, found)
  assert names() == ["step_10.0.npz", "step_8.0.npz"]


def test_what_crossed_a_step_must_be_there(crossing, tmp_path, monkeypatch):
  (of, found), folder = crossing, tmp_path / "sampled"
  remedy = "put it back, ... --config.run.max_age=0"
  assert of().sampled(1) == {}  # nothing can
  with refuses(UserError, f"{folder}/step_4.0.npz, ... is missing; {remedy}"):
    of().sampled(4)
  assert not folder.exists()
  assert of({"run.max_age": 0}).sampled(4) == {}  # there was no max_age
  assert of().sampled(4) == {}
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  of().keep(4, found)
  with refuses(UserError, f"{folder}/step_4.1.npz, ... is missing"):
    of().sampled(4)
  monkeypatch.setattr(jax, "process_index", lambda: 1)
  of().keep(4, {})  # nothing of this one crossed
  assert of().sampled(4).keys() == found.keys()
  path = folder / "step_4.1.npz"
  path.write_bytes(path.read_bytes()[:-40])
  with refuses(UserError, f"{path}, ... cannot be read: ... {remedy}"):
    of().sampled(4)


@pytest.mark.ci
def test_record_writes_what_a_step_and_an_evaluation_show(wired, tmp_path):
  this, examples, scorer, _, state, kept = wired
  steps = []

  def measure(step, params, prompts):
    steps.append(step)
    return record.records_of_step(this, examples, scorer, step, params, prompts)

  given = tmp_path, examples, examples.heldout(), measure, {}, {"sandbox": 1}
  recorder = Recorder(this.config, *given, lambda: {"late": 2, "it died": 1})
  recorder.start(-1)
  score = recorder.evaluate(0, state.params)
  recorder.step(1, {"reward/mean": 0.5}, kept, drawn(kept))
  recorder.evaluate(1, state.params)
  recorder.close()
  assert steps == [0, 1]
  assert json.loads((tmp_path / "config.json").read_text())["sandbox"] == 1
  (line,) = metrics.read_lines(tmp_path / "metrics.jsonl")
  assert line["score/replaced_workers"] == 3 and line["reward/mean"] == 0.5
  curve = metrics.read_lines(tmp_path / "eval" / "curve.jsonl")
  # The same draws each time: a gain is paired.
  assert curve[0]["rates"] == curve[1]["rates"]
  assert 0.0 < score == curve[0]["pass_at_1"] < 1.0
  records = metrics.read_lines(tmp_path / "eval" / "records.jsonl")
  assert len(records) == 2 * 8 * 2 * 4
  for step, line in enumerate(curve):
    said = evaluate.summary([r for r in records if r["step"] == step])
    assert line["summary"] == said
    assert line["pass_at_1"] == pytest.approx(said["all"]["pass_at_k"]["1"])
    by_task = said["by_domain"]["gym"]["by_task"]
    want = {task: some["pass_at_k"]["1"] for task, some in by_task.items()}
    assert line["by_family"] == want
    mean, half = stats.mean_interval(np.array(line["rates"]))
    assert line["pass_at_1"] == pytest.approx(mean)
    assert (line["half_width"], len(line["rates"])) == (half, 16)
  assert {r["id"].split("/")[1] for r in records} == {"heldout"}
  visits = metrics.read_lines(tmp_path / "visits.jsonl")
  assert len(visits) == len(kept.prompts.index)
  for p, line in enumerate(visits):
    example, right = examples.example(1, p), kept.scores.reward[p] >= 1.0
    assert line == {"step": 1, "id": example.id, "task": example.task,
      "drawn": right.size, "right": int(right.sum()), "invalid": 0,
      "tokens": int(kept.rollouts.mask[p].sum()), "kept": p > 0}  # fmt: skip
  shown = metrics.read_lines(tmp_path / "samples.jsonl")
  assert len(shown) == 4
  for p, line in enumerate(shown):
    example = examples.example(1, p)
    assert (line["id"], line["domain"]) == (example.id, "gym")
    assert line["gold"] == example.entry["answer"]
    assert (line["verdict"] == "pass") == (line["reward"] == 1.0)
    assert (line["answer"] == line["gold"]) >= (line["verdict"] == "pass")
    assert line["seconds"] >= 0.0 and (line["reason"] == "") == line["reward"]
    assert (kept.scores.reward[p] == line["reward"]).any()


def timeless(workdir):
  every = metrics.read_lines(workdir / "events.jsonl")
  assert all(e.pop("time").endswith("Z") for e in every)
  return every


def evaluated(*steps):
  """Lines of evaluations that held out nothing."""
  summary = {"all": {"prompts": 0, "samples": 0}}
  lines = ({"step": i, "rates": [], "summary": summary} for i in steps)
  return "".join(json.dumps(line) + "\n" for line in lines)


def lines_of(workdir, steps):
  """What a run leaves that was evaluated before its first step alone."""
  text = "".join(json.dumps({"step": i}) + "\n" for i in range(1, steps + 1))
  (workdir / "metrics.jsonl").write_text(text)
  (workdir / "eval").mkdir(exist_ok=True)
  (workdir / "eval" / "curve.jsonl").write_text(evaluated(0))


def test_a_step_without_a_kept_group_shows_what_it_drew(wired):
  """Then the first prompts; otherwise those that the step trains on first."""
  drawn = wired.kept
  none = jax.tree.map(lambda x: x[:0], drawn)
  last = jax.tree.map(lambda x: x[3:], drawn)
  for kept, order, told in ((none, [0, 1, 2, 3], 0), (last, [3, 0, 1, 2], 1)):
    lines = [*record.samples(1, kept, drawn, wired.examples)]
    names = [wired.examples.example(1, p).id for p in order]
    assert [line["id"] for line in lines] == names
    said = [line["kept"] for line in lines]
    assert said == [True] * told + [False] * (4 - told)


@pytest.mark.ci
def test_a_sample_is_one_that_was_drawn(wired):
  """Of the second prompt a wrong one is looked for, and all are right."""
  kept = wired.kept
  mask, reward = kept.rollouts.mask.copy(), kept.scores.reward.copy()
  responses = kept.scores.responses.copy()
  reward[1], reward[1, 0] = 1.0, 0.0
  mask[1, 0], responses[1, 0] = False, None  # no rollout is there
  some = kept._replace(
    rollouts=dataclasses.replace(kept.rollouts, mask=mask),
    scores=kept.scores._replace(reward=reward, responses=responses),
  )
  lines = [*record.samples(1, some, some, wired.examples)]
  assert len(lines) == 4 and lines[1]["reward"] == 1.0
  assert lines[1]["tokens"] == int(mask[1, 1].sum()) > 0


def test_an_evaluation_shows_a_right_and_a_wrong_response():
  one = {"task": "m", "prompt": "3 +\n5?", "response": "8", "reason": ""}
  right = one | {"pass": True, "status": "pass"}
  wrong = one | {"pass": False, "status": "fail", "reason": "wrong answer"}
  wrong |= {"response": "\x1b[2J" + 9 * "9"}
  bare = {"task": "m", "pass": False, "status": "fail", "reason": ""}
  lines = "  pass  m: 3 + 5?\n    -> 8", "  fail  m: 3 + 5?\n    ->  [2J99..."
  assert record.pair([bare, wrong, right, wrong], 6).splitlines() == [
    *lines[0].splitlines(), "  fail  m: 3 + 5?",
    "    ->  [2J99...  (wrong ...)",
  ]  # fmt: skip
  assert record.pair([bare, right], 6) == lines[0]
  assert record.pair([bare], 6) == ""


@pytest.mark.parametrize("step, done", [(1, -1), (3, 2), (4, 2), (9, 2)])
def test_a_trace_of_a_step_is_written(wired, tmp_path, monkeypatch, step, done):
  calls, traced = [], []
  tell = lambda what: lambda *_: calls.append((what, recorder._last))
  monkeypatch.setattr(jax.profiler, "start_trace", tell("begin"))
  monkeypatch.setattr(jax.profiler, "stop_trace", tell("end"))
  if done >= 0:
    lines_of(tmp_path, done)
  recorder = made(wired, tmp_path, profile_step=step)
  recorder.measure = lambda *_: traced.append(recorder._tracing) or measure()
  recorder.start(done)
  if done < 0:
    recorder.evaluate(0, None)
  for i in range(max(done, 0) + 1, 5):
    recorder.evaluate(i, None)
    recorder.step(i, {"reward/mean": 0.5}, wired.kept, drawn(wired.kept))
  recorder.close()
  # The evaluation at the end of the step is not in it.
  assert calls == [("begin", step - 1), ("end", step - 1)] * (step < 5)
  assert traced and not any(traced)


def test_a_trace_that_fails_is_a_warning(wired, tmp_path, monkeypatch):
  def full(*_):
    raise RuntimeError("no space\nleft")

  monkeypatch.setattr(jax.profiler, "start_trace", lambda *_: None)
  monkeypatch.setattr(jax.profiler, "stop_trace", full)
  recorder = start_at(wired, tmp_path, 2, profile_step=3)
  recorder.step(3, {"reward/mean": 0.5}, wired.kept, drawn(wired.kept))
  recorder.close()
  assert timeless(tmp_path)[-1]["why"] == "--profile_step: no space"


def test_record_keeps_events_once(wired, tmp_path, capsys):
  lines_of(tmp_path, 2)
  recorder = made(wired, tmp_path)
  recorder.start(2)
  for step in (1, 2, 3):
    recorder.event(step, {"event": "reference reset", "why": "KL"})
  recorder.close()
  assert "step 3/60  reference reset: KL\n" in capsys.readouterr().err
  # Killed before step 3 was saved; resumed with another config.
  recorder = made(wired, tmp_path, changed={"n": 512})
  recorder.start(2)
  recorder.event(3, {"event": "phase", "changed": {"n": 32}})
  recorder.close()
  assert "step 3/60  phase: changed: {'n': 32}\n" in capsys.readouterr().err
  reset = {"event": "reference reset", "why": "KL"}
  resume = {"event": "resume", "again": 0, **this_process()}
  assert timeless(tmp_path) == [
    {"step": 2, **resume, "after": None}, {"step": 1, **reset},
    {"step": 2, **reset}, {"step": 2, **resume, "after": NO_WORD},
    {"step": 2, "event": "config", "changed": {"n": 512}},
    {"step": 3, "event": "phase", "changed": {"n": 32}},
  ]  # fmt: skip


def start_at(wired, tmp_path, done, **more):
  """A record that was started, of a run with two lines if it goes on."""
  if done >= 0 and not (tmp_path / "metrics.jsonl").exists():
    lines_of(tmp_path, done)
  recorder = made(wired, tmp_path, **more)
  recorder.start(done)
  return recorder


@pytest.mark.parametrize("error, stopped, last, why, status", [
  (None, False, 60, "done", 0),
  (None, False, 4, "done: run.max_samples is reached", 0),
  (None, True, 4, "stopped by SIGTERM or SIGHUP", 75),
  (UserError("no space"), False, 4, "no space", 2),
  (OSError(5, "I/O error", "x"), False, 4, "OSError: x: I/O error", 1),
])  # fmt: skip
def test_why_a_run_ends_is_recorded(
  wired, tmp_path, error, stopped, last, why, status
):
  recorder = start_at(wired, tmp_path, 2)
  with contextlib.suppress(Exception), recorder:
    recorder.step(last, {"reward/mean": 0.5}, wired.kept, drawn(wired.kept))
    recorder.stopped = stopped
    if error is not None:
      raise error
  *_, resume, end = metrics.read_lines(tmp_path / "events.jsonl")
  assert end.items() >= {"step": last, "event": "end",
    "why": why, "status": status, **this_process()}.items()  # fmt: skip
  assert resume["event"] == "resume"


def test_an_end_within_a_step_is_recorded_once_files_are_open(wired, tmp_path):
  lines_of(tmp_path, 2)
  recorder = made(wired, tmp_path)
  recorder.cut("interrupted", 130)
  assert not (tmp_path / "events.jsonl").exists()
  recorder.start(2)
  recorder.cut("interrupted", 130)
  recorder.close()
  end = metrics.read_lines(tmp_path / "events.jsonl")[-1]
  ended = {"event": "end", "why": "interrupted", "status": 130}
  assert end.items() >= ended.items()


def test_a_warning_or_a_full_disk_ends_nothing(wired, tmp_path, monkeypatch):
  recorder = start_at(wired, tmp_path, 2)
  recorder.warn("the disk is slow")
  line = metrics.read_lines(tmp_path / "events.jsonl")[-1]
  assert (line["event"], line["why"]) == ("warning", "the disk is slow")

  def full(*_):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(recorder._events, "write", full)
  recorder.warn("the disk is full")
  recorder.close()


def test_a_start_says_which_lines_of_data_are_left_out(wired, tmp_path):
  found = {"left_out": ["a.jsonl, line 3: no prompt", "a.jsonl, line 9: x"]}
  recorder = made(wired, tmp_path, entries=found)
  recorder.start(-1)
  recorder.close()
  start, data = timeless(tmp_path)
  assert (start["step"], start["event"]) == (0, "start")
  assert (data["event"], data["count"]) == ("data", 2)
  assert mentions(data["why"], "2 lines ... a.jsonl, line 3: no prompt")


def test_the_last_step_of_a_run_that_its_numbers_end_is_kept(wired, tmp_path):
  kept = wired.kept
  credit = wired.stages.advantages(kept, RunState())
  none = jax.tree.map(lambda x: x[:0], kept)
  empty = np.zeros((0, kept.scores.reward.shape[1]), np.float32)
  recorder = start_at(wired, tmp_path, -1)
  recorder.dump(7, kept, credit, kept)
  # Where no group was kept, all that were drawn.
  recorder.dump(8, none, Credit(empty, empty > 0, RunState(), {}), kept)
  recorder.close()
  drawn = np.load(tmp_path / "stopped" / "step_8.npz")
  np.testing.assert_array_equal(drawn["reward"], kept.scores.reward)
  assert "advantage" not in drawn and "counts" not in drawn
  saved = np.load(tmp_path / "stopped" / "step_7.npz")
  out, at = kept.rollouts, 0
  for p, n in np.ndindex(saved["length"].shape):
    length = saved["length"][p, n]
    for name, want in (("tokens", out.tokens), ("logp", out.logp)):
      np.testing.assert_array_equal(
        saved[name][at : at + length], want[p, n][out.mask[p, n]]
      )
    at += length
  assert at == len(saved["tokens"]) == out.mask.sum()
  np.testing.assert_array_equal(saved["advantage"], credit.advantage)
  np.testing.assert_array_equal(saved["reward"], kept.scores.reward)


def test_replaced_workers_are_one_event_of_a_step(wired, tmp_path):
  ended = iter([{"late": 2, "it died": 1}, {}])
  recorder = start_at(wired, tmp_path, 2, replaced=lambda: next(ended))
  for step in (3, 4):
    recorder.step(step, {"reward/mean": 0.5}, wired.kept, drawn(wired.kept))
  recorder.close()
  _, event = timeless(tmp_path)
  assert event == {
    "step": 3, "event": "workers", "count": 3, "why": "2 x late; 1 x it died",
  }  # fmt: skip
  lines = metrics.read_lines(tmp_path / "metrics.jsonl")[2:]
  assert [line["score/replaced_workers"] for line in lines] == [3, 0]


def test_answers_that_nobody_judged_are_an_event_of_the_step(wired, tmp_path):
  sampled, hung = drawn(wired.kept), Verdict("invalid", 0.0, "late", "")
  scores = sampled.groups.scores
  responses = scores.responses.copy()
  responses[:, 0] = [
    dataclasses.replace(one, verdict=hung) for one in responses[:, 0]
  ]
  scores = scores._replace(responses=responses)
  groups = sampled.groups._replace(scores=scores)
  recorder = start_at(wired, tmp_path, 2)
  sampled = dataclasses.replace(sampled, groups=groups)
  recorder.step(3, {"reward/mean": 0.5}, wired.kept, sampled)
  recorder.close()
  event = timeless(tmp_path)[-1]
  wanted = {"step": 3, "event": "unjudged", "why": "late"}
  wanted |= {"count": len(responses), "of": responses.size}
  assert event.items() >= wanted.items()


def curve_line(rates, n=16):
  return {"rates": rates, "summary": {"all": {"samples": n}}}


def test_answering_more_of_fewer_prompts_is_an_inversion():
  """Of 40 prompts all were right now and then; 25 are always right now."""
  before = curve_line([0.1] * 40)
  said = record.inversion(before, curve_line([1.0] * 25 + [0.0] * 15))
  assert mentions(said, ".100 ... .625 ... right one of 16 ... 1.000 ... 0.625")
  assert mentions(said, "configs/need.py ... sampling.n ... 'maxrl'")
  for after in (
    [1.0] * 40,  # none was lost
    [0.17] * 25 + [0.0] * 15,  # more are right within the interval alone
    [1.0] * 39 + [0.0],  # one prompt is within the interval: 2.5 +- 4.9 %
    [1.0],  # other prompts
  ):
    assert record.inversion(before, curve_line(after)) is None
  assert record.inversion(curve_line([0.1]), curve_line([1.0])) is None


def test_an_inversion_is_an_event_of_its_evaluation(wired, tmp_path):
  def measured(step, *_):
    """Of 20 prompts the first of 2 is right, then both of the first 15."""
    for p, (n, x) in itertools.product(range(20), enumerate(*measure())):
      good = p < 15 if step else n == 0
      status = {"pass": good, "status": "pass" if good else "fail"}
      yield [x | status | {"id": f"q{p}", "sample": n}]

  with made(wired, tmp_path) as recorder:
    recorder.measure = measured
    recorder.start(-1)
    for step in (0, 1, 2):
      recorder.evaluate(step, None)
  found = [x for x in timeless(tmp_path) if x["event"] == "inversion"]
  assert [x["step"] for x in found] == [1, 2]  # both against the start
  assert mentions(found[0]["why"], "0.500 to 0.750 ... 1.000 to 0.750")


class Files(Recorder):
  """Notes what is asked of the files."""

  def _start(self, done):
    self._asked("start")

  def _evaluated(self, step, found):
    self._asked([one["sample"] for one in found])
    return 0.75


@pytest.fixture
def files(wired, tmp_path):
  """A record whose files nobody has opened, and what is asked of them."""
  asked = []
  made = Files(wired.run.config, tmp_path, wired.examples, [], measure, {}, {})
  made._asked = asked.append
  made._covered = SimpleNamespace(lacks=lambda step: "no line")
  return made, asked


def test_process_0_has_the_files(files):
  recorder, asked = files
  assert [recorder.lacks(3), recorder.evaluate(3, None)] == ["no line", 0.75]
  recorder.start(3)
  assert asked == [[0, 1], "start"]


def test_another_process_only_measures_and_is_told(files, wired, monkeypatch):
  told, got = iter([None, "no line", 0.75]), []
  monkeypatch.setattr(processes, "leads", lambda: False)
  monkeypatch.setattr(processes, "first", lambda x: got.append(x) or next(told))
  (recorder, asked), kept = files, wired.kept
  assert not recorder.started
  recorder.start(3)
  assert [recorder.lacks(3), recorder.evaluate(3, None)] == ["no line", 0.75]
  recorder.event(3, {"event": "skip"})
  recorder.step(3, {}, kept, drawn(kept))
  recorder.dump(3, kept, wired.stages.advantages(kept, RunState()), kept)
  recorder.sync()
  assert recorder.started and got == [None, None, 0.0]
  assert asked == [] == [*recorder.workdir.iterdir()]


END = {"event": "end", "why": "no space"}
BEGUN = {"event": "start", "step": 2, "memory_kills": {"mine": 1, "gone": 9}}
BEGUN |= {"planned_bytes": 3 * 2**30, "available_bytes": 4 * 2**30}


@pytest.mark.parametrize("lines, said", [
  ([], None), ([{"event": "phase"}, {"event": "warning", "why": "x"}], None),
  ([{"event": "start"}], NO_WORD), ([{"event": "start"}, END], "no space"),
  ([{"event": "start"}, END, {"event": "warning", "why": "x"}], "no space"),
  ([{"event": "start"}, END, {"event": "resume"}], NO_WORD),
  ([BEGUN, END], "no space"),
  ([BEGUN], NO_WORD),  # a plain kill, or power was lost
  ([BEGUN | {"memory_kills": {"mine": 0}}],
   f"{KILLED}: it planned 3.00 GiB of 4.00 GiB and used 3.70 GiB in its "
   "steps; --allow_config_change --config.devices.memory_bytes=2415919104 "
   "plans less, or says what must be smaller"),
  ([BEGUN | {"available_bytes": int(3.8 * 2**30)}], "of 3.80 GiB and used"),
  ([BEGUN | {"memory_kills": {"mine": 0}, "step": 9}], "of 4.00 GiB; --all"),
  ([BEGUN | {"available_bytes": 2**30, "step": 9}], NO_WORD),
])  # fmt: skip
def test_the_last_word_of_a_process(tmp_path, monkeypatch, lines, said):
  monkeypatch.setattr(spec, "memory_kills", lambda: {"mine": 1, "new": 7})
  path = tmp_path / "events.jsonl"
  path.write_text("".join(json.dumps(x) + "\n" for x in lines))
  steps = [{"step": 3, "memory/peak_bytes": int(3.7 * 2**30)}, {"step": 4}]
  (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)))
  found = record.last_word(path)
  assert found == said or (said and said in found)
