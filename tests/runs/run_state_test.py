"""Tests of brorl_jax/runs/run_state.py, by hand."""

import json
import math

import pytest

from brorl_jax.config.run import Guard
from brorl_jax.runs import lines, run_state
from brorl_jax.types import RunState

START = RunState()
USUAL = {"rollout/entropy": 0.8, "reward/mean": 0.5}


def after(c, *steps, progress=START):
  alarms = []
  for changes in steps:
    progress, alarms = run_state.watched(c, progress, USUAL | changes)
  return progress, alarms


@pytest.mark.parametrize("metric, value, guard, bound", [
  ("rollout/entropy", 0.079, "entropy_low", 0.08),
  ("policy/kl_ref", 1.1, "kl", 1.0),
  ("rollout/truncated_fraction", 0.81, "truncated", 0.8),
])  # fmt: skip
def test_each_bound(metric, value, guard, bound):
  _, alarms = after(Guard(), {}, {}, {metric: value})
  (alarm,) = alarms
  assert (alarm.guard, alarm.metric, alarm.steps) == (guard, metric, 1)
  assert alarm.bound == pytest.approx(bound) and alarm.value == value
  side = "below" if guard.endswith("low") else "above"
  assert f"{metric} = {value:.3g} is {side}" in alarm.text
  # Just inside there is none, nor where the guard is off.
  inside = bound * (1.001 if side == "below" else 0.999)
  assert after(Guard(), {}, {}, {metric: inside})[1] == []
  assert after(Guard(**{guard: 0.0}), {}, {}, {metric: value})[1] == []


def test_the_reward_is_an_average_over_steps():
  mean = lambda *xs: after(Guard(), *({"reward/mean": x} for x in xs))[0].reward
  assert (mean(0.5), mean(0.5, 1.0)) == (0.5, pytest.approx(0.55))
  assert mean(0.5, 1.0, None, 0.0) == pytest.approx(0.495)


def test_the_first_step_and_what_is_not_measured_raise_nothing():
  assert after(Guard(), {"rollout/entropy": 1e-9})[1] == []
  none = dict.fromkeys([*USUAL, "policy/kl_ref"])
  progress, alarms = after(Guard(), {}, none, none)
  assert alarms == [] and progress.usual["rollout/entropy"] == (1, 0.8)
  assert progress.reward == 0.5


def test_the_usual_is_the_mean_of_the_first_twenty_steps():
  entropies = [{"rollout/entropy": 1.0 + 0.01 * i} for i in range(25)]
  progress, _ = after(Guard(), *entropies)
  count, mean = progress.usual["rollout/entropy"]
  assert count == 20 and mean == pytest.approx(1.0 + 0.01 * 9.5)


def test_an_alarm_counts_its_steps_in_a_row_and_may_end_the_run():
  c, high = Guard(end_after=3), {"policy/kl_ref": 5.0}
  progress, alarms = after(c, {}, high, high)
  assert alarms[0].steps == 2 and run_state.ends(c, alarms) is None
  _, three = after(c, high, progress=progress)
  assert run_state.ends(c, three).endswith("for 3 steps in a row")
  assert run_state.ends(Guard(), three) is None
  _, alarms = after(c, {}, high, progress=progress)
  assert alarms[0].steps == 1


@pytest.mark.parametrize("score, reward, raised", [
  (0.49, 0.9, True), (0.51, 0.9, False), (0.49, 0.2, False)
])  # fmt: skip
def test_a_held_out_score_that_falls_while_rewards_rise(score, reward, raised):
  progress, _ = after(Guard(), {})
  progress = run_state.evaluated(progress, 0.6)
  assert progress.peak_reward == 0.5
  progress = run_state.evaluated(progress, 0.55)
  more = [{"reward/mean": reward}] * 5
  progress, _ = after(Guard(), *more, progress=progress)
  progress = run_state.evaluated(run_state.was_reset(progress), score)
  _, alarms = after(Guard(), {"reward/mean": reward}, progress=progress)
  assert [a.guard for a in alarms] == (["score_drop"] if raised else [])


def test_the_score_before_the_first_step_has_no_reward():
  progress = run_state.evaluated(RunState(), 0.6)
  progress = run_state.evaluated(after(Guard(), {}, progress=progress)[0], 0.4)
  _, alarms = after(Guard(), {}, progress=progress)
  assert [a.guard for a in alarms] == ["score_drop"]


def test_a_spike_by_hand():
  norms = tuple([1.0, 1.4] * 10)  # mean 1.2, standard deviation .2
  assert run_state.most_norm(6.0, norms) == pytest.approx(2.4)  # twice the mean
  assert run_state.most_norm(8.0, norms) == pytest.approx(1.2 + 8 * 0.2)
  assert run_state.most_norm(0.0, norms) == math.inf
  assert run_state.most_norm(6.0, norms[1:]) == math.inf  # too few


def test_norms_are_kept_and_bad_steps_counted():
  progress = RunState()
  for i in range(70):
    progress = run_state.learned(progress, (float(i), i + 0.5), bad=i > 67)
  assert progress.bad == 2 and len(progress.grad_norms) == 128
  assert progress.grad_norms[0] == 6.0 and progress.grad_norms[-1] == 69.5
  assert run_state.learned(progress, (), bad=False).bad == 0


RESET = dict(every=0, stalled=0)


def test_a_checkpoint_gives_back_the_same_value():
  before = RunState(
    tokens=2**40, samples=3, shaped=4, since_reset=5, resets=6, best=0.25,
    stalled=7, grad_norms=(1.5, 2.0), usual={"kl": (3, 0.5)}, beyond={"kl": 2},
  )  # fmt: skip
  assert run_state.from_json(json.loads(json.dumps(before.to_json()))) == before


def test_stalls_are_counted_from_the_best_score():
  one = RunState()
  stalls = []
  for score in (0.2, 0.3, 0.3, 0.25, 0.31, 0.1):
    one = run_state.evaluated(one, score)
    stalls.append(one.stalled)
  assert stalls == [0, 0, 1, 2, 0, 1] and one.best == 0.31


@pytest.mark.parametrize("rule, since, stalled, why", [
  ({}, 999, 9, None), ({"every": 5}, 4, 9, None),
  ({"every": 5}, 5, 0, "5 steps"), ({"stalled": 3}, 1, 2, None),
  ({"stalled": 3}, 1, 3, "no better score in 3 evaluations"),
])  # fmt: skip
def test_why_the_reference_is_reset(rule, since, stalled, why):
  now = RunState(since_reset=since, stalled=stalled)
  assert run_state.reset_reason(now, **RESET | rule) == why


def test_after_a_reset_all_triggers_start_anew():
  was = RunState(tokens=9, since_reset=5, resets=1, best=0.7, stalled=3)
  now = run_state.was_reset(was)
  assert now == RunState(tokens=9, resets=2)
  assert run_state.evaluated(now, 0.1).best == 0.1


def test_fields_that_no_run_saves_are_named():
  saved = RunState().to_json() | {"dreams": 3, "naps": 4}
  del saved["tokens"]
  with pytest.raises(lines.Damaged, match="dreams, naps, tokens"):
    run_state.from_json(saved)
