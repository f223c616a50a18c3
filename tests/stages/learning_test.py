"""Tests of brorl_jax/stages/learning.py: the updates of a step."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from one_step import config, resolved

from brorl_jax.config.run import Guard
from brorl_jax.learner import packing, theory, update
from brorl_jax.learner import state as states
from brorl_jax.learner.state import init_state, updates_done
from brorl_jax.model import sharding
from brorl_jax.rollout.dynamic_sampling import SampledGroups
from brorl_jax.runs import checkpoints, metrics, run_state
from brorl_jax.stages import learning
from brorl_jax.types import RunState, Updated


def updating(**changes):
  this = resolved(**changes)
  return this, functools.partial(learning.update_policy, this, this.phases[0])


def test_update_makes_the_promised_updates_and_numbers(wired, monkeypatch):
  c, stages, state, kept = wired.run.config, *wired[-3:]
  seeds = []
  split = packing.split
  monkeypatch.setattr(
    packing, "split", lambda *a: seeds.append(a[-1]) or split(*a)
  )
  before = jax.tree.map(np.asarray, state.params)
  copy = jax.tree.map(jnp.copy, state)
  credit = stages.advantages(kept, RunState())
  after, updated = stages.update(copy, kept, credit)
  numbers = updated.metrics
  # The mean of 0 before the first update and of what that one did.
  assert 1e-9 < numbers["policy/kl_ref"] < 1e-4
  assert (int(after.step), after.opt[1][0].count) == (1, c.optim.minibatches)
  moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), before, after.params)
  assert max(jax.tree.leaves(moved)) > 0.0
  chex.assert_trees_all_equal(before, after.reference)
  assert numbers["policy/logp_gap_max"] < 1e-4
  # Two updates of a warm-up of five: the second used 2/5 of the rate.
  assert numbers["optim/lr"] == pytest.approx(c.optim.lr * 2 / 5)
  assert 0.0 < numbers["update/distinct_fraction"] <= 1.0
  assert not metrics.only_finite(numbers)[1]
  after, updated = stages.update(after, kept, credit)
  numbers = updated.metrics
  assert numbers["policy/kl_ref"] > 0.0
  assert seeds[-1] != seeds[0]  # minibatches are drawn anew
  assert numbers["optim/lr"] == pytest.approx(c.optim.lr * 4 / 5)
  # After an update the old rollouts are off policy.
  assert numbers["policy/kl_old"] > 0.0
  assert numbers["policy/logp_gap_max"] > 1e-4


@pytest.mark.parametrize("count", [0, 3])
def test_updates_have_what_the_phase_decided(wired, monkeypatch, count):
  """Also what the theorem is measured on, and how large a gradient may be."""
  told = {}

  def step(*_, **how):
    told.update(how)
    pytest.skip("made no update")

  monkeypatch.setattr(learning.update, "minibatch_step", step)
  this, learn = updating(theory_prompts=count, spike=3.0, minibatches=1)
  (phase,), norms = this.phases, (*map(float, range(1, 21)),)
  credit = wired.stages.advantages(wired.kept, RunState())
  progress = dataclasses.replace(credit.progress, grad_norms=norms)
  credit = credit._replace(progress=progress)
  with pytest.raises(pytest.skip.Exception):
    learn(jax.tree.map(jnp.copy, wired.state), wired.kept, credit)
  watch = told.pop("watch")
  assert told == dict(tx=phase.tx,
    response_logp=phase.trainer.response_logp, objective=phase.objective,
    groups=2, most_norm=run_state.most_norm(3.0, norms))  # fmt: skip
  assert np.isfinite(told["most_norm"]) and (watch is None) == (count == 0)
  if count:
    assert watch.func == phase.mass.mean
    assert watch.args[0].response.shape == (count, 16, 6)


@pytest.mark.slow
def test_an_update_is_told_what_it_needs(wired, monkeypatch):
  """The policy's options, and whose log-probabilities are scored before it."""
  this, learn = updating(remat="products")
  stages, state, kept = wired[-3:]
  other = this.policy.init(jax.random.key(1))
  state = dataclasses.replace(jax.tree.map(jnp.copy, state), reference=other)
  scored, steps = [], []
  logp_of, minibatch_step = update.logp_of, update.minibatch_step

  def score(params, batch, **how):
    is_other = jax.tree.leaves(params)[0] is jax.tree.leaves(other)[0]
    scored.append((is_other, logp_of(params, batch, **how)))
    return scored[-1][1]

  def step(state, batches, **how):
    batches = list(batches)
    steps.append((batches, how["response_logp"].__self__))
    return minibatch_step(state, batches, **how)

  monkeypatch.setattr(update, "logp_of", score)
  monkeypatch.setattr(update, "minibatch_step", step)
  learn(state, kept, stages.advantages(kept, RunState()))
  assert len(steps) == this.config.optim.minibatches == 2
  batches = [batch for part, _ in steps for batch in part]
  old = [logp for is_reference, logp in scored if not is_reference]
  assert len(scored) == 2 * len(batches) and len(old) == len(batches)
  for batch, one in zip(batches, old, strict=True):
    np.testing.assert_array_equal(batch.logp_old, one)
    gap = jnp.abs(batch.logp_ref - one)[batch.mask]
    assert float(jnp.max(gap)) > 0.1  # another policy
  for _, told in steps:
    assert told == dataclasses.replace(
      this.policy, remat="products", mesh=this.mesh
    )


