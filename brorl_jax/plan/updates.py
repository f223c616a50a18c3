"""The programs of an update, lowered from shapes alone."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from brorl_jax.learner import theory, update
from brorl_jax.learner.packing import MICROBATCHES
from brorl_jax.many import meshes
from brorl_jax.model.policy import Policy
from brorl_jax.plan.run import Job, Program, placed, size
from brorl_jax.types import Batch, State


def batch(run: Job, *, scored: bool) -> Batch:
  """Shapes of the longest batch of an update, where it lies."""
  c = run.config
  own = run.at(None, meshes.rows(run.mesh))
  C, P, M = MICROBATCHES, c.optim.blocks, c.optim.rows
  S, T = c.data.prompt_tokens, c.sampling.max_new_tokens
  of = lambda *shape, dtype=jnp.float32: own((C, P, *shape), dtype)
  logp = of(M, T)
  second = scored and c.optim.minibatches > 1
  return Batch(
    prompt=of(S, dtype=jnp.int32),
    prompt_mask=of(S, dtype=jnp.bool_),
    response=of(M, T, dtype=jnp.int32),
    mask=of(M, T, dtype=jnp.bool_),
    logp_sampled=logp,
    advantage=of(M),
    weight=of(M),
    used=run.at()((), jnp.int32),
    logp_old=logp if second else None,
    logp_ref=logp if scored and c.reference.kl_weight else None,
  )


def updating(run: Job) -> Iterator[Program]:
  """As the update stage runs them, for the longest responses."""
  c, state = run.config, run.state()
  policy = dataclasses.replace(run.policy, remat=c.devices.remat, mesh=run.mesh)
  logp = policy.response_logp
  plain, scored = batch(run, scored=False), batch(run, scored=True)
  program = functools.partial(Program, layers=run.policy.layers)
  if c.optim.minibatches > 1 or c.reference.kl_weight:
    yield program(
      "score",
      update.logp_of.lower(
        state.params, plain, c.sampling.temperature, response_logp=logp
      ),
      run.sampling_bytes + size(plain),
    )
  sums = _sums(run, state)
  yield program(
    "gradient",
    update._add.lower(
      sums,
      state.params,
      scored,
      response_logp=logp,
      objective=run.phase.objective,
    ),
    run.sampling_bytes + size((sums, scored)),
  )
  yield program(
    "apply",
    update._apply.lower(
      state, sums, np.float32(0), tx=run.phase.tx, watch=_watch(run, policy)
    ),
    run.phase.memory.applying_bytes + size(sums),
  )


def _sums(run: Job, state: State) -> PyTree:
  """The sums of gradients, which lie as the parameters, and of statistics."""
  gradients, stats = jax.eval_shape(update.zero_gradient, state.params)
  places = jax.tree.map(lambda x: x.sharding, state.params)
  whole = run.at()
  return (
    placed(gradients, places),
    jax.tree.map(lambda x: whole(x.shape, x.dtype), stats),
  )


def _watch(run: Job, policy: Policy) -> Any:
  """What an update watches of the theorem; None if nothing."""
  c = run.config
  if not c.theory.prompts:
    return None
  P, M, N = c.theory.prompts, theory.RESPONSES, c.sampling.n
  P = min(P, c.sampling.prompts)
  S = c.data.prompt_tokens
  T = min(theory.TOKENS, c.sampling.max_new_tokens)
  of = lambda dtype, *shape: np.zeros(shape, dtype)
  probe = theory.Probe(
    prompt=of(np.int32, P, S),
    prompt_mask=of(bool, P, S),
    response=of(np.int32, P, M, T),
    mask=of(bool, P, M, T),
    probability=of(np.float32, P, M),
    correct=of(bool, P, M),
    sampled=of(np.float32, P, N),
    sampled_correct=of(bool, P, N),
    unsampled=of(np.float32, P),
    draws=of(np.float32, P),
  )
  lean = dataclasses.replace(policy, remat="layer")
  mass = theory.Mass(lean.response_logp, c.sampling.temperature)
  return jax.tree_util.Partial(mass.mean, probe)
