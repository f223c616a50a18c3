"""Every estimator against the gradient it is for, on a softmax bandit.

Monte Carlo: 40,000 groups of each, |z| < 4 in every coordinate. What the
enumerations of the other tests show of the pass rate alone, with responses that
differ: six arms, two of them right.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brorl_jax.rl import advantages

pytestmark = pytest.mark.ci
LOGITS = jnp.array([1.0, -1.5, 0.3, 0.8, -0.4, -2.0])
RIGHT = jnp.array([False, True, False, False, False, True])
GROUPS, N = 40_000, 16
PROBS = jax.nn.softmax(LOGITS)
RATE = float(PROBS[RIGHT].sum())  # .06


def slope(of):
  """Of a function of the pass rate, by the logits."""
  rate = lambda z: jnp.sum(jax.nn.softmax(z), where=RIGHT)
  return np.asarray(jax.grad(lambda z: of(rate(z)))(LOGITS))


P = slope(lambda p: p)


def arms(seed=0, n=N):
  return jax.random.categorical(jax.random.key(seed), LOGITS, shape=(GROUPS, n))


def reward_of(drawn):
  return RIGHT[drawn].astype(jnp.float32)


def scores(advantage, drawn, count=None):
  """sum_n A[n] grad log pi(n) / count of each group: [G, V]."""
  total = jnp.sum(advantage, axis=1, keepdims=True) * PROBS[None]
  of = jax.nn.one_hot(drawn, len(LOGITS), dtype=jnp.float32)
  per = jnp.einsum("gn,gnv->gv", advantage, of) - total
  return np.asarray(per / (drawn.shape[1] if count is None else count[:, None]))


def agrees(each, want):
  mean, error = each.mean(axis=0), each.std(axis=0) / len(each) ** 0.5
  z = (mean - want) / error
  assert np.abs(z).max() < 4.0, z
  # And would see a tenth of it.
  assert (np.abs(want) / error).max() > 20.0


ALL = jnp.ones((GROUPS, N), bool)


@pytest.mark.parametrize(
  "name, function, want",
  [
    ("leave one out", advantages.leave_one_out, P),
    ("centered", advantages.center_by_group, P * (N - 1) / N),
    (
      "maxrl",
      advantages.maxrl,
      P * sum((1 - RATE) ** (k - 1) for k in range(1, N)),
    ),
    *[
      (
        f"pass@{k}",
        functools.partial(advantages.pass_at_k, k=k),
        slope(lambda p, k=k: 1 - (1 - p) ** k),
      )
      for k in (1, 2, 4, 8)
    ],
  ],
  ids=lambda x: x if isinstance(x, str) else "",
)
def test_objectives(name, function, want):
  drawn = arms()
  agrees(scores(function(reward_of(drawn), ALL), drawn), want)


def test_numbers_that_were_chosen_before():
  """4 or 16 rollouts, whichever: the mean over a prompt's own is unbiased."""
  drawn = arms(5)
  ends = jnp.where(jnp.arange(GROUPS) % 2 == 0, 4, 16)
  valid = jnp.arange(N)[None] < ends[:, None]
  each = advantages.leave_one_out(reward_of(drawn), valid)
  agrees(scores(each, drawn, ends.astype(jnp.float32)), P)
