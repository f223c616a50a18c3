"""Which decoder a config.json describes, and the config.json of a decoder.

Transformers' own config classes supply defaults and read old spellings. This
file refuses, by its name, each option that the policy does not support.
"""

import copy
import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from brorl_jax.model.policy import Policy
from brorl_jax.model.spec import PolicySpec, Rope
from brorl_jax.model.tokenizer import model_file

_KINDS = "gemma2 gemma3_text llama mistral qwen2 qwen3 qwen3_moe".split()
_SIZES = (
  "vocab_size hidden_size num_hidden_layers num_attention_heads "
  "num_key_value_heads"
).split()
_BOUNDS = {  # of fields, used or not: integers, above what number, or a choice
  "vocab_size hidden_size intermediate_size moe_intermediate_size head_dim "
  "num_attention_heads num_key_value_heads num_experts num_experts_per_tok "
  "max_position_embeddings original_max_position_embeddings sliding_window "
  "sliding_window_pattern query_pre_attn_scalar": range(1, 2**31),
  "num_hidden_layers": range(1, 10**5),  # transformers makes lists of them
  "max_window_layers": range(2**31),
  "rms_norm_eps attn_logit_softcapping final_logit_softcapping factor mscale "
  "mscale_all_dim attention_factor beta_fast beta_slow high_freq_factor "
  "low_freq_factor": 1e-37,  # float32 has none below 1e-38 or above 3e38
  "rope_theta rope_local_base_freq": 1.0,  # at which all pairs turn alike
  "attention_bias mlp_bias norm_topk_prob tie_word_embeddings truncate "
  "use_sliding_window": (False, True),
  "dtype torch_dtype": ("float32", "bfloat16", "float16"),
}
_RULES = {name: x for names, x in _BOUNDS.items() for name in names.split()}
_ACTIVATIONS = {
  "silu": "silu",
  "swish": "silu",
  "gelu_pytorch_tanh": "gelu_tanh",
}


def read_policy(directory: str | pathlib.Path, *, dtype: str) -> Policy:
  """The decoder that `config.json` of a directory describes, else ValueError.

  `dtype` is that of activations and caches.
  """
  if dtype not in ("float32", "bfloat16"):
    raise ValueError(f"dtype {dtype!r} is neither 'float32' nor 'bfloat16'")
  directory = pathlib.Path(directory)
  if not directory.is_dir():
    raise ValueError(f"checkpoint {str(directory)!r} is no directory; give one")
  path = directory / "config.json"
  raw = read_json(path)
  if "model_type" not in raw and isinstance(raw.get("config"), dict):
    raise ValueError(
      f"{directory} is the folder of a run, not a model directory: read its "
      f"policy with brorl_jax.load({str(directory)!r}), or make a model "
      "directory with --mode=export"
    )
  return from_config(raw, path, dtype=dtype)


def from_config(
  raw: dict[str, Any], path: pathlib.Path, *, dtype: str
) -> Policy:
  """As `read_policy`, of the content of a file; `path` is for messages."""
  try:
    policy = _policy(_config(path, raw), dtype)
  except _Unsupported as e:
    raise ValueError(f"{path}: {e}") from None
  return dataclasses.replace(policy, origin=json.dumps(raw))


class _Unsupported(ValueError):
  def __init__(self, field: str, value: Any, may: str):
    super().__init__(f"{field} {value!r} is {may}")


def _newest(raw: dict[str, Any]) -> Any:
  """transformers' view of config.json: its newest spelling, types checked."""
  from transformers import CONFIG_MAPPING  # 1 s, not for --help

  raw = copy.deepcopy(raw)  # `from_dict` changes it
  # Of Gemma 3 transformers reads `rope_type` alone.
  if isinstance(old := raw.get("rope_scaling"), dict) and "type" in old:
    raw["rope_scaling"] = {"rope_type": old["type"], **old}
  # A class of transformers, whatever code the directory brings.
  return CONFIG_MAPPING[raw["model_type"]].from_dict(raw)


