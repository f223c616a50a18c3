"""Tests of brorl_jax/main/training.py and record.py: the wiring."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import judged
import numpy as np
import pytest

from brorl_jax import (
  checkpoints,
  evaluate,
  hf,
  metrics,
  packing,
  sampler,
  sharding,
  theory,
  tokenizer,
  update,
)
from brorl_jax.ledger import Ledger
from brorl_jax.main import (
  crediting,
  evaluating,
  learning,
  planning,
  record,
  settings,
  training,
)
from brorl_jax.main.examples import Examples
from brorl_jax.main.scoring import Judge
from brorl_jax.rl import advantages, lr_scaling, stats
from brorl_jax.tasks import dataset
from brorl_jax.types import Groups, Prompts, Rollouts
from configs import base

ASSETS = pathlib.Path(tokenizer.__file__).parent / "assets"


def config(**changes):
  c = base.get_config()
  c.n, c.samples, c.in_flight = 16, 64, 64
  c.eval_prompts, c.eval_n, c.rows, c.blocks = 2, 4, 8, 2
  c.update(changes)
  return c


@pytest.fixture(scope="module")
def wired():
  """Config, policy, examples, judge, stages, state and groups of a step."""
  c = config()
  mesh = jax.make_mesh(
    (1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  text = tokenizer.Tokenizer(ASSETS)
  policy, params = hf.load(ASSETS, mesh=mesh)
  examples = Examples(c, text)
  judge = Judge(c, examples)
  plans = planning.make(
    c, policy, **mesh.shape, on_cpu=None, keep_reference=True
  )
  tx, _ = learning.optimizer(c)
  state = learning.initial_state(
    params, tx, mesh, keep_reference=True, offload="nothing"
  )
  stages = training.phase(
    c, 1, examples, judge, policy, mesh, keep_reference=True
  ).stages(1)
  prompts = stages.prompts(1, range(4))
  out = sampler.rollouts(
    policy,
    state.params,
    prompts,
    jax.random.fold_in(jax.random.key(c.seed), 1),
    n=c.n,
    max_new_tokens=c.max_new_tokens,
    behaviour=sampler.Behaviour(),
    stop_ids=text.stop_ids,
    slots=plans.rollouts.slots,
    lanes=plans.rollouts.lanes,
    mesh=mesh,
  )
  out = jax.device_get(out)
  kept = Groups(prompts, out, stages.scores(1, prompts, out))
  yield c, policy, examples, judge, stages, state, kept, mesh
  judge.close()


def test_advantages_are_whitened_over_tokens(wired):
  stages, kept = wired[4], wired[6]
  got = stages.advantages(kept, Ledger()).advantage
  reward = kept.scores.reward
  length = kept.rollouts.mask.sum(axis=2).astype(np.float32)
  where = np.asarray(advantages.informative(jnp.asarray(reward)))
  assert where.any() and len(np.unique(length)) > 1
  weight = length * where[:, None]
  centered = reward - reward.mean(axis=1, keepdims=True)
  mean = np.average(centered, weights=weight)
  std = np.sqrt(np.average((centered - mean) ** 2, weights=weight))
  want = np.where(where[:, None], (centered - mean) / std, 0.0)
  np.testing.assert_allclose(got, want, atol=1e-5)


def test_update_makes_the_promised_updates_and_numbers(wired, monkeypatch):
  c, _, _, _, stages, state, kept, _ = wired
  seeds = []
  split = packing.split
  monkeypatch.setattr(
    packing, "split", lambda *a: seeds.append(a[-1]) or split(*a)
  )
  before = jax.tree.map(np.asarray, state.params)
  copy = jax.tree.map(jnp.copy, state)
  credit = stages.advantages(kept, Ledger())
  after, numbers = stages.update(copy, kept, credit)
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
  _, numbers = stages.update(after, kept, credit)
  assert seeds[-1] == (c.seed, 2)
  assert numbers["optim/lr"] == pytest.approx(c.lr * 4 / 5)
  # After an update the old rollouts are off policy.
  assert numbers["policy/kl_old"] > 0.0
  assert numbers["policy/logp_gap_max"] > 1e-4


def test_a_reference_is_kept_only_if_it_has_a_weight(wired):
  c, policy, _, _, _, _, _, mesh = wired
  tx, _ = learning.optimizer(c)
  params = policy.init(jax.random.key(0))
  state = learning.initial_state(
    params, tx, mesh, keep_reference=False, offload="nothing"
  )
  assert state.reference is None


def test_an_update_is_told_what_it_needs(wired, monkeypatch):
  """The policy's options, and whose log-probabilities are scored before it."""
  c, policy, _, _, stages, state, kept, mesh = wired
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
  learn(state, kept, stages.advantages(kept, Ledger()))
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


