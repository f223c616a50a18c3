"""Runs the program of a response on all its tests.

    verify("print(int(input()) ** 2)", {"inputs": ["3"], "outputs": ["9"]})
    verify_entry(response, {"tests": {...}}).score    # share of tests that pass

Tests are of three kinds:

  {"inputs": ["3\\n"], "outputs": ["9\\n"]}
    Texts for standard input and those expected on standard output, or lists of
    their lines. Starting a process is most of the cost of a test, so one
    process runs a few tests, each with its own streams and `__main__`.
  {"inputs": [[3, 4]], "outputs": [7], "fn_name": "add"}
    Lists of arguments and expected values, or texts: one JSON argument per
    line, and JSON or plain text. If every output is a list of one item, the
    item is accepted as well. A `class Solution` with a method fn_name is
    created anew for each call. The names of `typing` need no import.
  {"check": "def check(candidate): ...", "fn_name": "add"}
    A function that calls the candidate and asserts. One test in two processes.
    Names that it lacks come from the prompt, never from the response.

The program runs in a jail (sandbox/). Expected values never enter it; the
comparison (`same_output`, or sandbox/codec.py for values) happens outside. Each
test has `Limits.test_s` CPU seconds, or the `time_limit` of its example; all
tests together `Limits.total_s`. If the time is exceeded or the run ends
otherwise, the score is 0; if only one test's process is killed, it fails.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import decimal
import itertools
import json
import keyword
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from brorl_jax.verdicts import base, strict_json
from brorl_jax.verdicts.sandbox import codec, jail_main, zygote
from brorl_jax.verdicts.sandbox import jail as jails
from brorl_jax.verdicts.sandbox.process import MAX_TEST_S, Failed
from brorl_jax.verdicts.sandbox.seccomp_landlock import Limits
from brorl_jax.verdicts.sandbox.zygote import JobResult
from brorl_jax.verdicts.strict_json import Refused, show

MAX_PROGRAM = 100_000  # characters
MAX_TESTS = 10_000
MAX_TEXT = 8 << 20  # bytes of one test's input or output

_KILLED = f"exit status: {jail_main.KILLED}"  # the frame has the reason
_AGAIN = 3  # times the limit of all tests, for those that run apart
# Tests per process: each takes two of 128 descriptors, and the inputs and
# outputs of all have to fit in memory.
_TOGETHER, _STREAMS = 24, 64 << 20
_REASONS = ("runtime error", "syntax error", "no function", "wrong answer")
_EMPTY = "tests expects only empty outputs; any program would pass"

Jail = jails.Jail | zygote.Zygote


def verify_entry(
  response: str,
  entry: Mapping[str, Any],
  jail: Jail | None = None,
  *,
  limits: Limits | None = None,
) -> base.Verdict:
  """Scores the program in a response.

  `entry` has "tests" and optionally a "time_limit": CPU seconds of one test, in
  place of `limits.test_s`. None: this thread's jail, and its limits. Raises
  ValueError if the tests are malformed.
  """
  program = extract(response, entry["tests"])
  if program is None:
    return base.judged("no program", "")
  given: Limits = limits or getattr(jail, "limits", Limits())
  if entry.get("time_limit") is not None:
    test_s = float(entry["time_limit"])
    total_s = max(given.total_s, test_s)
    given = dataclasses.replace(given, test_s=test_s, total_s=total_s)
  return verify(program, entry["tests"], limits=given, jail=jail)


def verify(
  program: str,
  tests: Mapping[str, Any],
  *,
  limits: Limits | None = None,
  jail: Jail | None = None,
) -> base.Verdict:
  """Runs a program on every test; for `tests` see the module.

  "pass" if every test passes, else "fail" with the share that passes; "invalid"
  if the jail failed. ValueError if the tests are malformed.
  """
  parsed = parse_tests(tests)
  if fail := base.overlong(program, MAX_PROGRAM):
    return fail
  try:
    ended = _run(program, parsed, limits or Limits(), jail or jails.mine())
  except Failed as error:
    return base.Verdict("invalid", 0.0, f"verifier failed: {error}", program)
  return _verdict(program, parsed, ended)


_LANGUAGES = ("", "python", "python3", "py3", "py")
_BLOCKS = 32  # the last of a response; more would take quadratic time
# Possessive, so that a line that is no fence takes linear time.
_FENCE = re.compile(
  r"([ \t]*+(?:(?:[-*+]|\d{1,9}[.)])[ \t]*+)?)(`{3,}+|~{3,}+)\s*+(\w*+)[^`]*+"
)
_WORD = re.compile(r"[A-Za-z_]\w*+")
_STATEMENT = re.compile(r"(?m)^(?=[^\s)\]}#])")  # at the margin
_DEFINITION = re.compile(
  r"(?:async +)?(?:def +(\w+) *\(|class +(\w+) *[:(])"
  r"|(\w+)(?= *= *lambda\b)|([A-Z][A-Z\d_]*)(?= *=[^=])"
  # Plain data, which harms no program that means something else by the name.
  r"|(\w+)(?= *(?::[^=\n]++)?=(?:[\s.,:+*(){}\[\]-]|\d\w*+|'[^'\n]*+'"
  r"|\"[^\"\n]*+\"|\b(?:None|True|False|dict|set|list|float)\b)++(?:#|\Z))"
  r"|(?:from +(?!__future__)[\w.]+ +)?import +"
  r"(\(?[\w., \n]++\)?)\s*+(?:#|\Z)"
)
_HEAD = re.compile(  # a function without a body
  r"(?:class .*\n\s*)?(?:async +)?def +\w+ *\([^()]*\) *+(?:->[^:\n]*+)?:?\s*+"
  r'(?:"""(?:(?!""")[\s\S])*+""")?\s*+(?:\.{3}|pass)?\s*+'
)
_STDIN = re.compile(r"stdin(?!\w{,9} *=[^=])|(?:open|read) *\( *0\b|fileinput")
_INPUT = re.compile(r"\binput\s*+\(")
_OWN_INPUT = re.compile(  # `input` that is another function
  r"(?m)^[ \t]*+(?:def +input\b|(?:\w+\.)?input *=(?! *=|.*\binput *\())"
)
_SHOWN = re.compile(  # a sketch, or what reads an input of its own
  r"(?m)^(?:\.{3} *(?:#|$)|# *\.{3}|(?:# *)?…)"
  r"|^(?:[ \t]++(?!.*open))?sys\.stdin *=(?!.*(?:stdin|\(0))"
  r"|\b(?:builtins|sys)(?:\.|, *['\"])(?:input|stdin)['\"]"
)
_WRITES = re.compile(r"\b(?:print|write)\s*+\(|\bstdout\b")
# A statement that does more than to define.
_ACTS = re.compile(
  r"(?m)^(?:if|for|while|try|with)\b|^(?!(?:async|def|class|from|import"
  r"|sys\.setrecursionlimit)\b|[@#>\s)\]}'\"]).*\("
)


