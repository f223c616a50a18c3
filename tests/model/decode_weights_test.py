"""Tests of brorl_jax/model/decode_weights.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from small_policies import EXPERTS, GEMMA2, GEMMA3, TINY, changed

from brorl_jax.many import meshes
from brorl_jax.many.meshes import Axes
from brorl_jax.model import decode_weights, layers, sharding, views
from brorl_jax.model.target import Target

GPU = Target("gpu", 1, 2**30)
POLICIES = {
  "bias": TINY, "bias everywhere": changed(mlp_bias=True, output_bias=True),
  "no bias": changed(qkv_bias=False),
  "norms of queries and keys": changed(qk_norm=True),
  "one query for each key": changed(heads=2), "gemma 2": GEMMA2,
  "gemma 3": GEMMA3, "experts": EXPERTS,
}  # fmt: skip


def drawn(policy):
  """Parameters of which no two are equal, biases and norms included."""
  rng = np.random.default_rng(0)
  params = policy.init(jax.random.key(0))
  noise = lambda x: x + jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype)
  return jax.tree.map(noise, params)


@pytest.mark.parametrize("rows", [3, 70])
def test_a_transposed_feed_forward_computes_the_same(rows):
  policy = changed(post_norms=True)
  layer = jax.tree.map(lambda x: x[1], drawn(policy)["blocks"])
  turned = decode_weights.turned(layer)
  assert turned["gate_rows"]["kernel"].shape == (policy.mlp, policy.width)
  assert not {"gate", "up", "down"} & turned.keys()
  rng = np.random.default_rng(1)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  x = draw(2, rows, 1, policy.width)
  out = draw(2, rows, 1, policy.heads, policy.head_size)
  np.testing.assert_allclose(
    layers.block(policy, turned).close(x, out),
    layers.block(policy, layer).close(x, out),
    atol=2e-4,
  )


@pytest.mark.parametrize(
  "target, changes, form",
  [
    (None, {}, "turned"),
    (None, {"dtype": "bfloat16"}, "trained"),
    (None, {"mlp_bias": True}, "trained"),
    (None, {"experts": 2, "experts_per_token": 1}, "trained"),
    (GPU, {}, "fused"),
  ],
)
def test_the_form_of_a_layer_follows_the_machine(target, changes, form):
  policy = changed(**changes)
  if target:
    policy = dataclasses.replace(policy, target=target)
  params = policy.init(jax.random.key(0))
  for layer in policy.unroll(params)["blocks"]:
    assert decode_weights.form(layer) == form
  stacked = jax.tree.map(lambda x: x[0], params["blocks"])
  assert decode_weights.form(stacked) == "trained"


@pytest.mark.parametrize("name", tiers.some(POLICIES, 3, 5))
def test_a_layer_computes_what_it_computed_before(name):
  policy = POLICIES[name]
  params = drawn(policy)
  layer = jax.tree.map(lambda x: x[1], params["blocks"])
  fewer = decode_weights.fused(policy, layer)
  rng = np.random.default_rng(1)
  x = jnp.asarray(rng.normal(size=(2, 3, 1, policy.width)), jnp.float32)
  one = jnp.ones((2, 3), jnp.int32)
  (view, *_) = views.of_slots(policy, one[:, None] > 0, 4 * one, one - 1)
  for whole, part in zip(
    layers.block(policy, layer).project(x, view),
    layers.block(policy, fewer).project(x, view),
    strict=True,
  ):
    np.testing.assert_allclose(part, whole, atol=2e-6)
  out = rng.normal(size=(2, 3, 1, policy.heads, policy.head_size))
  out = jnp.asarray(out, jnp.float32)
  np.testing.assert_allclose(
    layers.block(policy, fewer).close(x, out),
    layers.block(policy, layer).close(x, out),
    atol=1e-4,
  )


def test_which_weights_are_joined():
  layer = jax.tree.map(lambda x: x[0], drawn(TINY)["blocks"])
  fewer = decode_weights.fused(TINY, layer)
  assert fewer.keys() == layer.keys() - {*"qkv", "gate", "up"} | {
    "qkv", "gate_up"
  }  # fmt: skip
  D, H, G, K, F = (
    TINY.width, TINY.heads, TINY.kv_heads, TINY.head_size, TINY.mlp
  )  # fmt: skip
  kernel = fewer["qkv"]["kernel"]
  assert kernel.shape == (D, G, H // G + 2, K)
  # The second key/value head: its queries are heads 3 to 5 of 6.
  np.testing.assert_array_equal(kernel[:, 1, :3], layer["q"]["kernel"][:, 3:])
  np.testing.assert_array_equal(kernel[:, 1, 3], layer["k"]["kernel"][:, 1])
  np.testing.assert_array_equal(kernel[:, 1, 4], layer["v"]["kernel"][:, 1])
  np.testing.assert_array_equal(
    fewer["qkv"]["bias"][1, 3], layer["k"]["bias"][1]
  )
  assert fewer["gate_up"]["kernel"].shape == (D, 2, F)


def test_experts_stay_as_they_are():
  layer = jax.tree.map(lambda x: x[0], drawn(EXPERTS)["blocks"])
  fewer = decode_weights.fused(EXPERTS, layer)
  for name in ("router", "expert_gate", "expert_up", "expert_down"):
    assert fewer[name] is layer[name]
  assert "qkv" in fewer and "gate_up" not in fewer


def test_accelerators_decode_with_joined_weights_and_cpus_do_not():
  params = drawn(TINY)
  on_gpu = dataclasses.replace(TINY, target=GPU)
  assert "qkv" in on_gpu.unroll(params)["blocks"][0]
  assert "q" in TINY.unroll(params)["blocks"][0]
  mesh = meshes.over([jax.devices()[:4]], Axes(tensor=2, expert=2))
  with jax.set_mesh(mesh):  # of devices that share key/value heads
    assert "q" in on_gpu.unroll(params)["blocks"][0]
  assert len(on_gpu.unroll(params)["blocks"]) == TINY.layers


@pytest.mark.ci
def test_no_weight_leaves_its_device():
  policy = changed(vocab=38, target=GPU)
  params = drawn(policy)
  mesh = meshes.over([jax.devices()[:2]], Axes(tensor=2))
  params = jax.device_put(params, sharding.param_shardings(params, mesh))
  program = jax.jit(policy.unroll).lower(params).compile()
  text = program.as_text()
  assert "all-gather" not in text and "all-to-all" not in text
  layer = program.output_shardings["blocks"][0]
  shape = lambda name: layer[name]["kernel"].shard_shape
  assert shape("qkv")((16, 2, 5, 4)) == (16, 1, 5, 4)
  assert shape("gate_up")((16, 2, 20)) == (16, 2, 10)
