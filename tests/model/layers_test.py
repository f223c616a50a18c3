"""Layers: first parameters, products, experts, weights joined for decoding."""

import dataclasses
import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from small_policies import EXPERTS, GEMMA2, GEMMA3, TINY, changed, shaken

from brorl_jax.many import meshes
from brorl_jax.many.meshes import Axes
from brorl_jax.model import attention, layers, sharding
from brorl_jax.model.spec import Target

CPU, GPU = Target("cpu", 1, 0), Target("gpu", 1, 0)


@pytest.mark.ci
def test_initial_parameters_are_normal_with_standard_deviation_002():
  policy = dataclasses.replace(
    TINY, vocab=500, width=64, heads=8, kv_heads=4, head_size=8, mlp=96
  )
  params = policy.init(jax.random.key(1))
  kernels = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    assert leaf.dtype == jnp.float32
    if name.endswith("scale"):
      assert jnp.all(leaf == 1.0), name
    elif name.endswith("bias"):
      assert jnp.all(leaf == 0.0), name
    else:
      kernels[name] = np.asarray(leaf).ravel() / 0.02
  assert len(kernels) == 9
  for name, z in kernels.items():
    assert abs(z.mean()) < 5 / len(z) ** 0.5, name
    assert abs((z**2).mean() - 1) < 5 * (2 / len(z)) ** 0.5, name
    assert abs(z).max() > 3, name  # not truncated
  # No two layers and no two kernels start alike.
  up, gate = (params["blocks"][name]["kernel"] for name in ("up", "gate"))
  assert jnp.all(up[0] != up[1]) and jnp.mean(up == gate) < 0.01
  embed = params["embed"]["embedding"]
  assert jnp.mean(embed == params["head"]["kernel"].T) < 0.01
  chex.assert_trees_all_equal(policy.init(jax.random.key(1)), params)
  other = policy.init(jax.random.key(2))["embed"]["embedding"]
  assert jnp.all(jnp.any(other != embed, axis=1))


@pytest.mark.ci
def test_initial_parameters_of_every_option():
  """Norms multiply by 1 whatever is added to their scale."""
  policy = dataclasses.replace(
    GEMMA2, qk_norm=True, output_bias=True, mlp_bias=True, tied=False
  )
  blocks = policy.init(jax.random.key(0))["blocks"]
  norms = {name for name in blocks if name.startswith("ln_")}
  assert norms == {
    "ln_attn", "ln_attn_out", "ln_mlp", "ln_mlp_out", "ln_q", "ln_k",
  }  # fmt: skip
  for name in norms:
    np.testing.assert_array_equal(blocks[name]["scale"], 0.0)
  for name in ("o", "gate", "up", "down"):
    np.testing.assert_array_equal(blocks[name]["bias"], 0.0)
  gate = EXPERTS.init(jax.random.key(0))["blocks"]["expert_gate"]["kernel"]
  # No two experts start alike.
  assert len(np.unique(gate)) > 0.99 * gate.size


def test_a_weight_that_comes_first_gives_the_same_product():
  rng = np.random.default_rng(0)
  x, w = (jnp.float32(rng.normal(size=s)) for s in ((7, 16), (3, 16)))
  got = layers.weight_first(x, w)
  assert got.shape == (7, 3)
  # Turning back changes no bit.
  np.testing.assert_array_equal(got, layers._product(w, x).T)
  np.testing.assert_allclose(got, x @ w.T, rtol=1e-5, atol=1e-6)
  made = jax.make_jaxpr(layers.weight_first)(x, w)
  alone = "optimization_barrier"  # a loop of its own
  assert [str(e.primitive) for e in made.eqns] == [
    "dot_general", alone, "transpose", alone
  ]  # fmt: skip


def test_weights_come_first_for_few_rows_of_float32_on_a_cpu():
  rows = lambda n, dtype: jnp.zeros((n, 2), dtype)
  assert layers.few(rows(128, "float32"), CPU)
  assert not layers.few(rows(129, "float32"), CPU)
  assert not layers.few(rows(8, "bfloat16"), CPU)
  assert not layers.few(rows(8, "float32"), GPU)