def test_the_theorem_is_measured_only_if_it_shall_be(wired, monkeypatch):
  c, policy, _, _, stages, state, kept, mesh = wired
  credit, seen = stages.advantages(kept, Ledger()), []
  minibatch_step = update.minibatch_step

  def step(*args, watch, **how):
    seen.append(watch)
    return minibatch_step(*args, watch=watch, **how)

  monkeypatch.setattr(update, "minibatch_step", step)
  tx, schedule = learning.optimizer(c)

  def learn(**changes):
    seen.clear()
    other = c.copy_and_resolve_references()
    other.update(changes)
    stage = learning.update_stage(other, policy, tx, schedule, mesh)
    after, numbers = stage(jax.tree.map(jnp.copy, state), kept, credit)
    found = {k: v for k, v in numbers.items() if k.startswith("theory/")}
    return after, found

  off, nothing = learn(theory_prompts=0)
  assert seen == [None] * c.minibatches
  assert nothing == theory.unmeasured()
  on, measured = learn()
  assert measured.keys() == nothing.keys() and None not in measured.values()
  (found,) = seen[0].args
  assert found.response.shape == (2, 16, 6)
  # It only looks.
  jax.tree.map(np.testing.assert_array_equal, on, off)
  learn(theory_prompts=1, theory_responses=3, theory_tokens=2, remat="products")
  (found,) = seen[0].args
  assert found.response.shape == (1, 3, 2)


@pytest.mark.parametrize(
  "offload", [pytest.param("reference", marks=pytest.mark.slow), "moments"]
)
def test_what_waits_in_host_memory_changes_no_bit(wired, offload, tmp_path):
  c, policy, _, _, stages, _, kept, mesh = wired
  credit = stages.advantages(kept, Ledger())
  tx, schedule = learning.optimizer(c)
  params = policy.init(jax.random.key(0))
  step = learning.update_stage(c, policy, tx, schedule, mesh)
  make = lambda offload: learning.initial_state(
    params, tx, mesh, keep_reference=True, offload=offload
  )
  kinds = lambda tree: {x.sharding.memory_kind for x in jax.tree.leaves(tree)}
  state, want = make(offload), make("nothing")
  for _ in range(2):
    state, numbers = step(state, kept, credit)
    want, wanted = step(want, kept, credit)
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


