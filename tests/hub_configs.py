"""Configs as the hub has them, and the policies that they describe."""

import copy
import dataclasses
import json
import math

from transformers import CONFIG_MAPPING

from brorl_jax.model import architectures
from brorl_jax.model.policy import Policy
from brorl_jax.model.spec import Rope

# What the hub has, in the spelling of transformers 4.
QWEN25 = dict(
  architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_act="silu",
  hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
  num_attention_heads=12, num_key_value_heads=2, vocab_size=151936,
  max_position_embeddings=131072, max_window_layers=28, rms_norm_eps=1e-6,
  rope_theta=1000000.0, sliding_window=131072, use_sliding_window=False,
  tie_word_embeddings=True, attention_dropout=0.0, use_mrope=False,
  torch_dtype="bfloat16", bos_token_id=151643, eos_token_id=151643,
)  # fmt: skip

DISTILLED = QWEN25 | dict(
  rope_theta=10000, sliding_window=4096, max_window_layers=21,
  tie_word_embeddings=False,
)  # fmt: skip

QWEN25_LONG = QWEN25 | dict(rope_scaling=dict(
  type="yarn", factor=4.0, original_max_position_embeddings=32768
))  # fmt: skip

QWEN3 = dict(
  architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_act="silu",
  attention_bias=False, hidden_size=1024, intermediate_size=3072,
  num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
  head_dim=128, vocab_size=151936, max_position_embeddings=40960,
  max_window_layers=28, rms_norm_eps=1e-6, rope_scaling=None,
  rope_theta=1000000, sliding_window=None, use_sliding_window=False,
  tie_word_embeddings=True, torch_dtype="bfloat16",
)  # fmt: skip

QWEN3_MOE = QWEN3 | dict(
  architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe",
  hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
  num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4,
  num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
  decoder_sparse_step=1, mlp_only_layers=[], tie_word_embeddings=False,
  output_router_logits=False, router_aux_loss_coef=0.001,
)  # fmt: skip

LLAMA31 = dict(
  architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu",
  attention_bias=False, mlp_bias=False, hidden_size=4096,
  intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
  num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072,
  rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=False,
  rope_scaling=dict(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192, rope_type="llama3",
  ),
  pretraining_tp=1, torch_dtype="bfloat16", eos_token_id=[128001, 128009],
)  # fmt: skip

MISTRAL = dict(
  architectures=["MistralForCausalLM"], model_type="mistral",
  hidden_act="silu", hidden_size=4096, intermediate_size=14336,
  num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
  vocab_size=32000, max_position_embeddings=32768, rms_norm_eps=1e-5,
  rope_theta=10000.0, sliding_window=4096, tie_word_embeddings=False,
  torch_dtype="bfloat16",
)  # fmt: skip

GEMMA2 = dict(
  architectures=["Gemma2ForCausalLM"], model_type="gemma2",
  hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh",
  attention_bias=False, attn_logit_softcapping=50.0,
  final_logit_softcapping=30.0, query_pre_attn_scalar=224, head_dim=256,
  hidden_size=3584, intermediate_size=14336, num_hidden_layers=42,
  num_attention_heads=16, num_key_value_heads=8, vocab_size=256000,
  max_position_embeddings=8192, rms_norm_eps=1e-6, rope_theta=10000.0,
  sliding_window=4096, sliding_window_size=4096, torch_dtype="float32",
)  # fmt: skip

GEMMA3 = dict(
  architectures=["Gemma3ForCausalLM"], model_type="gemma3_text",
  hidden_activation="gelu_pytorch_tanh", attention_bias=False,
  attn_logit_softcapping=None, final_logit_softcapping=None,
  query_pre_attn_scalar=256, head_dim=256, hidden_size=1152,
  intermediate_size=6912, num_hidden_layers=26, num_attention_heads=4,
  num_key_value_heads=1, vocab_size=262144, max_position_embeddings=32768,
  rms_norm_eps=1e-6, rope_theta=1000000, rope_local_base_freq=10000,
  rope_scaling=None, sliding_window=512, sliding_window_pattern=6,
  torch_dtype="bfloat16",
)  # fmt: skip

# As inside of the larger ones, which see pictures.
GEMMA3_LONG = GEMMA3 | dict(rope_scaling=dict(rope_type="linear", factor=8.0))

SMALL_QWEN = Policy(
  vocab=151936, width=1536, layers=28, heads=12, kv_heads=2, head_size=128,
  mlp=8960, rope=Rope(1e6), norm_eps=1e-6, tied=True, max_positions=131072,
  qkv_bias=True,
)  # fmt: skip

