"""Attention over a shared prefix and own tokens: positions, masks, one softmax.

`attend` takes the form that suits the machine: its own kernel
(fused_attention.py), pieces on a CPU, else a loop of tiles.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from brorl_jax.model import fused_attention, sharding
from brorl_jax.model.spec import PolicySpec, Target

# Not -inf: a query without any visible key (padding) must stay finite.
MASKED = -1e30
_cut = jax.lax.dynamic_slice_in_dim
# For the sum of a query that sees nothing (padding): its output is 0. Others
# have a sum of at least 1, that of their largest score.
_NOTHING = 1e-30

product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

# Keys, values and which of them each query sees.
Side = tuple[Array, Array, Array]

# What is known of a softmax before its end: the largest score m, the sum l of
# exp(score - m), and the values o weighted by the same. float32.
Softmax = tuple[
  Float[Array, "*rows"], Float[Array, "*rows"], Float[Array, "*rows K"]
]


def added(
  state: Softmax,
  score: Float[Array, "*rows C"],
  values: Callable[[Float[Array, "*rows C"]], Float[Array, "*rows K"]],
  seen: Bool[Array, "*#rows C"] | None = None,
) -> Softmax:
  """The softmax after more keys, whose score is MASKED where unseen. With
  `seen` they are exactly left out, also where nothing was seen before.
  """
  before, total, out = state
  top = jnp.maximum(before, jnp.max(score, axis=-1))
  shrink = jnp.exp(before - top)
  weight = jnp.exp(score - top[..., None])
  if seen is not None:
    weight = jnp.where(seen, weight, 0.0)
  return (
    top,
    total * shrink + jnp.sum(weight, axis=-1),
    out * shrink[..., None] + values(weight),
  )


def capped(score: Array, softcap: float) -> Array:
  """softcap * tanh(score / softcap), or the score itself if softcap is 0."""
  return softcap * jnp.tanh(score / softcap) if softcap else score


class View(NamedTuple):
  """Positions of a layer's queries, as angles, and the keys that they see."""

  cos: Float[Array, "*kinds P M Q half"]
  sin: Float[Array, "*kinds P M Q half"]
  # Own keys that each query sees: a mask, or in decoding how many newest ones.
  own: Bool[Array, "*kinds P M Q T"] | Int[Array, "P M"]
  shared: Any  # mask [*kinds,P,M,Q,S] of the prefix, axes M and Q may be 1


def row_views(
  c: PolicySpec,
  position: Int[Array, "P #M Q"],
  own: Bool[Array, "P #M Q Q"],
  prefix_mask: Bool[Array, "P S"] | None,
) -> View:
  """Angles and masks of full layers, or [2, ...] of full and sliding ones."""
  shared = None if prefix_mask is None else prefix_mask[:, None, None]
  turn = lambda rope: rope.turn(position, c.head_size)
  cos, sin = turn(c.rope)
  if not any(c.sliding):
    return View(cos, sin, own, shared)
  # A window counts the query's own position.
  near = lambda mask, key: (
    mask & (position[..., None] - key[:, :, None] < c.window)
  )
  close_cos, close_sin = turn(c.sliding_rope or c.rope)
  near_shared = None
  if prefix_mask is not None and shared is not None:
    before = jnp.cumsum(prefix_mask, axis=1, dtype=jnp.int32) - 1
    near_shared = near(shared, before[:, None])
    shared = jnp.broadcast_to(shared, near_shared.shape)
  return jax.tree.map(
    lambda *both: jnp.stack(both),
    View(cos, sin, own, shared),
    View(close_cos, close_sin, near(own, position), near_shared),
  )


def layer_view(c: PolicySpec, views: View, layer: Int[Array, ""]) -> View:
  """The views of one layer."""
  if not any(c.sliding):
    return views
  slides = jnp.asarray(c.sliding, jnp.int32)[layer]
  return jax.tree.map(lambda both: both[slides], views)


def slot_views(
  c: PolicySpec,
  prompt_mask: Bool[Array, "A W S"],
  length: Int[Array, "A R"],
  which: Int[Array, "A R"],
) -> list[View]:
  """Views of decode slots: of full layers, then of sliding ones if any."""
  before = jnp.sum(prompt_mask, axis=2, dtype=jnp.int32)  # A W
  position = jnp.take_along_axis(before, which, axis=1) + length - 1
  A, W, S = prompt_mask.shape
  own_prompt = which[..., None] == jnp.arange(W)[None, None]  # A R W
  if W == 1:
    own_prompt = jnp.ones((A, 1, 1), bool)
  mask = own_prompt[..., None] & prompt_mask[:, None]
  flat = lambda x: x.reshape(A, -1, W * S)
  cos, sin = c.rope.turn(position[..., None], c.head_size)
  views = [View(cos, sin, length, flat(mask))]
  if any(c.sliding):
    place = jnp.cumsum(prompt_mask, axis=2, dtype=jnp.int32) - 1  # A W S
    near = position[..., None, None] - place[:, None] < c.window  # A R W S
    limit = jnp.minimum(length, c.window)
    rope = c.sliding_rope or c.rope
    cos, sin = rope.turn(position[..., None], c.head_size)
    views.append(View(cos, sin, limit, flat(mask & near)))
  return views