@pytest.mark.parametrize("m, k, n", [(7, 5, 3), (64, 33, 16), (1, 4, 2)])
def test_a_product_in_half_precision_and_its_gradients(m, k, n):
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), "bfloat16")
  x, w, slope = draw(m, k), draw(k, n), draw(m, n).astype(jnp.float32)
  got, pull = jax.vjp(layers.half_dot, x, w)
  exact = lambda *a: np.matmul(*(np.asarray(y, np.float64) for y in a))
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, exact(x, w), rtol=1e-5, atol=1e-4)
  dx, dw = pull(slope)
  assert dx.dtype == dw.dtype == jnp.bfloat16
  near = functools.partial(np.testing.assert_allclose, rtol=2**-7, atol=0.1)
  near(np.asarray(dx, np.float64), exact(slope, w.T))
  near(np.asarray(dw, np.float64), exact(x.T, slope))
  np.testing.assert_array_equal(layers.turned(x), x.T)


def test_half_precision_is_multiplied_row_by_row_on_a_cpu():
  """What is fast: no product sees a transposed operand."""
  x, w = jnp.ones((64, 32), jnp.bfloat16), jnp.ones((32, 16), jnp.bfloat16)
  both = lambda x, w: jax.vjp(layers.half_dot, x, w)[1](jnp.ones((64, 16)))
  text = str(jax.make_jaxpr(both)(x, w))
  assert text.count("concatenate") == 2 and text.count("dot_general") == 3
  assert layers.half_on_cpu(x, CPU) and not layers.half_on_cpu(x, GPU)
  assert not layers.half_on_cpu(x.astype(jnp.float32), CPU)


def _gated(w):
  return lambda x: jnp.tanh(x @ w) * x


@pytest.mark.parametrize("most", [3, 4, 100])
def test_tiles_give_the_values_and_gradients_of_all_tokens_at_once(most):
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(14, 5)), jnp.float32)
  w = jnp.asarray(rng.normal(size=(5, 5)), jnp.float32)
  slope = jnp.asarray(rng.normal(size=x.shape), jnp.float32)

  def out(form):
    value, pull = jax.vjp(form, x, w)
    return value, *pull(slope)

  got = out(lambda x, w: layers.in_tiles(_gated(w), x, prompts=2, most=most))
  want = out(lambda x, w: _gated(w)(x))
  for one, other in zip(got, want, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("most", "tile"), [(7, 14), (6, 8)])
def test_no_more_tokens_than_asked_for_are_there_together(most, tile):
  seen = []

  def f(x):
    seen.append(x.shape)
    return x

  out = layers.in_tiles(f, jnp.ones((14, 5)), prompts=2, most=most)
  assert out.shape == (14, 5)
  assert set(seen) == {(tile, 5)}


def test_the_backward_pass_computes_a_tile_again_and_keeps_none():
  x, w = jnp.ones((64, 8)), jnp.ones((8, 8))
  total = lambda w: jnp.sum(layers.in_tiles(_gated(w), x, prompts=1, most=16))
  text = str(jax.make_jaxpr(jax.grad(total))(w))
  assert text.count("tanh") == 2  # kept, it would be there once


def test_an_accelerator_feeds_forward_a_few_tokens_at_a_time(monkeypatch):
  policy = TINY
  gpu = dataclasses.replace(policy, target=Target("gpu", 1, 0))
  params = policy.init(jax.random.key(0))
  tokens = jax.random.randint(jax.random.key(1), (2, 7), 0, policy.vocab)
  mask = jnp.ones(tokens.shape, bool)

  def out(policy):
    total = lambda params: jnp.sum(policy.logits(params, tokens, mask) ** 2)
    return jax.value_and_grad(total)(params)

  seen, form = [], layers.in_tiles

  def watched(f, x, **sizes):
    seen.append((len(x), sizes))
    return form(f, x, **sizes)

  want = out(gpu)
  monkeypatch.setattr(layers, "TILE", 6)
  monkeypatch.setattr(layers, "in_tiles", watched)
  got = out(gpu)
  assert (14, {"prompts": 2, "most": 3}) in seen
  chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-5)


# Sizes that are all different, so that no two axes can be swapped unnoticed.
n, D, E, F = 22, 16, 8, 12