SMALL_QWEN3 = Policy(
  vocab=151936, width=1024, layers=28, heads=16, kv_heads=8, head_size=128,
  mlp=3072, rope=Rope(1e6), norm_eps=1e-6, tied=True, max_positions=40960,
  qk_norm=True,
)  # fmt: skip

SMALL_GEMMA3 = Policy(
  vocab=262144, width=1152, layers=26, heads=4, kv_heads=1, head_size=256,
  mlp=6912, rope=Rope(1e6), norm_eps=1e-6, tied=True, max_positions=32768,
  qk_norm=True, query_scale=1 / 16, window=512, sliding_rope=Rope(1e4),
  sliding=(True, True, True, True, True, False) * 4 + (True, True),
  activation="gelu_tanh", embed_scale=1152**0.5, norm_offset=1.0,
  post_norms=True,
)  # fmt: skip

HUB = {
  "qwen2.5": (QWEN25, SMALL_QWEN),
  "deepseek, distilled": (DISTILLED,
    dataclasses.replace(SMALL_QWEN, rope=Rope(1e4), tied=False)),
  "qwen2.5, stretched": (QWEN25_LONG,
    dataclasses.replace(
      SMALL_QWEN,
      rope=Rope(1e6, "yarn", 4.0, 32768, scale=0.1 * math.log(4.0) + 1.0),
    )),
  "qwen3": (QWEN3, SMALL_QWEN3),
  "qwen3, routed": (QWEN3_MOE,
    dataclasses.replace(
      SMALL_QWEN3, width=2048, layers=48, heads=32, kv_heads=4, mlp=768,
      tied=False, experts=128, experts_per_token=8, normalize_experts=True,
    )),
  "llama": (LLAMA31,
    Policy(
      vocab=128256, width=4096, layers=32, heads=32, kv_heads=8, head_size=128,
      mlp=14336, rope=Rope(5e5, "llama3", 8.0, 8192, 1.0, 4.0), norm_eps=1e-5,
      tied=False, max_positions=131072,
    )),
  "mistral": (MISTRAL,
    Policy(
      vocab=32000, width=4096, layers=32, heads=32, kv_heads=8, head_size=128,
      mlp=14336, rope=Rope(1e4), norm_eps=1e-5, tied=False, max_positions=32768,
      window=4096, sliding=(True,) * 32,
    )),
  "gemma2": (GEMMA2,
    Policy(
      vocab=256000, width=3584, layers=42, heads=16, kv_heads=8, head_size=256,
      mlp=14336, rope=Rope(1e4), norm_eps=1e-6, tied=True, max_positions=8192,
      query_scale=224**-0.5, attention_softcap=50.0, final_softcap=30.0,
      window=4096, sliding=(True, False) * 21, activation="gelu_tanh",
      embed_scale=3584**0.5, norm_offset=1.0, post_norms=True,
    )),
  "gemma3": (GEMMA3, SMALL_GEMMA3),
  "gemma3, stretched": (GEMMA3_LONG,
    dataclasses.replace(SMALL_GEMMA3, rope=Rope(1e6, "linear", 8.0))),
}  # fmt: skip


def written(directory, config):
  directory.mkdir(parents=True, exist_ok=True)
  (directory / "config.json").write_text(json.dumps(config))
  return directory


def read(directory, config):
  return architectures.read_policy(written(directory, config), dtype="float32")


def old(config):
  added = ("rope_parameters", "dtype", "layer_types")
  return {k: v for k, v in config.items() if k not in added}


def new(config):
  kind = CONFIG_MAPPING[config["model_type"]]
  return json.loads(kind.from_dict(copy.deepcopy(config)).to_json_string())


# Sizes that are all different.
QWEN = dict(
  model_type="qwen2", vocab_size=32, hidden_size=24, intermediate_size=20,
  num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
  hidden_act="silu", max_position_embeddings=512, rms_norm_eps=1e-5,
  rope_theta=1e4, tie_word_embeddings=False,
)  # fmt: skip

GONE = ...  # this field is not there


def but(config, **fields):
  config = config | fields
  return {k: v for k, v in config.items() if v is not GONE}


SAME = Policy(
  vocab=32, width=24, layers=2, heads=4, kv_heads=2, head_size=6, mlp=20,
  rope=Rope(1e4), norm_eps=1e-5, tied=False, qkv_bias=True, max_positions=512,
)  # fmt: skip
