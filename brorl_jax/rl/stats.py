"""Intervals for what is averaged over prompts."""

import jax.numpy as jnp
from jaxtyping import Array, Float

_Z95 = 1.959964  # the normal distribution holds 95 % within +- this


def mean_interval(
  values: Float[Array, " n"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
  """Mean and half-width of its 95 % interval over independent values.

    half = 1.96 * sqrt(sum((v - mean)^2) / (n - 1) / n)

  Give one value per prompt (its mean over samples), not one per sample:
  samples of a prompt are not independent. For a gain give the differences.

  Raises:
    ValueError: Fewer than two values.
  """
  n = values.shape[0]
  if n < 2:
    raise ValueError(f"an interval needs at least 2 values, not {n}")
  return jnp.mean(values), _Z95 * jnp.std(values, ddof=1) / jnp.sqrt(n)
