"""Matrix products, in a form for which XLA's CPU kernels are fast.

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
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brorl_jax.model.target import Target

# Rows, at most, of a product in which the weight comes first.
_FEW = 128


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


def _dot_forward(x, w):
  return _dot(x, w), (x, w)


def _dot_backward(saved, slope):
  x, w = saved
  slope = slope.astype(x.dtype)
  return (
    _dot(slope, _turned(w)).astype(x.dtype),
    _dot(_turned(x), slope).astype(w.dtype),
  )


_dot.defvjp(_dot_forward, _dot_backward)