def _config(path: pathlib.Path, raw: dict[str, Any]) -> Any:
  """`_newest`, of a file that has all that a policy needs."""
  kind = raw.get("model_type")
  if not isinstance(kind, str) or kind not in _KINDS:
    raise _Unsupported(
      "model_type", kind, f"not supported, only {', '.join(_KINDS)}"
    )
  for field in ("rope_parameters", "rope_scaling"):
    if not isinstance(raw.get(field) or {}, dict):
      raise _Unsupported(field, raw[field], "not an object")
  rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
  ropes = [rope, *(v for v in rope.values() if isinstance(v, dict))]
  for nested in ropes:
    _rope_kind(nested)
  if raw.get("quantization_config"):
    raise _Unsupported(
      "quantization_config", "...", "not supported; give the full weights"
    )
  # transformers would take what is missing from some model it knows.
  wanted = {*_SIZES, "rms_norm_eps", "rope_theta", _mlp_field(kind)}
  if kind == "qwen3_moe":
    wanted |= {"num_experts_per_tok"}
  if kind == "llama":  # older ones do without, and its defaults are right
    wanted -= {"num_key_value_heads", "rope_theta"}
  # Of all layers, or of the first kind of layers that has one.
  thetas = [x["rope_theta"] for x in ropes if x.get("rope_theta") is not None]
  given = raw | ({"rope_theta": thetas[0]} if thetas else {})
  for field in sorted(wanted):
    if field not in given:
      raise ValueError(f"{path}: no field {field!r}")
  for fields in (given, raw, raw.get("rope_scaling") or {}, *ropes):
    for field in _RULES:
      if fields.get(field) is not None or (fields is given and field in wanted):
        _checked(fields[field], field)
  try:
    return _newest(raw)
  except Exception as e:  # its validators raise many kinds
    raise ValueError(f"{path}: {' '.join(str(e).split())}") from None


def _mlp_field(kind: str) -> str:
  return "moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"


def _policy(c: Any, dtype: str) -> Policy:
  kind = c.model_type
  gemma, moe = kind.startswith("gemma"), kind == "qwen3_moe"
  heads, head_size = _heads(c)
  sliding = _sliding(c)
  rope, local = c.rope_parameters or {}, None
  if kind == "gemma3_text":
    rope, local = rope["full_attention"], rope["sliding_attention"]
  field = "hidden_activation" if gemma else "hidden_act"
  if (name := getattr(c, field)) not in _ACTIVATIONS:
    known = ", ".join(_ACTIVATIONS)
    raise _Unsupported(field, name, f"not supported, only {known}")
  every = kind not in ("qwen2", "mistral") and bool(c.attention_bias)
  turns = _rope(rope, c.max_position_embeddings)
  longest = c.max_position_embeddings
  if turns.kind == "yarn":  # some configs give the length before stretching
    longest = max(longest, int(turns.factor * turns.trained))
  return Policy(
    vocab=c.vocab_size,
    width=c.hidden_size,
    layers=c.num_hidden_layers,
    heads=heads,
    kv_heads=c.num_key_value_heads,
    head_size=head_size,
    mlp=getattr(c, _mlp_field(kind)),
    rope=turns,
    norm_eps=float(c.rms_norm_eps),
    tied=bool(c.tie_word_embeddings),
    dtype=dtype,
    max_positions=longest,
    qkv_bias=every or kind == "qwen2",
    output_bias=every,
    qk_norm=kind in ("qwen3", "qwen3_moe", "gemma3_text"),
    query_scale=c.query_pre_attn_scalar**-0.5 if gemma else None,
    attention_softcap=_cap(c, "attn_logit_softcapping", kind == "gemma2"),
    window=c.sliding_window if sliding else 0,
    sliding=sliding,
    sliding_rope=_rope(local, 0) if local and sliding else None,
    mlp_bias=kind == "llama" and bool(c.mlp_bias),
    activation=_ACTIVATIONS[name],
    embed_scale=c.hidden_size**0.5 if gemma else 1.0,
    norm_offset=1.0 if gemma else 0.0,
    post_norms=gemma,
    final_softcap=_cap(c, "final_logit_softcapping", gemma),
    **(_experts(c) if moe else {}),
  )


