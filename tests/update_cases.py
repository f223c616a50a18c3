"""Rollouts and a small policy, for tests of the loss and of the update."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import scored

from brorl_jax.learner import packing, update
from brorl_jax.learner.objective import Objective
from brorl_jax.learner.packing import Layout, Source
from brorl_jax.model.policy import Policy
from brorl_jax.model.spec import Rope
from brorl_jax.types import Prompts

P, N, S, T, V = 4, 12, 5, 4, 16


POLICY = Policy(
  vocab=V, width=16, layers=2, heads=4, kv_heads=2, head_size=4, mlp=24,
  rope=Rope(100.0), norm_eps=1e-6, tied=True, qkv_bias=True,
)  # fmt: skip


OBJECTIVE = Objective(
  clip_low=0.2, clip_high=0.28, kl_weight=0.1, kl_clamp=10.0, temperature=1.0
)


def params(seed=0):
  # Larger than at initialisation, so that log-probabilities differ.
  init = POLICY.init(jax.random.key(seed))
  return jax.tree.map(lambda x: x * 8.0 if x.std() > 0.0 else x, init)


def rollouts(seed=0, kinds=5):
  """N rollouts of `kinds` different responses per prompt, on the host."""
  rng = np.random.default_rng(seed)
  which = rng.integers(0, kinds, (P, N))
  tokens = rng.integers(1, V, (P, kinds, T))
  length = rng.integers(1, T + 1, (P, kinds))
  take = lambda x: np.take_along_axis(
    x, which.reshape(P, N, *[1] * (x.ndim - 2)), axis=1
  )
  mask = np.arange(T) < take(length)[..., None]
  logp = take(rng.normal(-2.0, 0.3, (P, kinds, T)).astype(np.float32))
  advantage = rng.normal(size=(P, kinds)).astype(np.float32)
  out = scored.rollouts(take(tokens), mask, logp)
  return out, advantage[np.arange(P)[:, None], which]


def prompts(seed=0):
  rng = np.random.default_rng(seed)
  mask = np.arange(S) >= S - rng.integers(1, S + 1, P)[:, None]
  tokens = np.where(mask, rng.integers(1, V, (P, S)), 0).astype(np.int32)
  return Prompts(tokens, mask, np.arange(P, dtype=np.int32))


class Blocks(Layout):
  """Never trees."""

  trees = ()


class SmallTrees(Layout):
  """Rows of 32 tokens, if that is fewer positions than blocks take."""

  @property
  def trees(self):
    return [(self.devices, 32)]


def plan_of(
  rows=4, blocks=3, roll=None, unit="token", mean="token", layout=Blocks
):
  out, advantage = roll or rollouts()
  scale = packing.loss_scale(
    out.mask.sum(axis=2), unit=unit, mean=mean, constant=7
  )
  source = Source(prompts(), out, advantage, scale)
  return packing.pack(source, layout(rows, blocks, T, S))


def packed(*args, **how):
  return plan_of(*args, **how).batches()


def placed(mesh, **how):
  return [update.placed(later, mesh) for later in plan_of(**how).later]


def gradient(batches, at=None, policy=POLICY, objective=OBJECTIVE):
  """The gradient of a minibatch in these batches, and its statistics."""
  at = at or params()
  sums = jax.jit(update.zero_gradient)(at)
  how = dict(response_logp=policy.response_logp, objective=objective)
  for batch in batches:
    sums = update._add(sums, at, batch, **how)
  return update.gradient(sums)


def assert_close(got, want, rtol=1e-5):
  """Relative to the largest entry of the whole tree."""
  scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(want))
  chex.assert_trees_all_close(got, want, rtol=0, atol=rtol * scale)


def table(seed=0):
  return {"w": jax.random.normal(jax.random.key(seed), (V, T, V))}
