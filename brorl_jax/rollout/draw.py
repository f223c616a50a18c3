"""Sampling parameters, and the draw of tokens from the distribution they give.

Nothing here sorts the vocabulary. With V = 151,936 and 64 rows a sort and its
cumulative sum take 1,775 CPU-ms; the bisection of `_keep` takes 130 to 230, and
the blocked search of `draw` takes 41.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class SamplingParams:
  """How logits become the distribution that is sampled and recorded. The order
  is temperature, top-k, top-p, min-p, each on the renormalised previous result.
  """

  temperature: float = 1.0  # 0 is greedy: all mass on the likeliest token
  top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
  top_p: float = 1.0  # keep the likeliest tokens until they reach this mass
  min_p: float = 0.0  # keep tokens with at least this share of the best one's

  def __post_init__(self):
    T = self.temperature
    for name, good, must in (
      # Logits of up to 1e32 divided by 1e-6 stay below float32's 3.4e38. A
      # smaller temperature overflows, and inf - inf is NaN in the softmax.
      ("temperature", T == 0 or 1e-6 <= T < math.inf, "0 or at least 1e-6"),
      ("top_k", self.top_k >= 0, "0 or more"),
      ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
      ("min_p", 0.0 <= self.min_p <= 1.0, "0 to 1"),
    ):
      if not good:
        raise ValueError(f"{name} = {getattr(self, name)} must be {must}")

  def cut(self, logits: Float[Array, "*axes V"]) -> Float[Array, "*axes V"]:
    """Logits of the sampling distribution, not normalised; -inf where cut."""
    # bfloat16 has steps of .125 between 16 and 32, so many logits tie. Top-k
    # keeps ties together and would keep more than k.
    logits = logits.astype(jnp.float32)
    if self.temperature == 0.0:
      best = jnp.argmax(logits, axis=-1, keepdims=True)
      # Of equal logits the first token gets all mass, so that logp is 0.
      token = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
      return jnp.where(token == best, 0.0, -jnp.inf)
    if self.temperature != 1.0:
      logits = logits / self.temperature
    if 0 < self.top_k < logits.shape[-1]:
      logits = _keep(logits, jnp.ones_like(logits), self.top_k)
    if self.top_p < 1.0:
      logits = _keep(logits, jax.nn.softmax(logits), self.top_p)
    if self.min_p > 0.0:
      # p >= min_p max(p), in logits: no softmax is needed.
      least = jnp.max(logits, axis=-1, keepdims=True) + np.log(self.min_p)
      logits = jnp.where(logits >= least, logits, -jnp.inf)
    return logits

  def logp(self, logits: Float[Array, "*axes V"]) -> Float[Array, "*axes V"]:
    """Log-probabilities of the sampling distribution; -inf where cut."""
    return jax.nn.log_softmax(self.cut(logits))


def _keep(
  logits: Float[Array, "*axes V"],
  weight: Float[Array, "*axes V"],
  limit: float | int,
) -> Float[Array, "*axes V"]:
  """Keeps v if the weights of all likelier tokens sum to less than `limit`.

  Instead of a sort in which ties stay together, 32 steps of bisection over the
  2^32 floats find the smallest logit that is kept.
  """
  bits = jax.lax.bitcast_convert_type(logits, jnp.int32)
  # With their lower 31 bits flipped, negative floats sort as integers.
  rank = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
  of = lambda at: jnp.where(rank > at, weight, 0.0)
  above = lambda at: jnp.sum(of(at), -1, keepdims=True)

  def halve(_, bounds):
    low, high = bounds  # the answer lies in (low, high]
    middle = (low & high) + ((low ^ high) >> 1)  # (low + high) / 2 overflows
    enough = above(middle) < limit
    return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

  top = jnp.max(rank, axis=-1, keepdims=True)
  low = jnp.full_like(top, jnp.iinfo(jnp.int32).min)
  _, least = jax.lax.fori_loop(0, 32, halve, (low, top))
  return jnp.where(rank >= least, logits, -jnp.inf)


def block_of(V: int) -> int:
  """Tokens of a block, whose probabilities are summed before any is read.

  The number of blocks is a power of two near the root of V, so that a sharded
  vocabulary stays sharded. Without such a divisor V is padded to blocks of 128.
  """
  # V & -V is the largest power of two that divides V: 128 blocks of 1,187 for
  # V = 151,936. A draw then reads 128 + 1,187 numbers, not 151,936.
  blocks = min(V & -V, 2 ** (V.bit_length() // 2))
  return V // blocks if V // blocks <= 4096 else 128


def draw(
  logits: Float[Array, "*axes V"], uniform: Float[Array, "*axes M"]
) -> tuple[Int[Array, "*axes M"], Float[Array, "*axes M"]]:
  """M tokens of softmax(logits), and their log-probabilities.

  One uniform number per token instead of V: token = min{v : cdf[v] > uniform}.
  The search goes over the cdf of blocks first, then over the cdf inside one
  block. A token of probability 0 cannot be drawn, whatever the rounding.
  """
  size = block_of(logits.shape[-1])
  top, prob, mass, cdf, total = _summed(logits, size)
  at = uniform * total
  block = _first_above(mass[..., None, :], cdf[..., None, :], at)
  inside = jnp.take_along_axis(prob, block[..., None], axis=-2)
  before = jnp.take_along_axis(cdf - mass, block, axis=-1)
  token = _first_above(inside, jnp.cumsum(inside, axis=-1), at - before)
  token = block * size + token
  logp = jnp.take_along_axis(logits - top, token, axis=-1) - jnp.log(total)
  return token.astype(jnp.int32), logp


def draw_from(
  logits: Float[Array, "P R V"],
  row: Int[Array, "P N"],
  uniform: Float[Array, "P N"],
) -> tuple[Int[Array, "P N"], Float[Array, "P N"]]:
  """As `draw`; number n, in [0, 1), draws from distribution `row[n]`."""
  size = block_of(logits.shape[-1])
  top, prob, mass, cdf, total = _summed(logits, size)
  of = lambda x: jnp.take_along_axis(x, row[..., None], axis=1)
  mass, cdf, total = of(mass), of(cdf), of(total)
  at = uniform[..., None] * total
  block = _first_above(mass[:, :, None], cdf[:, :, None], at)
  flat = prob.reshape(len(prob), -1, size)
  inside = row[..., None] * prob.shape[2] + block
  inside = jnp.take_along_axis(flat, inside, axis=1)[:, :, None]
  before = jnp.take_along_axis(cdf - mass, block, axis=-1)
  token = _first_above(inside, jnp.cumsum(inside, axis=-1), at - before)
  token = (block * size + token)[..., 0]
  logp = logits[jnp.arange(len(row))[:, None], row, token]
  logp = logp - of(top)[..., 0] - jnp.log(total[..., 0])
  return token.astype(jnp.int32), logp


def _summed(logits: Float[Array, "*axes V"], size: int):
  """What draws read: maximum, exponentials in blocks, their sums and cdf."""
  V = logits.shape[-1]
  top = jnp.max(logits, axis=-1, keepdims=True)
  # The total scales `uniform`: dividing would be another pass over [..., V].
  prob = jnp.exp(logits - top)
  prob = jnp.pad(prob, [(0, 0)] * (prob.ndim - 1) + [(0, -V % size)])
  prob = prob.reshape(*prob.shape[:-1], -1, size)
  mass = jnp.sum(prob, axis=-1)
  cdf = jnp.cumsum(mass, axis=-1)
  # The largest partial sum, not the sum: `uniform` < 1 then has a block.
  total = jnp.max(jnp.where(mass > 0.0, cdf, 0.0), axis=-1, keepdims=True)
  return top, prob, mass, cdf, total


def _first_above(
  mass: Float[Array, "*axes #M n"],
  cdf: Float[Array, "*axes #M n"],
  at: Float[Array, "*axes M"],
) -> Int[Array, "*axes M"]:
  """The first index with mass whose cdf exceeds `at`, or the last with mass."""
  # XLA adds in a tree: partial sums may decrease by rounding. Where nothing
  # exceeds `at`, the largest one counts as the total.
  cdf = jnp.where(mass > 0.0, cdf, 0.0)
  total = jnp.max(cdf, axis=-1, keepdims=True)
  return jnp.argmax((cdf > at[..., None]) | (cdf == total), axis=-1)
