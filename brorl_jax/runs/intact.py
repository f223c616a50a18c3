"""Checks that data on disk is unchanged, and what an error says about it."""

import collections
import errno
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from brorl_jax.errors import first_line
from brorl_jax.many import processes

# Errors about the contents of a folder, not about reading it.
_CONTENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR})
_OS_ERROR = re.compile(r"os_error_code=\\*'(\d+)")  # in messages of tensorstore
# Messages of XLA, tensorstore and Python that have no error number.
_NO_ROOM = ("RESOURCE_EXHAUSTED", "can't start new thread")
_SUM = "sum:"  # before the digest of an array that was spread over processes
_SPREAD = tuple(
  map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
)


class Damage(ValueError):
  """Data on disk differs from what was saved."""


def describe(state: PyTree) -> dict[str, str]:
  """Dtype and shape of each array, by path: "float32[3, 4]"."""
  return {path: f"{x.dtype}{list(x.shape)}" for path, x in leaves(state)}


def digest(state: PyTree, saved: Mapping | None = None) -> dict[str, str]:
  """A hash of each array, by path: its SHA-256.

  Of an array that is spread over processes, none of which has all of it, a sum
  over its elements instead (`_sum`). With the digests that were `saved` each
  array gets a digest of the same kind. Every process must call this.
  """
  out = {}
  for path, leaf in leaves(state):
    spread = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    kind = (saved or {}).get(path) or (_SUM if spread else "")
    if kind.startswith(_SUM):
      out[path] = _SUM + (_sum(leaf) if spread else f"{_part(leaf):016x}")
      continue
    if spread:
      leaf = multihost_utils.process_allgather(leaf, tiled=True)
    value = np.ascontiguousarray(np.asarray(leaf)).reshape(-1)
    out[path] = hashlib.sha256(value.view(np.uint8).data).hexdigest()
  return out


def _sum(array: jax.Array) -> str:
  """The sum of `_part` over the shards of all processes, one copy of each.

  Every copy has the same sum, or the text says that they differ.
  """
  part = lambda shard: _part(shard.data, shard.index, array.shape)
  own = [(shard.replica_id, part(shard)) for shard in array.addressable_shards]
  copies = collections.defaultdict[int, int](int)
  for number, total in itertools.chain(*processes.gather(own)):
    copies[number] += total
  first, *others = {f"{total % 2**64:016x}" for total in copies.values()}
  return "copies differ" if others else first


def _part(
  array: Any,
  index: tuple[slice, ...] | None = None,
  shape: tuple[int, ...] | None = None,
) -> int:
  """sum_i mix(bits_i + C i) mod 2^64 over elements i of an array, or a shard.

  i counts the elements of the whole array, so that the sum does not depend on
  how it is cut; mix is a bijection that spreads every bit (Steele, Lea & Flood
  2014, the finalizer of SplitMix). A shard lies at `index` of the whole array.
  """
  part = np.asarray(array)
  shape = part.shape if shape is None else shape
  index = (slice(None),) * len(shape) if index is None else index
  along = [np.arange(*s.indices(n)) for s, n in zip(index, shape, strict=True)]
  places = np.ravel_multi_index(np.ix_(*along), shape) if shape else 0
  bits = np.ascontiguousarray(part).view(f"u{part.dtype.itemsize}")
  with np.errstate(over="ignore"):
    x = bits.reshape(part.shape).astype(np.uint64)
    x = x + np.asarray(places).astype(np.uint64) * _SPREAD[0]
    x = (x ^ (x >> np.uint64(30))) * _SPREAD[1]
    x = (x ^ (x >> np.uint64(27))) * _SPREAD[2]
    return int((x ^ (x >> np.uint64(31))).sum(dtype=np.uint64))


def leaves(state: PyTree) -> Iterator[tuple[str, Any]]:
  """Each array with its path: "params/blocks/q"."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(state):
    yield name(path), leaf


def name(path: tuple[Any, ...]) -> str:
  """The path of an array as text."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def sealed(record: dict[str, Any]) -> dict[str, Any]:
  """The record as JSON gives it back, with a hash of it under "seal"."""
  record = json.loads(json.dumps(record))
  return {**record, "seal": seal(record)}


def opened(text: bytes) -> dict[str, Any]:
  """A sealed record from its JSON text, checked, without its seal."""
  try:
    record = json.loads(text)
    if record.pop("seal") == seal(record):
      return record
  except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
    pass  # no text, no JSON, no object, no seal
  raise Damage("its record differs from what was saved")


def seal(record: Any) -> str:
  """A digest of what JSON can hold."""
  return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def unreachable(error: BaseException | None) -> str | None:
  """The reason of an input/output error; None if the content is wrong."""
  while error is not None:
    if isinstance(error, MemoryError):
      return "there is not enough memory"
    numbers = [*map(int, _OS_ERROR.findall(str(error)))]
    if isinstance(error, OSError) and error.errno is not None:
      numbers.append(error.errno)
    for number in numbers:
      if number not in _CONTENT:
        return os.strerror(number)
    if any(text in str(error) for text in _NO_ROOM):
      return clipped(first_line(error))
    error = error.__cause__ or error.__context__
  return None


def one_line(error: BaseException) -> str:
  """An error as one short line: the file and what is wrong with it."""
  if isinstance(error, OSError) and error.strerror:
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}"
  return unreachable(error) or clipped(first_line(error))


def clipped(text: str) -> str:
  """The beginning of it: in a damaged file a name may be of any length."""
  return text if len(text) <= 300 else f"{text[:300]}..."
