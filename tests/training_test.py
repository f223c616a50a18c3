"""Tests of brorl_jax/main/training.py and record.py: the wiring."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brorl_jax import (
  checkpoints,
  hf,
  metrics,
  packing,
  sharding,
  tokenizer,
  train,
  update,
)
from brorl_jax.main import learning, planning, record, sampling, training
from brorl_jax.main.puzzles import Puzzles
from brorl_jax.rl import advantages
from configs import base

ASSETS = pathlib.Path(tokenizer.__file__).parent / "assets"


def config():
  c = base.get_config()
  c.n, c.samples, c.round_samples = 16, 64, 64
  c.eval_prompts, c.eval_n, c.rows, c.blocks = 2, 4, 8, 2
  return c


@pytest.fixture(scope="module")
def wired():
  """Config, puzzles, stages, state and the groups of one step."""
  c = config()
  mesh = jax.make_mesh(
    (1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  text = tokenizer.Tokenizer(ASSETS)
  policy, params = hf.load(ASSETS, mesh=mesh)
  puzzles = Puzzles(c, text)
  plans = planning.make(c, policy, **mesh.shape, on_cpu=None)
  tx, schedule = learning.optimizer(c)
  state = learning.initial_state(
    params, tx, mesh, keep_reference=True, offload="nothing"
  )
  stages = train.Stages(
    prompts=puzzles.prompts,
    rollouts=sampling.rollouts(
      c, policy, text.stop_ids, mesh, plans.rollouts, n=c.n
    ),
    rewards=puzzles.rewards,
    advantages=training.advantages_stage,
    update=learning.update_stage(c, policy, tx, schedule, mesh),
  )
  prompts = stages.prompts(1, 0)
  key = jax.random.fold_in(jax.random.key(c.seed), 1)
  out = stages.rollouts(state.params, prompts, key)
  kept = train.Groups(prompts, out, stages.rewards(1, prompts, out))
  return c, policy, puzzles, stages, state, kept, mesh


def test_advantages_are_whitened_over_tokens(wired):
  kept = wired[5]
  got = training.advantages_stage(kept)
  length = kept.rollouts.mask.sum(axis=2).astype(np.float32)
  where = np.asarray(advantages.informative(jnp.asarray(kept.reward)))
  assert where.any() and len(np.unique(length)) > 1
  weight = length * where[:, None]
  centered = kept.reward - kept.reward.mean(axis=1, keepdims=True)
  mean = np.average(centered, weights=weight)
  std = np.sqrt(np.average((centered - mean) ** 2, weights=weight))
  want = np.where(where[:, None], (centered - mean) / std, 0.0)
  np.testing.assert_allclose(got, want, atol=1e-5)


def test_update_makes_the_promised_updates_and_numbers(wired, monkeypatch):
  c, _, _, stages, state, kept, _ = wired
  seeds = []
  split = packing.split
  monkeypatch.setattr(
    packing, "split", lambda *a: seeds.append(a[-1]) or split(*a)
  )
  before = jax.tree.map(np.asarray, state.params)
  copy = jax.tree.map(jnp.copy, state)
  advantage = stages.advantages(kept)
  after, numbers = stages.update(copy, kept, advantage)
  assert seeds == [(c.seed, 1)]
  assert int(after.step) == 1
  assert after.opt[1][0].count == c.minibatches
  moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), before, after.params)
  assert max(jax.tree.leaves(moved)) > 0.0
  jax.tree.map(np.testing.assert_array_equal, before, after.reference)
  assert numbers["policy/logp_gap_max"] < 1e-4
  # Two updates of a warm-up of five: the second used 2/5 of the rate.
  assert numbers["optim/lr"] == pytest.approx(c.lr * 2 / 5)
  assert 0.0 < numbers["update/distinct_fraction"] <= 1.0
  assert metrics.first_not_finite(numbers) is None
  _, numbers = stages.update(after, kept, advantage)
  assert seeds[-1] == (c.seed, 2)
  assert numbers["optim/lr"] == pytest.approx(c.lr * 4 / 5)
  # After an update the old rollouts are off policy.
  assert numbers["policy/kl_old"] > 0.0
  assert numbers["policy/logp_gap_max"] > 1e-4


def test_a_reference_is_kept_only_if_it_has_a_weight(wired):
  c, policy, _, _, _, _, mesh = wired
  tx, _ = learning.optimizer(c)
  params = policy.init(jax.random.key(0))
  state = learning.initial_state(
    params, tx, mesh, keep_reference=False, offload="nothing"
  )
  assert state.reference is None


def test_an_update_is_told_what_it_needs(wired, monkeypatch):
  """The policy's options, and whose log-probabilities are scored before it."""
  c, policy, _, stages, state, kept, mesh = wired
  tx, schedule = learning.optimizer(c)
  other = policy.init(jax.random.key(1))
  state = dataclasses.replace(jax.tree.map(jnp.copy, state), reference=other)
  scored, steps = [], []
  logp_of, minibatch_step = update.logp_of, update.minibatch_step

  def score(params, batch, **how):
    is_other = jax.tree.leaves(params)[0] is jax.tree.leaves(other)[0]
    scored.append((is_other, logp_of(params, batch, **how)))
    return scored[-1][1]

  def step(state, batches, **how):
    steps.append((batches, how["response_logp"].__self__))
    return minibatch_step(state, batches, **how)

  monkeypatch.setattr(update, "logp_of", score)
  monkeypatch.setattr(update, "minibatch_step", step)
  c = c.copy_and_resolve_references()
  c.remat = "products"
  learn = learning.update_stage(c, policy, tx, schedule, mesh)
  learn(state, kept, stages.advantages(kept))
  assert len(steps) == c.minibatches == 2
  batches = [batch for part, _ in steps for batch in part]
  old = [logp for is_reference, logp in scored if not is_reference]
  assert len(scored) == 2 * len(batches) and len(old) == len(batches)
  for batch, one in zip(batches, old, strict=True):
    np.testing.assert_array_equal(batch.logp_old, one)
    gap = jnp.abs(batch.logp_ref - one)[batch.mask]
    assert float(jnp.max(gap)) > 0.1  # another policy
  for _, told in steps:
    assert told == dataclasses.replace(policy, remat="products", mesh=mesh)


