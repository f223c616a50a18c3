r"""An accelerator's kernels beside the simple forms; a line of JSON for each.

  python -m launch.bench.kernels

attention   cuDNN's on a GPU, splash attention on a TPU: forward, and backward
decoding    over a pool of blocks, in bfloat16 and in int8

Inputs are random, in the shape of a Qwen2 of 1.5 billion parameters. Run this
first on a new kind of machine: a kernel that is wrong there says so in seconds.

  error, slope_error  of values and of gradients, relative to the simple form in
                      float32 on a CPU: |a - b| / |b|. bfloat16 gives 1e-3
                      to 1e-2
  ms, simple_ms       of the kernel and of the simple form in bfloat16, which is
                      a loop of tiles, or a gather of all blocks
  roofline_share      of the time that the operations or the bytes take at the
                      rates that launch.bench.ours measures
"""

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from brorl_jax.model import attention, cache, fused_attention, spec
from launch.bench import ours
from launch.bench.workloads import QWEN2_5_1_5B

_M = QWEN2_5_1_5B
_SCALE = _M.head_size**-0.5
Form = Callable[..., Any]


def main() -> None:
  here = spec.here()
  if here.platform != "gpu":
    sys.exit(f"error: no kernels for {here.platform}; needs a GPU")
  rates = ours.machine("bfloat16")
  say = lambda line: print(json.dumps(line), flush=True)
  say(
    {
      "versions": ours.versions(),
      "flops_per_s": rates[0],
      "bytes_per_s": rates[1],
    }
  )
  # A prompt of odd length, with padding; then long responses alone.
  for sizes in ({"M": 8, "Q": 1003, "S": 517}, {"M": 8, "Q": 2048, "S": 0}):
    say({"kernel": "attention", **of_attention(here, rates[0], **sizes)})
  for stored in ("bfloat16", "int8"):
    for sizes in ({"B": 37, "T": 300}, {"B": 512, "T": 2048}):
      line = of_decoding(cache.row_kernel, rates[1], stored=stored, **sizes)
      say({"kernel": "decoding", "stored": stored, **line})


def of_attention(
  here: spec.Target, rate: float, *, M: int, Q: int, S: int
) -> dict[str, Any]:
  """Of M rows of Q tokens behind a prompt of S, forward and backward."""
  H, K = _M.heads, _M.head_size
  real, arrays = _texts(M, Q, S)
  rows = np.ones((1, 1, Q), bool) if real.own is None else np.asarray(real.own)
  see = np.tril(np.ones((1, 1, Q, Q), bool)) & rows[:, :, None]
  prefix = np.ones((1, S), bool) if real.prefix is None else real.prefix
  before = np.asarray(prefix)[:, None, None]

  def form(how: spec.Target, real: fused_attention.Real | None, *arrays):
    def attend(q, shared, own):
      shared = None if shared is None else (*shared, jnp.asarray(before))
      own = *own, jnp.asarray(see)
      return attention.attend(
        q, shared, own, scale=_SCALE, target=how, real=real
      )

    *arrays, slope = arrays
    out, pull = jax.vjp(attend, *arrays)
    # What padding gets, no one reads.
    count = rows[..., None, None]
    return out * count, pull(slope.astype(out.dtype) * count)

  cpu = spec.Target("cpu", 1, 0)
  exact = _exactly(functools.partial(form, cpu, None), *arrays)
  kernel = jax.jit(functools.partial(form, here, real))
  simple = jax.jit(functools.partial(form, here, None))
  found = kernel(*arrays)
  errors = [
    error(*x) for x in zip(*map(jax.tree.leaves, (found, exact)), strict=True)
  ]
  pairs = M * _pairs(rows[0, 0], int(before.sum()))
  # Forward 2 products, backward 5: scores again, slopes of weights, q, k, v.
  flops = 7 * 2 * H * K * pairs
  ms = _ms(kernel, *arrays)
  return {
    "sizes": {"M": M, "Q": Q, "S": S},
    "error": errors[0],
    "slope_error": errors[1:],
    "ms": ms,
    "simple_ms": _ms(simple, *arrays),
    "roofline_share": round(1e3 * flops / rate / ms, 3),
  }