@pytest.mark.slow
def test_measuring_the_theorem_changes_no_update(wired):
  stages, state, kept = wired[-3:]
  credit = stages.advantages(kept, RunState())

  def learn(**changes):
    _, update = updating(minibatches=1, **changes)
    after, updated = update(jax.tree.map(jnp.copy, state), kept, credit)
    found = updated.metrics.items()
    return after, {k: v for k, v in found if k.startswith("theory/")}

  off, nothing = learn(theory_prompts=0)
  on, measured = learn()
  assert nothing == theory.unmeasured()
  assert measured.keys() == nothing.keys() and None not in measured.values()
  chex.assert_trees_all_close(on, off, rtol=0, atol=3e-8)


@pytest.mark.slow
@pytest.mark.parametrize(
  "offload", [pytest.param("reference", marks=pytest.mark.slow), "moments"]
)
def test_what_waits_in_host_memory_changes_no_bit(wired, offload, tmp_path):
  this, kept = wired.run, wired.kept
  credit, step = wired.stages.advantages(kept, RunState()), wired.stages.update
  params, tx = this.policy.init(jax.random.key(0)), this.phases[0].tx
  make = lambda offload: states.initial_state(
    params, tx, this.mesh, keep_reference=True, offload=offload
  )
  kinds = lambda tree: {x.sharding.memory_kind for x in jax.tree.leaves(tree)}
  state, want = make(offload), make("nothing")
  for _ in range(2):
    state, numbers = step(state, kept, credit)
    want, wanted = step(want, kept, credit)
    assert numbers == wanted
    chex.assert_trees_all_equal(state, want)
    assert kinds(state.params) == {"device"}
    assert kinds(state.reference) == {sharding.HOST}
    moments = sharding.HOST if offload == "moments" else "device"
    assert kinds(state.opt) == {moments}
  # A checkpoint is read into the memory that it was written from.
  store = checkpoints.Store(tmp_path, keep=1, run="mine")
  store.save(2, state, {})
  store.close()
  again, _ = checkpoints.Store(tmp_path, keep=1, run="mine").restore(
    make(offload)
  )
  chex.assert_trees_all_equal(again, state)
  assert kinds(again.reference) == {sharding.HOST}
  assert kinds(again.opt) == {moments}


