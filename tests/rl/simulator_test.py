"""Tests of brorl_jax/rl/simulator.py."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers

from brorl_jax.rl import simulator as sim

ADAMW = sim.AdamW(lr=1e-3, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.01)
# Figure 3 at its true size; what the paper leaves open is argued in the config.
FIGURE_3 = dict(
  steps=1000, vocab=128_000, correct=10_000, seeding=3.0, anchor=5.0,
  surrogate=sim.weighted_by_probability, optimizer=ADAMW, centred=True,
)  # fmt: skip
SMALL = FIGURE_3 | dict(steps=20, vocab=600, correct=50)


@functools.cache
def figure_3(n):
  run = sim.simulate(jax.random.key(0), n=n, **FIGURE_3)
  return jax.tree.map(np.asarray, run)


@pytest.mark.ci
@pytest.mark.parametrize("n, end", [
  tiers.at_night((4, 0.6015)), tiers.at_night((8, 0.6027)),
  tiers.at_night((16, 0.6074)), (512, 0.6341), tiers.at_night((51200, 0.6472)),
])  # fmt: skip
def test_end_points_of_figure_3(n, end):
  run = figure_3(n)
  assert run.correct_mass.shape == (1001,)
  assert run.correct_mass[0] == pytest.approx(0.6301, abs=1e-4)
  assert run.correct_mass[-1] == pytest.approx(end, abs=1e-3)


@pytest.mark.slow
def test_order_in_n_and_what_the_largest_n_does():
  runs = [figure_3(n) for n in (4, 8, 16, 512, 51200)]
  ends = [run.correct_mass[-1] for run in runs]
  assert ends == sorted(ends) and len(set(ends)) == 5
  improved = [run.improved_fraction[-1] for run in runs]
  assert (improved, improved[-1]) == (sorted(improved), 1.0)
  assert runs[-1].worst_drop[-1] > 0.0 and runs[-1].worst_drop.min() > -1e-6


@pytest.mark.slow
def test_sgd_shows_no_loss_at_small_n():
  sgd = FIGURE_3 | dict(optimizer=sim.Sgd(lr=300.0), steps=300)
  keys = jax.random.split(jax.random.key(0), 6)
  gain = {}
  for n in (4, 16, 512):
    many = jax.vmap(functools.partial(sim.simulate, n=n, **sgd))(keys)
    gain[n] = np.asarray(many.correct_mass[:, -1] - many.correct_mass[:, 0])
    assert (gain[n].mean() > 0.0).all()
  # An unbiased gradient: the same growth at every N, but for the noise.
  for n in (4, 16):
    error = gain[n].std(ddof=1) / np.sqrt(len(keys))
    assert abs(gain[n].mean() - gain[512].mean()) < 4 * error
    assert error > gain[512].std(ddof=1) / np.sqrt(len(keys))


@pytest.mark.ci
def test_draws_follow_the_distribution():
  rng = np.random.default_rng(0)
  p = rng.dirichlet(np.full(1500, 0.3)).astype(np.float32)  # three blocks
  p[[0, 511, 512, 1499]] = 0.0
  p /= p.sum()
  n = 500_000
  counts = np.asarray(sim.draw_counts(jax.random.key(1), jnp.asarray(p), n))
  assert counts.sum() == n and (counts[p == 0.0] == 0).all()
  often = p * n > 20
  chi2 = (((counts - n * p) ** 2)[often] / (n * p[often])).sum()
  degrees = often.sum() - 1
  assert abs(chi2 - degrees) < 4 * np.sqrt(2 * degrees)


# The second is how many tokens at the start have none: one, or a block.
@pytest.mark.parametrize(
  "u_block, empty", tiers.some([(0.0, 512), (1.0 - 2.0**-23, 1)], 1, 1)
)
def test_no_draw_is_of_probability_0(monkeypatch, u_block, empty):
  rng = np.random.default_rng(8)
  p = rng.dirichlet(np.full(600, 0.05)).astype(np.float32)
  p[rng.random(600) < 0.5] = 0.0
  p[:empty] = 0.0
  n = 2**23
  every = jnp.arange(n) / n  # all that jax.random.uniform returns in float32
  draw = lambda key, shape: jnp.stack([jnp.full(n, u_block), every])
  monkeypatch.setattr(jax.random, "uniform", draw)
  counts = np.asarray(sim.draw_counts(jax.random.key(0), jnp.asarray(p), n))
  assert counts.sum() == n and (counts[p == 0.0] == 0).all()


@pytest.mark.ci
def test_rare_tokens_of_a_large_vocabulary_are_drawn_as_often_as_they_should():
  start, _ = sim.initial_logits(
    vocab=128_000, correct=10_000, seeding=3.0, anchor=5.0
  )
  p = jax.nn.softmax(start)
  n = 1_000_000
  counts = np.asarray(sim.draw_counts(jax.random.key(2), p, n))
  want = n * float(p[-1])  # 3.1 draws of each wrong token
  wrong = counts[10_000:]
  assert abs(wrong.mean() / want - 1) < 4 / np.sqrt(wrong.size * want)
  assert abs(wrong.var() / want - 1) < 0.05  # Poisson


@pytest.mark.parametrize("surrogate, loss", tiers.some([
  (
    sim.weighted_by_probability,
    lambda z, w: jnp.sum(w * jax.nn.softmax(z)),
  ),
  (sim.log_probability, lambda z, w: jnp.sum(w * jax.nn.log_softmax(z))),
  (
    sim.ratio,
    lambda z, w: jnp.sum(
      w * jax.nn.softmax(z) / jax.lax.stop_gradient(jax.nn.softmax(z))
    ),
  ),
], 1))  # fmt: skip
def test_surrogates_are_gradients_of_what_they_say(surrogate, loss):
  rng = np.random.default_rng(3)
  z = jnp.asarray(rng.normal(size=40), jnp.float32)
  w = jnp.asarray(rng.integers(-2, 3, 40), jnp.float32)
  want = jax.grad(lambda z: -loss(z, w) / 7)(z)
  got = surrogate(jax.nn.softmax(z), w, 7)
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("change", tiers.some([
  {}, dict(b1=0.0), dict(b2=0.0), dict(lr=0.5, weight_decay=0.5)
], 1))  # fmt: skip
def test_adamw_is_optax_adamw(change):
  optax = pytest.importorskip("optax")
  adamw = dataclasses.replace(ADAMW, **change)
  rng = np.random.default_rng(4)
  logits = jnp.asarray(rng.normal(size=30), jnp.float32)
  tx = optax.adamw(
    adamw.lr, adamw.b1, adamw.b2, adamw.eps, weight_decay=adamw.weight_decay
  )
  want, tx_state = logits, tx.init(logits)
  state = adamw.init(logits)
  for count in range(1, 30):
    grad = jnp.asarray(rng.normal(size=30) * 1e-8, jnp.float32)
    updates, tx_state = tx.update(grad, tx_state, want)
    want = optax.apply_updates(want, updates)
    logits, state = adamw.step(logits, grad, state, jnp.float32(count))
  np.testing.assert_allclose(logits, want, rtol=1e-5, atol=1e-6)


def test_seeds_differ_repeat_and_vmap():
  run = functools.partial(sim.simulate, n=8, **SMALL)
  keys = jax.random.split(jax.random.key(5), 3)
  many = jax.vmap(run)(keys)
  assert many.correct_mass.shape == (3, 21)
  one = run(keys[1])
  np.testing.assert_allclose(one.correct_mass, many.correct_mass[1], rtol=1e-6)
  assert len(np.unique(np.asarray(many.correct_mass[:, -1]))) == 3


@pytest.mark.parametrize("change, message", [
  (dict(n=0), "n = 0"), (dict(steps=0), "steps = 0"),
  (dict(correct=0), "correct = 0"), (dict(correct=600), "correct = 600"),
])  # fmt: skip
def test_bad_input_is_refused(change, message):
  with pytest.raises(ValueError, match=message):
    sim.simulate(jax.random.key(0), **(SMALL | dict(n=4) | change))


def test_runs_in_float64():
  with jax.enable_x64(True):
    for optimizer in (ADAMW, sim.Sgd(lr=300.0)):
      run = sim.simulate(
        jax.random.key(0), n=8, **(SMALL | dict(optimizer=optimizer))
      )
      assert run.correct_mass.dtype == jnp.float64


@pytest.mark.parametrize("name, value", [
  ("lr", 0.0), ("b1", 1.0), ("b1", -0.1), ("b2", 1.0), ("b2", -0.1),
  ("eps", 0.0), ("weight_decay", -0.1), ("weight_decay", float("inf")),
])  # fmt: skip
def test_settings_of_adamw_out_of_range_are_refused(name, value):
  with pytest.raises(ValueError, match=f"{name} = {value} is out of range"):
    dataclasses.replace(ADAMW, **{name: value})


def test_other_settings_out_of_range_are_refused():
  with pytest.raises(ValueError, match=r"lr = -1\.0"):
    sim.Sgd(lr=-1.0)
  with pytest.raises(ValueError, match="seeding = nan"):
    sim.initial_logits(vocab=9, correct=1, seeding=float("nan"), anchor=None)


def test_what_is_observed_by_hand():
  # One correct token, sampled or not: it improves or it does not.
  how = SMALL | dict(n=600, steps=1, correct=1, optimizer=sim.Sgd(lr=10.0))
  run = sim.simulate(jax.random.key(0), **how)
  assert run.improved_fraction[0] == 0.0 and run.worst_drop[0] == 0.0
  gain = run.correct_mass[1] - run.correct_mass[0]
  np.testing.assert_allclose(run.worst_drop[1], gain, rtol=1e-4)
  assert run.improved_fraction[1] == (1.0 if gain > 0 else 0.0)
