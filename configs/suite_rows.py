"""Rows of published evaluation sets as records of brorl_jax/data/dataset.py.

One function for each set, which maps a row to a record or raises Refused with
the column, what is in it, and the remedy. Columns are named as in the data sets
of HUB on 2026-11-29.
"""

import base64
import functools
import hashlib
import json
import pickletools
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from brorl_jax.verdicts.strict_json import Refused, show

Row = Mapping[str, Any]
Rows = Callable[[Row], dict[str, Any]]

# Bytes of unpacked tests of one problem; the largest known have some 60 MB.
MOST_BYTES = 1 << 27
_USUAL_S = 5.0  # CPU seconds of a test in every config; shorter ones may stay
_MOST_S = 60.0

# Where each set is on the hub: name, split, and revision if not the newest.
HUB: Mapping[str, str] = {
  "aime24": "HuggingFaceH4/aime_2024:train",
  "aime25": "math-ai/aime25:test",
  "amc": "AI-MO/aimo-validation-amc:train",
  "math500": "HuggingFaceH4/MATH-500:test",
  "minerva": "math-ai/minervamath:test",
  "olympiadbench": "Hothan/OlympiadBench:OE_TO_maths_en_COMP",
  "humanevalplus": "evalplus/humanevalplus:data/test",
  # Release 6 alone, problems of 2025; the older files have 4.3 GB more.
  "livecodebench": "livecodebench/code_generation_lite:test6",
  "prime": "PRIME-RL/Eurus-2-RL-Data:validation",
  "apps": "codeparrot/apps:test",
  "codecontests": "deepmind/code_contests:test",
  "taco": "BAAI/TACO:test/data",  # test-*.parquet of ALL/ are the same rows
  "codeforces": "open-r1/codeforces:verifiable/test",
  # Of a set with terms to accept; other files of it are .csv.
  "gpqa_diamond": "Idavidrein/gpqa:gpqa_diamond/train@refs/convert/parquet",
  "ifeval": "google/IFEval:ifeval_input_data",
}


@functools.cache
def tell(line: str) -> None:
  """Prints a line once, however often the config is read."""
  print(line, file=sys.stderr)


_KINDS = {str: "a text", list: "a list", dict: "an object"}


def column(row: Row, name: str, *kinds: type) -> Any:
  """The value of a column; raises Refused if it is missing or of no kind."""
  if name not in row:
    found = ", ".join(map(str, row)) or "none"
    raise Refused(name, f"missing; found {found}; use the published file")
  value = row[name]
  if not isinstance(value, kinds) or isinstance(value, bool):
    must = _KINDS.get(kinds[0], "a number")
    raise Refused(name, f"{show(value)}; as published it is {must}")
  return value


def text(row: Row, name: str) -> str:
  """A text that is not blank, without outer spaces."""
  value = column(row, name, str).strip()
  if not value:
    raise Refused(name, "empty; as published it is a text")
  return value


def _unjudged(name: str, row: Row, why: str) -> Refused:
  return Refused(name, f"{show(row.get(name))}: {why}; leave this row out")


def _record(name: str, domain: str, prompt: str, **more: Any) -> dict[str, Any]:
  """Its id follows from the question, not from the place of the file."""
  digest = hashlib.sha256(prompt.encode()).hexdigest()[:12]
  return {
    "id": f"{name}-{digest}",
    "source": name,
    "domain": domain,
    "prompt": prompt,
    **more,
  }


def published(rows: Rows) -> Rows:
  """The function with one error for a row in no published form."""

  @functools.wraps(rows)
  def checked(row: Row) -> dict[str, Any]:
    try:
      return rows(row)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
      why = f"{type(error).__name__}: {error}"
      raise Refused("", f"not as published ({why}); use its file") from None

  return checked


# Mathematics.


def _of_answers(name: str, question: str) -> Rows:
  """A set with a question and one answer in a row, a text or a number."""

  @published
  def rows(row: Row) -> dict[str, Any]:
    answer = column(row, "answer", str, int, float)
    return _record(name, "math", text(row, question), answer=answer)

  return rows


aime24 = _of_answers("aime24", "problem")
aime25 = _of_answers("aime25", "problem")
amc = _of_answers("amc", "problem")
math500 = _of_answers("math500", "problem")
minerva = _of_answers("minerva", "question")


@published
def olympiadbench(row: Row) -> dict[str, Any]:
  """The answers of a list are one list; the question names a unit."""
  answers = column(row, "final_answer", list)
  if not answers or not all(isinstance(a, str) for a in answers):
    raise Refused(
      "final_answer", f"{show(answers)}; it must be a list of texts"
    )
  if row.get("error"):
    raise _unjudged("error", row, "answers are compared without a tolerance")
  parts = [row.get("context") or "", text(row, "question")]
  if row.get("is_multiple_answer"):
    parts.append("There are several answers; separate them by commas.")
  if row.get("unit"):
    parts.append(f"Give the answer in this unit: {row['unit']}")
  prompt, answer = "\n\n".join(filter(None, parts)), ", ".join(answers)
  return _record("olympiadbench", "math", prompt, answer=answer)


