"""Parses the tests of a program and compares outputs.

verifier.py describes the kinds of tests and the comparison.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import keyword
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from brorl_jax.verdicts.sandbox import codec

MAX_TESTS = 10_000
MAX_TEXT = 8 << 20  # bytes of one test's input or output

_RELATIVE, _ABSOLUTE = 1e-6, 1e-9


@dataclasses.dataclass(frozen=True)
class Tests:
  """Tests as a job for the jail, and the expected values, kept outside."""

  mode: str
  job: Mapping[str, Any]
  outputs: Sequence[Any]
  sizes: Sequence[int]  # of the encoded outputs, in bytes
  check: bytes = b""


def parse(tests: Any) -> Tests:
  """Checks the tests of an example and prepares them for the jail.

  Raises:
    ValueError: The tests are of no kind in verifier.py, empty, too many, do not
      match the outputs in number, expect only empty outputs, or have values
      that are too large or not plain data. The message is one line.
  """
  if not isinstance(tests, Mapping):
    raise ValueError(f"tests is a {type(tests).__name__}; use an object")
  unknown = tests.keys() - {"inputs", "outputs", "fn_name", "check"}
  if unknown:
    raise ValueError(
      f"tests has the unknown field {min(map(str, unknown))!r}; use inputs,"
      " outputs, fn_name or check"
    )
  name = tests.get("fn_name")
  if name and not (
    isinstance(name, str)
    and name.isidentifier()
    and not keyword.iskeyword(name)
  ):
    raise ValueError(f"tests.fn_name = {name!r}; use a Python name")
  if tests.get("check") is not None:
    return _parse_check(tests, name)
  inputs: Any = tests.get("inputs")
  outputs: Any = tests.get("outputs")
  for field, values in (("inputs", inputs), ("outputs", outputs)):
    if not isinstance(values, list):
      kind = type(values).__name__
      raise ValueError(f"tests.{field} is a {kind}; use a list")
  if not 1 <= len(inputs) <= MAX_TESTS:
    raise ValueError(f"tests has {len(inputs)} inputs; use 1 to {MAX_TESTS}")
  if len(inputs) != len(outputs):
    raise ValueError(
      f"tests has {len(inputs)} inputs and {len(outputs)} outputs; use as many"
      " of each"
    )
  if name:
    return _parse_calls(inputs, outputs, name)
  texts = [_text(v, f"inputs[{i}]").decode() for i, v in enumerate(inputs)]
  expected = [_text(v, f"outputs[{i}]") for i, v in enumerate(outputs)]
  if not b"".join(expected).split():
    raise ValueError("tests expects only empty outputs; any program would pass")
  _refuse_contradiction(texts, expected)
  return Tests("stdio", {"inputs": texts}, expected, [*map(len, expected)])


def _parse_check(tests: Mapping[str, Any], name: Any) -> Tests:
  if "inputs" in tests or "outputs" in tests:
    raise ValueError("tests has check as well as inputs or outputs; keep one")
  if not name:
    raise ValueError("tests has check but no fn_name; name the function")
  source = _text(tests["check"], "check")
  try:
    body = ast.parse(source).body
  except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
    raise ValueError(f"tests.check is not Python: {error}") from None
  kinds = {n.name for n in body if isinstance(n, ast.FunctionDef)}
  if "check" not in kinds:
    raise ValueError("tests.check defines no function check(candidate)")
  return Tests("check", {"function": name}, [b""], [0], source)


def _parse_calls(
  inputs: Sequence[Any], outputs: Sequence[Any], name: str
) -> Tests:
  nodes, expected, sizes = [], [], []
  for i, (given, want) in enumerate(zip(inputs, outputs, strict=True)):
    where = f"inputs[{i}]"
    if isinstance(given, str):
      lines = _text(given, where).decode().split("\n")
      arguments = [_json(line, where) for line in lines if line.strip()]
      if isinstance(want, str):
        try:
          want = _json(want, "")
        except ValueError:
          pass  # a plain text
    elif isinstance(given, (list, tuple)):
      arguments = list(given)
    else:
      raise ValueError(
        f"tests.{where} is a {type(given).__name__}; use a list of arguments,"
        " or a text with one JSON argument per line"
      )
    nodes.append(_node(arguments, where))
    sizes.append(len(codec.dumps(_node(want, f"outputs[{i}]"))))
    expected.append(want)
  if all(want in (None, "", [], {}, [None], [""], [[]]) for want in expected):
    raise ValueError("tests expects only empty outputs; any program would pass")
  _refuse_contradiction([*map(codec.dumps, nodes)], expected)
  return Tests("call", {"function": name, "calls": nodes}, expected, sizes)


def _refuse_contradiction(
  inputs: Sequence[str | bytes], outputs: Sequence[Any]
) -> None:
  first: dict[str | bytes, int] = {}
  for i, given in enumerate(inputs):
    j = first.setdefault(given, i)
    if outputs[i] != outputs[j]:
      raise ValueError(
        f"tests.inputs[{i}] equals inputs[{j}] but expects another output; no"
        " program could pass both"
      )


def _text(value: Any, where: str) -> bytes:
  if isinstance(value, list) and all(isinstance(v, str) for v in value):
    value = "\n".join(value)
  if not isinstance(value, str):
    raise ValueError(f"tests.{where} is a {type(value).__name__}; use a text")
  try:
    data = value.encode()
  except UnicodeEncodeError:
    raise ValueError(f"tests.{where} has a lone surrogate") from None
  if len(data) > MAX_TEXT:
    raise ValueError(
      f"tests.{where} has {len(data)} bytes; use at most {MAX_TEXT}"
    )
  return data


def _json(text: str, where: str) -> Any:
  try:
    return json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ValueError(f"tests.{where} is a text but not JSON: {error}") from None


def _node(value: Any, where: str) -> Any:
  node = codec.encode(value)
  if _has_opaque(node):
    raise ValueError(
      f"tests.{where} is not plain data, or has more than {codec.MAX_NODES}"
      f" values, or nests more than {codec.MAX_DEPTH} deep"
    )
  return node


def _has_opaque(node: Any) -> bool:
  if type(node) is not list:
    return False
  return node[0] == "x" or any(map(_has_opaque, node[1:]))


# Comparison of an output with the expected one.

_DECIMAL = re.compile(rb"[+-]?\d+\.\d+")
_NUMBER = re.compile(rb"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?")
_LONGEST_NUMBER = 400  # characters


def same_output(got: bytes, want: bytes) -> bool:
  """Whether an output matches the expected one; see verifier.py."""
  if got == want:
    return True
  got_lines, want_lines = _lines(got), _lines(want)
  return len(got_lines) == len(want_lines) and all(
    map(_same_line, got_lines, want_lines)
  )


def _lines(text: bytes) -> list[list[bytes]]:
  return [words for line in text.split(b"\n") if (words := line.split())]


def _same_line(got: list[bytes], want: list[bytes]) -> bool:
  if got == want:
    return True
  return len(got) == len(want) and all(map(_same_word, got, want))


def _same_word(got: bytes, want: bytes) -> bool:
  if got == want:
    return True
  if max(len(got), len(want)) > _LONGEST_NUMBER:
    return False
  if not _DECIMAL.fullmatch(want) or not _NUMBER.fullmatch(got):
    return False
  value, other = float(want), float(got)
  if not math.isfinite(value):
    return False
  allowed = _RELATIVE * abs(value) + _ABSOLUTE
  # Every printed digit must be right, as in amounts of money.
  shown = len(want.partition(b".")[2])
  return abs(other - value) <= min(allowed, 0.5 * 10.0**-shown + _ABSOLUTE)
