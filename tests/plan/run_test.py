"""Tests of brorl_jax/plan/run.py: sizes by hand."""

import jax
import jax.numpy as jnp
import runs_ahead as made
from jax.sharding import PartitionSpec

from brorl_jax.plan.run import size


def test_bytes_on_a_device():
  run = made.run()
  split, whole = run.at("fsdp"), run.at()
  # 24 rows on 8 devices; a key is two words.
  key = jax.eval_shape(lambda: jax.random.key(0))
  tree = [split((24, 5), jnp.float32), whole((7,), jnp.int8)]
  assert size(tree) == 3 * 5 * 4 + 7
  assert size([*tree, whole(key.shape, key.dtype)]) == 75
  assert split((24, 5), jnp.float32).sharding.spec == PartitionSpec("fsdp")


def test_a_run_by_hand():
  run = made.run()
  assert run.rows == 8
  # 16 places on 8 devices: a quarter of 2 is at least one of each.
  assert run.visited == 8 and made.run(in_flight=512).visited == 32
  layer = 16 * 40 + 24 * 16 + 3 * 16 * 20 + 40 + 2 * 16
  assert run.parameters == 2 * 37 * 16 + 2 * layer + 16
