"""Responses -> verdicts -> rewards."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from brorl_jax import types
from brorl_jax.main.examples import Examples
from brorl_jax.main.settings import Config
from brorl_jax.tasks import verifiers
from brorl_jax.tasks.base import Example
from brorl_jax.tasks.pool import Job, Pool
from brorl_jax.tasks.sandbox import jail, levels
from brorl_jax.tasks.sandbox.usage import PATIENCE
from brorl_jax.tasks.sandbox.walls import Limits
from brorl_jax.tasks.schema import MAX_TIME_LIMIT
from brorl_jax.types import Judged


class Judge:
  """The verifiers of a run, in the processes that they need.

  Attributes:
    walls: What stands between a response and this machine, by what judges it;
      part of the run's record.
    says: The same in a line each, for whoever starts the run.
  """

  def __init__(self, c: Config, examples: Examples):
    """Raises ValueError if untrusted programs cannot be judged safely here."""
    self._c, self._examples = c, examples
    self.walls, self.says = _walls(examples.domains, c.allow_inner)
    self._pool = Pool(
      verifiers.table(limits(c)),
      # A program may be run four times; what hangs longer is no program.
      deadline_s=4 * PATIENCE * max(c.code_total_s, MAX_TIME_LIMIT),
      jail=lambda: jail.Jail(allow_inner=c.allow_inner),
    )

  def judged(
    self, examples: Sequence[Example], rollouts: types.Rollouts
  ) -> list[list[Judged]]:
    """One for each rollout; equal responses to a prompt are judged once."""
    jobs: dict[tuple[str, tuple[int, ...]], Job] = {}
    rows = []
    for example, tokens, mask in zip(
      examples, rollouts.tokens, rollouts.mask, strict=True
    ):
      ids = [
        tuple(row[keep].tolist())
        for row, keep in zip(tokens, mask, strict=True)
      ]
      rows.append([(example.id, said) for said in ids])
      distinct = list(dict.fromkeys(ids))
      for said, text in zip(
        distinct, self._examples.decode(distinct), strict=True
      ):
        jobs[example.id, said] = Job(example.domain, text, example.entry)
    found = dict(zip(jobs, self._pool.judge(list(jobs.values())), strict=True))
    return [
      [Judged(example.task, *found[key]) for key in row]
      for example, row in zip(examples, rows, strict=True)
    ]

  def scores(
    self, step: int, prompts: types.Prompts, rollouts: types.Rollouts
  ) -> types.Scores:
    """Stage 3: what each domain pays for its verdicts."""
    examples = [self._examples.example(step, int(i)) for i in prompts.index]
    rows = self.judged(examples, rollouts)
    return types.Scores(
      np.array(
        [
          [self._pays(example, one) for one in row]
          for example, row in zip(examples, rows, strict=True)
        ],
        np.float32,
      ),
      np.array(
        [_numbered([one.verdict.answer for one in row]) for row in rows],
        np.int32,
      ),
      np.array([[one.valid for one in row] for row in rows]),
      np.array(rows, object),
    )

  def _pays(self, example: Example, judged: Judged) -> float:
    verdict = judged.verdict
    if self._c.domains[example.domain].reward == "score" and judged.valid:
      return verdict.score
    return verdict.reward

  def told(self) -> dict[str, float]:
    """What the metrics of rollouts do not tell, since it was last asked."""
    return {"score/replaced_workers": self._pool.replaced()}

  def close(self) -> None:
    """Ends the processes."""
    self._pool.close()


def limits(c: Config) -> Limits:
  """What a program may use."""
  return Limits(test_s=c.code_test_s, total_s=c.code_total_s)


def _walls(
  domains: Sequence[str], allow_inner: bool
) -> tuple[dict[str, Any], list[str]]:
  """What is there, tried now and not when the first response comes."""
  walls: dict[str, Any] = {}
  says = []
  try:
    if "code" in domains:
      level = levels.require(allow_inner=allow_inner)
      walls["programs"] = dataclasses.asdict(level)
      says.append(f"jail: {levels.describe(level)}")
    if set(domains) != {"gym"}:
      walls["libraries"] = jail.walls() or "walled"
      if walls["libraries"] != "walled":
        says.append(f"jail: none around libraries: {walls['libraries']}")
  except jail.Failed as e:
    raise ValueError(str(e)) from None
  return walls, says


def _numbered(texts: Sequence[str]) -> list[int]:
  """Equal numbers for equal texts, ascending."""
  numbers: dict[str, int] = {}
  return [numbers.setdefault(text, len(numbers)) for text in texts]
