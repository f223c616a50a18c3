"""A Hugging Face directory <-> policy and parameters.

`config.json` says which decoder it is, `model.safetensors` (or several, with
an index) holds the weights. Nothing else is read, and nothing is executed.
"""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jax.sharding import Mesh
from jaxtyping import PyTree

from brorl_jax import sharding
from brorl_jax.policy import Policy

_WEIGHTS = "model.safetensors"

# Path of a parameter -> the tensor's name there; {} is the layer.
_NAMES = {
  ("embed", "embedding"): "model.embed_tokens.weight",
  ("ln_final", "scale"): "model.norm.weight",
  ("head", "kernel"): "lm_head.weight",
  ("blocks", "ln_attn", "scale"): "model.layers.{}.input_layernorm.weight",
  ("blocks", "ln_mlp", "scale"): (
    "model.layers.{}.post_attention_layernorm.weight"
  ),
  **{
    ("blocks", ours, kind[0]): f"model.layers.{{}}.{theirs}.{kind[1]}"
    for ours, theirs in {
      "q": "self_attn.q_proj",
      "k": "self_attn.k_proj",
      "v": "self_attn.v_proj",
      "o": "self_attn.o_proj",
      "gate": "mlp.gate_proj",
      "up": "mlp.up_proj",
      "down": "mlp.down_proj",
    }.items()
    for kind in (("kernel", "weight"), ("bias", "bias"))
  },
}


def read_policy(directory: str | pathlib.Path, *, dtype: str) -> Policy:
  """The decoder that `config.json` describes.

  Args:
    directory: A Hugging Face model directory.
    dtype: Of activations and caches.

  Raises:
    ValueError: Not such a directory, or an architecture that is not supported.
  """
  if dtype not in ("float32", "bfloat16"):
    raise ValueError(f"dtype {dtype!r} is neither 'float32' nor 'bfloat16'")
  directory = pathlib.Path(directory)
  if not directory.is_dir():
    raise ValueError(f"checkpoint {str(directory)!r} is not a directory")
  path = directory / "config.json"
  c = _read_json(path)
  rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
  if not isinstance(rope, dict):
    raise ValueError(f"{path}: rope_parameters {rope!r} is not an object")
  supported = {
    "model_type": (c.get("model_type"), "qwen2"),
    "hidden_act": (c.get("hidden_act", "silu"), "silu"),
    # Older files say "type".
    "rope_type": (
      rope.get("rope_type", rope.get("type", "default")),
      "default",
    ),
    "use_sliding_window": (c.get("use_sliding_window", False), False),
  }
  for field, (got, want) in supported.items():
    if got != want:
      raise ValueError(
        f"{path}: {field} {got!r} is not supported, only {want!r}"
      )

  def size(field: str) -> int:
    value = c[field]
    if not isinstance(value, int) or value < 1:
      raise ValueError(f"{path}: {field} {value!r} is not a positive integer")
    return value

  def number(name: str, value) -> float:
    if not isinstance(value, int | float) or not 0.0 < value < float("inf"):
      raise ValueError(f"{path}: {name} {value!r} is not a positive number")
    return float(value)

  try:
    # transformers 5 writes rope_parameters, transformers 4 rope_theta.
    theta = rope.get("rope_theta") or c["rope_theta"]
    width, heads = size("hidden_size"), size("num_attention_heads")
    return Policy(
      vocab=size("vocab_size"),
      width=width,
      layers=size("num_hidden_layers"),
      heads=heads,
      kv_heads=size("num_key_value_heads"),
      head_size=c.get("head_dim") or width // heads,
      mlp=size("intermediate_size"),
      rope_theta=number("rope_theta", theta),
      norm_eps=number("rms_norm_eps", c["rms_norm_eps"]),
      tied=c.get("tie_word_embeddings", False),
      qkv_bias=True,
      dtype=dtype,
    )
  except KeyError as e:
    raise ValueError(f"{path}: no field {e}") from None


