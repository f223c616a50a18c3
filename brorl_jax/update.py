"""One optimizer update from a minibatch of rollouts.

A minibatch is a few batches of microbatches, of one length each (packing.py).
One program per length adds up the gradients of all microbatches, one more
applies them; the host does nothing between microbatches.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, PyTree

from brorl_jax import sharding
from brorl_jax.rl import corrections, losses
from brorl_jax.rl.mean import Mean
from brorl_jax.types import Batch, State

# (params, prompt [P,S], its mask, response [P,R,T], temperature) ->
# log-probabilities and entropies [P,R,T]
ResponseLogp = Callable[
  [PyTree, Array, Array, Array, float], tuple[Array, Array]
]


def optimizer(
  *,
  lr: float,
  warmup: int,
  total: int | None,
  b1: float,
  b2: float,
  eps: float,
  weight_decay: float,
  max_grad_norm: float,
  second_moment: str = "full",
) -> tuple[optax.GradientTransformation, optax.Schedule]:
  """AdamW behind clipping by global norm, and its learning rate by update.

  Args:
    lr: Largest learning rate.
    warmup: Updates over which it rises linearly from 0; the first uses
      lr / warmup.
    total: Updates over which it then falls to 0 as a cosine; constant if None.
    b1: Decay of the first moment.
    b2: Decay of the second moment.
    eps: Added to the root of the second moment.
    weight_decay: Decoupled, per unit of learning rate.
    max_grad_norm: Longer gradients are scaled down to it.
    second_moment: "full", or "factored": of a matrix with 96 rows and columns
      or more their means r and c alone, v = r c' / mean(r) (Shazeer & Stern
      2018, arXiv:1804.04235, algorithm 4), so that it takes no memory. The
      first moment is then that of g / sqrt(v) instead of g.
  """
  ramp = optax.linear_schedule(lr / max(warmup, 1), lr, max(warmup - 1, 1))
  after = optax.constant_schedule(lr)
  if total is not None:
    after = optax.cosine_decay_schedule(lr, max(total - warmup, 1))
  schedule = optax.join_schedules([ramp, after], [warmup])
  if second_moment == "factored":
    adamw = optax.chain(
      # A mean without bias: Adam's b2 and its correction in one weight.
      optax.scale_by_factored_rms(
        decay_rate=b2,
        decay_rate_fn=lambda t, b: b * (1.0 - b**t) / (1.0 - b ** (t + 1)),
        epsilon=max(eps**2, 1e-30),  # less is 0 in float32
        # More than layers, over which norms must not be averaged.
        min_dim_size_to_factor=96,
      ),
      optax.ema(b1),
      optax.add_decayed_weights(weight_decay),
      optax.scale_by_learning_rate(schedule),
    )
  else:
    adamw = optax.adamw(
      schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay
    )
  return optax.chain(optax.clip_by_global_norm(max_grad_norm), adamw), schedule


def init_state(
  params: PyTree, tx: optax.GradientTransformation, *, keep_reference: bool
) -> State:
  """The state before the first step."""
  copy = lambda tree: jax.tree.map(jnp.copy, tree)
  return State(
    step=jnp.int32(0),
    params=params,
    opt=tx.init(params),
    reference=copy(params) if keep_reference else None,
  )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stats:
  """Sums over a minibatch; `Mean`s add up over microbatches."""

  loss: Mean  # of tokens, or of sequences; without the terms that are added
  kl_ref: Mean  # k2, nats per token; 0 without a reference
  kl_old: Mean  # k3 against the policy that sampled, nats per token
  clip_fraction: Mean
  # Trainer against sampler, before any update: k3 of KL(sampler || trainer),
  # weights, and tokens whose weight is not their ratio. 0 without correction.
  kl_sampler: Mean
  correction: Mean
  corrected: Mean
  entropy: Mean  # of the policy at the sampled positions, nats per token
  logp_gap: Mean  # |trainer - sampler|, nats; means something before any update
  logp_gap_max: Float[Array, ""]
  grad_norm: Float[Array, ""]  # before clipping
  finite: Bool[Array, " leaves"]  # gradient and result, in the tree's order
  watched: Float[Array, ""]  # first-order change of `watch`; 0 without

  @staticmethod
  def zero(params: PyTree) -> "Stats":
    """Of no tokens at all."""
    zero, none = jnp.zeros(()), Mean(jnp.zeros(()), jnp.zeros(()))
    finite = jnp.ones(len(jax.tree.leaves(params)), bool)
    return Stats(
      loss=none,
      kl_ref=none,
      kl_old=none,
      clip_fraction=none,
      kl_sampler=none,
      correction=none,
      corrected=none,
      entropy=none,
      logp_gap=none,
      logp_gap_max=zero,
      grad_norm=zero,
      finite=finite,
      watched=zero,
    )


@dataclasses.dataclass(frozen=True)
class Correction:
  """How a token's loss is weighted for a sampler that is not the trainer."""

  kind: Literal["truncated", "banded", "sequence"]  # see rl/corrections.py
  low: float  # unused by "truncated"
  high: float

  def weights(
    self,
    logp: Float[Array, "B T"],
    logp_sampled: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    by_sequence: bool,
  ) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """The weights, and where they are not the plain ratio.

    `by_sequence` takes the geometric mean of a sequence's ratios for each.
    """
    if by_sequence:
      mean = corrections.mean_log_ratio(logp, logp_sampled, mask)
      logp = jnp.where(mask, mean[:, None], 0.0)
      logp_sampled = jnp.zeros_like(logp)
    band = dict(low=self.low, high=self.high)
    plain = corrections.truncated_weight(logp, logp_sampled, cap=math.inf)
    if self.kind == "truncated":
      found = corrections.truncated_weight(logp, logp_sampled, cap=self.high)
    elif self.kind == "banded":
      found = corrections.banded_weight(logp, logp_sampled, **band)
    else:
      keep = corrections.sequence_mask(logp, logp_sampled, mask, **band)
      found = jnp.where(keep[:, None], plain, 0.0)
    return found, found != plain