def test_a_run_records_the_files_that_it_trains_on(tmp_path, monkeypatch):
  path = tmp_path / "a.jsonl"
  lines = [
    {"id": f"q-{i}", "domain": "math", "prompt": f"{i} + 5?", "answer": f"{i}"}
    for i in range(40)
  ]
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  mesh = jax.make_mesh(
    (1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  monkeypatch.setattr(sharding, "make_mesh", lambda data, model: mesh)
  c = config(prompt_tokens=80)
  c.data.files, c.domains.gym.weight = (str(path),), 0.0
  parts = training._parts(c, tmp_path / "run", allow_change=False)
  parts.judge.close()
  assert parts.found["files"] == dataset.file_digests(str(path))


def test_record_of_one_held_out_prompt_has_no_interval(wired, tmp_path):
  one = {"id": "q", "domain": "math", "task": "m", "tokens": 3, "reason": ""}
  one |= {"truncated": False, "score": 1.0, "pass": True, "status": "pass"}
  chunks = [[one | {"sample": n, "answer": "8"} for n in range(2)]]
  measure = lambda params, heldout: iter(chunks)
  c, _, examples, *_ = wired
  book = record.Record(c, tmp_path, examples, [], lambda step: measure, {}, {})
  book.start(-1)
  assert book.evaluate(0, None) == 1.0
  book.close()
  (line,) = metrics.read_lines(tmp_path / "eval" / "curve.jsonl")
  assert (line["pass_at_1"], line["half_width"]) == (1.0, None)


def test_record_writes_what_a_step_and_an_evaluation_show(wired, tmp_path):
  c, policy, examples, judge, _, state, kept, mesh = wired
  heldout = examples.heldout()
  plans = planning.make(
    c, policy, **mesh.shape, on_cpu=None, keep_reference=True
  )
  measure = evaluating.measure(
    c, policy, examples, judge, mesh, plans.evaluations, plans.chunk
  )
  steps = []
  by_step = lambda step: steps.append(step) or measure
  book = record.Record(
    c,
    tmp_path,
    examples,
    heldout,
    by_step,
    {},
    {"sandbox": 1},
    lambda: {"score/replaced_workers": 3},
  )
  book.start(-1)
  score = book.evaluate(0, state.params)
  book.step(1, {"reward/mean": 0.5}, kept)
  book.evaluate(1, state.params)
  book.close()
  assert steps == [0, 1]
  assert json.loads((tmp_path / "config.json").read_text())["sandbox"] == 1
  (line,) = metrics.read_lines(tmp_path / "metrics.jsonl")
  assert line["score/replaced_workers"] == 3 and line["reward/mean"] == 0.5
  curve = metrics.read_lines(tmp_path / "eval" / "curve.jsonl")
  # The same draws each time: a gain is paired.
  assert curve[0]["rates"] == curve[1]["rates"]
  assert 0.0 < score == curve[0]["pass_at_1"] < 1.0
  records = metrics.read_lines(tmp_path / "eval" / "records.jsonl")
  assert len(records) == 2 * 8 * 2 * 4
  for step, line in enumerate(curve):
    said = evaluate.summary([r for r in records if r["step"] == step])
    assert line["summary"] == said
    assert line["pass_at_1"] == pytest.approx(said["all"]["pass_at_k"]["1"])
    by_task = said["by_domain"]["gym"]["by_task"]
    want = {
      task: numbers["pass_at_k"]["1"] for task, numbers in by_task.items()
    }
    assert line["by_family"] == want
    mean, half = stats.mean_interval(jnp.array(line["rates"]))
    assert (line["pass_at_1"], line["half_width"]) == (mean, half)
    assert len(line["rates"]) == 16
  assert {r["id"].split("/")[1] for r in records} == {"heldout"}
  samples = metrics.read_lines(tmp_path / "samples.jsonl")
  assert len(samples) == c.samples_shown
  for p, line in enumerate(samples):
    example = examples.example(1, p)
    assert (line["id"], line["domain"]) == (example.id, "gym")
    assert line["gold"] == example.entry["answer"]
    assert (line["verdict"] == "pass") == (line["reward"] == 1.0)
    assert (line["answer"] == line["gold"]) >= (line["verdict"] == "pass")
    assert line["seconds"] >= 0.0 and (line["reason"] == "") == line["reward"]
    n = kept.scores.reward[p] == line["reward"]
    assert n.any()


def lines_of(workdir, steps):
  """What a run leaves that was evaluated before its first step alone."""
  text = "".join(json.dumps({"step": i}) + "\n" for i in range(1, steps + 1))
  (workdir / "metrics.jsonl").write_text(text)
  (workdir / "eval").mkdir(exist_ok=True)
  (workdir / "eval" / "curve.jsonl").write_text('{"step": 0}\n')


def test_record_refuses_a_run_whose_lines_are_gone(wired, tmp_path):
  c, _, examples, *_ = wired
  book = lambda: record.Record(
    c, tmp_path, examples, [], lambda *_: None, {}, {}
  )
  with pytest.raises(metrics.Damaged, match=r"does not hold the steps 1 to 3"):
    book().start(3)
  lines = [json.dumps({"step": i}) for i in (1, 2, 3)]
  (tmp_path / "metrics.jsonl").write_text("\n".join(["{", *lines]) + "\n")
  with pytest.raises(metrics.Damaged, match=r"metrics\.jsonl, line 1"):
    book().start(3)
  lines_of(tmp_path, 3)
  with pytest.raises(metrics.Damaged, match=r"has steps of a run, and .* no"):
    book().start(-1)
  one = book()
  assert [one.lacks(step) is None for step in (0, 3, 4)] == [True, True, False]
  one.start(3)
  one.close()


def test_record_keeps_events_once(wired, tmp_path, capsys):
  lines_of(tmp_path, 2)
  open_at = lambda done: (
    book := record.Record(
      wired[0], tmp_path, wired[2], [], lambda step: None, {}, {}
    ),
    book.start(done),
  )[0]
  book = open_at(2)
  for step in (1, 2, 3):
    book.event(step, {"event": "reference reset", "why": "KL"})
  book.close()
  told = capsys.readouterr().err
  assert "step 3/60  event: reference reset, why: KL\n" in told
  book = open_at(2)  # killed before step 3 was saved
  book.event(3, {"event": "phase", "changed": {"n": 32}})
  book.close()
  reset = {"event": "reference reset", "why": "KL"}
  assert metrics.read_lines(tmp_path / "events.jsonl") == [
    {"step": 2, "event": "resume"},
    {"step": 1, **reset},
    {"step": 2, **reset},
    {"step": 2, "event": "resume"},
    {"step": 3, "event": "phase", "changed": {"n": 32}},
  ]


def test_a_resume_with_another_config_is_an_event(wired, tmp_path):
  lines_of(tmp_path, 2)
  for done, changed in ((2, {"n": 512}), (2, {})):  # killed before step 3
    book = record.Record(
      wired[0], tmp_path, wired[2], [], lambda step: None, changed, {}
    )
    book.start(done)
    book.close()
  assert metrics.read_lines(tmp_path / "events.jsonl") == [
    {"step": 2, "event": "resume"},
    {"step": 2, "event": "config", "changed": {"n": 512}},
    {"step": 2, "event": "resume"},
  ]


def test_a_phase_says_once_what_it_changes(wired):
  _, policy, examples, judge, *_, mesh = wired
  change = {"from_step": 3, "lr": 0.5, "samples": 128}
  c = config(phases=({"from_step": 2, "lr": 0.25}, change))
  later = c.copy_and_resolve_references()
  later.update(lr=0.5, samples=128)
  phase = training.phase(
    later, 3, examples, judge, policy, mesh, keep_reference=True
  )
  assert phase.stages(3).changed == {"lr": 0.5, "samples": 128}
  assert phase.stages(4).changed is None
  assert phase.since == 3 and phase.stages(4).target == 128 // 16
  assert phase.says.startswith("from step 3: 8 prompts x 16 rollouts; ")
  assert list(phase.stages(4).candidates(4, Ledger())) == list(range(80))
  first = training.phase(
    c, 1, examples, judge, policy, mesh, keep_reference=True
  )
  assert first.stages(1).changed is None


# ------------------------------------------------------- rewards to advantages


def groups(reward, *, length=None, truncated=None, logp=None, answer=None):
  """Groups with these rewards; T = 4, and tokens that all differ."""
  reward = np.array(reward, np.float32)
  P, shape = len(reward), reward.shape
  length = np.full(shape, 2) if length is None else np.array(length)
  mask = np.arange(4) < length[..., None]
  tokens = 1 + np.arange(mask.size, dtype=np.int32).reshape(mask.shape)
  of = np.zeros(mask.shape, np.float32)
  of[..., 0] = 0.0 if logp is None else logp
  cut = np.zeros(shape, bool) if truncated is None else np.array(truncated)
  prompts = Prompts(
    np.ones((P, 3), np.int32),
    np.ones((P, 3), bool),
    np.arange(P, dtype=np.int32),
  )
  rollouts = Rollouts(
    np.where(mask, tokens, 0), of, mask, cut, np.ones(P, np.float32)
  )
  if answer is None:
    answer = np.zeros(shape)
  return Groups(prompts, rollouts, judged.scores(reward, answer))


def short(**changes):
  return config(n=4, in_flight=24, max_new_tokens=4, **changes)


REWARDS = [
  [0.0, 0.0, 0.0, 0.0],
  [1.0, 1.0, 1.0, 1.0],
  [1.0, 0.0, 0.0, 0.0],
  [0.5, 0.5, 0.5, 0.5],
  [0.5, 0.0, 0.0, 0.0],
  [1.0, 1.0, 1.0, 0.0],
]


@pytest.mark.parametrize(
  "changes, want",
  [
    ({"keep": "differ"}, [0, 0, 1, 0, 1, 1]),
    ({"keep": "mean"}, [0, 0, 1, 1, 1, 1]),
    ({"keep": "solved"}, [0, 0, 1, 0, 0, 1]),
    ({"keep": "all"}, [1, 1, 1, 1, 1, 1]),
    # Means: 0, 1, 1/4, 1/2, 1/8, 3/4; the ends are out.
    ({"keep_above": 0.2}, [0, 0, 1, 0, 0, 1]),
    ({"keep_below": 0.75}, [0, 0, 1, 0, 1, 0]),
    (
      {"keep": "mean", "keep_above": 0.25, "keep_below": 0.7},
      [0, 0, 0, 1, 0, 0],
    ),
    ({"keep": "solved", "keep_below": 0.7}, [0, 0, 1, 0, 0, 0]),
  ],
  ids=str,
)
def test_which_groups_are_kept(changes, want):
  got = crediting.filter_stage(short(**changes))(groups(REWARDS))
  assert got.dtype == bool and got.tolist() == want


# By rollouts that count the means are 1, 1/2, 1/2 and none; by all of them, a
# reward of 0 for what could not be judged, 1/2, 1/4, 1/2 and 1/4.
@pytest.mark.parametrize(
  "band, want",
  [
    ({"keep_below": 0.9}, [0, 1, 1, 0]),
    ({"keep_above": 0.3}, [0, 1, 1, 0]),  # the ends are out
    ({"keep_above": 0.3, "keep_below": 0.9}, [0, 1, 1, 0]),
    ({"keep_above": 0.1, "keep_below": 0.4}, [0, 0, 0, 0]),
  ],
  ids=str,
)
@pytest.mark.parametrize("masked", [False, True])
def test_the_band_is_of_rollouts_that_count(band, want, masked):
  reward = [[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 1, 0], [1, 0, 0, 0]]
  counts = np.array([[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0] * 4], bool)
  some = groups(reward, truncated=~counts & masked)
  if not masked:
    some = some._replace(scores=judged.scores(reward, valid=counts))
  c = short(keep="all", mask_truncated=masked, **band)
  assert crediting.filter_stage(c)(some).tolist() == want


@pytest.mark.parametrize("keep", ["differ", "mean", "solved"])
def test_a_length_reward_makes_no_group_of_wrong_answers_informative(keep):
  c = short(
    keep=keep, length_weight=1.0, length_wrong=True, overlong_weight=1.0,
    truncated_factor=0.5,
  )  # fmt: skip
  wrong = groups(
    [[0.0] * 4, [1.0] * 4],
    length=[[1, 2, 3, 4]] * 2,
    truncated=[[False, False, False, True]] * 2,
  )
  reward, _ = crediting.shaped(c, wrong, active=True)
  assert len(np.unique(reward[0])) == len(np.unique(reward[1])) == 4
  assert crediting.filter_stage(c)(wrong).tolist() == [False, False]


@pytest.mark.parametrize("keep", ["differ", "mean", "solved"])
def test_rollouts_that_were_cut_may_decide_nothing(keep):
  cut = groups(
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]],
    truncated=[[True, False, False, False]] * 3,
  )
  kept = lambda **how: crediting.filter_stage(short(keep=keep, **how))(cut)
  assert kept().tolist() == [True] * 3
  assert kept(mask_truncated=True).tolist() == [False, True, True]


