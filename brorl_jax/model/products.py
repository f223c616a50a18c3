"""Products of tokens with weights, in the form that suits a machine.

On CPUs: the form for which XLA's kernels are fast.

In bfloat16 these kernels are twice as fast as in float32, but only for
row-major x @ w with a float32 result. XLA folds a transposed operand into the
product and multiplies such products in float32: 140 to 210 GFLOP/s per core of
an AMD Zen 5, where x @ w has 400 to 450. Gradients are products with transposed
operands.

In float32 XLA copies the second operand into panels before it multiplies. For
few rows that costs as much as the product if it is the weight, and nothing if
the weight comes first: w x' is [out, rows] then, and is turned back. GFLOP per
CPU-second of a feed-forward, of 104 at best:

  rows   256 wide   512 wide   1,024 wide
  16                54 -> 61   54 -> 78
  64     71 -> 94   82 -> 92   83 -> 100
  128    91 -> 97   93 -> 98   93 -> 101

and of a head of 64 rows, 512 wide, with V = 32,768: 57 -> 68.

For decoding the weights of a layer are joined or transposed; experts multiply
the tokens that chose them; accelerators feed forward some tokens at a time.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from brorl_jax.model.spec import PolicySpec
from brorl_jax.model.target import Target

# Rows, at most, of a product in which the weight comes first.
_FEW = 128
# Tokens of a large tile are a multiple of it: for others a TPU's compiler takes
# minutes.
_UNIT = 128


def dot(
  x: Float[Array, "m k"], w: Float[Array, "k n"], target: Target
) -> Float[Array, "m n"]:
  """x @ w in float32; its gradients in the dtypes of x and w."""
  if half_on_cpu(x, target):
    return _dot(x, w)
  return jnp.matmul(x, w, preferred_element_type=jnp.float32)


def few(x: Float[Array, "n d"], target: Target) -> bool:
  """Whether a weight of float32 should come first."""
  return target.on_cpu and x.dtype == jnp.float32 and len(x) <= _FEW


def weight_first(
  x: Float[Array, "n d"], w: Float[Array, "out d"]
) -> Float[Array, "n out"]:
  """x @ w', for few rows."""
  return _turned_back(_product(w, x))


def gated(
  x: Float[Array, "n D"],
  gate: Float[Array, "F D"],
  up: Float[Array, "F D"],
  down: Float[Array, "D F"],
  activation: Callable[[Array], Array],
  target: Target,
) -> Float[Array, "n D"]:
  """(activation(x @ gate') * (x @ up')) @ down', for any number of rows."""
  if not few(x, target):
    return (activation(x @ gate.T) * (x @ up.T)) @ down.T
  inner = activation(_product(gate, x)) * _product(up, x)  # F n
  return _turned_back(down @ inner)


def _product(w: Float[Array, "a d"], x: Float[Array, "b d"]) -> Array:
  """w @ x', which XLA multiplies without writing x'."""
  return jax.lax.dot_general(w, x, (((1,), (1,)), ((), ())))


def _turned_back(y: Float[Array, "out n"]) -> Float[Array, "n out"]:
  # Alone, a transpose takes XLA .5 to 2 ns per number; as part of another loop
  # 5 ns, and the product with it 2 ms instead of 1.4.
  alone = jax.lax.optimization_barrier
  return alone(alone(y).T)


def turned(x: Float[Array, "m n"], target: Target) -> Float[Array, "n m"]:
  """x', written row by row where a product is faster for it."""
  return _turned(x) if half_on_cpu(x, target) else x.T


def half_on_cpu(x: Array, target: Target) -> bool:
  """Whether the form matters."""
  return x.dtype == jnp.bfloat16 and target.on_cpu


def _turned(x: Float[Array, "m n"]) -> Float[Array, "n m"]:
  if len(x) < 2:
    return x.T
  # XLA does not look for a transposed operand behind a concatenation.
  half = x.shape[1] // 2
  return jnp.concatenate([x[:, :half].T, x[:, half:].T])


@jax.custom_vjp
def _dot(x, w):
  return jnp.matmul(x, w, preferred_element_type=jnp.float32)


def _dot_backward(saved, slope):
  x, w = saved
  slope = slope.astype(x.dtype)
  return (
    _dot(slope, _turned(w)).astype(x.dtype),
    _dot(_turned(x), slope).astype(w.dtype),
  )


_dot.defvjp(lambda x, w: (_dot(x, w), (x, w)), _dot_backward)


