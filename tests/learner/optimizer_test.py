"""AdamW, its schedule, and the count of its updates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from update_cases import table

from brorl_jax.learner import optimizer


def test_a_factored_second_moment_by_hand():
  """v = row mean x column mean / mean; both with Adam's bias correction."""
  b1, b2, eps, decay = 0.5, 0.9, 0.1, 0.3
  tx, _ = optimizer.adamw(
    lr=1.0, warmup=0, total=None, b1=b1, b2=b2, eps=eps, weight_decay=decay,
    max_grad_norm=1e9, second_moment="factored",
  )  # fmt: skip
  rng = np.random.default_rng(0)
  at = {"w": jnp.ones((4, 96, 130)), "b": jnp.full((40, 200), 2.0)}
  state = tx.init(at)
  size = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
  # The first moment, the second of b, and means of four matrices.
  assert 0 <= size(state) - 2 * size(at) + at["w"].size - 4 * 226 < 20
  g = [jax.tree.map(lambda x: rng.normal(size=x.shape), at) for _ in range(2)]
  mean, steps = jax.tree.map(np.zeros_like, at), {}
  for t, one in enumerate(g, 1):
    step, state = tx.update(jax.tree.map(jnp.asarray, one), state, at)
    weight = (1 - b2) * b2 ** np.arange(t)[::-1] / (1 - b2**t)
    for name in at:
      v = sum(w * (x[name] ** 2 + eps**2) for w, x in zip(weight, g[:t]))  # noqa: B905
      if name == "w":
        rows, columns = v.mean(axis=2), v.mean(axis=1)
        v = (
          rows[:, :, None]
          * columns[:, None]
          / v.mean(axis=(1, 2))[:, None, None]
        )
      mean[name] = b1 * mean[name] + (1 - b1) * one[name] / np.sqrt(v)
      steps[name] = -mean[name] / (1 - b1**t) - decay * np.asarray(at[name])
  for name in at:
    np.testing.assert_allclose(step[name], steps[name], rtol=1e-3, atol=1e-4)


def test_schedule_rises_over_the_warmup_and_stays_or_falls():
  make = functools.partial(
    optimizer.adamw,
    lr=1.0,
    warmup=4,
    b1=0.9,
    b2=0.95,
    eps=1e-8,
    weight_decay=0.0,
    max_grad_norm=1.0,
  )
  _, constant = make(total=None)
  np.testing.assert_allclose(
    [constant(i) for i in range(6)], [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
  )
  _, cosine = make(total=14)
  np.testing.assert_allclose(
    [cosine(i) for i in (3, 4, 9, 14)], [1.0, 1.0, 0.5, 0.0], atol=1e-6
  )


@pytest.mark.ci
def test_updates_are_counted_since_the_moments_were_made():
  for kind in ("full", "factored"):
    tx, _ = optimizer.adamw(
      lr=1e-2, warmup=2, total=None, b1=0.9, b2=0.95, eps=1e-8,
      weight_decay=0.0, max_grad_norm=1.0, second_moment=kind,
    )  # fmt: skip
    opt = tx.init(table())
    assert optimizer.updates_done(opt) == 0
    for _ in range(3):
      _, opt = tx.update(table(), opt, table())
    assert optimizer.updates_done(opt) == 3
