"""Tests of brorl_jax/ledger.py."""

import dataclasses
import json

import pytest

from brorl_jax import ledger
from brorl_jax.ledger import Ledger

RESET = dict(every=0, above_kl=0.0, stalled=0)


def test_a_checkpoint_gives_back_the_same_value():
  before = Ledger(
    tokens=2**40, samples=3, shaped=4, since_reset=5, resets=6, best=0.25,
    stalled=7, streak={3: 1, 11: 2}, rests={11: 30},
  )  # fmt: skip
  after = Ledger.from_json(json.loads(json.dumps(before.to_json())))
  assert after == before
  assert ledger.resting(after, 29) == {11}  # numbers, not text


def test_counts_add_up():
  one = ledger.generated(
    Ledger(tokens=5, samples=1), tokens=7, samples=2, prompts=3
  )
  assert (one.tokens, one.samples) == (12, 3)


def visit(was, step, **kept):
  numbers = {"a": 0, "b": 1}
  return ledger.visited(
    was,
    step,
    [numbers[k] for k in kept],
    list(kept.values()),
    rest_after=2,
    rest_steps=3,
  )


def test_a_prompt_rests_after_visits_in_a_row_without_a_gradient():
  one = visit(Ledger(), 1, a=False, b=False)
  assert ledger.resting(one, 2) == set()
  two = visit(one, 2, a=False, b=True)
  # a rests for steps 3, 4 and 5.
  assert [ledger.resting(two, s) for s in (3, 4, 5, 6)] == [
    {0},
    {0},
    {0},
    set(),
  ]
  three = visit(two, 3, b=False)
  assert ledger.resting(three, 4) == {0}  # b began anew with step 2
  four = visit(three, 6, a=False)
  # One more is enough after a rest, and it is as long.
  assert [ledger.resting(four, s) for s in (7, 9, 10)] == [{0}, {0}, set()]
  five = visit(four, 10, a=True)
  six = visit(five, 11, a=False)
  assert ledger.resting(six, 12) == set()
  assert 0 not in five.streak and 0 not in five.rests


def test_without_a_schedule_nothing_rests():
  one = ledger.visited(Ledger(), 1, [0], [False], rest_after=0, rest_steps=3)
  assert one == Ledger()


def test_a_value_is_not_changed_in_place():
  before = visit(Ledger(), 1, a=False)
  copy = dataclasses.replace(before, streak=dict(before.streak))
  visit(before, 2, a=False)
  assert before == copy


def test_stalls_are_counted_from_the_best_score():
  one = Ledger()
  stalls = []
  for score in (0.2, 0.3, 0.3, 0.25, 0.31, 0.1):
    one = ledger.evaluated(one, score)
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
  now = Ledger(since_reset=since, stalled=stalled)
  assert ledger.reset_reason(now, kl, **RESET | rule) == why


def test_after_a_reset_all_triggers_start_anew():
  was = Ledger(tokens=9, since_reset=5, resets=1, best=0.7, stalled=3)
  now = ledger.was_reset(was)
  assert now == Ledger(tokens=9, resets=2)
  assert ledger.evaluated(now, 0.1).best == 0.1


def test_fields_of_a_newer_version_are_named():
  saved = ledger.Ledger().to_json() | {"dreams": 3, "naps": 4}
  with pytest.raises(ledger.Newer, match="has dreams, naps, which this vers"):
    ledger.Ledger.from_json(saved)
