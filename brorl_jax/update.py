"""One optimizer update from a minibatch of rollouts.

`pack` cuts kept groups into blocks of rows on the host; `minibatch_step` adds
up the gradients of all microbatches and applies them, as one program.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, PyTree

from brorl_jax.rl import losses
from brorl_jax.rl.mean import Mean
from brorl_jax.types import Batch, Prompts, Rollouts, State

# (params, prompt [P,S], its mask, response [P,R,T]) -> logits [P,R,T,V]
ResponseLogits = Callable[[PyTree, Array, Array, Array], Array]


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
  """
  ramp = optax.linear_schedule(lr / max(warmup, 1), lr, max(warmup - 1, 1))
  after = optax.constant_schedule(lr)
  if total is not None:
    after = optax.cosine_decay_schedule(lr, max(total - warmup, 1))
  schedule = optax.join_schedules([ramp, after], [warmup])
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

  loss: Mean  # without the KL term
  kl_ref: Mean  # k2, nats per token; 0 without a reference
  kl_old: Mean  # k3 against the policy that sampled, nats per token
  clip_fraction: Mean
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
    return Stats(none, none, none, none, none, none, zero, zero, finite, zero)


@dataclasses.dataclass(frozen=True)
class Objective:
  """Constants of the loss; hashable, so jit may close over it."""

  clip_low: float
  clip_high: float
  kl_weight: float  # beta
  kl_clamp: float  # nats
  temperature: float  # of the sampler


def loss_and_stats(
  params: PyTree,
  reference: PyTree | None,
  micro: Batch,
  *,
  response_logits: ResponseLogits,
  objective: Objective,
) -> tuple[Float[Array, ""], Stats]:
  """Summed loss of one microbatch, to be divided by the minibatch's count.

    total = sum over tokens of weight * (ppo_clip + beta * k2)

  Args:
    params: Differentiated.
    reference: Parameters of the KL term's reference policy, or None.
    micro: One microbatch: a `Batch` without its leading axis.
    response_logits: The policy.
    objective: Constants.
  """
  flat = lambda x: x.reshape(-1, *x.shape[2:])
  mask, weight = flat(micro.mask), flat(micro.weight)
  logp_old = flat(micro.logp_old)

  def score(params):
    logits = response_logits(
      params, micro.prompt, micro.prompt_mask, micro.response
    )
    logp, entropy = losses.token_logp(
      logits / objective.temperature, micro.response
    )
    return flat(logp), flat(entropy)

  logp, entropy = score(params)
  loss, ppo = losses.ppo_clip(
    logp,
    logp_old,
    flat(micro.advantage),
    mask,
    clip_low=objective.clip_low,
    clip_high=objective.clip_high,
    weight=weight,
  )
  total, kl_ref = loss.total, Mean(jnp.zeros(()), jnp.zeros(()))
  if reference is not None:
    logp_ref, _ = score(jax.lax.stop_gradient(reference))
    kl_ref = losses.kl_k2(
      logp, logp_ref, mask, clamp=objective.kl_clamp, weight=weight
    )
    total += objective.kl_weight * kl_ref.total

  gap = jnp.where(mask, jnp.abs(logp - logp_old), 0.0)
  weight_BT = losses.per_token(weight, mask)
  stats = dataclasses.replace(
    Stats.zero(params),
    loss=loss,
    kl_ref=kl_ref,
    kl_old=ppo.approx_kl,
    clip_fraction=ppo.clip_fraction,
    entropy=Mean.of(entropy, mask, weight_BT),
    logp_gap=Mean.of(gap, mask, weight_BT),
    logp_gap_max=jnp.max(gap),
  )
  return total, jax.lax.stop_gradient(stats)


def gradient(
  params: PyTree,
  reference: PyTree | None,
  batch: Batch,
  *,
  response_logits: ResponseLogits,
  objective: Objective,
) -> tuple[PyTree, Stats]:
  """Gradient of the minibatch's mean loss: one division, at the end.

    grad = (sum over microbatches of d total / d params) / count

  Only the `used` first microbatches are computed, whatever C is.
  """
  differentiate = jax.value_and_grad(
    functools.partial(
      loss_and_stats, response_logits=response_logits, objective=objective
    ),
    has_aux=True,
  )
  one = lambda i: jax.tree.map(
    lambda x: x[i] if x.ndim else x, batch, is_leaf=lambda x: x is None
  )

  def add(i, carry):
    grads, stats = carry
    (_, more), grad = differentiate(params, reference, one(i))
    gap = jnp.maximum(stats.logp_gap_max, more.logp_gap_max)
    stats = dataclasses.replace(
      jax.tree.map(jnp.add, stats, more), logp_gap_max=gap, finite=more.finite
    )
    return jax.tree.map(jnp.add, grads, grad), stats

  start = (jax.tree.map(jnp.zeros_like, params), Stats.zero(params))
  grads, stats = jax.lax.fori_loop(0, batch.used, add, start)
  count = jnp.maximum(stats.loss.count, 1.0)
  grads = jax.tree.map(lambda g: g / count, grads)
  norm = optax.tree.norm(grads)
  stats = dataclasses.replace(stats, grad_norm=norm, finite=all_finite(grads))
  return grads, stats


