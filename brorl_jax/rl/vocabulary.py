"""Log-probabilities of tokens without the logits of all of them at once."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from brorl_jax.rl import arrays

_LOWEST = float(jnp.finfo(jnp.float32).min)  # 0 times it is 0, not nan


def tile_shape(
  tokens: int, V: int, prompts: int, *, devices: int, on_cpu: bool
) -> tuple[int, int]:
  """Tokens of each prompt, and of the vocabulary, whose logits exist together.

  As many as the tiles of all `devices` hold, for `tokens` of each of the
  prompts. Blocks of the vocabulary divide it; if it has no such divisor, there
  are fewer tokens with all of it.

  >>> tile_shape(4096, 151_936, 4, devices=1, on_cpu=True)
  (256, 1187)
  """
  # Numbers of a tile, and rows of its product. On a CPU a tile should stay near
  # its core; an accelerator wants products with thousands of rows. Fewer rows
  # would read the head, and write its gradient, more often.
  tile, rows = 2**26 * devices, 2**12 * devices
  if on_cpu:
    tile, rows = 2**21 * devices, 2**10 * devices
  rows = min(max(rows // prompts, 1), tokens)
  room = tile // (rows * prompts)
  if room >= V:
    return rows, V
  # A vocabulary spread over devices stays so: each has a part of every block.
  spread = math.gcd(V, devices)
  fits = lambda block: V % block == 0 and block % spread == 0
  width = next(filter(fits, range(room, room // 16, -1)), None)
  if width is None:
    return min(max(tile // (V * prompts), 1), tokens), V
  return rows, width


def token_logp(
  logits: Callable[[Array, Array], Array],
  head: Float[Array, "V D"],
  hidden: Float[Array, "P M D"],
  tokens: Int[Array, "P M"],
  *,
  rows: int,
  block: int,
  spread: bool = False,
) -> tuple[Float[Array, "P M"], Float[Array, "P M"]]:
  """Log-probability of each token, and entropy of its distribution, in nats.

    l          = logits(hidden, head)
    logp[m]    = l[m, token[m]] - log sum_v exp l[m,v]
    entropy[m] = log sum_v exp l[m,v] - sum_v p[m,v] l[m,v]

  `rows` of each prompt and `block` of the vocabulary at a time; sums over the
  vocabulary are kept relative to the largest logit so far. The backward pass
  computes each tile of logits once more,

    d logp[m] / d l[m,v]    = [v = token[m]] - p[m,v]
    d entropy[m] / d l[m,v] = -p[m,v] (log p[m,v] + entropy[m]),

  and writes the gradient of each part of the head once. An output that nobody
  differentiates costs nothing there.

  `logits`, which closes over no array, is from hidden states [P,rows,D] and
  part of the head [block,D] to float32 logits [P,rows,block]. `block` divides
  V. `spread`: the vocabulary may lie on several devices.

  >>> logits = lambda hidden, head: jnp.einsum("pmd,vd->pmv", hidden, head)
  >>> args = jnp.zeros((4, 2)), jnp.ones((1, 3, 2)), jnp.ones((1, 3), int)
  >>> logp, _ = token_logp(logits, *args, rows=2, block=2)  # 4 tokens, by twos
  >>> jnp.exp(logp).round(2).tolist()
  [[0.25, 0.25, 0.25]]
  """
  arrays.check(head=(head, "VD"), hidden=(hidden, "PMD"), tokens=(tokens, "PM"))
  P, M, _ = hidden.shape
  tiles = -(-M // rows)
  spare = tiles * rows - M
  pad = lambda x: jnp.pad(x, [(0, 0), (0, spare)] + [(0, 0)] * (x.ndim - 2))
  cut = lambda x: pad(x).reshape(P, tiles, rows, *x.shape[2:])
  apart = lambda x: jnp.moveaxis(cut(x), 1, 0)
  tiled = apart(hidden), apart(tokens)
  both: tuple[Array, Array] = _tiled(logits, block, spread, head, *tiled)
  together = lambda x: jnp.moveaxis(x, 0, 1).reshape(P, -1)[:, :M]
  return together(both[0]), together(both[1])


def _parts(
  head: Float[Array, "V D"], block: int, spread: bool
) -> tuple[Float[Array, "parts block D"], Int[Array, "parts block"]]:
  """Parts of the head, and the tokens of each."""
  ids = jnp.arange(len(head))
  if not spread:
    return head.reshape(-1, block, head.shape[1]), ids.reshape(-1, block)
  # A vocabulary that is spread over devices stays so: a part has every
  # (V / block)-th token. On one device that would be a copy.
  apart = lambda x: jnp.swapaxes(x.reshape(block, -1, *x.shape[1:]), 0, 1)
  return apart(head), apart(ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _tiled(logits, block, spread, head, hidden, tokens):
  return _forward(logits, block, spread, head, hidden, tokens)[0]


def _forward(
  logits,
  block: int,
  spread: bool,
  head: Float[Array, "V D"],
  hidden: Float[Array, "tiles P rows D"],
  tokens: Int[Array, "tiles P rows"],
):
  def part(sums, xs):
    head_part, ids = xs

    def tile(xs):
      (top, total, chosen, mean), hidden, tokens = xs
      x = logits(hidden, head_part)
      higher = jnp.maximum(top, jnp.max(x, axis=-1))
      # Finite where all logits so far are -inf.
      least = jnp.maximum(higher, _LOWEST)
      weight = jnp.exp(x - least[..., None])
      less = jnp.exp(top - least)
      total = total * less + jnp.sum(weight, axis=-1)
      mean = mean * less + jnp.sum(weight * jnp.maximum(x, _LOWEST), axis=-1)
      chosen += jnp.sum(jnp.where(_hit(tokens, ids), x, 0.0), axis=-1)
      return higher, total, chosen, mean

    return jax.lax.map(tile, (sums, hidden, tokens)), None

  zero = jnp.zeros(tokens.shape)
  start = jnp.full(tokens.shape, -jnp.inf), zero, zero, zero
  sums, _ = jax.lax.scan(part, start, _parts(head, block, spread))
  top, total, chosen, mean = sums
  whole = top + jnp.log(total)
  entropy = whole - mean / total
  return (chosen - whole, entropy), (head, hidden, tokens, whole, entropy)


def _hit(tokens: Int[Array, "P rows"], ids: Int[Array, " block"]) -> Array:
  # Compared, not gathered: the gradient of a gather is a slow scatter.
  return tokens[..., None] == ids[None, None]


def _backward(logits, block, spread, saved, slopes):
  head, hidden, tokens, whole, entropy = saved
  # None for an output that is not differentiated: its term is not computed.
  slopes = [None if isinstance(x, SymbolicZero) else x for x in slopes]

  def part(dhidden, xs):
    head_part, ids = xs

    def tile(dhead_part, xs):
      dhidden, hidden, tokens, whole, entropy, (dlogp, dentropy) = xs
      x, pull = jax.vjp(logits, hidden, head_part)
      logp = x - whole[..., None]
      prob = jnp.exp(logp)
      dx = jnp.zeros_like(x)
      if dlogp is not None:
        dx = dlogp[..., None] * (_hit(tokens, ids) - prob)
      if dentropy is not None:
        finite = jnp.maximum(logp, _LOWEST)
        dx -= dentropy[..., None] * prob * (finite + entropy[..., None])
      more_hidden, more_head = pull(dx)
      return dhead_part + more_head, dhidden + more_hidden

    zero = jnp.zeros(head_part.shape, head_part.dtype)
    tiles = dhidden, hidden, tokens, whole, entropy, slopes
    dhead_part, dhidden = jax.lax.scan(tile, zero, tiles)
    return dhidden, dhead_part

  zero = jnp.zeros(hidden.shape, jnp.float32)
  dhidden, dparts = jax.lax.scan(part, zero, _parts(head, block, spread))
  if spread:
    dparts = jnp.swapaxes(dparts, 0, 1)
  return dparts.reshape(head.shape), dhidden.astype(hidden.dtype), None


_saved = lambda *x: _forward(*x[:3], *(primal.value for primal in x[3:]))
_tiled.defvjp(_saved, _backward, symbolic_zeros=True)
