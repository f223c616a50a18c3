"""Small models in the format of Hugging Face, and damage to them."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from messages import mentions

from brorl_jax.model import architectures, huggingface
from brorl_jax.model.policy import Policy
from brorl_jax.model.spec import Rope

TINY = Policy(vocab=32, width=16, layers=2, heads=4, kv_heads=2, head_size=6,
  mlp=20, rope=Rope(1e4), norm_eps=1e-5, tied=False, qkv_bias=True)  # fmt: skip


# Every axis divides by 8, or is not spread.
WIDE = dataclasses.replace(TINY, heads=4, kv_heads=4, mlp=32)
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
Q = "model.layers.1.self_attn.q_proj.weight"


def random_params(policy=TINY):
  """No jitted init: what matters is that all numbers differ."""
  rng = np.random.default_rng(0)
  abstract = jax.eval_shape(policy.init, jax.random.key(0))
  return jax.tree.map(
    lambda a: jnp.asarray(rng.normal(size=a.shape), jnp.float32), abstract
  )


def same(got, want):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_array_equal(a, b)
    assert a.dtype == b.dtype


def edit(directory, **fields):
  path = directory / "config.json"
  config = json.loads(path.read_text()) | fields
  config = {k: v for k, v in config.items() if v is not None}
  path.write_text(json.dumps(config))


def rewrite(directory, change):
  tensors = safetensors.numpy.load_file(directory / WEIGHTS)
  change(tensors)
  safetensors.numpy.save_file(tensors, directory / WEIGHTS)


def split(directory, files=3):
  tensors = safetensors.numpy.load_file(directory / WEIGHTS)
  (directory / WEIGHTS).unlink()
  where = {}
  for i in range(files):
    name = f"model-{i + 1:05}-of-{files:05}.safetensors"
    part = {k: tensors[k] for k in sorted(tensors)[i::files]}
    safetensors.numpy.save_file(part, directory / name)
    where |= dict.fromkeys(part, name)
  index = {"metadata": {"total_size": 0}, "weight_map": where}
  (directory / INDEX).write_text(json.dumps(index))
  return where


def refused(directory, *parts):
  with pytest.raises(ValueError) as e:
    huggingface.load(directory)
  message = str(e.value)
  assert "\n" not in message, message
  for part in parts:
    assert str(part) in message or mentions(message, str(part)), message


MOE = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
  head_dim=6, num_key_value_heads=4, moe_intermediate_size=8,
  num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
  vocab_size=32, rms_norm_eps=1e-6, rope_theta=1e4, model_type="qwen3_moe",
  decoder_sparse_step=1, mlp_only_layers=[], attention_bias=True)  # fmt: skip


def routed(directory):
  directory.mkdir()
  (directory / "config.json").write_text(json.dumps(MOE))
  policy = architectures.read_policy(directory, dtype="float32")
  params = random_params(policy)
  huggingface.save(directory, policy, params, shard_bytes=6000)
  return policy, params
