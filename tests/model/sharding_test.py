"""Tests of brorl_jax/model/sharding.py."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from messages import refuses
from small_policies import changed

from brorl_jax.config.run import LORA_LAYERS
from brorl_jax.many import meshes
from brorl_jax.model import adapters, sharding
from brorl_jax.model.policy import Policy
from brorl_jax.model.spec import Rope

POLICY = Policy(vocab=32, width=16, layers=3, heads=4, kv_heads=2, head_size=6,
  mlp=20, rope=Rope(1e4), norm_eps=1e-6, tied=False, qkv_bias=True)  # fmt: skip
# Every parameter that a policy may have is in one of these.
ALL = dataclasses.replace(
  POLICY, output_bias=True, mlp_bias=True, qk_norm=True, post_norms=True
)
EXPERTS = dataclasses.replace(ALL, experts=8, experts_per_token=2)
LORA = adapters.adapted(POLICY, 5, 1.0, LORA_LAYERS)
POLICIES = {"plain": POLICY, "all": ALL, "experts": EXPERTS, "lora": LORA}


@pytest.fixture
def mesh():
  return meshes.make_mesh(fsdp=4, tensor=2)


def leaf(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def abstract(policy=POLICY):
  return jax.eval_shape(policy.init, jax.random.key(0))


def named(tree):
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  path = lambda keys: jax.tree_util.keystr(keys, simple=True, separator="/")
  return {path(keys): leaf for keys, leaf in leaves}


def test_every_parameter_of_a_policy_matches_exactly_one_rule():
  names = set()
  for policy in POLICIES.values():
    for tied in (False, True):
      names |= set(named(abstract(dataclasses.replace(policy, tied=tied))))
  assert len(names) == 15 + 4 + 4 + 4 + 14  # biases, norms, experts, LoRA
  for name in names:
    hits = [r for r, _ in sharding.PARAM_AXES if re.fullmatch(r, name)]
    assert len(hits) == 1, (name, hits)
  axes = {axis for _, axes in sharding.PARAM_AXES for axis in axes}
  assert axes == sharding.MESH_AXIS.keys()
  for rule, _ in sharding.PARAM_AXES:
    assert any(re.fullmatch(rule, name) for name in names), rule


def test_places_of_parameters(mesh):
  """Of each kind of axis; each device has whole experts, and scores all."""
  places = {}
  for policy in POLICIES.values():
    places |= named(sharding.param_shardings(abstract(policy), mesh))
  assert {place.mesh for place in places.values()} == {mesh}
  for name, spec in {
    "embed/embedding": P("tensor", "fsdp"),
    "blocks/q/kernel": P(None, "fsdp", "tensor"),
    "blocks/k/bias": P(None, "tensor"),
    "blocks/o/kernel": P(None, "tensor", None, "fsdp"),
    "blocks/down/kernel": P(None, "tensor", "fsdp"),
    "blocks/ln_q/scale": P(),
    "blocks/ln_attn/scale": P(None, "fsdp"),
    "head/kernel": P("fsdp", "tensor"),
    "blocks/router/kernel": P(None, "fsdp"),
    "blocks/expert_up/kernel": P(None, "tensor", "fsdp"),
    "blocks/expert_down/kernel": P(None, "tensor", None, "fsdp"),
  }.items():
    assert places[name].spec == spec, name


def test_more_devices_of_a_row_than_key_value_heads():
  """Axis `expert` cuts what `tensor` does, but for these."""
  mesh = meshes.make_mesh(tensor=2, expert=2)
  places = named(sharding.param_shardings(abstract(), mesh))
  specs = {name: place.spec for name, place in places.items()}
  both = ("tensor", "expert")
  assert specs["blocks/q/kernel"] == P(None, "fsdp", both)
  assert specs["blocks/k/kernel"] == P(None, "fsdp", "tensor")
  assert specs["blocks/v/bias"] == P(None, "tensor")
  assert specs["blocks/down/kernel"] == P(None, both, "fsdp")
  assert specs["embed/embedding"] == P(both, "fsdp")
  with refuses(ValueError, "8 devices ... mesh_tensor x mesh_expert = 4"):
    sharding.param_shardings(abstract(), meshes.make_mesh(tensor=4, expert=2))
  with pytest.raises(ValueError, match=r"blocks/k/bias.*mesh_tensor = 2"):
    sharding.param_shardings(abstract(), meshes.make_mesh(tensor=4))


@pytest.mark.parametrize("name", POLICIES)
def test_axes_have_the_sizes_that_they_are_named_for(name):
  """A rule that swaps two axes would name one of another size."""
  c = POLICIES[name]
  size = {
    "vocab": c.vocab, "width": c.width, "layer": c.layers, "heads": c.heads,
    "kv_heads": c.kv_heads, "head_size": c.head_size, "mlp": c.mlp,
  }  # fmt: skip
  if c.lora_rank:
    size["rank"] = c.lora_rank
  if c.experts:
    size |= {"expert": c.experts, "expert_mlp": size.pop("mlp")}
  assert len(set(size.values())) == len(size)
  size["router"] = c.experts  # the same number, placed otherwise
  used = set()
  for name, x in named(abstract(c)).items():
    axes = next(a for r, a in sharding.PARAM_AXES if re.fullmatch(r, name))
    assert tuple(size[axis] for axis in axes) == x.shape, name
    used |= set(axes)
  assert used == (size.keys() if c.experts else size.keys() - {"router"})


@pytest.mark.parametrize("params, message", [
  ({"blocks": {"qq": {"kernel": leaf(3, 8, 4, 2)}}},
    "blocks/qq/kernel (3, 8, 4, 2)"),
  ({"blocks": {"q": {"kernel": leaf(8, 4, 2)}}},
    "blocks/q/kernel (8, 4, 2) ... ('layer', 'width', 'heads', 'head_size')"),
  ({"blocks": {"q": {"kernel": leaf(3, 8, 3, 2)}}},
    "blocks/q/kernel (3, 8, 3, 2): 3 ... 2 ... 'tensor' ... mesh_tensor = 1"),
  ({"ln_final": {"scale": leaf(10)}},
    "ln_final/scale (10,): 10 ... 4 ... 'fsdp' ... mesh_fsdp = 2"),
])  # fmt: skip
def test_names_the_parameter_that_does_not_fit(mesh, params, message):
  with refuses(ValueError, message):
    sharding.param_shardings(params, mesh)


def test_moments_lie_where_their_parameters_lie(mesh):
  params = abstract()
  state = {
    "mu": params, "nu": (params, leaf()), "count": leaf(), "rest": leaf(5),
  }  # fmt: skip
  got = sharding.state_shardings(state, params, mesh)
  places = sharding.param_shardings(params, mesh)
  whole = jax.sharding.NamedSharding(mesh, P())
  want = {"mu": places, "nu": (places, whole), "count": whole, "rest": whole}
  assert jax.tree.structure(got) == jax.tree.structure(want)
  assert jax.tree.leaves(got) == jax.tree.leaves(want)


def test_host_arrays_become_global_arrays_in_order(mesh):
  host = np.arange(24, dtype=np.int32).reshape(1, 8, 3)
  spread = functools.partial(sharding.spread_rows, mesh, slice(0, 8), 8)
  out = spread(host)
  np.testing.assert_array_equal(sharding.to_host(out), host)
  assert out.sharding.spec == P(None, "fsdp") and out.dtype == np.int32
  for shard in out.addressable_shards:
    assert shard.data.shape == (1, 2, 3)
    row = int(np.argwhere(mesh.devices == shard.device)[0, 1])
    np.testing.assert_array_equal(shard.data, host[:, 2 * row : 2 * row + 2])
  assert spread(host[0, :, 0]).sharding.spec == P()
  assert spread(np.array(7)).item() == 7


@pytest.mark.parametrize(
  "axes", [dict(fsdp=4, tensor=2), dict(data=2, fsdp=2, expert=2)], ids=str
)
def test_shards_travel_in_the_dtype_of_products_and_sums_do_not(axes):
  mesh = meshes.make_mesh(**axes)
  rows = meshes.of(mesh).rows
  x = 1.0 + np.arange(32, dtype=np.float32).reshape(8, 4) / 1024
  scale = 1.0 + np.arange(8, dtype=np.float32) / 1024
  params = {"head": {"kernel": x}, "ln_final": {"scale": scale}}
  at = jax.device_put(params, sharding.param_shardings(params, mesh))
  # The slope of one device is 256, of the others 1: 256 + 1 is 256 in bfloat16.
  slope = np.where(np.arange(rows) == 0, 256.0, 1.0).astype(np.float32)

  def here(params, slope):
    whole = sharding.gathered(params, mesh, "bfloat16")
    total = sum(map(jnp.sum, jax.tree.leaves(whole)))
    return whole, slope * total

  def read(params):
    # Every device's copy, one behind the other.
    copies, each = sharding.over_rows(here, params, mesh)(slope)
    return jnp.sum(each), copies

  program = jax.jit(jax.value_and_grad(read, has_aux=True))
  (_, copies), grads = program(at)
  rounded = x.astype(jnp.bfloat16).astype(np.float32)
  assert (rounded != x).any()
  equal = np.testing.assert_array_equal
  equal(copies["head"]["kernel"], np.tile(rounded, (rows, 1)))
  equal(copies["ln_final"]["scale"], np.tile(scale, rows))
  for name, leaf in named(grads).items():
    equal(leaf, np.full(leaf.shape, 255.0 + rows))
    assert leaf.sharding == named(at)[name].sharding, name
  # Of the program as it is written: XLA's CPU compiler widens bfloat16.
  text = program.lower(at).as_text()
  sent = re.findall(r"all_gather.*-> tensor<[\dx]*x(\w+)>", text)
  summed = re.findall(
    r"reduce_scatter.*?\}\) : .*?-> tensor<[\dx]*x(\w+)>", text, re.DOTALL
  )
  assert sorted(sent) == ["bf16", "f32"] and summed == ["f32", "f32"]


def test_parameters_are_left_alone_where_no_device_lacks_them():
  params = {"ln_final": {"scale": jnp.arange(8.0)}}
  for mesh in (None, meshes.make_mesh(fsdp=1, tensor=8),
      meshes.make_mesh(fsdp=8)):  # fmt: skip
    assert sharding.gathered(params, mesh, "bfloat16") is params
  f = lambda params, x: params["ln_final"]["scale"] * x
  for mesh in (None, meshes.make_mesh(fsdp=1, tensor=8)):
    out = sharding.over_rows(f, params, mesh)(2.0)
    np.testing.assert_array_equal(out, 2.0 * np.arange(8))


@pytest.mark.ci
@pytest.mark.parametrize("name, dtype, tied", [
  tiers.at_night(("plain", "bfloat16", False)), ("experts", "float32", True),
])  # fmt: skip
def test_a_mesh_changes_no_gradient_of_any_parameter(mesh, name, dtype, tied):
  policy = dataclasses.replace(POLICIES[name], dtype=dtype, tied=tied)
  params = policy.init(jax.random.key(0))
  rng = np.random.default_rng(0)
  tokens = lambda *shape: jnp.asarray(rng.integers(1, 32, shape), jnp.int32)
  prompt, response = tokens(8, 5), tokens(8, 3, 7)
  mask = jnp.asarray(np.arange(5)[None] >= rng.integers(0, 5, (8, 1)))

  def slopes(policy, params):
    def total(params):
      logp, entropy = policy.response_logp(params, prompt, mask, response)
      return jnp.sum(logp) + 0.3 * jnp.sum(entropy)

    return named(jax.jit(jax.grad(total))(params))

  want = slopes(policy, params)
  at = jax.device_put(params, sharding.param_shardings(params, mesh))
  got = slopes(dataclasses.replace(policy, mesh=mesh), at)
  tolerance = 5e-6 if dtype == "float32" else 0.02
  for name, leaf in got.items():
    size = np.abs(want[name]).max()
    assert size > 0.0, name
    np.testing.assert_allclose(
      leaf, want[name], rtol=0, atol=tolerance * size, err_msg=name
    )


@pytest.mark.parametrize("prompts, rows, data, want", [
  (2, 16, 1, (1, 16, 2)),  # as they are
  (2, 16, 8, (4, 4, 8)), (3, 16, 8, (8, 2, 24)),
  (2, 10, 8, (4, 3, 8)),  # 2 rows too many of each prompt
  (1, 2, 8, (2, 1, 8)),  # 6 blocks too many
])  # fmt: skip
def test_rows_of_few_prompts_are_cut_into_blocks(prompts, rows, data, want):
  each, size, blocks = sharding.blocks(prompts, rows, data)
  assert (each, size, blocks) == want
  assert blocks % data == 0 and each * size >= rows


def test_heads_lie_apart_where_a_mesh_has_an_axis_for_them(mesh):
  make = lambda: sharding.heads_apart([jnp.zeros((3, 2, 4, 5))] * 2, axis=2)
  apart = jax.jit(jax.shard_map(make, mesh=mesh, in_specs=(),
      out_specs=P("fsdp"), axis_names={*meshes.ROWS}))()  # fmt: skip
  for x in apart:
    assert x.shape == (12, 2, 4, 5)
    assert x.sharding.shard_shape(x.shape) == (3, 2, 2, 5)
  assert [x.shape for x in make()] == [(3, 2, 4, 5)] * 2  # without a mesh


def test_a_process_has_its_own_mesh(monkeypatch):
  mesh = meshes.make_mesh(fsdp=2, tensor=4)
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  own = Mesh(mesh.devices[:, :1], meshes.NAMES)
  monkeypatch.setattr(Mesh, "local_mesh", property(lambda _: own))
  assert sharding.local_mesh(mesh) is own


def test_a_process_has_all_parameters_once(monkeypatch):
  """Devices 0 to 3 as one of two processes: shards of the other are dropped."""
  tensor = 2
  mesh = meshes.make_mesh(fsdp=8 // tensor, tensor=tensor)
  params = changed(vocab=40).init(jax.random.key(0))
  spread = jax.device_put(params, sharding.param_shardings(params, mesh))
  own = Mesh(mesh.devices[:, : 4 // tensor], meshes.NAMES)
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  make = jax.make_array_from_single_device_arrays

  def mine(shape, place, shards):
    here = [s for s in shards if next(iter(s.devices())) in own.devices]
    return make(shape, place, here)

  monkeypatch.setattr(jax, "make_array_from_single_device_arrays", mine)
  got = sharding.local_copy(spread, own)
  for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(got), strict=True):
    np.testing.assert_array_equal(a, b)
    assert b.sharding.mesh == own
