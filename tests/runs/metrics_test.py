"""Tests of brorl_jax/runs/metrics.py."""

import dataclasses
import math
import os
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scored
from jax._src import monitoring
from tensorboardX import proto

from brorl_jax.runs import metrics
from brorl_jax.types import Groups, Prompts, Rollouts, Scores


def events(workdir):
  for file in sorted(workdir.glob("events.out.tfevents.*")):
    data = file.read_bytes()
    at = 0
    while at < len(data):
      size = int.from_bytes(data[at : at + 8], "little")
      yield proto.event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
      at += 12 + size + 4


def scalars_of(workdir) -> dict[tuple[str, int], float]:
  """What TensorBoard shows: a start marker drops what an older file has."""
  shown = {}
  for event in events(workdir):
    if event.session_log.status == proto.event_pb2.SessionLog.START:
      shown = {k: v for k, v in shown.items() if k[1] < event.step}
    for value in event.summary.value:
      shown[value.tag, event.step] = value.simple_value
  return shown


def test_a_writer_writes_each_scalar_everywhere(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(metrics, "_FEW_STEPS", 0)
  writer = metrics.Writer(tmp_path, after=-1, steps=3)
  writer.write_evaluation(0, {"eval/pass_at_1": 0.125})
  writer.write_scalars(1, {"reward/mean": 0.25, "policy/kl_ref": None})
  writer.write_scalars(2, {"reward/mean": 0.5, "policy/kl_ref": 0.75})
  writer.write_scalars(3, {})
  writer.close()
  assert (tmp_path / "metrics.jsonl").read_text().splitlines() == [
    '{"step": 1, "reward/mean": 0.25, "policy/kl_ref": null}',
    '{"step": 2, "reward/mean": 0.5, "policy/kl_ref": 0.75}', '{"step": 3}',
  ]  # fmt: skip
  assert scalars_of(tmp_path) == {
    ("eval/pass_at_1", 0): 0.125, ("reward/mean", 1): 0.25,
    ("reward/mean", 2): 0.5, ("policy/kl_ref", 2): 0.75,
  }  # fmt: skip
  said = capsys.readouterr()
  assert said.out == ""
  assert "\x1b" not in said.err  # plain: not a terminal
  first, second, third = said.err.splitlines()
  assert first == "step 0/3  held-out pass@1 0.125"
  assert second.startswith("step 1/3  reward 0.250  ")
  assert third.startswith("step 3/3  ")  # 2 came too soon


def test_tensorboard_has_histograms_and_texts(tmp_path, capsys):
  rollouts, reward, _ = example()
  valid = np.array([[True, True, False], [True] * 3])
  reward[1, 0] = 0.5  # in part
  ids = np.ones((2, 1), np.int32)
  prompts = Prompts(ids, ids > 0, np.arange(2, dtype=np.int32))
  groups = Groups(prompts, rollouts, scored.scores(reward, valid=valid))
  histograms = metrics.histograms(groups)
  writer = metrics.Writer(tmp_path, after=-1, steps=3)
  writer.write_scalars(1, {"x": 0.5}, histograms)
  writer.write_evaluation(1, {"eval/pass_at_1": 0.5}, "  short [b]", "a\n**b")
  writer.close()
  shown = {v.tag: v for event in events(tmp_path) for v in event.summary.value}
  histo = {name: shown[name].histo for name in histograms}
  assert {name: (x.num, x.sum) for name, x in histo.items()} == {
    "histogram/reward": (5, 2.5), "histogram/length": (6, 9),
    "histogram/pass_rate": (2, pytest.approx(2 / 3)),
  }  # fmt: skip
  (text,) = (v for k, v in shown.items() if k.startswith("eval/samples"))
  assert text.tensor.string_val == [b"    a\n    **b"]  # as it is
  _, *said = capsys.readouterr().err.splitlines()
  assert said == ["step 1/3  held-out pass@1 0.500", "  short [b]"]
  lines = metrics.read_lines(tmp_path / "metrics.jsonl")
  assert lines == [{"step": 1, "x": 0.5}]
  nothing = groups._replace(scores=scored.scores(reward, valid=valid & False))
  assert "histogram/reward" not in metrics.histograms(nothing)


def test_a_resumed_writer_takes_back_what_was_not_saved(tmp_path, capsys):
  first = metrics.Writer(tmp_path, after=-1, steps=3)
  for step in (1, 2, 3):
    first.write_scalars(step, {"x": float(step)})
  first.close()
  for file in tmp_path.glob("events*"):
    file.rename(f"{file}.older")  # the names hold seconds
  second = metrics.Writer(tmp_path, after=1, steps=3)
  second.write_scalars(2, {"x": 20.0})
  second.close()
  assert capsys.readouterr().err.count("\n") == 4  # a short run tells each
  steps = [x["step"] for x in metrics.read_lines(tmp_path / "metrics.jsonl")]
  assert steps == [1, 2]
  new = [p for p in tmp_path.glob("events*") if p.suffix != ".older"]
  for file in new:
    file.rename(f"{tmp_path}/events.out.tfevents.z")
  assert scalars_of(tmp_path) == {("x", 1): 1.0, ("x", 2): 20.0}


def test_time_left_is_told_from_the_steps_of_this_process(monkeypatch, capsys):
  clock = iter([100.0, 110.0])
  monkeypatch.setattr(metrics.time, "monotonic", lambda: next(clock))
  progress = metrics.Progress(after=4, steps=9)
  scalars = {"reward/mean": 0.5, "rollout/tokens_per_s": 12345.6}
  scalars |= {"time/cpu_s": 7.26, "time/cores": 1.44}
  monkeypatch.setattr(metrics.processes, "cores", lambda: range(4))
  progress.step(5, metrics.numbers(scalars))
  assert capsys.readouterr().err == (
    "step 5/9  reward 0.500  tokens/s 12,346  7.3 CPU-s  1.4 of 4 cores  "
    "10 s, 40 s left\n"
  )


def example() -> tuple[Rollouts, np.ndarray, np.ndarray]:
  """Two prompts, three rollouts of at most two tokens; 9 is the end token."""
  tokens = np.array([[[5, 9], [5, 9], [4, 7]], [[9, 0], [9, 0], [9, 0]]])
  mask = np.array([[[1, 1], [1, 1], [1, 1]], [[1, 0], [1, 0], [1, 0]]], bool)
  p = np.array([[[0.5, 0.5]] * 2 + [[0.5, 0.2]], [[0.125, 1.0]] * 3])
  rollouts = Rollouts(
    tokens=tokens.astype(np.int32), logp=np.log(p).astype(np.float32),
    mask=mask, truncated=np.array([[False, False, True], [False] * 3]),
    slot_steps=np.array([2.0, 2.0], np.float32),
  )  # fmt: skip
  reward = np.array([[1, 1, 0], [0, 0, 0]], np.float32)
  return rollouts, reward, np.array([True, False])


def test_numbers_of_a_step_by_hand():
  rollouts, reward, kept = example()
  answered = scored.scores(reward, [[0, 1, 1], [3, 3, 3]])
  got = metrics.group_metrics(rollouts, answered, kept, rollout_s=0.5)
  assert got.pop("memory/peak_bytes") > 10e6
  wanted = {
    "reward/mean": 2 / 6, "reward/std_within_group": (2 / 9) ** 0.5 / 2,
    "reward/variance_within_group": (2 / 9) / 2, "sampling/pass_rate": 0.5,
    "sampling/degenerate_fraction": 0.5, "sampling/rollouts_per_prompt": 3.0,
    "sampling/won": 0.5,  # 2 of 3
    "sampling/alive": 0.0, "sampling/missed": 0.5, "rollout/tokens_per_s": 18.0,
    "rollout/samples_per_s": 12.0, "rollout/slot_occupancy": 0.75,
    "rollout/length_mean": 1.5, "rollout/truncated_fraction": 1 / 6,
    "rollout/entropy": -math.log(0.5**5 * 0.2 * 0.125**3) / 9,
    "reward/distinct_answers": 1.5,
    "theory/correct_mass": 0.125,  # 1/4 once, and nothing of the second
  }  # fmt: skip
  assert got == pytest.approx(wanted, rel=1e-6)
  assert all(type(value) is float for value in got.values())


def test_empty_places_count_nowhere():
  """The second prompt has one rollout and two places without one."""
  rollouts, reward, kept = example()
  empty = np.array([[False] * 3, [False, True, True]])
  rollouts = dataclasses.replace(
    rollouts, tokens=np.where(empty[..., None], 0, rollouts.tokens),
    logp=np.where(empty[..., None], 0.0, rollouts.logp).astype(np.float32),
    mask=rollouts.mask & ~empty[..., None],
  )  # fmt: skip
  assert [x.tolist() for x in rollouts.distinct(1)] == [[0], [1]]
  assert [x.tolist() for x in rollouts.distinct(0)] == [[0, 2], [2, 1]]
  assert rollouts.slot_occupancy() == pytest.approx(3 / 4)  # of 7 tokens
  answered = scored.scores(reward, [[0, 1, 1], [3, 0, 0]], valid=~empty)
  responses = np.where(empty, None, answered.responses)
  answered = answered._replace(responses=responses)
  got = metrics.group_metrics(rollouts, answered, kept, rollout_s=0.5)
  wanted = {"sampling/rollouts_per_prompt": 2.0,
    "rollout/length_mean": 7 / 4, "rollout/truncated_fraction": 1 / 4,
    "rollout/samples_per_s": 8.0, "reward/distinct_answers": 1.5,
    "reward/mean": 2 / 4, "theory/correct_mass": 0.25 / 2}  # fmt: skip
  assert {name: got[name] for name in wanted} == pytest.approx(wanted)
  told = metrics.score_metrics(answered, score_s=2.0)
  assert told["reward/invalid_fraction"] == 0.0
  assert told["score/verdicts_per_s"] == 2.0
  assert told["reward/strict_mean"] == pytest.approx(2 / 4)


def test_prompts_are_won_alive_or_missed():
  """By what they drew; partly right is wrong, a half is not more than half."""
  reward = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0], [0.9] * 4])
  drawn = np.ones((4, 4), bool)
  drawn[2, 1:] = False  # one of one
  out = scored.rollouts(np.zeros((4, 4, 1)), drawn[..., None])
  answered = scored.scores(reward.astype(np.float32), valid=drawn)
  got = metrics.group_metrics(out, answered, np.ones(4, bool), rollout_s=1.0)
  shares = [got[f"sampling/{name}"] for name in ("won", "alive", "missed")]
  assert shares == [0.25, 0.5, 0.25]