def extract(
  response: str, tests: Mapping[str, Any] | None = None
) -> str | None:
  """The program of a response, from its complete blocks in Python, or None.

  A block ends at a fence at least as long, alone on its line; it is marked as
  Python or has no language. Only text after the thinking counts, in an
  `<answer>` with blocks only these. The last block is the program that defines
  the function of the tests; for standard input, that reads it, prints and acts,
  alone or with others; otherwise, or without tests, that is marked. Definitions
  that it lacks come from the others.
  """
  text = base.after_thinking(response)
  blocks, inside = _blocks(text), base.tagged(text)
  if inside:
    blocks = _blocks(inside) or [*blocks, ("", inside)]
  texts = [block for _, block in blocks[-_BLOCKS:]]
  marked = [block for language, block in blocks if language] or texts
  if not texts:
    return None
  if tests is None or (len(texts) == 1 and "given" not in tests):
    return marked[-1]
  known = [_definitions(text) for text in (tests.get("given", ""), *texts)]
  if name := tests.get("fn_name"):
    define = re.compile(rf"\bdef +{name}\b|^{name} *= *lambda")
    alias = rf"(?m)^{name} *= *(?!{name}\b)(?:\w+\()?(\w+)\)? *(?:#|$)"
    others = {n for of in known for n in of} - {name}
    found = [t for t, d in zip(texts, known[1:], strict=True) if name in d]
    for text, defined in zip(texts, known[1:], strict=True):
      body = defined.get(name) or defined.get("Solution", "")
      if define.search(body) or others & {*re.findall(alias, text)}:
        found.append(text)
  else:
    found = [text for text in texts if _WRITES.search(text)]
    fed, whole = any(tests.get("inputs") or ()), "\n".join(marked[-_BLOCKS:])
    joined = [(_with_definitions(text, known, name), text) for text in texts]
    for program, acts in (whole, whole), *joined, *((t, t) for t in texts):
      stdin = _STDIN.search(program)
      own = _SHOWN.search(program) or (not stdin and _OWN_INPUT.search(program))
      reads = not fed or stdin or _INPUT.search(program)
      if reads and not own and _WRITES.search(program) and _ACTS.search(acts):
        found.append(acts)
  return _with_definitions((found or marked)[-1], known, name)


