"""Tests of brorl_jax/tasks/verifiers.py."""

import pytest

from brorl_jax.tasks import gym
from brorl_jax.tasks.base import DOMAINS
from brorl_jax.tasks.pool import Job, Pool
from brorl_jax.tasks.sandbox import levels
from brorl_jax.tasks.verifiers import VERIFIERS

PUZZLE = gym.puzzle(gym.Family("gcd"), "train", 0, seed=0).entry
RIGHT = {
  "math": (r"so \boxed{\sqrt{8}}", {"answer": r"2\sqrt{2}"}),
  "code": (
    "```python\nprint(int(input()) + 1)\n```",
    {"tests": {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "3\n"]}},
  ),
  "stem": (r"\boxed{B}", {"answer": "B", "choices": ["helium", "neon"]}),
  "gym": (PUZZLE["answer"], PUZZLE),
  "instructions": (
    "no commas here",
    {"instructions": [{"id": "punctuation:no_comma", "kwargs": {}}]},
  ),
}
WRONG = {
  "math": (r"so \boxed{\sqrt{8}}", {"answer": r"3\sqrt{2}"}),
  "code": (
    "```python\nprint(2)\n```",
    RIGHT["code"][1],
  ),
  "stem": (r"\boxed{A}", RIGHT["stem"][1]),
  "gym": ("no", PUZZLE),
  "instructions": ("one, two", RIGHT["instructions"][1]),
}


@pytest.fixture(scope="module")
def pool():
  with Pool(VERIFIERS, workers=2) as pool:
    yield pool


def test_every_domain_has_one():
  assert VERIFIERS.keys() == set(DOMAINS)


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_right_response_passes_and_a_wrong_one_fails(pool, domain):
  if domain == "code" and levels.probe().name == "none":
    pytest.skip(levels.probe().reason)
  right, wrong = pool.judge(
    [Job(domain, *RIGHT[domain]), Job(domain, *WRONG[domain])]
  )
  assert right.verdict.status == "pass", right
  assert wrong.verdict.status == "fail", wrong
  share = 0.5 if domain == "code" else wrong.verdict.score
  assert right.verdict.score == 1.0 and wrong.verdict.score == share < 1.0
