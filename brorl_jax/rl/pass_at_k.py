"""How often at least one of k samples is right."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def pass_at_k(n: int, c: Int[Array, "*axes"], k: int) -> Float[Array, "*axes"]:
  """Unbiased estimate of pass@k from c correct answers among n samples.

    pass@k = 1 - C(n - c, k) / C(n, k) = 1 - prod_{i<k} (n - c - i) / (n - i)

  The product needs no factorials, so it neither overflows nor cancels. Raises
  ValueError if k is not in [1, n]; c must be in [0, n].
  Source: Chen et al. 2021 (Codex), arXiv:2107.03374, eq. 1.

  >>> chance = pass_at_k(4, jnp.array([0, 1, 2]), 2)  # of 2 right: 1 - 1/6
  >>> [round(x, 3) for x in chance.tolist()]
  [0.0, 0.5, 0.833]
  """
  if not 1 <= k <= n:
    raise ValueError(f"k = {k} is not in [1, {n}]: only {n} samples were taken")
  wrong = jnp.asarray(n - c, jnp.float32)[..., None]
  i = jnp.arange(k, dtype=jnp.float32)
  i = i.reshape((1,) * (wrong.ndim - 1) + (k,))
  # A factor is 0 as soon as fewer than k samples are wrong.
  none = jnp.prod(jnp.maximum(wrong - i, 0.0) / (n - i), axis=-1)
  # x / x is not always 1 in XLA, and a problem never solved must stay at 0.
  return jnp.where(c > 0, 1.0 - none, 0.0)
