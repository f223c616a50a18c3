"""The tensors of a Hugging Face directory: their files, and reading them."""

import contextlib
import functools
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from brorl_jax.model import hf_format, sharding
from brorl_jax.model.policy import Policy

WEIGHTS = "model.safetensors"


INDEX = "model.safetensors.index.json"


DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


# Constants that transformers 4 and before wrote beside the weights.
_COMPUTED = ".rotary_emb.inv_freq"


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


def layout(policy: Policy, mesh: Mesh | None) -> tuple[PyTree, PyTree | None]:
  """How every parameter is stored, and where it goes."""
  abstract = policy.shapes
  places = None if mesh is None else sharding.param_shardings(abstract, mesh)

  def layout(path, leaf) -> Stored:
    keys = tuple(k.key for k in path)
    spec = () if mesh is None else _at(places, path).spec
    spec = (*spec, *(None,) * (leaf.ndim - len(spec)))
    policy_shape = leaf.shape
    if keys[0] == "blocks":
      policy_shape, spec = policy_shape[1:], spec[1:]
    name = hf_format.tensor_name(keys, policy)
    turned = keys[-1] == "kernel"
    if not turned:  # a bias is flat there; of its axes only the first is spread
      flat = (
        (int(np.prod(policy_shape)),) if keys[-1] == "bias" else policy_shape
      )
      spec = spec[: len(flat)]
      return Stored(name, flat, PartitionSpec(*spec), policy_shape, turned)
    first = int("{expert}" in name)
    middle = first + (2 if keys[1] == "o" else 1)
    inputs, outputs = policy_shape[first:middle], policy_shape[middle:]
    shape = (*policy_shape[:first], int(np.prod(outputs)), int(np.prod(inputs)))
    spec = PartitionSpec(*spec[:first], spec[middle], spec[first])
    return Stored(name, shape, spec, policy_shape, turned)

  return jax.tree_util.tree_map_with_path(layout, abstract), places


def _at(tree: PyTree, path) -> Any:
  for key in path:
    tree = tree[key.key]
  return tree


def _names(stored: Stored, layers: int) -> Iterator[tuple[str, tuple]]:
  """Every tensor of a parameter and its shape."""
  shape = stored.shape[1:] if stored.experts else stored.shape
  for layer in range(layers if "{layer}" in stored.name else 1):
    for expert in range(stored.experts or 1):
      yield stored.name.format(layer=layer, expert=expert), shape


def open_all(
  directory: pathlib.Path, stack: contextlib.ExitStack
) -> dict[str, Any]:
  """Name of each tensor to a slice of its file; nothing is read yet."""
  index = directory / INDEX
  where, files = None, [WEIGHTS]
  if index.exists():
    where = hf_format.read_json(index).get("weight_map")
    if not isinstance(where, dict) or not where:
      raise ValueError(f"{index}: no weight_map from tensors to files")
    for name in where.values():
      # A path would reach outside of the directory.
      if not _is_name(name):
        raise ValueError(f"{index}: {str(name)[:80]!r} is not a file name")
    files = sorted(set(where.values()))
  tensors = {}
  for name in files:
    path = directory / name
    if not os.path.isfile(path):
      raise ValueError(f"{path} is missing{_instead(directory)}")
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
        raise ValueError(f"{index} is not right about {_listed(wrong)}")
    tensors |= slices
  return tensors


def _is_name(value: Any) -> bool:
  """Whether a value is the name of a file, with nothing that hides in it."""
  text = isinstance(value, str) and value.isprintable() and len(value) < 256
  return text and pathlib.PurePath(value).name == value


def _instead(directory: pathlib.Path) -> str:
  """What lies there in place of safetensors."""
  others = (".bin", ".pt", ".pth", ".gguf", ".ckpt")
  files = sorted(p.name for p in directory.iterdir() if p.suffix in others)
  why = f"; {files[0]} may be a pickle, which can run code" if files else ""
  return f"{why}; weights are read from safetensors"


