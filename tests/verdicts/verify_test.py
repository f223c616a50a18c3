"""Tests of verdicts/verify.py."""

import pytest
from messages import refuses

from brorl_jax.verdicts import gym
from brorl_jax.verdicts.sandbox import jail
from brorl_jax.verdicts.verify import verify

_PUZZLE = gym.puzzle(gym.Family("gcd"), "train", 0, seed=0)
_PAIRS = [{"input": "1\n", "output": "2\n"}, {"input": "5\n", "output": "7\n"}]


@pytest.mark.parametrize(
  "domain, response, fields, status, score",
  [
    ("math", r"\boxed{1/2}", {"answer": "0.5"}, "pass", 1.0),
    ("math", r"\boxed{3}", {"answer": 2}, "fail", 0.0),
    ("stem", r"\boxed{B}", {"answer": "B", "choices": ["x", "y z"]}, "pass", 1),
    ("stem", r"\boxed{A}", {"answer": "B", "choices": ["x", "y z"]}, "fail", 0),
    ("stem", r"\boxed{5 m/s}", {"answer": "5 m/s"}, "pass", 1.0),
    (
      "gym",
      f"<answer>{_PUZZLE.entry['answer']}</answer>",
      {"entry": _PUZZLE.entry},
      "pass",
      1.0,
    ),
    (
      "instructions",
      "no comma here",
      {"instructions": [{"id": "punctuation:no_comma", "kwargs": {}}]},
      "pass",
      1.0,
    ),
  ],
)
def test_it_is_the_verdict_of_the_domain(
  domain, response, fields, status, score
):
  verdict = verify(domain, response, **fields)
  assert (verdict.status, verdict.score) == (status, score)


def test_programs_are_judged_where_there_is_a_jail():
  verdict = verify(
    "code", "```\nprint(int(input()) + 1)\n```", tests=_PAIRS, time_limit=2
  )
  if verdict.status != "invalid":  # else this machine has none
    assert (verdict.status, verdict.score) == ("fail", 0.5)


def test_a_verifier_that_fails_says_nothing_of_the_response(monkeypatch):
  def broken(*_, **__):
    raise jail.Failed("no jail")

  monkeypatch.setattr(jail.Jail, "ask", broken)
  monkeypatch.setattr(jail.Jail, "run", broken)
  for verdict in (
    verify("code", "```\nprint(1)\n```", tests=_PAIRS),
    verify("math", r"\boxed{(x+1)^2}", answer="x^2+2x+1"),
  ):
    assert (verdict.status, verdict.score) == ("invalid", 0.0)
    assert "no jail" in verdict.reason


@pytest.mark.parametrize(
  "domain, fields, message",
  [
    ("maths", {"answer": "1"}, "'maths' ... domain"),
    ("x", {}, "'x' ... domain"),
    ("math", {}, "'answer' ... missing"),
    ("stem", {"answer": "1", "choice": []}, "'choice' ... unknown"),
    ("math", {"answer": 0.5}, "0.5 ... answer ... text"),
    ("math", {"answer": ""}, "answer: empty; "),
  ],
)
def test_what_cannot_be_judged_is_refused(domain, fields, message):
  with refuses(ValueError, message):
    verify(domain, "1", **fields)
