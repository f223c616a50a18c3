import pytest

from brorl_jax.verdicts.math import domain
from brorl_jax.verdicts.math.symbolic import symbolic


class Near:
  """The judge in this process."""

  def ask(self, judge, *args, timeout):
    assert judge == "symbolic"
    return symbolic(*args)


@pytest.mark.parametrize(
  "gold, clean",
  [
    (r" \boxed{12} ", "12"), (r"\frac{1}{2}", r"\frac{1}{2}"), ("0", "0"),
    ("1", "1"), ("x=1", "x=1"), (r"x^2-1", r"x^2-1"), (r"\pm 2", r"\pm 2"),
    (r"\{-1,1\}", r"\{-1,1\}"),
    (r"(-\infty,0)\cup(0,\infty)", r"(-\infty,0)\cup(0,\infty)"),
    (r"\text{Friday}", r"\text{Friday}"), ("C", "C"),
    (r"5\text{ cm}", r"5\text{ cm}"),
    (r"x<1 \text{ or } x>2", r"x<1 \text{ or } x>2"), (r"\infty", r"\infty"),
    (r"\max(a,b)", r"\max(a,b)"), ("2516_8", "2516_8"),
    ("4210_{5}", "4210_{5}"), ("1_2", "1_2"),
    (r"\mathbb{R}\setminus\{2\}", r"\mathbb{R}\setminus\{2\}"),
    (r"x\ne 0", r"x\ne 0"), (r"x\equiv 3\pmod 7", r"x\equiv 3\pmod 7"),
    (r"0.6=\frac35", r"0.6=\frac35"), ("2/2=1", "2/2=1"), ("x+y=7", "x+y=7"),
    (r"\text{none}", r"\text{none}"), ("3:45", "3:45"),
  ],
)  # fmt: skip
def test_golds_that_can_be_used(gold, clean):
  assert domain.check_reference(gold, jail=Near()) == clean


@pytest.mark.parametrize(
  "gold, why",
  [
    ("", "gold is empty"),
    (r"\boxed{}", "gold is empty"),
    (4, "gold is a int; use a text"),
    ("4 or 5", "it offers a choice"),
    (r"4\text{ or }5", "it offers a choice"),
    (r"\text{The answer is four, of course}", "it is a sentence"),
    ("The answer is 4.", "unreadable: two numbers"),
    (r"4\text{ is the answer}", "unreadable: unexpected is"),
    ("9^{9^9}", "power in an exponent"),
    ("1,,2", "unreadable: an empty part"),
    (r"\frac{1}{0}", "division by zero"),
    ("1 2", "unreadable: two numbers side by side"),
    (r"\foo{x}{", "unbalanced"),
    ("x=", "unreadable"),
    (r"\foo{x}", r"unreadable: unknown \foo"),
    ("nan", "marks a missing value"),
    ("NaN", "marks a missing value"),
    (r"\text{null}", "marks a missing value"),
    ("5=6", "its parts are not equal"),
    ("x=3=4", "its parts are not equal"),
    ("2518_8", "unreadable: 2518 is no number of base 8"),
    (r"\cos^2x+\sin^2x", "1 equals it"),
    (r"\sqrt2\sqrt3-\sqrt6", "0 equals it"),
    ("4\u200b", "U+200B"),
  ],
)
def test_golds_that_cannot_be_used(gold, why):
  with pytest.raises(ValueError) as error:
    domain.check_reference(gold, jail=Near())
  assert why in str(error.value)
  assert "\n" not in str(error.value)


def test_a_jail_that_fails_is_no_fault_of_the_gold():
  class Broken:
    def ask(self, judge, *args, timeout):
      raise RuntimeError("late")

  assert domain.check_reference(r"\max(a,c)", jail=Broken()) == r"\max(a,c)"


def test_a_solution_of_gsm8k_is_told_what_to_keep():
  gold = "She sold 48/2 = <<48/2=24>>24 clips.\n48+24 = 72\n#### 1,072 "
  with pytest.raises(ValueError) as e:
    domain.check_reference(gold, jail=Near())
  assert f"gold = {gold[:80]!r}" in str(e.value)
  assert "'####'" in str(e.value) and "'1,072'" in str(e.value)
  assert "\n" not in str(e.value)
