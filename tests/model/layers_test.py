"""Layers: their first parameters, and their products on a CPU."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from small_policies import EXPERTS, GEMMA2, TINY

from brorl_jax.model import layers
from brorl_jax.model.target import Target


def test_on_a_cpu_bfloat16_is_multiplied_into_float32_and_rounded_once():
  rng = np.random.default_rng(0)
  half = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
  x, kernel, g = half(5, 300), half(300, 2, 3), half(5, 2, 3)
  wide = lambda x: np.asarray(x, np.float64)
  spec = "nd,dhk->nhk"
  form = functools.partial(layers._product, Target("cpu", 1, 0), spec)
  got = form(x, kernel)
  want = np.einsum(spec, wide(x), wide(kernel))
  assert got.dtype == jnp.bfloat16
  close = functools.partial(np.testing.assert_allclose, rtol=2**-8)
  close(wide(got), want, atol=1e-4)
  _, pull = jax.vjp(form, x, kernel)
  for at, got, transposed in (
    ((g, kernel), pull(g)[0], "nhk,dhk->nd"),
    ((x, g), pull(g)[1], "nd,nhk->dhk"),
  ):
    close(wide(got), np.einsum(transposed, *map(wide, at)), atol=0.02)


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
  up, gate = (
    params["blocks"]["up"]["kernel"],
    params["blocks"]["gate"]["kernel"],
  )
  assert jnp.all(up[0] != up[1]) and jnp.mean(up == gate) < 0.01
  embed = params["embed"]["embedding"]
  assert jnp.mean(embed == params["head"]["kernel"].T) < 0.01
  again = policy.init(jax.random.key(1))
  chex.assert_trees_all_equal(again, params)
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


@pytest.mark.parametrize(
  "policy", [TINY, tiers.at_night(GEMMA2)], ids=["TINY", "GEMMA2"]
)
def test_an_accelerator_feeds_forward_a_few_tokens_at_a_time(
  policy, monkeypatch
):
  gpu = dataclasses.replace(policy, target=Target("gpu", 1, 0))
  params = policy.init(jax.random.key(0))
  tokens = jax.random.randint(jax.random.key(1), (2, 7), 0, policy.vocab)
  mask = jnp.ones(tokens.shape, bool)

  def out(policy):
    total = lambda params: jnp.sum(policy.logits(params, tokens, mask) ** 2)
    return jax.value_and_grad(total)(params)

  seen, form = [], layers.products.in_tiles

  def watched(f, x, **sizes):
    seen.append((len(x), sizes))
    return form(f, x, **sizes)

  want = out(gpu)
  monkeypatch.setattr(layers, "TILE", 6)
  monkeypatch.setattr(layers.products, "in_tiles", watched)
  got = out(gpu)
  assert (14, {"prompts": 2, "most": 3}) in seen
  chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-5)
