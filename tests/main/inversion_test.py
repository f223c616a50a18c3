"""Tests of brorl_jax/main/inversion.py."""

import math

import pytest
from messages import mentions

from brorl_jax.main.inversion import inverted, inverted_in_training


def line(rates, samples=16):
  return {"rates": rates, "summary": {"all": {"samples": samples}}}


# Of 40 prompts all can be solved now and then, or half of them always.
SELDOM = [0.125] * 40
HALF = [1.0] * 20 + [0.0] * 20


def test_better_and_narrower_is_told_with_its_numbers():
  said = inverted(line(SELDOM), line(HALF))
  assert said and mentions(
    said, "0.125 to 0.500 ... right one of 16 ... 1.000 to 0.500 ... pass_at_k"
  )


@pytest.mark.parametrize(
  "before, after",
  [
    (HALF, SELDOM),  # the reverse
    (SELDOM, [0.5] * 40),  # better, and as wide
    (SELDOM, [0.0] * 20 + [0.125] * 20),  # worse and narrower
    (SELDOM, SELDOM),
    ([0.125] * 40, [0.9] * 39 + [0.0]),  # one prompt may be chance
    ([0.125], [0.9]),
    ([0.125] * 40, [0.9] * 39),  # other prompts
  ],
)
def test_what_is_no_inversion(before, after):
  assert inverted(line(before), line(after)) is None


def visits(*steps):
  """8 rollouts of each prompt; steps have the right ones."""
  return [
    {"step": s, "id": f"{p}", "drawn": 8, "right": c, "invalid": 0}
    for s, right in enumerate(steps)
    for p, c in enumerate(right)
  ]


def test_training_prompts_are_compared_with_their_first_visit():
  """40 prompts with 1 of 8, or half of them with all."""
  wide, narrow = [1] * 40, [8] * 20 + [0] * 20
  said = inverted_in_training(visits(wide, [4] * 40, narrow))
  assert said and mentions(
    said, "0.125 to 0.500 ... pass@k of 40 training prompts ... 1.000 to 0.500"
  )
  assert inverted_in_training(visits(narrow, wide)) is None
  assert inverted_in_training(visits(wide, [4] * 40)) is None
  assert inverted_in_training(visits(wide)) is None
  assert inverted_in_training([]) is None


def test_more_rollouts_solve_no_more():
  """1 of 8 and then 2 of 64 are pass@8 of 1 and .25."""
  first, then = visits([1] * 40), visits([], [16] * 10 + [2] * 30)
  then = [{**line, "drawn": 64} for line in then]
  said = inverted_in_training([*first, *then])
  assert said is None  # p falls
  said = inverted_in_training(
    [*first, *({**one, "right": 4 * one["right"]} for one in then)]
  )
  # Fewer at the last visit: of both what 8 would have given.
  first = [{**one, "drawn": 64} for one in visits([16] * 40)]
  last = visits([], [8] * 20 + [0] * 20)
  said = inverted_in_training([*first, *last])
  assert said and "0.250 to 0.500" in said and "0.915 to 0.500" in said
  said = inverted_in_training(
    [*visits([1] * 40), *({**one, "right": 4 * one["right"]} for one in then)]
  )
  k = lambda c: 1 - math.comb(64 - c, 8) / math.comb(64, 8)
  assert said and f"1.000 to {k(64) / 4 + 0.75 * k(8):.3f}" in said