# Code.

_STDIN = "The program reads standard input and writes standard output."
# The checks of HumanEval+ import numpy, which the jail has not, for these two.
_NUMPY = "import numpy as np\n"
_LIKE_NUMPY = """
class np:
  class ndarray:
    pass
  float32 = float64 = float
  def allclose(a, b, rtol=1e-05, atol=1e-08):
    if isinstance(b, (list, tuple)):
      return len(a) == len(b) and all(
        np.allclose(x, y, rtol, atol) for x, y in zip(a, b))
    return a == b or abs(a - b) <= atol + rtol * abs(b)
"""


@published
def humanevalplus(row: Row) -> dict[str, Any]:
  """A row of HumanEval, or of HumanEval+."""
  check = text(row, "test") + "\n"
  if _NUMPY in check:
    check = check.replace(_NUMPY, _LIKE_NUMPY)
  prompt = f"Complete this function:\n```python\n{text(row, 'prompt')}\n```"
  tests = {"check": check, "fn_name": text(row, "entry_point")}
  return _record("humanevalplus", "code", prompt, tests=tests)


def _json(given: str, name: str) -> Any:
  try:
    return json.loads(given)
  except (ValueError, RecursionError) as error:
    raise Refused(name, f"not JSON ({error}); leave this row out") from None


def _posed(prompt: str, starter: Any, function: Any) -> str:
  """A question with what a solution begins with, or how it reads."""
  if function and isinstance(starter, str) and starter.strip():
    code = starter.strip()
    return f"{prompt}\n\nUse this starter code:\n```python\n{code}\n```"
  if function:
    return f"{prompt}\n\nWrite a function {function}."
  return f"{prompt}\n\n{_STDIN}"


def _limit(seconds: float) -> dict[str, float]:
  """The field `time_limit`, where tests need more than the usual time."""
  return {"time_limit": min(seconds, _MOST_S)} if seconds > _USUAL_S else {}


def packed_text(data: str, most: int = MOST_BYTES) -> str:
  """The text in base64 of a compressed pickle of one text.

  Nothing is unpickled, which would run what a file says: its opcodes are read,
  and only those of a single text are allowed. Raises Refused otherwise, or if
  it is longer than `most` bytes.
  """
  try:
    unpack = zlib.decompressobj()
    pickled = unpack.decompress(base64.b64decode(data, validate=True), most)
    if not unpack.eof:
      raise ValueError(f"more than {most:,} bytes, or cut short")
    texts = []
    for i, (code, value, _) in enumerate(pickletools.genops(pickled)):
      if i == _MOST_OPERATIONS:
        raise ValueError("a pickle of more than one text")
      if code.name in _TEXTS:
        texts.append(value)
      elif code.name not in _AROUND:
        raise ValueError(f"a pickle with the operation {code.name}")
    (only,) = texts
    return only
  except (ValueError, zlib.error, IndexError, UnicodeError) as error:
    raise Refused(
      "private_test_cases", f"no packed text ({error}); use the published file"
    ) from None


_TEXTS = "UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8".split()
_MOST_OPERATIONS = 16  # of a text: 5
_AROUND = "PROTO FRAME PUT BINPUT LONG_BINPUT MEMOIZE STOP".split()


@published
def livecodebench(row: Row) -> dict[str, Any]:
  """Public and private tests together, of one kind."""
  cases = _cases(_json(text(row, "public_test_cases"), "public_test_cases"))
  packed = text(row, "private_test_cases")
  private = packed if packed.startswith("[") else packed_text(packed)
  cases += _cases(_json(private, "private_test_cases"))
  kinds = {case["testtype"] for case in cases}
  if kinds - {"stdin", "functional"} or len(kinds) != 1:
    raise Refused(
      "testtype",
      f"{show(sorted(kinds))}; only one of stdin and functional is judged; "
      "leave this row out",
    )
  tests: dict[str, Any] = _sides(cases)
  function = None
  if kinds == {"functional"}:
    metadata = _json(text(row, "metadata"), "metadata")
    function = text({"func_name": "", **metadata}, "func_name")
    tests["fn_name"] = function
  question = text(row, "question_content")
  prompt = _posed(question, row.get("starter_code"), function)
  return _record("livecodebench", "code", prompt, tests=tests)


def _cases(cases: Any) -> list[Row]:
  fields = ("input", "output", "testtype")
  good = isinstance(cases, list) and all(
    isinstance(case, dict) and all(isinstance(case.get(f), str) for f in fields)
    for case in cases
  )
  if not good:
    raise Refused("test cases", f"{show(cases)}; use the published file")
  return cases


def _sides(cases: Sequence[Row]) -> dict[str, list[str]]:
  return {f"{side}s": [c[side] for c in cases] for side in ("input", "output")}


def _tests_of_text(given: Any, name: str) -> dict[str, Any]:
  """Tests from JSON text with inputs, outputs and optionally fn_name."""
  tests = _json(given, name)
  keys = ("inputs", "outputs")
  if not isinstance(tests, dict) or not all(
    isinstance(tests.get(key), list) and tests[key] for key in keys
  ):
    raise Refused(
      name, f"{show(given)}: it has no inputs and outputs; leave this row out"
    )
  return {key: tests[key] for key in (*keys, "fn_name") if tests.get(key)}


