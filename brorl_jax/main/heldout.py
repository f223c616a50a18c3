"""Held-out prompts -> records of an evaluation, chunk by chunk."""

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import PyTree

from brorl_jax import evaluate, types
from brorl_jax.config import Config
from brorl_jax.model import sharding
from brorl_jax.plan.resolve import Run, WithPolicy
from brorl_jax.plan.sizes import Heldout
from brorl_jax.stages import sampling
from brorl_jax.stages.examples import Examples
from brorl_jax.stages.scoring import Scorer
from brorl_jax.verdicts.base import Example


def records(
  this: WithPolicy[Config],
  c: Config,
  how: Heldout,
  examples: Examples,
  scorer: Scorer,
  params: PyTree,
  prompts: Sequence[Example],
  *,
  first: int = 0,
) -> evaluate.Chunks:
  """The records of held-out prompts from number `first` on.

  Every evaluation uses the same random numbers: rollout n of example p draws
  from (seed, 0, p, n).

  Args:
    this: The policy, on this machine.
    c: How prompts are sampled.
    how: The memory plan.
    examples: Makes token ids of prompts.
    scorer: Judges responses.
    params: Of the run, spread over all processes.
    prompts: All that are evaluated.
    first: Number of those that are done.
  """
  # Training does not use the key of step 0.
  key = jax.random.fold_in(jax.random.key(c.run.seed), 0)
  sample = functools.partial(sampling.sample_heldout, this, c, how)

  def rollouts(
    params: PyTree, part: Sequence[Example], start: int
  ) -> types.Rollouts:
    index = np.arange(start, start + len(part), dtype=np.int32)
    return sample(params, examples.pad(part, index), key)

  return evaluate.evaluate(
    sharding.local_copy(params, sharding.local_mesh(this.mesh)),
    prompts,
    rollouts=rollouts,
    score_responses=scorer.score_responses,
    texts=scorer.texts,
    chunk=how.prompts,
    first=first,
  )


def at_step(
  this: Run,
  examples: Examples,
  scorer: Scorer,
  step: int,
  params: PyTree,
  prompts: Sequence[Example],
) -> evaluate.Chunks:
  """The records of an evaluation in a run, sampled as its phase says."""
  phase = next(p for p in reversed(this.phases) if p.since <= max(step, 1))
  return records(
    this,
    phase.config,
    phase.memory.heldout,
    examples,
    scorer,
    params,
    prompts,
  )
