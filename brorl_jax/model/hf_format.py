"""How a policy looks in a Hugging Face directory: config.json, tensor names."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from brorl_jax.model.spec import PolicySpec


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """A file that holds one JSON object.

  Raises:
    ValueError: It does not.
  """
  try:
    value = json.loads(path.read_text())
  except (OSError, ValueError, RecursionError) as e:
    raise ValueError(f"{path} cannot be read: {e}") from None
  if not isinstance(value, dict):
    raise ValueError(f"{path} is not a JSON object")
  return value


def _qwen2(policy: PolicySpec) -> dict[str, Any]:
  return {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": policy.vocab,
    "hidden_size": policy.width,
    "intermediate_size": policy.mlp,
    "num_hidden_layers": policy.layers,
    "num_attention_heads": policy.heads,
    "num_key_value_heads": policy.kv_heads,
    "head_dim": policy.head_size,
    "hidden_act": "silu",
    "max_position_embeddings": policy.max_positions,
    "rms_norm_eps": policy.norm_eps,
    "rope_theta": policy.rope.theta,
    "rope_parameters": {
      "rope_theta": policy.rope.theta,
      "rope_type": policy.rope.kind,
    },
    "tie_word_embeddings": policy.tied,
    "use_sliding_window": False,
    "attention_dropout": 0.0,
  }


def config_of(policy: PolicySpec, dtype: str) -> dict[str, Any]:
  """config.json in the spelling of transformers 5 and of 4, and so of vLLM.

  Args:
    policy: From `read_policy`, or made by hand as a Qwen2.
    dtype: Of the weights beside it.
  """
  fields = json.loads(policy.origin) if policy.origin else _qwen2(policy)
  fields.pop("auto_map", None)  # points to code that does not come along
  fields |= {"dtype": dtype, "torch_dtype": dtype}
  if "num_local_experts" in fields:  # so transformers 5
    fields["num_experts"] = fields["num_local_experts"]
  rope = fields.get("rope_parameters")
  if rope is None:  # written by transformers 4
    scaling = fields.get("rope_scaling") or {}
    if fields["model_type"] == "gemma3_text":
      theta = fields.get("rope_theta", 1e6)
      local = fields.get("rope_local_base_freq", 1e4)
      rope = {
        "full_attention": _new(scaling, theta),
        "sliding_attention": _new({}, local),
      }
    else:
      rope = _new(scaling, fields.get("rope_theta", 10000.0))
    return fields | {"rope_parameters": rope}
  full = rope.get("full_attention", rope)
  fields["rope_theta"] = full.get("rope_theta", fields.get("rope_theta"))
  if "sliding_attention" in rope:
    local = rope["sliding_attention"]["rope_theta"]
    fields["rope_local_base_freq"] = local
  if full.get("rope_type", "default") != "default":
    fields["rope_scaling"] = full | {"type": full["rope_type"]}
  return fields


def _new(scaling: Mapping[str, Any], theta: int | float) -> dict[str, Any]:
  kind = scaling.get("rope_type", scaling.get("type", "default"))
  return {**scaling, "rope_type": kind, "rope_theta": theta}


def tensor_name(keys: tuple[str, ...], policy: PolicySpec) -> str:
  """What a parameter is called in the files; {layer} and {expert} are open."""
  if keys[0] != "blocks":
    return _OUTSIDE["/".join(keys)]
  norms = _NORMS | (_POST_NORMS if policy.post_norms else {})
  module, kind = keys[1:]
  if module in norms:
    name = f"{norms[module]}.weight"
  else:
    name = f"{_MODULES[module]}.{'weight' if kind == 'kernel' else kind}"
  return f"model.layers.{{layer}}.{name}"


_OUTSIDE = {
  "embed/embedding": "model.embed_tokens.weight",
  "ln_final/scale": "model.norm.weight",
  "head/kernel": "lm_head.weight",
}


_NORMS = {
  "ln_attn": "input_layernorm",
  "ln_mlp": "post_attention_layernorm",
  "ln_q": "self_attn.q_norm",
  "ln_k": "self_attn.k_norm",
}


_POST_NORMS = {
  "ln_attn_out": "post_attention_layernorm",
  "ln_mlp": "pre_feedforward_layernorm",
  "ln_mlp_out": "post_feedforward_layernorm",
}


_MODULES = {
  "q": "self_attn.q_proj",
  "k": "self_attn.k_proj",
  "v": "self_attn.v_proj",
  "o": "self_attn.o_proj",
  "gate": "mlp.gate_proj",
  "up": "mlp.up_proj",
  "down": "mlp.down_proj",
  "router": "mlp.gate",
  "expert_gate": "mlp.experts.{expert}.gate_proj",
  "expert_up": "mlp.experts.{expert}.up_proj",
  "expert_down": "mlp.experts.{expert}.down_proj",
}
