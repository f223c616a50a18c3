"""The training state: how it is made, and where its arrays lie."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from brorl_jax.learner.optimizer import init_state
from brorl_jax.model import sharding
from brorl_jax.types import State

# Parts of the state that each choice of config.devices.offload keeps in host
# memory.
_OFFLOADED = {
  "nothing": (),
  "reference": ("reference",),
  "moments": ("reference", "opt"),
}


def initial_state(
  params: PyTree,
  tx: optax.GradientTransformation,
  mesh: Mesh,
  *,
  keep_reference: bool,
  offload: str,
) -> State:
  """The state before the first step; all arguments are those of `state_places`.

  One program makes all of it, so that every leaf is a global array.
  """
  make, _, places = state_places(
    params, tx, mesh, keep_reference=keep_reference, offload=offload
  )
  return jax.jit(make, out_shardings=places)(params)


def state_places(
  params: PyTree,
  tx: optax.GradientTransformation,
  mesh: Mesh | AbstractMesh,
  *,
  keep_reference: bool,
  offload: str,
) -> tuple[Callable[[PyTree], State], State, State]:
  """The function from parameters to a state, its shapes and its shardings.

  Args:
    params: Arrays or shapes.
    keep_reference: Whether the loss has a KL term.
    offload: What lies in host memory: "nothing", "reference", or "moments",
      which moves both.
  """
  make = functools.partial(init_state, tx=tx, keep_reference=keep_reference)
  shapes = jax.eval_shape(make, params)
  places = sharding.state_shardings(shapes, shapes.params, mesh)
  for name in _OFFLOADED[offload]:
    moved = sharding.in_host_memory(getattr(places, name))
    places = dataclasses.replace(places, **{name: moved})
  return make, shapes, places


def reset_reference(
  state: State, tx: optax.GradientTransformation, *, reset_optimizer: bool
) -> State:
  """The state with the policy as its reference.

  Args:
    state: After a step; it has a reference.
    reset_optimizer: Whether the moments start again (ProRL) or continue
      (ProRL v2).
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


def _like(
  make: Callable[[PyTree], PyTree], old: PyTree, params: PyTree
) -> PyTree:
  """The result of `make(params)`, where `old` lies: on devices or the host."""
  places = jax.tree.map(lambda x: x.sharding, old)
  return jax.jit(make, out_shardings=places)(params)