def learned_a_little(*, keep_reference=True, **changes):
  """A phase, and a state after three of its updates."""
  phase = resolved(**changes).phases[0]
  tx = phase.tx
  params = {"w": jnp.arange(3.0)}
  state = init_state(params, tx, keep_reference=keep_reference)
  params, opt = state.params, state.opt
  for _ in range(3):
    updates, opt = tx.update({"w": jnp.ones(3)}, opt, params)
    params = jax.tree.map(jnp.add, params, updates)
  return phase, dataclasses.replace(state, params=params, opt=opt)


def reset(phase, *what, best=lambda params: pytest.fail("it is not asked")):
  return learning.reset_reference(phase, best, *what)


# The first of equals; this step, not saved yet; nothing saved has a score.
@pytest.mark.parametrize("score, saved, back",
  [(0.5, 0.6, 1), (0.6, 0.6, 1), (0.7, 0.6, 0), (0.5, None, 0)])  # fmt: skip
def test_a_reset_may_go_back_to_the_best_step(score, saved, back):
  phase, state = learned_a_little(reset_every=1, reset_to="best")
  old, was = {"w": 7.0 + jnp.arange(3.0)}, RunState(score=score, peak=0.9)
  found = lambda params: saved and (4, saved, old)
  after, progress, why = reset(phase, state, was, best=found)
  assert why == "1 steps" + "; back to step 4, of score 0.6" * back
  chex.assert_trees_all_equal(after.params, old if back else state.params)
  chex.assert_trees_all_equal(after.reference, after.params)
  chex.assert_trees_all_equal(after.opt, state.opt)  # of ProRL v2: kept
  assert progress == RunState(score=score, peak=0.9, resets=1)


@pytest.mark.parametrize("rule, progress, why", [
  ({"reset_every": 2}, RunState(), None),
  ({"reset_stalled": 2}, RunState(stalled=2), "no better score in 2"),
])  # fmt: skip
def test_when_the_policy_becomes_the_reference(rule, progress, why):
  """The rules themselves are in run_state_test."""
  phase, state = learned_a_little(**{"reset_every": 0} | rule)
  assert (state.reference["w"] != state.params["w"]).all()
  progress = dataclasses.replace(progress, tokens=5)
  after, progress_after, said = reset(phase, state, progress)
  assert said == (why and f"{why} evaluations")
  chex.assert_trees_all_equal(after.params, state.params)
  chex.assert_trees_all_equal(after.opt, state.opt)
  if why is None:
    assert progress_after == dataclasses.replace(
      progress, since_reset=progress.since_reset + 1
    )
    np.testing.assert_array_equal(after.reference["w"], np.arange(3.0))
    return
  assert progress_after == RunState(tokens=5, resets=1)
  np.testing.assert_array_equal(after.reference["w"], state.params["w"])
  state.params["w"].delete()  # an update will: the copy is its own
  assert np.isfinite(after.reference["w"]).all()


def test_an_optimizer_may_start_anew_with_the_reference():
  phase, state = learned_a_little(reset_every=1, reset_to="anew")
  assert updates_done(state.opt) == 3
  moments = [x for x in jax.tree.leaves(state.opt) if x.ndim]
  assert all((x != 0.0).all() for x in moments) and moments
  after, _, why = reset(phase, state, RunState())
  assert why == "1 steps" and updates_done(after.opt) == 0
  chex.assert_trees_all_equal(after.opt, phase.tx.init(after.params))
  np.testing.assert_array_equal(after.reference["w"], state.params["w"])


def test_without_a_reference_nothing_is_reset():
  phase, state = learned_a_little(
    keep_reference=False, reset_every=1, reset_to="anew"
  )
  progress = RunState(since_reset=3, stalled=3)
  got = reset(phase, state, progress)
  assert got == (state, progress, None) and got[0] is state


