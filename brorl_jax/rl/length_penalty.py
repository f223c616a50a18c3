"""Rewards for the length of a response, and when they are in force.

Added to the reward that is centered, never to what dynamic sampling reads.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num


def cosine(
  length: Num[Array, "*axes"], *, limit: int, eta_min: float, eta_max: float
) -> Float[Array, "*axes"]:
  """Falls from eta_max for an empty response to eta_min at the limit.

    eta_min + (eta_max - eta_min) / 2 * (1 + cos(pi * length / limit))

  Lengths are clipped to 0 and `limit`, the tokens that fit in the context.
  Source: ProRL v2, the scheduled cosine length penalty. Its constants are not
  public.
  """
  angle = jnp.pi * jnp.clip(length, 0, limit) / limit
  return eta_min + (eta_max - eta_min) / 2.0 * (1.0 + jnp.cos(angle))


def is_active(
  update: int | Int[Array, "*axes"], *, on: int, off: int
) -> bool | Bool[Array, "*axes"]:
  """Whether the penalty counts: the first `on` of every on + off updates.

  Updates count from 0. With `off` = 0 it always counts. Raises ValueError if
  `on` is below 1 or `off` below 0. ProRL v2: on for 100 updates, off for 500.
  """
  if on < 1:
    raise ValueError(f"on = {on} updates with the penalty: at least 1 needed")
  if off < 0:
    raise ValueError(f"off = {off} updates without the penalty is negative")
  return update % (on + off) < on


def overlong(
  length: Num[Array, "*axes"], *, limit: int, buffer: int
) -> Float[Array, "*axes"]:
  """0 up to limit - buffer tokens, falls linearly to -1 at the limit.

    min(0, max(-1, (limit - buffer - length) / buffer))

  Raises ValueError if `buffer` is not in [1, limit].
  Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13.
  """
  if not 1 <= buffer <= limit:
    raise ValueError(f"buffer = {buffer} tokens is not in [1, {limit}]")
  return jnp.clip((limit - buffer - length) / buffer, -1.0, 0.0)
