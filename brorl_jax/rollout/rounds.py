"""How many rollouts a prompt gets, decided from those that it has.

A prompt's rollouts 0 to N - 1 are made in chunks of one size, each in a place
of its own. A round is as many chunks as the rule asks for at a time. When all
of a round are scored, the rule sees the rewards of all rollouts so far, in the
order of n, and asks for more or ends. What is drawn is therefore a function of
(seed, step, p, rewards): not of the order in which rollouts finish, nor of
slots, places, devices or processes. As rollout n depends on (seed, step, p, n)
alone, a prompt that gets N rollouts in rounds gets those of a fixed N.
"""

import dataclasses
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Bool, Float

from brorl_jax.types import Groups, Prompts, Rollouts, Scores


@runtime_checkable
class Rule(Protocol):
  """Numbers of rollouts, multiples of a chunk."""

  def first(self, p: int) -> int:
    """Of the first round of prompt p, at least one chunk."""
    ...

  def more(
    self, reward: Float[np.ndarray, " n"], valid: Bool[np.ndarray, " n"]
  ) -> int:
    """Of the next round, from all rollouts so far; 0 ends."""
    ...


class _Fixed(NamedTuple):
  """The same number for each prompt, in one round."""

  n: int

  def first(self, p: int) -> int:
    return self.n

  def more(self, reward, valid) -> int:
    return 0


@dataclasses.dataclass(frozen=True)
class Plan:
  """Sizes of what is drawn, and the rule.

  Attributes:
    chunk: Rollouts of a prompt that are made in one place.
    most: N, of the arrays of a group; no prompt gets more.
    rule: See `Rule`.
  """

  chunk: int
  most: int
  rule: Rule


def fixed(n: int) -> Plan:
  """N rollouts of each prompt, in one place."""
  return Plan(n, n, _Fixed(n))


class Chunk(NamedTuple):
  """Rollouts first, first + 1, ... of prompt p."""

  p: int
  first: int


class Gathered:
  """Chunks of open prompts, until the rule ends them."""

  def __init__(self, plan: Plan):
    self._plan = plan
    self._asked: dict[int, int] = {}  # p -> rollouts asked for so far
    self._here: dict[int, dict[int, Groups]] = {}  # p -> first -> its chunk

  def begin(self, p: int) -> list[Chunk]:
    """The chunks of the first round."""
    return self._ask(p, 0, self._plan.rule.first(p))

  def add(self, p: int, chunk: Groups) -> list[Chunk] | Groups:
    """A scored chunk of an open prompt.

    Returns:
      The chunks of the next round if this one was the last of its round and the
      rule asks for more; none if others of the round are missing; the whole
      group, padded to `Plan.most`, if the rule ends the prompt.
    """
    here = self._here.setdefault(p, {})
    here[_first(chunk.prompts)] = chunk
    asked = self._asked[p]
    if len(here) * self._plan.chunk < asked:
      return []
    ordered = [here[n] for n in sorted(here)]
    scores = [x.scores for x in ordered]
    more = self._plan.rule.more(
      np.concatenate([x.reward[0] for x in scores]),
      np.concatenate([x.valid[0] for x in scores]),
    )
    if more:
      return self._ask(p, asked, more)
    del self._here[p], self._asked[p]
    return _whole(ordered, self._plan.most)

  def _ask(self, p: int, have: int, more: int) -> list[Chunk]:
    chunk, most = self._plan.chunk, self._plan.most
    if more % chunk or not 0 < more <= most - have:
      raise ValueError(
        f"a rule asks for {more} rollouts of prompt {p}, which has {have}; it "
        f"must be a multiple of {chunk}, of at most {most} together"
      )
    self._asked[p] = have + more
    return [Chunk(p, n) for n in range(have, have + more, chunk)]


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
