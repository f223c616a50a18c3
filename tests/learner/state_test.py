"""Tests of brorl_jax/learner/state.py."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from update_cases import table

from brorl_jax.learner import state as states
from brorl_jax.many import meshes
from brorl_jax.model import sharding


def test_schedule_rises_over_the_warmup_and_stays_or_falls():
  make = functools.partial(states.adamw, lr=1.0, warmup=4, b1=0.9, b2=0.95,
    eps=1e-8, weight_decay=0.0, max_grad_norm=1.0)  # fmt: skip
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
  tx, _ = states.adamw(lr=1e-2, warmup=2, total=None, b1=0.9, b2=0.95, eps=1e-8,
    weight_decay=0.0, max_grad_norm=1.0)  # fmt: skip
  opt = tx.init(table())
  assert states.updates_done(opt) == 0
  for _ in range(3):
    _, opt = tx.update(table(), opt, table())
  assert states.updates_done(opt) == 3


TX = optax.adam(0.1)


def made(**how):
  mesh = meshes.over([jax.devices()[:1]], meshes.ONE)
  how = {"keep_reference": True, "offload": "nothing"} | how
  params = {"ln_final": {"scale": jnp.arange(3.0)}}
  return states.initial_state(params, TX, mesh, **how)


def kinds(tree):
  return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


def test_a_reference_is_kept_only_for_a_kl_term():
  assert made(keep_reference=False).reference is None
  state = made()
  chex.assert_trees_all_equal(state.reference, state.params)
  assert int(state.step) == 0


@pytest.mark.parametrize("offload, on_host", [
  ("nothing", set()), ("reference", {"reference"}),
  ("moments", {"reference", "opt"}),
])  # fmt: skip
def test_where_each_part_of_a_state_lies(offload, on_host):
  state = made(offload=offload)
  parts = ("params", "reference", "opt")
  found = {x for x in parts if kinds(getattr(state, x)) == {sharding.HOST}}
  assert found == on_host


def test_resets_share_their_programs():
  """A run of 10,000 steps has 30 of them."""
  state, compiled = made(), []
  reset = lambda: states.reset_reference(state, TX, reset_optimizer=True)
  reset()
  note = lambda event, *_, **__: compiled.append(event)
  jax.monitoring.register_event_duration_secs_listener(note)
  try:
    reset()
    assert not [x for x in compiled if "backend_compile" in x]
    jax.jit(lambda x: x + 1)(1.0)
    assert [x for x in compiled if "backend_compile" in x]
  finally:
    jax.monitoring.unregister_event_duration_listener(note)


@pytest.mark.parametrize("reset_optimizer", [False, True])
def test_a_reset_copies_the_policy_and_stays_where_it_was(reset_optimizer):
  state = made(offload="moments")
  moved = jax.tree.map(lambda x: x + 1.0, state.params)
  ones = lambda x: jax.device_put(np.ones(x.shape, x.dtype), x.sharding)
  opt = jax.tree.map(ones, state.opt)
  state = dataclasses.replace(state, params=moved, opt=opt)
  after = states.reset_reference(state, TX, reset_optimizer=reset_optimizer)
  chex.assert_trees_all_equal(after.params, moved)
  chex.assert_trees_all_equal(after.reference, moved)
  assert kinds(after.reference) == kinds(after.opt) == {sharding.HOST}
  want = TX.init(moved) if reset_optimizer else opt
  chex.assert_trees_all_equal(after.opt, want)
  state.params["ln_final"][
    "scale"
  ].delete()  # the next update does: the copy is its own
  assert np.isfinite(after.reference["ln_final"]["scale"]).all()