def some(seed=0, tokens=n):
  rng = np.random.default_rng(seed)
  shapes = (tokens, D), (D, E), (E, D, F), (E, D, F), (E, F, D)
  return tuple(
    jnp.asarray(rng.normal(size=shape) / shape[-2] ** 0.5, jnp.float32)
    for shape in shapes
  )


def reference(x, router, gate, up, down, *, per_token, normalize):
  """One token and one expert at a time, in float64."""
  x, router, gate, up, down = (
    np.asarray(a, np.float64) for a in (x, router, gate, up, down)
  )
  out = np.zeros_like(x)
  for token, h in enumerate(x):
    share = np.exp(h @ router)
    share /= share.sum()
    chosen = np.argsort(-share, kind="stable")[:per_token]
    total = share[chosen].sum() if normalize else 1.0
    for e in chosen:
      g = h @ gate[e]
      y = (g / (1 + np.exp(-g)) * (h @ up[e])) @ down[e]
      out[token] += share[e] / total * y
  return out


@pytest.fixture(params=["sorted", "every expert", "by expert"])
def routed(request, monkeypatch):
  """The form of CPUs; those of others for few and, in blocks, for many."""
  monkeypatch.setattr(layers, "EVERY", n if request.param[0] == "e" else n - 1)
  monkeypatch.setattr(layers, "_UNIT", 4)
  target = CPU if request.param == "sorted" else GPU
  return functools.partial(
    layers.routed, per_token=2, normalize=True, target=target
  )


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("per_token", [1, 3])
def test_routing_is_a_loop_over_tokens_and_their_experts(
  per_token, normalize, routed
):
  args = some()
  options = {"per_token": per_token, "normalize": normalize}
  got = jax.jit(functools.partial(routed, **options))(*args)
  want = reference(*args, **options)
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * abs(want).max())
  assert got.dtype == jnp.float32


@pytest.mark.ci
def test_an_expert_that_no_token_chose_has_no_part_and_no_gradient(routed):
  x, router, *weights = some()
  x, router = jnp.abs(x), router.at[:, 5].set(-9.0)
  poisoned = [w.at[5].set(1e30) for w in weights]
  got, want = routed(x, router, *poisoned), routed(x, router, *weights)
  np.testing.assert_array_equal(got, want)
  loss = lambda *args: jnp.sum(routed(*args) ** 2)
  for grad in jax.grad(loss, argnums=(2, 3, 4))(x, router, *weights):
    moved = np.asarray(jnp.any(grad != 0.0, axis=(1, 2)))
    assert not moved[5] and moved[np.arange(E) != 5].sum() >= 3


def test_shares_are_float32_and_the_result_is_that_of_the_weights(routed):
  args = [a.astype(jnp.bfloat16) for a in some()]
  got = routed(*args)
  assert got.dtype == jnp.bfloat16
  want = reference(*args, per_token=2, normalize=True)
  np.testing.assert_allclose(np.float32(got), want, atol=0.02 * abs(want).max())


def gathered(text):
  """Elements of everything that is gathered or exchanged in a program."""
  moved = (
    r"= \(?\w+\[([\d,]*)\][^=]*? (?:all-gather|all-to-all|collective-permute)"
  )
  shapes = (m[1].split(",") for m in re.finditer(moved, text))
  return [math.prod(int(size) for size in shape if size) for shape in shapes]


