"""Rollouts in rounds until right and wrong ones suffice, and what that biases.

A prompt is drawn up to n = rounds[0], rounds[1], ... rollouts, until at least
`right` of them are right and at least `wrong` are wrong. Where it stops depends
on its rewards, so the estimate K (n - K) / n (n - 1) of p (1 - p) over all that
was drawn, the size of a group's gradient, is biased: 3.02 times too large at
p = .001 if one right rollout suffices, at most 1.18 times if four do (rounds of
16, 64, 256, 1,024; `expected`).

Rao and Blackwell remove it: the estimate of the first round alone is unbiased,
and its expectation given where the prompt stopped does not depend on p. It is a
ratio of two counts of reward sequences (`exact_weights`).
"""

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple


class Rounds(NamedTuple):
  """When a prompt stops."""

  after: tuple[int, ...]  # rollouts after each round, ascending
  right: int  # that suffice
  wrong: int

  def over(self, right: int, wrong: int) -> bool:
    """Whether these suffice before the last round."""
    return right >= self.right and wrong >= self.wrong


def further(rounds: Rounds, *, right: int, drawn: int) -> int:
  """Rollouts of the next round; 0 if the prompt stops.

  Args:
    rounds: When it stops.
    right: Right rollouts so far. All others count as wrong, also those that no
      verifier could judge.
    drawn: All, at the end of a round.

  Raises:
    ValueError: `drawn` is not the end of a round.
  """
  if drawn not in rounds.after:
    raise ValueError(f"drawn = {drawn} is not one of {rounds.after}")
  if rounds.over(right, drawn - right) or drawn == rounds.after[-1]:
    return 0
  return rounds.after[rounds.after.index(drawn) + 1] - drawn


def _paths(
  rounds: Rounds,
) -> Iterator[tuple[int, dict[int, int], dict[int, int]]]:
  """Round by round: n, and by K the reward sequences that reach (n, K).

  Once each, and weighted by K1 (n1 - K1) of their first round. Sequences that
  stopped in an earlier round are not among them.
  """
  first = rounds.after[0]
  count = {k: math.comb(first, k) for k in range(first + 1)}
  weighted = {k: c * k * (first - k) for k, c in count.items()}
  n = first
  for after in rounds.after:
    if (more := after - n) > 0:
      goes_on = [k for k in count if not rounds.over(k, n - k)]
      add = [math.comb(more, j) for j in range(more + 1)]
      count, weighted = (
        _convolved({k: x[k] for k in goes_on}, add) for x in (count, weighted)
      )
      n = after
    yield n, count, weighted


def _convolved(x: dict[int, int], add: list[int]) -> dict[int, int]:
  """Counts of right ones after more rollouts."""
  out: dict[int, int] = {}
  for k, c in x.items():
    for j, ways in enumerate(add):
      out[k + j] = out.get(k + j, 0) + c * ways
  return out


@functools.lru_cache(maxsize=64)
def exact_weights(rounds: Rounds) -> dict[tuple[int, int], float]:
  """w of each end (n, K): an unbiased estimate of p (1 - p).

    w(n, K) = E[K1 (n1 - K1) / (n1 (n1 - 1)) | the prompt stops at (n, K)]

  with K1 right rollouts of the n1 of the first round. All reward sequences with
  K right ones are equally likely, so that this is a ratio of counts, without p.

  Args:
    rounds: When it stops; the first round has at least 2 rollouts.
  """
  first, last = rounds.after[0], rounds.after[-1]
  pairs = first * (first - 1)
  out = {}
  for n, count, weighted in _paths(rounds):
    for k, ways in count.items():
      if n == last or rounds.over(k, n - k):
        out[n, k] = weighted[k] / (ways * pairs)
  return out


def correction(rounds: Rounds, *, right: int, drawn: int) -> float:
  """`exact_weights` over the biased estimate K (n - K) / n (n - 1).

  Args:
    rounds: When a prompt stops.
    right: K, of a prompt that stopped.
    drawn: n; 1 is returned where no prompt stops, and where K is 0 or n.
  """
  biased = right * (drawn - right) / (drawn * (drawn - 1))
  exact = exact_weights(rounds).get((drawn, right), biased)
  return exact / biased if biased else 1.0


def expected(rounds: Rounds, p: float) -> dict[str, float]:
  """What the rule does with a prompt of pass rate p.

  Args:
    rounds: When it stops.
    p: Strictly between 0 and 1.

  Returns:
    n: Expected rollouts. informative: Chance of right and wrong ones among
    them. hidden_weight: E[K (n - K) / (n (n - 1))] / p (1 - p), 1 without bias.
    exact_weight: The same of `exact_weights`.
  """
  exact = exact_weights(rounds)
  sums: dict[str, float] = dict.fromkeys(
    ("n", "informative", "hidden_weight", "exact_weight"), 0.0
  )
  last = rounds.after[-1]
  for n, count, _ in _paths(rounds):
    for k, ways in count.items():
      if n < last and not rounds.over(k, n - k):
        continue
      # In logarithms: there are 2^1024 sequences of 1,024 rewards.
      chance = math.exp(
        math.log(ways) + k * math.log(p) + (n - k) * math.log1p(-p)
      )
      sums["n"] += chance * n
      sums["informative"] += chance * (0 < k < n)
      sums["hidden_weight"] += chance * k * (n - k) / (n * (n - 1))
      sums["exact_weight"] += chance * exact[n, k]
  for name in ("hidden_weight", "exact_weight"):
    sums[name] /= p * (1.0 - p)
  return sums
