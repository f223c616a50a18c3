"""Tests of brorl_jax/main/inversion.py."""

import pytest
from messages import mentions

from brorl_jax.main.inversion import inverted


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