@pytest.mark.parametrize("reward, valid, degenerate", [
  ([[0.1, 0.1, 0.1], [1, 1, 1]], True, 1.0),  # whose mean is rounded
  ([[0.1, 0.1, 0.2], [1, 0, 1]], True, 0.0),
  # What could not be judged, reward 0, tells nothing.
  ([[1, 1, 0], [1, 0, 0]], [[True, True, False], [True, True, False]], 0.5),
  ([[1, 0, 0], [1, 0, 1]], [[True, False, False], [False] * 3], 1.0),
  ([[1, 1, 5], [1, 1, -5]], [[True, True, False]] * 2, 1.0),
])  # fmt: skip
def test_a_group_of_equal_rewards_is_degenerate(reward, valid, degenerate):
  rollouts, _, _ = example()
  valid = np.broadcast_to(valid, (2, 3))
  scores = scored.scores(np.array(reward, np.float32), valid=valid)
  for kept in (True, False):
    both = np.array([kept, kept])
    got = metrics.group_metrics(rollouts, scores, both, rollout_s=1.0)
    assert got["sampling/degenerate_fraction"] == degenerate
    assert got["sampling/pass_rate"] == kept


def test_correct_mass_counts_distinct_right_responses_once():
  rollouts, reward, _ = example()
  of = lambda reward: metrics.correct_mass(rollouts, reward)
  np.testing.assert_allclose(of(reward), [0.25, 0.0])
  both = np.ones((2, 3), np.float32)  # equal responses, equal rewards
  np.testing.assert_allclose(of(both), [0.35, 0.125], rtol=1e-6)
  partial = np.array([[0.9, 0.5, 0.1], [0.0, 0.0, 0.99]], np.float32)
  np.testing.assert_array_equal(of(partial), [0.0, 0.0])


