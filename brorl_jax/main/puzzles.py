"""Puzzles of a run as prompts, and responses as verdicts."""

import functools
from collections.abc import Sequence

import numpy as np

from brorl_jax import tokenizer, types
from brorl_jax.main import settings
from brorl_jax.main.settings import Config
from brorl_jax.tasks import gym, mixture
from brorl_jax.tasks.base import Example, Verdict

_PROBES = 256  # prompts per family that are measured before anything starts
# gym.puzzle takes indexes below 2**44; 2 million steps need those below 2**41.
_SUBSTITUTES, _SUBSTITUTE_BITS = 8, 41


class TooLong(ValueError):
  """A prompt has more tokens than the budget."""


def families(c: Config) -> list[gym.Family]:
  """What prompts are drawn from; raises ValueError if one of them is wrong."""
  out = [
    gym.Family(name, f.settings.to_dict(), f.weight)
    for name, f in c.families.items()
  ]
  gym.check(out)
  return out


class Puzzles:
  """Puzzles of a run as prompts, and responses as verdicts."""

  def __init__(self, c: Config, text: tokenizer.Tokenizer):
    """Raises ValueError if a family is wrong or its prompts are too long."""
    self._c, self._text = c, text
    self.stop_ids = text.stop_ids
    self.puzzle = functools.lru_cache(maxsize=1 << 14)(self._draw)
    self.families = families(c)
    self._weights = [f.weight for f in self.families]
    for family in self.families:
      for i in range(_PROBES):
        self._render(gym.puzzle(family, "train", i, seed=c.seed))

  def _render(self, puzzle: Example) -> list[int]:
    parts = (puzzle.question, self._c.instruction)
    ids = self._text.render("\n".join(part for part in parts if part))
    if len(ids) > self._c.prompt_tokens:
      raise TooLong(
        f"{puzzle.id} has {len(ids)} prompt tokens, config.prompt_tokens = "
        f"{self._c.prompt_tokens}: raise it, or narrow the family's settings"
      )
    return ids

  def heldout(self) -> list[Example]:
    puzzles = gym.heldout(
      self.families, per_family=self._c.eval_prompts, seed=self._c.seed
    )
    for puzzle in puzzles:
      self._render(puzzle)
    return puzzles

  def candidates(
    self, step: int, resting: frozenset[int], *, most: int
  ) -> Sequence[int]:
    """Numbers p of the prompts that a step may draw, in their order."""
    count = self._c.distinct_prompts
    if not count:
      return range(most)
    order = np.random.default_rng([self._c.seed, step]).permutation(count)
    return [int(p) for p in order if p not in resting][:most]

  def _draw(self, step: int, position: int) -> Example:
    """Candidate `position` of a step: a function of (seed, step, position).

    If a run has a fixed number of prompts, candidate p is prompt p of them.
    """
    if self._c.distinct_prompts:
      step = 0
    which = mixture.pick(self._c.seed, step, position, self._weights)
    index = mixture.index(step, position)
    # A prompt that is rarer than the probes and too long must not end a run of
    # a week: the next of its own substitutes takes its place.
    for substitute in range(_SUBSTITUTES):
      puzzle = gym.puzzle(
        self.families[which],
        "train",
        index + (substitute << _SUBSTITUTE_BITS),
        seed=self._c.seed,
      )
      try:
        self._render(puzzle)
      except TooLong as e:
        error = e
        continue
      return puzzle
    raise settings.UserError(str(error))

  def prompts(self, step: int, candidates: Sequence[int]) -> types.Prompts:
    """Stage 1: some candidates of a step."""
    index = np.array(candidates, np.int32)
    return self.pad([self.puzzle(step, p) for p in candidates], index)

  def pad(self, puzzles: Sequence[Example], index: np.ndarray) -> types.Prompts:
    ids = [self._render(puzzle) for puzzle in puzzles]
    return types.Prompts(*tokenizer.left_pad(ids, self._c.prompt_tokens), index)

  def decode(self, response: Sequence[int]) -> str:
    return self._text.decode([response])[0]

  def verdicts(
    self, puzzles: Sequence[Example], rollouts: types.Rollouts
  ) -> list[list[Verdict]]:
    """One for each rollout; equal responses to a prompt are judged once."""
    out = []
    for puzzle, tokens, mask in zip(
      puzzles, rollouts.tokens, rollouts.mask, strict=True
    ):
      ids = [
        tuple(row[keep].tolist())
        for row, keep in zip(tokens, mask, strict=True)
      ]
      distinct = list(dict.fromkeys(ids))
      judged = {
        key: gym.verify(response, puzzle.entry)
        for key, response in zip(
          distinct, self._text.decode(distinct), strict=True
        )
      }
      out.append([judged[key] for key in ids])
    return out

  def scores(
    self, step: int, prompts: types.Prompts, rollouts: types.Rollouts
  ) -> types.Scores:
    """Stage 3: 1 for a pass, 0 for a fail."""
    puzzles = [self.puzzle(step, int(i)) for i in prompts.index]
    verdicts = self.verdicts(puzzles, rollouts)
    for puzzle, row in zip(puzzles, verdicts, strict=True):
      for verdict in row:
        # Not 0: that would train the policy away from a puzzle whose verifier
        # is broken. These verifiers never fail on a sound entry.
        if verdict.status == "invalid":
          raise settings.UserError(
            f"step {step}: the verifier of {puzzle.id} failed: {verdict.reason}"
          )
    reward = [[v.reward for v in row] for row in verdicts]
    answer = [_numbered([v.answer for v in row]) for row in verdicts]
    return types.Scores(
      np.array(reward, np.float32), np.array(answer, np.int32)
    )


def _numbered(texts: Sequence[str]) -> list[int]:
  """Equal numbers for equal texts, ascending."""
  numbers: dict[str, int] = {}
  return [numbers.setdefault(text, len(numbers)) for text in texts]
