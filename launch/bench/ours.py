"""Model, versions and machine speed for the benchmarks of this project."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from brorl_jax.main import keep_freed_memory

keep_freed_memory()

import flax
import jax
import jax.numpy as jnp
import jaxlib.version

from brorl_jax.model.policy import Policy
from brorl_jax.model.spec import Rope, here
from launch.bench.workloads import Model, Workload, end_logits


def policy(m: Model, dtype: str, **options) -> Policy:
  """A Qwen2 of that shape."""
  return Policy(
    vocab=m.vocab,
    width=m.width,
    layers=m.layers,
    heads=m.heads,
    kv_heads=m.kv_heads,
    head_size=m.head_size,
    mlp=m.mlp,
    rope=Rope(m.rope_theta),
    norm_eps=m.norm_eps,
    tied=m.tied,
    qkv_bias=True,
    dtype=dtype,
    **options,
  )


@dataclasses.dataclass(frozen=True)
class Ending:
  """A decoder whose responses end with token 0, and how often.

  Attributes:
    policy: The decoder.
    logits: Of token 0, see `workloads.end_logits`.
  """

  policy: Policy
  logits: tuple[float, ...]

  def __getattr__(self, name: str):
    return getattr(self.policy, name)

  def prefill(self, params, tokens, mask):
    logits, prefix = self.policy.prefill(params, tokens, mask)
    return self._ending(logits, jnp.ones(logits.shape[:-1], jnp.int32)), prefix

  def decode_step(self, weights, shared, pages, token, length, *where):
    logits, page = self.policy.decode_step(
      weights, shared, pages, token, length, *where
    )
    return self._ending(logits, length + 1), page

  def pool_step(self, weights, shared, pools, token, length, *where):
    logits, pools = self.policy.pool_step(
      weights, shared, pools, token, length, *where
    )
    return self._ending(logits, length + 1), pools

  def _ending(self, logits, number):
    """With the logit of the end as token `number`, from 1."""
    own = jnp.asarray(self.logits, logits.dtype)[number - 1]
    return logits.at[..., 0].set(own.reshape(logits.shape[:-1]))


def ending(policy: Policy, w: Workload) -> Any:
  """A decoder whose responses have the workload's lengths, if it has any."""
  if not w.lengths:
    return policy
  return Ending(policy, end_logits(w.lengths, w.new, w.model.vocab))


def accelerator() -> bool:
  """Whether arrays lie on one."""
  return not here().on_cpu


def versions() -> dict[str, str]:
  return {
    "jax": jax.__version__,
    "jaxlib": jaxlib.version.__version__,
    "flax": flax.__version__,
    "device": jax.devices()[0].device_kind,
  }


def seconds(f: Callable[..., Any], *args: Any, calls: int = 1) -> float:
  """Of one of this many calls behind each other; the least of three rounds."""
  jax.block_until_ready(f(*args))
  spent = []
  for _ in range(3):
    begin = time.perf_counter()
    for _ in range(calls - 1):
      f(*args)
    jax.block_until_ready(f(*args))
    spent.append((time.perf_counter() - begin) / calls)
  return min(spent)


class Programs:
  """Counts those that are compiled while this is there.

  Attributes:
    count: How many so far.
  """

  def __init__(self):
    self.count = 0

    def tell(event: str, *_, **__) -> None:
      self.count += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(tell)


def machine(dtype: str) -> tuple[float, float]:
  """Operations per second of a large product, bytes per second of a copy."""
  y = jnp.ones((64 if here().on_cpu else 1024, 1024, 1024), jnp.float32)
  # In place, so that no new memory is asked for.
  again = lambda y: jax.lax.fori_loop(0, 8, lambda _, y: y + 1.0, y)
  copy = seconds(jax.jit(again), y) / 8
  return matmul(dtype), 2.0 * y.nbytes / copy


def matmul(dtype: str) -> float:
  """Operations per second of a large product."""
  multiply = jax.jit(lambda x: jnp.dot(x, x, preferred_element_type="float32"))
  # An accelerator needs more work than launching costs it: an H100 reached .6
  # of its rate at 4,096.
  sides = (1024, 4096) if here().on_cpu else (8192,)
  rates = []
  for side in sides:
    # Not ones: a GPU multiplies numbers of few bits faster.
    x = jax.random.normal(jax.random.key(0), (side, side), dtype)
    rates.append(2.0 * side**3 / seconds(multiply, x))
  return max(rates)


def speed(dtype: str) -> dict[str, str]:
  """What tells machines with one name of a processor apart, beside versions.

  Before anything of a system is made: what this frees `Task.idle` gives back,
  so that memory above idle has none of it.
  """
  return {"matmul_gflop_per_s": f"{matmul(dtype) / 1e9:.0f}"}
