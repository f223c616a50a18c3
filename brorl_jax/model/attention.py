"""Attention over a shared prefix and own tokens, and rotary positions."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from brorl_jax.model import fused_attention, sharding, tiled_attention
from brorl_jax.model.target import Target
from brorl_jax.model.tiled_attention import MASKED, capped


def rotate(
  x: Float[Array, "P M Q h K"],
  cos: Float[Array, "P #M Q half"],
  sin: Float[Array, "P #M Q half"],
  target: Target,
) -> Float[Array, "P M Q h K"]:
  """Turns pairs (i, i + K/2), the half-split layout of Hugging Face."""
  cos, sin = cos[..., None, :], sin[..., None, :]  # the same for every head
  if target.platform == "tpu":
    return _rotated_by_product(x, cos, sin)
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return turned.astype(x.dtype)


@jax.custom_vjp
def _rotated_by_product(
  x: Float[Array, "P M Q h K"],
  cos: Float[Array, "P #M Q 1 half"],
  sin: Float[Array, "P #M Q 1 half"],
) -> Float[Array, "P M Q h K"]:
  """`rotate`, where a product with a permutation swaps the halves, exactly.

  Half a head is half of a TPU's 128 lanes: split and joined it is written
  twice, and its compiler takes 4 s for each rotation. The product is .5 % of a
  1.5B layer's.
  """
  join = lambda *parts: jnp.concatenate(parts, axis=-1)
  K = x.shape[-1]
  swap = jnp.roll(jnp.eye(K, dtype=x.dtype), K // 2, axis=1)
  swapped = jnp.einsum(
    "...k,kl->...l",
    x,
    swap,
    precision="highest",  # numbers in float32 are not rounded
    preferred_element_type=jnp.float32,
  )
  turned = x.astype(jnp.float32) * join(cos, cos) + swapped * join(-sin, sin)
  return turned.astype(x.dtype)


# Slopes turn back. By the product's own rule they would be multiplied in
# float32, at a sixth of the speed.
_rotated_by_product.defvjp(
  lambda x, cos, sin: (_rotated_by_product(x, cos, sin), (cos, sin)),
  lambda saved, slope: (
    _rotated_by_product(slope, saved[0], -saved[1]),
    None,
    None,
  ),
)


def attend(
  q: Float[Array, "P M Q H K"],
  shared: tuple[Array, Array, Array] | None,
  own: tuple[Array, Array, Array],
  *,
  scale: float,
  softcap: float = 0.0,
  target: Target,
  mesh: Mesh | None = None,
  real: fused_attention.Real | None = None,
) -> Float[Array, "P M Q H K"]:
  """Grouped-query attention over a shared prefix and own keys, one softmax.

    out = softmax(cap([q k_shared', q k_own'] * scale)) [v_shared; v_own]
    cap(s) = softcap * tanh(s / softcap), or s if softcap is 0

  The scores of the prefix are one matrix product per prompt and key/value
  head, [M H/G Q, K] x [K, S], not M small ones. Queries are split into pieces,
  each with the own keys up to its last query. The backward pass computes the
  scores of a piece again, so no array holds the scores of all queries. On
  accelerators this is a kernel of the machine, if it has one for these arrays,
  and else the pieces are tiles of a loop.

  Args:
    q: Queries, rotated.
    shared: Keys and values [P,G,S,K] and mask [P,M,Q,S], or None. Axes M and Q
      of the mask may be 1.
    own: Keys and values [P,M,G,Q,K] and mask [P,M,Q,Q], which must be causal.
      Axis M of the mask may be 1.
    scale: Factor of the scores, usually K^-1/2.
    mesh: Over which the arrays are spread, outside of `jax.shard_map`.
    real: Which tokens are real, if the masks say no more than that; a machine's
      kernel needs it.
  """
  if real is not None and fused_attention.supports(
    target, q, real, softcap=softcap
  ):
    return fused_attention.attend(
      q,
      shared and shared[:2],
      own[:2],
      real,
      scale=scale,
      softcap=softcap,
      target=target,
      mesh=mesh,
    )
  P, M, Q, H, K = q.shape
  dtype, cpu = q.dtype, target.on_cpu
  if cpu:
    # XLA multiplies batches of matrices in float32 on a CPU anyway, and would
    # convert the inputs of every product.
    q, own, shared = jax.tree.map(_in_float32, (q, own, shared))
  k, v, visible = own
  G = k.shape[2]
  S = 0 if shared is None else shared[0].shape[2]
  # Axes in the order of the products, P G M (H/G Q) K and P G M Q K, so that no
  # scores are transposed: 70 -> 19 CPU-ms for a layer at 16 rows of 128.
  q = jnp.transpose(
    (q * scale).reshape(P, M, Q, G, H // G, K), (0, 3, 1, 4, 2, 5)
  )
  k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
  devices = math.prod(sharding.axes_here(mesh).values())
  each = -(-P * M * H * (Q + S) // devices)
  size = -(-Q // pieces(each, Q, on_cpu=cpu))
  if size == Q:
    out = _attend(q, shared, (k, v, visible), softcap=softcap)
  elif cpu:
    out = _pieces(q, shared, (k, v, visible), size=size, softcap=softcap)
  else:
    out = tiled_attention.attend(
      q, shared, (k, v, visible), size=size, softcap=softcap
    )
  out = jnp.transpose(out, (0, 2, 4, 1, 3, 5)).reshape(P, M, Q, H, K)
  return out.astype(dtype)


def pieces(each: int, Q: int, *, on_cpu: bool) -> int:
  """The number of pieces of Q queries, so that scores fit a tile of memory.

  Args:
    each: Scores of one query, over all rows and heads of a device.
    Q: Queries of a row.
    on_cpu: Whether a tile should fit a core's cache.
  """
  tile = 2**20 if on_cpu else 2**28
  # Every piece is unrolled in the program, which takes time to compile.
  most = 16 if on_cpu else 64
  return min(-(-each * Q // tile), most, -(-Q // 16))


def _pieces(
  q: Float[Array, "P G M J Q K"],
  shared: tuple[Array, Array, Array] | None,
  own: tuple[Array, Array, Array],
  *,
  size: int,
  softcap: float,
) -> Float[Array, "P G M J Q K"]:
  """`_attend` for `size` queries at a time, one after the other in the program.

  On a CPU this takes up to a third less time than the loop of
  `tiled_attention`, which other devices need to stay within their memory.
  """
  k, v, visible = own
  Q = q.shape[4]
  piece = jax.checkpoint(functools.partial(_attend, softcap=softcap))
  out = []
  for start in range(0, Q, size):
    stop = min(start + size, Q)
    part = shared
    if shared is not None and shared[2].shape[2] > 1:
      part = (*shared[:2], shared[2][:, :, start:stop])
    out.append(
      piece(
        q[:, :, :, :, start:stop],
        part,
        (
          k[:, :, :, :stop],
          v[:, :, :, :stop],
          visible[:, :, start:stop, :stop],
        ),
      )
    )
  return jnp.concatenate(out, axis=4)


def _attend(
  q: Float[Array, "P G M J q K"],
  shared: tuple[Array, Array, Array] | None,
  own: tuple[Array, Array, Array],
  *,
  softcap: float,
) -> Float[Array, "P G M J q K"]:
  P, G, M, J, Q, K = q.shape
  parts = [(own[0], own[1], own[2], q.reshape(P, G, M, J * Q, K))]
  if shared is not None:
    parts.append((*shared, q.reshape(P, G, M * J * Q, K)))
  scores = []
  for k, _, mask, rows in parts:
    score = jnp.einsum(
      "...nk,...tk->...nt", rows, k, preferred_element_type=jnp.float32
    ).reshape(P, G, M, J, Q, -1)
    scores.append(
      jnp.where(mask[:, None, :, None], capped(score, softcap), MASKED)
    )

  # Subtracting the largest score keeps exp finite and cancels in the quotient,
  # so it needs no gradient.
  tops = [jnp.max(score, axis=-1, keepdims=True) for score in scores]
  top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, tops))
  weights = [jnp.exp(score - top) for score in scores]
  add = lambda parts: functools.reduce(jnp.add, parts)
  total = add([jnp.sum(w, axis=-1, keepdims=True) for w in weights])
  out = [
    jnp.einsum(
      "...nt,...tk->...nk",
      weight.astype(q.dtype).reshape(*rows.shape[:-1], -1),
      v,
      preferred_element_type=jnp.float32,
    ).reshape(q.shape)
    for weight, (_, v, _, rows) in zip(weights, parts, strict=True)
  ]
  return (add(out) / total).astype(q.dtype)


def _in_float32(x: Array) -> Array:
  return x if x.dtype == bool else x.astype(jnp.float32)