def all_finite(tree: PyTree) -> Bool[Array, " leaves"]:
  """For each leaf, in the tree's order, whether all of it is finite."""
  return jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)])


@functools.partial(
  jax.jit,
  static_argnames=("tx", "response_logits", "objective"),
  donate_argnames="state",
)
def minibatch_step(
  state: State,
  batch: Batch,
  *,
  tx: optax.GradientTransformation,
  response_logits: ResponseLogits,
  objective: Objective,
  watch: Callable[[PyTree], Float[Array, ""]] | None = None,
) -> tuple[State, Stats]:
  """One optimizer update. `state` is donated; its step does not change.

  Args:
    state: Before the update.
    batch: One minibatch.
    tx: The optimizer.
    response_logits: The policy.
    objective: Constants of the loss.
    watch: A function of the parameters, as a `jax.tree_util.Partial`. Its
      directional derivative along the optimizer's step, <d watch / d params,
      updates>, is in the result: what to first order this update changes it by.
  """
  grads, stats = gradient(
    state.params,
    state.reference,
    batch,
    response_logits=response_logits,
    objective=objective,
  )
  updates, opt = tx.update(grads, state.opt, state.params)
  params = optax.apply_updates(state.params, updates)
  # A finite gradient can still leave parameters that are not.
  stats = dataclasses.replace(stats, finite=stats.finite & all_finite(params))
  if watch is not None:
    _, change = jax.jvp(watch, (state.params,), (updates,))
    stats = dataclasses.replace(stats, watched=change)
  return dataclasses.replace(state, params=params, opt=opt), stats


def first_bad_path(params: PyTree, finite: np.ndarray) -> str | None:
  """Path of the first parameter for which `finite` is False, or None."""
  paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
  bad = np.flatnonzero(~np.asarray(finite))
  if not bad.size:
    return None
  return jax.tree_util.keystr(paths[bad[0]], simple=True, separator="/")


@dataclasses.dataclass(frozen=True)
class Layout:
  """The static shape of minibatches."""

  rows: int  # R, rollouts per block; all of one prompt
  blocks: int  # P, blocks per microbatch over all devices
  micro: int  # C, microbatches that a minibatch may need

  @staticmethod
  def of(prompts: int, n: int, *, rows: int, blocks: int) -> "Layout":
    """Room for `prompts` groups of `n` different rollouts."""
    most = prompts * -(-n // rows)
    return Layout(rows, blocks, -(-most // blocks))


def split(groups: int, minibatches: int, seed: Sequence[int]) -> np.ndarray:
  """Which groups go into which minibatch: [minibatches, groups / minibatches].

  Whole groups, shuffled: a minibatch averages over as many prompts as it can.
  """
  order = np.random.default_rng(list(seed)).permutation(groups)
  return np.sort(order.reshape(minibatches, -1), axis=1)


def pack(
  prompts: Prompts,
  rollouts: Rollouts,
  advantage: Float[np.ndarray, "P N"],
  layout: Layout,
) -> Batch:
  """Cuts groups into blocks; of identical rollouts of a group one is kept.

  Identical rollouts have equal advantage and log-probability, so that one with
  the count as its weight has exactly the gradient of all of them. With short
  answers most of a group of 512 are copies.

  Args:
    prompts: P prompts, on the host.
    rollouts: Their N rollouts, on the host.
    advantage: One per rollout.
    layout: Must have room for all blocks.
  """
  P, _, T = rollouts.tokens.shape
  C, B, R = layout.micro, layout.blocks, layout.rows
  blocks = []  # (prompt, rows of it, how often each occurs)
  for p in range(P):
    first, count = rollouts.distinct(p)
    for start in range(0, len(first), R):
      at = slice(start, start + R)
      blocks.append((p, first[at], count[at]))

  rows, S = C * B, prompts.tokens.shape[1]
  out = {
    "prompt": np.zeros((rows, S), np.int32),
    "prompt_mask": np.zeros((rows, S), bool),
    "response": np.zeros((rows, R, T), np.int32),
    "mask": np.zeros((rows, R, T), bool),
    "logp_old": np.zeros((rows, R, T), np.float32),
    "advantage": np.zeros((rows, R), np.float32),
    "weight": np.zeros((rows, R), np.float32),
  }
  # A block without rows still needs a prompt with a last token.
  out["prompt_mask"][:, -1] = True
  for i, (p, chosen, count) in enumerate(blocks):
    to = (i, slice(len(chosen)))
    out["prompt"][i] = prompts.tokens[p]
    out["prompt_mask"][i] = prompts.mask[p]
    out["response"][to] = rollouts.tokens[p, chosen]
    out["mask"][to] = rollouts.mask[p, chosen]
    out["logp_old"][to] = rollouts.logp[p, chosen]
    out["advantage"][to] = advantage[p, chosen]
    out["weight"][to] = count
  folded = {k: v.reshape(C, B, *v.shape[1:]) for k, v in out.items()}
  used = -(-len(blocks) // B)
  return Batch(**folded, used=np.array(used, np.int32))
