"""Functions of tokens, for a few tokens at a time."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Tokens of a large tile are a multiple of it: for others a TPU's compiler takes
# minutes.
_UNIT = 128


def each(
  f: Callable[[Array], Array],
  x: Float[Array, "n D"],
  *,
  prompts: int,
  most: int,
) -> Float[Array, "n D"]:
  """f(x), where f acts on every token by itself.

  The tiles are computed one after the other, and once more in the backward
  pass, so that what f needs for itself is there for one of them. A tile has
  tokens of all prompts, which may be spread over devices.

  Args:
    f: [tokens,D] to [tokens,D]; may close over arrays.
    x: Tokens, prompt by prompt.
    prompts: P, a divisor of n.
    most: Tokens of a prompt in a tile.
  """
  n, D = x.shape
  each = n // prompts
  tiles = -(-each // most)
  if tiles == 1:
    return f(x)
  tile = -(-each // tiles)
  if tile > _UNIT:
    tile = -(-tile // _UNIT) * _UNIT
  x = x.reshape(prompts, each, D)
  x = jnp.pad(x, ((0, 0), (0, tiles * tile - each), (0, 0)))
  apart = jnp.swapaxes(x.reshape(prompts, tiles, -1, D), 0, 1)
  of_tile = lambda x: f(x.reshape(-1, D)).reshape(x.shape)
  out = jax.lax.map(jax.checkpoint(of_tile, prevent_cse=False), apart)
  out = jnp.swapaxes(out, 0, 1).reshape(prompts, -1, D)[:, :each]
  return out.reshape(n, D)