@dataclasses.dataclass(frozen=True)
class Objective:
  """Constants of the loss; hashable, so jit may close over it."""

  clip_low: float
  clip_high: float
  kl_weight: float  # beta
  kl_clamp: float  # of the k2 term, nats per token
  temperature: float  # of the sampler
  dual_clip: float | None = None
  by_sequence: bool = False  # GSPO instead of PPO
  entropy_weight: float = 0.0
  correction: Correction | None = None


def loss_and_stats(
  params: PyTree,
  micro: Batch,
  *,
  response_logp: ResponseLogp,
  objective: Objective,
  tokens_per_sequence: Float[Array, ""] | float = 1.0,
) -> tuple[Float[Array, ""], Stats]:
  """Summed loss of one microbatch, to be divided by the minibatch's tokens.

    total = sum over tokens of weight * (correction * ppo_clip + beta * k2
                                         - entropy_weight * entropy)

  With one ratio per sequence its loss is counted by sequences:

    total = tokens_per_sequence * sum of weight * correction * gspo + the rest

  so that the division by tokens leaves the mean over sequences.

  Args:
    params: Differentiated.
    micro: One microbatch: a `Batch` without its leading axis. The KL term is
      left out if it has no log-probabilities of a reference.
    response_logp: The policy.
    objective: Constants.
    tokens_per_sequence: Mean of the minibatch; read by GSPO alone.
  """
  flat = lambda x: x.reshape(-1, *x.shape[2:])
  mask, weight = flat(micro.mask), flat(micro.weight)
  sampled = flat(micro.logp_sampled)
  logp, entropy = map(
    flat,
    response_logp(
      params,
      micro.prompt,
      micro.prompt_mask,
      micro.response,
      objective.temperature,
    ),
  )
  if micro.logp_old is not None:
    logp_old = flat(micro.logp_old)
  elif objective.correction is not None:
    logp_old = jax.lax.stop_gradient(logp)  # a single minibatch: itself
  else:
    logp_old = sampled
  loss, ppo, correction = _policy_loss(
    logp, logp_old, sampled, flat(micro.advantage), mask, weight, objective
  )
  total, kl_ref = loss.total, Mean(jnp.zeros(()), jnp.zeros(()))
  if objective.by_sequence:
    total *= tokens_per_sequence
  if micro.logp_ref is not None:
    kl_ref = losses.kl_k2(
      logp,
      flat(micro.logp_ref),
      mask,
      clamp=objective.kl_clamp,
      weight=weight,
    )
    total += objective.kl_weight * kl_ref.total

  gap = jnp.where(mask, jnp.abs(logp - sampled), 0.0)
  weight_BT = losses.per_token(weight, mask)
  entropy_mean = Mean.of(entropy, mask, weight_BT)
  if objective.entropy_weight:
    total -= objective.entropy_weight * entropy_mean.total
  stats = dataclasses.replace(
    Stats.zero(params),
    **correction,
    loss=loss,
    kl_ref=kl_ref,
    kl_old=ppo.approx_kl,
    clip_fraction=ppo.clip_fraction,
    entropy=entropy_mean,
    logp_gap=Mean.of(gap, mask, weight_BT),
    logp_gap_max=jnp.max(gap),
  )
  return total, jax.lax.stop_gradient(stats)


