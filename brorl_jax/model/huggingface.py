"""A Hugging Face directory <-> policy and parameters on a mesh.

`config.json` says which decoder it is, `model.safetensors` (or several, with
an index) holds the weights. Nothing else is read, and nothing is executed.
"""

import contextlib
import dataclasses
import functools
import json
import math
import operator
import pathlib
import re
import shutil
import sys
from typing import Any, NamedTuple

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from brorl_jax.errors import first_line
from brorl_jax.model import adapters, architectures, sharding
from brorl_jax.model.policy import Policy
from brorl_jax.model.tokenizer import ASSETS, FILES, model_file

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# Constants that transformers 4 and before wrote beside the weights.
_COMPUTED = ".rotary_emb.inv_freq"
EMBEDDED = {"": ASSETS} | {
  f"embedded:{name}": ASSETS / name for name in ("hard", "steps")
}
# A model of the hub: its name, the last part of that, and a revision.
HUB = re.compile(r"([\w.-]+/([\w.-]+))(?:@([\w.-]+(?:/[\w.-]+)*))?")


def locate(checkpoint: str, *, plan: bool = False) -> pathlib.Path:
  """The directory of a checkpoint, downloaded first if it is a hub's name.

  `checkpoint` is a directory, "organisation/name", which "@" and a branch, tag
  or commit may follow, or a name of EMBEDDED. A `plan` needs only config.json,
  and downloads nothing: it reads what is in the hub's cache.
  """
  if checkpoint in EMBEDDED:
    return EMBEDDED[checkpoint]
  path = pathlib.Path(checkpoint)
  if path.is_dir():
    return path
  named = HUB.fullmatch(checkpoint)
  if path.exists() or not named:
    raise ValueError(
      f"checkpoint {checkpoint!r} is not a directory; give one, the hub's name "
      "of a model, organisation/name or organisation/name@revision, "
      "embedded:hard or embedded:steps"
    )
  name, short, revision = named.groups()
  # Not every *.safetensors: some hold the same weights twice.
  wanted = ["config.json", "model*.safetensors", INDEX, *FILES]
  try:
    directory = pathlib.Path(
      huggingface_hub.snapshot_download(
        name, revision=revision, allow_patterns=wanted, local_files_only=plan
      )
    )
    needs = [] if plan else weight_files(directory)[1]
    lacks = [x for x in ("config.json", *needs) if not (directory / x).exists()]
    if not lacks or [*directory.glob("*.bin")]:  # `load` tells of pickles
      return directory
    why = f"{lacks[0]} is missing in {directory}"
  except Exception as e:  # no network, no such name, no permission, ...
    why = "no such snapshot" if plan else first_line(e)
  only = " config.json" if plan else ""
  at = f" --revision {revision}" if revision else ""
  need = "a plan needs only its config.json; " if plan else ""
  raise ValueError(
    f"checkpoint {checkpoint!r} is neither a directory here nor whole in the "
    f"hub's cache ({why}): {need}where there is a network run 'hf download "
    f"{name}{only}{at}', then this command again; or add '--local-dir {short}' "
    "and name that directory"
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
  never holds more than one layer, or one tensor outside of the layers. Other
  damage cannot be seen: the format has no digest. `dtype` is that of
  activations and caches. Without a mesh the parameters are on the first device.

  Raises ValueError, with the file and the tensor, if something is missing,
  unknown, damaged or of the wrong shape.
  """
  if param_dtype not in ("float32", "bfloat16"):
    raise ValueError(
      f"param_dtype {param_dtype!r} is neither 'float32' nor 'bfloat16'"
    )
  directory = pathlib.Path(directory)
  policy = architectures.read_policy(directory, dtype=dtype)
  stored, places = stored_layout(policy, mesh)
  with contextlib.ExitStack() as stack:
    files = open_tensors(directory, stack)
    check_tensors(directory, files, stored, policy)
    try:
      return policy, read_tensors(
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
  for a model. `policy` is what `load` returned, or a Qwen2 made by hand.
  Weights have the dtype of `params` unless one is given, and go into several
  files with an index beyond `shard_bytes`. The tokenizer of directory `source`
  is copied.

  Raises ValueError if config.json cannot express this policy.
  """
  directory = pathlib.Path(directory)
  dtype = str(dtype or jax.tree.leaves(params)[0].dtype)
  if dtype not in DTYPES.values():
    raise ValueError(f"dtype {dtype!r} is none of {', '.join(DTYPES.values())}")
  config = architectures.config_of(policy, dtype)
  directory.mkdir(parents=True, exist_ok=True)
  _require_same(directory, config, policy)
  for stale in ("config.json", INDEX):
    (directory / stale).unlink(missing_ok=True)
  for stale in directory.glob("model*.safetensors"):
    stale.unlink()

  tensors = _tensors(stored_layout(policy, None)[0], policy.layers)
  itemsize = np.dtype(dtype).itemsize
  shards = huggingface_hub.split_state_dict_into_shards_factory(
    tensors,
    get_storage_size=lambda tensor: math.prod(tensor.shape) * itemsize,
    filename_pattern="model{suffix}.safetensors",
    max_shard_size=shard_bytes,
  )
  for name, names in shards.filename_to_tensors.items():
    values = {x: _written(tensors[x], params, dtype) for x in names}
    part = directory / f"{name}.part"
    safetensors.numpy.save_file(values, part, metadata={"format": "pt"})
    part.chmod(0o644)  # safetensors makes it readable by its owner only
    part.replace(directory / name)
  for name in FILES:
    path = model_file(pathlib.Path(source or directory) / name)
    if source is not None and path.is_file():
      shutil.copyfile(path, directory / name)
  if shards.is_sharded:
    where = shards.tensor_to_filename
    index = {"metadata": shards.metadata, "weight_map": where}
    _write_json(directory / INDEX, index)
  _write_json(directory / "config.json", config)


def save_adapter(
  directory: pathlib.Path, policy: Policy, params: PyTree, *, base: str
) -> None:
  """Writes an adapter as PEFT's LoRA; `base`: its model's directory or name."""
  directory.mkdir()
  tensors = {}
  for module, leaves in adapters.split(params)[0]["blocks"].items():
    rank, a, b = policy.lora_rank, leaves["lora_a"], leaves["lora_b"]
    name = f"base_model.model.model.layers.{{}}.{_MODULES[module]}.lora_"
    for i in range(policy.layers):
      own = {"A": a[i].reshape(-1, rank), "B": b[i].reshape(rank, -1)}
      for side, x in own.items():
        value = np.ascontiguousarray(np.asarray(x).T)
        tensors[f"{name.format(i)}{side}.weight"] = value
  path = directory / "adapter_model.safetensors"
  safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
  path.chmod(0o644)  # safetensors makes it readable by its owner only
  hub = HUB.fullmatch(base)
  config = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base.partition("@")[0] if hub else base,
    "revision": hub and hub[3],
    "r": policy.lora_rank,
    "lora_alpha": policy.lora_scale * policy.lora_rank,
    "target_modules": [f"{name}_proj" for name in policy.lora_layers],
    "inference_mode": True,
  }
  _write_json(directory / "adapter_config.json", config)


