"""AdamW, its schedule, and the count of its updates."""

import functools

import numpy as np
import pytest
from update_cases import table

from brorl_jax.learner import optimizer


def test_schedule_rises_over_the_warmup_and_stays_or_falls():
  make = functools.partial(
    optimizer.adamw, lr=1.0, warmup=4, b1=0.9, b2=0.95, eps=1e-8,
    weight_decay=0.0, max_grad_norm=1.0,
  )  # fmt: skip
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
  tx, _ = optimizer.adamw(
    lr=1e-2, warmup=2, total=None, b1=0.9, b2=0.95, eps=1e-8,
    weight_decay=0.0, max_grad_norm=1.0,
  )  # fmt: skip
  opt = tx.init(table())
  assert optimizer.updates_done(opt) == 0
  for _ in range(3):
    _, opt = tx.update(table(), opt, table())
  assert optimizer.updates_done(opt) == 3
