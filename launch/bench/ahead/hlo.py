"""What a compiled program does, read from its text.

Loops count as often as they turn where the compiler knows that; other loops
count once. Of a conditional all branches count: an upper bound.
"""

import collections
import dataclasses
import math
import re
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
# A TPU does not write how often a loop turns: a counter is less than a number.
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_NUMBER = re.compile(r"(\d+)\)")
_LESS = re.compile(
  r"^(?:\S+ )?%?[\w.\-]+, (?:\S+ )?%?([\w.\-]+)\), direction=LT"
)
_CALLED = re.compile(
  r"(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
# Devices of a message, in three notations: [groups,devices]<=..., a list of
# lists, and axes of a mesh.
_GROUPS = re.compile(r"replica_groups=\[\d+,(\d+)\]")
_LISTS = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
COLLECTIVES = (
  "all-gather",
  "all-reduce",
  "reduce-scatter",
  "all-to-all",
  "collective-permute",
  "ragged-all-to-all",
)
# What launches nothing: names of values, and ends of what was launched.
_FREE = {
  "parameter",
  "constant",
  "tuple",
  "get-tuple-element",
  "bitcast",
  "after-all",
  "partition-id",
  "replica-id",
  "opt-barrier",
  "while",
  "call",
  "conditional",
}
_INSIDE = {
  "while",
  "call",
  "conditional",
}  # computations that launch themselves
_BYTES = {"pred": 1, "bf16": 2, "token": 0}


class Collective(NamedTuple):
  """One kind of message."""

  kind: str  # such as "all-gather"
  size_bytes: int  # of the result of a device
  group: int  # devices that take part


@dataclasses.dataclass(frozen=True)
class _Instruction:
  name: str
  type: str
  op: str
  rest: str
  called: tuple[str, ...]
  trips: int | None  # of a loop; None if unknown


@dataclasses.dataclass(frozen=True)
class Account:
  """Sums over a program or a part of it."""

  kernels: int
  collectives: dict[Collective, int]  # -> how often


class Text:
  """The text of one compiled program."""

  def __init__(self, text: str):
    self._of: dict[str, list[_Instruction]] = {}
    self._known: dict[str, Account] = {}
    self._entry, here = "", None
    for line in text.splitlines():
      if not line.startswith(" ") and line.endswith("{"):
        found = _COMPUTATION.match(line)
        if found:
          here = self._of.setdefault(found[2], [])
          self._entry = found[2] if found[1] else self._entry
      # A kernel's description may have more lines, such as "}}, ...".
      elif line == "}" or line.startswith("}, execution_thread"):
        here = None
      elif here is not None and (one := _instruction(line.strip())):
        here.append(one)

  def account(self) -> Account:
    """Of one call."""
    return self._account(self._entry)

  def loop(self) -> Account | None:
    """One turn of the open loop that launches most; None if there is none.

    In a program that decodes this is the loop over tokens, whose end is not
    known to the compiler.
    """
    open_loops = {
      name
      for block in self._of.values()
      for one in block
      if one.op == "while" and self._trips(one) is None
      for name in one.called
    }
    accounts = map(self._account, sorted(open_loops))
    return max(accounts, key=lambda a: a.kernels, default=None)

  def _account(self, name: str) -> Account:
    if name not in self._known:
      self._known[name] = self._added(name)
    return self._known[name]

  def _added(self, name: str) -> Account:
    kernels, collectives = 0, collections.Counter()
    for one in self._of.get(name, []):
      kind = one.op.removesuffix("-start")
      if kind in COLLECTIVES:
        collectives[_collective(kind, one)] += 1
      launches = one.op in _INSIDE
      trips = self._trips(one) or 1
      for part in map(self._account, one.called):
        kernels += launches * trips * part.kernels
        # A TPU also sends from inside of a fusion.
        for which, count in part.collectives.items():
          collectives[which] += trips * count
      if not (launches or one.op in _FREE or one.op.endswith("-done")):
        kernels += 1
    return Account(kernels, dict(collectives))

  def _trips(self, one: _Instruction) -> int | None:
    """How often a loop turns: as written, or a counter from 0 that is less than
    a constant, as a scan has."""
    found = _CONDITION.search(one.rest) if one.trips is None else None
    if found is None:
      return one.trips
    of = {x.name: x for x in self._of.get(found[1], [])}
    tests = [x for x in of.values() if x.op not in _FREE]
    less = _LESS.match(tests[0].rest) if len(tests) == 1 else None
    limit = of.get(less[1]) if less else None
    if limit is None or limit.op != "constant":
      return None
    number = _NUMBER.match(limit.rest)
    return int(number[1]) if number else None


def _instruction(line: str) -> _Instruction | None:
  found = _INSTRUCTION.match(line)
  if found is None:
    return None
  name, kind, op, rest = found.groups()
  called = _CALLED.findall(rest)
  for branches in _BRANCHES.findall(rest):
    called += re.findall(r"[\w.\-]+", branches)
  trips = _TRIPS.search(rest)
  return _Instruction(
    name, kind, op, rest, tuple(called), int(trips[1]) if trips else None
  )


def _collective(kind: str, one: _Instruction) -> Collective:
  arrays = [f"{name}[{dims}]" for name, dims in _ARRAY.findall(one.type)]
  # The start of an asynchronous message names what is sent, then what arrives,
  # and on TPUs more numbers; that of a reduction only what arrives.
  if one.op.endswith("-start") and one.type.startswith("("):
    if kind != "all-reduce":
      arrays = [x for x in arrays if x not in ("u32[]", "s32[]")]
      arrays = arrays[len(arrays) // 2 :]
  return Collective(kind, sum(map(size_bytes, arrays)), _group(one.rest))


def _group(rest: str) -> int:
  """Devices that take part in a message; 0 if the text does not say."""
  if found := _GROUPS.search(rest):
    return int(found[1])
  if found := _LISTS.search(rest):
    return len(found[1].split(","))
  if found := _MESH.search(rest):
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
    return math.prod(int(sizes[a]) for a in re.findall(r"'(\w+)'", found[2]))
  return 0


def size_bytes(array: str) -> int:
  """Of "bf16[8,128]"; 0 if it is no array."""
  found = _ARRAY.match(array)
  if found is None:
    return 0
  name, dims = found.groups()
  bits = re.search(r"\d+", name)
  each = _BYTES.get(name, int(bits[0]) // 8 if bits else 0)
  size = each
  for n in dims.split(",") if dims else []:
    size *= int(n)
  return size
