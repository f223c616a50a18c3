"""config.json to a policy and back."""

import dataclasses
import json
import math

import pytest
from hub_configs import GONE, HUB, QWEN, SAME, but, new, old, read, written
from messages import mentions, refuses

from brorl_jax.model import architectures
from brorl_jax.model.policy import Policy
from brorl_jax.model.spec import Rope

LLAMA = QWEN | dict(model_type="llama")
GEMMA = QWEN | dict(model_type="gemma2", hidden_activation="gelu_pytorch_tanh",
  head_dim=6, tie_word_embeddings=True, sliding_window=7)  # fmt: skip
GEMMA_LAYERS = GEMMA | dict(model_type="gemma3_text", rope_local_base_freq=1e3)
MOE = QWEN | dict(model_type="qwen3_moe", head_dim=6, moe_intermediate_size=12,
  num_experts=5, num_experts_per_tok=2, norm_topk_prob=True)  # fmt: skip


def scaled(kind, config=QWEN, **fields):
  fields = {"rope_type": kind} | fields
  fields = {k: v for k, v in fields.items() if v is not GONE}
  return but(config, rope_scaling=fields)


def yarn(**fields):
  common = {"factor": 4.0, "original_max_position_embeddings": 128}
  return scaled("yarn", **common | fields)


def llama3(**fields):
  common = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=128)  # fmt: skip
  return scaled("llama3", **common | fields)


@pytest.mark.parametrize("fields", [
  {}, {"rope_scaling": None}, {"rope_parameters": None},
  {"rope_scaling": {"type": "default"}},
  {"rope_theta": GONE, "rope_parameters": {"rope_theta": 1e4}},
  # rope_parameters is the newer field.
  {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 1e4}},
  {"partial_rotary_factor": 1.0}, {"hidden_act": "swish"}, {"hidden_act": GONE},
  {"head_dim": None}, {"use_sliding_window": False, "sliding_window": 4},
  {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
  {"something_else": {"unknown": 1}},
], ids=str)  # fmt: skip
def test_spellings_that_mean_the_same(tmp_path, fields):
  assert read(tmp_path, but(QWEN, **fields)) == SAME


@pytest.mark.parametrize("config, rope", [
  (scaled("linear", factor=2), Rope(1e4, "linear", 2.0)),
  (scaled("dynamic", factor=2.0), Rope(1e4, "dynamic")),
  (llama3(), Rope(1e4, "llama3", 8.0, 128, 1.0, 4.0)),
  # The lengths say by how much, if the factor does not.
  (llama3(factor=None), Rope(1e4, "llama3", 4.0, 128, 1.0, 4.0)),
  (llama3(original_max_position_embeddings=GONE),
    Rope(1e4, "llama3", 8.0, 512, 1.0, 4.0)),
  (yarn(), Rope(1e4, "yarn", 4.0, 128, scale=1 + 0.1 * math.log(4))),
  (yarn(factor=None, original_max_position_embeddings=64),
    Rope(1e4, "yarn", 8.0, 64, scale=1 + 0.1 * math.log(8))),
  (yarn(original_max_position_embeddings=GONE),
    Rope(1e4, "yarn", 4.0, 512, scale=1 + 0.1 * math.log(4))),
  (yarn(beta_slow=2, beta_fast=20.0, truncate=False, attention_factor=1.25),
    Rope(1e4, "yarn", 4.0, 128, 2.0, 20.0, truncate=False, scale=1.25)),
  (yarn(mscale=2.0, mscale_all_dim=0.5),
    Rope(1e4, "yarn", 4.0, 128,
    scale=(1 + 0.2 * math.log(4)) / (1 + 0.05 * math.log(4)))),
  # One of the two alone has no effect.
  (yarn(mscale=2.0),
    Rope(1e4, "yarn", 4.0, 128, scale=1 + 0.1 * math.log(4))),
  (yarn(factor=0.5), Rope(1e4, "yarn", 0.5, 128)),
  (but(QWEN, rope_theta=GONE,
    rope_parameters=dict(rope_type="linear", rope_theta=7.0, factor=3.0)),
    Rope(7.0, "linear", 3.0)),
], ids=lambda x: str(getattr(x, "kind", "")))  # fmt: skip
def test_ropes_that_are_stretched(tmp_path, config, rope):
  policy = read(tmp_path, config)
  # Of yarn both ways to give the length are in use, before and after.
  longest = int(rope.factor * rope.trained) if rope.kind == "yarn" else 0
  longest = max(longest, SAME.max_positions)
  assert policy == dataclasses.replace(SAME, rope=rope, max_positions=longest)
  # And back, with what was left open.
  assert read(tmp_path, architectures.config_of(policy, "float32")) == policy