def _heads(c: Any) -> tuple[int, int]:
  heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
  if heads % kv_heads:
    raise _Unsupported(
      "num_key_value_heads", kv_heads, f"not a divisor of {heads} heads"
    )
  size = getattr(c, "head_dim", None)
  size = _checked(c.hidden_size // heads if size is None else size, "head_dim")
  if size % 2:
    raise _Unsupported("head_dim", size, "odd; components turn in pairs")
  return heads, size


def _cap(c: Any, field: str, used: bool) -> float:
  """A bound of scores or logits; 0 if there is none."""
  cap = getattr(c, field, None)
  if cap is None:
    return 0.0
  if not used:
    raise _Unsupported(field, cap, f"not for {c.model_type}")
  return float(cap)


def _experts(c: Any) -> dict[str, Any]:
  for field, only in (("mlp_only_layers", []), ("decoder_sparse_step", 1)):
    if (value := getattr(c, field)) != only:
      raise _Unsupported(field, value, f"not supported, only {only}")
  experts, each = c.num_experts, c.num_experts_per_tok
  if each > experts:
    raise _Unsupported("num_experts_per_tok", each, f"more than {experts}")
  scaled = bool(c.norm_topk_prob)
  return dict(experts=experts, experts_per_token=each, normalize_experts=scaled)


def _checked(value: Any, field: str) -> Any:
  rule = _RULES[field]
  if isinstance(rule, range):
    good = type(value) is int and value in rule
    rule = f"an integer from {rule.start} to {rule.stop - 1:,}"
  elif isinstance(rule, float):
    good = type(value) in (int, float) and rule < value < 1e38
    rule = f"a number above {rule:g} and below 1e38"
  else:
    good = value in rule
  if not good:
    raise _Unsupported(field, value, f"not {rule}")
  return value


def _sliding(c: Any) -> tuple[bool, ...]:
  """Which layers slide; empty if none does."""
  if getattr(c, "use_bidirectional_attention", None):
    raise _Unsupported("use_bidirectional_attention", True, "not supported")
  if c.model_type == "llama":  # whatever its config says
    return ()
  # Of these all layers slide or none, whatever layer_types says.
  layers = c.num_hidden_layers
  kinds = ["sliding_attention"] * layers
  if c.model_type not in ("mistral", "qwen3_moe"):
    kinds = c.layer_types
  if unknown := set(kinds) - {"sliding_attention", "full_attention"}:
    raise _Unsupported("layer_types", sorted(unknown), "not supported")
  if len(kinds) != layers:
    raise _Unsupported("layer_types", kinds, f"not of {layers} layers")
  if getattr(c, "sliding_window", None) is None:
    return ()
  slides = tuple(kind == "sliding_attention" for kind in kinds)
  return slides if any(slides) else ()


def _rope_kind(p: Mapping[str, Any]) -> str:
  kind = p.get("rope_type", p.get("type", "default"))
  if kind not in Rope.KINDS:
    raise _Unsupported(
      "rope_type", kind, f"not supported, only {', '.join(Rope.KINDS)}"
    )
  return kind


def _rope(p: Mapping[str, Any], max_positions: int) -> Rope:
  """From rope_parameters; a factor that is not given follows from lengths."""
  kind = _rope_kind(p)
  if p.get("partial_rotary_factor") not in (None, 1, 1.0):
    raise _Unsupported(
      "partial_rotary_factor", p["partial_rotary_factor"], "not supported"
    )
  theta = float(_checked(p.get("rope_theta"), "rope_theta"))
  if kind in ("default", "dynamic"):
    return Rope(theta, kind)
  if kind == "linear":
    return Rope(theta, kind, factor=float(_checked(p.get("factor"), "factor")))
  field = "original_max_position_embeddings"
  trained = _checked(p.get(field, max_positions), field)
  factor = p.get("factor")
  factor = float(max_positions / trained if factor is None else factor)
  if kind == "llama3":
    low, high = (
      float(_checked(p.get(field), field))
      for field in ("low_freq_factor", "high_freq_factor")
    )
    if high <= low:
      raise _Unsupported("high_freq_factor", high, f"not above {low}")
    return Rope(theta, kind, factor, trained, low, high)
  low = float(p.get("beta_slow") or 1.0)
  high = float(p.get("beta_fast") or 32.0)
  if high <= low:
    raise _Unsupported("beta_fast", high, f"not above {low}")
  truncate, scale = bool(p.get("truncate", True)), _yarn_scale(p, factor)
  return Rope(theta, kind, factor, trained, low, high, truncate, scale)


def _yarn_scale(p: Mapping[str, Any], factor: float) -> float:
  """Peng et al. 2023 (YaRN), arXiv:2309.00071, eq. 22; DeepSeek's ratio."""
  if p.get("attention_factor") is not None:
    return float(p["attention_factor"])
  grown = lambda by: 0.1 * by * math.log(factor) + 1.0 if factor > 1.0 else 1.0
  if p.get("mscale") and p.get("mscale_all_dim"):
    return grown(p["mscale"]) / grown(p["mscale_all_dim"])
  return grown(1.0)


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """A file that holds one JSON object, else ValueError."""
  model_file(path)
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
  """config.json in the spelling of transformers 5 and of 4, and so of vLLM. A
  policy without `origin` is written as a Qwen2. `dtype` is of the weights.
  """
  fields = json.loads(policy.origin) if policy.origin else _qwen2(policy)
  fields.pop("auto_map", None)  # points to code that does not come along
  fields |= {"dtype": dtype, "torch_dtype": dtype}
  if "num_local_experts" in fields:  # so transformers 5
    fields["num_experts"] = fields["num_local_experts"]
  rope = fields.get("rope_parameters")
  if rope is None:  # written by transformers 4
    return fields | {"rope_parameters": _newest(fields).rope_parameters}
  full = rope.get("full_attention", rope)
  fields["rope_theta"] = full.get("rope_theta", fields.get("rope_theta"))
  if "sliding_attention" in rope:
    fields["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
  if full.get("rope_type", "default") != "default":
    fields["rope_scaling"] = full | {"type": full["rope_type"]}
  return fields
