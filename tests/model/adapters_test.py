"""LoRA: beside its base, an independent gradient, on disk and in PEFT."""

import dataclasses
import functools
import json
import math
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
import update_cases
from loads import SMALL, planned
from messages import refuses
from one_step import config, machine, resolved
from small_policies import EXPERTS, GEMMA2, TINY, padded, shaken, some_ids
from update_cases import POLICY, assert_close, gradient, packed
from update_cases import params as weights

from brorl_jax.config.run import LORA_LAYERS
from brorl_jax.learner import state as states
from brorl_jax.learner import update
from brorl_jax.many import meshes
from brorl_jax.model import adapters, huggingface, sharding
from brorl_jax.plan import checkpoint_source
from brorl_jax.rollout import sampler
from brorl_jax.runs import checkpoints
from brorl_jax.types import State

TX = optax.adam(0.1)
BF16 = dataclasses.replace(TINY, dtype="bfloat16")


def adapted(policy, rank=3):
  layers = LORA_LAYERS[: 4 if policy.experts else 7]
  return adapters.adapted(policy, rank, 2.0 * rank, layers)


def logp(policy, params):
  prompt = padded(some_ids(5, 3), 6, "left")
  own = np.random.default_rng(0).integers(0, TINY.vocab, (2, 4, 5))
  return jax.jit(policy.response_logp)(params, *prompt, jnp.asarray(own))[0]


def drawn(policy, params):
  prompts = [[1, 2, 3, 4, 5], [6, 7, 8]]
  how = dict(n=4, max_new_tokens=5)
  return sampler.sample(policy, params, prompts, jax.random.key(1), **how)


@pytest.mark.parametrize("base", [TINY, BF16, GEMMA2, EXPERTS])
def test_an_adapter_that_is_0_changes_no_bit(base):
  policy = adapted(base)
  params, plain = policy.init(jax.random.key(0)), base.init(jax.random.key(0))
  trained, frozen = adapters.split(params)
  chex.assert_trees_all_equal(frozen, plain)
  chex.assert_trees_all_equal(adapters.join(trained, frozen), params)
  for leaves in trained["blocks"].values():
    a, b = leaves["lora_a"], leaves["lora_b"]
    inputs = math.prod(a.shape[1:-1])
    assert not b.any() and 0.8 < jnp.abs(a).max() * inputs**0.5 <= 1.0
  assert adapters.split(plain) == (plain, {})
  np.testing.assert_array_equal(logp(policy, params), logp(base, plain))
  if base in (TINY, BF16):
    chex.assert_trees_all_equal(drawn(policy, params), drawn(base, plain))


@pytest.mark.parametrize("base", [TINY, GEMMA2, EXPERTS])
def test_a_merged_adapter_is_the_adapter(base):
  policy = adapted(base)
  params, plain = shaken(policy), adapters.alone(policy)
  assert plain == base
  got, merged = logp(policy, params), adapters.merged(policy, params)
  assert jax.tree.structure(merged) == jax.tree.structure(base.shapes)
  chex.assert_trees_all_equal(policy.cast(params), merged)
  want = logp(plain, merged)
  np.testing.assert_allclose(got, want, atol=1e-5 * jnp.abs(want).max())
  off = adapters.split(params)[1]  # switched off
  np.testing.assert_array_equal(logp(policy, off), logp(plain, off))
  assert jnp.abs(got - logp(plain, off)).max() > 0.1
  if base == TINY:
    ours, theirs = drawn(policy, params), drawn(plain, merged)
    chex.assert_trees_all_close(ours, theirs, atol=1e-5)


LORA = adapted(POLICY)


def start(seed=0):
  """The policy of update_cases with an adapter in which nothing is 0."""
  noise = np.random.default_rng(seed).normal
  some = lambda x: jnp.asarray(0.3 * noise(size=x.shape), jnp.float32)
  trained = jax.tree.map(some, adapters.split(LORA.shapes)[0])
  return adapters.join(trained, weights())


def numbers(tree):
  return sum(x.size for x in jax.tree.leaves(tree))


def test_the_gradient_is_that_of_the_merged_weights():
  """With dA = s G B' and dB = s A' G, G the gradient of W + s A B."""
  params, batches = start(), packed()
  got, stats = gradient(batches, params, LORA)
  grads, want = gradient(batches, adapters.merged(LORA, params))
  assert_close(stats.loss.value, want.loss.value)
  chain, s = {}, LORA.lora_scale
  for name, leaves in adapters.split(params)[0]["blocks"].items():
    a, b = leaves["lora_a"], leaves["lora_b"]
    G = grads["blocks"][name]["kernel"]
    flat = G.reshape(len(G), math.prod(a.shape[1:-1]), -1)
    A, B = a.reshape(len(a), -1, 3), b.reshape(len(b), 3, -1)
    da = s * jnp.einsum("lio,lro->lir", flat, B)
    db = s * jnp.einsum("lir,lio->lro", A, flat)
    chain[name] = {"lora_a": da.reshape(a.shape), "lora_b": db.reshape(b.shape)}
  assert_close(got, {"blocks": chain}, 2e-5)
  assert len(stats.finite) == 14


