"""Tests of brorl_jax/learner/signal.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from update_cases import OBJECTIVE, POLICY, packed, params

from brorl_jax.learner import signal, update
from brorl_jax.learner.objective import Stats
from brorl_jax.rl.mean import Mean

HOW = dict(response_logp=POLICY.response_logp, objective=OBJECTIVE)


def of(monkeypatch, blocks, tokens):
  """Of sums of gradients that are given."""
  left = iter(zip(blocks, tokens, strict=True))

  def summed(params, batches, **how):
    assert [*batches] == [] and how == HOW
    sums, count = next(left)
    stats = Stats.zero(params)
    mean = Mean(jnp.zeros(()), jnp.asarray(float(count)))
    object.__setattr__(stats, "entropy", mean)
    return {"w": jnp.asarray(sums)}, stats

  monkeypatch.setattr(update, "summed", summed)
  return signal.of_blocks({"w": jnp.zeros(2)}, [()] * len(blocks), **HOW)


def test_two_blocks_by_hand(monkeypatch):
  """Sums (2, 0) and (1, 1) of 4 tokens; 2 S / C are (1, 0) and (.5, .5)."""
  gradient, found = of(monkeypatch, [[2.0, 0.0], [1.0, 1.0]], [1, 3])
  np.testing.assert_allclose(gradient["w"], [0.75, 0.25])
  assert found.norm == pytest.approx(np.sqrt(0.625))
  assert found.signal == pytest.approx(0.5)  # their product
  assert found.noise == pytest.approx((0.25 + 0.25) / 4)
  assert found.ratio == pytest.approx(4.0)
  assert found.error == 0.0  # one pair


def test_three_blocks_are_all_pairs(monkeypatch):
  sums = np.array([[1.0, 2.0], [0.0, 1.0], [-1.0, 1.0]])
  _, found = of(monkeypatch, sums, [2, 2, 2])
  g = 3 * sums / 6
  pairs = [g[0] @ g[1], g[0] @ g[2], g[1] @ g[2]]
  assert found.signal == pytest.approx(np.mean(pairs))
  off = [pairs[0] - np.mean(pairs), pairs[1] + pairs[2] - 2 * np.mean(pairs)]
  assert found.error == pytest.approx(np.hypot(*off) / 3)
  mean = g.mean(axis=0)
  assert found.noise == pytest.approx(mean @ mean - np.mean(pairs))


def test_no_gradient_has_no_ratio(monkeypatch):
  gradient, found = of(monkeypatch, [[0.0, 0.0]] * 2, [0, 0])
  assert (found.norm, found.ratio, found.ratio_error) == (0.0, None, None)
  assert signal.cosine(gradient, gradient) is None


def test_estimates_are_right_on_average(monkeypatch):
  """10 blocks of N(G, 9) in 50 dimensions, |G| = 2, so noise^2 is 45."""
  rng = np.random.default_rng(0)
  G = np.full(50, 2.0 / np.sqrt(50))
  found = []
  for _ in range(300):
    blocks = G + 3.0 * rng.normal(size=(10, 50))
    found.append(of(monkeypatch, blocks / 10, [1] + [0] * 9)[1])
  for name, want in (("signal", 4.0), ("noise", 45.0)):
    values = np.array([getattr(one, name) for one in found])
    error = values.std() / np.sqrt(len(values))
    assert abs(values.mean() - want) < 4 * error
  spread = np.std([one.signal for one in found])
  error = np.sqrt(np.mean([one.error**2 for one in found]))
  assert error == pytest.approx(spread, rel=0.15)


@pytest.mark.ci
def test_blocks_together_are_the_gradient_of_an_update():
  whole = packed()
  want, stats = update.gradient(update.summed(params(), whole, **HOW))
  got, found = signal.of_blocks(params(), [whole, []], **HOW)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want
  )
  assert found.norm == pytest.approx(float(stats.grad_norm), rel=1e-5)
  assert found.signal == 0.0  # nothing agrees with a block of nothing
  assert signal.cosine(got, want) == pytest.approx(1.0, abs=1e-6)
  less = jax.tree.map(lambda x: -2.0 * x, got)
  assert signal.cosine(got, less) == pytest.approx(-1.0, abs=1e-6)
