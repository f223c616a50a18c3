"""Refuses values that are out of range; traced values are not known."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer


def require(name: str, value: Any, good, must: str) -> None:
  """Refuses a value that is known and not good; traced ones are not known."""
  if isinstance(value, Tracer):
    return
  # Constants inside a traced function are known, but their sums are not unless
  # asked for.
  with jax.ensure_compile_time_eval():
    value = jnp.asarray(value)
    fine = jnp.broadcast_to(good(value), value.shape)
    if not bool(jnp.all(fine)):
      bad = value[~fine] if value.ndim else value[None]
      raise ValueError(f"{name} = {bad[0]} must be {must}")


def require_count(name: str, value: Any) -> None:
  whole = isinstance(value, int) or (
    getattr(value, "shape", None) == ()
    and jnp.issubdtype(value.dtype, jnp.integer)
  )
  # int(): a comparison of a constant inside a traced function is traced.
  if not whole or (not isinstance(value, Tracer) and int(value) < 1):
    shown = " ".join(repr(value).split())
    raise ValueError(f"{name} = {shown} must be an integer of at least 1")


def require_finite(**values: Any) -> None:
  for name, value in values.items():
    require(name, value, jnp.isfinite, "finite")
