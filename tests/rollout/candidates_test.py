"""Tests of brorl_jax/rollout/candidates.py; see dynamic_sampling_test.py."""

import numpy as np

from brorl_jax.rollout import candidates, rounds
from brorl_jax.types import Prompts


def prompts(numbers):
  index = np.array(numbers, np.int32)
  return Prompts(index[:, None], index[:, None] >= 0, index)


def drawn(room, target=9):
  plan = rounds.Plan((4, 16), 1, 1)
  of = candidates.Candidates(prompts, [7, 3, 5], target, plan, lambda: None)
  found = []
  while (more := of.feed(room, False)) is not None:
    found.append([*zip(more.index.tolist(), more.first.tolist(), strict=True)])
  return found, of


def test_a_new_candidate_is_drawn_when_there_is_room_for_its_first_chunk():
  found, of = drawn(2)
  assert found == [[(7, 0), (3, 0)], [(5, 0)]]
  assert of.given == 3 and of.decided == {}


def test_no_more_candidates_are_open_than_may_be_needed():
  found, of = drawn(9, target=1)
  assert found == [[(7, 0)]] and of.given == 1


def test_a_clock_adds_up_by_part():
  clock = candidates.Clock()
  for part in ("a", "b", "a"):
    with clock(part):
      pass
  assert set(clock.spent) == {"a", "b"} and clock.spent["a"] > 0.0