def test_correct_mass_sums_long_responses_exactly():
  """A probability of 1e-40 is not 0 in float64."""
  rollouts = scored.rollouts(np.ones((1, 2, 100)), logp=np.log(0.4))
  got = metrics.correct_mass(rollouts, np.ones((1, 2), np.float32))
  np.testing.assert_allclose(got, [0.4**100], rtol=1e-4)


@pytest.mark.parametrize("scalars, names", [
  ({"a": 1.0, "b": None, "c": 0}, []),
  ({"a": 1.0, "b": math.nan, "c": math.inf}, ["b", "c"]),
  ({"a": 1.0, "b": -math.inf}, ["b"]),
])  # fmt: skip
def test_numbers_that_are_not_finite_become_null_and_are_named(scalars, names):
  good, bad = metrics.only_finite(scalars)
  assert bad == names
  assert good == {k: None if k in names else x for k, x in scalars.items()}


def test_verdicts_of_a_step_by_hand():
  some = scored.scores([[1.0, 0.5, 0.0], [0.25, 0.0, 0.0]],
    valid=[[True, True, False], [True, True, True]], task="gcd")  # fmt: skip
  other = scored.scores([[1.0, 1.0, 1.0]], task="lcm")
  both = Scores(*map(np.concatenate, zip(some, other, strict=True)))
  wanted = {"reward/strict_mean": 4 / 8,
    "reward/invalid_fraction": 1 / 9, "score/verdicts_per_s": 4.5,
    "reward/by_task/gcd": 1.75 / 5, "reward/by_task/lcm": 1.0}  # fmt: skip
  assert metrics.score_metrics(both, score_s=2.0) == pytest.approx(wanted)


