"""Runs the program of a response on all its tests.

    verify("print(int(input()) ** 2)", {"inputs": ["3"], "outputs": ["9"]})
    verify_entry(response, {"tests": {...}}).score    # share of tests that pass

Tests are of three kinds:

  {"inputs": ["3\\n"], "outputs": ["9\\n"]}
    Text for standard input, and the text expected on standard output. Lists of
    texts are joined by line ends. Starting a process is most of the cost of a
    test, so one process runs a few tests, each with its own streams and
    `__main__`. If the first failing test was not the first of its process, it
    runs again alone. If it then passes, all tests run alone, so that no program
    fails because of state from an earlier test.
  {"inputs": [[3, 4]], "outputs": [7], "fn_name": "add"}
    Lists of arguments and expected values. An input may be a text with one JSON
    argument per line; then a text output is parsed as JSON too, if possible. If
    every output is a list of one item, the item is accepted as well as the
    list, because some data sets wrap each value so. A `class Solution` with
    a method fn_name is created anew for each call. The names of `typing` need
    no import.
  {"check": "def check(candidate): ...", "fn_name": "add"}
    A function that calls the candidate and asserts. One test in two processes.

The program runs in a jail (sandbox/). Expected values never enter the jail; the
comparison happens outside. Each test has `Limits.test_s` CPU seconds, all tests
together `Limits.total_s`; `time_limit` of an example replaces the former. If
the time is exceeded or the run ends otherwise, the score is 0. If only the
process of one test is killed, that test fails.

Outputs are compared line by line and word by word. Blank lines and the amount
of white space are ignored. If the expected word has a decimal point, a number
within 1e-6 of it (1e-9 around 0) matches. sandbox/codec.py compares values.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from brorl_jax.verdicts.base import Verdict
from brorl_jax.verdicts.code import cases
from brorl_jax.verdicts.sandbox import codec, process, protocol, zygote
from brorl_jax.verdicts.sandbox import jail as jails
from brorl_jax.verdicts.sandbox.protocol import Limits

MAX_PROGRAM = 100_000  # characters

_LANGUAGES = ("", "python", "python3", "py")
_DEFAULT = Limits()
_KILLED = f"exit status: {protocol.KILLED}"  # the frame has the reason
_TOGETHER = 8  # tests per process; each takes two of 64 descriptors
_REASONS = ("runtime error", "syntax error", "no function", "wrong answer")


Jail = jails.Jail | zygote.Zygote


def verify_entry(
  response: str,
  entry: Mapping[str, Any],
  *,
  limits: Limits = _DEFAULT,
  jail: Jail | None = None,
) -> Verdict:
  """Scores the program in a response.

  Args:
    response: The text of the response.
    entry: Its "tests" and optionally a "time_limit": CPU seconds of one test,
      in place of `limits.test_s`.
    limits: Limits of the program.
    jail: Where to run it; None: this thread's jail.

  Raises:
    ValueError: The tests are malformed.
  """
  program = extract(response)
  if program is None:
    return Verdict("fail", 0.0, "no program", "")
  if entry.get("time_limit") is not None:
    test_s = float(entry["time_limit"])
    total_s = max(limits.total_s, test_s)
    limits = dataclasses.replace(limits, test_s=test_s, total_s=total_s)
  return verify(program, entry["tests"], limits=limits, jail=jail)


_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})([^`]*)")


def extract(response: str) -> str | None:
  """The program of a response, or None.

  It is the last complete fenced block (backquotes or tildes) that is marked as
  Python or has no language. Thinking is ignored: only text after the last
  `</think>` and before an unclosed `<think>` counts. A fence at least as long,
  alone on its line, ends a block. The indentation of the opening fence is
  removed from the lines.
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


def verify(
  program: str,
  tests: Mapping[str, Any],
  *,
  limits: Limits = _DEFAULT,
  jail: Jail | None = None,
) -> Verdict:
  """Runs a program on every test.

  Args:
    program: Its source.
    tests: See the module.
    limits: See `verify_entry`.
    jail: See `verify_entry`.

  Returns:
    "pass" if every test passes, else "fail" with the share that passes;
    "invalid" if there is no jail or it failed.

  Raises:
    ValueError: The tests are malformed.
  """
  parsed = cases.parse(tests)
  if len(program) > MAX_PROGRAM:
    reason = f"too long: {len(program)} characters, at most {MAX_PROGRAM}"
    return Verdict("fail", 0.0, reason, program[:MAX_PROGRAM])
  try:
    jail = jails.mine() if jail is None else jail
    ended = _run(program, parsed, limits, jail)
  except process.Failed as error:
    return Verdict("invalid", 0.0, f"verifier failed: {error}", program)
  return _verdict(program, parsed, ended)


