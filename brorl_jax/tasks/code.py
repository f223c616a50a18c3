"""Programs: the one in a response, run on tests, every one of them.

    verify("print(int(input()) ** 2)", {"inputs": ["3"], "outputs": ["9"]})
    judge(response, {"tests": {...}}).score       # share of the tests that pass

Tests are of three kinds:

  {"inputs": ["3\\n"], "outputs": ["9\\n"]}
    Text for standard input, text expected on standard output; a list of texts
    is joined by line ends. Starting a process is most of the cost of a test, so
    one process runs a few tests, each with its own streams and `__main__`. If
    the first that fails there was not the first of its process, it is run again
    in one of its own, and all are if it passes then, so that no program fails
    for what it left behind.
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
the verdict is reached out here. Each test has `Limits.test_s` of CPU, all
together `Limits.total_s`; an example may say how much one of its tests has, in
`time_limit`. Over it, or after anything else that ends the run, the score is 0;
a process of one test that is killed fails that test.

Output is compared line by line and word by word; blank lines and the amount of
white space do not count. Where the expected word has a decimal point, another
decimal within 1e-6 of it (1e-9 around 0) is as good. Values: sandbox/plain.py.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from brorl_jax.tasks import cases
from brorl_jax.tasks.base import Verdict
from brorl_jax.tasks.sandbox import jail as jails
from brorl_jax.tasks.sandbox import plain, process, running, zygote
from brorl_jax.tasks.sandbox.walls import Limits

MAX_PROGRAM = 100_000  # characters

_LANGUAGES = ("", "python", "python3", "py")
_DEFAULT = Limits()
_KILLED = f"exit status: {running.KILLED}"  # some test, which says how
_TOGETHER = 8  # tests of one process; each holds two descriptors of 64
_REASONS = ("runtime error", "syntax error", "no function", "wrong answer")


Jail = jails.Jail | zygote.Zygote


def judge(
  response: str,
  entry: Mapping[str, Any],
  *,
  limits: Limits = _DEFAULT,
  jail: Jail | None = None,
) -> Verdict:
  """Judges the program in a response.

  Args:
    response: What the policy wrote.
    entry: Its "tests", and perhaps a "time_limit": CPU-seconds of one test, in
      the place of `limits.test_s`.
    limits: What it may use.
    jail: What to run it in; None is this thread's own.

  Raises:
    ValueError: If the tests are malformed.
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
    limits: See `judge`.
    jail: See `judge`.

  Returns:
    A pass if every test passes. Else a fail with the share that does, or
    invalid if there is no jail or it failed.

  Raises:
    ValueError: If the tests are malformed.
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
) -> zygote.Ended:
  job = {"mode": tests.mode, "program": program, **tests.job}
  # An output that is far longer than the right one is not right.
  output_bytes = max(limits.output_bytes, 2 * max(tests.sizes))
  limits = dataclasses.replace(limits, output_bytes=output_bytes)
  received = limits.result_bytes + 2 * sum(tests.sizes)
  if tests.mode != "stdio":
    return jail.run(job, limits=limits, tests=tests.check, received=received)
  inputs, left = tests.job["inputs"], limits.total_s

  def run(which: Sequence[str], together: int) -> zygote.Ended:
    nonlocal left
    some = {**job, "inputs": which, "together": together}
    rest = dataclasses.replace(limits, total_s=left)
    ended = jail.run(some, limits=rest, received=received)
    left -= ended.cpu_s
    return ended

  ended = run(inputs, _TOGETHER)
  index = _failed_after_others(tests, ended)
  if index is None or left <= 0:
    return ended
  # What fails alone too is wrong, and so is the program. Else all tests run
  # alone, and what they say counts: what is tried twice is guessed twice.
  alone = run([inputs[index]], 1)
  fails = alone.reason or _fails(tests, index, alone.frames[0])
  return ended if fails or left <= 0 else run(inputs, 1)


def _failed_after_others(tests: cases.Tests, ended: zygote.Ended) -> int | None:
  """The first test that failed, if others ran in its process before."""
  if ended.reason not in ("", _KILLED):
    return None
  for index, frame in enumerate(ended.frames[: len(tests.outputs)]):
    if _fails(tests, index, frame):
      return None if frame.first else index
  return None


def _fails(tests: cases.Tests, index: int, frame: zygote.Frame) -> bool:
  before = frame.index == running.BEFORE
  return before or bool(_fault_of_output(frame, tests.outputs[index]))


# The verdict.


def _verdict(program: str, tests: cases.Tests, ended: zygote.Ended) -> Verdict:
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
  """How many tests pass, and what is wrong with the first that does not."""
  if frames and frames[0].index == running.BEFORE:
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
  if frame.status == running.OVERFLOW:
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
