"""Tests of configs/public.py: rows of public sets as records."""

import json

import pytest
from published_sets import COMMA, LEAST, WORDS, eurus, nemotron

from brorl_jax.configs.public import SETS
from brorl_jax.verdicts import stem

BASE = {"domain": "math", "source": "deepscaler"}
STDIN = {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]}
CALLS = {"inputs": ['1\n"x"', "[2]\n{}"], "outputs": ["3", "[1, 2]"]}
ADD = {"inputs": [[1, "x"], [[2], {}]], "outputs": [3, [1, 2]]}
NONE_ = {"keywords": None}
WRAPPED = {"inputs": ["1", "2"], "outputs": ["[3]", "[[4]]"]}
FUNCTION = {"fn_name": "f"}
BOX = "What? \\boxed{Your answer}"


def asked(text, domain, source, **own):
  said = [{"role": "user", "content": text}]
  record = {"domain": domain, "source": source, "messages": said}
  return record | own


def code(tests, text="Do it.", source="eurus2-taco"):
  return asked(text, "code", source, tests=tests)


def writes(*instructions):
  own = {"instructions": [{"id": i, "kwargs": kw} for i, kw in instructions]}
  return asked("Write.", "instructions", "llama_nemotron_if", **own)


@pytest.mark.parametrize("name, row, want", [
  ("deepscaler", {"problem": "3+5?\r\n", "answer": 8, "solution": "Long."},
    BASE | {"prompt": "3+5?\n", "answer": "8"}),
  ("deepscaler", {"problem": " ", "answer": "1"}, "no problem"),
  ("deepscaler", {"problem": "3?", "answer": True}, "no answer"),
  ("eurus2", eurus("code", STDIN, "Double."), code(STDIN, "Double.")),
  ("eurus2", eurus("code", CALLS | FUNCTION, source="APPS/x"),
    code(ADD | FUNCTION, source="eurus2-apps-x")),
  ("eurus2", eurus("code", WRAPPED | FUNCTION),
    code({"inputs": [[1], [2]], "outputs": [3, [4]]} | FUNCTION)),
  ("eurus2", eurus("code", WRAPPED | FUNCTION | {"outputs": ["[3]", "[]"]}),
    code({"inputs": [[1], [2]], "outputs": [[3], []]} | FUNCTION)),
  ("eurus2", eurus("math", "42"), "mathematics, which is eurus2_math"),
  ("eurus2", eurus("chat", "42"), "ability is neither math nor code"),
  ("eurus2", eurus("code", "[" * 100_000), "the tests are not JSON"),
  ("eurus2", eurus("code", {"inputs": ["1"]}),
    "the tests have no lists of inputs and outputs"),
  ("eurus2", eurus("code", {"inputs": [1], "outputs": ["1"]}),
    "a test is not text"),
  ("eurus2", eurus("code", {"inputs": ["x"], "outputs": ["1"]} | FUNCTION),
    "an argument or result of a function is not JSON"),
  ("eurus2", {"ability": "code", "prompt": [{"role": "user"}]},
    "no reward_model"),
  ("eurus2_math", eurus("math", "42", BOX, "numina"),
    asked(BOX, "math", "eurus2-numina", answer="42")),
  ("eurus2_math", eurus("code", STDIN), "ability is not math"),
  ("llama_nemotron_if", nemotron("Write.", [COMMA, WORDS], [NONE_, LEAST]),
    writes((COMMA, {}), (WORDS, LEAST))),
  ("llama_nemotron_if", nemotron("Write.", [COMMA], []),
    "instructions and their arguments differ in number"),
  ("llama_nemotron_if", nemotron("Write.", None, None),
    "no instruction_id_list and instruction_kwargs"),
  ("llama_nemotron_if", nemotron("Write.", [COMMA], ["x"]),
    "the arguments of an instruction are no object"),
  ("llama_nemotron_if", {"input": "Write."}, "no args"),
  ("llama_nemotron_if", nemotron("x", [COMMA], [{}]) | {"input": "x"},
    "no input"),
])  # fmt: skip
def test_a_row_is_a_record_or_has_a_reason(name, row, want):
  before = json.dumps(row)
  if isinstance(want, str):
    with pytest.raises(ValueError) as e:
      SETS[name].record(row)
    assert str(e.value) == want
  else:
    assert SETS[name].record(row) == want
  assert json.dumps(row) == before


