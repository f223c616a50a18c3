"""Tests of brorl_jax/architectures.py."""

import dataclasses
import json
import math

import jax
import pytest

from brorl_jax import architectures
from brorl_jax.attention import Rope
from brorl_jax.policy import Policy

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
QWEN25_LONG = QWEN25 | dict(
  rope_scaling=dict(
    type="yarn", factor=4.0, original_max_position_embeddings=32768
  )
)
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
  "deepseek, distilled": (
    DISTILLED,
    dataclasses.replace(SMALL_QWEN, rope=Rope(1e4), tied=False),
  ),
  "qwen2.5, stretched": (
    QWEN25_LONG,
    dataclasses.replace(
      SMALL_QWEN,
      rope=Rope(1e6, "yarn", 4.0, 32768, scale=0.1 * math.log(4.0) + 1.0),
    ),
  ),
  "qwen3": (QWEN3, SMALL_QWEN3),
  "qwen3, routed": (
    QWEN3_MOE,
    dataclasses.replace(
      SMALL_QWEN3, width=2048, layers=48, heads=32, kv_heads=4, mlp=768,
      tied=False, experts=128, experts_per_token=8, normalize_experts=True,
    ),
  ),
  "llama": (
    LLAMA31,
    Policy(
      vocab=128256, width=4096, layers=32, heads=32, kv_heads=8, head_size=128,
      mlp=14336, rope=Rope(5e5, "llama3", 8.0, 8192, 1.0, 4.0), norm_eps=1e-5,
      tied=False, max_positions=131072,
    ),
  ),
  "mistral": (
    MISTRAL,
    Policy(
      vocab=32000, width=4096, layers=32, heads=32, kv_heads=8, head_size=128,
      mlp=14336, rope=Rope(1e4), norm_eps=1e-5, tied=False, max_positions=32768,
      window=4096, sliding=(True,) * 32,
    ),
  ),
  "gemma2": (
    GEMMA2,
    Policy(
      vocab=256000, width=3584, layers=42, heads=16, kv_heads=8, head_size=256,
      mlp=14336, rope=Rope(1e4), norm_eps=1e-6, tied=True, max_positions=8192,
      query_scale=224**-0.5, attention_softcap=50.0, final_softcap=30.0,
      window=4096, sliding=(True, False) * 21, activation="gelu_tanh",
      embed_scale=3584**0.5, norm_offset=1.0, post_norms=True,
    ),
  ),
  "gemma3": (GEMMA3, SMALL_GEMMA3),
  "gemma3, stretched": (
    GEMMA3_LONG,
    dataclasses.replace(SMALL_GEMMA3, rope=Rope(1e6, "linear", 8.0)),
  ),
}  # fmt: skip


def written(directory, config):
  directory.mkdir(parents=True, exist_ok=True)
  (directory / "config.json").write_text(json.dumps(config))
  return directory


def read(directory, config):
  return architectures.read_policy(written(directory, config), dtype="float32")


def old(config):
  """Without the fields that transformers 5 added."""
  added = ("rope_parameters", "dtype", "layer_types")
  return {k: v for k, v in config.items() if k not in added}


def new(config):
  """Without the fields that transformers 5 took away."""
  config = dict(config)
  scaling = config.pop("rope_scaling", None) or {}
  kind = scaling.get("rope_type", scaling.get("type", "default"))
  rope = {k: v for k, v in scaling.items() if k != "type"}
  rope |= {"rope_type": kind, "rope_theta": config.pop("rope_theta")}
  if "rope_local_base_freq" in config:
    theta = config.pop("rope_local_base_freq")
    local = {"rope_type": "default", "rope_theta": theta}
    rope = {"full_attention": rope, "sliding_attention": local}
  dtype = config.pop("torch_dtype")
  return config | {"rope_parameters": rope, "dtype": dtype}


@pytest.mark.parametrize("spelling", [old, new])
@pytest.mark.parametrize("name", HUB)
def test_configs_of_the_hub_are_read(tmp_path, name, spelling):
  config, want = HUB[name]
  policy = read(tmp_path, spelling(config))
  assert policy == want
  # As it was: what is unknown here is written back too.
  assert json.loads(policy.origin) == spelling(config)


