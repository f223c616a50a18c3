"""The optimizer updates of one step: minibatches of groups, one update each.

One program per length sums the gradients of a batch's microbatches, and one
more applies the sum of a minibatch. The host does nothing in between.
"""

import concurrent.futures as futures
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, PyTree

from brorl_jax.learner import packing
from brorl_jax.learner.objective import (
  Objective,
  ResponseLogp,
  Stats,
  loss_and_stats,
)
from brorl_jax.many import processes
from brorl_jax.model import adapters, sharding
from brorl_jax.types import Batch, Groups, Interrupted, State


def zero_gradient(params: PyTree) -> tuple[PyTree, Stats]:
  """The start of a sum: zeros for what `adapters.split` says is trained."""
  params, _ = adapters.split(params)
  # In float32: in bfloat16 a sum stops growing at 256 times what is added.
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
  """Adds the gradients and statistics of a batch's `used` microbatches."""
  trained, frozen = adapters.split(params)
  loss = functools.partial(
    loss_and_stats, response_logp=response_logp, objective=objective
  )
  of_trained = lambda own, micro: loss(adapters.join(own, frozen), micro)
  differentiate = jax.value_and_grad(of_trained, has_aux=True)

  def add(i, carry):
    grads, stats = carry
    # Sums, not means: the one division is by the tokens of the minibatch, so
    # that the result does not depend on how it is cut into microbatches.
    (_, more), grad = differentiate(trained, _microbatch(batch, i))
    return _sum((grads, stats), (grad, more))

  # `used` is traced: a batch of 1 microbatch and one of 8 share a program.
  return jax.lax.fori_loop(0, batch.used, add, sums)


def _sum(
  one: tuple[PyTree, Stats], other: tuple[PyTree, Stats]
) -> tuple[PyTree, Stats]:
  """Gradients and statistics of both."""
  (grads, stats), (grad, more) = one, other
  gap = jnp.maximum(stats.logp_gap_max, more.logp_gap_max)
  total = jax.tree.map(jnp.add, stats, more)  # of booleans: any of them
  stats = dataclasses.replace(total, logp_gap_max=gap, finite=more.finite)
  return jax.tree.map(jnp.add, grads, grad), stats


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
  """Log-probabilities of a batch's responses under these parameters: the
  reference, or the policy before the first minibatch. 0 in unused microbatches.
  """

  def score(i, out):
    micro = _microbatch(batch, i)
    texts = micro.prompt, micro.prompt_mask, micro.response
    logp, _ = response_logp(params, *texts, temperature, micro.trees)
    return out.at[i].set(logp)

  start = jnp.zeros_like(batch.logp_sampled)
  return jax.lax.fori_loop(0, batch.used, score, start)


_join = jax.jit(_sum)
_STATIC = ("response_logp", "objective")
_add = jax.jit(add_gradient, static_argnames=_STATIC, donate_argnames="sums")