def _blocks(text: str) -> list[tuple[str, str]]:
  """Language and text of each complete block that may be Python."""
  blocks: list[tuple[str, str]] = []
  block = None
  indent = fence = language = ""
  for line in text.split("\n"):
    bare = line.rstrip("\r \t")
    if block is not None:
      marks = bare.strip()
      if set(marks) == {fence[0]} and len(marks) >= len(fence):
        if language.lower() in _LANGUAGES:
          blocks.append((language, "\n".join(block) + "\n"))
        block = None
      else:
        block.append(line.removeprefix(indent))
    elif match := _FENCE.fullmatch(bare):
      indent, fence, language = match.groups()
      indent = re.sub(r"[^ \t]", " ", indent)  # the mark of a list
      block = []
  return blocks


def _definitions(text: str) -> dict[str, str]:
  """The definitions and imports at the margin of a text, by name."""
  found, decorators = dict[str, str](), ""
  for piece in _STATEMENT.split(text):
    decorators += piece if piece.startswith("@") else ""
    match = _DEFINITION.match(piece)
    if match and not _HEAD.fullmatch(re.sub("#.*", "", piece)):
      names = next(filter(None, match.groups())).strip(" ()\n")
      decorators += piece.rstrip() + "\n"
      for name in filter(None, map(str.split, names.split(","))):
        # `os.path` defines os, `a as b` defines b.
        found[name[-1].partition(".")[0]] = decorators
    decorators = decorators if piece.startswith("@") else ""
  return found


def _with_definitions(
  text: str, others: Sequence[Mapping[str, str]], asked: str | None
) -> str:
  """A text after the definitions of others, but the asked, that it lacks."""
  have = _definitions(text).keys() | vars(builtins).keys()
  have |= {asked, "Solution"} if asked else set()
  known = {n: d for one in others for n, d in one.items() if n not in have}
  order, queue = dict.fromkeys(known.values()), [text]
  for part in queue:
    queue += {known.pop(w) for w in {*_WORD.findall(part)} & known.keys()}
  used = set(queue)
  return "".join(part for part in order if part in used) + text


# Running it, and what its results say.


