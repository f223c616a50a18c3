"""Tests of brorl_jax/tasks/verifiers.py."""

import functools

import pytest

from brorl_jax import collect, types
from brorl_jax.tasks import gym
from brorl_jax.tasks.base import DOMAINS
from brorl_jax.tasks.pool import Job, Pool
from brorl_jax.tasks.sandbox import levels
from brorl_jax.tasks.sandbox.jail import Jail
from brorl_jax.tasks.sandbox.walls import Limits
from brorl_jax.tasks.verifiers import VERIFIERS
from brorl_jax.tasks.verifiers import table as table_of

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
  inner = functools.partial(Jail, allow_inner=True)
  with Pool(VERIFIERS, workers=2, jail=inner) as pool:
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


@pytest.mark.parametrize(
  "endless", [40, pytest.param(512, marks=pytest.mark.slow)]
)
def test_endless_programs_cost_the_right_ones_nothing(endless):
  """However many there are, and however long the queue: none is invalid."""
  if levels.probe().name == "none":
    pytest.skip(levels.probe().reason)
  entry = {"tests": {"inputs": ["3\n", "4\n"], "outputs": ["9\n", "16\n"]}}
  loops = ("while True: pass", "import time; time.sleep(600)")
  jobs = [
    Job("code", f"```\n{loops[i % 2]}  # {i}\n```", entry)
    for i in range(endless)
  ]
  jobs += [
    Job("code", f"```\nprint(int(input()) ** 2)  # {i}\n```", entry)
    for i in range(20)
  ]
  table = table_of(Limits(test_s=0.2, total_s=2.0))
  inner = functools.partial(Jail, allow_inner=True)
  with Pool(table, workers=2, deadline_s=20.0, jail=inner) as pool:
    judged = pool.judge(jobs)
    assert pool.replaced() == 0
  assert {one.verdict.reason for one in judged[:endless]} == {"time-out"}
  assert all(one.verdict.status == "pass" for one in judged[endless:])
  collect.check_judged([types.Judged("code", *one) for one in judged])
