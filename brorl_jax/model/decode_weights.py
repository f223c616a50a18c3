"""The weights of a layer as decoding reads them.

trained  as they are stored
fused    on accelerators: fewer, larger weights
turned   on CPUs in float32: those of the feed-forward output by output, since
         a weight comes first in a product of few rows; see products.py
"""

import jax.numpy as jnp
from jaxtyping import Array, PyTree

from brorl_jax.model.spec import PolicySpec


def form(layer: PyTree) -> str:
  """In which form the weights of a layer are."""
  if "qkv" in layer:
    return "fused"
  return "turned" if "gate_rows" in layer else "trained"


def turned(layer: PyTree) -> PyTree:
  """One layer with a transposed feed-forward: [F,D], [F,D] and [D,F].

  Args:
    layer: `gate`, `up` and `down`, each a dict of a kernel without a bias.
  """
  names = ("gate", "up", "down")
  rest = {name: x for name, x in layer.items() if name not in names}
  rows = {f"{name}_rows": {"kernel": layer[name]["kernel"].T} for name in names}
  return rest | rows


def fused(c: PolicySpec, layer: PyTree) -> PyTree:
  """One layer with one product instead of three, and one instead of two.

  A decode step multiplies a few hundred rows: its time is that of reading
  weights and of launching kernels. XLA joins products by itself only where a
  weight is small, below 32 MB.

  Args:
    c: The architecture.
    layer: q, k and v [D,heads,K], gate and up [D,F]; each a dict of a kernel,
      and of a bias without the axis D if there is one.

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
