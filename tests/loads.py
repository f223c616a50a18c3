"""Small policies, and what their rollouts need."""

import dataclasses

from brorl_jax.config import Config
from brorl_jax.many.meshes import ONE, Axes
from brorl_jax.model.policy import Policy
from brorl_jax.model.spec import Rope, Target
from brorl_jax.plan import memory, resolve
from brorl_jax.plan.resolve import Machine, Plans

TOY = Policy(vocab=10, width=4, layers=3, heads=2, kv_heads=1,
  head_size=2, mlp=6, rope=Rope(100.0), norm_eps=1e-6, tied=True)  # fmt: skip
SMALL = Policy(vocab=2048, width=128, layers=2, heads=8, kv_heads=2,
  head_size=16, mlp=512, rope=Rope(1e4), norm_eps=1e-6, tied=True)  # fmt: skip
HALF = dataclasses.replace(SMALL, dtype="bfloat16")
GIB = 2**30


def on_gpu(policy=SMALL, devices=1) -> Policy:
  """The same policy, compiled for other devices."""
  return dataclasses.replace(policy, target=Target("gpu", devices, 80 * GIB))


def load(policy=TOY, **changes) -> memory.Load:
  sizes = dict(n=6, prompts=5, prompt_tokens=7, max_new_tokens=70, axes=ONE)
  return memory.Load(policy, **{"resident_bytes": 1000, **sizes, **changes})


def settled(c: Config,
  policy: Policy = SMALL, axes: Axes = ONE, *, processes: int = 1,
  keep_reference: bool = True) -> tuple[Config, Plans]:  # fmt: skip
  """The config with the sizes of a machine, and its memory plans."""
  here = policy.target
  at = dataclasses.replace(
    here, memory_bytes=c.devices.memory_bytes or here.memory_bytes
  )
  tx, _ = resolve.optimizer(c)
  return resolve.sized(c, dataclasses.replace(policy, target=at), tx,
    Machine(axes, at, processes), keep_reference=keep_reference)  # fmt: skip


def planned(c: Config, policy: Policy = SMALL, axes: Axes = ONE, **kw) -> Plans:
  return settled(c, policy, axes, **kw)[1]
