"""What a policy looks like in a directory: its config and tensor names."""

import dataclasses

import jax
import pytest
from hub_configs import HUB, QWEN, SAME, but, new, old, read

from brorl_jax.model import hf_format
from brorl_jax.model.policy import Policy
from brorl_jax.model.spec import Rope


@pytest.mark.parametrize("spelling", [old, new])
@pytest.mark.parametrize("name", HUB)
def test_what_is_written_is_read_by_both_generations(tmp_path, name, spelling):
  config, want = HUB[name]
  source = spelling(config)
  policy = read(tmp_path, source)
  fields = hf_format.config_of(policy, "float16")
  assert fields["dtype"] == fields["torch_dtype"] == "float16"
  kept = source.keys() - {"dtype", "torch_dtype"}
  assert {k: fields[k] for k in kept} == {k: source[k] for k in kept}
  for view in (dict, old, new):
    assert read(tmp_path / view.__name__, view(fields)) == want
  # By name, as readers know them that are not transformers.
  assert fields["rope_theta"] == want.rope.theta
  rope = fields["rope_parameters"]
  if want.sliding_rope is not None:
    assert fields["rope_local_base_freq"] == want.sliding_rope.theta
    assert rope["sliding_attention"] == {
      "rope_type": "default",
      "rope_theta": want.sliding_rope.theta,
    }
    rope = rope["full_attention"]
  assert rope["rope_theta"] == want.rope.theta
  assert rope["rope_type"] == want.rope.kind
  scaling = fields.get("rope_scaling") or {}
  if want.rope.kind == "default":
    assert not scaling
  else:
    kind = scaling.get("type", scaling.get("rope_type"))
    assert kind == want.rope.kind
    assert scaling["factor"] == rope["factor"] == want.rope.factor
    assert spelling is old or scaling["type"] == scaling["rope_type"]


@pytest.mark.parametrize("tied", [False, True])
def test_a_policy_made_by_hand_is_written_as_a_qwen2(tmp_path, tied):
  policy = Policy(
    vocab=32, width=16, layers=2, heads=4, kv_heads=2, head_size=6, mlp=20,
    rope=Rope(3e4), norm_eps=1e-5, tied=tied, qkv_bias=True, max_positions=77,
  )  # fmt: skip
  fields = hf_format.config_of(policy, "bfloat16")
  assert fields["architectures"] == ["Qwen2ForCausalLM"]
  assert fields["dtype"] == fields["torch_dtype"] == "bfloat16"
  for view in (dict, old, new):
    assert read(tmp_path, view(fields)) == policy


def names_of(policy):
  """Parameter to tensor, both in full."""
  abstract = jax.eval_shape(policy.init, jax.random.key(0))
  paths = [p for p, _ in jax.tree_util.tree_leaves_with_path(abstract)]
  keys = [tuple(key.key for key in path) for path in paths]
  return {"/".join(k): hf_format.tensor_name(k, policy) for k in keys}


COMMON = {
  "embed/embedding": "model.embed_tokens.weight",
  "ln_final/scale": "model.norm.weight",
  "blocks/ln_attn/scale": "model.layers.{layer}.input_layernorm.weight",
  "blocks/q/kernel": "model.layers.{layer}.self_attn.q_proj.weight",
  "blocks/k/kernel": "model.layers.{layer}.self_attn.k_proj.weight",
  "blocks/v/kernel": "model.layers.{layer}.self_attn.v_proj.weight",
  "blocks/o/kernel": "model.layers.{layer}.self_attn.o_proj.weight",
}


NORM = {
  "blocks/ln_mlp/scale": "model.layers.{layer}.post_attention_layernorm.weight"
}


QK_NORM = {
  "blocks/ln_q/scale": "model.layers.{layer}.self_attn.q_norm.weight",
  "blocks/ln_k/scale": "model.layers.{layer}.self_attn.k_norm.weight",
}


MLP = {
  "blocks/gate/kernel": "model.layers.{layer}.mlp.gate_proj.weight",
  "blocks/up/kernel": "model.layers.{layer}.mlp.up_proj.weight",
  "blocks/down/kernel": "model.layers.{layer}.mlp.down_proj.weight",
}


HEAD = {"head/kernel": "lm_head.weight"}


def test_tensors_of_llama_and_qwen():
  biases = {
    f"blocks/{name}/bias": f"model.layers.{{layer}}.{there}_proj.bias"
    for name, there in (
      ("q", "self_attn.q"), ("k", "self_attn.k"), ("v", "self_attn.v"),
      ("o", "self_attn.o"), ("gate", "mlp.gate"), ("up", "mlp.up"),
      ("down", "mlp.down"),
    )
  }  # fmt: skip
  policy = dataclasses.replace(SAME, output_bias=True, mlp_bias=True)
  assert names_of(policy) == COMMON | NORM | MLP | HEAD | biases
  policy = dataclasses.replace(SAME, qkv_bias=False, qk_norm=True, tied=True)
  assert names_of(policy) == COMMON | NORM | MLP | QK_NORM


def test_tensors_of_gemma():
  """A name that means the norm before the feed-forward elsewhere."""
  norms = {
    f"blocks/{ours}/scale": f"model.layers.{{layer}}.{there}_layernorm.weight"
    for ours, there in (
      ("ln_attn_out", "post_attention"),
      ("ln_mlp", "pre_feedforward"),
      ("ln_mlp_out", "post_feedforward"),
    )
  }
  policy = dataclasses.replace(
    SAME, qkv_bias=False, tied=True, post_norms=True, qk_norm=True
  )
  assert names_of(policy) == COMMON | norms | MLP | QK_NORM


def test_tensors_of_experts():
  mlp = {
    "blocks/router/kernel": "model.layers.{layer}.mlp.gate.weight",
    **{
      f"blocks/expert_{name}/kernel": (
        f"model.layers.{{layer}}.mlp.experts.{{expert}}.{name}_proj.weight"
      )
      for name in ("gate", "up", "down")
    },
  }
  policy = dataclasses.replace(
    SAME, qkv_bias=False, qk_norm=True, experts=4, experts_per_token=2
  )
  assert names_of(policy) == COMMON | NORM | QK_NORM | mlp | HEAD


def test_code_of_the_source_is_not_written_on(tmp_path):
  auto = {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}
  policy = read(tmp_path, but(QWEN, **auto))
  assert "auto_map" not in hf_format.config_of(policy, "float32")
