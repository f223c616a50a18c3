"""One puzzle per task, solved by hand."""

import random

import pytest
from solved_by_hand import EXAMPLES, entry_of

from launch.embedded.steps import write


@pytest.mark.parametrize("task", EXAMPLES)
def test_careful_steps_by_hand(task):
  entry, answer, lines = entry_of(task), *EXAMPLES[task][2:]
  careful = write(entry, "careful", random.Random(0))
  assert careful == f"{lines}\n<answer>{answer}</answer>"
  direct = write(entry, "direct", random.Random(0))
  assert direct == f"<answer>{answer}</answer>"


def test_letters_above_nine_are_lower_case():
  metadata = {
    "source_dataset": "base_conversion", "source_base": 16, "target_base": 11,
    "source_repr": "ff", "decimal_value": 255,
  }  # fmt: skip
  assert write({"metadata": metadata}, "careful", random.Random(0)) == (
    "0*16+15=15\n15*16+15=255\n255=23*11+2\n23=2*11+1\n2=0*11+2\n"
    "<answer>212</answer>"
  )
  metadata |= {"source_base": 10, "source_repr": "21", "decimal_value": 21}
  assert write({"metadata": metadata}, "careful", random.Random(0)) == (
    "21=1*11+10\n1=0*11+1\n<answer>1a</answer>"
  )


@pytest.mark.parametrize(
  "equation, steps",
  [
    ("4*x = 12", "4*3=12\n12-12=0"),
    ("x + 9 = 12", "12-9=3\n1*3=3\n3-3=0"),
    ("-x - 2 = -5", "-2+5=3\n1*3=3\n3-3=0"),
    ("-5*x = -15", "0+15=15\n5*3=15\n15-15=0"),
    ("20*x - 65 = -5", "-5+65=60\n20*3=60\n60-60=0"),
  ],
)
def test_the_variable_is_isolated_whatever_the_signs(equation, steps):
  metadata = {"source_dataset": "simple_equations", "variable": "x"}
  entry = {"metadata": metadata | {"equation": equation}, "answer": "3"}
  careful = write(entry, "careful", random.Random(0))
  assert careful == f"{steps}\n<answer>3</answer>"


@pytest.mark.parametrize(
  "numbers, target, steps, answer",
  [
    ([2, 3, 4], 20, "3+2=5\n5*4=20", "(3+2)*4"),
    ([7, 2, 3, 4], 5, "7-2=5\n4-3=1\n5*1=5", "(7-2)*(4-3)"),
    ([3, 9, 2], 6, "9+3=12\n12/2=6", "(9+3)/2"),
    ([50, 3, 2], 10, "3+2=5\n50/5=10", "50/(3+2)"),
    ([8, 3, 5], 6, "8+3=11\n11-5=6", "8+3-5"),
    ([9, 4, 30], 17, "9+4=13\n30-13=17", "30-(9+4)"),
  ],
)
def test_an_expression_makes_the_target(numbers, target, steps, answer):
  metadata = {"numbers": numbers, "target": target}
  entry = {"metadata": metadata | {"source_dataset": "countdown"}}
  careful = write(entry, "careful", random.Random(0))
  assert careful == f"{steps}\n<answer>{answer}</answer>"
