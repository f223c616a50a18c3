"""A Hugging Face directory <-> policy and parameters on a mesh.

`config.json` says which decoder it is, `model.safetensors` (or several, with
an index) holds the weights. Nothing else is read, and nothing is executed.
"""

import contextlib
import dataclasses
import json
import pathlib
import re
import shutil
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy
from jax.sharding import Mesh
from jaxtyping import PyTree

from brorl_jax.errors import first_line
from brorl_jax.model import architectures, hf_format, weight_files
from brorl_jax.model.policy import Policy

ASSETS = pathlib.Path(__file__).parents[1] / "assets"  # the embedded policies
EMBEDDED = {"": ASSETS, "embedded:steps": ASSETS / "steps"}


# What belongs to a model beside config and weights, copied as it is.
_BESIDE = (
  "tokenizer.json",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "added_tokens.json",
  "vocab.json",
  "merges.txt",
  "tokenizer.model",
  "chat_template.jinja",
  "chat_template.json",
  "generation_config.json",
)


def locate(checkpoint: str) -> pathlib.Path:
  """The directory of a checkpoint, downloaded first if it is a hub's name.

  Args:
    checkpoint: A directory, "organisation/name", or a name of EMBEDDED.

  Raises:
    ValueError: It is neither, or there is no way to download it.
  """
  if checkpoint in EMBEDDED:
    return EMBEDDED[checkpoint]
  path = pathlib.Path(checkpoint)
  if path.is_dir():
    return path
  if path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", checkpoint):
    raise ValueError(
      f"checkpoint {checkpoint!r} is not a directory; give one, the hub "
      "name of a model, organisation/name, or embedded:steps"
    )
  import huggingface_hub  # comes with transformers

  # Not every *.safetensors: some hold the same weights twice.
  wanted = ["config.json", "model*.safetensors", weight_files.INDEX, *_BESIDE]
  try:
    return pathlib.Path(
      huggingface_hub.snapshot_download(checkpoint, allow_patterns=wanted)
    )
  except Exception as e:  # no network, no such name, no permission, ...
    name = path.name
    raise ValueError(
      f"checkpoint {checkpoint!r} is not a directory here, and its download "
      f"failed ({first_line(e)}): where there is a network run 'hf download "
      f"{checkpoint} --local-dir {name}', then give "
      f"--config.policy.checkpoint={name}"
    ) from None


def load(
  directory: str | pathlib.Path,
  *,
  dtype: str = "float32",
  mesh: Mesh | None = None,
  param_dtype: str = "float32",
) -> tuple[Policy, PyTree]:
  """Policy and parameters of a Hugging Face directory.

  Each device reads its own slices from the files, layer by layer: the host
  never holds more than one layer, or one tensor outside of the layers. Damage
  that leaves sizes and finite numbers cannot be seen: the format has no digest.

  Args:
    directory: Holds config.json and model.safetensors, or several of them with
      model.safetensors.index.json.
    dtype: Of activations and caches.
    mesh: Where the parameters go; the first device if None.
    param_dtype: Of the parameters, "float32" or "bfloat16".

  Returns:
    The static policy and the nested dict of its parameters.

  Raises:
    ValueError: Something is missing, unknown, damaged or of the wrong shape.
      The message names the file and the tensor.
  """
  if param_dtype not in ("float32", "bfloat16"):
    raise ValueError(
      f"param_dtype {param_dtype!r} is neither 'float32' nor 'bfloat16'"
    )
  directory = pathlib.Path(directory)
  policy = architectures.read_policy(directory, dtype=dtype)
  stored, places = weight_files.layout(policy, mesh)
  with contextlib.ExitStack() as stack:
    files = weight_files.open_all(directory, stack)
    weight_files.check(directory, files, stored, policy)
    try:
      return policy, weight_files.read(
        directory, files, stored, places, policy.layers, mesh, param_dtype
      )
    except safetensors.SafetensorError as e:
      raise ValueError(f"{directory} is damaged: {e}") from None


