"""Tests of brorl_jax/plan/updates.py: what a batch has."""

import jaxtyping
import pytest
import runs_ahead as made

from brorl_jax.plan import updates


@pytest.fixture(autouse=True)
def unchecked():
  """Types are checked of arrays alone, which programs are compiled without."""
  jaxtyping.config.update("jaxtyping_disable", True)
  yield
  jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize(
  "changes, old, ref",
  [
    (dict(minibatches=1, kl_weight=0.0), False, False),
    (dict(minibatches=2, kl_weight=0.0), True, False),
    (dict(minibatches=1, kl_weight=0.1), False, True),
  ],
)
def test_a_batch_has_the_log_probabilities_that_are_needed(changes, old, ref):
  run = made.run(**changes)
  batch = updates.batch(run, scored=True)
  assert (batch.logp_old is not None, batch.logp_ref is not None) == (old, ref)
  plain = updates.batch(run, scored=False)
  assert plain.logp_old is None and plain.logp_ref is None
  # 8 microbatches of 8 blocks of 4 rows, cut along the blocks.
  assert batch.response.shape == (8, 8, 4, 6)
  assert batch.prompt.sharding.shard_shape(batch.prompt.shape) == (8, 1, 10)


@pytest.mark.parametrize(
  "changes, first",
  [
    (dict(minibatches=1, kl_weight=0.0), "gradient"),
    (dict(minibatches=1, kl_weight=0.1), "score"),
    (dict(minibatches=2, kl_weight=0.0), "score"),
  ],
)
def test_scores_are_known_before_where_they_are_needed(changes, first):
  one = next(updates.updating(made.run(**changes)))
  assert one.name == first


def test_what_lies_beside_each_program():
  """While an update is applied the moments lie on the devices."""
  run = made.run()
  of = {one.name: one.held_bytes for one in updates.updating(run)}
  assert of["gradient"] < 10_000_000 + 2_000_000
  assert 20_000_000 < of["apply"] < 20_000_000 + 2_000_000