def _require_same(
  directory: pathlib.Path, config: dict[str, Any], policy: Policy
) -> None:
  """What is written is what will be read."""
  path = directory / "config.json"
  again = architectures.from_config(config, path, dtype=policy.dtype)
  for field in dataclasses.fields(policy):
    want, got = getattr(policy, field.name), getattr(again, field.name)
    if field.compare and want != got:
      raise ValueError(
        f"config.json says {field.name} = {got!r}, the policy has {want!r}: "
        "one of them was changed after loading; load again"
      )


class _Tensor(NamedTuple):
  """A tensor of the files, and the part of a parameter that it holds."""

  keys: tuple[str, ...]  # of the parameter
  index: tuple[int, ...]  # layer and expert, of those that there are
  shape: tuple[int, ...]
  turned: bool


def _tensors(stored: PyTree, layers: int) -> dict[str, _Tensor]:
  """Every tensor by its name, layer by layer."""
  found = []
  for path, s in jax.tree_util.tree_leaves_with_path(stored, is_leaf=is_stored):
    keys = tuple(k.key for k in path)
    for layer in range(layers) if "{layer}" in s.name else (None,):
      for expert in (None,) if s.experts is None else range(s.experts):
        name = s.name.format(layer=layer, expert=expert)
        index = tuple(i for i in (layer, expert) if i is not None)
        shape = s.shape if expert is None else s.shape[1:]
        found.append((name, _Tensor(keys, index, shape, s.turned)))
  return dict(sorted(found, key=lambda x: x[1].index[:1]))


def _written(tensor: _Tensor, params: PyTree, dtype: str) -> np.ndarray:
  leaf = functools.reduce(operator.getitem, tensor.keys, params)
  value = np.asarray(leaf[tensor.index]).astype(dtype)
  if tensor.turned:
    value = value.reshape(tensor.shape[::-1]).T
  return np.ascontiguousarray(value.reshape(tensor.shape))


