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

from brorl_jax.rl import advantages, stop_weight, stopping, subset
from brorl_jax.rl.stopping import Rounds

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


def test_maxrl_nears_the_gradient_of_the_log():
  """With 256 rollouts 1 - (1 - p)^255 of it are there."""
  drawn = arms(n=256)
  got = scores(
    advantages.maxrl(reward_of(drawn), jnp.ones(drawn.shape, bool)), drawn
  )
  agrees(got, slope(jnp.log))


@pytest.mark.parametrize("name", ["random", "stratified", "variance"])
@pytest.mark.parametrize("m", [4, 8])
def test_training_on_some(name, m):
  drawn = arms()
  reward = reward_of(drawn)
  args = (ALL, jax.random.key(7)) if name == "random" else (reward, ALL)
  some, weight = subset.CHOOSE[name](*args, m=m)
  each = advantages.leave_one_out(reward, ALL) * weight
  assert int(some.sum(axis=1).max()) == m
  agrees(scores(each, drawn) * N / m, P)


def test_training_on_different_ones():
  drawn = arms()
  some, weight = subset.different(drawn, ALL, jax.random.key(9), m=3)
  each = advantages.leave_one_out(reward_of(drawn), ALL) * weight
  taken = np.asarray(some.sum(axis=1))
  agrees(scores(each, drawn, jnp.asarray(taken, jnp.float32)), P)


ROUNDS = Rounds((4, 8, 16), 2, 2)


def stopped():
  """Rollouts of prompts that stop, which are there, right ones and all."""
  drawn = arms(3)
  right = jnp.cumsum(reward_of(drawn), axis=1)
  ends = np.full(GROUPS, ROUNDS.after[-1])
  for n in reversed(ROUNDS.after[:-1]):
    k = np.asarray(right[:, n - 1])
    ends = np.where((k >= ROUNDS.right) & (n - k >= ROUNDS.wrong), n, ends)
  valid = jnp.arange(N)[None] < jnp.asarray(ends)[:, None]
  k = np.asarray(jnp.sum(reward_of(drawn), axis=1, where=valid))
  return drawn, valid, k.astype(int), ends


def loo(reward, valid, length):
  del length
  return advantages.leave_one_out(reward, valid)


def test_prompts_that_stop():
  """Exact, summed by rounds, and pooled with the bias that is told."""
  drawn, valid, right, ends = stopped()
  assert len(set(ends.tolist())) == 3
  reward = reward_of(drawn)
  told = stopping.expected(ROUNDS, RATE)
  assert ends.mean() == pytest.approx(told["n"], rel=0.02)
  each = scores(loo(reward, valid, None), drawn, jnp.asarray(ends, jnp.float32))
  agrees(each, P * told["hidden_weight"])
  assert abs(told["hidden_weight"] - 1.0) > 0.1
  correct = functools.cache(
    lambda k, n: stopping.correction(ROUNDS, right=k, drawn=n)
  )
  ratio = [
    correct(k, n) for k, n in zip(right.tolist(), ends.tolist(), strict=True)
  ]
  agrees(each * np.array(ratio)[:, None], P)
  summed = stop_weight.by_round(
    loo, reward, valid, jnp.ones_like(reward), rounds=ROUNDS
  )
  agrees(scores(summed, drawn, jnp.ones(GROUPS)), P * told["n"])


@pytest.mark.parametrize("name", ["random", "stratified", "variance"])
def test_training_on_some_of_those_that_stopped(name):
  """The mean of all of a prompt's, whatever made it stop."""
  drawn, valid, _, _ = stopped()
  reward = reward_of(drawn)
  args = (valid, jax.random.key(7)) if name == "random" else (reward, valid)
  some, weight = subset.CHOOSE[name](*args, m=4)
  each = loo(reward, valid, None) * weight
  told = stopping.expected(ROUNDS, RATE)
  taken = jnp.asarray(some.sum(axis=1), jnp.float32)
  agrees(scores(each, drawn, taken), P * told["hidden_weight"])


def test_numbers_that_were_chosen_before():
  """4 or 16 rollouts, whichever: the mean over a prompt's own is unbiased."""
  drawn = arms(5)
  ends = jnp.where(jnp.arange(GROUPS) % 2 == 0, 4, 16)
  valid = jnp.arange(N)[None] < ends[:, None]
  each = advantages.leave_one_out(reward_of(drawn), valid)
  agrees(scores(each, drawn, ends.astype(jnp.float32)), P)
