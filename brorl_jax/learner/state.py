"""The training state: AdamW and its schedule, and where the arrays lie."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from brorl_jax.model import adapters, sharding
from brorl_jax.types import State

Optimizer = optax.GradientTransformation
Schedule = optax.Schedule

# Parts of the state that config.devices.offload keeps in host memory.
_OFFLOADED = {
  "nothing": (),
  "reference": ("reference",),
  "moments": ("reference", "opt"),
}


def adamw(
  *,
  lr: float,
  warmup: int,
  total: int | None = None,
  max_grad_norm: float,
  **moments: Any,
) -> tuple[Optimizer, Schedule]:
  """AdamW after clipping by global norm, and its learning-rate schedule: linear
  from lr / warmup to lr in `warmup` updates, then constant or, with `total`, a
  cosine to 0 at that update. `moments` are b1, b2, eps and weight_decay, which
  is decoupled, times the rate.
  """
  # From lr / warmup, not from 0: no update is wasted at rate 0.
  ramp = optax.linear_schedule(lr / max(warmup, 1), lr, max(warmup - 1, 1))
  after = optax.constant_schedule(lr)
  if total is not None:
    after = optax.cosine_decay_schedule(lr, max(total - warmup, 1))
  schedule = optax.join_schedules([ramp, after], [warmup])
  clip = optax.clip_by_global_norm(max_grad_norm)
  return optax.chain(clip, optax.adamw(schedule, **moments)), schedule


def init_state(
  params: PyTree, tx: optax.GradientTransformation, *, keep_reference: bool
) -> State:
  """The training state before the first step."""
  # A copy: the first update donates the parameters.
  reference = _copied(params) if keep_reference else None
  opt = tx.init(adapters.split(params)[0])
  return State(jnp.int32(0), params, opt, reference)


def saved(state: State) -> State:
  """What a checkpoint holds: of a policy with an adapter not the base."""
  return dataclasses.replace(state, params=adapters.split(state.params)[0])


def restored(state: State, like: State) -> State:
  """What was `saved`, with the base of another state."""
  params = adapters.join(state.params, adapters.split(like.params)[1])
  return dataclasses.replace(state, params=params)


def updates_done(opt: PyTree) -> int:
  """Optimizer updates since these moments were initialised."""
  return int(optax.tree.get_all_with_path(opt, "count")[0][1])


def initial_state(
  params: PyTree,
  tx: optax.GradientTransformation,
  mesh: Mesh | AbstractMesh,
  *,
  keep_reference: bool,
  offload: str,
) -> State:
  """The state before the first step; arguments as of `state_places`. One
  program makes all of it, so that every leaf is a global array.
  """
  how = {"keep_reference": keep_reference, "offload": offload}
  make, _, places = state_places(params, tx, mesh, **how)
  return jax.jit(make, out_shardings=places)(params)


def state_places(
  params: PyTree,
  tx: optax.GradientTransformation,
  mesh: Mesh | AbstractMesh,
  *,
  keep_reference: bool,
  offload: str,
) -> tuple[Callable[[PyTree], State], State, State]:
  """The function from parameters, or shapes, to a state, its shapes and its
  shardings. A reference is for a KL term; see `_OFFLOADED` for `offload`.
  """
  make = functools.partial(init_state, tx=tx, keep_reference=keep_reference)
  shapes = jax.eval_shape(make, params)
  trained = adapters.split(shapes.params)[0]
  places = sharding.state_shardings(shapes, trained, mesh)
  params_at = sharding.param_shardings(shapes.params, mesh)
  places = dataclasses.replace(places, params=params_at)
  for name in _OFFLOADED[offload]:
    to_host = lambda place: place.with_memory_kind(sharding.HOST)
    moved = jax.tree.map(to_host, getattr(places, name))
    places = dataclasses.replace(places, **{name: moved})
  return make, shapes, places


def reset_reference(
  state: State, tx: optax.GradientTransformation, *, reset_optimizer: bool
) -> State:
  """The state with the policy as its reference. With `reset_optimizer` the
  moments start again (ProRL), else they continue (ProRL v2).
  """
  reference = _like(_copied, state.reference, state.params)
  state = dataclasses.replace(state, reference=reference)
  if reset_optimizer:
    opt = _like(tx.init, state.opt, state.params)
    state = dataclasses.replace(state, opt=opt)
  return state


def _copied(params: PyTree) -> PyTree:
  # One function for all resets: jax compiles a program for each function.
  return jax.tree.map(jnp.copy, params)


def _like(make: Callable, old: PyTree, params: PyTree) -> PyTree:
  """The result of `make(params)`, where `old` lies: on devices or the host."""
  places = jax.tree.map(lambda x: x.sharding, old)
  return jax.jit(make, out_shardings=places)(params)