def test_a_task_that_nobody_could_judge_has_no_reward():
  none = scored.scores([[0.0, 0.0]], valid=[[False] * 2], task="gcd")
  other = scored.scores([[1.0, 0.0]], task="lcm")
  both = Scores(*map(np.concatenate, zip(none, other, strict=True)))
  got = metrics.score_metrics(both, score_s=1.0)
  assert "reward/by_task/gcd" not in got and got["reward/by_task/lcm"] == 0.5


def test_rewards_of_a_step_are_of_what_could_be_judged():
  rollouts, reward, kept = example()
  valid = np.array([[True, True, True], [False] * 3])
  judged = scored.scores(reward, valid=valid)
  got = metrics.group_metrics(rollouts, judged, kept, rollout_s=1.0)
  assert got["reward/mean"] == pytest.approx(2 / 3)
  assert got["reward/std_within_group"] == pytest.approx((2 / 9) ** 0.5)


def test_tensorboard_neither_ends_nor_delays_runs(tmp_path, capfd, monkeypatch):
  """Its disk is full, the clock goes back, and a value has no histogram."""
  threads = threading.active_count()
  writer = metrics.Writer(tmp_path, after=-1, steps=9)
  (name,) = (str(p) for p in tmp_path.glob("events.out.tfevents.*"))
  (at,) = (int(fd) for fd in os.listdir("/proc/self/fd")
    if os.path.realpath(f"/proc/self/fd/{fd}") == name)  # fmt: skip
  full = os.open("/dev/full", os.O_WRONLY)
  os.dup2(full, at)
  os.close(full)
  for step in range(1, 5):
    monkeypatch.setattr(time, "time", lambda at=step: 2e9 - 1e8 * at)
    odd = {"histogram/reward": np.array([np.inf, 1.0])}
    writer.write_scalars(step, {f"x{i}": 1.0 for i in range(99)}, odd)
  writer.close()
  assert len(metrics.read_lines(tmp_path / "metrics.jsonl")) == 4
  assert threading.active_count() == threads
  assert "Traceback" not in capfd.readouterr().err