@pytest.mark.parametrize("name", HUB)
def test_configs_are_read_as_transformers_rewrites_them(tmp_path, name):
  from transformers import AutoConfig

  config, want = HUB[name]
  theirs = AutoConfig.from_pretrained(written(tmp_path / "hub", config))
  theirs.save_pretrained(tmp_path / "theirs")
  rewritten = json.loads((tmp_path / "theirs" / "config.json").read_text())
  assert "rope_theta" not in rewritten  # it is the other spelling
  policy = architectures.read_policy(tmp_path / "theirs", dtype="float32")
  assert policy == want


@pytest.mark.parametrize("spelling", [old, new])
@pytest.mark.parametrize("name", HUB)
def test_what_is_written_is_read_by_both_generations(tmp_path, name, spelling):
  config, want = HUB[name]
  source = spelling(config)
  policy = read(tmp_path, source)
  fields = architectures.config_of(policy, "float16")
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
  fields = architectures.config_of(policy, "bfloat16")
  assert fields["architectures"] == ["Qwen2ForCausalLM"]
  assert fields["dtype"] == fields["torch_dtype"] == "bfloat16"
  for view in (dict, old, new):
    assert read(tmp_path, view(fields)) == policy


# Sizes that are all different.
QWEN = dict(
  model_type="qwen2", vocab_size=32, hidden_size=24, intermediate_size=20,
  num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
  hidden_act="silu", max_position_embeddings=512, rms_norm_eps=1e-5,
  rope_theta=1e4, tie_word_embeddings=False,
)  # fmt: skip
LLAMA = QWEN | dict(model_type="llama")
GEMMA = QWEN | dict(
  model_type="gemma2", hidden_activation="gelu_pytorch_tanh", head_dim=6,
  tie_word_embeddings=True, sliding_window=7,
)  # fmt: skip
GEMMA_LAYERS = GEMMA | dict(model_type="gemma3_text", rope_local_base_freq=1e3)
MOE = QWEN | dict(
  model_type="qwen3_moe", head_dim=6, moe_intermediate_size=12, num_experts=5,
  num_experts_per_tok=2, norm_topk_prob=True,
)  # fmt: skip
GONE = ...  # this field is not there


def but(config, **fields):
  config = config | fields
  return {k: v for k, v in config.items() if v is not GONE}


def scaled(kind, config=QWEN, **fields):
  fields = {"rope_type": kind} | fields
  fields = {k: v for k, v in fields.items() if v is not GONE}
  return but(config, rope_scaling=fields)


def yarn(**fields):
  common = {"factor": 4.0, "original_max_position_embeddings": 128}
  return scaled("yarn", **common | fields)


def llama3(**fields):
  common = dict(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=128,
  )  # fmt: skip
  return scaled("llama3", **common | fields)


SAME = Policy(
  vocab=32, width=24, layers=2, heads=4, kv_heads=2, head_size=6, mlp=20,
  rope=Rope(1e4), norm_eps=1e-5, tied=False, qkv_bias=True, max_positions=512,
)  # fmt: skip


