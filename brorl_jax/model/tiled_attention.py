"""Attention whose scores exist for one tile of queries and keys at a time.

The backward pass computes them again. Both passes are loops: XLA schedules the
iterations of a loop one after the other, but runs independent pieces of one
program together and keeps the scores of all (72 GiB for 8 rows of 15,360).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# Not -inf: a query without any visible key (padding) must stay finite.
MASKED = -1e30
# For the sum of a query that sees nothing (padding): its output is 0. Others
# have a sum of at least 1, that of their largest score.
_NOTHING = 1e-30

# Keys, values and which of them each query sees.
Side = tuple[Array, Array, Array]


def capped(score: Array, softcap: float) -> Array:
  """softcap * tanh(score / softcap), or the score itself if softcap is 0."""
  return softcap * jnp.tanh(score / softcap) if softcap else score


class _Sums(NamedTuple):
  """What is known of a softmax before its end, in float32."""

  top: Float[Array, "P G M J q 1"]  # the largest score m
  total: Float[Array, "P G M J q 1"]  # the sum of exp(score - m)
  out: Float[Array, "P G M J q K"]  # values, weighted by the same


def attend(
  q: Float[Array, "P G M J Q K"],
  shared: Side | None,
  own: Side,
  *,
  size: int,
  softcap: float,
) -> Float[Array, "P G M J Q K"]:
  """softmax(cap([q k_shared', q k_own'])) [v_shared; v_own], causal.

  Tiles of own keys that are later than a tile of queries are left out. The
  backward pass, with p the weights, s the scores and d the slope of the loss,

    dv = p' d,   ds = p (d v' - sum_k d_k out_k),   dq = ds k,   dk = ds' q,

  takes p = exp(s - log sum exp s) from what the forward pass kept: one number
  for each query (Dao 2023, arXiv:2307.08691, algorithms 1 and 2).

  Args:
    q: Queries, rotated and scaled, J for each key and value head.
    shared: Keys and values [P,G,S,K] and mask [P,M,Q,S], or None. Axes M and Q
      of the mask may be 1.
    own: Keys and values [P,G,M,Q,K] and mask [P,M,Q,Q], which must be causal.
      Axis M of the mask may be 1.
    size: Queries, and own keys, of a tile.
    softcap: Bound of the scores; 0 means none.
  """
  Q = q.shape[4]
  spare = -Q % size
  k, v, visible = own
  pad = lambda x, *axes: jnp.pad(
    x, [(0, spare if i in axes else 0) for i in range(x.ndim)]
  )
  own = pad(k, 3), pad(v, 3), pad(visible, 2, 3)
  if shared is not None and shared[2].shape[2] > 1:
    shared = shared[0], shared[1], pad(shared[2], 2)
  out: Array = _tiled(size, softcap, pad(q, 4), shared, own)
  return out[:, :, :, :, :Q]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _tiled(size, softcap, q, shared, own):
  return _forward(size, softcap, q, shared, own)[0]


def _forward(size: int, softcap: float, q: Array, shared: Side | None, own):
  k, v, visible = own

  def tile(i):
    at = i * size
    rows = _cut(q, at, size, 4)
    sums = _Sums(
      jnp.full((*rows.shape[:5], 1), MASKED),
      jnp.zeros((*rows.shape[:5], 1)),
      jnp.zeros(rows.shape),
    )
    if shared is not None:
      see = _seen(shared[2], at, size)
      sums = _added(sums, rows, shared[0], shared[1], see, softcap)

    def more(j, sums):
      see = _cut(_cut(visible, at, size, 2), j * size, size, 3)
      part = _cut(k, j * size, size, 3), _cut(v, j * size, size, 3)
      return _added(sums, rows, *part, see, softcap)

    sums = jax.lax.fori_loop(0, i + 1, more, sums)
    total = jnp.maximum(sums.total, _NOTHING)
    out = (sums.out / total).astype(q.dtype)
    return out, (sums.top + jnp.log(total))[..., 0]

  out, level = jax.lax.map(tile, jnp.arange(q.shape[4] // size))
  out = _joined(out)
  return out, (q, shared, own, out, _joined(level))


def _backward(size: int, softcap: float, saved, slope):
  q, shared, own, out, level = saved
  k, v, visible = own
  zeros = lambda x: jnp.zeros(x.shape, jnp.float32)

  def tile(carry, i):
    at = i * size
    rows, d, o = (_cut(x, at, size, 4) for x in (q, slope, out))
    top = _cut(level, at, size, 4)[..., None]
    # sum_k d_k out_k, the mean of d v' under the weights.
    mean = jnp.sum(
      d.astype(jnp.float32) * o.astype(jnp.float32), axis=-1, keepdims=True
    )
    slopes = functools.partial(
      _slopes, rows, d, top=top, mean=mean, softcap=softcap
    )
    d_shared, d_own = carry
    dq = jnp.zeros(rows.shape)
    if shared is not None:
      see = _seen(shared[2], at, size)
      dq, dk, dv = slopes(shared[0], shared[1], see)
      d_shared = d_shared[0] + dk, d_shared[1] + dv

    def more(j, carry):
      dq, (dk, dv) = carry
      see = _cut(_cut(visible, at, size, 2), j * size, size, 3)
      part = _cut(k, j * size, size, 3), _cut(v, j * size, size, 3)
      more_q, more_k, more_v = slopes(*part, see)
      put = lambda x, y: jax.lax.dynamic_update_slice_in_dim(
        x, _cut(x, j * size, size, 3) + y, j * size, axis=3
      )
      return dq + more_q, (put(dk, more_k), put(dv, more_v))

    dq, d_own = jax.lax.fori_loop(0, i + 1, more, (dq, d_own))
    return (d_shared, d_own), dq.astype(q.dtype)

  start = shared and (zeros(shared[0]), zeros(shared[1]))
  (d_shared, (dk, dv)), dq = jax.lax.scan(
    tile, (start, (zeros(k), zeros(v))), jnp.arange(q.shape[4] // size)
  )
  if shared is not None:
    dtype = shared[0].dtype
    d_shared = d_shared[0].astype(dtype), d_shared[1].astype(dtype), None
  return _joined(dq), d_shared, (dk.astype(k.dtype), dv.astype(v.dtype), None)


_tiled.defvjp(_forward, _backward)


def _scores(
  rows: Float[Array, "P G M J q K"],
  k: Float[Array, "P G *m t K"],
  softcap: float,
) -> Float[Array, "P G M J q t"]:
  """Capped scores, in float32."""
  score = jnp.einsum(
    "...nk,...tk->...nt", _flat(rows, k), k, preferred_element_type=jnp.float32
  ).reshape(*rows.shape[:5], k.shape[-2])
  return capped(score, softcap)


def _added(
  sums: _Sums, rows: Array, k: Array, v: Array, see: Array, softcap: float
) -> _Sums:
  """The sums with more keys: both parts relative to the larger top."""
  seen = see[:, None, :, None]
  score = jnp.where(seen, _scores(rows, k, softcap), MASKED)
  top = jnp.maximum(sums.top, jnp.max(score, axis=-1, keepdims=True))
  weight = jnp.where(seen, jnp.exp(score - top), 0.0)
  less = jnp.exp(sums.top - top)
  more = jnp.einsum(
    "...nt,...tk->...nk",
    _flat(weight.astype(rows.dtype), k),
    v,
    preferred_element_type=jnp.float32,
  ).reshape(rows.shape)
  total = sums.total * less + jnp.sum(weight, axis=-1, keepdims=True)
  return _Sums(top, total, sums.out * less + more)


def _slopes(
  rows: Array,
  d: Array,
  k: Array,
  v: Array,
  see: Array,
  *,
  top: Array,
  mean: Array,
  softcap: float,
) -> tuple[Array, Array, Array]:
  """Slopes of queries, keys and values from one tile of scores, in float32."""
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  score = _scores(rows, k, softcap)
  seen = see[:, None, :, None]
  weight = jnp.where(seen, jnp.exp(score - top), 0.0)
  dv = product(
    "...nt,...nk->...tk", _flat(weight.astype(d.dtype), k), _flat(d, k)
  )
  dp = product("...nk,...tk->...nt", _flat(d, k), v).reshape(weight.shape)
  ds = weight * (dp - mean)
  if softcap:
    ds *= 1.0 - jnp.square(score / softcap)
  ds = _flat(ds.astype(rows.dtype), k)
  dq = product("...nt,...tk->...nk", ds, k).reshape(rows.shape)
  return dq, product("...nt,...nk->...tk", ds, _flat(rows, k)), dv


def _flat(x: Float[Array, "P G M J q x"], k: Array) -> Array:
  """In one axis what has the same keys: rows of a prompt, or of one row."""
  kept = k.ndim - 2
  return x.reshape(*x.shape[:kept], -1, x.shape[-1])


def _cut(x: Array, at: Array, size: int, axis: int) -> Array:
  return jax.lax.dynamic_slice_in_dim(x, at, size, axis)


def _seen(
  mask: Bool[Array, "P #M #Q S"], at: Array, size: int
) -> Bool[Array, "P #M #q S"]:
  """What a tile of queries sees of the prefix."""
  return mask if mask.shape[2] == 1 else _cut(mask, at, size, 2)


def _joined(tiles: Float[Array, "n P G M J q *K"]) -> Array:
  x = jnp.moveaxis(tiles, 0, 4)
  return x.reshape(*x.shape[:4], -1, *x.shape[6:])
