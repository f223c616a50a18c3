"""Held-out prompts: refused if they were trained on, sampled and recorded."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import PyTree

from brorl_jax import evaluate, types
from brorl_jax.config import Config
from brorl_jax.data import dataset, heldout
from brorl_jax.model import sharding
from brorl_jax.plan.checkpoint_source import Start
from brorl_jax.plan.resolve import Heldout, Run, WithPolicy
from brorl_jax.stages import sampling
from brorl_jax.stages.examples import Examples, file_form
from brorl_jax.stages.scoring import Scorer
from brorl_jax.verdicts.base import MADE, Example
from brorl_jax.verdicts.domains import DOMAINS

# Only prompts are compared: reference answers need no check.
_UNTRIED = {
  name: dataclasses.replace(domain, check_reference=dict)
  for name, domain in DOMAINS.items()
}


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

  `params` are spread over all processes, `c` says how prompts are sampled.
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


def refuse_trained_on(
  starts: Sequence[Start], evaluated: dataset.Data
) -> list[str]:
  """Refuses prompts that training used or could have drawn.

  A run that was resumed with other files was trained on all of them. Examples
  of files are compared by id and raw text, before the config adds instructions.
  Puzzles are compared with the generated ones. A generated puzzle that a file
  lists under another domain is not found.

  Args:
    starts: The runs that led to the policy.
    evaluated: The held-out examples.

  Returns:
    A line for each file that is missing and could not be compared.

  Raises:
    ValueError: An id or a prompt is on both sides (names both places), or a
      file changed since the training (names the file).
  """
  log_lines: dict[str, None] = {}
  for start in starts:
    train, missing = _trained_on(start)
    prefix = f"not compared with the training of {start.run}: "
    log_lines |= dict.fromkeys(prefix + why for why in missing)
    # Puzzles from files replaced generated ones.
    stored = any(example.domain == MADE for example in train.examples)
    had = "had"
    try:
      heldout.refuse_overlap(train, evaluated)
      had = "may have drawn"
      heldout.refuse_drawn(evaluated, [] if stored else start.made)
    except dataset.DataError as e:
      raise ValueError(
        f"the training of {start.run} {had} this prompt: {e}"
      ) from None
  return [*log_lines]


def _trained_on(start: Start) -> tuple[dataset.Data, list[str]]:
  """Training examples of the files that exist, and why others are missing."""
  examples, places, missing = [], [], []
  for path, digest in start.files.items():
    try:
      if digest not in dataset.file_digests(path).values():
        raise ValueError(
          f"{path} has changed since {start.run} was trained on it; restore "
          "it, so that held-out prompts can be compared"
        )
      form = file_form(start.fields, start.domain, own=start.own)
      read = dataset.read(path, form=form, domains=_UNTRIED, skip_bad=True)
    except dataset.DataError as e:
      missing.append(str(e))
      continue
    if start.heldout_one_in:
      read = heldout.trained_on(read, one_in=start.heldout_one_in)
    examples += read.examples
    places += read.places
  return dataset.Data(examples, places), missing