def _of_input_output(name: str) -> Rows:
  """A set whose tests are JSON text in the column input_output."""

  @published
  def rows(row: Row) -> dict[str, Any]:
    tests = _tests_of_text(column(row, "input_output", str), "input_output")
    prompt = _posed(
      text(row, "question"), row.get("starter_code"), tests.get("fn_name")
    )
    words = str(row.get("time_limit") or "").split()[:1]  # "2.0 seconds"
    seconds = float(words[0]) if words and _is_number(words[0]) else 0.0
    return _record(name, "code", prompt, tests=tests, **_limit(seconds))

  return rows


def _is_number(word: str) -> bool:
  return word.replace(".", "", 1).isdecimal()


apps = _of_input_output("apps")
taco = _of_input_output("taco")


@published
def codecontests(row: Row) -> dict[str, Any]:
  """Public, private and generated tests together."""
  for name in ("input_file", "output_file"):
    if row.get(name):
      raise _unjudged(name, row, "programs that use files are not judged")
  tests = {"inputs": [], "outputs": []}
  for name in ("public_tests", "private_tests", "generated_tests"):
    some = column(row, name, dict)
    for side in ("input", "output"):
      tests[side + "s"] += some.get(side) or []
  prompt = _posed(text(row, "description"), None, None)
  limit = row.get("time_limit") or {}
  seconds = (limit.get("seconds") or 0) + (limit.get("nanos") or 0) / 1e9
  return _record("codecontests", "code", prompt, tests=tests, **_limit(seconds))


@published
def codeforces(row: Row) -> dict[str, Any]:
  """The official tests of a problem, if all are there and need no checker."""
  for name, bad, why in (
    ("generated_checker", bool, "several outputs may be right"),
    ("interaction_format", bool, "the program talks to a judge"),
    ("input_mode", lambda mode: mode == "file", "the program reads a file"),
  ):
    if bad(row.get(name)):
      raise _unjudged(name, row, f"{why}, which is not judged")
  cases = column(row, "official_tests", list)
  if not cases or not row.get("official_tests_complete"):
    raise _unjudged("official_tests_complete", row, "tests are missing")
  parts = [text(row, "title"), text(row, "description")]
  for name, title in (("input_format", "Input"), ("output_format", "Output")):
    if row.get(name):
      parts.append(f"{title}:\n{row[name]}")
  parts += [
    f"Example:\n{case['input']}\nOutput:\n{case['output']}"
    for case in row.get("examples") or []
  ]
  if row.get("note"):
    parts.append(f"Note:\n{row['note']}")
  prompt = _posed("\n\n".join(parts), None, None)
  tests = _sides(cases)
  seconds = float(row.get("time_limit") or 0)
  return _record("codeforces", "code", prompt, tests=tests, **_limit(seconds))


# Sources of Eurus-2's validation file; all else in it is mathematics.
PRIME = ("apps", "codecontests", "codeforces", "taco")


@published
def prime(row: Row) -> dict[str, Any]:
  """A program of PRIME's validation set, which ProRL's tables use.

  Its system message asks for the actions of another model, and is dropped.
  """
  source = text(row, "data_source")
  if source not in PRIME:
    raise _unjudged("data_source", row, "it asks for no program")
  truth = column(row, "reward_model", dict)
  given = column(truth, "ground_truth", str)
  tests = _tests_of_text(given, "reward_model.ground_truth")
  messages = column(row, "prompt", list)
  prompt = text(messages[-1], "content")
  return _record(source, "code", prompt, tests=tests)


# Science, and instructions.


@published
def gpqa_diamond(row: Row) -> dict[str, Any]:
  """A question and four choices, which a hash shuffles."""
  wrong = {f"Incorrect Answer {i}": "" for i in (1, 2, 3)}
  wrong = {name: text(row, name) for name in wrong}
  question, right = text(row, "Question"), text(row, "Correct Answer")
  return _record("gpqa_diamond", "stem", question, answer=right, **wrong)


@published
def ifeval(row: Row) -> dict[str, Any]:
  """Instructions by id, each with its arguments."""
  ids: Sequence[Any] = column(row, "instruction_id_list", list)
  given: Sequence[Any] = column(row, "kwargs", list)
  if len(ids) != len(given):
    raise Refused(
      "kwargs", f"{len(given)} for {len(ids)} ids; use the published file"
    )
  instructions = [
    {
      "id": name,
      "kwargs": {k: v for k, v in (some or {}).items() if v is not None},
    }
    for name, some in zip(ids, given, strict=True)
  ]
  prompt = text(row, "prompt")
  return _record("ifeval", "instructions", prompt, instructions=instructions)


@published
def gym(row: Row) -> dict[str, Any]:
  """A puzzle as `suite_puzzles` writes it."""
  entry = column(row, "entry", dict)
  task = column(entry, "metadata", dict).get("source_dataset")
  return _record(str(task), "gym", text(entry, "question"), entry=entry)