def _policy_loss(
  logp, logp_old, sampled, advantage, mask, weight, objective: Objective
) -> tuple[Mean, losses.PpoStats, dict[str, Mean]]:
  """The loss that the advantages enter, and what corrected it."""
  told, weights = {}, None
  if objective.correction is not None:
    weights, cut = objective.correction.weights(
      logp_old, sampled, mask, by_sequence=objective.by_sequence
    )
    gap = losses.log_ratio(logp_old, sampled)
    mean = functools.partial(
      Mean.of, where=mask, weight=losses.per_token(weight, mask)
    )
    told = {
      "kl_sampler": mean(jnp.exp(gap) - 1.0 - gap),
      "correction": mean(weights),
      "corrected": mean(cut.astype(jnp.float32)),
    }
  clip = dict(clip_low=objective.clip_low, clip_high=objective.clip_high)
  if objective.by_sequence:
    if weights is not None:  # equal over a sequence, 1 where there is no token
      weights = jnp.max(weights, axis=1, where=mask, initial=0.0)
    loss, ppo = losses.gspo(
      logp, logp_old, advantage, mask, weight=weight, correction=weights, **clip
    )
  else:
    loss, ppo = losses.ppo_clip(
      logp,
      logp_old,
      advantage,
      mask,
      weight=weight,
      correction=weights,
      dual_clip=objective.dual_clip,
      **clip,
    )
  return loss, ppo, told


def zero_gradient(params: PyTree) -> tuple[PyTree, Stats]:
  """Of no microbatch at all."""
  zeros = lambda x: jnp.zeros_like(x, jnp.float32)
  return jax.tree.map(zeros, params), Stats.zero(params)


def add_gradient(
  sums: tuple[PyTree, Stats],
  params: PyTree,
  batch: Batch,
  *,
  response_logp: ResponseLogp,
  objective: Objective,
  tokens_per_sequence: Float[Array, ""] | float = 1.0,
) -> tuple[PyTree, Stats]:
  """Adds the gradients and sums of the microbatches of one batch.

  Only the `used` first microbatches are computed, whatever C is.
  """
  differentiate = jax.value_and_grad(
    functools.partial(
      loss_and_stats,
      response_logp=response_logp,
      objective=objective,
      tokens_per_sequence=tokens_per_sequence,
    ),
    has_aux=True,
  )

  def add(i, carry):
    grads, stats = carry
    (_, more), grad = differentiate(params, _microbatch(batch, i))
    gap = jnp.maximum(stats.logp_gap_max, more.logp_gap_max)
    stats = dataclasses.replace(
      jax.tree.map(jnp.add, stats, more), logp_gap_max=gap, finite=more.finite
    )
    return jax.tree.map(jnp.add, grads, grad), stats

  return jax.lax.fori_loop(0, batch.used, add, sums)


def _microbatch(batch: Batch, i) -> Batch:
  return jax.tree.map(lambda x: x[i] if x.ndim else x, batch)


def gradient(sums: tuple[PyTree, Stats]) -> tuple[PyTree, Stats]:
  """Gradient of the minibatch's mean loss: one division, at the end.

  grad = (sum over microbatches of d total / d params) / count
  """
  grads, stats = sums
  count = jnp.maximum(stats.entropy.count, 1.0)  # tokens
  grads = jax.tree.map(lambda g: g / count, grads)
  norm = optax.tree.norm(grads)
  stats = dataclasses.replace(stats, grad_norm=norm, finite=all_finite(grads))
  return grads, stats