def _run(
  program: str, tests: cases.Tests, limits: Limits, jail: Jail
) -> zygote.JobResult:
  job = {"mode": tests.mode, "program": program, **tests.job}
  # An output far longer than the expected one cannot match.
  output_bytes = max(limits.output_bytes, 2 * max(tests.sizes))
  limits = dataclasses.replace(limits, output_bytes=output_bytes)
  received = limits.result_bytes + 2 * sum(tests.sizes)
  if tests.mode != "stdio":
    return jail.run(job, limits=limits, tests=tests.check, received=received)
  inputs, left = tests.job["inputs"], limits.total_s

  def run(which: Sequence[str], together: int) -> zygote.JobResult:
    nonlocal left
    batch_job = {**job, "inputs": which, "together": together}
    rest = dataclasses.replace(limits, total_s=left)
    ended = jail.run(batch_job, limits=rest, received=received)
    left -= ended.cpu_s
    return ended

  ended = run(inputs, _TOGETHER)
  index = _failed_after_others(tests, ended)
  if index is None or left <= 0:
    return ended
  # A test that also fails alone is wrong. Otherwise all tests run alone, and
  # only these results count: a second try must not be a second guess.
  alone = run([inputs[index]], 1)
  fails = alone.reason or _fails(tests, index, alone.frames[0])
  return ended if fails or left <= 0 else run(inputs, 1)


def _failed_after_others(
  tests: cases.Tests, ended: zygote.JobResult
) -> int | None:
  """The first failing test, if other tests ran in its process before."""
  if ended.reason not in ("", _KILLED):
    return None
  for index, frame in enumerate(ended.frames[: len(tests.outputs)]):
    if _fails(tests, index, frame):
      return None if frame.first else index
  return None


def _fails(tests: cases.Tests, index: int, frame: zygote.Frame) -> bool:
  before = frame.index == protocol.BEFORE
  return before or bool(_fault_of_output(frame, tests.outputs[index]))


# The verdict.


def _verdict(
  program: str, tests: cases.Tests, ended: zygote.JobResult
) -> Verdict:
  count = len(tests.outputs)
  if ended.reason and not (tests.mode == "stdio" and ended.reason == _KILLED):
    return Verdict("fail", 0.0, ended.reason, program)
  passed, fault = _count(tests, ended.frames)
  if passed == count and not fault and not ended.reason:
    return Verdict("pass", 1.0, "", program)
  if len(ended.frames) < count and not fault:
    fault = "ended early"
  if count > 1 and passed:
    fault = f"{fault}{',' if ':' in fault else ':'} {passed} of {count} pass"
  return Verdict("fail", min(passed, count - 1) / count, fault, program)


def _count(
  tests: cases.Tests, frames: Sequence[zygote.Frame]
) -> tuple[int, str]:
  """Number of tests that pass, and the reason of the first failure."""
  if frames and frames[0].index == protocol.BEFORE:
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
  if frame.status == protocol.OVERFLOW:
    return "too much output"
  if os.WIFSIGNALED(frame.status):
    return zygote.why(frame.status)
  if frame.status:
    name = _printable(frame.why)
    return f"runtime error: {name or zygote.why(frame.status)}"
  return "" if cases.same_output(frame.payload, want) else "wrong answer"


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
      got = codec.decode(codec.loads(frame.payload))
    except ValueError:
      return 0, "malformed results"
    bare.append("" if codec.same(got, want) else "wrong answer")
    if all_wrapped:
      wrapped.append("" if codec.same(got, want[0]) else "wrong answer")
  best = bare
  if all_wrapped and wrapped.count("") > bare.count(""):
    best = wrapped
  return best.count(""), next(filter(None, best), "")


def _reason(why: bytes) -> str:
  """A reason from the jail; the program may have forged it."""
  code, _, details = _printable(why).partition(":")
  if code not in _REASONS:
    return f"runtime error: {code}"
  return f"{code}:{details}" if details else code


def _printable(text: bytes) -> str:
  decoded = text[:200].decode("utf-8", "replace")
  return "".join(c if c.isprintable() else "?" for c in decoded)
