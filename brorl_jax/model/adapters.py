"""LoRA: matrices of low rank beside frozen ones (Hu et al., arXiv:2106.09685).

An adapted module computes x W + scale (x a) b. In a layer's weights a is
`lora_a` [in..., r] and b is `lora_b` [r, out...]; parameters without them are
those of the base, of which a policy with `lora_rank` is no other function.
"""

import dataclasses
import math
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Key, PyTree

from brorl_jax.config.run import LORA_LAYERS
from brorl_jax.model import sharding
from brorl_jax.model.spec import PolicySpec

_LEAVES = "lora_a", "lora_b"
# Of a run's seed; steps, which are other numbers of it, count from 0.
_INIT = 2**32 - 1
Spec = TypeVar("Spec", bound=PolicySpec)


def adapted(c: Spec, rank: int, alpha: float, layers: tuple[str, ...]) -> Spec:
  """The policy with an adapter, or at rank 0 without; ValueError if unfit."""
  if not rank:
    return c
  if c.experts and (routed := [x for x in layers if x in LORA_LAYERS[4:]]):
    raise ValueError(
      f"config.policy.lora_layers = {layers!r} must be without "
      f"{', '.join(routed)}: the feed-forward of this checkpoint has experts"
    )
  q, kv = c.heads * c.head_size, c.kv_heads * c.head_size
  side = dict.fromkeys("qo", q) | dict.fromkeys("kv", kv)
  most, name = min((min(c.width, side.get(x, c.mlp)), x) for x in layers)
  if rank > most:
    raise ValueError(
      f"config.policy.lora_rank = {rank} must be at most {most}, the smaller "
      f"side of {name!r}; lower it, or take {name!r} out of policy.lora_layers"
    )
  return dataclasses.replace(
    c, lora_rank=rank, lora_scale=alpha / rank, lora_layers=layers
  )


def init(c: PolicySpec, blocks: PyTree, key: Key[Array, ""]) -> PyTree:
  """The adapter of stacked layers with these kernels: a is uniform within
  1 / sqrt(inputs), as PEFT has it, and b is 0, which changes nothing.
  """
  out = {}
  for name in c.lora_layers:
    L, *shape = blocks[name]["kernel"].shape
    middle = inputs(name)
    bound = math.prod(shape[:middle]) ** -0.5
    key_a = jax.random.fold_in(key, LORA_LAYERS.index(name))
    size = (L, *shape[:middle], c.lora_rank)
    a = jax.random.uniform(key_a, size, minval=-bound, maxval=bound)
    b = jnp.zeros((L, c.lora_rank, *shape[middle:]))
    out[name] = dict(zip(_LEAVES, (a, b), strict=True))
  return {"blocks": out}


def inputs(name: str) -> int:
  """How many axes of a module's kernel it sums over; the others are its own."""
  return 2 if name == "o" else 1


def attached(c: PolicySpec, params: PyTree, mesh: Mesh, seed: int) -> PyTree:
  """Parameters with the adapter that a run of this seed begins with."""
  if not c.lora_rank:
    return params

  def make() -> PyTree:
    key = jax.random.fold_in(jax.random.key(seed), _INIT)
    return init(c, params["blocks"], key)

  places = sharding.param_shardings(jax.eval_shape(make), mesh)
  return join(jax.jit(make, out_shardings=places)(), params)


def split(params: PyTree) -> tuple[PyTree, PyTree]:
  """What is trained of parameters, and what is not: an adapter and its base, or
  all of them and {}. `join` puts them together again.
  """
  blocks = params.get("blocks", {}) if isinstance(params, dict) else {}
  if not any(_LEAVES[0] in module for module in blocks.values()):
    return params, {}
  part = lambda m, ours: {k: x for k, x in m.items() if (k in _LEAVES) == ours}
  trained = {m: part(x, True) for m, x in blocks.items() if _LEAVES[0] in x}
  frozen = {m: part(x, False) for m, x in blocks.items()}
  return {"blocks": trained}, {**params, "blocks": frozen}


def join(trained: PyTree, frozen: PyTree) -> PyTree:
  """The parameters that `split` took apart."""
  if not frozen:
    return trained
  more = trained["blocks"]
  blocks = {m: {**x, **more.get(m, {})} for m, x in frozen["blocks"].items()}
  return {**frozen, "blocks": blocks}


def alone(c: Spec) -> Spec:
  """The policy without an adapter, for `merged` parameters."""
  return dataclasses.replace(c, lora_rank=0, lora_scale=0.0, lora_layers=())


def merged(c: PolicySpec, params: PyTree) -> PyTree:
  """Parameters of the same function without an adapter: W + scale a b."""
  trained, frozen = split(params)
  if not frozen:
    return params
  blocks = dict(frozen["blocks"])
  for name, module in trained["blocks"].items():
    a, b = (module[leaf] for leaf in _LEAVES)
    kernel = blocks[name]["kernel"]
    a, b = a.reshape(len(a), -1, a.shape[-1]), b.reshape(*b.shape[:2], -1)
    # Accelerators would multiply in less than float32 by themselves.
    product = jnp.matmul(a, b, precision="highest")
    whole = kernel + c.lora_scale * product.reshape(kernel.shape)
    blocks[name] = {**blocks[name], "kernel": whole}
  return {**frozen, "blocks": blocks}