def all_finite(tree: PyTree) -> Bool[Array, " leaves"]:
  """For each leaf, in the tree's order, whether all of it is finite."""
  return jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)])


@functools.partial(jax.jit, static_argnames=("temperature", "response_logp"))
def logp_of(
  params: PyTree,
  batch: Batch,
  temperature: float,
  *,
  response_logp: ResponseLogp,
) -> Float[Array, "C P R T"]:
  """Log-probabilities that these parameters give to a batch's responses.

  Those of a reference, or of the policy before the first of several minibatches
  as the trainer computes them. 0 in unused microbatches.
  """

  def score(i, out):
    micro = _microbatch(batch, i)
    logp, _ = response_logp(
      params, micro.prompt, micro.prompt_mask, micro.response, temperature
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
  *,
  tx: optax.GradientTransformation,
  watch: Callable[[PyTree], Float[Array, ""]] | None,
) -> tuple[State, Stats]:
  grads, stats = gradient(sums)
  updates, opt = tx.update(grads, state.opt, state.params)
  params = optax.apply_updates(state.params, updates)
  # A finite gradient can still leave parameters that are not.
  stats = dataclasses.replace(stats, finite=stats.finite & all_finite(params))
  if watch is not None:
    slope = jax.grad(watch)(state.params)
    stats = dataclasses.replace(stats, watched=optax.tree.vdot(slope, updates))
  return dataclasses.replace(state, params=params, opt=opt), stats


def minibatch_step(
  state: State,
  batches: Sequence[Batch],
  *,
  tx: optax.GradientTransformation,
  response_logp: ResponseLogp,
  objective: Objective,
  watch: Callable[[PyTree], Float[Array, ""]] | None = None,
) -> tuple[State, Stats]:
  """One optimizer update. `state` is donated; its step does not change.

  Moments that lie in host memory are on the devices for the last program alone.

  Args:
    state: Before the update.
    batches: One minibatch, from `packing.pack`.
    tx: The optimizer.
    response_logp: The policy.
    objective: Constants of the loss.
    watch: A function of the parameters, as a `jax.tree_util.Partial`. Its
      directional derivative along the optimizer's step, <d watch / d params,
      updates>, is in the result: what to first order this update changes it by.
  """
  # On a mesh placed as what is added up, so that the first batch needs no
  # program of its own.
  places = jax.tree.map(lambda x: x.sharding, state.params)
  one, to = jax.tree.leaves(places)[0], None
  if isinstance(one, NamedSharding):
    to = places, NamedSharding(one.mesh, PartitionSpec())
  sums = jax.jit(zero_gradient, out_shardings=to)(state.params)
  length = {}
  if objective.by_sequence:
    length = {"tokens_per_sequence": _tokens_per_sequence(list(batches))}
  for batch in batches:
    sums = _add(
      sums,
      state.params,
      batch,
      response_logp=response_logp,
      objective=objective,
      **length,
    )
  home = jax.tree.map(lambda x: x.sharding, state.opt)
  state = dataclasses.replace(state, opt=sharding.on_device(state.opt))
  state, stats = _apply(state, sums, tx=tx, watch=watch)
  return dataclasses.replace(
    state, opt=sharding.put_back(state.opt, home)
  ), stats


@jax.jit
def _tokens_per_sequence(batches: list[Batch]) -> Float[Array, ""]:
  """Mean over the minibatch of the lengths of its responses that have any."""
  tokens = [jnp.sum(b.mask * b.weight[..., None]) for b in batches]
  some = [jnp.sum(jnp.any(b.mask, axis=-1) * b.weight) for b in batches]
  return sum(tokens, jnp.zeros(())) / jnp.maximum(sum(some, jnp.zeros(())), 1.0)


def updates_done(opt: PyTree) -> int:
  """Optimizer updates since these moments were made."""
  counts = optax.tree.get_all_with_path(opt, "count")
  return int(counts[0][1])


def first_bad_path(params: PyTree, finite: np.ndarray) -> str | None:
  """Path of the first parameter for which `finite` is False, or None."""
  paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
  bad = np.flatnonzero(~np.asarray(finite))
  if not bad.size:
    return None
  return jax.tree_util.keystr(paths[bad[0]], simple=True, separator="/")