def steps(mesh=None, count=2, **how):
  """The state after updates, and statistics of the last."""
  mesh = mesh or machine().mesh
  layout = functools.partial(update_cases.Blocks, devices=meshes.of(mesh).rows)
  policy = dataclasses.replace(LORA, mesh=mesh)
  params = jax.device_put(start(), sharding.param_shardings(start(), mesh))
  state = states.initial_state(
    params, TX, mesh, keep_reference=False, offload="nothing"
  )
  watch = jax.tree_util.Partial(lambda p: optax.tree.norm(p, squared=True))
  for _ in range(count):
    batches = update_cases.placed(mesh, blocks=8, layout=layout)
    state, stats = update.minibatch_step(state, batches, tx=TX,
      response_logp=policy.response_logp, objective=update_cases.OBJECTIVE,
      watch=watch, **how)  # fmt: skip
  return jax.device_get(state), stats


def test_only_the_adapter_moves_and_has_moments():
  state, stats = steps()
  trained, frozen = adapters.split(state.params)
  chex.assert_trees_all_equal(frozen, weights())
  moved = jax.tree.map(
    lambda x, y: np.abs(x - y).max(), trained, adapters.split(start())[0]
  )
  assert min(jax.tree.leaves(moved)) > 1e-3
  assert numbers(state.opt) == 2 * numbers(trained) + 1
  assert abs(float(stats.watched)) > 0.0 and not stats.skipped
  bad = dataclasses.replace(stats, finite=jnp.arange(14) != 13)
  with refuses(FloatingPointError, "blocks/v/lora_b is not finite"):
    update.skipped([bad], state.params, 1)
  kept, _ = steps(most_norm=0.0)
  chex.assert_trees_all_equal(kept.params, start())


@pytest.mark.parametrize("axes", [dict(tensor=2, fsdp=4), dict(fsdp=8)])
def test_devices_change_nothing(axes):
  got, _ = steps(meshes.make_mesh(**axes))
  want, _ = steps()
  chex.assert_trees_all_close(got.params, want.params, atol=2e-4)


def test_devices_draw_the_same_adapter():
  policy, plain = adapted(SMALL), SMALL.init(jax.random.key(0))
  made = []
  for mesh in (machine().mesh, meshes.make_mesh(fsdp=4, tensor=2)):
    at = jax.device_put(plain, sharding.param_shardings(plain, mesh))
    made.append(adapters.attached(policy, at, mesh, 5))
    assert adapters.attached(SMALL, at, mesh, 5) is at
  chex.assert_trees_all_equal(*map(jax.device_get, made))
  other = adapters.attached(policy, at, mesh, 6)
  a, b = (x["blocks"]["q"]["lora_a"] for x in (other, made[1]))
  assert (a != b).all()
  one = made[1]["blocks"]  # of modules with the same inputs, too
  assert (one["gate"]["lora_a"] != one["up"]["lora_a"]).all()


def test_a_checkpoint_holds_the_adapter_alone(tmp_path):
  state, _ = steps(count=1)
  how = dict(keep=1, run="mine", part=states.saved, whole=states.restored)
  open_store = functools.partial(checkpoints.Store, tmp_path / "run", **how)
  store = open_store()
  store.save(0, state, {"tokens": 1})
  store.close()
  record = json.loads((tmp_path / "run/0/extra/metadata").read_text())
  sizes = [json.loads(x[x.index("[") :]) for x in record["leaves"].values()]
  trained = adapters.split(state.params)[0]
  # With the moments, and two counts.
  assert sum(map(math.prod, sizes)) == 3 * numbers(trained) + 2
  got, _ = open_store().restore(like := begun(start(1)))
  assert all(x.is_deleted() for x in jax.tree.leaves(like.opt))
  chex.assert_trees_all_equal(got, state)
  other = adapted(POLICY, rank=2).init(jax.random.key(0))
  with refuses(checkpoints.Unusable, "blocks/down/lora_a is ... but this run"):
    open_store().restore(begun(other))


def begun(params) -> State:
  return states.init_state(params, TX, keep_reference=False)