# The cosine of 2 of 4 tokens is halfway, that of 4 is the minimum.
RIGHT, LENGTHS = [[1.0, 0.0, 1.0, 0.5]], [[2, 2, 4, 4]]


@pytest.mark.parametrize(
  "changes, active, added",
  [
    ({}, True, [0.0, 0.0, 0.0, 0.0]),
    ({"length_weight": 2.0}, True, [-0.5, 0.0, -1.0, 0.0]),
    ({"length_weight": 2.0}, False, [0.0, 0.0, 0.0, 0.0]),
    (
      {"length_weight": 2.0, "length_wrong": True},
      True,
      [-0.5, -0.5, -1.0, -1.0],
    ),
    (
      {"length_weight": 1.0, "length_min": 0.0, "length_max": 1.0},
      True,
      [0.5, 0.0, 0.0, 0.0],
    ),
    ({"overlong_weight": 0.5}, False, [0.0, 0.0, -0.5, -0.5]),
    (
      {"overlong_weight": 0.5, "overlong_buffer": 4},
      True,
      [-0.25, -0.25, -0.5, -0.5],
    ),
    (
      {"length_weight": 2.0, "overlong_weight": 0.5},
      True,
      [-0.5, 0.0, -1.5, -0.5],
    ),
  ],
  ids=str,
)
def test_rewards_of_length_by_hand(changes, active, added):
  some = groups(RIGHT, length=LENGTHS)
  reward, got = crediting.shaped(short(**changes), some, active=active)
  np.testing.assert_allclose(got, [added], atol=1e-6)
  np.testing.assert_allclose(reward, np.add(RIGHT, [added]), atol=1e-6)