@functools.partial(jax.jit, static_argnames="tx", donate_argnames="state")
def _apply(
  state: State,
  sums: tuple[PyTree, Stats],
  most_norm: Float[Array, ""],
  *,
  tx: optax.GradientTransformation,
  watch: Callable[[PyTree], Float[Array, ""]] | None,
) -> tuple[State, Stats]:
  """Applies the mean gradient, or nothing if it cannot be trusted: if
  log-probabilities, loss, gradient or norm are not finite, or the norm is above
  `most_norm`, parameters and moments stay as they are, bit for bit.
  """
  grads, stats = gradient(sums)
  before, frozen = adapters.split(state.params)
  updates, opt = tx.update(grads, state.opt, before)
  # From the gradient alone: a condition on the new parameters would need them
  # beside the old ones, which are donated.
  usable = jnp.all(stats.finite) & jnp.isfinite(stats.loss.total)
  # Ratios are clamped, so that the loss may be finite without this.
  usable &= jnp.isfinite(stats.logp_gap_max)
  usable &= stats.grad_norm <= most_norm
  keep = lambda new, old: jnp.where(usable, new, old)
  params = jax.tree.map(keep, optax.apply_updates(before, updates), before)
  opt = jax.tree.map(keep, opt, state.opt)
  # A finite gradient is not enough: b2 = eps = 0 divide by 0 where one is 0.
  finite = keep(all_finite(params), stats.finite)
  stats = dataclasses.replace(stats, finite=finite, skipped=~usable)
  if watch is not None:
    # Before the update: at the new parameters it would be another derivative.
    slope = jax.grad(lambda x: watch(adapters.join(x, frozen)))(before)
    # `vdot` would flatten arrays that are cut along two axes: 16 GB of an 8B
    # policy would be gathered on every device.
    products = jax.tree.map(lambda x, y: jnp.sum(x * y), slope, updates)
    change = jnp.where(usable, optax.tree.sum(products), 0.0)
    stats = dataclasses.replace(stats, watched=change)
  params = adapters.join(params, frozen)
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
  groups: int = 1,
) -> tuple[State, Stats]:
  """One optimizer update. `state` is donated; its step does not change.

  A gradient that cannot be trusted, or whose norm is above `most_norm`, is not
  applied: see `Stats.skipped`. Moments in host memory are on the devices only
  during the last program. Each of the `batches` of the minibatch is asked for
  while the one before it is computed; of several `groups`, which compute beside
  each other, each takes every so many-th, and all are asked for first. `watch`
  is None or a function of the parameters, as a `jax.tree_util.Partial`, whose
  change to first order is `Stats.watched`: <d watch / d params, updates>.
  """
  # On a mesh the zeros lie where the sums will, or `_add` is compiled twice.
  trained, _ = adapters.split(state.params)
  places = jax.tree.map(lambda x: x.sharding, trained)
  first_place, to = jax.tree.leaves(places)[0], None
  if isinstance(first_place, NamedSharding):
    to = places, NamedSharding(first_place.mesh, PartitionSpec())
  zeros = jax.jit(zero_gradient, out_shardings=to)
  add = functools.partial(
    _add, response_logp=response_logp, objective=objective
  )

  def summed(batches: Iterable[Batch]) -> tuple[PyTree, Stats]:
    with processes.launching:
      sums = zeros(state.params)
    for batch in batches:
      # Otherwise the host would place all batches while the first is computed.
      jax.block_until_ready(sums)
      processes.trim()  # 1.2 GB of each length, for a model of 135M
      with processes.launching:
        sums = add(sums, state.params, batch)
    return jax.block_until_ready(sums)

  if groups == 1:
    sums = summed(batches)
  else:
    every = [*batches]
    with futures.ThreadPoolExecutor(groups) as pool:
      parts = pool.map(summed, [every[g::groups] for g in range(groups)])
      sums = functools.reduce(_join, parts)
  processes.trim()
  # AdamW's moments are 8 bytes per parameter, 14 GB for 1.78e9: in host memory
  # they leave room for the activations above.
  home = jax.tree.map(lambda x: x.sharding, state.opt)
  state = dataclasses.replace(state, opt=sharding.on_device(state.opt))
  state, stats = _apply(state, sums, np.float32(most_norm), tx=tx, watch=watch)
  opt = sharding.put_back(state.opt, home)
  return dataclasses.replace(state, opt=opt), stats


Minibatches = list[list[packing.Later]]  # the batches of each minibatch


def minibatches(
  kept: Groups,
  advantage: Float[np.ndarray, "P N"],
  counted: Bool[np.ndarray, "P N"],
  layout: packing.Layout,
  *,
  count: int,
  seed: tuple[int, int],
  scale: Callable[[np.ndarray], np.ndarray | None],
) -> list[packing.Plan]:
  """Shuffles whole groups into minibatches and lays them out, on the host.

  `counted` is False for rollouts that are left out of the loss. `scale` turns
  the lengths of a minibatch into factors of its loss, see `packing.loss_scale`.
  """
  # What is left out becomes empty, so that packing drops it.
  keep, rollouts, factors = counted[..., None], kept.rollouts, None
  if not keep.all():
    rollouts = dataclasses.replace(rollouts, mask=rollouts.mask & keep)
  length, out = rollouts.own_length, []
  for at in packing.split(len(counted), count, seed):
    # By number, of the whole: a copy of long rollouts is gigabytes.
    if (some := scale(length[at])) is not None:
      factors = np.zeros(length.shape, np.float32)
      factors[at] = some
    source = packing.Source(kept.prompts, rollouts, advantage, factors)
    out.append(packing.pack(source, layout, at.tolist()))
  return out


def scored(
  parts: Minibatches,
  state: State,
  mesh: Mesh,
  *,
  logp_of: Callable[[PyTree, Batch], jax.Array],
  kl_term: bool,
) -> Minibatches:
  """Batches with the log-probabilities that the loss needs, on the host. One at
  a time is on the devices, where `logp_of` scores it by parameters. With
  `kl_term` the loss compares with the reference, or the base of an adapter.
  """
  scorers = {}
  # From the second minibatch on the policy is not the one that sampled.
  if len(parts) > 1:
    scorers["logp_old"] = state.params
  reference = state.reference or adapters.split(state.params)[1]
  if kl_term and reference:
    scorers["logp_ref"] = sharding.on_device(reference)

  def score(later: packing.Later) -> packing.Later:
    own = sharding.own_rows(mesh, later.blocks)
    batch = later.make(own)
    there = placed(later._replace(make=lambda _: batch), mesh)
    by = lambda params: sharding.to_host(logp_of(params, there))[:, own].copy()
    logp = {name: by(params) for name, params in scorers.items()}
    batch = dataclasses.replace(batch, **logp)
    return later._replace(make=lambda _: batch)

  if not scorers:
    return parts
  return [[score(later) for later in part] for part in parts]


