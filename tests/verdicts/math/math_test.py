"""Every line of the corpus, and what must hold of any answer."""

import json
import pathlib
import subprocess
import sys

import hypothesis
import pytest
from hypothesis import strategies
from messages import refuses

from brorl_jax.verdicts import math
from brorl_jax.verdicts.base import Verdict
from brorl_jax.verdicts.math.symbolic import symbolic

CORPUS = pathlib.Path(__file__).parents[2] / "hostile" / "math.jsonl"
LINES = [json.loads(line) for line in CORPUS.read_text().splitlines()]


class Near:
  def __init__(self):
    self.asked = []

  def ask(self, judge, *args, timeout):
    assert (judge, timeout) == ("symbolic", math.DEADLINE)
    self.asked.append(args)
    return symbolic(*args)


class Late:
  def ask(self, judge, *args, timeout):
    raise RuntimeError("late: 3.0 s")


def judged(line):
  response = line["answer"]
  if line["kind"] == "answer":
    response = f"\\boxed{{{response}}}"
  return math.verify(response, line["gold"], jail=Near())


def is_right(line):
  verdict = judged(line)
  if line["expected"] == "reject":
    return verdict.status == "fail" and verdict.code == "refused"
  return verdict.status == ("pass" if line["expected"] else "fail")


def test_every_line_of_the_corpus_is_judged_as_labelled():
  wrong = [(number, line["why"], line["answer"][:60], line["gold"][:60])
    for number, line in enumerate(LINES, 1) if not is_right(line)]  # fmt: skip
  assert wrong == []


def test_golds_of_the_corpus_can_be_used():
  trivial = {r"\log 10"}  # is 1
  for gold in {line["gold"] for line in LINES} - trivial:
    assert math.check_reference(gold, jail=Near())


def test_verdicts_do_not_depend_on_the_hash_seed():
  code = (
    "import sys; sys.path.insert(0, 'tests/verdicts/math'); "
    "import math_test as m; print([m.judged(x).reason for x in m.LINES[::20]])"
  )
  out = {
    subprocess.check_output(
      [sys.executable, "-c", code],
      cwd=CORPUS.parents[2],
      env={"PYTHONHASHSEED": seed, "PYTHONPATH": ".:tests"},
    )
    for seed in ("1", "2")
  }
  assert len(out) == 1


noise = strategies.sampled_from(
  ["{}", " {} ", "${}$", r"\({}\)", r"\left({}\right)", "{}.", r"x={}",
   r"\,{}\;", r"{}\text{{ cm}}", "+{}", r"\displaystyle {}", r"\boxed{{{}}}"]
)  # fmt: skip


@hypothesis.given(strategies.integers(0, 10**12), noise)
def test_noise_changes_nothing(n, form):
  line = {"kind": "answer", "answer": form.format(n), "gold": str(n)}
  assert judged(line).status == "pass"
  line["gold"] = str(n + 1)
  assert judged(line).status == "fail"


@pytest.fixture
def forget():
  math._known.clear()


def verify(answer, gold, jail=None):
  return math.verify(f"\\boxed{{{answer}}}", gold, jail=jail)


@pytest.mark.parametrize("answer, gold, verdict", [
  ("0.5", "1/2", Verdict("pass", 1.0, "", "0.5")),
  ("4", "5", Verdict("fail", 0.0, "wrong answer", "4")),
  (" ", "5", Verdict("fail", 0.0, "empty answer", "")),
  ("5;", "5", Verdict("fail", 0.0, "refused: code-like text", "5;")),
  ("5 6", "5", Verdict("fail", 0.0, "unreadable: two numbers side by side",
    "5 6")),
  ("5,,6", "5", Verdict("fail", 0.0, "unreadable: an empty part", "5,,6")),
  (r"2400!\cdot2400!", "5", Verdict("fail", 0.0, "refused: too large",
    r"2400!\cdot2400!")),
])  # fmt: skip
def test_verdicts_by_hand_need_no_jail(answer, gold, verdict):
  assert verify(answer, gold) == verdict


def test_no_box_is_no_answer_and_a_long_one_is_cut():
  assert math.verify("5", "5") == Verdict("fail", 0.0, "no answer", "")
  verdict = verify("1" * 10**6, "5")
  assert verdict.answer == "1" * 400
  assert verdict.reason == "refused: 1000000 characters, at most 400"


def test_the_jail_is_asked_once_for_a_pair(forget):
  jail = Near()
  for _ in range(3):
    assert verify(r"\sqrt{8}", r"2\sqrt2", jail).status == "pass"
    assert verify(r"\sqrt{9.5}", r"2\sqrt2", jail).status == "fail"
  assert len(jail.asked) == 2