def load(
  directory: str | pathlib.Path,
  *,
  dtype: str = "float32",
  mesh: Mesh | None = None,
) -> tuple[Policy, PyTree]:
  """Policy and float32 parameters of a Hugging Face directory.

  Args:
    directory: Holds config.json and model.safetensors, or several of them with
      model.safetensors.index.json.
    dtype: Of activations and caches. Parameters are float32.
    mesh: Where the parameters go; the first device if None.

  Returns:
    The static policy and the nested dict of its parameters.

  Raises:
    ValueError: Something is missing, unknown, damaged or of the wrong shape.
      The message names the file and the tensor.
  """
  directory = pathlib.Path(directory)
  policy = read_policy(directory, dtype=dtype)
  abstract = jax.eval_shape(policy.init, jax.random.key(0))
  tensors = _read_tensors(directory)
  if policy.tied:  # some writers repeat the embedding under its other name
    tensors.pop(_NAMES["head", "kernel"], None)

  def take(path, leaf) -> np.ndarray:
    keys = tuple(k.key for k in path)
    parts = []
    for name in _names(keys, policy):
      if name not in tensors:
        raise ValueError(f"{directory}: no tensor {name}")
      value = tensors.pop(name)
      want = _stored_shape(keys, leaf.shape)
      if value.shape != want:
        raise ValueError(f"{directory}: {name} is {value.shape}, not {want}")
      value = value.astype(np.float32)
      if not np.isfinite(value).all():
        raise ValueError(
          f"{directory}: {name} holds values that are not finite"
        )
      parts.append(value.T if keys[-1] == "kernel" else value)
    return np.stack(parts).reshape(leaf.shape)

  host = jax.tree_util.tree_map_with_path(take, abstract)
  if tensors:
    raise ValueError(
      f"{directory}: unknown tensors {', '.join(sorted(tensors))}"
    )
  if mesh is None:
    return policy, jax.tree.map(jnp.asarray, host)
  places = sharding.param_shardings(abstract, mesh)
  return policy, jax.tree.map(
    lambda a, place: jax.make_array_from_callback(
      a.shape, place, a.__getitem__
    ),
    host,
    places,
  )


def save(directory: str | pathlib.Path, policy: Policy, params: PyTree) -> None:
  """Writes the config.json and model.safetensors that transformers loads.

  Args:
    directory: Made if it does not exist.
    policy: What `load` returned, or the like.
    params: Its parameters; written in their own dtype.
  """
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  tensors = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    keys = tuple(k.key for k in path)
    value = np.asarray(leaf)
    parts = value if keys[0] == "blocks" else value[None]
    for name, part in zip(_names(keys, policy), parts, strict=True):
      stored = _stored_shape(keys, value.shape)
      if keys[-1] == "kernel":
        part = part.reshape(stored[::-1]).T
      tensors[name] = np.ascontiguousarray(part).reshape(stored)
  safetensors.numpy.save_file(
    tensors, directory / _WEIGHTS, metadata={"format": "pt"}
  )
  text = json.dumps(_config(policy, value.dtype.name), indent=2)
  (directory / "config.json").write_text(text + "\n")


def _names(keys: tuple[str, ...], policy: Policy) -> list[str]:
  name = _NAMES[keys]
  if keys[0] != "blocks":
    return [name]
  return [name.format(layer) for layer in range(policy.layers)]


def _stored_shape(keys: tuple[str, ...], shape) -> tuple[int, ...]:
  """A kernel [L, in, *out] here is a matrix [out, in] per layer there."""
  one = shape[1:] if keys[0] == "blocks" else shape
  if keys[-1] == "bias":
    return (int(np.prod(one)),)
  if keys[-1] != "kernel":
    return tuple(one)
  inputs = int(np.prod(one[:-1])) if keys[1] == "o" else one[0]
  return (int(np.prod(one)) // inputs, inputs)


def _read_tensors(directory: pathlib.Path) -> dict[str, np.ndarray]:
  index = directory / f"{_WEIGHTS}.index.json"
  files = [_WEIGHTS]
  if index.exists():
    where = _read_json(index).get("weight_map")
    if not isinstance(where, dict) or not where:
      raise ValueError(f"{index}: no weight_map from tensors to files")
    files = sorted(set(map(str, where.values())))
    for name in files:
      # A path would reach outside of the directory.
      if pathlib.PurePath(name).name != name:
        raise ValueError(f"{index}: {name!r} is not a file name")
  tensors = {}
  for name in files:
    path = directory / name
    if not path.is_file():
      raise ValueError(f"{path} is missing; weights are read from safetensors")
    try:
      tensors |= safetensors.numpy.load_file(path)
    except (safetensors.SafetensorError, OSError) as e:
      raise ValueError(f"{path} is damaged: {e}") from None
  return tensors


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  try:
    value = json.loads(path.read_text())
  except (OSError, ValueError) as e:
    raise ValueError(f"{path} cannot be read: {e}") from None
  if not isinstance(value, dict):
    raise ValueError(f"{path} is not a JSON object")
  return value


def _config(policy: Policy, dtype: str) -> dict[str, Any]:
  """config.json in the spelling of transformers 5 and of 4."""
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
    "max_position_embeddings": 32768,
    "rms_norm_eps": policy.norm_eps,
    "rope_theta": policy.rope_theta,
    "rope_parameters": {
      "rope_theta": policy.rope_theta,
      "rope_type": "default",
    },
    "tie_word_embeddings": policy.tied,
    "use_sliding_window": False,
    "attention_dropout": 0.0,
    "dtype": dtype,
    "torch_dtype": dtype,
  }