@pytest.mark.ci
def test_a_reset_leaves_arrays_where_they_were_and_warms_up_again(wired):
  this, kept = wired.run, wired.kept
  c = config(reset_every=1, reset_to="anew")
  phase = dataclasses.replace(this.phases[0], config=c)
  state = states.initial_state(this.policy.init(jax.random.key(0)),
    phase.tx, this.mesh, keep_reference=True, offload="moments")  # fmt: skip
  kinds = lambda tree: {x.sharding.memory_kind for x in jax.tree.leaves(tree)}
  credit = wired.stages.advantages(kept, RunState())
  for step in (1, 2):
    state, (numbers, *_) = wired.stages.update(state, kept, credit)
    assert int(state.step) == step
    # Two updates of a warm-up of five, each time.
    assert numbers["optim/lr"] == pytest.approx(c.optim.lr * 2 / 5)
    state, _, why = reset(phase, state, RunState())
    assert why == "1 steps"
    chex.assert_trees_all_equal(state.reference, state.params)
    assert kinds(state.reference) == kinds(state.opt) == {sharding.HOST}
    assert kinds(state.params) == {"device"}


MINE = """
def silent(logp, logp_old, advantage, mask):
  return -advantage[:, None] * logp
"""


@pytest.mark.parametrize(
  "changes, how",
  tiers.some([
    ({}, dict(unit="token", mean="token", constant=6)),
    ({"mean": "prompt"}, dict(unit="token", mean="prompt", constant=6)),
    ({"mean": "constant"}, dict(unit="token", mean="constant", constant=6)),
    ({"loss": "gspo"}, dict(unit="sequence", mean="token", constant=6)),
  ], 1),
  ids=str,
)  # fmt: skip
def test_the_mean_of_a_config_scales_a_batch(wired, monkeypatch, changes, how):
  stages, state, kept = wired[-3:]
  seen, packed = [], []
  real = packing.pack

  def pack(source, layout, groups):
    seen.append(None if source.scale is None else source.scale[groups])
    length = source.rollouts.mask[groups].sum(axis=2)
    packed.append(packing.loss_scale(length, **how))
    return real(source, layout, groups)

  monkeypatch.setattr(packing, "pack", pack)
  monkeypatch.setattr(
    update, "minibatch_step", lambda *_, **__: pytest.skip("made no update")
  )
  this, learn = updating(**changes)
  with pytest.raises(pytest.skip.Exception):
    learn(state, kept, stages.advantages(kept, RunState()))
  assert len(seen) == this.config.optim.minibatches
  chex.assert_trees_all_equal(seen, packed)
  assert (seen[0] is None) == (changes == {})


@pytest.mark.slow
def test_a_loss_that_tells_no_clip_has_no_clip_fraction(wired, tmp_path):
  (tmp_path / "mine.py").write_text(MINE)
  stages, state, kept = wired[-3:]
  _, learn = updating(loss=f"{tmp_path}/mine.py:silent")
  state = jax.tree.map(jnp.copy, state)
  _, updated = learn(state, kept, stages.advantages(kept, RunState()))
  assert updated.metrics["policy/clip_fraction"] is None
  assert updated.metrics["optim/grad_norm"] > 0.0


def test_a_number_that_is_not_finite_stays_out_of_what_is_usual(wired):
  kept, count = wired.kept, len(wired.kept.prompts.index)
  enough = SampledGroups(kept, np.ones(count, bool), count, {}, [])
  usual = {"rollout/entropy": 0.8, "reward/mean": 0.5}
  progress = RunState()
  for entropy in (0.8, math.nan, 0.8, 0.07):
    scalars = usual | {"rollout/entropy": entropy}
    progress, judged = learning.check_guards(
      Guard(), progress, scalars, enough, Updated({}, (1.0,))
    )
    known = entropy if math.isfinite(entropy) else None
    assert judged.scalars["rollout/entropy"] == known
    kinds = [event["event"] for event in judged.events]
    assert kinds == {0.8: [], 0.07: ["guard"]}.get(entropy, ["not finite"])
  assert progress.usual["rollout/entropy"] == pytest.approx((3, 1.67 / 3))
  assert progress.reward == 0.5 and judged.scalars["guard/alarms"] == 1.0