# What is kept of a solution: all of it but a stop at its end, a part, or none.
WHOLE = r"""
9.8 m/s^2|$3.00 \times 10^8$ m/s|6.93 h.|12.5 %|v = 5 m/s|-273.15 °C|pH = 7.4|42
H2SO4|CH_3COOH|Sodium chloride|The Krebs cycle.|x^2 + 2x + 1|F = ma|Glycolysis
Newton's third law|$1.6 \times 10^{-19}\ \text{C}$|approximately 340 m/s|B
x = 3, y = 4|E = \frac{1}{2} m v^2|\frac{q}{4\pi\epsilon_0 r^2}|nRT\ln(V_2/V_1)
"""
PART = r"""
So \boxed{1} or \boxed{\frac{2}{3}}.|\frac{2}{3}
We get \boxed{9.9\ \mathrm{m/s}}.|9.9\ \mathrm{m/s}
\boxed{\text{mitochondria}}|\text{mitochondria}
The decay constant gives t = 6.93 h.|6.93 h
The half-life is T = 0.693/k = 6.93 h.|6.93 h
The decay constant of the sample = 6.93 h.|6.93 h
We assume that m = 2 kg.|2 kg
So v = 0.5 m/s.|0.5 m/s
"""
NONE = r"""
Hence \boxed{\text{the field is zero inside}}|\boxed{}|An open \boxed{3, and
\boxed{\text{The answer is }5}|By the first law the answer is 3.|4 or 5
The decay constant is lambda = ln 2 / t and hence t = 6.93 h.|5 widgets
The decay constant is about 6.93 h.|Since g = 9.8 m/s^2, the range = 20 m
The speed is v = 5 m/s and the mass m = 2 kg|The speed doubles.|Yes|No, never.
It decreases because the pressure falls.|See the text.|Proof omitted
between 3 and 4 m|The gas does not reach T = 300 K|An increase in heat
Use Eq. 3 with m = 2 kg|0.5 mol of NaOH|It is hot. The rest = 2 kg|T = hot water
"""
each = lambda text: [x for x in text.replace("\n", "|").split("|") if x]
SOLUTIONS = [(x, x.rstrip(".")) for x in each(WHOLE)]
SOLUTIONS += [x.split("|") for x in PART.strip().split("\n")]
SOLUTIONS += [(x, None) for x in each(NONE)]


@pytest.mark.parametrize("solution, want", SOLUTIONS)
def test_the_gold_of_a_solution_is_a_value_and_never_a_sentence(solution, want):
  row = {"domain": "Applied Physics", "problem": "How?", "solution": solution}
  if want is None:
    with pytest.raises(ValueError, match=r"a sentence|the box holds no value"):
      SETS["scp116k"].record(row)
    return
  record = SETS["scp116k"].record(row)
  assert record["answer"] == want
  assert record["source"] == "scp116k-applied-physics"
  gold = stem.check_reference(want)
  assert stem.verify(f"\\boxed{{{want}}}", gold).status == "pass"


def test_which_solution_is_read():
  record = lambda **row: SETS["scp116k"].record({"problem": "How?", **row})
  found = record(extracted_solution=" ", matched_solution="1 h", solution="7 h")
  assert found["answer"] == "1 h"
  long = "no box in a long solution"
  for text, why in (" ", "no solution"), ("So\n3", long), ("3" * 101, long):
    with pytest.raises(ValueError, match=why):
      record(solution=text)