def test_a_response_that_was_cut_keeps_a_share_of_its_reward():
  some = groups(
    [[1.0, 1.0, 0.5, 0.0]],
    length=LENGTHS,
    truncated=[[True, False, True, True]],
  )
  c = short(truncated_factor=0.25)
  reward, added = crediting.shaped(c, some, active=True)
  assert reward.tolist() == [[0.25, 1.0, 0.125, 0.0]]
  assert added.tolist() == [[0.0] * 4]
  # Not of what is added for its length; its raw reward says that it is right.
  c = short(truncated_factor=0.0, length_weight=2.0)
  reward, _ = crediting.shaped(c, some, active=True)
  np.testing.assert_allclose(reward, [[-0.5, 0.5, 0.0, 0.0]], atol=1e-6)


def stage(some, ledger=Ledger(), **changes):  # noqa: B008
  return crediting.advantages_stage(short(**changes))(some, ledger)


@pytest.mark.parametrize(
  "advantage, want",
  [
    # Of the three that count: less 2/3. Their deviation is sqrt(2) / 3.
    ("centered", [1 / 3, -2 / 3, 1 / 3, 0]),
    ("grpo", [2**-0.5, -(2**0.5), 2**-0.5, 0]),
    ("trajectories", [2**-0.5, -(2**0.5), 2**-0.5, 0]),
    # Of their 1 + 1 + 2 tokens: the mean is 1/12, the variance 3/16.
    ("tokens", [3**-0.5, -(3**0.5), 3**-0.5, 0]),
  ],
)
def test_what_was_cut_may_count_nowhere(advantage, want):
  some = groups(
    [[1, 0, 1, 0]],
    length=[[1, 1, 2, 4]],
    truncated=[[False, False, False, True]],
  )
  got = stage(some, advantage=advantage, mask_truncated=True)
  np.testing.assert_allclose(got.advantage, [want], atol=2e-5)
  assert got.counts.tolist() == [[True, True, True, False]]
  assert got.told["reward/masked_fraction"] == pytest.approx(0.25)
  all_in = stage(some, advantage=advantage)
  assert all_in.counts.all() and all_in.told["reward/masked_fraction"] == 0.0
  assert all_in.advantage[0, 3] < 0.0


