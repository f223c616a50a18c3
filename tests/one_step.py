"""A small config, its run, and groups of rollouts with given rewards."""

import configured
import jax
import numpy as np
import scored

from brorl_jax.config import Config
from brorl_jax.many import meshes
from brorl_jax.model.spec import here
from brorl_jax.plan import resolve
from brorl_jax.plan.resolve import Machine, Run
from brorl_jax.types import Groups, Prompts, Rollouts


def config(**changes):
  small = dict(n=16, samples=64, in_flight=64, rows=8, blocks=2)
  small |= dict(eval_prompts=2, eval_n=4)
  return configured.config(**small | changes)


def machine(count: int = 1) -> Machine:
  axes = meshes.Axes(fsdp=count)
  return Machine(axes, here(), 1, meshes.over([jax.devices()[:count]], axes))


def resolved(c: Config | None = None, **changes) -> Run:
  return resolve.resolve(c or config(**changes), machine())


def groups(reward, *, length=None, truncated=None, logp=None, answer=None):
  """Groups with these rewards; T = 4, and tokens that all differ."""
  reward = np.array(reward, np.float32)
  P, shape = len(reward), reward.shape
  length = np.full(shape, 2) if length is None else np.array(length)
  mask = np.arange(4) < length[..., None]
  tokens = 1 + np.arange(mask.size, dtype=np.int32).reshape(mask.shape)
  of = np.zeros(mask.shape, np.float32)
  of[..., 0] = 0.0 if logp is None else logp
  cut = np.zeros(shape, bool) if truncated is None else np.array(truncated)
  ones = np.ones((P, 3), np.int32)
  prompts = Prompts(ones, ones > 0, np.arange(P, dtype=np.int32))
  rollouts = Rollouts(
    np.where(mask, tokens, 0), of, mask, cut, np.ones(P, np.float32)
  )
  if answer is None:
    answer = np.zeros(shape)
  return Groups(prompts, rollouts, scored.scores(reward, answer))


def short(**changes):
  return config(n=4, in_flight=24, max_new_tokens=4, **changes)
