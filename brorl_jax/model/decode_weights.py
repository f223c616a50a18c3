"""The weights of a layer as decoding on an accelerator reads them."""

import jax.numpy as jnp
from jaxtyping import Array, PyTree

from brorl_jax.model.spec import PolicySpec


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