def test_time_since():
  begin = metrics.now()
  end = time.process_time() + 0.1
  while time.process_time() < end:
    pass
  spent = metrics.since(begin)
  assert 0.1 <= spent["time/cpu_s"] < 5.0
  assert spent["time/step_s"] >= 0.09 and spent["time/compile_s"] == 0.0


def test_busy_are_the_processor_or_the_wall(monkeypatch):
  clock = metrics.Clock(9.0, 30.0, 5.0, 6.0)
  monkeypatch.setattr(metrics, "now", lambda: clock)
  # 8 of the wall, 3 of them compiling; 20 of cores, 2 of them compiling.
  begin = metrics.Clock(1.0, 10.0, 2.0, 4.0)
  spent = metrics.since(begin)
  assert spent["time/cpu_s"] == spent["time/busy_s"] == 18.0
  assert spent["time/cores"] == 2.5
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  spent = metrics.since(begin)
  assert (spent["time/cpu_s"], spent["time/busy_s"]) == (18.0, 5.0)


def compile_something(size):
  many = lambda x: sum(jnp.sin(x * i) @ x for i in range(30))
  jax.jit(many).lower(jnp.ones((size, size))).compile()


def test_a_compilation_begins_where_its_lowering_ends(monkeypatch):
  at = lambda s: monkeypatch.setattr(metrics.time, "process_time", lambda: s)
  compiler = types.SimpleNamespace(wall=0.0, process=0.0, lowered=0.0)
  monkeypatch.setattr(metrics, "_compiler", compiler)
  at(3.0)  # 2 s of the processor for the lowering, then 5 s for the compilation
  metrics._on_event("/jax/core/compile/jaxpr_to_mlir_module_duration", 2.5)
  at(8.0)
  metrics._on_event("/jax/core/compile/backend_compile_duration", 4.0)
  assert (compiler.wall, compiler.process) == (4.0, 5.0)
  metrics._on_event("/jax/core/compile/jaxpr_trace_duration", 1.0)
  assert (compiler.wall, compiler.process) == (4.0, 5.0)


def test_compiling_is_counted_once_and_only_where_it_is_asked_for():
  before = monitoring.get_event_duration_listeners()
  begin = metrics.now()
  compile_something(8)
  assert metrics.since(begin)["time/compile_s"] == 0.0
  with metrics.counting():
    begin = metrics.now()
    compile_something(7)
    end, spent = metrics.now(), metrics.since(begin)
    assert 0.0 < spent["time/compile_s"] <= spent["time/step_s"]
    # Of a program: its lowering is not compiling, and both took the processor.
    compiling = end.compiling_process - begin.compiling_process
    assert 0.0 < compiling < end.process - begin.process
    (listener,) = set(monitoring.get_event_duration_listeners()) - set(before)
    assert monitoring.get_event_duration_listeners().count(listener) == 1
  assert monitoring.get_event_duration_listeners() == before
  with pytest.raises(KeyError), metrics.counting():
    raise KeyError
  assert monitoring.get_event_duration_listeners() == before