@pytest.mark.parametrize("config, fields", [
  (but(LLAMA, attention_bias=True, mlp_bias=True),
    {"qkv_bias": True, "output_bias": True, "mlp_bias": True}),
  # transformers' llama has no window, whatever its config says.
  (but(LLAMA, sliding_window=3), {"sliding": (), "window": 0}),
  # The first llamas have no such fields.
  (but(LLAMA, num_key_value_heads=GONE, rope_theta=GONE),
    {"qkv_bias": False, "kv_heads": 4, "rope": Rope(1e4)}),
  (but(QWEN, model_type="qwen3", head_dim=8, attention_bias=True),
    {"head_size": 8, "qkv_bias": True, "output_bias": True, "qk_norm": True}),
  (but(QWEN, use_sliding_window=True, sliding_window=9, max_window_layers=1),
    {"sliding": (False, True), "window": 9, "sliding_rope": None}),
  (
    but(QWEN, use_sliding_window=True, sliding_window=9,
      layer_types=["sliding_attention", "full_attention"]),
    {"sliding": (True, False), "window": 9}),
  (but(QWEN, model_type="mistral", sliding_window=None),
    {"sliding": (), "window": 0, "qkv_bias": False}),
  (but(MOE, norm_topk_prob=False, mlp_only_layers=None),
    {
      "experts": 5, "experts_per_token": 2, "normalize_experts": False,
      "mlp": 12, "sliding": ()}),
  (but(MOE, use_sliding_window=True, sliding_window=9),
    {"sliding": (True, True), "window": 9}),
  (but(GEMMA, attn_logit_softcapping=None, final_logit_softcapping=None),
    {"attention_softcap": 0.0, "final_softcap": 0.0}),
  (but(GEMMA, attn_logit_softcapping=3.0, final_logit_softcapping=5.0),
    {"attention_softcap": 3.0, "final_softcap": 5.0}),
  (but(GEMMA, attention_bias=True), {"qkv_bias": True, "output_bias": True}),
  (but(GEMMA, hidden_activation="silu"), {"activation": "silu"}),
  (but(GEMMA, sliding_window=None), {"sliding": (), "window": 0}),
  (but(GEMMA, query_pre_attn_scalar=16), {"query_scale": 0.25}),
  (but(GEMMA_LAYERS, sliding_window_pattern=2),
    {"sliding": (True, False), "sliding_rope": Rope(1e3), "window": 7}),
  # The oldest spelling, of full layers alone.
  (but(GEMMA_LAYERS, rope_scaling={"type": "linear", "factor": 8.0}),
    {"rope": Rope(1e4, "linear", 8.0), "sliding_rope": Rope(1e3)}),
  (but(GEMMA_LAYERS, layer_types=["full_attention", "sliding_attention"]),
    {"sliding": (False, True)}),
  (but(GEMMA_LAYERS, layer_types=["full_attention"] * 2),
    {"sliding": (), "sliding_rope": None}),
])  # fmt: skip
def test_fields_that_switch_something_on(tmp_path, config, fields):
  policy = read(tmp_path, config)
  assert {name: getattr(policy, name) for name in fields} == fields
  assert read(tmp_path, architectures.config_of(policy, "float32")) == policy


def refused(directory, part):
  with pytest.raises(ValueError) as e:
    architectures.read_policy(directory, dtype="float32")
  message = str(e.value)
  assert "\n" not in message, message
  assert message.startswith(f"{directory / 'config.json'}: "), message
  assert mentions(message, part), message