@pytest.mark.perf
@pytest.mark.parametrize("kernel, down, router", [
  (P("tensor"), P("tensor"), P()),
  # As sharding.py has it: the width over the other axis.
  (P("tensor", "fsdp"), P("tensor", None, "fsdp"), P("fsdp")),
], ids=["by expert", "by expert and width"])  # fmt: skip
def test_experts_spread_over_devices_stay_where_they_are(
  kernel, down, router, routed
):
  mesh = meshes.make_mesh(fsdp=2, tensor=4)
  args = some(3)
  specs = P("fsdp"), router, kernel, kernel, down
  places = tuple(NamedSharding(mesh, spec) for spec in specs)
  spread = tuple(map(jax.device_put, args, places))
  run = functools.partial(routed, mesh=mesh)
  alone = functools.partial(routed, target=CPU)
  weight = np.random.default_rng(2).normal(size=(n, D)).astype(np.float32)
  slopes = lambda run: jax.grad(lambda *a: jnp.sum(weight * run(*a)), range(5))
  pairs = (run, alone, places[0]), (slopes(run), slopes(alone), places)
  for f, one, out in pairs:
    program = jax.jit(f, out_shardings=out).lower(*spread).compile()
    got, want = program(*spread), one(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      np.testing.assert_allclose(a, b, atol=1e-5)
    moved = gathered(program.as_text())
    # Tokens move, weights do not: not even the experts of one device. For few
    # rows it makes their width whole, and moves what is inside of them.
    most = E // (2 if layers.EVERY == n else 4) * D * F
    assert moved and max(moved) < most


POLICIES = {
  "bias": TINY, "bias everywhere": changed(mlp_bias=True, output_bias=True),
  "no bias": changed(qkv_bias=False),
  "norms of queries and keys": changed(qk_norm=True),
  "one query for each key": changed(heads=2), "gemma 2": GEMMA2,
  "gemma 3": GEMMA3, "experts": EXPERTS,
}  # fmt: skip


@pytest.mark.parametrize("target, changes, form", [
  (None, {}, "turned"), (None, {"dtype": "bfloat16"}, "trained"),
  (None, {"mlp_bias": True}, "trained"),
  (None, {"experts": 2, "experts_per_token": 1}, "trained"), (GPU, {}, "fused"),
])  # fmt: skip
def test_the_form_of_a_layer_follows_the_machine(target, changes, form):
  policy = changed(**changes)
  if target:
    policy = dataclasses.replace(policy, target=target)
  params = policy.init(jax.random.key(0))
  for layer in policy.unroll(params)["blocks"]:
    assert layers.layer_form(layer) == form
  stacked = jax.tree.map(lambda x: x[0], params["blocks"])
  assert layers.layer_form(stacked) == "trained"


@pytest.mark.parametrize("name", tiers.some(POLICIES, 2, 4))
def test_a_layer_computes_what_it_computed_before(name):
  policy = POLICIES[name]
  layer = jax.tree.map(lambda x: x[1], shaken(policy)["blocks"])
  fewer = layers.fused_layer(policy, layer)
  rng = np.random.default_rng(1)
  x = jnp.asarray(rng.normal(size=(2, 3, 1, policy.width)), jnp.float32)
  one = jnp.ones((2, 3), jnp.int32)
  (view, *_) = attention.slot_views(policy, one[:, None] > 0, 4 * one, one - 1)
  for whole, part in zip(layers.block(policy, layer).project(x, view),
      layers.block(policy, fewer).project(x, view), strict=True):  # fmt: skip
    np.testing.assert_allclose(part, whole, atol=2e-6)
  out = rng.normal(size=(2, 3, 1, policy.heads, policy.head_size))
  out = jnp.asarray(out, jnp.float32)
  want = layers.block(policy, layer).close(x, out)
  forms = [fewer]
  if not (policy.experts or policy.mlp_bias):
    forms.append(layers.turned_layer(layer))
  for form in forms:
    got = layers.block(policy, form).close(x, out)
    np.testing.assert_allclose(got, want, atol=2e-4)


def test_devices_that_share_key_value_heads_do_not_join_weights():
  params = shaken(TINY)
  on_gpu = dataclasses.replace(TINY, target=GPU)
  with jax.set_mesh(meshes.over([jax.devices()[:4]], Axes(tensor=2, expert=2))):
    assert "q" in on_gpu.unroll(params)["blocks"][0]


@pytest.mark.ci
def test_no_weight_leaves_its_device():
  policy = changed(vocab=38, target=GPU)
  params = shaken(policy)
  mesh = meshes.over([jax.devices()[:2]], Axes(tensor=2))
  params = jax.device_put(params, sharding.param_shardings(params, mesh))
  program = jax.jit(policy.unroll).lower(params).compile()
  text = program.as_text()
  assert "all-gather" not in text and "all-to-all" not in text
  layer = program.output_shardings["blocks"][0]
  shape = lambda name: layer[name]["kernel"].shard_shape
  assert shape("qkv")((16, 2, 5, 4)) == (16, 1, 5, 4)
  assert shape("gate_up")((16, 2, 20)) == (16, 2, 10)
