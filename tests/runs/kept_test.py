"""Tests of brorl_jax/runs/kept.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brorl_jax.config.run import RunConfig
from brorl_jax.runs import kept


@pytest.mark.parametrize(
  "scores, newest, every, deleted",
  [
    ({}, 3, 0, []),
    ({0: None, 5: None}, 3, 0, []),
    ({0: None, 5: None, 10: None, 15: None}, 2, 0, [0, 5]),
    ({0: 0.1, 5: 0.7, 10: None, 15: 0.6, 20: 0.2}, 1, 0, [0, 10, 15]),
    ({0: 0.5, 5: 0.5, 10: 0.5, 15: 0.5}, 1, 0, [5, 10]),  # the earliest
    ({0: -1.0, 5: -2.0, 10: -3.0}, 1, 0, [5]),
    ({0: None, 5: 0.0, 10: None, 15: None}, 1, 10, [15][:0]),
    ({5: None, 10: None, 15: 0.0, 20: None, 25: None}, 1, 10, [5]),
  ],
)
def test_what_is_deleted(scores, newest, every, deleted):
  assert kept.superfluous(scores, newest=newest, every=every) == deleted


@given(
  st.dictionaries(st.integers(0, 60), st.none() | st.integers(0, 3).map(float)),
  st.integers(1, 5),
  st.integers(0, 9),
)
def test_what_stays(scores, newest, every):
  """And deleting once is enough."""
  deleted = kept.superfluous(scores, newest=newest, every=every)
  stays = {s: x for s, x in scores.items() if s not in deleted}
  assert {*sorted(scores)[-newest:]} <= stays.keys()
  assert {s for s in scores if every and s % every == 0} <= stays.keys()
  known = [x for x in scores.values() if x is not None]
  if known:
    best = min(s for s, x in scores.items() if x == max(known))
    assert best in stays
  assert len(stays) <= newest + 1 + (61 // every + 1 if every else 0)
  assert kept.superfluous(stays, newest=newest, every=every) == []


def test_the_best_of_nothing_is_none():
  assert kept.best_step({}) is kept.best_step({3: None}) is None
  assert kept.best_step({3: None, 6: 0.2, 9: 0.2}) == 6


@pytest.mark.parametrize(
  "save_every, eval_every, steps, words",
  [
    (10, 10, 60, None),
    (4, 6, 12, None),
    (4, 6, 11, "fall on no step"),
    (10, 61, 60, "fall on no step"),
    (61, 10, 60, "starts again at step 1"),
    (60, 10, 60, None),
  ],
)
def test_what_is_warned_of(save_every, eval_every, steps, words):
  said = kept.too_rare(
    RunConfig(save_every=save_every, steps=steps), eval_every
  )
  assert said is None if words is None else words in (said or "")