def _write_json(path: pathlib.Path, value: dict[str, Any]) -> None:
  part = path.with_name(f"{path.name}.part")
  part.write_text(json.dumps(value, indent=2) + "\n")
  part.replace(path)


is_stored = lambda x: isinstance(x, Stored)
_map = functools.partial(jax.tree.map, is_leaf=is_stored)


class Stored(NamedTuple):
  """How a parameter, or one layer of it, lies in the files."""

  name: str  # with {layer} and {expert} open
  shape: tuple[int, ...]  # experts are stacked to [E, out, in]
  spec: PartitionSpec  # of that shape
  policy_shape: tuple[int, ...]  # in the policy: [E?, in..., out...]
  turned: bool  # [out, in] there, [in, out] here

  @property
  def experts(self) -> int | None:
    """How many tensors of a layer are stacked; None if it is one."""
    return self.shape[0] if "{expert}" in self.name else None


def stored_layout(
  policy: Policy, mesh: Mesh | None
) -> tuple[PyTree, PyTree | None]:
  """How every parameter is stored, and where it goes."""
  abstract = policy.shapes
  places = None if mesh is None else sharding.param_shardings(abstract, mesh)

  def stored(path, leaf, place=None) -> Stored:
    keys = tuple(k.key for k in path)
    spec = () if place is None else place.spec
    spec = (*spec, *(None,) * (leaf.ndim - len(spec)))
    policy_shape = leaf.shape
    if keys[0] == "blocks":
      policy_shape, spec = policy_shape[1:], spec[1:]
    name = tensor_name(keys, policy)
    turned = keys[-1] == "kernel"
    if not turned:  # a bias is flat there; of its axes only the first is spread
      flat = (math.prod(policy_shape),) if keys[-1] == "bias" else policy_shape
      spec = spec[: len(flat)]
      return Stored(name, flat, PartitionSpec(*spec), policy_shape, turned)
    first = int("{expert}" in name)
    middle = first + (2 if keys[1] == "o" else 1)
    inputs, outputs = policy_shape[first:middle], policy_shape[middle:]
    shape = (*policy_shape[:first], math.prod(outputs), math.prod(inputs))
    spec = PartitionSpec(*spec[:first], spec[middle], spec[first])
    return Stored(name, shape, spec, policy_shape, turned)

  trees = (abstract,) if places is None else (abstract, places)
  return jax.tree_util.tree_map_with_path(stored, *trees), places


def weight_files(
  directory: pathlib.Path,
) -> tuple[dict[str, str] | None, list[str]]:
  """The file of each tensor, if an index says so, and all these files."""
  index = directory / INDEX
  if not index.exists():
    return None, [WEIGHTS]
  where = architectures.read_json(index).get("weight_map")
  if not isinstance(where, dict) or not where:
    raise ValueError(f"{index} has no 'weight_map' from tensors to files")
  for name in where.values():
    # A path would reach outside of the directory.
    plain = isinstance(name, str) and name.isprintable()
    if not plain or pathlib.PurePath(name).name != name:
      raise ValueError(f"{index}: {str(name)[:80]!r} is not a file name")
  return where, sorted(set(where.values()))


def open_tensors(
  directory: pathlib.Path, stack: contextlib.ExitStack
) -> dict[str, Any]:
  """Name of each tensor to a slice of its file; nothing is read yet."""
  index = directory / INDEX
  where, names = weight_files(directory)
  tensors = {}
  for name in names:
    path = model_file(directory / name, sys.maxsize)
    if not path.is_file():
      others = (".bin", ".pt", ".pth", ".gguf", ".ckpt")
      found = sorted(p.name for p in directory.iterdir() if p.suffix in others)
      why = f"; {found[0]} may be a pickle, which can run code" if found else ""
      raise ValueError(
        f"{path} is missing{why}; weights are read from safetensors"
      )
    try:
      file = stack.enter_context(safetensors.safe_open(path, "numpy"))
      slices = {key: file.get_slice(key) for key in file.keys()}
    except (safetensors.SafetensorError, OSError) as e:
      with path.open("rb") as start:
        pointer = start.read(16).startswith(b"version https://")
      why = "a pointer; run git lfs pull" if pointer else f"damaged: {e}"
      raise ValueError(f"{path} is {why}") from None
    if where is not None:
      indexed = {key for key, at in where.items() if at == name}
      if wrong := indexed ^ slices.keys():
        raise ValueError(
          f"{index} does not match {name}: {_listed(wrong)} must be in both or "
          "in neither; download the directory again"
        )
    tensors |= slices
  return tensors