def placed(later: packing.Later, mesh: Mesh) -> PyTree:
  """A batch on the mesh: blocks, axis 1, over rows; a host makes its own."""
  own = sharding.own_rows(mesh, later.blocks)
  put = functools.partial(sharding.spread_rows, mesh, own, later.blocks)
  return jax.tree.map(put, later.make(own))


def apply(
  state: State,
  parts: Minibatches,
  mesh: Mesh,
  step: Callable[[State, Iterable[Batch]], tuple[State, Stats]],
  gives_up: Callable[[], bool] = lambda: False,
) -> tuple[State, list[Stats]]:
  """One optimizer update per minibatch, each by `step`; see `minibatch_step`. A
  batch is placed at its turn: 128 x 512 rollouts of 15,360 tokens are 17 GB.
  Raises Interrupted if it `gives_up` before one, with the state lost.
  """
  stats = []

  def placing(part: list[packing.Later]) -> Iterator[Batch]:
    for batch in part:
      if gives_up():
        raise Interrupted({})
      yield placed(batch, mesh)

  for part in parts:
    state, part_stats = step(state, placing(part))
    stats.append(part_stats)
  return dataclasses.replace(state, step=state.step + 1), stats


def skipped(
  stats: Sequence[Stats], params: PyTree, step: int
) -> tuple[str, ...]:
  """The reason for each skipped update of a step.

  Raises FloatingPointError if an update that was applied made a parameter that
  is not finite: the state must not be saved.
  """
  leaves = jax.tree_util.tree_leaves_with_path(adapters.split(params)[0])
  text = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
  paths = [text(path) for path, _ in leaves]
  found = []
  for i, update in enumerate(stats):
    bad = np.flatnonzero(~sharding.to_host(update.finite))
    path = paths[bad[0]] if bad.size else None
    if not update.skipped:
      if path is not None:
        why = f"{path} is not finite after the update"
        raise FloatingPointError(f"step {step}: {why}; lower config.optim.lr")
      continue
    norm, loss = float(update.grad_norm), float(update.loss.value)
    why = f"its norm is {norm:.3g}, a spike"
    if not math.isfinite(update.logp_gap_max):
      why = "a log-probability of sampler or trainer is not finite"
    elif not math.isfinite(loss):
      why = f"the loss is {loss}"
    elif path is not None:
      why = f"that of {path} is not finite"
    elif not math.isfinite(norm):
      why = f"its norm is {norm}"
    found.append(f"the gradient of update {i + 1} was not applied: {why}")
  return tuple(found)


def packing_metrics(
  plans: Sequence[packing.Plan], rollouts: int
) -> dict[str, float]:
  """How much packing of the rollouts that count saved, and how much it pads."""
  rows = sum(plan.rollouts for plan in plans)
  return {
    "update/distinct_fraction": rows / max(rollouts, 1),
    "update/padding_fraction": packing.padding_fraction(plans),
  }


def update_metrics(
  stats: Sequence[Stats], objective: Objective
) -> dict[str, float | None]:
  """Metrics of a step's updates; means are over those that were applied."""

  def mean(name: str) -> float | None:
    values = [getattr(s, name) for s in stats if not s.skipped]
    values = [getattr(x, "value", x) for x in values]
    return float(np.mean(values)) if values else None

  kl = mean("kl_ref") if objective.kl_weight else None
  # A user's own loss may not count clipped tokens.
  clips = all(s.clip_fraction.count > 0 for s in stats)
  if (total := mean("loss")) is not None:
    total += objective.kl_weight * (kl or 0.0)
    total -= objective.entropy_weight * (mean("entropy") or 0.0)
  # The sampler against the trainer, with the parameters that sampled.
  corrected = mean if objective.correction else lambda name: None
  old = stats[0].logp_gap_old
  return {
    "policy/entropy": mean("entropy"),
    "policy/kl_ref": kl,
    "policy/kl_old": mean("kl_old"),
    "policy/clip_fraction": mean("clip_fraction") if clips else None,
    # Before the first update trainer and sampler are equal: it is rounding.
    "policy/logp_gap_max": float(stats[0].logp_gap_max),
    "policy/logp_gap_mean": float(stats[0].logp_gap.value),
    "policy/logp_gap_old": float(old.value) if old.count > 0 else None,
    "correction/weight_mean": corrected("correction"),
    "correction/changed_fraction": corrected("corrected"),
    "correction/kl_sampler": corrected("kl_sampler"),
    "loss/total": total,
    "optim/grad_norm": mean("grad_norm"),
    "update/skipped": float(sum(bool(s.skipped) for s in stats)),
  }