@pytest.mark.parametrize(
  "fields",
  [
    {},
    {"rope_scaling": None},
    {"rope_parameters": None},
    {"rope_scaling": {"rope_type": "default"}},
    {"rope_scaling": {"type": "default"}},
    {"rope_theta": GONE, "rope_parameters": {"rope_theta": 1e4}},
    {
      "rope_theta": GONE,
      "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    },
    # rope_parameters is the newer field.
    {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 1e4}},
    {"partial_rotary_factor": 1.0},
    {"hidden_act": "swish"},
    {"hidden_act": GONE},
    {"head_dim": 6},
    {"head_dim": None},
    {"use_sliding_window": False, "sliding_window": 4},
    {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    {"torch_dtype": "float16"},
    {"dtype": "bfloat16"},
    {"something_else": {"unknown": 1}},
    {"auto_map": None},
  ],
  ids=str,
)
def test_spellings_that_mean_the_same(tmp_path, fields):
  assert read(tmp_path, but(QWEN, **fields)) == SAME


@pytest.mark.parametrize(
  "config, rope",
  [
    (scaled("linear", factor=2), Rope(1e4, "linear", 2.0)),
    (scaled("dynamic", factor=2.0), Rope(1e4, "dynamic")),
    (llama3(), Rope(1e4, "llama3", 8.0, 128, 1.0, 4.0)),
    # The lengths say by how much, if the factor does not.
    (llama3(factor=None), Rope(1e4, "llama3", 4.0, 128, 1.0, 4.0)),
    (
      llama3(original_max_position_embeddings=GONE),
      Rope(1e4, "llama3", 8.0, 512, 1.0, 4.0),
    ),
    (yarn(), Rope(1e4, "yarn", 4.0, 128, scale=1 + 0.1 * math.log(4))),
    (
      yarn(factor=None, original_max_position_embeddings=64),
      Rope(1e4, "yarn", 8.0, 64, scale=1 + 0.1 * math.log(8)),
    ),
    (
      yarn(original_max_position_embeddings=GONE),
      Rope(1e4, "yarn", 4.0, 512, scale=1 + 0.1 * math.log(4)),
    ),
    (
      yarn(beta_slow=2, beta_fast=20.0, truncate=False, attention_factor=1.25),
      Rope(1e4, "yarn", 4.0, 128, 2.0, 20.0, truncate=False, scale=1.25),
    ),
    (
      yarn(mscale=2.0, mscale_all_dim=0.5),
      Rope(
        1e4,
        "yarn",
        4.0,
        128,
        scale=(1 + 0.2 * math.log(4)) / (1 + 0.05 * math.log(4)),
      ),
    ),
    # One of the two alone has no effect.
    (
      yarn(mscale=2.0),
      Rope(1e4, "yarn", 4.0, 128, scale=1 + 0.1 * math.log(4)),
    ),
    (yarn(factor=0.5), Rope(1e4, "yarn", 0.5, 128)),
    (
      but(
        QWEN,
        rope_theta=GONE,
        rope_parameters=dict(rope_type="linear", rope_theta=7.0, factor=3.0),
      ),
      Rope(7.0, "linear", 3.0),
    ),
  ],
  ids=lambda x: str(getattr(x, "kind", "")),
)
def test_ropes_that_are_stretched(tmp_path, config, rope):
  policy = read(tmp_path, config)
  # Of yarn both ways to give the length are in use, before and after.
  longest = int(rope.factor * rope.trained) if rope.kind == "yarn" else 0
  longest = max(longest, SAME.max_positions)
  assert policy == dataclasses.replace(SAME, rope=rope, max_positions=longest)
  # And back, with what was left open.
  fields = architectures.config_of(policy, "float32")
  assert read(tmp_path, fields) == policy


@pytest.mark.parametrize(
  "config, fields",
  [
    (
      but(LLAMA, attention_bias=True, mlp_bias=True),
      {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    ),
    # transformers' llama has no window, whatever its config says.
    (but(LLAMA, sliding_window=3), {"sliding": (), "window": 0}),
    # The first llamas have no such fields.
    (
      but(LLAMA, num_key_value_heads=GONE, rope_theta=GONE),
      {"qkv_bias": False, "kv_heads": 4, "rope": Rope(1e4)},
    ),
    (
      but(QWEN, model_type="qwen3", head_dim=8, attention_bias=True),
      {"head_size": 8, "qkv_bias": True, "output_bias": True, "qk_norm": True},
    ),
    (
      but(QWEN, use_sliding_window=True, sliding_window=9, max_window_layers=1),
      {"sliding": (False, True), "window": 9, "sliding_rope": None},
    ),
    (
      but(
        QWEN,
        use_sliding_window=True,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"],
      ),
      {"sliding": (True, False), "window": 9},
    ),
    (
      but(QWEN, model_type="mistral", sliding_window=None),
      {"sliding": (), "window": 0, "qkv_bias": False},
    ),
    (
      but(MOE, norm_topk_prob=False, mlp_only_layers=None),
      {
        "experts": 5,
        "experts_per_token": 2,
        "normalize_experts": False,
        "mlp": 12,
        "sliding": (),
      },
    ),
    (
      but(MOE, use_sliding_window=True, sliding_window=9),
      {"sliding": (True, True), "window": 9},
    ),
    (
      but(GEMMA, attn_logit_softcapping=None, final_logit_softcapping=None),
      {"attention_softcap": 0.0, "final_softcap": 0.0},
    ),
    (
      but(GEMMA, attn_logit_softcapping=3.0, final_logit_softcapping=5.0),
      {"attention_softcap": 3.0, "final_softcap": 5.0},
    ),
    (but(GEMMA, attention_bias=True), {"qkv_bias": True, "output_bias": True}),
    (but(GEMMA, hidden_activation="silu"), {"activation": "silu"}),
    (but(GEMMA, sliding_window=None), {"sliding": (), "window": 0}),
    (but(GEMMA, query_pre_attn_scalar=16), {"query_scale": 0.25}),
    (
      but(GEMMA_LAYERS, sliding_window_pattern=2),
      {"sliding": (True, False), "sliding_rope": Rope(1e3), "window": 7},
    ),
    # The oldest spelling, of full layers alone.
    (
      but(GEMMA_LAYERS, rope_scaling={"type": "linear", "factor": 8.0}),
      {"rope": Rope(1e4, "linear", 8.0), "sliding_rope": Rope(1e3)},
    ),
    (
      but(GEMMA_LAYERS, layer_types=["full_attention", "sliding_attention"]),
      {"sliding": (False, True)},
    ),
    (
      but(GEMMA_LAYERS, layer_types=["full_attention"] * 2),
      {"sliding": (), "sliding_rope": None},
    ),
  ],
)
def test_fields_that_switch_something_on(tmp_path, config, fields):
  policy = read(tmp_path, config)
  assert {name: getattr(policy, name) for name in fields} == fields
  again = read(tmp_path, architectures.config_of(policy, "float32"))
  assert again == policy


def refused(directory, *parts):
  with pytest.raises(ValueError) as e:
    architectures.read_policy(directory, dtype="float32")
  message = str(e.value)
  assert "\n" not in message, message
  assert message.startswith(f"{directory / 'config.json'}: "), message
  for part in parts:
    assert part in message, message


SIZES = (
  "vocab_size",
  "hidden_size",
  "intermediate_size",
  "num_hidden_layers",
  "num_attention_heads",
  "num_key_value_heads",
)
POSITIVE = "is not a positive integer"


@pytest.mark.parametrize(
  "config, parts",
  [
    *(
      (
        but(QWEN, model_type=value),
        [
          f"model_type {shown} is not supported, only gemma2, gemma3_text, "
          "llama, mistral, qwen2, qwen3, qwen3_moe"
        ],
      )
      for value, shown in (
        ("mamba", "'mamba'"),
        ("gemma3", "'gemma3'"),
        ("mixtral", "'mixtral'"),
        ("", "''"),
        (2, "2"),
        (["qwen2"], "['qwen2']"),
        (GONE, "None"),
      )
    ),
    # What is missing.
    *(
      (but(QWEN, **{field: GONE}), [f"no field '{field}'"])
      for field in (*SIZES, "rms_norm_eps", "rope_theta")
    ),
    (but(QWEN, rope_theta=GONE, rope_parameters={}), ["no field 'rope_theta'"]),
    (
      but(MOE, moe_intermediate_size=GONE),
      ["no field 'moe_intermediate_size'"],
    ),
    (but(GEMMA, num_key_value_heads=GONE), ["no field 'num_key_value_heads'"]),
    # Sizes and numbers.
    *(
      (but(QWEN, **{field: value}), [f"{field} {value!r} {POSITIVE}"])
      for field, value in (
        ("vocab_size", "many"),
        ("hidden_size", 0),
        ("num_attention_heads", 0),
        ("num_key_value_heads", -2),
        ("num_hidden_layers", 1.5),
        ("num_hidden_layers", True),
        ("intermediate_size", [20]),
        ("intermediate_size", None),
        ("max_position_embeddings", 0),
      )
    ),
    (
      but(QWEN, num_hidden_layers=10_001),
      ["num_hidden_layers 10001 is more than 10000; correct it"],
    ),
    (
      but(QWEN, max_position_embeddings="a"),
      ["max_position_embeddings", "'a'"],
    ),
    (
      but(MOE, moe_intermediate_size=0),
      [f"moe_intermediate_size 0 {POSITIVE}"],
    ),
    (but(MOE, num_experts=0), [f"num_experts 0 {POSITIVE}"]),
    (but(MOE, num_experts_per_tok=-1), [f"num_experts_per_tok -1 {POSITIVE}"]),
    (but(MOE, num_experts_per_tok="2"), ["num_experts_per_tok", "'2'"]),
    (but(GEMMA, sliding_window=0), [f"sliding_window 0 {POSITIVE}"]),
    (but(GEMMA, sliding_window="4"), ["sliding_window", "'4'"]),
    *(
      (
        but(QWEN, **{field: value}),
        [f"{field} {value!r} is not a positive number"],
      )
      for field in ("rms_norm_eps", "rope_theta")
      for value in ("x", -5, 0.0, True, None, [1], float("nan"), float("inf"))
    ),
    (
      but(QWEN, rope_theta=GONE, rope_parameters={"rope_theta": "y"}),
      ["rope_theta 'y' is not a positive number"],
    ),
    (
      but(QWEN, rope_parameters={"rope_theta": -3}),
      ["rope_theta -3 is not a positive number"],
    ),
    (
      but(GEMMA_LAYERS, rope_local_base_freq=-5),
      ["rope_theta -5 is not a positive number"],
    ),
    # Heads.
    (
      but(QWEN, num_attention_heads=6, num_key_value_heads=4),
      ["num_key_value_heads 4 is not a divisor of 6 heads"],
    ),
    (
      but(QWEN, num_key_value_heads=8),
      ["num_key_value_heads 8 is not a divisor of 4 heads"],
    ),
    (
      but(QWEN, hidden_size=20),
      ["head_dim 5 is odd; components turn in pairs"],
    ),
    (but(QWEN, head_dim=7), ["head_dim", "7"]),
    (but(LLAMA, head_dim="6"), ["head_dim", "'6'"]),
    # Ropes.
    *(
      (
        but(QWEN, rope_scaling={spelling: kind, "factor": 2.0}),
        [
          f"rope_type {kind!r} is not supported, only default, linear, "
          "dynamic, yarn, llama3"
        ],
      )
      for spelling, kind in (("type", "su"), ("rope_type", "mrope"))
    ),
    (
      scaled("longrope", factor=2.0, short_factor=[1.0], long_factor=[2.0]),
      ["rope_type 'longrope' is not supported"],
    ),
    (scaled("linear"), ["linear", "factor"]),
    *(
      (scaled("linear", factor=value), [f"factor {value!r} is not a positive"])
      for value in (0, -1, "2", None, True)
    ),
    (yarn(factor=-1), ["factor -1 is not a positive number"]),
    (yarn(beta_slow=-1), ["beta_slow -1 is not a positive number"]),
    (yarn(beta_fast=-1), ["beta_fast -1 is not a positive number"]),
    (yarn(attention_factor=0), ["attention_factor 0 is not a positive number"]),
    (llama3(low_freq_factor=0), ["low_freq_factor 0 is not a positive number"]),
    (
      llama3(high_freq_factor=-1),
      ["high_freq_factor -1 is not a positive number"],
    ),
    (llama3(low_freq_factor=GONE), ["llama3", "low_freq_factor"]),
    *(
      (but(config, partial_rotary_factor=0.5), ["partial_rotary_factor 0.5 is"])
      for config in (QWEN, LLAMA, GEMMA)
    ),
    (
      but(
        QWEN, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.25}
      ),
      ["partial_rotary_factor 0.25 is not supported"],
    ),
    (but(QWEN, rope_parameters="x"), ["rope_parameters 'x' is not an object"]),
    (but(QWEN, rope_scaling=["x"]), ["rope_scaling ['x'] is not an object"]),
    # Layers.
    (
      but(GEMMA, use_bidirectional_attention=True),
      ["use_bidirectional_attention True is not supported"],
    ),
    (
      but(GEMMA_LAYERS, use_bidirectional_attention=True),
      ["use_bidirectional_attention True is not supported"],
    ),
    (
      but(MOE, mlp_only_layers=[0]),
      ["mlp_only_layers [0] is not supported, only []"],
    ),
    (
      but(MOE, decoder_sparse_step=2),
      ["decoder_sparse_step 2 is not supported, only 1"],
    ),
    *(
      (
        but(config, layer_types=["full_attention", "chunked_attention"]),
        ["layer_types ['chunked_attention'] is not supported"],
      )
      for config in (QWEN, GEMMA, GEMMA_LAYERS)
    ),
    (but(GEMMA, layer_types=["full_attention"]), ["layer_types", "(1)"]),
    (but(GEMMA, layer_types="x"), ["layer_types", "'x'"]),
    (but(GEMMA, layer_types=["x", "full_attention"]), ["layer_types", "'x'"]),
    # Activations and switches.
    (
      but(QWEN, hidden_act="gelu"),
      [
        "hidden_act 'gelu' is not supported, only silu, swish, "
        "gelu_pytorch_tanh"
      ],
    ),
    (but(QWEN, hidden_act=None), ["hidden_act", "None"]),
    (
      but(GEMMA, hidden_activation="relu"),
      ["hidden_activation 'relu' is not supported"],
    ),
    *(
      (but(QWEN, head_dim=value), [f"head_dim {value} {POSITIVE}"])
      for value in (0, -2, 6.0, True)
    ),
    (but(QWEN, hidden_size=2), [f"head_dim 0 {POSITIVE}"]),
    *(
      (
        but(GEMMA, query_pre_attn_scalar=value),
        [f"query_pre_attn_scalar {value} {POSITIVE}"],
      )
      for value in (0, -2)
    ),
    (
      but(GEMMA, final_logit_softcapping=-3.0),
      ["final_logit_softcapping -3.0 is not a positive number"],
    ),
    # transformers passes over these in silence.
    (
      but(GEMMA_LAYERS, attn_logit_softcapping=3.0),
      ["attn_logit_softcapping 3.0 is not for gemma3_text"],
    ),
    (
      but(LLAMA, final_logit_softcapping=3.0),
      ["final_logit_softcapping 3.0 is not for llama"],
    ),
    (
      but(MOE, num_experts_per_tok=6),
      ["num_experts_per_tok 6 is more than 5 experts"],
    ),
    (
      but(GEMMA, use_bidirectional_attention=True, sliding_window=None),
      ["use_bidirectional_attention True is not supported"],
    ),
    (yarn(factor=0), ["factor 0 is not a positive number"]),
    (llama3(factor=0), ["factor 0 is not a positive number"]),
    *(
      (
        config(original_max_position_embeddings=value),
        [f"original_max_position_embeddings {value} {POSITIVE}"],
      )
      for config in (yarn, llama3)
      for value in (-1, 1.5)
    ),
    (yarn(beta_slow=40), ["beta_fast 32.0 is not above the lower limit 40.0"]),
    (
      llama3(low_freq_factor=4.0),
      ["high_freq_factor 4.0 is not above the lower limit 4.0"],
    ),
    (
      yarn(mscale="x", mscale_all_dim=1.0),
      ["mscale 'x' is not a positive number"],
    ),
    (but(QWEN, tie_word_embeddings="no"), ["tie_word_embeddings", "'no'"]),
    (but(LLAMA, attention_bias="no"), ["attention_bias", "'no'"]),
    (but(GEMMA, attn_logit_softcapping="x"), ["attn_logit_softcapping", "'x'"]),
    (but(GEMMA, query_pre_attn_scalar="x"), ["query_pre_attn_scalar", "'x'"]),
  ],
)
def test_refuses_a_config_by_field_and_value(tmp_path, config, parts):
  refused(written(tmp_path, config), *parts)


def test_as_many_layers_as_may_be_are_read(tmp_path):
  assert read(tmp_path, but(QWEN, num_hidden_layers=10_000)).layers == 10_000


def test_refuses_what_is_not_a_config(tmp_path):
  message = f"checkpoint '{tmp_path / 'nowhere'}' is not a directory"
  with pytest.raises(ValueError) as e:
    architectures.read_policy(tmp_path / "nowhere", dtype="float32")
  assert str(e.value) == message
  path = tmp_path / "config.json"
  with pytest.raises(ValueError) as e:
    architectures.read_policy(tmp_path, dtype="float32")
  assert str(e.value).startswith(f"{path} cannot be read: ")
  for text, why in (
    ("{", "cannot be read: "),
    ("", "cannot be read: "),
    ("\n{\n'x'\n}\n", "cannot be read: "),
    ("[1]", "is not a JSON object"),
    ('"text"', "is not a JSON object"),
    ("null", "is not a JSON object"),
  ):
    path.write_text(text)
    with pytest.raises(ValueError) as e:
      architectures.read_policy(tmp_path, dtype="float32")
    assert str(e.value).startswith(f"{path} {why}")
    assert "\n" not in str(e.value)
  path.write_bytes(b"\xff\xfe{}")
  with pytest.raises(ValueError, match="cannot be read"):
    architectures.read_policy(tmp_path, dtype="float32")


def test_the_dtype_is_that_of_the_caller(tmp_path):
  written(tmp_path, QWEN | {"torch_dtype": "float16"})
  for dtype in ("float32", "bfloat16"):
    assert architectures.read_policy(tmp_path, dtype=dtype).dtype == dtype
  assert architectures.read_policy(str(tmp_path), dtype="float32") == SAME
  with pytest.raises(ValueError) as e:
    architectures.read_policy(tmp_path, dtype="int7")
  assert str(e.value) == "dtype 'int7' is neither 'float32' nor 'bfloat16'"


@pytest.mark.parametrize("model_type", ["qwen2", "mine"])
def test_code_beside_a_config_is_never_run(tmp_path, model_type):
  marker = tmp_path / "it ran"
  code = f"open({str(marker)!r}, 'w').close()\n"
  for name in ("configuration_mine", "modeling_mine", "sitecustomize"):
    (tmp_path / f"{name}.py").write_text(code)
  config = QWEN | {
    "model_type": model_type,
    "architectures": ["MyModel"],
    "trust_remote_code": True,
    "auto_map": {
      "AutoConfig": "configuration_mine.MyConfig",
      "AutoModel": "modeling_mine.MyModel",
      "AutoModelForCausalLM": "modeling_mine.MyModel",
    },
  }
  if model_type == "qwen2":
    assert read(tmp_path, config) == SAME
  else:
    refused(written(tmp_path, config), "model_type 'mine' is not supported")
  assert not marker.exists()


def names_of(policy):
  """Parameter to tensor, both in full."""
  abstract = jax.eval_shape(policy.init, jax.random.key(0))
  paths = [p for p, _ in jax.tree_util.tree_leaves_with_path(abstract)]
  keys = [tuple(key.key for key in path) for path in paths]
  return {"/".join(k): architectures.tensor_name(k, policy) for k in keys}


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
  "blocks/ln_mlp/scale": "model.layers.{layer}.post_attention_layernorm.weight",
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


@pytest.mark.parametrize(
  "fields, message",
  [
    (
      {"quantization_config": {"quant_method": "fp8"}},
      "quantization_config '...' is not supported; give the full weights",
    ),
    ({"attention_bias": "x"}, "attention_bias 'x' is not true or false"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings 1 is not true or false"),
    ({"head_dim": -24}, "head_dim -24 is not a positive integer"),
    ({"head_dim": 24.0}, "head_dim 24.0 is not a positive integer"),
    (
      {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
      "rope_type 'longrope' is not supported, only default, linear, dynamic",
    ),
  ],
)
def test_what_transformers_would_take_is_refused_first(
  tmp_path, fields, message
):
  with pytest.raises(ValueError) as e:
    read(tmp_path, but(QWEN, **fields))
  assert message in str(e.value) and "\n" not in str(e.value)


def test_code_of_the_source_is_not_written_on(tmp_path):
  auto = {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}
  policy = read(tmp_path, but(QWEN, **auto))
  assert "auto_map" not in architectures.config_of(policy, "float32")