def check_tensors(
  directory: pathlib.Path, files: dict[str, Any], stored: PyTree, policy: Policy
) -> None:
  """Raises ValueError unless the files hold what the policy needs."""
  leaves = jax.tree.leaves(stored, is_leaf=is_stored)
  count = sum(
    (policy.layers if "{layer}" in leaf.name else 1) * (leaf.experts or 1)
    for leaf in leaves
  )
  if count > 10 * len(files) + 1000:  # too many to name
    raise ValueError(
      f"{directory}: config.json describes {count:,} tensors, the files hold "
      f"{len(files):,}"
    )
  want = _tensors(stored, policy.layers)
  if missing := want.keys() - files.keys():
    raise ValueError(f"{directory}: no tensor {_listed(missing)}")
  extra = {name for name in files if not name.endswith(_COMPUTED)} - want.keys()
  if policy.tied:  # some writers repeat the embedding under its other name
    extra -= {"lm_head.weight"}
  if extra:
    raise ValueError(f"{directory}: unknown tensors {_listed(extra)}")
  for name, tensor in want.items():
    if (got := tuple(files[name].get_shape())) != tensor.shape:
      raise ValueError(f"{directory}: {name} is {got}, not {tensor.shape}")
    if (dtype := files[name].get_dtype()) not in DTYPES:
      raise ValueError(
        f"{directory}: {name} is {dtype}, not one of {', '.join(DTYPES)}"
      )


def _listed(names: set[str]) -> str:
  plain = lambda name: name if name.isprintable() else repr(name)
  shown = [plain(name)[:200] for name in sorted(names)[:8]]
  more = f" and {len(names) - 8} more" if len(names) > 8 else ""
  return ", ".join(shown) + more


def read_tensors(
  directory: pathlib.Path,
  files: dict[str, Any],
  stored: PyTree,
  places: PyTree | None,
  layers: int,
  mesh: Mesh | None,
  dtype: str,
) -> PyTree:
  """Parameters on their devices."""

  def put(layer: int, s: Stored) -> jax.Array:
    """A parameter of one layer as it is stored; each device reads its part."""

    def one(expert: int, index: Any) -> np.ndarray:
      name = s.name.format(layer=layer, expert=expert)
      value = files[name][index]
      if np.isfinite(value).all():
        return value
      raise ValueError(f"{directory}: {name} holds values that are not finite")

    def part(index: Any) -> np.ndarray:
      if not s.experts:
        return one(0, index)
      experts = range(s.experts)[index[0]]
      return np.stack([one(expert, index[1:]) for expert in experts])

    if mesh is None:
      return jnp.asarray(part((slice(None),) * len(s.shape)))
    place = NamedSharding(mesh, s.spec)
    return jax.make_array_from_callback(s.shape, place, part)

  read = lambda layer, tree: _map(functools.partial(put, layer), tree)

  def turn(s: Stored, x: jax.Array) -> jax.Array:
    """From the files' layout to the policy's."""
    x = jnp.swapaxes(x, -1, -2) if s.turned else x
    return x.reshape(s.policy_shape).astype(dtype)

  at = lambda name: None if places is None else places[name]

  inside = stored["blocks"]
  zero = lambda s: jnp.zeros((layers, *s.policy_shape), dtype)
  stack = jax.jit(lambda: _map(zero, inside), out_shardings=at("blocks"))()

  @functools.partial(jax.jit, donate_argnums=0, out_shardings=at("blocks"))
  def place(stack, read_layer, layer):
    into = lambda s, whole, x: whole.at[layer].set(turn(s, x))
    return _map(into, inside, stack, read_layer)

  for layer in range(layers):
    # Waits, else the host would run ahead and hold several layers.
    stack = jax.block_until_ready(place(stack, read(layer, inside), layer))
  params = {"blocks": stack}
  for name, tree in stored.items():
    if name != "blocks":
      turns = lambda one, tree=tree: _map(turn, tree, one)
      params[name] = jax.jit(turns, out_shardings=at(name))(read(0, tree))
  return params


def tensor_name(keys: tuple[str, ...], policy: Policy) -> str:
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
_MLP = ("gate", "up", "down")
_MODULES = {
  **{x: f"self_attn.{x}_proj" for x in "qkvo"},
  **{x: f"mlp.{x}_proj" for x in _MLP},
  **{f"expert_{x}": f"mlp.experts.{{expert}}.{x}_proj" for x in _MLP},
  "router": "mlp.gate",
}
