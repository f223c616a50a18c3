"""Every line of the corpus, and what must hold of any answer."""

import json
import pathlib
import subprocess
import sys

import hypothesis
from hypothesis import strategies

from brorl_jax.verdicts import math
from brorl_jax.verdicts.math.symbolic import symbolic

CORPUS = pathlib.Path(__file__).parents[2] / "hostile" / "math.jsonl"


class Near:
  def ask(self, judge, *args, timeout):
    return symbolic(*args)


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


def lines():
  return [json.loads(line) for line in CORPUS.read_text().splitlines()]


def test_every_line_of_the_corpus_is_judged_as_labelled():
  wrong = [
    (number, line["why"], line["answer"][:60], line["gold"][:60])
    for number, line in enumerate(lines(), 1)
    if not is_right(line)
  ]
  assert wrong == []


def test_golds_of_the_corpus_can_be_used():
  trivial = {r"\log 10"}  # is 1
  for gold in {line["gold"] for line in lines()} - trivial:
    assert math.check_reference(gold, jail=Near())


def test_verdicts_do_not_depend_on_the_hash_seed():
  code = (
    "import sys; sys.path.insert(0, 'tests/verdicts/math'); "
    "import math_test as m;"
    "print([m.judged(x).reason for x in m.lines()[::9]])"
  )
  out = {
    subprocess.check_output(
      [sys.executable, "-c", code],
      cwd=CORPUS.parents[2],
      env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
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


@hypothesis.given(strategies.text(max_size=60), strategies.sampled_from(
  ["6", r"\sqrt2", r"\{1,2\}", "(0,1]", "Friday", "x+1"]
))  # fmt: skip
def test_any_response_has_a_verdict(text, gold):
  for response in (text, f"\\boxed{{{text}}}"):
    assert math.verify(response, gold, jail=Near()).status in ("pass", "fail")
