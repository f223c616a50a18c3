"""Log-probabilities of tokens without the logits of all of them at once."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def tile_shape(tokens: int, V: int, prompts: int) -> tuple[int, int]:
  """Tokens of each prompt, and of the vocabulary, whose logits exist together.

  As many as the tiles of all devices hold. Blocks of the vocabulary divide it;
  if it has no such divisor, there are fewer tokens with all of it.
  """
  devices = jax.device_count()
  # Numbers of a tile, and rows of its product. On a CPU a tile should stay near
  # its core; an accelerator wants products with thousands of rows. Fewer rows
  # would read the head, and write its gradient, more often.
  tile, rows = 2**26 * devices, 2**12 * devices
  if jax.default_backend() == "cpu":
    tile, rows = 2**21 * devices, 2**10 * devices
  rows = min(max(rows // prompts, 1), tokens)
  room = tile // (rows * prompts)
  if room >= V:
    return rows, V
  # A vocabulary that is spread over devices stays so: each has a part of every
  # block.
  spread = math.gcd(V, devices)
  fits = lambda block: V % block == 0 and block % spread == 0
  found = next(filter(fits, range(room, room // 16, -1)), None)
  if found is None:
    return min(max(tile // (V * prompts), 1), tokens), V
  return rows, found


def token_logp(
  logits: Callable[[Array, Array], Array],
  head: Float[Array, "V D"],
  hidden: Float[Array, "P M D"],
  tokens: Int[Array, "P M"],
  *,
  rows: int,
  block: int,
) -> tuple[Float[Array, "P M"], Float[Array, "P M"]]:
  """Log-probability of each token, and entropy of its distribution, in nats.

    l = logits(hidden, head)
    logp[m]    = l[m, token[m]] - log sum_v exp l[m,v]
    entropy[m] = log sum_v exp l[m,v] - sum_v p[m,v] l[m,v]

  `rows` of each prompt at a time, with `block` of the vocabulary at a time:
  sums over the vocabulary are kept relative to the largest logit so far. The
  backward pass computes each tile of logits once more. The entropy has no
  gradient.

  Args:
    logits: Hidden states [P,rows,D] and part of the head [block,D] to float32
      logits [P,rows,block].
    head: What gives each token its logit.
    hidden: What the head reads.
    tokens: One for each hidden state.
    rows: Whose logits exist together; see `tile_shape`.
    block: Of the vocabulary, a divisor of V.
  """
  P, M, _ = hidden.shape
  V = len(head)
  tiles = -(-M // rows)
  spare = tiles * rows - M
  apart = lambda x: jnp.moveaxis(
    jnp.pad(x, [(0, 0), (0, spare)] + [(0, 0)] * (x.ndim - 2)).reshape(
      P, tiles, rows, *x.shape[2:]
    ),
    1,
    0,
  )
  # Every so many-th token, so that a vocabulary that is spread stays so.
  strided = lambda x: jnp.swapaxes(
    x.reshape(block, V // block, *x.shape[1:]), 0, 1
  )
  blocks = strided(head), strided(jnp.arange(V))

  def tile(tile: tuple[Array, Array]) -> tuple[Array, Array]:
    hidden, tokens = tile

    @jax.checkpoint
    def read(sums, part):
      top, total, chosen, mean = sums
      x = logits(hidden, part[0])
      # Compared, not gathered: the gradient of a gather is a slow scatter.
      hit = tokens[..., None] == part[1][None, None]
      # The largest logit only keeps exp finite: its gradient is zero.
      still = jax.lax.stop_gradient(x)
      higher = jnp.maximum(top, jnp.max(still, axis=-1))
      weight = jnp.exp(x - higher[..., None])
      less = jnp.exp(top - higher)
      total = total * less + jnp.sum(weight, axis=-1)
      chosen += jnp.sum(jnp.where(hit, x, 0.0), axis=-1)
      weight = jax.lax.stop_gradient(weight)
      mean = mean * less + jnp.sum(weight * still, axis=-1)
      return (higher, total, chosen, mean), None

    zero = jnp.zeros(tokens.shape)
    start = (jnp.full(tokens.shape, -jnp.inf), zero, zero, zero)
    (top, total, chosen, mean), _ = jax.lax.scan(read, start, blocks)
    whole = top + jnp.log(total)
    return chosen - whole, jax.lax.stop_gradient(whole - mean / total)

  both = jax.lax.map(tile, (apart(hidden), apart(tokens)))
  together = lambda x: jnp.moveaxis(x, 0, 1).reshape(P, -1)[:, :M]
  logp, entropy = both
  return together(logp), together(entropy)