def in_tiles(
  f: Callable[[Array], Array],
  x: Float[Array, "n D"],
  *,
  prompts: int,
  most: int,
) -> Float[Array, "n D"]:
  """f(x), where f acts on every token by itself.

  The tiles are computed one after the other, and once more in the backward
  pass, so that what f needs for itself is there for one of them. A tile has
  tokens of all prompts, which may be spread over devices.

  Args:
    f: [tokens,D] to [tokens,D]; may close over arrays.
    x: Tokens, prompt by prompt.
    prompts: P, a divisor of n.
    most: Tokens of a prompt in a tile.
  """
  n, D = x.shape
  each = n // prompts
  tiles = -(-each // most)
  if tiles == 1:
    return f(x)
  tile = -(-each // tiles)
  if tile > _UNIT:
    tile = -(-tile // _UNIT) * _UNIT
  x = x.reshape(prompts, each, D)
  x = jnp.pad(x, ((0, 0), (0, tiles * tile - each), (0, 0)))
  apart = jnp.swapaxes(x.reshape(prompts, tiles, -1, D), 0, 1)
  of_tile = lambda x: f(x.reshape(-1, D)).reshape(x.shape)
  out = jax.lax.map(jax.checkpoint(of_tile, prevent_cse=False), apart)
  out = jnp.swapaxes(out, 0, 1).reshape(prompts, -1, D)[:, :each]
  return out.reshape(n, D)


def routed(
  x: Float[Array, "n D"],
  router: Float[Array, "D E"],
  gate: Float[Array, "E D F"],
  up: Float[Array, "E D F"],
  down: Float[Array, "E F D"],
  *,
  per_token: int,
  normalize: bool,
) -> Float[Array, "n D"]:
  """Sum over a token's experts of their share times their SwiGLU.

    share = softmax(x router), the largest `per_token` of each token
    out   = sum over these e of share_e * (silu(x gate_e) * (x up_e)) down_e

  Nothing is dropped: tokens are sorted by expert and each expert multiplies as
  many rows as chose it. With experts spread over devices every device computes
  its own and the results are added; weights do not move.

  Args:
    router: Scores every expert for a token; multiplied in float32.
    per_token: Experts that each token uses.
    normalize: Shares of the chosen ones are scaled to add up to 1.

  References:
    Shazeer et al. 2017, arXiv:1701.06538; Yang et al. 2025 (Qwen3),
    arXiv:2505.09388.
  """
  n, E = x.shape[0], router.shape[1]
  logits = jnp.matmul(x, router, preferred_element_type=jnp.float32)
  share, chosen = jax.lax.top_k(jax.nn.softmax(logits), per_token)
  if normalize:
    share /= jnp.sum(share, axis=-1, keepdims=True)
  expert = chosen.reshape(-1)
  order = jnp.argsort(expert, stable=True)
  rows = jnp.bincount(expert, length=E)
  product = lambda a, b: jax.lax.ragged_dot(a, b, rows.astype(jnp.int32))
  ours = x[order // per_token]
  y = product(jax.nn.silu(product(ours, gate)) * product(ours, up), down)
  y = y[jnp.argsort(order)].reshape(n, per_token, -1)
  return jnp.sum(share.astype(y.dtype)[..., None] * y, axis=1)


def layer_form(layer: PyTree) -> str:
  """In which form the weights of a layer are.

  trained  as they are stored
  fused    of decoding on accelerators: fewer, larger weights
  turned   of decoding on CPUs in float32: the feed-forward's lie output by
           output, since a weight comes first in a product of few rows
  """
  if "qkv" in layer:
    return "fused"
  return "turned" if "gate_rows" in layer else "trained"


def turned_layer(layer: PyTree) -> PyTree:
  """One layer with a transposed feed-forward: [F,D], [F,D] and [D,F]."""
  names = ("gate", "up", "down")
  rest = {name: x for name, x in layer.items() if name not in names}
  rows = {f"{name}_rows": {"kernel": layer[name]["kernel"].T} for name in names}
  return rest | rows


def fused_layer(c: PolicySpec, layer: PyTree) -> PyTree:
  """One layer with one product instead of three, and one instead of two.

  A decode step multiplies a few hundred rows: its time is that of reading
  weights and of launching kernels. XLA joins products by itself only where a
  weight is small, below 32 MB.

  Returns:
    `qkv` [D,G,J+2,K] in their place, where each key/value head has its J
    queries, its key and its value, and `gate_up` [D,2,F]. On a mesh heads and F
    stay on their devices. Routed experts stay as they are.
  """
  rest = dict(layer)
  G, K = c.kv_heads, c.head_size
  q, k, v = (rest.pop(name) for name in "qkv")

  def heads(name: str) -> Array:
    grouped = q[name].reshape(*q[name].shape[:-2], G, -1, K)
    alone = (x[name][..., None, :] for x in (k, v))
    return jnp.concatenate([grouped, *alone], axis=-2)

  rest["qkv"] = {name: heads(name) for name in q}
  if not c.experts:
    gate, up = rest.pop("gate"), rest.pop("up")
    both = lambda name: jnp.stack([gate[name], up[name]], axis=-2)
    rest["gate_up"] = {name: both(name) for name in gate}
  return rest