def test_what_was_cut_has_no_part_in_the_credit():
  """The only right answer of its kind was cut: the two others are one kind."""
  some = groups(
    [[1, 1, 1, 0]],
    answer=[[0, 1, 0, 2]],
    truncated=[[False, True, False, False]],
  )
  got = stage(
    some, advantage="centered", credit="distinct", mask_truncated=True
  )
  np.testing.assert_allclose(
    got.advantage, [[1 / 3, 0, 1 / 3, -2 / 3]], atol=1e-6
  )


def test_a_group_that_shaping_made_equal_gets_exactly_0():
  """Not the shift that longer wrong answers give to all others."""
  some = groups(
    [[1, 0], [1, 0]],
    length=[[4, 4], [1, 3]],
    truncated=[[True, False], [False, False]],
  )
  got = stage(some, advantage="tokens", truncated_factor=0.0).advantage
  np.testing.assert_array_equal(got[0], 0.0)
  np.testing.assert_allclose(got[1], [3**0.5, -(3**-0.5)], rtol=1e-5)


def some_groups():
  rng = np.random.default_rng(0)
  reward = (rng.random((6, 4)) < 0.5).astype(np.float32)
  reward[0], reward[1] = 1.0, [1, 0, 0, 0]
  return groups(
    reward,
    length=rng.integers(1, 5, (6, 4)),
    logp=np.log(rng.random((6, 4))),
    answer=rng.integers(0, 3, (6, 4)),
  )


@pytest.mark.parametrize("credit", ["equal", "distinct", "inverse"])
@pytest.mark.parametrize(
  "advantage", ["tokens", "trajectories", "grpo", "centered"]
)
def test_each_advantage_and_credit_is_its_function(advantage, credit):
  some = some_groups()
  reward = jnp.asarray(some.scores.reward)
  length = jnp.asarray(some.rollouts.mask).sum(axis=2, dtype=jnp.float32)
  where = advantages.informative(reward)
  factor = {
    "equal": lambda: 1.0,
    "distinct": lambda: advantages.credit_by_answer(
      jnp.asarray(some.scores.answer), reward == 1.0
    ),
    "inverse": lambda: advantages.credit_by_probability(
      jnp.asarray(some.rollouts.logp.sum(axis=2)), reward == 1.0
    ),
  }[credit]()
  centered = advantages.center_by_group(reward) * factor
  want = {
    "tokens": lambda: advantages.whiten_by_batch(centered, length, where),
    "trajectories": lambda: advantages.whiten_by_trajectory(centered, where),
    "grpo": lambda: advantages.normalize_by_group(centered),
    "centered": lambda: centered,
  }[advantage]()
  got = stage(some, advantage=advantage, credit=credit)
  np.testing.assert_allclose(got.advantage, want, atol=1e-6)
  assert np.abs(want).max() > 0.1 and (got.advantage[0] == 0.0).all()


@pytest.mark.parametrize(
  "credit, want",
  [
    ("equal", [0.25, 0.25, 0.25, -0.75]),
    # 3 right ones, of two answers: 3 / (2 * 2), 3 / (2 * 2), 3 / (2 * 1).
    ("distinct", [0.1875, 0.1875, 0.375, -0.75]),
    # 1 / p = 2, 4, 4: of the credit of three 0.6, 1.2 and 1.2.
    ("inverse", [0.15, 0.3, 0.3, -0.75]),
  ],
)
def test_credit_by_hand(credit, want):
  some = groups(
    [[1, 1, 1, 0]], answer=[[0, 0, 1, 0]], logp=np.log([[0.5, 0.25, 0.25, 0.1]])
  )
  got = stage(some, advantage="centered", credit=credit).advantage
  np.testing.assert_allclose(got, [want], atol=1e-6)


def test_the_schedule_of_the_length_reward_has_its_own_count():
  some, ledger, seen = groups(RIGHT, length=LENGTHS), Ledger(tokens=7), []
  # Two steps before a phase that turns it on: nothing is counted.
  for _ in range(2):
    got = stage(some, ledger, length_on=1, length_off=2)
    assert got.ledger == ledger
    assert got.told["reward/length_active"] == 0.0
  for _ in range(5):
    got = stage(some, ledger, length_weight=2.0, length_on=1, length_off=2)
    ledger = got.ledger
    seen.append(got.told["reward/length_active"])
    mean = (-0.5 - 1.0) / 4 if seen[-1] else 0.0
    assert got.told["reward/length_mean"] == pytest.approx(mean)
    assert got.told["reward/shaped_mean"] == pytest.approx(2.5 / 4 + mean)
  assert seen == [1.0, 0.0, 0.0, 1.0, 0.0]
  assert ledger == Ledger(tokens=7, shaped=5)


