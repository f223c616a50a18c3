"""Log-probabilities of tokens without the logits of all of them at once."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def tile_rows(rows: int, V: int, prompts: int) -> int:
  """Rows of hidden states, of each prompt, whose logits exist together.

  As many as the tile of a device holds, and at least one.
  """
  cpu = jax.default_backend() == "cpu"
  # Numbers. On a CPU a tile should stay near its core; an accelerator wants
  # products with hundreds of rows.
  tile = (2**21 if cpu else 2**26) * jax.device_count()
  return min(max(tile // (V * prompts), 1), rows)


def token_logp(
  logits: Callable[[Array], Array],
  hidden: Float[Array, "P M D"],
  tokens: Int[Array, "P M"],
  *,
  rows: int,
) -> tuple[Float[Array, "P M"], Float[Array, "P M"]]:
  """Log-probability of each token, and entropy of its distribution, in nats.

    logp[m]    = l[m, token[m]] - log sum_v exp l[m,v],  l = logits(hidden)
    entropy[m] = log sum_v exp l[m,v] - sum_v p[m,v] l[m,v]

  `rows` of each prompt at a time; the backward pass computes their logits once
  more. The entropy has no gradient.

  Args:
    logits: Hidden states [P,rows,D] to float32 logits [P,rows,V].
    hidden: What the head reads.
    tokens: One for each hidden state.
    rows: Whose logits exist together; see `tile_rows`.
  """
  P, M, _ = hidden.shape
  tiles = -(-M // rows)
  spare = tiles * rows - M
  apart = lambda x: jnp.moveaxis(
    jnp.pad(x, [(0, 0), (0, spare)] + [(0, 0)] * (x.ndim - 2)).reshape(
      P, tiles, rows, *x.shape[2:]
    ),
    1,
    0,
  )

  @jax.checkpoint
  def one(tile: tuple[Array, Array]) -> tuple[Array, Array]:
    hidden, tokens = tile
    x = logits(hidden)
    # Compared, not gathered: the gradient of a gather is a slow scatter.
    chosen = tokens[..., None] == jnp.arange(x.shape[-1])[None, None]
    total = jax.nn.logsumexp(x, axis=-1)
    logp = jnp.sum(jnp.where(chosen, x, 0.0), axis=-1) - total
    still, whole = jax.lax.stop_gradient((x, total))
    prob = jnp.exp(still - whole[..., None])
    return logp, whole - jnp.sum(prob * still, axis=-1)

  both = jax.lax.map(one, (apart(hidden), apart(tokens)))
  together = lambda x: jnp.moveaxis(x, 0, 1).reshape(P, -1)[:, :M]
  logp, entropy = both
  return together(logp), together(entropy)
