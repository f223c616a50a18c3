"""Attention as one kernel: cuDNN's on NVIDIA GPUs, splash attention on TPUs.

Both know causal attention of a sequence over itself. So every row becomes one
sequence: the real tokens of its prompt, its own real tokens, then padding,
which no real token sees. A prompt is still computed once; only its keys and
values of a layer, 1 KB per token of a 1.5B policy, are repeated for its rows.

cuDNN could give the log-sum-exp by which a prompt apart from its rows would be
merged, but jax rounds it to bfloat16: wrong by up to 3 %.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from brorl_jax.model import sharding
from brorl_jax.model.target import Target

# Queries of a prompt's tokens are computed too, for nothing. Of a prompt four
# times as long as its responses they are three quarters of all scores.
_MOST_PREFIX = 4
_LANES = 128  # a TPU's; sequences are multiples of it
_EVEN = 2  # a length of cuDNN's sequences is a multiple of it
_TPU_TILE = 512  # queries and keys that a splash kernel holds


class Real(NamedTuple):
  """Which tokens are real, where this and causality say who sees whom."""

  own: Bool[Array, "P #M Q"]
  prefix: Bool[Array, "P S"] | None = None
  # Tokens of different numbers do not see each other; without a prefix.
  segment: Int[Array, "P M Q"] | None = None


def supports(
  target: Target,
  q: Array,
  real: Real,
  *,
  softcap: float,
) -> bool:
  """Whether the machine has a kernel for these queries [P,M,Q,H,K]."""
  Q, K = q.shape[2], q.shape[4]
  if real.prefix is not None and real.prefix.shape[1] > _MOST_PREFIX * Q:
    return False
  if target.platform == "gpu":
    half = q.dtype in (jnp.bfloat16, jnp.float16)
    small = K <= 128 and K % 8 == 0
    return half and small and not softcap and real.segment is None
  return target.platform == "tpu" and K % _LANES == 0


def attend(
  q: Float[Array, "P M Q H K"],
  shared: tuple[Array, Array] | None,
  own: tuple[Array, Array],
  real: Real,
  *,
  scale: float,
  softcap: float,
  target: Target,
  mesh: Mesh | None,
) -> Float[Array, "P M Q H K"]:
  """`attention.attend` of rows of real tokens, in one kernel.

  Args:
    q: Queries, rotated.
    shared: Keys and values [P,G,S,K], or None.
    own: Keys and values [P,M,G,Q,K].
    real: Which tokens count.
    scale: Factor of the scores.
    softcap: Bound of the scores; 0 means none.
    target: Whose kernel.
    mesh: Over which the arrays are spread, outside of `jax.shard_map`.
  """
  kernel = _cudnn if target.platform == "gpu" else _splash
  kernel = functools.partial(kernel, scale=scale, softcap=softcap)
  return _on_devices(functools.partial(_rows, kernel), mesh, len(q))(
    q, shared, own, real
  )


def _on_devices(f: Callable, mesh: Mesh | None, P: int) -> Callable:
  """`f` on every device for its own prompts and heads: XLA cuts no kernel."""
  axes = sharding.axes_here(mesh)
  if not axes:
    return f
  # Axes of one device too: jax's own partitioning of cuDNN's kernel fails where
  # another axis is cut by hand.
  rows = "data" if "data" in axes and P % axes["data"] == 0 else None
  q = PartitionSpec(rows, None, None, "model")
  shared, own = PartitionSpec(rows, "model"), PartitionSpec(rows, None, "model")
  inside = jax.sharding.get_abstract_mesh().axis_names
  return jax.shard_map(
    f,
    mesh=None if inside else mesh,
    in_specs=(q, shared, own, PartitionSpec(rows)),
    out_specs=q,
    axis_names=set(axes),
    check_vma=False,
  )


def _rows(
  kernel: Callable,
  q: Float[Array, "P M Q H K"],
  shared: tuple[Array, Array] | None,
  own: tuple[Array, Array],
  real: Real,
) -> Float[Array, "P M Q H K"]:
  """Each row as one sequence [P,M,L,...], real tokens first."""
  P, M, Q, H, K = q.shape
  k, v = (jnp.swapaxes(x, 2, 3) for x in own)
  mask, S = real.own, 0
  if shared is not None and real.prefix is not None:
    S = real.prefix.shape[1]
    before = lambda x: jnp.broadcast_to(
      jnp.swapaxes(x, 1, 2)[:, None], (P, M, S, *k.shape[3:])
    )
    join = lambda *x: jnp.concatenate(x, axis=2)
    k, v = join(before(shared[0]), k), join(before(shared[1]), v)
    q = join(jnp.zeros((P, M, S, H, K), q.dtype), q)
    prefix = jnp.broadcast_to(real.prefix[:, None], (*mask.shape[:2], S))
    mask = join(prefix, mask)
  order = jnp.argsort(~mask, axis=2, stable=True)
  back = jnp.argsort(order, axis=2)
  flat = lambda x: _moved(x, order, back).reshape(P * M, *x.shape[2:])
  segment = real.segment
  if segment is not None:  # padding has a number of its own, behind the last
    segment = jnp.where(real.own, segment, jnp.iinfo(jnp.int32).max)
    segment = jnp.take_along_axis(segment, order, axis=2).reshape(P * M, -1)
  out = kernel(flat(q), flat(k), flat(v), segment)
  return _moved(out.reshape(P, M, S + Q, H, K), back, order)[:, :, S:]


@jax.custom_vjp
def _moved(
  x: Array, order: Int[Array, "P #M L"], back: Int[Array, "P #M L"]
) -> Array:
  """Tokens [P,M,L,...] in another order; `back` is its inverse."""
  return jnp.take_along_axis(x, order[..., None, None], axis=2)


# Without this the slope of a gather would be a scatter, which adds one by one.
_moved.defvjp(
  lambda x, order, back: (_moved(x, order, back), (order, back)),
  lambda saved, slope: (_moved(slope, *saved[::-1]), None, None),
)


def _cudnn(
  q: Float[Array, "B L H K"],
  k: Float[Array, "B L G K"],
  v: Float[Array, "B L G K"],
  segment: None,
  *,
  scale: float,
  softcap: float,
) -> Float[Array, "B L H K"]:
  del segment, softcap  # see `supports`
  L = q.shape[1]
  # jax refuses to differentiate odd lengths, and a prompt of 1,024 tokens with
  # the 15,359 inputs of a response is one.
  even = lambda x: _padded(x, _EVEN)
  out = jax.nn.dot_product_attention(
    even(q),
    even(k),
    even(v),
    scale=scale,
    is_causal=True,
    implementation="cudnn",
  )
  return out[:, :L]


def _padded(x: Array, unit: int) -> Array:
  """With more tokens, so that they are a multiple of `unit`."""
  spare = -x.shape[1] % unit
  return jnp.pad(x, [(0, 0), (0, spare)] + [(0, 0)] * (x.ndim - 2))


def _splash(
  q: Float[Array, "B L H K"],
  k: Float[Array, "B L G K"],
  v: Float[Array, "B L G K"],
  segment: Int[Array, "B L"] | None,
  *,
  scale: float,
  softcap: float,
  interpret: bool = False,
) -> Float[Array, "B L H K"]:
  L, H = q.shape[1:3]
  tile = min(_TPU_TILE, -(-L // _LANES) * _LANES)
  pad = functools.partial(_padded, unit=tile)
  heads = lambda x: jnp.swapaxes(pad(x), 1, 2)  # B H L K
  sizes = {x.name: tile for x in dataclasses.fields(splash.BlockSizes)[:8]}
  mask = splash.MultiHeadMask([splash.CausalMask((L + -L % tile,) * 2)] * H)
  kernel = splash.make_splash_mha_single_device(
    mask,
    block_sizes=splash.BlockSizes(**sizes),
    attn_logits_soft_cap=softcap or None,
    interpret=interpret,
  )
  ids = None
  if segment is not None:
    ids = splash.SegmentIds(*[pad(segment)] * 2)
  out = jax.vmap(kernel)(heads(q * scale), heads(k), heads(v), ids)
  return jnp.swapaxes(out, 1, 2)[:, :L]
