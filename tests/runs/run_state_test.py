"""Tests of brorl_jax/runs/run_state.py."""

import dataclasses
import json

import pytest

from brorl_jax.runs import lines, run_state
from brorl_jax.runs.run_state import RunState

RESET = dict(every=0, above_kl=0.0, stalled=0)


def test_a_checkpoint_gives_back_the_same_value():
  before = RunState(
    tokens=2**40, samples=3, shaped=4, since_reset=5, resets=6, best=0.25,
    stalled=7, streak={3: 1, 11: 2}, rests={11: 30},
    seen={4: (0.5, 16.0)}, most=64, most_before=256,
  )  # fmt: skip
  after = RunState.from_json(json.loads(json.dumps(before.to_json())))
  assert after == before
  assert run_state.resting(after, 29) == {11}  # numbers, not text


def test_counts_add_up():
  one = run_state.generated(
    RunState(tokens=5, samples=1), tokens=7, samples=2, prompts=3
  )
  assert (one.tokens, one.samples) == (12, 3)


def test_earlier_visits_count_less():
  one = run_state.remembered(RunState(), [3, 5], [4, 0], [16, 64], forget=0.5)
  assert one.seen == {3: (4.0, 16.0), 5: (0.0, 64.0)}
  two = run_state.remembered(one, [3], [16], [16], forget=0.5)
  assert two.seen == {3: (18.0, 24.0), 5: (0.0, 64.0)}


@pytest.mark.parametrize(
  "seen", [{"3": [1]}, {"a": [1, 2]}, {"3": ["1", 2]}, [1], {"3": 4}]
)
def test_what_is_no_visit_is_damage(seen):
  with pytest.raises(lines.Damaged, match="'seen'"):
    RunState.from_json({**RunState().to_json(), "seen": seen})


def visit(was, step, **kept):
  numbers = {"a": 0, "b": 1}
  return run_state.visited(
    was,
    step,
    [numbers[k] for k in kept],
    list(kept.values()),
    rest_after=2,
    rest_steps=3,
  )


def test_a_prompt_rests_after_visits_in_a_row_without_a_gradient():
  one = visit(RunState(), 1, a=False, b=False)
  assert run_state.resting(one, 2) == set()
  two = visit(one, 2, a=False, b=True)
  # a rests for steps 3, 4 and 5.
  assert [run_state.resting(two, s) for s in (3, 4, 5, 6)] == [
    {0},
    {0},
    {0},
    set(),
  ]
  three = visit(two, 3, b=False)
  assert run_state.resting(three, 4) == {0}  # b began anew with step 2
  four = visit(three, 6, a=False)
  # One more is enough after a rest, and it is as long.
  assert [run_state.resting(four, s) for s in (7, 9, 10)] == [{0}, {0}, set()]
  five = visit(four, 10, a=True)
  six = visit(five, 11, a=False)
  assert run_state.resting(six, 12) == set()
  assert 0 not in five.streak and 0 not in five.rests


def test_without_a_schedule_nothing_rests():
  one = run_state.visited(
    RunState(), 1, [0], [False], rest_after=0, rest_steps=3
  )
  assert one == RunState()


def test_a_value_is_not_changed_in_place():
  before = visit(RunState(), 1, a=False)
  copy = dataclasses.replace(before, streak=dict(before.streak))
  visit(before, 2, a=False)
  assert before == copy


def test_stalls_are_counted_from_the_best_score():
  one = RunState()
  stalls = []
  for score in (0.2, 0.3, 0.3, 0.25, 0.31, 0.1):
    one = run_state.evaluated(one, score)
    stalls.append(one.stalled)
  assert stalls == [0, 0, 1, 2, 0, 1] and one.best == 0.31


@pytest.mark.parametrize(
  "rule, since, kl, stalled, why",
  [
    ({}, 999, 9.0, 9, None),
    ({"every": 5}, 4, 9.0, 9, None),
    ({"every": 5}, 5, None, 0, "5 steps"),
    ({"above_kl": 0.5}, 1, 0.5, 9, None),
    ({"above_kl": 0.5}, 1, 0.51, 0, "KL 0.51 above 0.5"),
    ({"above_kl": 0.5}, 1, None, 0, None),
    ({"stalled": 3}, 1, 9.0, 2, None),
    ({"stalled": 3}, 1, 0.0, 3, "no better score in 3 evaluations"),
  ],
)
def test_why_the_reference_is_reset(rule, since, kl, stalled, why):
  now = RunState(since_reset=since, stalled=stalled)
  assert run_state.reset_reason(now, kl, **RESET | rule) == why


def test_after_a_reset_all_triggers_start_anew():
  was = RunState(tokens=9, since_reset=5, resets=1, best=0.7, stalled=3)
  now = run_state.was_reset(was)
  assert now == RunState(tokens=9, resets=2)
  assert run_state.evaluated(now, 0.1).best == 0.1


def test_fields_that_no_run_saves_are_named():
  saved = RunState().to_json() | {"dreams": 3, "naps": 4}
  del saved["tokens"]
  with pytest.raises(lines.Damaged, match=r"see dreams, naps, tokens"):
    RunState.from_json(saved)


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
    {"streak": []},
    {"streak": {"a": 1}},
    {"rests": {"1": None}},
  ],
)
def test_a_value_of_a_wrong_type_is_damage(change):
  saved = RunState(best=0.5, streak={3: 1}).to_json()
  assert RunState.from_json(json.loads(json.dumps(saved))).best == 0.5
  with pytest.raises(lines.Damaged, match=next(iter(change))):
    RunState.from_json({**saved, **change})
  with pytest.raises(lines.Damaged, match="not a JSON object"):
    RunState.from_json([saved])
