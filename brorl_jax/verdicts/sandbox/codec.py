"""A codec for values that leave the jail, and how two values compare.

    node = encode(value)          # in the jail; a JSON value
    got = decode(node)            # outside
    same(got, [1, 2.5])

It encodes exact builtin types alone. A subclass could bring code, such as an
int whose __eq__ returns True, so it becomes an `Opaque`, which equals nothing.
JSON scalars encode as themselves; everything else is a list with a tag:

  l t   list, tuple            S     set or frozenset
  d     dict, as pairs         i     int beyond 64 bits, hexadecimal
  f c   float, complex, hex    b     bytes, hexadecimal
  x     none of these, or too large or too deep

Outside the jail, the cost is linear in the bytes received. Decoded sets and
dicts are indexed by the text of their keys. Real ones would take hours for
200,000 multiples of 2**61 - 1, which all have the same hash.

Standard library only, for Python 3.9 and later.
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

MAX_DEPTH = 50
MAX_NODES = 200_000
MAX_BYTES = 8 << 20
_MAX_KEY_DEPTH = 4

_RELATIVE, _ABSOLUTE = 1e-6, 1e-9
_WORD = 1 << 63
_DICTS = (dict, Counter, OrderedDict, defaultdict)
_TEXT = {str, bool, type(None)}
_SCALARS = _TEXT | {int, float}


class Opaque:
  """A value that is not plain data; equals nothing, not even itself."""

  def __eq__(self, other: object) -> bool:
    return False

  __hash__ = None  # type: ignore[assignment]


class Keyed:
  """A set or a dict, indexed by the text of its keys."""

  def __init__(self, items: dict[str, tuple[Any, Any]], *, is_set: bool):
    self.items = items  # text of the key -> key, value
    self.is_set = is_set


class _TooLarge(Exception):
  pass


def encode(value: Any) -> Any:
  """A value as JSON; `Opaque` as a whole if too large or too deep."""
  try:
    return _encode(value, 0, [MAX_NODES])
  except _TooLarge:
    return ["x", "too large"]


def decode(node: Any) -> Any:
  """The value of a node, or ValueError; sets and dicts become `Keyed`."""
  try:
    return _decode(node, 0, [MAX_NODES])
  except (TypeError, OverflowError, IndexError) as error:
    raise ValueError(f"not an encoded value: {error}") from None


def dumps(node: Any) -> bytes:
  return json.dumps(node, separators=(",", ":")).encode()


def loads(data: bytes) -> Any:
  """A node from at most `MAX_BYTES` bytes; ValueError if it is not JSON."""
  if len(data) > MAX_BYTES:
    raise ValueError(f"{len(data)} bytes; at most {MAX_BYTES} are read")
  try:
    return json.loads(data)
  except RecursionError:
    raise ValueError("JSON is nested too deep") from None


def rebuild(value: Any, *, key: bool = False) -> Any:
  """A decoded value with real sets and dicts, for use in the jail only."""
  if isinstance(value, Keyed):
    keys = [rebuild(k, key=True) for k, _ in value.items.values()]
    if value.is_set:
      return frozenset(keys) if key else set(keys)
    return dict(zip(keys, (rebuild(v) for _, v in value.items.values())))  # noqa: B905
  if type(value) is list:
    return [rebuild(item) for item in value]
  if type(value) is tuple:
    return tuple(rebuild(item, key=key) for item in value)
  return value


def same(got: Any, want: Any) -> bool:
  """Whether a decoded value equals the expected value, plain data.

  A bool is not an int, nan equals nothing, and a list equals a tuple with the
  same items. An expected float allows a relative error of 1e-6 and an absolute
  error of 1e-9. An expected int allows only the exact number, also as a float.
  Keys of dicts and items of sets must match exactly; 1.0 matches 1.
  """
  return _same(got, decode(encode(want)))


def _encode(value: Any, depth: int, left: list[int]) -> Any:
  left[0] -= 1
  if left[0] < 0 or depth > MAX_DEPTH:
    raise _TooLarge
  kind = type(value)
  if kind in _TEXT:
    return value
  if kind is int:
    return value if -_WORD <= value < _WORD else ["i", hex(value)]
  if kind is float:
    return value if math.isfinite(value) else ["f", value.hex()]
  if kind is complex:
    return ["c", value.real.hex(), value.imag.hex()]
  if kind is bytes:
    return ["b", value.hex()]
  if tuple in kind.__bases__ and kind.__eq__ is tuple.__eq__:
    kind = tuple  # of named items
  if kind is list or kind is tuple:
    return ["l" if kind is list else "t", *_encode_all(value, depth, left)]
  if kind is set or kind is frozenset:
    keys = _encode_all(list(value), depth, left)
    if _keys_too_deep(keys):
      raise _TooLarge
    return ["S", *keys]
  if kind in _DICTS:
    items = list(value.items())
    pairs = [[_encode(x, depth + 1, left) for x in kv] for kv in items]
    if _keys_too_deep([key for key, _ in pairs]):
      raise _TooLarge
    return ["d", *pairs]
  return ["x", "not plain data"]


def _encode_all(values: Any, depth: int, left: list[int]) -> list[Any]:
  if left[0] < len(values):
    raise _TooLarge
  kinds = set(map(type, values))
  plain_ints = kinds == {int} and -_WORD <= min(values) <= max(values) < _WORD
  if plain_ints or kinds <= _TEXT:  # a fast path in C
    left[0] -= len(values)
    return list(values)
  return [_encode(value, depth + 1, left) for value in values]


def _decode(node: Any, depth: int, left: list[int]) -> Any:
  left[0] -= 1
  if left[0] < 0 or depth > MAX_DEPTH:
    raise ValueError("too large or too deep")
  if type(node) in _SCALARS:
    return node
  if type(node) is not list or not node or type(node[0]) is not str:
    raise ValueError("neither a scalar nor a tagged list")
  tag, *rest = node
  if tag in ("l", "t"):
    values = _decode_all(rest, depth, left)
    return values if tag == "l" else tuple(values)
  if tag == "S":
    if _keys_too_deep(rest):
      raise ValueError("keys too deep")
    values = _decode_all(rest, depth, left)
    pairs = zip(map(_key, rest), values)  # noqa: B905
    return Keyed({k: (v, None) for k, v in pairs}, is_set=True)
  if tag == "d":
    items = {}
    if _keys_too_deep([key for key, _ in rest]):
      raise ValueError("keys too deep")
    for key, value in rest:
      pair = _decode(key, depth + 1, left), _decode(value, depth + 1, left)
      items[_key(key)] = pair
    return Keyed(items, is_set=False)
  if tag not in _OF_TAG:
    raise ValueError(f"tag {tag[:9]!r}")
  return _OF_TAG[tag](*rest)


_OF_TAG: dict[str, Callable[..., Any]] = {
  "x": lambda *_: Opaque(),
  "c": lambda real, imag: complex(float.fromhex(real), float.fromhex(imag)),
  "i": lambda text: int(text, 16),
  "f": float.fromhex,
  "b": bytes.fromhex,
}


def _decode_all(nodes: list[Any], depth: int, left: list[int]) -> list[Any]:
  if set(map(type, nodes)) <= _SCALARS:
    left[0] -= len(nodes)
    if left[0] < 0:
      raise ValueError("too large")
    return nodes
  return [_decode(node, depth + 1, left) for node in nodes]


def _keys_too_deep(keys: list[Any]) -> bool:
  """Whether keys nest too deep; the text of each level repeats all below."""
  lists = lambda nodes: [node for node in nodes if type(node) is list]
  for _ in range(_MAX_KEY_DEPTH):
    keys = [child for key in lists(keys) for child in lists(key[1:])]
  return bool(keys)


def _key(node: Any) -> str:
  """One text for all nodes that are equal as keys of a dict."""
  if type(node) is float and abs(node) < 1e18 and node == int(node):
    return str(int(node))
  if type(node) is list:
    items: Iterable[str] = map(_key, node[1:])
    if node[0] == "S":
      items = sorted(items)
    return f"{node[0]}[{','.join(items)}]"
  return json.dumps(node)


def _same(got: Any, want: Any) -> bool:
  if isinstance(want, Keyed):
    return (
      isinstance(got, Keyed)
      and got.is_set == want.is_set
      and got.items.keys() == want.items.keys()
      and all(_same(got.items[k][1], v) for k, (_, v) in want.items.items())
    )
  if isinstance(want, (list, tuple)):
    long = isinstance(got, (list, tuple)) and len(got) == len(want)
    return long and all(map(_same, got, want))
  if type(want) in (float, complex):
    numbers = (int, float) if type(want) is float else (int, float, complex)
    return type(got) in numbers and _close(got, want)
  if type(want) is int:
    return type(got) in (int, float) and got == want
  return type(got) is type(want) and got == want


def _close(got: complex, want: complex) -> bool:
  if got == want:
    return True
  try:
    size, off = abs(want), abs(got - want)
  except OverflowError:  # an int larger than any float
    return False
  # Everything lies within a millionth of an infinity.
  return math.isfinite(size) and off <= _RELATIVE * size + _ABSOLUTE
