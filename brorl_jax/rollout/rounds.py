"""How many rollouts a prompt gets, decided from those that it has.

A prompt's rollouts 0 to N - 1 are made in chunks of one size, each in a place
of its own. When all of a round are scored, the rewards of all rollouts so far
decide whether another round follows. What is drawn is therefore a function of
(seed, step, p, rewards): not of the order in which rollouts finish, nor of
slots, places, devices or processes. As rollout n depends on (seed, step, p, n)
alone, a prompt that gets N rollouts in rounds gets those of a fixed N.
"""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from brorl_jax.types import Groups, Prompts, Rollouts, Scores


class RoundPlan(NamedTuple):
  """Rounds of a prompt, and when it stops; of a fixed n one round."""

  after: tuple[int, ...]  # rollouts after each round, multiples of the first
  right: int = 0  # that suffice
  wrong: int = 0

  @property
  def chunk(self) -> int:
    """Rollouts of a prompt that are made in one place: the first round."""
    return self.after[0]

  @property
  def n(self) -> int:
    """N, of the arrays of a group; no prompt gets more."""
    return self.after[-1]

  def further(self, reward: Float[np.ndarray, " n"]) -> int:
    """Rollouts after the next round; those that there are if it stops.

    Args:
      reward: Of all rollouts so far, at the end of a round. Those below 1 count
        as wrong, also those that no verifier could judge.
    """
    n, right = len(reward), int((reward >= 1.0).sum())
    enough = right >= self.right and n - right >= self.wrong
    at = self.after.index(n)
    return n if enough or n == self.n else self.after[at + 1]


class Chunk(NamedTuple):
  """Rollouts first, first + 1, ... of prompt p."""

  p: int
  first: int


class OpenPrompts:
  """Chunks of open prompts, until the plan ends them."""

  def __init__(self, plan: RoundPlan):
    self._plan = plan
    self._asked: dict[int, int] = {}  # p -> rollouts asked for so far
    self._here: dict[int, dict[int, Groups]] = {}  # p -> first -> its chunk

  def begin(self, p: int) -> Chunk:
    """The chunk of the first round."""
    self._asked[p] = self._plan.chunk
    return Chunk(p, 0)

  def add(self, p: int, chunk: Groups) -> list[Chunk] | Groups:
    """A scored chunk of an open prompt.

    Returns:
      The chunks of the next round if this one was the last of its round and the
      prompt goes on; none if others of the round are missing; the whole group,
      padded to `RoundPlan.n`, if it stops.
    """
    here = self._here.setdefault(p, {})
    here[_first(chunk.prompts)] = chunk
    asked, size = self._asked[p], self._plan.chunk
    if len(here) * size < asked:
      return []
    ordered = [here[n] for n in sorted(here)]
    reward = np.concatenate([x.scores.reward[0] for x in ordered])
    if (more := self._plan.further(reward)) > asked:
      self._asked[p] = more
      return [Chunk(p, n) for n in range(asked, more, size)]
    del self._here[p], self._asked[p]
    return _whole(ordered, self._plan.n)


def _first(prompts: Prompts) -> int:
  return 0 if prompts.first is None else int(prompts.first[0])


def _whole(chunks: list[Groups], most: int) -> Groups:
  """One group of all its chunks, in the order of n; see `Rollouts.drawn`."""
  if len(chunks) == 1 and chunks[0].scores.reward.shape[1] == most:
    prompts, rollouts, scores = chunks[0]
    return Groups(dataclasses.replace(prompts, first=None), rollouts, scores)

  def joined(get) -> np.ndarray:
    x = np.concatenate([np.asarray(get(chunk)) for chunk in chunks], axis=1)
    # Zeros: no token, not valid. Of objects None.
    shape = (x.shape[0], most, *x.shape[2:])
    out = (
      np.full(shape, None) if x.dtype == object else np.zeros(shape, x.dtype)
    )
    out[:, : x.shape[1]] = x
    return out

  rollouts = Rollouts(
    tokens=joined(lambda x: x.rollouts.tokens),
    logp=joined(lambda x: x.rollouts.logp),
    mask=joined(lambda x: x.rollouts.mask),
    truncated=joined(lambda x: x.rollouts.truncated),
    slot_steps=np.sum([x.rollouts.slot_steps for x in chunks], axis=0),
  )
  scores = Scores(
    *(joined(lambda x, i=i: x.scores[i]) for i in range(len(Scores._fields)))
  )
  prompts = dataclasses.replace(chunks[0].prompts, first=None)
  return Groups(prompts, rollouts, scores)


def with_first(prompts: Prompts, chunks: list[Chunk]) -> Prompts:
  """The prompts of these chunks, and which of their rollouts to make."""
  first = np.array([chunk.first for chunk in chunks], np.int32)
  return dataclasses.replace(prompts, first=first)


def rows(groups: Groups) -> list[Groups]:
  """Each group by itself."""
  count = len(groups.prompts.index)
  return [
    jax.tree.map(lambda x, i=i: x[i : i + 1], groups) for i in range(count)
  ]