POSITIVE = "is not an integer from 1 to"
TYPES = "gemma2, gemma3_text ... qwen2, qwen3, qwen3_moe"
FULL = "full_attention"
REFUSED = [
  *((QWEN, {"model_type": x}, f"model_type {x!r} ... {TYPES}")
    for x in ("mamba", 2)),
  # What is missing.
  *((QWEN, {x: GONE}, f"no field '{x}'")
    for x in ("vocab_size", "intermediate_size", "rms_norm_eps", "rope_theta")),
  (QWEN, {"model_type": GONE}, "model_type None"),
  (QWEN, {"rope_theta": GONE, "rope_parameters": {}}, "no field 'rope_theta'"),
  (MOE, {"moe_intermediate_size": GONE}, "no field 'moe_intermediate_size'"),
  (GEMMA, {"num_key_value_heads": GONE}, "no field 'num_key_value_heads'"),
  # Sizes and numbers.
  *((config, {field: x}, f"{field} {x!r} {POSITIVE}")
    for config, field, x in (
      (QWEN, "vocab_size", "many"), (QWEN, "num_hidden_layers", True),
      (QWEN, "intermediate_size", None), (QWEN, "num_attention_heads", 0),
      (QWEN, "max_position_embeddings", 0), (MOE, "num_experts", 0),
      (MOE, "num_experts_per_tok", -1), (GEMMA, "sliding_window", 0),
      (QWEN, "head_dim", 6.0), (GEMMA, "query_pre_attn_scalar", -2))),
  *((QWEN, {"rms_norm_eps": x}, f"rms_norm_eps {x!r} ... number")
    for x in (0.0, float("nan"), float("inf"))),
  (QWEN, {"rms_norm_eps": "x"}, "rms_norm_eps ... 'x'"),
  (QWEN, {"rope_theta": -5}, "rope_theta -5 ... number"),
  (GEMMA_LAYERS, {"rope_local_base_freq": -5}, "rope_local_base_freq -5 is"),
  # Of fields that have no effect, too.
  *((config, {field: x}, f"{field} {x!r} is not {what}")
    for config, field, x, what in (
      (QWEN | {"rope_parameters": {"rope_theta": 1e4}}, "rope_theta", 0, "a"),
      (QWEN, "sliding_window", -5, "an integer from 1"),
      (QWEN, "dtype", "complex64", "... bfloat16"),
      (QWEN, "torch_dtype", 5, "... bfloat16"), (QWEN, "rope_theta", 1, "a"),
      (QWEN, "num_hidden_layers", 2**40, "an"), (QWEN, "factor", 10**400, "a"),
      (LLAMA, "use_sliding_window", 2, "("))),
  # What transformers refuses, in one line too.
  *((config, {field: "x"}, f"{field} ... 'x'")
    for config, field in (
      (MOE, "num_experts_per_tok"), (GEMMA, "attn_logit_softcapping"),
      (LLAMA, "head_dim"), (LLAMA, "mlp_bias"))),
  # Heads.
  (QWEN, {"num_attention_heads": 6, "num_key_value_heads": 4},
    "num_key_value_heads 4 ... divisor of 6"),
  (QWEN, {"num_key_value_heads": 8}, "num_key_value_heads 8 ... divisor of 4"),
  (QWEN, {"hidden_size": 20}, "head_dim 5"),
  (QWEN, {"head_dim": 7}, "head_dim ... 7"),
  (QWEN, {"hidden_size": 2}, f"head_dim 0 {POSITIVE}"),
  # Ropes.
  *((QWEN, {"rope_scaling": {x: "su", "factor": 2.0}},
      "rope_type 'su' ... llama3") for x in ("type", "rope_type")),
  (scaled("linear"), {}, "linear ... factor"),
  *((scaled("linear", factor=x), {}, f"factor {x!r} ... number")
    for x in (0, "2", None)),
  (yarn(factor=-1), {}, "factor -1 ... number"),
  (yarn(beta_slow=-1), {}, "beta_slow -1 ... number"),
  (yarn(attention_factor=0), {}, "attention_factor 0 ... number"),
  (yarn(beta_slow=40), {}, "beta_fast 32.0 ... above 40.0"),
  (yarn(mscale="x", mscale_all_dim=1.0), {}, "mscale 'x' ... number"),
  (llama3(low_freq_factor=0), {}, "low_freq_factor 0 ... number"),
  (llama3(low_freq_factor=GONE), {}, "llama3 ... low_freq_factor"),
  (llama3(low_freq_factor=4.0), {}, "high_freq_factor 4.0 ... above 4.0"),
  *((config(original_max_position_embeddings=1.5), {},
      f"original_max_position_embeddings 1.5 {POSITIVE}")
    for config in (yarn, llama3)),
  (QWEN, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is"),
  (QWEN, {"rope_parameters": "x"}, "rope_parameters 'x'"),
  # Layers.
  (GEMMA, {"use_bidirectional_attention": True, "sliding_window": None},
    "use_bidirectional_attention True"),
  (MOE, {"mlp_only_layers": [0]}, "mlp_only_layers [0] ... []"),
  (MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step 2 ... 1"),
  (QWEN, {"layer_types": [FULL, "chunked_attention"]},
    "layer_types ['chunked_attention']"),
  (GEMMA, {"layer_types": [FULL]}, "layer_types ... (1)"),
  # Activations and switches.
  (QWEN, {"hidden_act": "gelu"}, "hidden_act 'gelu' ... gelu_pytorch_tanh"),
  (GEMMA, {"hidden_activation": "relu"}, "hidden_activation 'relu'"),
  (GEMMA, {"final_logit_softcapping": -3.0},
    "final_logit_softcapping -3.0 ... number"),
  # transformers passes over these in silence.
  (GEMMA_LAYERS, {"attn_logit_softcapping": 3.0},
    "attn_logit_softcapping 3.0 ... gemma3_text"),
  (MOE, {"num_experts_per_tok": 6}, "num_experts_per_tok 6 ... 5"),
  (QWEN, {"tie_word_embeddings": "no"}, "tie_word_embeddings ... 'no'"),
  (LLAMA, {"attention_bias": "no"}, "attention_bias ... 'no'"),
  (QWEN, {"quantization_config": {"quant_method": "fp8"}},
    "quantization_config '...' ... weights"),
]  # fmt: skip


@pytest.mark.parametrize("config, changes, message", REFUSED)
def test_refuses_configs_by_field_and_value(tmp_path, config, changes, message):
  refused(written(tmp_path, but(config, **changes)), message)


def test_refuses_what_is_not_a_config(tmp_path):
  message = f"'{tmp_path / 'nowhere'}' ... checkpoint ... directory"
  with refuses(ValueError, message):
    architectures.read_policy(tmp_path / "nowhere", dtype="float32")
  path = tmp_path / "config.json"
  with pytest.raises(ValueError) as e:
    architectures.read_policy(tmp_path, dtype="float32")
  assert str(e.value).startswith(f"{path} cannot be read: ")
  for text, why in (("\n{\n'x'\n}\n", "cannot be read: "),
      ("[1]", "is not a JSON object")):  # fmt: skip
    path.write_text(text)
    with pytest.raises(ValueError) as e:
      architectures.read_policy(tmp_path, dtype="float32")
    assert str(e.value).startswith(f"{path} {why}") and "\n" not in str(e.value)
  path.write_bytes(b"\xff\xfe{}")
  with pytest.raises(ValueError, match="cannot be read"):
    architectures.read_policy(tmp_path, dtype="float32")


def test_the_dtype_is_that_of_the_caller(tmp_path):
  written(tmp_path, QWEN | {"torch_dtype": "float16"})
  for dtype in ("float32", "bfloat16"):
    assert architectures.read_policy(tmp_path, dtype=dtype).dtype == dtype
  assert architectures.read_policy(str(tmp_path), dtype="float32") == SAME
  with refuses(ValueError, "'int7' ... 'float32' ... 'bfloat16'"):
    architectures.read_policy(tmp_path, dtype="int7")


@pytest.mark.parametrize("model_type", ["qwen2", "mine"])
def test_code_beside_a_config_is_never_run(tmp_path, model_type):
  marker = tmp_path / "it ran"
  code = f"open({str(marker)!r}, 'w').close()\n"
  for name in ("configuration_mine", "modeling_mine", "sitecustomize"):
    (tmp_path / f"{name}.py").write_text(code)
  config = QWEN | {"model_type": model_type,
    "architectures": ["MyModel"], "trust_remote_code": True,
    "auto_map": {"AutoConfig": "configuration_mine.MyConfig",
      "AutoModel": "modeling_mine.MyModel",
      "AutoModelForCausalLM": "modeling_mine.MyModel"}}  # fmt: skip
  if model_type == "qwen2":
    assert read(tmp_path, config) == SAME
  else:
    refused(written(tmp_path, config), "model_type 'mine' ... supported")
  assert not marker.exists()


@pytest.mark.parametrize("spelling", [old, new])
@pytest.mark.parametrize("name", HUB)
def test_configs_of_the_hub_are_read_and_written(tmp_path, name, spelling):
  """So that both generations of transformers read them."""
  config, want = HUB[name]
  source = spelling(config)
  policy = read(tmp_path, source)
  assert policy == want
  # As it was: what is unknown here is written back too.
  assert json.loads(policy.origin) == source
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
    assert rope["sliding_attention"] == {"rope_type": "default",
      "rope_theta": want.sliding_rope.theta}  # fmt: skip
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
  policy = Policy(vocab=32, width=16, layers=2, heads=4, kv_heads=2,
    head_size=6, mlp=20, rope=Rope(3e4), norm_eps=1e-5, tied=tied,
    qkv_bias=True, max_positions=77)  # fmt: skip
  fields = architectures.config_of(policy, "bfloat16")
  assert fields["architectures"] == ["Qwen2ForCausalLM"]
  assert fields["dtype"] == fields["torch_dtype"] == "bfloat16"
  for view in (dict, old, new):
    assert read(tmp_path, view(fields)) == policy


def test_code_of_the_source_is_not_written_on(tmp_path):
  auto = {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}
  policy = read(tmp_path, but(QWEN, **auto))
  assert "auto_map" not in architectures.config_of(policy, "float32")