def check(
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
  want = dict(x for leaf in leaves for x in _names(leaf, policy.layers))
  if missing := want.keys() - files.keys():
    raise ValueError(f"{directory}: no tensor {_listed(missing)}")
  extra = {name for name in files if not name.endswith(_COMPUTED)} - want.keys()
  if policy.tied:  # some writers repeat the embedding under its other name
    extra -= {"lm_head.weight"}
  if extra:
    raise ValueError(f"{directory}: unknown tensors {_listed(extra)}")
  for name, shape in want.items():
    if (got := tuple(files[name].get_shape())) != shape:
      raise ValueError(f"{directory}: {name} is {got}, not {shape}")
    if (dtype := files[name].get_dtype()) not in DTYPES:
      raise ValueError(
        f"{directory}: {name} is {dtype}, not one of {', '.join(DTYPES)}"
      )


def is_stored(x: Any) -> bool:
  return isinstance(x, Stored)


def _listed(names: set[str]) -> str:
  plain = lambda name: name if name.isprintable() else repr(name)
  shown = [plain(name)[:200] for name in sorted(names)[:8]]
  more = f" and {len(names) - 8} more" if len(names) > 8 else ""
  return ", ".join(shown) + more


def read(
  directory: pathlib.Path,
  files: dict[str, Any],
  stored: PyTree,
  places: PyTree | None,
  layers: int,
  mesh: Mesh | None,
  dtype: str,
) -> PyTree:
  """Parameters on their devices."""
  put = lambda layer, tree: _map(
    lambda s: _put(s, layer, directory, files, mesh), tree
  )
  turn = lambda s, x: _turn(s, x).astype(dtype)
  at = lambda name: None if places is None else places[name]

  inside = stored["blocks"]
  empty = lambda: _map(
    lambda s: jnp.zeros((layers, *s.policy_shape), dtype), inside
  )
  stack = jax.jit(empty, out_shardings=at("blocks"))()

  @functools.partial(jax.jit, donate_argnums=0, out_shardings=at("blocks"))
  def place(stack, read_layer, layer):
    into = lambda s, whole, x: whole.at[layer].set(turn(s, x))
    return _map(into, inside, stack, read_layer)

  for layer in range(layers):
    # Waits, else the host would run ahead and hold several layers.
    stack = jax.block_until_ready(place(stack, put(layer, inside), layer))
  params = {"blocks": stack}
  for name, tree in stored.items():
    if name != "blocks":
      turns = lambda one, tree=tree: _map(turn, tree, one)
      params[name] = jax.jit(turns, out_shardings=at(name))(put(0, tree))
  return params


_map = functools.partial(jax.tree.map, is_leaf=is_stored)


def _put(
  s: Stored,
  layer: int,
  directory: pathlib.Path,
  files: dict[str, Any],
  mesh: Mesh | None,
) -> jax.Array:
  """A parameter of one layer as it is stored; each device reads its part."""
  name = lambda expert: s.name.format(layer=layer, expert=expert)

  def one(expert: int, index: Any) -> np.ndarray:
    value = files[name(expert)][index]
    if not np.isfinite(value).all():
      raise ValueError(
        f"{directory}: {name(expert)} holds values that are not finite"
      )
    return value

  def read(index: Any) -> np.ndarray:
    if not s.experts:
      return one(0, index)
    experts = range(s.experts)[index[0]]
    return np.stack([one(expert, index[1:]) for expert in experts])

  if mesh is None:
    return jnp.asarray(read((slice(None),) * len(s.shape)))
  place = NamedSharding(mesh, s.spec)
  return jax.make_array_from_callback(s.shape, place, read)


def _turn(s: Stored, x: jax.Array) -> jax.Array:
  """From the files' layout to the policy's."""
  return (jnp.swapaxes(x, -1, -2) if s.turned else x).reshape(s.policy_shape)
