"""A mean that stays exact when a batch is split into microbatches."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brorl_jax.rl import shapes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
  """A mean kept as numerator and denominator, so that `a + b` is exact.

  Averaging per-microbatch averages weights every microbatch alike, however
  few valid tokens it holds. Adding totals and counts does not.
  """

  total: Float[Array, ""]  # sum of the values that count
  count: Float[Array, ""]  # how many values that is

  @staticmethod
  def of(
    values: Float[Array, "*axes"],
    where: Bool[Array, "*axes"],
    weight: Float[Array, "*axes"] | None = None,
  ) -> "Mean":
    """Total and count of `values` where `where` is True.

    Args:
      values: What is averaged. May hold anything where `where` is False.
      where: Which values count.
      weight: How often each value counts; once if None.
    """
    shapes.check(values=(values, "*"), where=(where, "*"), weight=(weight, "*"))
    if weight is None:
      total = jnp.sum(values, where=where)
      return Mean(total, jnp.sum(where, dtype=jnp.float32))
    total = jnp.sum(jnp.where(where, values, 0.0) * weight)
    return Mean(total, jnp.sum(weight, where=where))

  def __add__(self, other: "Mean") -> "Mean":
    return Mean(self.total + other.total, self.count + other.count)

  @property
  def value(self) -> Float[Array, ""]:
    """The mean; 0 where nothing was counted."""
    return self.total / jnp.where(self.count > 0.0, self.count, 1.0)
