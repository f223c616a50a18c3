"""AdamW, its learning-rate schedule, and the first training state."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from brorl_jax.types import State

Optimizer = optax.GradientTransformation
Schedule = optax.Schedule


def adamw(
  *,
  lr: float,
  warmup: int,
  total: int | None = None,
  b1: float,
  b2: float,
  eps: float,
  weight_decay: float,
  max_grad_norm: float,
) -> tuple[Optimizer, Schedule]:
  """AdamW after clipping by global norm, and its learning-rate schedule.

  Args:
    lr: Peak learning rate.
    warmup: Updates over which the rate rises linearly; the first update uses
      lr / warmup.
    total: Updates after which the rate has fallen to 0 along a cosine; constant
      after the warmup if None.
    weight_decay: Decoupled, multiplied by the learning rate.
    max_grad_norm: Gradients with a larger norm are scaled down to it.

  Returns:
    The optimizer, and the learning rate of each update.
  """
  # From lr / warmup, not from 0: no update is wasted at rate 0.
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
  """The training state before the first step."""
  # A copy: the first update donates the parameters.
  copy = lambda tree: jax.tree.map(jnp.copy, tree)
  return State(
    step=jnp.int32(0),
    params=params,
    opt=tx.init(params),
    reference=copy(params) if keep_reference else None,
  )


def updates_done(opt: PyTree) -> int:
  """Optimizer updates since these moments were initialised."""
  counts = optax.tree.get_all_with_path(opt, "count")
  return int(counts[0][1])
