"""Configs as the hub has them, and the policies that they describe."""

import copy
import dataclasses
import json
import math
import pathlib

from transformers import CONFIG_MAPPING

from brorl_jax.model import architectures
from brorl_jax.model.policy import Policy
from brorl_jax.model.spec import Rope

# What the hub has, in the spelling of transformers 4.
_HERE = pathlib.Path(__file__)
FILES = json.loads(_HERE.with_suffix(".json").read_text())
QWEN3_MOE, LLAMA31 = FILES["QWEN3_MOE"], FILES["LLAMA31"]

SMALL_QWEN = Policy(vocab=151936, width=1536,
  layers=28, heads=12, kv_heads=2, head_size=128, mlp=8960, rope=Rope(1e6),
  norm_eps=1e-6, tied=True, max_positions=131072, qkv_bias=True)  # fmt: skip

SMALL_QWEN3 = Policy(vocab=151936, width=1024,
  layers=28, heads=16, kv_heads=8, head_size=128, mlp=3072, rope=Rope(1e6),
  norm_eps=1e-6, tied=True, max_positions=40960, qk_norm=True)  # fmt: skip

SMALL_GEMMA3 = Policy(
  vocab=262144, width=1152, layers=26, heads=4, kv_heads=1, head_size=256,
  mlp=6912, rope=Rope(1e6), norm_eps=1e-6, tied=True, max_positions=32768,
  qk_norm=True, query_scale=1 / 16, window=512, sliding_rope=Rope(1e4),
  sliding=(True, True, True, True, True, False) * 4 + (True, True),
  activation="gelu_tanh", embed_scale=1152**0.5, norm_offset=1.0,
  post_norms=True,
)  # fmt: skip

HUB = {
  "qwen2.5": (FILES["QWEN25"], SMALL_QWEN),
  "deepseek, distilled": (FILES["DISTILLED"],
    dataclasses.replace(SMALL_QWEN, rope=Rope(1e4), tied=False)),
  "qwen2.5, stretched": (FILES["QWEN25_LONG"],
    dataclasses.replace(
      SMALL_QWEN,
      rope=Rope(1e6, "yarn", 4.0, 32768, scale=0.1 * math.log(4.0) + 1.0),
    )),
  "qwen3": (FILES["QWEN3"], SMALL_QWEN3),
  "qwen3, routed": (FILES["QWEN3_MOE"],
    dataclasses.replace(
      SMALL_QWEN3, width=2048, layers=48, heads=32, kv_heads=4, mlp=768,
      tied=False, experts=128, experts_per_token=8, normalize_experts=True,
    )),
  "llama": (FILES["LLAMA31"],
    Policy(
      vocab=128256, width=4096, layers=32, heads=32, kv_heads=8, head_size=128,
      mlp=14336, rope=Rope(5e5, "llama3", 8.0, 8192, 1.0, 4.0), norm_eps=1e-5,
      tied=False, max_positions=131072,
    )),
  "mistral": (FILES["MISTRAL"],
    Policy(
      vocab=32000, width=4096, layers=32, heads=32, kv_heads=8, head_size=128,
      mlp=14336, rope=Rope(1e4), norm_eps=1e-5, tied=False, max_positions=32768,
      window=4096, sliding=(True,) * 32,
    )),
  "gemma2": (FILES["GEMMA2"],
    Policy(
      vocab=256000, width=3584, layers=42, heads=16, kv_heads=8, head_size=256,
      mlp=14336, rope=Rope(1e4), norm_eps=1e-6, tied=True, max_positions=8192,
      query_scale=224**-0.5, attention_softcap=50.0, final_softcap=30.0,
      window=4096, sliding=(True, False) * 21, activation="gelu_tanh",
      embed_scale=3584**0.5, norm_offset=1.0, post_norms=True,
    )),
  "gemma3": (FILES["GEMMA3"], SMALL_GEMMA3),
  "gemma3, stretched": (FILES["GEMMA3_LONG"],
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
QWEN = dict(model_type="qwen2", vocab_size=32, hidden_size=24,
  intermediate_size=20, num_hidden_layers=2, num_attention_heads=4,
  num_key_value_heads=2, hidden_act="silu", max_position_embeddings=512,
  rms_norm_eps=1e-5, rope_theta=1e4, tie_word_embeddings=False)  # fmt: skip

GONE = ...  # this field is not there


def but(config, **fields):
  config = config | fields
  return {k: v for k, v in config.items() if v is not GONE}


SAME = Policy(
  vocab=32, width=24, layers=2, heads=4, kv_heads=2, head_size=6, mlp=20,
  rope=Rope(1e4), norm_eps=1e-5, tied=False, qkv_bias=True, max_positions=512,
)  # fmt: skip
