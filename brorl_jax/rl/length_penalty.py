"""Rewards for the length of a response and for repetition, and their schedule.

They change the reward that is centered, never what dynamic sampling reads.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from brorl_jax.rl import arrays


def cosine(
  length: Num[Array, "*axes"], *, limit: int, eta_min: float, eta_max: float
) -> Float[Array, "*axes"]:
  """Goes from eta_max for an empty response to eta_min at the limit.

    eta_min + (eta_max - eta_min) / 2 * (1 + cos(pi * length / limit))

  Lengths are clipped to 0 and `limit`, the tokens that fit in the context. In
  place of the reward, right answers fall to .5 and wrong ones rise from a
  negative eta_max to 0: it is better that they were thought about.
  Sources: Yeo et al. 2025, arXiv:2502.03373, eq. 1; ProRL v2, the scheduled
  cosine length penalty, with .5 and 0 by the authors' script (inferred).

  >>> length = jnp.array([0, 50, 100, 400])
  >>> cosine(length, limit=100, eta_min=0.5, eta_max=1.0).round(2).tolist()
  [1.0, 0.75, 0.5, 0.5]
  """
  angle = jnp.pi * jnp.clip(length, 0, limit) / limit
  return eta_min + (eta_max - eta_min) / 2.0 * (1.0 + jnp.cos(angle))


@functools.partial(jax.jit, static_argnames="size")
def repeats(
  tokens: Int[Array, "*axes T"], mask: Bool[Array, "*axes T"], *, size: int
) -> Int[Array, "*axes"]:
  """Tokens that end an n-gram of `size` which ended before in its response.

  All occurrences after the first count, overlapping ones too. `mask` is True on
  the tokens of the response, which come first. It is exact: equal n-grams get
  equal numbers by sorting pairs of shorter ones, in log2(size) rounds, so that
  nothing can collide. Memory is eight times that of `tokens`. Raises
  ValueError if `size` is below 1. Sources: as of `cosine`.

  >>> tokens, mask = jnp.array([7, 8, 7, 8, 7]), jnp.ones(5, bool)
  >>> int(repeats(tokens, mask, size=2))  # the second "7 8" and "8 7"
  2
  """
  arrays.check(tokens=(tokens, "*T"), mask=(mask, "*T"))
  arrays.require_count("size", size)
  # Of the n-gram of `width` tokens from each position on; behind the end -1.
  number, width = jnp.where(mask, tokens, -1), 1
  while width < size:
    step = min(width, size - width)
    number, width = _numbered(number, _later(number, step)), width + step
  number = jnp.sort(jnp.where(mask, number, -1), axis=-1)
  first = number[..., 1:] != number[..., :-1]
  # Behind the end all are -1, and sort first. What the end cuts short is never
  # equal to another: no two of them have as many -1.
  distinct = first.sum(axis=-1) + (number[..., 0] >= 0)
  return mask.sum(axis=-1) - distinct


def _later(x, by):
  """x[..., i + by] at i; behind the end -1."""
  fill = jnp.full_like(x[..., :by], -1)
  return jnp.concatenate([x[..., by:], fill], axis=-1)


def _numbered(a, b):
  """Equal numbers, from 0 on, for equal pairs (a, b) of a row."""
  place = jax.lax.broadcasted_iota(jnp.int32, a.shape, a.ndim - 1)
  a, b, place = jax.lax.sort((a, b, place), num_keys=2)
  new = (a[..., 1:] != a[..., :-1]) | (b[..., 1:] != b[..., :-1])
  number = jnp.cumsum(new, axis=-1, dtype=jnp.int32)
  number = jnp.concatenate([jnp.zeros_like(place[..., :1]), number], axis=-1)
  return jax.lax.sort((place, number), num_keys=1)[1]


def is_active(
  update: int | Int[Array, "*axes"], *, on: int, off: int
) -> bool | Bool[Array, "*axes"]:
  """Whether the penalty counts: the first `on` of every on + off updates.

  Updates count from 0. With `off` = 0 it always counts. Raises ValueError if
  `on` is below 1 or `off` below 0. ProRL v2: on for 100 updates, off for 500.

  >>> [is_active(update, on=1, off=2) for update in range(4)]
  [True, False, False, True]
  """
  arrays.require_count("on", on)
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

  >>> overlong(jnp.array([60, 90, 100]), limit=100, buffer=20).tolist()
  [0.0, -0.5, -1.0]
  """
  if not 1 <= buffer <= limit:
    raise ValueError(f"buffer = {buffer} tokens is not in [1, {limit}]")
  return jnp.clip((limit - buffer - length) / buffer, -1.0, 0.0)