@pytest.mark.parametrize("offload", ["reference", "moments"])
def test_what_waits_in_host_memory_changes_no_bit(wired, offload, tmp_path):
  c, policy, _, stages, _, kept, mesh = wired
  advantage = stages.advantages(kept)
  tx, schedule = learning.optimizer(c)
  params = policy.init(jax.random.key(0))
  step = learning.update_stage(c, policy, tx, schedule, mesh)
  make = lambda offload: learning.initial_state(
    params, tx, mesh, keep_reference=True, offload=offload
  )
  kinds = lambda tree: {x.sharding.memory_kind for x in jax.tree.leaves(tree)}
  state, want = make(offload), make("nothing")
  for _ in range(2):
    state, numbers = step(state, kept, advantage)
    want, wanted = step(want, kept, advantage)
    assert numbers == wanted
    jax.tree.map(np.testing.assert_array_equal, state, want)
    assert kinds(state.params) == {"device"}
    assert kinds(state.reference) == {sharding.HOST}
    moments = sharding.HOST if offload == "moments" else "device"
    assert kinds(state.opt) == {moments}
  # A checkpoint is read into the memory that it was written from.
  store = checkpoints.Store(tmp_path, keep=1)
  store.save(2, state, {})
  store.close()
  again, _ = checkpoints.Store(tmp_path, keep=1).restore(make(offload))
  jax.tree.map(np.testing.assert_array_equal, again, state)
  assert kinds(again.reference) == {sharding.HOST}
  assert kinds(again.opt) == {moments}


def test_record_writes_what_a_step_and_an_evaluation_show(wired, tmp_path):
  c, policy, puzzles, _, state, kept, mesh = wired
  heldout = puzzles.heldout()
  plans = planning.make(c, policy, **mesh.shape, on_cpu=None)
  measure = record.evaluation(c, policy, puzzles, mesh, plans)
  book = record.Record(c, tmp_path, puzzles, heldout, measure)
  book.start(-1)
  book.evaluate(0, state.params)
  book.step(1, {"reward/mean": 0.5}, kept)
  book.evaluate(1, state.params)
  book.close()
  curve = metrics.read_lines(tmp_path / "eval" / "curve.jsonl")
  # The same draws each time: a gain is paired.
  assert curve[0]["rates"] == curve[1]["rates"]
  records = metrics.read_lines(tmp_path / "eval" / "records.jsonl")
  assert len(records) == 2 * 8 * 2 * 4
  assert {r["id"].split("/")[1] for r in records} == {"heldout"}
  samples = metrics.read_lines(tmp_path / "samples.jsonl")
  assert len(samples) == c.samples_shown
  for p, line in enumerate(samples):
    puzzle = puzzles.puzzle(1, p)
    assert line["id"] == puzzle.id and line["answer"] == puzzle.entry["answer"]
    n = kept.reward[p] == line["reward"]
    assert n.any()


def test_record_refuses_a_run_whose_lines_are_gone(wired, tmp_path):
  c, _, puzzles, _, _, _, _ = wired
  book = record.Record(c, tmp_path, puzzles, [], lambda *_: None)
  with pytest.raises(metrics.Damaged, match=r"does not hold the steps 1 to 3"):
    book.start(3)
  lines = [json.dumps({"step": i}) for i in (1, 2, 3)]
  (tmp_path / "metrics.jsonl").write_text("\n".join(["{", *lines]) + "\n")
  with pytest.raises(metrics.Damaged, match=r"metrics\.jsonl, line 1"):
    book.start(3)
  (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
  book.start(3)
  book.close()


def test_a_mesh_that_does_not_exist_is_refused():
  with pytest.raises(ValueError, match="3"):
    sharding.make_mesh(3, 1)