def test_the_reference_is_the_adapter_switched_off():
  state, seen = begun(start()), []
  score = lambda at, batch: seen.append(at) or jnp.zeros_like(batch.mask, float)
  mesh = machine().mesh
  for kl_term in (True, False):
    parts = [update_cases.plan_of().later]
    parts = update.scored(parts, state, mesh, logp_of=score, kl_term=kl_term)
    assert (parts[0][0].make(slice(None)).logp_ref is not None) == kl_term
  assert len(seen) == len(packed())
  chex.assert_trees_all_equal(seen[0], weights())


FIELDS = dict(lora_rank=4, reset_every=0)


def test_a_run_of_lora_is_resolved():
  this, full = resolved(**FIELDS, lora_alpha=2.0), resolved()
  assert (this.policy.lora_rank, this.policy.lora_scale) == (4, 0.5)
  assert full.keep_reference and not this.keep_reference
  assert adapters.alone(this.policy) == full.policy
  assert this.phases[0].trainer.lora_layers == LORA_LAYERS


@pytest.mark.parametrize("policy, how, line", [
  (TINY, dict(rank=9), "lora_rank = 9 must be at most 8, the ... side of 'k'"),
  (TINY, dict(rank=17, layers=("gate",)), "at most 16 ... side of 'gate'"),
  (EXPERTS, {}, "config.policy.lora_layers = ... must be without gate, up, "),
])  # fmt: skip
def test_an_adapter_that_cannot_be_is_refused(policy, how, line):
  how = dict(rank=2, alpha=1.0, layers=LORA_LAYERS) | how  # fits
  with refuses(ValueError, line):
    adapters.adapted(policy, **how)


def test_memory_is_planned_for_an_adapter():
  """The state is what training makes; gradients are of the adapter alone."""
  policy, c = adapted(SMALL, rank=16), config(**FIELDS)
  plans = planned(c, policy, keep_reference=False)
  state = begun(policy.init(jax.random.key(0)))
  # A run's schedule counts its updates too.
  assert plans.sampling_bytes == 4 * (numbers(state) + 1)
  trained, frozen = adapters.split(policy.shapes)
  assert plans.update.gradient_bytes == 4 * numbers(trained)
  full = planned(c, keep_reference=False)
  work = lambda p: p.rollouts.load.stages(1, 1)["prefilling"]["work"]
  want = pytest.approx(4.4 * numbers(frozen), rel=1e-3)
  assert work(plans) - work(full) == want


def exported(folder, policy=LORA):
  folder.mkdir()
  huggingface.save(folder / "base", POLICY, weights())
  huggingface.save_adapter(
    folder / "adapter", policy, start(), base=str(folder / "base")
  )
  return folder


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers
def test_peft_reads_the_adapter(tmp_path):
  torch, peft = map(pytest.importorskip, ("torch", "peft"))
  import transformers

  at = exported(tmp_path / "run")
  base = transformers.AutoModelForCausalLM.from_pretrained(at / "base")
  theirs = peft.PeftModel.from_pretrained(base, str(at / "adapter"))
  tokens = np.random.default_rng(0).integers(1, POLICY.vocab, (3, 9))
  with torch.no_grad():
    want = theirs(torch.tensor(tokens)).logits.numpy()
    with theirs.disable_adapter():
      off = theirs(torch.tensor(tokens)).logits.numpy()
  got = LORA.logits(start(), jnp.asarray(tokens), jnp.ones((3, 9), bool))
  np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
  assert np.abs(off - want).max() > 0.1


def test_an_adapter_is_written_with_the_names_of_peft(tmp_path):
  at = exported(tmp_path / "run") / "adapter"
  config = json.loads((at / "adapter_config.json").read_text())
  assert config["base_model_name_or_path"] == str(tmp_path / "run" / "base")
  assert (config["r"], config["lora_alpha"]) == (3, 6.0)
  assert config["target_modules"][::4] == ["q_proj", "gate_proj"]
  found = safetensors.numpy.load_file(at / "adapter_model.safetensors")
  o = "base_model.model.model.layers.1.self_attn.o_proj.lora_A.weight"
  want = start()["blocks"]["o"]["lora_a"][1].reshape(-1, 3).T
  np.testing.assert_array_equal(found[o], want)
  assert len(found) == 2 * 7 * 2
  hub = tmp_path / "hub"
  huggingface.save_adapter(hub, LORA, start(), base="some/model@v2")
  config = json.loads((hub / "adapter_config.json").read_text())
  named = config["base_model_name_or_path"], config["revision"]
  assert named == ("some/model", "v2")


def test_a_base_that_changed_is_refused():
  there = pathlib.Path("there")
  saved = checkpoint_source.base_digest(there, weights(), None)
  assert checkpoint_source.base_digest(there, weights(), saved) == saved
  with refuses(ValueError, "there: ... has changed since this run began"):
    checkpoint_source.base_digest(there, weights(1), saved)