def test_a_failed_jail_is_invalid_and_not_remembered(forget):
  verdict = verify(r"\sqrt{12}", r"2\sqrt3", Late())
  assert verdict.status == "invalid"
  assert verdict.reason == "verifier failed: late: 3.0 s"
  assert verify(r"\sqrt{12}", r"2\sqrt3", Near()).status == "pass"


def test_what_is_remembered_is_bounded(monkeypatch, forget):
  monkeypatch.setattr(math, "_KNOWN_PAIRS", 3)
  jail = Near()
  for n in range(2, 9):
    verify(rf"\sqrt{{{n}}}+\pi", r"\pi", jail)
  assert len(math._known) == 3


def test_a_number_with_commas_is_also_a_list():
  assert verify("1,234", "1234").status == "pass"
  assert verify(r"\$1,234", "1234").status == "pass"
  assert verify("1,234", "1, 234").status == "pass"
  assert verify("1,234", "234, 1").status == "pass"
  assert verify("1,234", "1235").status == "fail"


def test_a_gold_that_the_gate_refuses_is_named():
  with pytest.raises(ValueError, match="gold = '9\\^9\\^9': "):
    verify("5", "9^9^9")


@pytest.mark.parametrize("gold, clean", [
  (r" \boxed{12} ", "12"), (r"\frac{1}{2}", r"\frac{1}{2}"), ("0", "0"),
  ("1", "1"), ("x=1", "x=1"), (r"x^2-1", r"x^2-1"), (r"\pm 2", r"\pm 2"),
  (r"\{-1,1\}", r"\{-1,1\}"),
  (r"(-\infty,0)\cup(0,\infty)", r"(-\infty,0)\cup(0,\infty)"),
  (r"\text{Friday}", r"\text{Friday}"), ("C", "C"),
  (r"5\text{ cm}", r"5\text{ cm}"),
  (r"x<1 \text{ or } x>2", r"x<1 \text{ or } x>2"), (r"\infty", r"\infty"),
  (r"\max(a,b)", r"\max(a,b)"), ("2516_8", "2516_8"), ("4210_{5}", "4210_{5}"),
  ("1_2", "1_2"), (r"\mathbb{R}\setminus\{2\}", r"\mathbb{R}\setminus\{2\}"),
  (r"x\ne 0", r"x\ne 0"), (r"x\equiv 3\pmod 7", r"x\equiv 3\pmod 7"),
  (r"0.6=\frac35", r"0.6=\frac35"), ("2/2=1", "2/2=1"), ("x+y=7", "x+y=7"),
  (r"\text{none}", r"\text{none}"), ("3:45", "3:45"),
])  # fmt: skip
def test_golds_that_can_be_used(gold, clean):
  assert math.check_reference(gold, jail=Near()) == clean


@pytest.mark.parametrize("gold, why", [
  ("", "gold is empty"), (r"\boxed{}", "gold is empty"),
  (4, "gold is a int; use a text"), ("4 or 5", "it offers a choice"),
  (r"4\text{ or }5", "it offers a choice"),
  (r"\text{The answer is four, of course}", "it is a sentence"),
  ("The answer is 4.", "unreadable: two numbers"),
  (r"4\text{ is the answer}", "it is a sentence"),
  ("9^{9^9}", "power in an exponent"), ("1,,2", "unreadable: an empty part"),
  (r"\frac{1}{0}", "division by zero"),
  ("1 2", "unreadable: two numbers side by side"),
  (r"\foo{x}{", "unbalanced"), ("x=", "unreadable"),
  (r"\foo{x}", r"unreadable: unknown \foo"), ("nan", "marks a missing value"),
  ("NaN", "marks a missing value"), (r"\text{null}", "marks a missing value"),
  ("5=6", "its parts are not equal"), ("x=3=4", "its parts are not equal"),
  ("2518_8", "unreadable: 2518 is no number of base 8"),
  (r"\cos^2x+\sin^2x", "1 equals it"),
  (r"\sqrt2\sqrt3-\sqrt6", "0 equals it"), ("4\u200b", "U+200B"),
])  # fmt: skip
def test_golds_that_cannot_be_used(gold, why):
  with refuses(ValueError, why):
    math.check_reference(gold, jail=Near())


def test_a_jail_that_fails_is_no_fault_of_the_gold():
  assert math.check_reference(r"\max(a,c)", jail=Late()) == r"\max(a,c)"


def test_a_solution_of_gsm8k_is_told_what_to_keep():
  gold = "She sold 48/2 = <<48/2=24>>24 clips.\n48+24 = 72\n#### 1,072 "
  with refuses(ValueError, f"gold = {gold[:80]!r} ... '####' ... '1,072'"):
    math.check_reference(gold, jail=Near())


def test_a_list_of_one_answer_is_that_answer():
  read = math.DOMAIN.fields["answer"].read
  assert read(["$69$,$84$"]) == "$69$,$84$"
  with refuses(ValueError, "a list"):
    read(["8", "9"])