def _texts(M: int, Q: int, S: int) -> tuple[fused_attention.Real, tuple]:
  """Which tokens are real; queries, keys and values, a slope.

  With a prompt a fifth of it is padding, and a ninth of the rows.
  """
  rng = np.random.default_rng(Q)
  H, G, K = _M.heads, _M.kv_heads, _M.head_size
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
  twice = lambda *shape: (normal(*shape), normal(*shape))
  real = fused_attention.Real(None)
  if S:
    own = jnp.arange(Q)[None, None] < Q - Q // 9
    real = fused_attention.Real(own, jnp.arange(S)[None] >= S // 5)
  shared = twice(1, G, S, K) if S else None
  q, own = normal(1, M, Q, H, K), twice(1, M, G, Q, K)
  return real, (q, shared, own, normal(*q.shape))


def _pairs(own: np.ndarray, prefix: int) -> int:
  """Pairs of tokens of one row that see each other, itself included."""
  n = int(own.sum())
  return n * (n + 1) // 2 + n * prefix


def of_decoding(
  kernel: Form, bandwidth: float, *, stored: str, B: int, T: int
) -> dict[str, Any]:
  """Of B rows of up to T tokens, one token more of each."""
  rng = np.random.default_rng(B)
  G, J, K = _M.kv_heads, _M.heads // _M.kv_heads, _M.head_size
  C = cache.pool_columns(spec.Target("gpu", 1, 0))
  most = -(-T // C)
  blocks = B * most + 1
  one, two = jax.random.split(jax.random.key(B))
  shape = blocks, 2, G, C, K
  if stored == "int8":
    kv = jax.random.randint(one, shape, -127, 128, jnp.int8)
    scale = jax.random.uniform(two, shape[:-1], maxval=1 / 60)
    tokens = cache.BlockPool(kv, scale)
  else:
    tokens = cache.BlockPool(jax.random.normal(one, shape, stored))
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  state = normal(B, G, J), jnp.exp(normal(B, G, J)), normal(B, G, J, K)
  table = rng.permutation(blocks)[: B * most].reshape(B, most).astype(np.int32)
  stop = rng.integers(0, T + 1, B).astype(np.int32)
  stop[:2] = 0, T
  first = np.where(np.arange(B) % 3 == 2, stop // 2, 0).astype(np.int32)
  q = (normal(B, G, J, K) * _SCALE).astype(jnp.bfloat16)
  args = q, state, tokens, *map(jnp.asarray, (table, first, stop))
  exact = _exactly(cache.row_attention, *args)
  kernel, simple = jax.jit(kernel), jax.jit(cache.row_attention)
  ms = _ms(kernel, *args)
  each = K * tokens.kv.dtype.itemsize + (4 if stored == "int8" else 0)
  moved = 2.0 * G * each * int((stop - first).sum())
  return {
    "sizes": {"B": B, "T": T, "C": C},
    "error": error(kernel(*args), exact),
    "ms": ms,
    "simple_ms": _ms(simple, *args),
    "roofline_share": round(1e3 * moved / bandwidth / ms, 3),
  }


def error(a: Any, b: Any) -> float:
  """|a - b| / |b|, over all numbers."""
  a, b = (np.asarray(x, np.float64) for x in (a, b))
  return float(f"{np.linalg.norm(a - b) / np.linalg.norm(b):.3g}")


def _exactly(form: Form, *args: Any) -> Any:
  """On a CPU, which multiplies in float32 as it says."""
  wide = lambda x: x.astype("float32") if x.dtype == jnp.bfloat16 else x
  args = jax.device_put(jax.tree.map(wide, args), jax.devices("cpu")[0])
  return jax.device_get(jax.jit(form)(*args))


def _ms(form: Form, *args: Any) -> float:
  """Launched behind each other, so that launches cost nothing."""
  return round(1e3 * ours.seconds(form, *args, calls=20), 3)


if __name__ == "__main__":
  main()
