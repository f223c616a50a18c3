"""One optimizer update from a minibatch of rollouts.

A minibatch is a list of batches. The microbatches of a batch have one length
(packing.py). One program per length sums the gradients of a batch's
microbatches, and one more program applies the sum. The host does nothing
between microbatches.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, PyTree

from brorl_jax.learner.objective import (
  Objective,
  ResponseLogp,
  Stats,
  loss_and_stats,
  trees_of,
)
from brorl_jax.model import sharding
from brorl_jax.types import Batch, State


def zero_gradient(params: PyTree) -> tuple[PyTree, Stats]:
  """Gradient and statistics of no microbatch: the start of a sum."""
  # float32, whatever the parameters are: in bfloat16 a sum stops growing when
  # it is 256 times what is added.
  zeros = lambda x: jnp.zeros_like(x, jnp.float32)
  return jax.tree.map(zeros, params), Stats.zero(params)


def add_gradient(
  sums: tuple[PyTree, Stats],
  params: PyTree,
  batch: Batch,
  *,
  response_logp: ResponseLogp,
  objective: Objective,
) -> tuple[PyTree, Stats]:
  """Adds the gradients and statistics of one batch's microbatches.

  Only the first `used` microbatches are computed, whatever C is.
  """
  differentiate = jax.value_and_grad(
    functools.partial(
      loss_and_stats,
      response_logp=response_logp,
      objective=objective,
    ),
    has_aux=True,
  )

  def add(i, carry):
    grads, stats = carry
    # Sums, not means: the one division is by the tokens of the minibatch, so
    # that the result does not depend on how it is cut into microbatches.
    (_, more), grad = differentiate(params, _microbatch(batch, i))
    gap = jnp.maximum(stats.logp_gap_max, more.logp_gap_max)
    total = jax.tree.map(jnp.add, stats, more)  # of booleans: any of them
    stats = dataclasses.replace(total, logp_gap_max=gap, finite=more.finite)
    return jax.tree.map(jnp.add, grads, grad), stats

  # `used` is traced: a batch of 1 microbatch and one of 8 share a program.
  return jax.lax.fori_loop(0, batch.used, add, sums)


def _microbatch(batch: Batch, i) -> Batch:
  return jax.tree.map(lambda x: x[i] if x.ndim else x, batch)


def gradient(sums: tuple[PyTree, Stats]) -> tuple[PyTree, Stats]:
  """Gradient of the minibatch's mean loss: a single division at the end.

  grad = (sum over microbatches of d total / d params) / count
  """
  grads, stats = sums
  count = jnp.maximum(stats.entropy.count, 1.0)  # tokens
  grads = jax.tree.map(lambda g: g / count, grads)
  norm = optax.tree.norm(grads)
  stats = dataclasses.replace(stats, grad_norm=norm, finite=all_finite(grads))
  return grads, stats


def _dot(a: PyTree, b: PyTree) -> Float[Array, ""]:
  """Sum of products. `vdot` would flatten arrays that are cut along two axes:
  16 GB of an 8B policy would be gathered on every device."""
  products = jax.tree.map(lambda x, y: jnp.sum(x * y), a, b)
  return jnp.asarray(optax.tree.sum(products))


def all_finite(tree: PyTree) -> Bool[Array, " leaves"]:
  """Whether each leaf is finite everywhere, in the order of the tree."""
  return jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)])


@functools.partial(jax.jit, static_argnames=("temperature", "response_logp"))
def logp_of(
  params: PyTree,
  batch: Batch,
  temperature: float,
  *,
  response_logp: ResponseLogp,
) -> Float[Array, "C P M T"]:
  """Log-probabilities of a batch's responses under these parameters.

  For the reference policy, and for the old policy before the first of several
  minibatches. 0 in unused microbatches.
  """

  def score(i, out):
    micro = _microbatch(batch, i)
    logp, _ = response_logp(
      params,
      micro.prompt,
      micro.prompt_mask,
      micro.response,
      temperature,
      *trees_of(micro),
    )
    return out.at[i].set(logp)

  start = jnp.zeros_like(batch.logp_sampled)
  return jax.lax.fori_loop(0, batch.used, score, start)


_add = jax.jit(
  add_gradient,
  static_argnames=("response_logp", "objective"),
  donate_argnames="sums",
)


@functools.partial(jax.jit, static_argnames="tx", donate_argnames="state")
def _apply(
  state: State,
  sums: tuple[PyTree, Stats],
  most_norm: Float[Array, ""],
  *,
  tx: optax.GradientTransformation,
  watch: Callable[[PyTree], Float[Array, ""]] | None,
) -> tuple[State, Stats]:
  """Applies the mean gradient, or nothing if it cannot be trusted.

  If log-probabilities, loss, gradient or norm are not finite, or the norm is
  above `most_norm`, parameters and moments stay as they are, bit for bit.
  """
  grads, stats = gradient(sums)
  updates, opt = tx.update(grads, state.opt, state.params)
  # From the gradient alone: a condition on the new parameters would need them
  # beside the old ones, which are donated.
  usable = jnp.all(stats.finite) & jnp.isfinite(stats.loss.total)
  # Ratios are clamped, so that the loss may be finite without this.
  usable &= jnp.isfinite(stats.logp_gap_max)
  usable &= stats.grad_norm <= most_norm
  keep = lambda new, old: jnp.where(usable, new, old)
  params = optax.apply_updates(state.params, updates)
  params = jax.tree.map(keep, params, state.params)
  opt = jax.tree.map(keep, opt, state.opt)
  # A finite gradient can still give parameters that are not finite: b2 = 0 and
  # eps = 0 divide by 0 where a gradient is 0.
  finite = keep(all_finite(params), stats.finite)
  stats = dataclasses.replace(stats, finite=finite, skipped=~usable)
  if watch is not None:
    # Before the update: at the new parameters it would be another derivative.
    slope = jax.grad(watch)(state.params)
    change = jnp.where(usable, _dot(slope, updates), 0.0)
    stats = dataclasses.replace(stats, watched=change)
  return dataclasses.replace(state, params=params, opt=opt), stats


def minibatch_step(
  state: State,
  batches: Iterable[Batch],
  *,
  tx: optax.GradientTransformation,
  response_logp: ResponseLogp,
  objective: Objective,
  watch: Callable[[PyTree], Float[Array, ""]] | None = None,
  most_norm: float = math.inf,
) -> tuple[State, Stats]:
  """One optimizer update. `state` is donated; its step does not change.

  A gradient that cannot be trusted is not applied: see `Stats.skipped`.

  Moments in host memory are on the devices only during the last program.

  Args:
    batches: One minibatch, from `packing.pack`; each is asked for while the one
      before it is computed.
    watch: A function of the parameters, as a `jax.tree_util.Partial`, or None.
      `Stats.watched` is its change by this update to first order:
      <d watch / d params, updates>.
    most_norm: Norm of the gradient above which it is not applied.

  Returns:
    The new state, and sums over the minibatch.
  """
  # On a mesh the zeros lie where the sums will: otherwise the first batch would
  # compile `_add` a second time.
  places = jax.tree.map(lambda x: x.sharding, state.params)
  first_place, to = jax.tree.leaves(places)[0], None
  if isinstance(first_place, NamedSharding):
    to = places, NamedSharding(first_place.mesh, PartitionSpec())
  sums = jax.jit(zero_gradient, out_shardings=to)(state.params)
  for batch in batches:
    # Otherwise the host would place all batches while the first is computed.
    jax.block_until_ready(sums)
    sums = _add(
      sums,
      state.params,
      batch,
      response_logp=response_logp,
      objective=objective,
    )
  # AdamW's moments are 8 bytes per parameter, 14 GB for 1.78e9: in host memory
  # they leave room for the activations above.
  home = jax.tree.map(lambda x: x.sharding, state.opt)
  state = dataclasses.replace(state, opt=sharding.on_device(state.opt))
  most = np.float32(most_norm)
  state, stats = _apply(state, sums, most, tx=tx, watch=watch)
  return dataclasses.replace(
    state, opt=sharding.put_back(state.opt, home)
  ), stats


def first_bad_path(params: PyTree, finite: np.ndarray) -> str | None:
  """Path of the first parameter whose `finite` is False; None if all are."""
  paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
  bad = np.flatnonzero(~np.asarray(finite))
  if not bad.size:
    return None
  return jax.tree_util.keystr(paths[bad[0]], simple=True, separator="/")
