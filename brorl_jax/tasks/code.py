"""Programs: the one in a response, run on tests, every one of them.

    verify("print(int(input()) ** 2)", {"inputs": ["3"], "outputs": ["9"]})
    judge(response, {"tests": {...}}).score       # share of the tests that pass

Tests are of three kinds:

  {"inputs": ["3\\n"], "outputs": ["9\\n"]}
    Text for standard input, text expected on standard output; a list of texts
    is joined by line ends. Starting a process is most of the cost of a test, so
    one process runs a few tests, each with its own streams and `__main__`; a
    test that fails there and was not the first is run again in its own, so that
    no program fails for what it left behind.
  {"inputs": [[3, 4]], "outputs": [7], "fn_name": "add"}
    Lists of arguments and expected values. An input may be text, with one
    argument as JSON per line; then an output that is text is JSON too, where it
    can be read as such. Where every output is a list of one item, the item is
    meant as well as the list: some data sets wrap each value in a list, and
    only all tests together tell. `class Solution` with a method fn_name is made
    anew for each call, and the names of `typing` are there without an import.
  {"check": "def check(candidate): ...", "fn_name": "add"}
    A function that calls the candidate and asserts. One test, in two processes.

The program runs in a jail (sandbox/) that the expected values never enter, and
the verdict is reached out here. All tests together have `Limits.wall_s`. Over
it, or after anything else that ends the run, the score is 0; a process of one
test that is killed fails that test.

Output is compared line by line and word by word; blank lines and the amount of
white space do not count. Where the expected word has a decimal point, another
decimal within 1e-6 of it (1e-9 around 0) is as good. Values: sandbox/plain.py.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from brorl_jax.tasks.base import Verdict
from brorl_jax.tasks.sandbox import inside, levels, plain, zygote
from brorl_jax.tasks.sandbox.walls import Limits

MAX_PROGRAM = 100_000  # characters
MAX_TESTS = 10_000
MAX_TEXT = 8 << 20  # bytes of one test's input or output

_LANGUAGES = ("", "python", "python3", "py")
_DEFAULT = Limits()
_KILLED = f"exit status: {inside.KILLED}"  # some test, which says how
_TOGETHER = 8  # tests of one process; each holds two descriptors of 64
_REASONS = ("runtime error", "syntax error", "no function", "wrong answer")
_RELATIVE, _ABSOLUTE = 1e-6, 1e-9


class Jail(Protocol):
  """What runs a job: a zygote.Zygote, or what holds one."""

  def run(
    self,
    job: Mapping[str, Any],
    *,
    limits: Limits,
    tests: bytes = ...,
    received: int | None = ...,
  ) -> zygote.Ended: ...


def judge(
  response: str, entry: Mapping[str, Any], *, jail: Jail | None = None
) -> Verdict:
  """Judges the program in a response.

  Args:
    response: What the policy wrote.
    entry: Its "tests".
    jail: See `verify`.

  Raises:
    ValueError: If the tests are malformed.
  """
  program = extract(response)
  if program is None:
    return Verdict("fail", 0.0, "no program", "")
  return verify(program, entry["tests"], jail=jail)


_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})([^`]*)")


def extract(response: str) -> str | None:
  """The program of a response, or None.

  That is the last complete fenced block, of backquotes or tildes, that says it
  is Python or does not say what it is, outside the thinking: after the last
  `</think>` and before a `<think>` that is not closed. A block ends where a
  fence at least as long stands alone in its line; the indentation of its first
  fence is taken off its lines.
  """
  text = response.rpartition("</think>")[2].partition("<think>")[0]
  program = block = None
  indent = fence = language = ""
  for line in text.split("\n"):
    bare = line.rstrip("\r \t")
    if block is not None:
      marks = bare.strip()
      if set(marks) == {fence[0]} and len(marks) >= len(fence):
        if language in _LANGUAGES:
          program = "\n".join(block) + "\n"
        block = None
      else:
        block.append(line.removeprefix(indent))
    elif match := _FENCE.fullmatch(bare):
      indent, fence = match[1], match[2]
      language = re.match(r"\s*(\w*)", match[3])[1].lower()  # type: ignore
      block = []
  return program


def check_tests(tests: Any) -> None:
  """Refuses tests that no program should be judged by.

  Raises:
    ValueError: In one line, if the tests are not of one of the kinds above, are
      none or more than `MAX_TESTS`, are unequal in number to their outputs,
      expect nothing at all, or hold what is too large or no plain data.
  """
  _parse(tests)


def verify(
  program: str,
  tests: Mapping[str, Any],
  *,
  limits: Limits = _DEFAULT,
  jail: Jail | None = None,
) -> Verdict:
  """Runs a program on every test.

  Args:
    program: Source, verbatim.
    tests: See the module.
    limits: What all tests together may use.
    jail: What to run it in; None is this thread's own.

  Returns:
    A pass if every test passes. Else a fail with the share that does, or
    invalid if there is no jail or it failed.

  Raises:
    ValueError: If the tests are malformed.
  """
  parsed = _parse(tests)
  if len(program) > MAX_PROGRAM:
    reason = f"too long: {len(program)} characters, at most {MAX_PROGRAM}"
    return Verdict("fail", 0.0, reason, program[:MAX_PROGRAM])
  try:
    jail = levels.mine() if jail is None else jail
    ended = _run(program, parsed, limits, jail)
  except zygote.Failed as error:
    return Verdict("invalid", 0.0, f"verifier failed: {error}", program)
  return _verdict(program, parsed, ended)


@dataclasses.dataclass(frozen=True)
class _Tests:
  """Tests as the jail wants them, and what it must not know."""

  mode: str
  job: Mapping[str, Any]
  outputs: Sequence[Any]
  check: bytes = b""


def _parse(tests: Any) -> _Tests:
  if not isinstance(tests, Mapping):
    raise ValueError(f"tests is a {type(tests).__name__}; it must be an object")
  unknown = tests.keys() - {"inputs", "outputs", "fn_name", "check"}
  if unknown:
    raise ValueError(
      f"tests has the field {min(map(str, unknown))!r}; use inputs, outputs,"
      " fn_name or check"
    )
  name = tests.get("fn_name")
  if name and not (isinstance(name, str) and name.isidentifier()):
    raise ValueError(f"tests.fn_name is {name!r}; it must be a Python name")
  if tests.get("check") is not None:
    return _parse_check(tests, name)
  inputs: Any = tests.get("inputs")
  outputs: Any = tests.get("outputs")
  for field, values in (("inputs", inputs), ("outputs", outputs)):
    if not isinstance(values, list):
      kind = type(values).__name__
      raise ValueError(f"tests.{field} is a {kind}; it must be a list")
  if not 1 <= len(inputs) <= MAX_TESTS:
    raise ValueError(f"tests has {len(inputs)} inputs; use 1 to {MAX_TESTS}")
  if len(inputs) != len(outputs):
    raise ValueError(
      f"tests has {len(inputs)} inputs and {len(outputs)} outputs; it must be"
      " one for each"
    )
  if name:
    return _parse_calls(inputs, outputs, name)
  texts = [_text(v, f"inputs[{i}]").decode() for i, v in enumerate(inputs)]
  expected = [_text(v, f"outputs[{i}]") for i, v in enumerate(outputs)]
  if not b"".join(expected).split():
    raise ValueError("tests expects only empty outputs; any program would pass")
  return _Tests("stdio", {"inputs": texts}, expected)


def _parse_check(tests: Mapping[str, Any], name: Any) -> _Tests:
  if "inputs" in tests or "outputs" in tests:
    raise ValueError("tests has check and inputs or outputs; use one of them")
  if not name:
    raise ValueError("tests has check and no fn_name; name the function")
  source = _text(tests["check"], "check")
  try:
    body = ast.parse(source).body
  except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
    raise ValueError(f"tests.check is no Python: {error}") from None
  kinds = {n.name for n in body if isinstance(n, ast.FunctionDef)}
  if "check" not in kinds:
    raise ValueError("tests.check defines no function check(candidate)")
  return _Tests("check", {"function": name}, [b""], source)


def _parse_calls(
  inputs: Sequence[Any], outputs: Sequence[Any], name: str
) -> _Tests:
  nodes, expected = [], []
  for i, (given, want) in enumerate(zip(inputs, outputs, strict=True)):
    where = f"inputs[{i}]"
    if isinstance(given, str):
      lines = _text(given, where).decode().split("\n")
      arguments = [_json(line, where) for line in lines if line.strip()]
      if isinstance(want, str):
        try:
          want = _json(want, "")
        except ValueError:
          pass  # text that stands for itself
    elif isinstance(given, (list, tuple)):
      arguments = list(given)
    else:
      raise ValueError(
        f"tests.{where} is a {type(given).__name__}; it must be a list of"
        " arguments, or text with one argument as JSON per line"
      )
    nodes.append(_node(arguments, where))
    _node(want, f"outputs[{i}]")
    expected.append(want)
  if all(want in (None, "", [], {}, [None], [""], [[]]) for want in expected):
    raise ValueError("tests expects only empty outputs; any program would pass")
  return _Tests("call", {"function": name, "calls": nodes}, expected)


def _text(value: Any, where: str) -> bytes:
  if isinstance(value, list) and all(isinstance(v, str) for v in value):
    value = "\n".join(value)
  if not isinstance(value, str):
    raise ValueError(
      f"tests.{where} is a {type(value).__name__}; it must be text"
    )
  try:
    data = value.encode()
  except UnicodeEncodeError:
    raise ValueError(f"tests.{where} has a lone surrogate") from None
  if len(data) > MAX_TEXT:
    raise ValueError(
      f"tests.{where} has {len(data)} bytes; it may have {MAX_TEXT}"
    )
  return data


def _json(text: str, where: str) -> Any:
  try:
    return json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ValueError(f"tests.{where} is text and no JSON: {error}") from None


def _node(value: Any, where: str) -> Any:
  node = plain.encode(value)
  if _has_opaque(node):
    raise ValueError(
      f"tests.{where} is no plain data, or more than {plain.MAX_NODES} values,"
      f" or nested more than {plain.MAX_DEPTH} deep"
    )
  return node


def _has_opaque(node: Any) -> bool:
  if type(node) is not list:
    return False
  return node[0] == "x" or any(map(_has_opaque, node[1:]))


# Running them.


def _run(
  program: str, tests: _Tests, limits: Limits, jail: Jail
) -> zygote.Ended:
  job = {"mode": tests.mode, "program": program, **tests.job}
  if tests.mode != "stdio":
    return jail.run(job, limits=limits, tests=tests.check)
  # An output that is far longer than the right one is not right.
  received = limits.result_bytes + 2 * sum(map(len, tests.outputs))
  start = time.monotonic()
  job["together"] = _TOGETHER
  ended = jail.run(job, limits=limits, received=received)
  if ended.reason not in ("", _KILLED):
    return ended
  failed = _failed_after_others(tests, ended.frames)
  # The first, to see whether a process of its own makes a difference; if so,
  # all the others.
  for some in (failed[:1], failed[1:]):
    left = limits.wall_s - (time.monotonic() - start)
    if not some or left <= 0:
      break
    job |= {"together": 1, "inputs": [tests.job["inputs"][i] for i in some]}
    alone = jail.run(
      job,
      limits=dataclasses.replace(limits, wall_s=left),
      received=received,
    )
    by_index = {f.index: f for f in ended.frames}
    better = False
    for i, frame in zip(some, alone.frames, strict=False):
      if not _fault_of_output(frame, tests.outputs[i]):
        by_index[i] = dataclasses.replace(frame, index=i)
        better = True
    ended = dataclasses.replace(ended, frames=list(by_index.values()))
    if not better:
      break
  return ended


def _failed_after_others(
  tests: _Tests, frames: Sequence[zygote.Frame]
) -> list[int]:
  """Tests that failed, if the first of them was not the first of its process.

  Otherwise the verdict is clear. One that was killed keeps what it got.
  """
  failed = [
    frame
    for frame, want in zip(frames, tests.outputs, strict=False)
    if frame.index == inside.BEFORE or _fault_of_output(frame, want)
  ]
  if not failed or failed[0].first:
    return []
  kept = [f.first or os.WIFSIGNALED(f.status) for f in failed]
  return [f.index for f, keep in zip(failed, kept, strict=True) if not keep]


# The verdict.


def _verdict(program: str, tests: _Tests, ended: zygote.Ended) -> Verdict:
  count = len(tests.outputs)
  passed, fault = _count(tests, ended.frames)
  if ended.reason and not (tests.mode == "stdio" and ended.reason == _KILLED):
    return Verdict("fail", 0.0, ended.reason, program)
  if passed == count and not fault and not ended.reason:
    return Verdict("pass", 1.0, "", program)
  if len(ended.frames) < count and not fault:
    fault = "ended early"
  if count > 1 and passed:
    fault = f"{fault}{',' if ':' in fault else ':'} {passed} of {count} pass"
  return Verdict("fail", min(passed, count - 1) / count, fault, program)


def _count(tests: _Tests, frames: Sequence[zygote.Frame]) -> tuple[int, str]:
  """How many tests pass, and what is wrong with the first that does not."""
  if frames and frames[0].index == inside.BEFORE:
    return 0, _reason(frames[0].why)
  if len(frames) > len(tests.outputs):
    return 0, "malformed results"
  if tests.mode == "call":
    return _count_calls(tests.outputs, frames)
  faults = []
  for frame, want in zip(frames, tests.outputs, strict=False):
    if tests.mode == "stdio":
      faults.append(_fault_of_output(frame, want))
    else:
      faults.append(_reason(frame.why) if frame.why else "")
  return faults.count(""), next(filter(None, faults), "")


def _fault_of_output(frame: zygote.Frame, want: bytes) -> str:
  if frame.status == inside.OVERFLOW:
    return "too much output"
  if os.WIFSIGNALED(frame.status):
    return zygote.why(frame.status)
  if frame.status:
    name = _printable(frame.why)
    return f"runtime error: {name or zygote.why(frame.status)}"
  return "" if same_output(frame.payload, want) else "wrong answer"


def _count_calls(
  outputs: Sequence[Any], frames: Sequence[zygote.Frame]
) -> tuple[int, str]:
  bare, wrapped = [], []
  all_wrapped = all(isinstance(w, list) and len(w) == 1 for w in outputs)
  for frame, want in zip(frames, outputs, strict=False):
    if frame.why:
      fault = _reason(frame.why)
      bare.append(fault)
      wrapped.append(fault)
      continue
    try:
      got = plain.decode(plain.loads(frame.payload))
    except ValueError:
      return 0, "malformed results"
    bare.append("" if plain.same(got, want) else "wrong answer")
    if all_wrapped:
      wrapped.append("" if plain.same(got, want[0]) else "wrong answer")
  best = bare
  if all_wrapped and wrapped.count("") > bare.count(""):
    best = wrapped
  return best.count(""), next(filter(None, best), "")


def _reason(why: bytes) -> str:
  """A reason in the words of the jail, which a program may have forged."""
  code, _, details = _printable(why).partition(":")
  if code not in _REASONS:
    return f"runtime error: {code}"
  return f"{code}:{details}" if details else code


def _printable(text: bytes) -> str:
  decoded = text[:200].decode("utf-8", "replace")
  return "".join(c if c.isprintable() else "?" for c in decoded)


# An output and the one that was expected.

_DECIMAL = re.compile(rb"[+-]?\d+\.\d+")
_NUMBER = re.compile(rb"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?")
_LONGEST_NUMBER = 400  # characters


def same_output(got: bytes, want: bytes) -> bool:
  """Whether a program's output is the one that was expected; see the module."""
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
  return abs(other - value) <= _RELATIVE * abs(value) + _ABSOLUTE