def _run(program: str, tests: Tests, limits: Limits, jail: Jail) -> JobResult:
  """Runs all tests; each with its own time if others may have sped it up."""
  # An output far longer than the expected one cannot match.
  output_bytes = max(limits.output_bytes, 2 * max(tests.sizes))
  limits = dataclasses.replace(limits, output_bytes=output_bytes)
  received = limits.result_bytes + 2 * sum(tests.sizes)
  # There is no /proc, to which this name leads.
  text = re.sub(r"\bopen\( *+(['\"])/dev/stdin\1", "open(0", program)
  job = {"mode": tests.mode, "program": text, **tests.job}
  field = "calls" if tests.mode == "call" else "inputs"
  left = limits.total_s

  def run(which: slice, together: int, most: float) -> JobResult:
    nonlocal left
    if tests.mode != "check":
      job.update({field: tests.job[field][which], "together": together})
    now = dataclasses.replace(limits, total_s=min(left, most))
    ended = jail.run(job, limits=now, tests=tests.check, received=received)
    left -= ended.cpu_s
    return ended

  count = len(tests.outputs)
  # Decided before any test runs: another run would tell which answer was wrong.
  widest = 4 * max(map(len, tests.job.get("inputs", [""]))) + output_bytes
  alone = tests.mode == "stdio" and _leaves(program)
  most = 1 if alone else max(1, min(_TOGETHER, _STREAMS // widest))
  ended = run(slice(count), most, left)
  if tests.mode == "check" or ended.reason not in ("", _KILLED):
    return ended
  if ended.cpu_s > limits.test_s and count > 1:
    # Who has all inputs can compute for one test while another runs.
    left, frames = _AGAIN * limits.total_s, []
    for i in range(count):
      ended = run(slice(i, i + 1), 1, limits.test_s)
      frames += ended.frames
      if ended.reason not in ("", _KILLED) or len(ended.frames) != 1:
        return JobResult(frames, ended.reason or "ended early")
    return JobResult(frames, "")
  return ended


# What lasts beyond a test in the same process: changes of the interpreter and
# of modules. A few programs that leave nothing match as well.
_LASTS = re.compile(
  r"\b(?:__builtins__|builtins|atexit|weakref|signal|setattr|[sg]etcontext|gc"
  r"|locale|importlib|__dict__|environ|set\w*trace|sys\.(?:modules|path))\b"
)
_IMPORTED = re.compile(r"\bimport +\(?([\w., ]++)")
_MOST_NAMES = 64  # more would take long to look for


def _leaves(program: str) -> bool:
  """Whether a program may leave something behind, judged by its text."""
  # Sorted: programs that import the same share a compiled expression.
  names = sorted({*re.findall(r"\w++", " ".join(_IMPORTED.findall(program)))})
  owner = rf"\b(?!sys\.std(?:in|out|err)\b)(?:{'|'.join(names)})"
  change = rf"{owner}\.[\w.]{{1,99}}+ *+[^\w\s=!<>()\[\],.:]*+=(?!=)"
  if _LASTS.search(program) or len(names) > _MOST_NAMES:
    return True
  return bool(names and re.search(change, program))


def _verdict(program: str, tests: Tests, ended: JobResult) -> base.Verdict:
  count, frames = len(tests.outputs), ended.frames
  if ended.reason and not (tests.mode == "stdio" and ended.reason == _KILLED):
    return base.judged(ended.reason, program)
  if frames and frames[0].index == jail_main.BEFORE:
    faults = [_reason(frames[0].why)]
  elif len(frames) > count:
    faults = ["malformed results"]
  elif tests.mode == "call":
    faults = _faults_of_calls(tests.outputs, frames)
  else:
    faults = [_fault_of_test(tests, i, frame) for i, frame in enumerate(frames)]
  passed, fault = faults.count(""), next(filter(None, faults), "")
  if passed == count and not ended.reason:
    return base.judged("", program)
  if len(frames) < count and not fault:
    fault = "ended early"
  if count > 1 and passed:
    fault = f"{fault}{',' if ':' in fault else ':'} {passed} of {count} pass"
  return base.Verdict("fail", min(passed, count - 1) / count, fault, program)


def _fault_of_test(tests: Tests, index: int, frame: zygote.Frame) -> str:
  """Why a test of standard output, or a check, fails; "" if it passes."""
  if tests.mode == "check" and not frame.why:
    return ""
  if tests.mode == "check" or frame.index == jail_main.BEFORE:
    return _reason(frame.why)
  if frame.status == jail_main.OVERFLOW:
    return "too much output"
  if os.WIFSIGNALED(frame.status):
    return zygote.why(frame.status)
  if frame.status:
    return f"runtime error: {_printable(frame.why) or zygote.why(frame.status)}"
  same = same_output(frame.payload, tests.outputs[index])
  return "" if same else "wrong answer"


def _faults_of_calls(
  outputs: Sequence[Any], frames: Sequence[zygote.Frame]
) -> list[str]:
  # Some data sets wrap each value in a list.
  readings = [list(outputs)]
  if all(isinstance(want, list) and len(want) == 1 for want in outputs):
    readings.append([want[0] for want in outputs])
  faults: list[list[str]] = [[] for _ in readings]
  for i, frame in enumerate(frames):
    try:
      got = None if frame.why else codec.decode(codec.loads(frame.payload))
    except ValueError:
      return ["malformed results"]
    for wanted, found in zip(readings, faults, strict=True):
      if frame.why:
        found.append(_reason(frame.why))
      else:
        found.append("" if codec.same(got, wanted[i]) else "wrong answer")
  return max(faults, key=lambda found: found.count(""))  # the first of equals


def _reason(why: bytes) -> str:
  """A reason from the jail; the program may have forged it."""
  code, _, details = _printable(why).partition(":")
  if code not in _REASONS:
    return f"runtime error: {code}"
  return f"{code}:{details}" if details else code


def _printable(text: bytes) -> str:
  decoded = text[:200].decode("utf-8", "replace")
  return "".join(c if c.isprintable() else "?" for c in decoded)


# An exponent without a point has its sign: `1e5` may be a digest.
_DECIMAL = re.compile(
  rb"[+-]?(\d+\.\d*|\.\d+)([eE][+-]?\d{1,3})?|[+-]?\d+[eE][+-]\d{1,3}"
)
_NUMBER = re.compile(rb"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?")
_LONGEST_NUMBER = 400  # characters
_RELATIVE, _ABSOLUTE = 1e-6, 1e-9  # errors that a decimal may have
_LONG, _MOST = 6, 1e-3  # a decimal with as many digits is no amount; its error


def same_output(got: bytes, want: bytes) -> bool:
  """Whether an output matches the expected one, line by line, word by word.

  Blank lines and the amount of white space are ignored. If the expected word
  has a decimal point or an exponent, a number within 1e-6 of it (1e-9 around 0)
  matches, if it is within 1e-3 and every digit that the expected word shows is
  right, or it shows six decimals or more.
  """
  if got == want:
    return True
  lines = lambda text: [x for line in text.split(b"\n") if (x := line.split())]
  a, b = lines(got), lines(want)
  chain = itertools.chain.from_iterable
  same = map(_same_word, chain(a), chain(b))
  return [*map(len, a)] == [*map(len, b)] and all(same)


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
  # Printed digits must be right, as in amounts of money.
  shown = -int(decimal.Decimal(want.decode()).as_tuple().exponent)
  most = _MOST if shown >= _LONG else 0.5 * 10.0**-shown + _ABSOLUTE
  return abs(other - value) <= min(allowed, most)


@dataclasses.dataclass(frozen=True)
class Tests:
  """Tests as a job for the jail, and the expected values, kept outside."""

  mode: str
  job: Mapping[str, Any]
  outputs: Sequence[Any]
  sizes: Sequence[int]  # of the encoded outputs, in bytes
  check: bytes = b""


def parse_tests(tests: Any) -> Tests:
  """Prepares an example's tests for the jail; a ValueError has one line."""
  if not isinstance(tests, Mapping):
    raise ValueError(f"tests is a {type(tests).__name__}; use an object")
  fields = {"inputs", "outputs", "fn_name", "check", "given"}
  if unknown := sorted(map(str, tests.keys() - fields)):
    must = "use inputs, outputs, fn_name or check"
    raise ValueError(f"tests has the unknown field {unknown[0]!r}; {must}")
  name = tests.get("fn_name")
  known = isinstance(name, str) and name.isidentifier()
  if name and (not known or keyword.iskeyword(name)):
    raise ValueError(f"tests.fn_name = {name!r}; use a Python name")
  if tests.get("check") is not None:
    return _parse_check(tests, name)
  inputs: Any = tests.get("inputs")
  outputs: Any = tests.get("outputs")
  for field, values in (("inputs", inputs), ("outputs", outputs)):
    if not isinstance(values, list):
      kind = type(values).__name__
      raise ValueError(f"tests.{field} is a {kind}; use a list")
  if not 1 <= len(inputs) == len(outputs) <= MAX_TESTS:
    has = f"{len(inputs)} inputs and {len(outputs)} outputs"
    must = f"use as many of each, 1 to {MAX_TESTS}"
    raise ValueError(f"tests has {has}; {must}")
  if name:
    return _parse_calls(inputs, outputs, name)
  texts = [_text(v, f"inputs[{i}]").decode() for i, v in enumerate(inputs)]
  expected = [_text(v, f"outputs[{i}]") for i, v in enumerate(outputs)]
  if not b"".join(expected).split():
    raise ValueError(_EMPTY)
  _refuse_contradiction(texts, expected)
  return Tests("stdio", {"inputs": texts}, expected, [*map(len, expected)])


def _parse_check(tests: Mapping[str, Any], name: Any) -> Tests:
  if "inputs" in tests or "outputs" in tests:
    raise ValueError("tests has check as well as inputs or outputs; keep one")
  if not name:
    raise ValueError("tests has check but no fn_name; name the function")
  given = _definitions(_text(tests.get("given", ""), "given").decode())
  text = _text(tests["check"], "check").decode()
  source = _with_definitions(text, [given], name).encode()
  try:
    body = ast.parse(source).body
  except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
    raise ValueError(f"tests.check is not Python: {error}") from None
  if "check" not in {n.name for n in body if isinstance(n, ast.FunctionDef)}:
    raise ValueError("tests.check defines no function check(candidate)")
  return Tests("check", {"function": name}, [b""], [0], source)


def _parse_calls(inputs: list[Any], outputs: list[Any], name: str) -> Tests:
  nodes, expected, sizes = [], [], []
  for i, (given, want) in enumerate(zip(inputs, outputs, strict=True)):
    where = f"inputs[{i}]"
    if isinstance(given, str):
      lines = _text(given, where).decode().split("\n")
      arguments = [_json(line, where) for line in lines if line.strip()]
      if isinstance(want, str):
        with contextlib.suppress(ValueError):  # a plain text
          want = _json(want, "")
    elif isinstance(given, (list, tuple)):
      arguments = list(given)
    else:
      kind = type(given).__name__
      must = "a list of arguments, or a text with one JSON argument per line"
      raise ValueError(f"tests.{where} is a {kind}; use {must}")
    nodes.append(_node(arguments, where))
    sizes.append(len(codec.dumps(_node(want, f"outputs[{i}]"))))
    expected.append(want)
  if all(want in (None, "", [], {}, [None], [""], [[]]) for want in expected):
    raise ValueError(_EMPTY)
  _refuse_contradiction([*map(codec.dumps, nodes)], expected)
  return Tests("call", {"function": name, "calls": nodes}, expected, sizes)


def _refuse_contradiction(
  inputs: Sequence[str | bytes], outputs: Sequence[Any]
) -> None:
  first: dict[str | bytes, int] = {}
  for i, given in enumerate(inputs):
    j = first.setdefault(given, i)
    if outputs[i] != outputs[j]:
      twice = f"tests.inputs[{i}] equals inputs[{j}] but expects another output"
      raise ValueError(f"{twice}; no program could pass both")


def _text(value: Any, where: str) -> bytes:
  if isinstance(value, list) and all(isinstance(v, str) for v in value):
    value = "\n".join(value)
  if not isinstance(value, str):
    raise ValueError(f"tests.{where} is a {type(value).__name__}; use a text")
  data = value.encode()  # raises ValueError for a lone surrogate
  if (size := len(data)) > MAX_TEXT:
    raise ValueError(f"tests.{where} has {size} bytes; use at most {MAX_TEXT}")
  return data


def _json(text: str, where: str) -> Any:
  try:
    # `int` of a text refuses more than 4,300 digits, a Decimal none.
    return json.loads(text, parse_int=lambda n: int(decimal.Decimal(n)))
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
  is_list = type(node) is list
  return is_list and (node[0] == "x" or any(map(_has_opaque, node[1:])))


def _tests(value: Any) -> dict[str, Any]:
  if not isinstance(value, list):
    return strict_json.mapping(value, "tests")
  for i, pair in enumerate(value):
    if not isinstance(pair, dict) or pair.keys() != {"input", "output"}:
      must = "use an object with input and output only"
      raise Refused(f"tests[{i}]", f"{show(pair)}; {must}")
  return {f"{x}s": [pair[x] for pair in value] for x in ("input", "output")}


def _time_limit(value: Any) -> float:
  number = isinstance(value, (int, float)) and not isinstance(value, bool)
  if not number or not 0.01 <= value <= MAX_TEST_S:
    must = f"use CPU seconds per test, .01 to {MAX_TEST_S:g}"
    raise Refused("time_limit", f"{show(value)}; {must}")
  return float(value)


def _check_reference(record: Mapping[str, Any]) -> dict[str, Any]:
  """The entry; "given" is what a prompt defines besides what it asks for."""
  entry = dict(record)
  prompt, tests = entry.pop("prompt", ""), entry["tests"]
  parse_tests(tests)
  given: dict[str, str] = {}
  code = re.split(r"(?m)^(?=(?:import|from|def|class|@)\b)", prompt, maxsplit=1)
  for text in [block for _, block in _blocks(prompt)] or code[1:]:
    with contextlib.suppress(SyntaxError, ValueError, MemoryError):
      given |= _definitions(text) if ast.parse(text) else {}
  if given and tests.get("fn_name"):
    text = "".join(dict.fromkeys(given.values()))
    entry["tests"] = {"given": text, **tests}
  return entry


DOMAIN = base.Domain(
  name="code",
  verify=verify_entry,
  fields={
    "tests": base.Field(_tests),
    "time_limit": base.Field(_time_limit, optional=True),
    "prompt": base.Field(str, optional=True),
  },
  check_reference=_check_reference,
  part=lambda response, entry: extract(response, entry["tests"]),
  needs_jail="programs",
)