def tree_views(
  end: Int[Array, "P M Q"],
) -> tuple[Bool[Array, "P M Q Q"], Int[Array, "P M Q"]]:
  """Which tokens each token of `Trees` sees, and its depth."""
  index = jnp.arange(end.shape[-1])
  i, j = index[None, None, :, None], index[None, None, None, :]
  # Padding, whose end is 0, sees itself: attention over no key is 0 / 0.
  visible = (j <= i) & (i < end[..., None, :]) | (i == j)
  return visible, jnp.sum(visible, axis=-1, dtype=jnp.int32) - 1


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
  twice, and each compiles for 4 s. The product is .5 % of a 1.5B layer's.
  """
  join = lambda *parts: jnp.concatenate(parts, axis=-1)
  K = x.shape[-1]
  swap = jnp.roll(jnp.eye(K, dtype=x.dtype), K // 2, axis=1)
  # "highest": numbers in float32 are not rounded.
  swapped = product("...k,kl->...l", x, swap, precision="highest")
  turned = x.astype(jnp.float32) * join(cos, cos) + swapped * join(-sin, sin)
  return turned.astype(x.dtype)


# Slopes turn back: by the product's rule in float32, at a sixth of the speed.
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
  shared: Side | None,
  own: Side,
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

  The scores of the prefix are one matrix product per prompt and key/value head,
  [M H/G Q, K] x [K, S], not M small ones. Queries are split into pieces, each
  with the own keys up to its last query, whose scores the backward pass
  computes again. On accelerators this is a kernel of the machine, if it has one
  for these arrays, and else the pieces are tiles of a loop.

  `shared` is keys and values [P,G,S,K] and mask [P,#M,#Q,S], `own` is
  [P,M,G,Q,K] and a causal mask [P,#M,Q,Q]; queries and keys are rotated. The
  arrays are spread over `mesh`, outside of `jax.shard_map`. `real` is given if
  the masks say no more than which tokens are real; a machine's kernel needs it.
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
    wide = lambda x: x if x.dtype == bool else x.astype(jnp.float32)
    q, own, shared = jax.tree.map(wide, (q, own, shared))
  k, v, visible = own
  G = k.shape[2]
  S = 0 if shared is None else shared[0].shape[2]
  # Axes in the order of the products, P G M (H/G Q) K and P G M Q K, so that no
  # scores are transposed: 70 -> 19 CPU-ms for a layer at 16 rows of 128.
  q = (q * scale).reshape(P, M, Q, G, H // G, K).transpose(0, 3, 1, 4, 2, 5)
  own = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), visible
  devices = math.prod(sharding.axes_here(mesh).values())
  each = -(-P * M * H * (Q + S) // devices)
  size = -(-Q // pieces(each, Q, on_cpu=cpu))
  if size == Q:
    out = _attend(q, shared, own, softcap=softcap)
  else:
    form = _pieces if cpu else attend_in_tiles
    out = form(q, shared, own, size=size, softcap=softcap)
  out = jnp.transpose(out, (0, 2, 4, 1, 3, 5)).reshape(P, M, Q, H, K)
  return out.astype(dtype)


def pieces(each: int, Q: int, *, on_cpu: bool) -> int:
  """The number of pieces of Q queries, so that scores fit a tile of memory.

  `each` is the scores of one query, over all rows and heads of a device. On a
  CPU a tile fits a core's cache.
  """
  tile = 2**20 if on_cpu else 2**28
  # Every piece is unrolled in the program, which takes time to compile.
  return min(-(-each * Q // tile), (16 if on_cpu else 64), -(-Q // 16))


def _pieces(
  q: Float[Array, "P G M J Q K"],
  shared: Side | None,
  own: Side,
  *,
  size: int,
  softcap: float,
) -> Float[Array, "P G M J Q K"]:
  """`_attend` for `size` queries at a time. On a CPU this takes up to a third
  less time than `attend_in_tiles`, which others need.
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
    see = visible[:, :, start:stop, :stop]
    keys = k[:, :, :, :stop], v[:, :, :, :stop], see
    out.append(piece(q[:, :, :, :, start:stop], part, keys))
  return jnp.concatenate(out, axis=4)


def _attend(
  q: Float[Array, "P G M J q K"],
  shared: Side | None,
  own: Side,
  *,
  softcap: float,
) -> Float[Array, "P G M J q K"]:
  sides = [own] if shared is None else [own, shared]
  scores = [
    jnp.where(see[:, None, :, None], _scores(q, k, softcap), MASKED)
    for k, _, see in sides
  ]
  # The largest score keeps exp finite and cancels: it needs no gradient.
  tops = [jnp.max(score, axis=-1, keepdims=True) for score in scores]
  top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, tops))
  weights = [jnp.exp(score - top) for score in scores]
  add = lambda parts: functools.reduce(jnp.add, parts)
  total = add([jnp.sum(w, axis=-1, keepdims=True) for w in weights])
  out = [
    _values(weight.astype(q.dtype), v)
    for weight, (_, v, _) in zip(weights, sides, strict=True)
  ]
  return (add(out) / total).astype(q.dtype)


