"""Tests of brorl_jax/evaluate.py, on a policy that is a table."""

import numpy as np
import pytest

from brorl_jax import evaluate
from brorl_jax.collect import Unjudged
from brorl_jax.tasks.base import Example, Verdict
from brorl_jax.types import Judged, Rollouts

N, T = 3, 4
# How many of the N answers to each puzzle are right; puzzle i is of f(i % 2).
RIGHT = (3, 0, 1, 2, 3)


def puzzles(count=5):
  return [
    Example(
      f"f{i % 2}/heldout/{i}",
      "gym",
      f"f{i % 2}",
      ({"role": "user", "content": f"question {i}"},),
      {"i": i},
    )
    for i in range(count)
  ]


class Table:
  """Answers i, and is right as often as RIGHT says."""

  def __init__(self):
    self.calls = []

  def rollouts(self, params, asked, start):
    assert params == "params"
    self.calls.append((start, [p.entry["i"] for p in asked]))
    p = np.array([puzzle.entry["i"] for puzzle in asked], np.int32)
    length = 1 + (p[:, None] + np.arange(N)) % T
    mask = np.arange(T) < length[..., None]
    return Rollouts(
      tokens=np.where(mask, p[:, None, None], 0).astype(np.int32),
      logp=np.zeros((len(p), N, T), np.float32),
      mask=mask,
      truncated=length == T,
      slot_steps=np.ones(len(p), np.float32),
    )

  def judged(self, asked, rollouts):
    assert len(asked) == len(rollouts.tokens)  # fillers are not judged
    out = []
    for puzzle, tokens in zip(asked, rollouts.tokens, strict=True):
      i = puzzle.entry["i"]
      assert (tokens[:, 0] == i).all()  # each is judged on its own answers
      status = lambda n, i=i: "pass" if n < RIGHT[i] else "fail"
      out.append(
        [
          Judged(puzzle.task, Verdict(status(n), 0.25 * n, "", f"{i}.{n}"), 0.0)
          for n in range(N)
        ]
      )
    return out


def run(chunk):
  table = Table()
  got = evaluate.evaluate(
    "params",
    puzzles(),
    rollouts=table.rollouts,
    judged=table.judged,
    chunk=chunk,
  )
  return got, table.calls


def test_means_by_hand():
  got, _ = run(chunk=5)
  rates = np.array(RIGHT) / 3
  np.testing.assert_allclose(got.pass_at_1, rates)
  assert got.mean == pytest.approx(3 / 5)
  half = 1.959964 * (np.sum((rates - 0.6) ** 2) / 4 / 5) ** 0.5
  assert got.half_width == pytest.approx(half, rel=1e-6)
  assert got.by_family == pytest.approx({"f0": 7 / 9, "f1": 1 / 3})
  assert type(got.mean) is type(got.half_width) is float


def test_one_record_for_each_sample():
  got, _ = run(chunk=2)
  assert len(got.records) == 5 * N
  assert got.records[3 * N + 1] == {
    "id": "f1/heldout/3",
    "domain": "gym",
    "task": "f1",
    "sample": 1,
    "tokens": 1,  # 1 + (3 + 1) % 4
    "truncated": False,
    "score": 0.25,
    "pass": True,
    "reason": "",
    "answer": "3.1",
  }
  assert got.records[3 * N] == {
    "id": "f1/heldout/3",
    "domain": "gym",
    "task": "f1",
    "sample": 0,
    "tokens": 4,
    "truncated": True,
    "score": 0.0,
    "pass": True,
    "reason": "",
    "answer": "3.0",
  }
  for i, right in enumerate(RIGHT):
    passed = [r["pass"] for r in got.records[i * N : (i + 1) * N]]
    assert sum(passed) == right
  assert all(type(r["truncated"]) is bool for r in got.records)


@pytest.mark.parametrize(
  "chunk, calls",
  [
    (2, [(0, [0, 1]), (2, [2, 3]), (4, [4, 4])]),
    (3, [(0, [0, 1, 2]), (3, [3, 4, 3])]),
    (8, [(0, [0, 1, 2, 3, 4, 0, 0, 0])]),
  ],
)
def test_chunks_have_one_size_and_what_fills_them_does_not_count(chunk, calls):
  got, asked = run(chunk)
  assert asked == calls
  want, _ = run(chunk=1)
  np.testing.assert_array_equal(got.pass_at_1, want.pass_at_1)
  assert got._replace(pass_at_1=0) == want._replace(pass_at_1=0)


def measure(statuses):
  """Of prompts whose responses have these statuses."""
  word = {"p": "pass", "f": "fail", "i": "invalid"}

  def judged(asked, _):
    return [
      [
        Judged("f", Verdict(word[s], 1.0, "broken: x", "x"), 0.0)
        for s in statuses[puzzle.entry["i"]]
      ]
      for puzzle in asked
    ]

  return evaluate.evaluate(
    "params",
    puzzles(len(statuses)),
    rollouts=Table().rollouts,
    judged=judged,
    chunk=len(statuses),
  )


def test_what_could_not_be_judged_does_not_count():
  got = measure(["pii", "iif", "iii", *["pff"] * 300])
  np.testing.assert_allclose(got.pass_at_1[:4], [1.0, 0.0, 0.0, 1 / 3])
  assert [record["pass"] for record in got.records[:4]] == [
    *[True, False, False],
    False,
  ]


def test_an_evaluation_that_cannot_be_judged_is_refused():
  measure(["ipp", *["ppp"] * 33])  # 1 of 102
  with pytest.raises(Unjudged, match=r"failed on 2 of 102 .*1% .* f: broken: "):
    measure(["iip", *["ppp"] * 33])


def test_summary_needs_one_rate_for_each_prompt():
  with pytest.raises(ValueError, match="zip"):
    evaluate.summarise(puzzles(3), np.array([0.5, 0.5]), [])