@pytest.mark.parametrize("done, off, active", [(3, 0, 1.0), (3, 1, 0.0)])
def test_without_off_the_length_reward_stays_on(done, off, active):
  some, how = groups(RIGHT, length=LENGTHS), {"length_weight": 2.0}
  got = stage(some, Ledger(shaped=done), **how, length_on=3, length_off=off)
  assert got.told["reward/length_active"] == active


# --------------------------------------------------------------------- learning


@pytest.mark.parametrize(
  "changes, factor",
  [
    ({"lr_scaling": "none", "lr_base": 16}, 1.0),
    ({"lr_scaling": "samples", "lr_base": 16}, 2.0),  # 64 samples
    ({"lr_scaling": "prompts", "lr_base": 8}, 0.5),  # 2 prompts per update
    ({"lr_scaling": "prompts", "lr_base": 4, "minibatches": 1}, 1.0),
  ],
)
def test_the_rate_grows_with_the_root_of_a_count(changes, factor):
  c = config(lr=0.01, warmup=2, **changes)
  assert learning.scaled_lr(c) == pytest.approx(0.01 * factor)
  _, schedule = learning.optimizer(c)
  np.testing.assert_allclose(
    [schedule(i) for i in range(3)],
    np.array([0.5, 1.0, 1.0]) * 0.01 * factor,
    rtol=1e-6,
  )
  assert lr_scaling.sqrt_scaled(1.0, samples=64, base_samples=16) == 2.0


def learned_a_little(c, *, keep_reference=True):
  """An optimizer, and a state after three of its updates."""
  tx, _ = learning.optimizer(c)
  params = {"w": jnp.arange(3.0)}
  state = update.init_state(params, tx, keep_reference=keep_reference)
  params, opt = state.params, state.opt
  for _ in range(3):
    updates, opt = tx.update({"w": jnp.ones(3)}, opt, params)
    params = jax.tree.map(jnp.add, params, updates)
  return tx, dataclasses.replace(state, params=params, opt=opt)


@pytest.mark.parametrize(
  "rule, ledger, kl, why",
  [
    ({"reset_every": 2}, Ledger(), 9.0, None),
    ({"reset_every": 2}, Ledger(since_reset=1), None, "2 steps"),
    ({"reset_above_kl": 0.5}, Ledger(since_reset=99), 0.5, None),
    ({"reset_above_kl": 0.5}, Ledger(), None, None),
    ({"reset_above_kl": 0.5}, Ledger(), 0.75, "KL 0.75 above 0.5"),
    ({"reset_stalled": 2}, Ledger(best=0.5, stalled=1), 9.0, None),
    (
      {"reset_stalled": 2},
      Ledger(best=0.5, stalled=2),
      None,
      "no better score in 2 evaluations",
    ),
    ({}, Ledger(since_reset=999, best=0.5, stalled=99), 99.0, None),
  ],
)
def test_when_the_policy_becomes_the_reference(rule, ledger, kl, why):
  c = config(**{"reset_every": 0} | rule)
  tx, state = learned_a_little(c)
  assert (state.reference["w"] != state.params["w"]).all()
  ledger = dataclasses.replace(ledger, tokens=5)
  after, book, said = learning.reference_stage(c, tx)(
    state, ledger, {"policy/kl_ref": kl}
  )
  assert said == why
  jax.tree.map(np.testing.assert_array_equal, after.params, state.params)
  jax.tree.map(np.testing.assert_array_equal, after.opt, state.opt)
  if why is None:
    assert book == dataclasses.replace(
      ledger, since_reset=ledger.since_reset + 1
    )
    np.testing.assert_array_equal(after.reference["w"], np.arange(3.0))
    return
  assert book == Ledger(tokens=5, resets=1)
  np.testing.assert_array_equal(after.reference["w"], state.params["w"])
  state.params["w"].delete()  # an update will: the copy is its own
  assert np.isfinite(after.reference["w"]).all()


def test_an_optimizer_may_start_anew_with_the_reference():
  c = config(reset_every=1, reset_optimizer=True)
  tx, state = learned_a_little(c)
  assert update.updates_done(state.opt) == 3
  moments = [x for x in jax.tree.leaves(state.opt) if x.ndim]
  assert all((x != 0.0).all() for x in moments) and moments
  scalars = {"policy/kl_ref": 0.0}
  after, _, why = learning.reference_stage(c, tx)(state, Ledger(), scalars)
  assert why == "1 steps" and update.updates_done(after.opt) == 0
  jax.tree.map(np.testing.assert_array_equal, after.opt, tx.init(after.params))
  np.testing.assert_array_equal(after.reference["w"], state.params["w"])