def attend_in_tiles(
  q: Float[Array, "P G M J Q K"],
  shared: Side | None,
  own: Side,
  *,
  size: int,
  softcap: float,
) -> Float[Array, "P G M J Q K"]:
  """softmax(cap([q k_shared', q k_own'])) [v_shared; v_own], causal.

  Scores exist for one tile of queries and keys at a time. Both passes are
  loops: XLA runs the iterations of a loop one after the other, but independent
  pieces together and keeps the scores of all (72 GiB for 8 rows of 15,360).

  Tiles of own keys that are later than a tile of queries are left out. The
  backward pass, with p the weights, s the scores and d the slope of the loss,

    dv = p' d,   ds = p (d v' - sum_k d_k out_k),   dq = ds k,   dk = ds' q,

  takes p = exp(s - log sum exp s) from what the forward pass kept: one number
  for each query (Dao 2023, arXiv:2307.08691, algorithms 1 and 2).

  Arguments as of `attend`, but q is scaled, own keys are [P,G,M,Q,K], and a
  tile has `size` queries and own keys.
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
  return _tiled_forward(size, softcap, q, shared, own)[0]


def _tiled_forward(
  size: int, softcap: float, q: Array, shared: Side | None, own
):
  k, v, visible = own

  def tile(i):
    at = i * size
    rows = _cut(q, at, size, 4)
    none = jnp.zeros(rows.shape[:5])
    sums = none + MASKED, none, jnp.zeros(rows.shape)
    if shared is not None:
      see = _seen(shared[2], at, size)
      sums = _added(sums, rows, shared[0], shared[1], see, softcap)

    def more(j, sums):
      see = _cut(_cut(visible, at, size, 2), j * size, size, 3)
      part = _cut(k, j * size, size, 3), _cut(v, j * size, size, 3)
      return _added(sums, rows, *part, see, softcap)

    top, total, out = jax.lax.fori_loop(0, i + 1, more, sums)
    total = jnp.maximum(total, _NOTHING)
    return (out / total[..., None]).astype(q.dtype), top + jnp.log(total)

  out, level = jax.lax.map(tile, jnp.arange(q.shape[4] // size))
  out = _joined(out)
  return out, (q, shared, own, out, _joined(level))


def _tiled_backward(size: int, softcap: float, saved, slope):
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

    def slopes(k: Array, v: Array, see: Array) -> tuple[Array, Array, Array]:
      """Of queries, keys and values from one tile of scores, in float32."""
      score = _scores(rows, k, softcap)
      weight = jnp.where(see[:, None, :, None], jnp.exp(score - top), 0.0)
      flat = _flat(d, k)
      dv = product("...nt,...nk->...tk", _flat(weight.astype(d.dtype), k), flat)
      dp = product("...nk,...tk->...nt", flat, v).reshape(weight.shape)
      ds = weight * (dp - mean)
      if softcap:
        ds *= 1.0 - jnp.square(score / softcap)
      ds = _flat(ds.astype(rows.dtype), k)
      dq = product("...nt,...tk->...nk", ds, k).reshape(rows.shape)
      return dq, product("...nt,...nk->...tk", ds, _flat(rows, k)), dv

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


_tiled.defvjp(_tiled_forward, _tiled_backward)


def _scores(
  rows: Float[Array, "P G M J q K"],
  k: Float[Array, "P G *m t K"],
  softcap: float,
) -> Float[Array, "P G M J q t"]:
  score = product("...nk,...tk->...nt", _flat(rows, k), k)
  return capped(score.reshape(*rows.shape[:5], k.shape[-2]), softcap)


def _values(
  weight: Float[Array, "P G M J q t"], v: Float[Array, "P G *m t K"]
) -> Float[Array, "P G M J q K"]:
  out = product("...nt,...tk->...nk", _flat(weight, v), v)
  return out.reshape(*weight.shape[:5], -1)


def _added(
  sums: Softmax, rows: Array, k: Array, v: Array, see: Array, softcap: float
) -> Softmax:
  seen = see[:, None, :, None]
  score = jnp.where(seen, _scores(rows, k, softcap), MASKED)
  values = lambda weight: _values(weight.astype(rows.dtype), v)
  return added(sums, score, values, seen)


def _flat(x: Float[Array, "P G M J q x"], k: Array) -> Array:
  """In one axis what has the same keys: rows of a prompt, or of one row."""
  return x.reshape(*x.shape[: k.ndim - 2], -1, x.shape[-1])


def _seen(
  mask: Bool[Array, "P #M #Q S"], at: Array, size: int
) -> Bool[Array, "P #M #q S"]:
  return mask if mask.shape[2] == 1 else _cut(mask, at, size, 2)


def _joined(tiles: Float[Array, "n P G M J q *K"]) -> Array:
  x = jnp.moveaxis(tiles, 0, 4)
  return x.reshape(*x.shape[:4], -1, *x.shape[6:])
