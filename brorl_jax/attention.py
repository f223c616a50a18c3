"""Attention over a shared prefix and own tokens, and rotary positions."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

# Not -inf: a query without any visible key (padding) must stay finite.
_MASKED = -1e30


@dataclasses.dataclass(frozen=True)
class Rope:
  """How fast each pair of a head's components turns with the position.

  References:
    default: Su et al. 2021, arXiv:2104.09864. linear: Chen et al. 2023,
    arXiv:2306.15595. yarn: Peng et al. 2023, arXiv:2309.00071, section 3.
    llama3: Llama team 2024, arXiv:2407.21783. dynamic is default up to the
    positions the policy was trained on, and undefined for a cache beyond them.
  """

  theta: float
  kind: str = "default"
  factor: float = 1.0  # by which positions are stretched
  trained: int = 0  # positions before they were stretched
  # llama3: wavelengths above trained / low are stretched, below trained / high
  # left. yarn: pairs with fewer turns than low within `trained` are stretched,
  # with more than high left.
  low: float = 1.0
  high: float = 32.0
  truncate: bool = True  # yarn's limits are whole pairs
  scale: float = 1.0  # of cosine and sine

  KINDS = ("default", "linear", "dynamic", "yarn", "llama3")

  def frequency(self, head_size: int) -> Float[np.ndarray, " half"]:
    """Radians per position of pair i, theta^(-2i/K) before any stretching."""
    pair = np.arange(head_size // 2)
    plain = self.theta ** (-2.0 * pair / head_size)
    if self.kind in ("default", "dynamic"):
      left = np.ones_like(plain)
    elif self.kind == "linear":
      left = np.zeros_like(plain)
    elif self.kind == "llama3":
      turns = self.trained * plain / (2.0 * math.pi)
      left = np.clip((turns - self.low) / (self.high - self.low), 0.0, 1.0)
    else:  # yarn: linear in the pair, not in its turns
      at = lambda turns: (
        head_size
        * math.log(self.trained / (turns * 2.0 * math.pi))
        / (2.0 * math.log(self.theta))
      )
      first, last = at(self.high), at(self.low)
      if self.truncate:
        first, last = math.floor(first), math.ceil(last)
      first, last = max(first, 0), min(last, head_size - 1)
      width = (last - first) or 1e-3
      left = 1.0 - np.clip((pair - first) / width, 0.0, 1.0)
    mixed = left * plain + (1.0 - left) * plain / self.factor
    return mixed.astype(np.float32)

  def turn(
    self, position: Int[Array, "P R Q"], head_size: int
  ) -> tuple[Float[Array, "P R Q half"], Float[Array, "P R Q half"]]:
    """Cosine and sine of every pair at these positions, in float32."""
    frequency = self.frequency(head_size)
    angle = jnp.multiply.outer(position.astype(jnp.float32), frequency)
    return self.scale * jnp.cos(angle), self.scale * jnp.sin(angle)


def rotate(
  x: Float[Array, "P R Q h K"],
  cos: Float[Array, "P R Q half"],
  sin: Float[Array, "P R Q half"],
) -> Float[Array, "P R Q h K"]:
  """Turns pairs (i, i + K/2), the half-split layout of Hugging Face."""
  cos, sin = cos[..., None, :], sin[..., None, :]  # the same for every head
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return turned.astype(x.dtype)


def attend(
  q: Float[Array, "P R Q H K"],
  shared: tuple[Array, Array, Array] | None,
  own: tuple[Array, Array, Array],
  *,
  scale: float,
  softcap: float = 0.0,
) -> Float[Array, "P R Q H K"]:
  """Grouped-query attention over a shared prefix and own keys, one softmax.

    out = softmax(cap([q k_shared', q k_own'] * scale)) [v_shared; v_own]
    cap(s) = softcap * tanh(s / softcap), or s if softcap is 0

  The scores of the prefix are one matrix product per prompt and key/value
  head, [R Q H/G, K] x [K, S], not R small ones.

  Args:
    q: Queries, rotated.
    shared: Keys and values [P,G,S,K] and mask [P,R,Q,S], or None. Axes R and Q
      of the mask may be 1.
    own: Keys and values [P,R,G,T,K] and mask [P,R,Q,T].
    scale: Of the scores, usually K^-1/2.
    softcap: Bound of the scores.
  """
  P, R, Q, H, K = q.shape
  k_own, v_own, visible = own
  G = k_own.shape[2]
  q = q.reshape(P, R, Q, G, H // G, K) * scale

  def seen(score: Array, mask: Array) -> Array:
    if softcap:
      score = softcap * jnp.tanh(score / softcap)
    return jnp.where(mask[:, :, :, None, None], score, _MASKED)

  score = jnp.einsum(
    "prqgjk,prgtk->prqgjt", q, k_own, preferred_element_type=jnp.float32
  )
  score = seen(score, visible)
  if shared is None:
    weight = jax.nn.softmax(score, axis=-1).astype(q.dtype)
    out = jnp.einsum("prqgjt,prgtk->prqgjk", weight, v_own)
    return out.reshape(P, R, Q, H, K)

  k_shared, v_shared, mask = shared
  score_shared = jnp.einsum(
    "prqgjk,pgsk->prqgjs", q, k_shared, preferred_element_type=jnp.float32
  )
  score = jnp.concatenate([seen(score_shared, mask), score], axis=-1)
  weight = jax.nn.softmax(score, axis=-1).astype(q.dtype)
  S = k_shared.shape[2]
  out = jnp.einsum("prqgjs,pgsk->prqgjk", weight[..., :S], v_shared)
  out += jnp.einsum("prqgjt,prgtk->prqgjk", weight[..., S:], v_own)
  return out.reshape(P, R, Q, H, K)


class Shared(NamedTuple):
  """What all rows of a lane may read: the prompts it works on, side by side."""

  k: Float[Array, "A G S K"]
  v: Float[Array, "A G S K"]
  mask: Bool[Array, "A #R S"]  # what each row may


class Page(NamedTuple):
  """C columns of the own keys and values of B = A R rows.

  Keys are stored transposed: both products of a row then run along the axis
  that lies last. As int8 every column has a scale, otherwise none.
  """

  k: Float[Array, "B G K C"] | Int[Array, "B G K C"]
  v: Float[Array, "B G C K"] | Int[Array, "B G C K"]
  k_scale: Float[Array, "B G C"] | None = None
  v_scale: Float[Array, "B G C"] | None = None

  def write(
    self, k: Float[Array, "B G K"], v: Float[Array, "B G K"], column
  ) -> "Page":
    """The page with one more column; in place if the page is donated."""
    put = jax.lax.dynamic_update_slice_in_dim
    k_scale, v_scale = self.k_scale, self.v_scale
    if k_scale is not None and v_scale is not None:
      k, k_size = _quantize(k)
      v, v_size = _quantize(v)
      k_scale = put(k_scale, k_size, column, axis=2)
      v_scale = put(v_scale, v_size, column, axis=2)
    return Page(
      put(self.k, k[..., None].astype(self.k.dtype), column, axis=3),
      put(self.v, v[:, :, None].astype(self.v.dtype), column, axis=2),
      k_scale,
      v_scale,
    )


def _quantize(x: Float[Array, "B G K"]) -> tuple[Array, Array]:
  """int8 x' and scale [B,G,1] with x = x' scale up to scale / 2."""
  size = jnp.max(jnp.abs(x), axis=-1, keepdims=True).astype(jnp.float32) / 127.0
  size = jnp.maximum(size, 1e-30)  # a column of zeros
  return jnp.round(x.astype(jnp.float32) / size).astype(jnp.int8), size


def ages(
  column: Int[Array, ""], pages: int, columns: int
) -> list[Int[Array, "1 C"]]:
  """How many steps ago each column of each page was written; 0 is now.

  The pages are a circle of `pages * columns` columns, oldest page first. The
  last one is being written: its columns up to `column` are the newest of all,
  those behind it the oldest, left from a turn before.
  """
  back = column - jnp.arange(columns)[None]
  older = [back + k * columns for k in range(pages - 1, 0, -1)]
  return [*older, back % (pages * columns)]


def decode(
  q: Float[Array, "A R H K"],
  shared: Shared,
  pages: Sequence[Page],
  *,
  column: Int[Array, ""],
  limit: Int[Array, "A R"],
  scale: float,
  softcap: float = 0.0,
) -> Float[Array, "A R H K"]:
  """Attention of one new token per row; `attend` in the form for decoding.

  The scores of the prompts are one matrix product per lane and key/value head,
  [R H/G, K] x [K, S]. Parts are merged by their log-sum-exp, so no array ever
  holds all scores of a row.

  Args:
    q: Queries, rotated, of R rows in each of A lanes.
    shared: Keys and values that all rows of a lane read.
    pages: The rows' own, oldest first; see `ages`.
    column: Of the last page; the newest.
    limit: Each row sees its columns of age below this.
    scale: Of the scores, usually K^-1/2.
    softcap: Bound of the scores.
  """
  A, R, H, K = q.shape
  G = shared.k.shape[1]
  J = H // G
  cap = lambda s: softcap * jnp.tanh(s / softcap) if softcap else s
  # Rows of a lane together, A G (R J) K, and every row by itself, B G J K. An
  # axis of one lane would keep XLA from writing to pages in place.
  alone = lambda x: jnp.swapaxes(
    x.reshape(A, G, R, J, *x.shape[3:]), 1, 2
  ).reshape(A * R, G, J, *x.shape[3:])
  q = (q * scale).reshape(A, R, G, J, K)
  together = jnp.swapaxes(q, 1, 2).reshape(A, G, R * J, K)
  q = q.reshape(A * R, G, J, K)

  score = jnp.einsum(
    "agnk,agsk->agns", together, shared.k, preferred_element_type=jnp.float32
  )
  mask = shared.mask[:, None, :, None]  # A 1 R|1 1 S
  score = jnp.where(mask, cap(score).reshape(A, G, R, J, -1), _MASKED)
  score = score.reshape(A, G, R * J, -1)
  limit = limit.reshape(A * R, 1)
  circle = ages(column, len(pages), pages[0].v.shape[2])
  scores = [
    jnp.where((age < limit)[:, None, None], cap(_own_scores(q, page)), _MASKED)
    for age, page in zip(circle, pages, strict=True)
  ]

  # One softmax over all parts.
  top = alone(jnp.max(score, axis=-1))
  for own in scores:
    top = jnp.maximum(top, jnp.max(own, axis=-1))
  back = jnp.swapaxes(top.reshape(A, R, G, J), 1, 2).reshape(A, G, R * J, 1)
  weight = jnp.exp(score - back)
  total = alone(jnp.sum(weight, axis=-1))
  out = alone(
    jnp.einsum(
      "agns,agsk->agnk",
      weight.astype(q.dtype),
      shared.v,
      preferred_element_type=jnp.float32,
    )
  )
  for page, own in zip(pages, scores, strict=True):
    weight = jnp.exp(own - top[..., None])
    total += jnp.sum(weight, axis=-1)
    out += _own_values(weight, page, q.dtype)
  return (out / total[..., None]).astype(q.dtype).reshape(A, R, H, K)


def _own_scores(q: Float[Array, "B G J K"], page: Page) -> Array:
  k = page.k if page.k_scale is None else page.k.astype(q.dtype)
  score = jnp.einsum(
    "bgjk,bgkc->bgjc",
    q.astype(k.dtype),
    k,
    preferred_element_type=jnp.float32,
  )
  return score if page.k_scale is None else score * page.k_scale[:, :, None]


def _own_values(weight: Float[Array, "B G J C"], page: Page, dtype) -> Array:
  v = page.v if page.v_scale is None else page.v.astype(dtype)
  if page.v_scale is not None:
    weight *= page.v_scale[:, :, None]
  return jnp.einsum(
    "bgjc,bgck->bgjk",
    weight.astype(dtype).astype(v.dtype),
    v,
    preferred_element_type=jnp.float32,
  )


def within(
  mask: Bool[Array, "P #R #Q T"],
  query: Int[Array, "P R Q"],
  key: Int[Array, "P #R T"],
  window: int,
) -> Bool[Array, "P R Q T"]:
  """What a sliding layer sees of `mask`: the last `window` positions.

  Args:
    mask: What a full layer sees; axes R and Q may be 1.
    query: Positions of the queries.
    key: Positions of the keys; axis R may be 1.
    window: Positions, the query's own included.
  """
  return mask & (query[..., None] - key[:, :, None] < window)