def save(
  directory: str | pathlib.Path,
  policy: Policy,
  params: PyTree,
  *,
  dtype: str | None = None,
  source: str | pathlib.Path | None = None,
  shard_bytes: int = 5_000_000_000,
) -> None:
  """Writes a directory that transformers and vLLM load.

  config.json and the weights of an older model are removed first, and
  config.json is written last: a directory that was not finished is not taken
  for a model.

  Args:
    directory: Made if it does not exist.
    policy: What `load` returned, or a Qwen2 made by hand.
    params: Its parameters.
    dtype: Of the weights that are written; that of `params` if None.
    source: Directory whose tokenizer is copied.
    shard_bytes: Weights beyond it go into several files with an index.

  Raises:
    ValueError: config.json cannot express this policy.
  """
  directory = pathlib.Path(directory)
  dtype = str(dtype or jax.tree.leaves(params)[0].dtype)
  if dtype not in weight_files.DTYPES.values():
    raise ValueError(
      f"dtype {dtype!r} is not one of {', '.join(weight_files.DTYPES.values())}"
    )
  config = hf_format.config_of(policy, dtype)
  directory.mkdir(parents=True, exist_ok=True)
  _require_same(directory, config, policy)
  for stale in ("config.json", weight_files.INDEX):
    (directory / stale).unlink(missing_ok=True)
  for stale in directory.glob("model*.safetensors"):
    stale.unlink()

  stored, _ = weight_files.layout(policy, None)
  shards = _shards(stored, policy.layers, np.dtype(dtype).itemsize, shard_bytes)
  where = {}
  for number, shard in enumerate(shards, 1):
    name = weight_files.WEIGHTS
    if len(shards) > 1:
      name = f"model-{number:05}-of-{len(shards):05}.safetensors"
    tensors = {}
    for keys, layer in shard:
      tensors |= _written(stored, params, keys, layer, dtype)
    where |= dict.fromkeys(tensors, name)
    part = directory / f"{name}.part"
    safetensors.numpy.save_file(tensors, part, metadata={"format": "pt"})
    part.chmod(0o644)  # safetensors lets nobody else read it
    part.replace(directory / name)
  for name in _BESIDE:
    path = pathlib.Path(source or directory) / name
    if source is not None and path.is_file():
      shutil.copyfile(path, directory / name)
  if len(shards) > 1:
    total = sum(x.size for x in jax.tree.leaves(params))
    size = {"total_size": total * np.dtype(dtype).itemsize}
    _write_json(
      directory / weight_files.INDEX, {"metadata": size, "weight_map": where}
    )
  _write_json(directory / "config.json", config)


def _require_same(
  directory: pathlib.Path, config: dict[str, Any], policy: Policy
) -> None:
  """What is written is what will be read."""
  trial = directory / "config.part"
  trial.mkdir(exist_ok=True)
  _write_json(trial / "config.json", config)
  try:
    again = architectures.read_policy(trial, dtype=policy.dtype)
  finally:
    shutil.rmtree(trial)
  for field in dataclasses.fields(policy):
    want, got = getattr(policy, field.name), getattr(again, field.name)
    if field.compare and want != got:
      raise ValueError(
        f"config.json says {field.name} = {got!r}, the policy has {want!r}: "
        "one of them was changed after loading; load again"
      )


def _shards(
  stored: PyTree, layers: int, itemsize: int, most: int
) -> list[list[tuple[tuple[str, ...], int]]]:
  """Parameters, layer by layer, in files of at most `most` bytes each."""
  shards, size = [[]], 0
  paths = jax.tree_util.tree_leaves_with_path(
    stored, is_leaf=weight_files.is_stored
  )
  inside = [x for x in paths if x[0][0].key == "blocks"]
  parts = [(x, 0) for x in paths if x not in inside]
  parts += [(x, layer) for layer in range(layers) for x in inside]
  for (path, leaf), layer in parts:
    bytes_ = int(np.prod(leaf.shape)) * itemsize
    if shards[-1] and size + bytes_ > most:
      shards.append([])
      size = 0
    shards[-1].append((tuple(k.key for k in path), layer))
    size += bytes_
  return shards


def _written(
  stored: PyTree, params: PyTree, keys: Sequence[str], layer: int, dtype: str
) -> dict[str, np.ndarray]:
  """The tensors of one parameter of one layer, as they are stored."""
  s, leaf = stored, params
  for key in keys:
    s, leaf = s[key], leaf[key]
  value = np.asarray(leaf[layer] if keys[0] == "blocks" else leaf).astype(dtype)
  if s.turned:
    value = value.reshape(*s.shape[:-2], s.shape[-1], s.shape[-2])
    value = np.swapaxes(value, -1, -2)
  value = np.ascontiguousarray(value.reshape(s.shape))
  if not s.experts:
    return {s.name.format(layer=layer): value}
  return {
    s.name.format(layer=layer, expert=e): one for e, one in enumerate(value)
  }


def _write_json(path: pathlib.Path, value: dict[str, Any]) -> None:
  part = path.with_name(f"{path.name}.part")
  part.write_text(json.dumps(value, indent=2) + "\n")
  part.replace(path)
