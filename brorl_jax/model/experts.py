"""A feed-forward layer of many experts; each token uses a few of them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def routed(
  x: Float[Array, "n D"],
  router: Float[Array, "D E"],
  gate: Float[Array, "E D F"],
  up: Float[Array, "E D F"],
  down: Float[Array, "E F D"],
  *,
  per_token: int,
  normalize: bool,
) -> Float[Array, "n D"]:
  """Sum over a token's experts of their share times their SwiGLU.

    share = softmax(x router), the largest `per_token` of each token
    out   = sum over these e of share_e * (silu(x gate_e) * (x up_e)) down_e

  Nothing is dropped: tokens are sorted by expert and each expert multiplies as
  many rows as chose it. With experts spread over devices every device computes
  its own and the results are added; weights do not move.

  Args:
    router: Scores every expert for a token; multiplied in float32.
    per_token: Experts that each token uses.
    normalize: Shares of the chosen ones are scaled to add up to 1.

  References:
    Shazeer et al. 2017, arXiv:1701.06538; Yang et al. 2025 (Qwen3),
    arXiv:2505.09388.
  """
  n, E = x.shape[0], router.shape[1]
  logits = jnp.matmul(x, router, preferred_element_type=jnp.float32)
  share, chosen = jax.lax.top_k(jax.nn.softmax(logits), per_token)
  if normalize:
    share /= jnp.sum(share, axis=-1, keepdims=True)
  expert = chosen.reshape(-1)
  order = jnp.argsort(expert, stable=True)
  rows = jnp.bincount(expert, length=E)
  product = lambda a, b: jax.lax.ragged_dot(a, b, rows.astype(jnp.int32))
  ours = x[order // per_token]
  y = product(jax.nn.silu(product(ours, gate)) * product(ours, up), down)
  y = y[jnp.argsort(order)].reshape(n, per_token, -1)
  return jnp.sum(share.astype(y.dtype)[..., None] * y, axis=1)
