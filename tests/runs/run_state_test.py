"""Tests of brorl_jax/runs/run_state.py."""

import json

import pytest

from brorl_jax.runs import lines, run_state
from brorl_jax.types import RunState

RESET = dict(every=0, stalled=0)


def test_a_checkpoint_gives_back_the_same_value():
  before = RunState(
    tokens=2**40, samples=3, shaped=4, since_reset=5, resets=6, best=0.25,
    stalled=7, grad_norms=(1.5, 2.0), usual={"kl": (3, 0.5)}, beyond={"kl": 2},
  )  # fmt: skip
  after = run_state.from_json(json.loads(json.dumps(before.to_json())))
  assert after == before


def test_counts_add_up():
  one = run_state.generated(
    RunState(tokens=5, samples=1), tokens=7, samples=2, prompts=3
  )
  assert (one.tokens, one.samples) == (12, 3)


def test_stalls_are_counted_from_the_best_score():
  one = RunState()
  stalls = []
  for score in (0.2, 0.3, 0.3, 0.25, 0.31, 0.1):
    one = run_state.evaluated(one, score)
    stalls.append(one.stalled)
  assert stalls == [0, 0, 1, 2, 0, 1] and one.best == 0.31


@pytest.mark.parametrize(
  "rule, since, stalled, why",
  [
    ({}, 999, 9, None),
    ({"every": 5}, 4, 9, None),
    ({"every": 5}, 5, 0, "5 steps"),
    ({"stalled": 3}, 1, 2, None),
    ({"stalled": 3}, 1, 3, "no better score in 3 evaluations"),
  ],
)
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
  with pytest.raises(lines.Damaged, match=r"see dreams, naps, tokens"):
    run_state.from_json(saved)


@pytest.mark.parametrize(
  "change",
  [
    {"tokens": "9"},
    {"samples": None},
    {"drawn": 1.5},
    {"resets": True},
    {"best": "high"},
    {"peak_reward": "high"},
    {"grad_norms": [1.0, None]},
    {"grad_norms": 3.0},
    {"usual": {"rollout/entropy": [1]}},
    {"usual": {"rollout/entropy": [1, "x"]}},
    {"usual": [1]},
    {"beyond": {"kl": 0.5}},
    {"beyond": None},
  ],
)
def test_a_value_of_a_wrong_type_is_damage(change):
  saved = RunState(best=0.5).to_json()
  assert run_state.from_json(json.loads(json.dumps(saved))).best == 0.5
  with pytest.raises(lines.Damaged, match=next(iter(change))):
    run_state.from_json({**saved, **change})
  with pytest.raises(lines.Damaged, match="not a JSON object"):
    run_state.from_json([saved])