def test_without_a_reference_nothing_is_reset():
  c = config(reset_every=1, reset_optimizer=True)
  tx, state = learned_a_little(c, keep_reference=False)
  ledger = Ledger(since_reset=3, stalled=3)
  got = learning.reference_stage(c, tx)(state, ledger, {"policy/kl_ref": None})
  assert got == (state, ledger, None) and got[0] is state


def test_a_reset_leaves_arrays_where_they_were_and_warms_up_again(wired):
  _, policy, _, _, stages, _, kept, mesh = wired
  c = config(reset_every=1, reset_optimizer=True)
  tx, _ = learning.optimizer(c)
  params = policy.init(jax.random.key(0))
  state = learning.initial_state(
    params, tx, mesh, keep_reference=True, offload="moments"
  )
  kinds = lambda tree: {x.sharding.memory_kind for x in jax.tree.leaves(tree)}
  credit = stages.advantages(kept, Ledger())
  reset = learning.reference_stage(c, tx)
  for step in (1, 2):
    state, numbers = stages.update(state, kept, credit)
    assert int(state.step) == step
    # Two updates of a warm-up of five, each time.
    assert numbers["optim/lr"] == pytest.approx(c.lr * 2 / 5)
    state, _, why = reset(state, Ledger(), numbers)
    assert why == "1 steps"
    jax.tree.map(np.testing.assert_array_equal, state.reference, state.params)
    assert kinds(state.reference) == kinds(state.opt) == {sharding.HOST}
    assert kinds(state.params) == {"device"}


def packed_tokens(parts):
  """Every token that the loss sees: how often, and its advantage."""
  seen = {}
  for batch in (batch for part in parts for batch in part):
    for at in np.argwhere(batch.mask):
      row = tuple(at[:-1])
      assert int(batch.response[tuple(at)]) not in seen
      seen[int(batch.response[tuple(at)])] = (
        float(batch.weight[row]),
        float(batch.advantage[row]),
      )
  return seen


def test_rollouts_that_do_not_count_are_not_packed():
  some = groups(
    [[1, 0, 1, 0], [0, 0, 1, 1]],
    length=[[1, 2, 3, 4], [4, 4, 1, 1]],
    truncated=[[False, False, False, True], [True, True, False, False]],
  )
  c = short(advantage="centered", mask_truncated=True, rows=2, blocks=2)
  credit = crediting.advantages_stage(c)(some, Ledger())
  layout = packing.Layout(c.rows, c.blocks, c.max_new_tokens)
  parts = learning.minibatches(some, credit, layout, 2, (0, 1))
  want = {}
  for p, n, t in np.argwhere(some.rollouts.mask):
    if not some.rollouts.truncated[p, n]:
      token = int(some.rollouts.tokens[p, n, t])
      want[token] = (1.0, float(credit.advantage[p, n]))
  assert packed_tokens(parts) == want and len(want) == 1 + 2 + 3 + 1 + 1
  # Five count, and all of them differ.
  shares = learning.packed_shares(parts, int(credit.counts.sum()))
  assert shares["update/distinct_fraction"] == 1.0
  every = credit._replace(counts=np.ones((2, 4), bool))
  parts = learning.minibatches(some, every, layout, 2, (0, 1))
  assert len(packed_tokens(parts)) == some.rollouts.mask.sum() == 20


@pytest.mark.parametrize(
  "changes, correction",
  [
    ({"correction": "none"}, None),
    ({"correction_cap": 3.0}, update.Correction("truncated", 0.0, 3.0)),
    (
      {"correction": "banded", "correction_low": 0.25},
      update.Correction("banded", 0.25, 5.0),
    ),
    (
      {"correction": "sequence", "sequence_high": 1.5},
      update.Correction("sequence", 0.999, 1.5),
    ),
  ],
)
def test_the_config_becomes_constants_of_the_loss(changes, correction):
  goal = learning.objective(config(entropy_weight=0.1, **changes))
  assert goal == update.Objective(
    clip_low=0.2,
    clip_high=0.28,
    kl_weight=1e-4,
    kl_clamp=10.0,
    temperature=1.0,
    entropy_weight=0.1,
    correction=correction,
  )
  assert goal.dual_clip is None
  other = learning.objective(config(loss="gspo", dual_clip=3.0, **changes))
  assert other.by_sequence and other.dual_clip == 3.0


def test_a_mesh_that_does_not_exist_is_refused():
  with pytest.raises(ValueError, match="3"):
    sharding.make_mesh(3, 1)


def test_a_line_that_is_no_evaluation_is_one_line_at_the_end(tmp_path):
  lines_of(tmp_path, 1)
  with pytest.raises(
    settings.UserError, match=r"curve\.jsonl, line 1: is no evaluation"
  ) as error:
    training.finish(tmp_path, title="a run")
  assert "\n" not in str(error.value)
