import hypothesis
import pytest
import tiers
from hypothesis import strategies

from brorl_jax.verdicts.math import gate


@pytest.mark.parametrize("text, reason", [
  ("1" * 401, "401 characters, at most 400"),
  ("1\x00", "control or format character U+0000"),
  ("1\u200b", "control or format character U+200B"),
  ("\u202e1", "control or format character U+202E"),
  ("1\u0301", "combining or separating character U+0301"),
  ("1\u2028", "combining or separating character U+2028"),
  ("x.__class__", "code-like text"), (r"\text{a.__b__}", "code-like text"),
  ("eval(1)", "code-like text"), (r"\sum_{k} k", "unbounded operator"),
  (r"\boxed{1}", "box in the answer"), ("$1$ $2$", "several formulas"),
  ("b" * 33, "name of more than 32 letters"),
  ("(" * 13 + ")" * 13, "brackets deeper than 12"),
  ("(1", "unbalanced brackets"), ("1)", "unbalanced brackets"),
  (r"\{1", "unbalanced brackets"), (r"\{1}", "unbalanced brackets"),
  ("1," * 32 + "1", "more than 32 items"),
  ("1&" * 64 + "1", "more than 64 cells"), ("|" * 9, "too many bars"),
  ("1" * 41, "number of more than 40 digits"), ("1e1000", "exponent too large"),
  (r"\sin" * 9, "more than 8 functions"), ("x^1" * 7, "more than 6 powers"),
  ("2^2^2", "power of a power"), ("2^{3}!", "power of a power"),
  ("2**2**2", "power of a power"), ("2^{2^2}", "power in an exponent"),
  (r"2^\frac{1}{2^3}", "power in an exponent"),
  ("2^{(3!)}", "power in an exponent"), ("2^{2501}", "exponent too large"),
  ("(x+1)^{41}", "exponent too large"), ("3!!", "factorial too large"),
  ("(10^2)!", "factorial too large"), ("2501!", "factorial too large"),
  ("1! 1! 1! 1!", "factorial too large"), ("abcd!", "factorial of a word"),
  (r"\binom{99999}{2}", "binomial too large"),
  (r"\binom{2501}{2}", "binomial too large"),
  (r"\sqrt[1000]{2}", "root too large"),
])  # fmt: skip
def test_what_is_refused_and_why(text, reason):
  assert gate.screen(text) == ("", reason)


@pytest.mark.parametrize("text", [
  "1" * 40, "(" * 12 + ")" * 12, "1," * 31 + "1", "2^{2500}", "(x+1)^{40}",
  "2500!", "(n-1)!", r"\binom{2500}{1250}", r"\{x \mid x > 1\}", r"[0, 1)",
  "f'(x)", r"\text{open}", "|x|<|y|", r"1\;2", "7 p.m.",
])  # fmt: skip
def test_what_is_just_small_enough_passes(text):
  assert gate.screen(text) == (text, "")


def test_foreign_digits_dashes_and_spaces_become_ascii():
  assert gate.screen("\u2212\uff11\uff12\u00a0\u0663\n") == ("-12 3", "")


@hypothesis.given(
  strategies.text(max_size=60)
  | strategies.text(r"\{}[]()^_!|&,.$'19e+-*/ abxfrcsqt", max_size=60)
)
@hypothesis.settings(max_examples=100)
def test_any_text_has_a_verdict_that_repeats(text):
  clean, reason = gate.screen(text)
  assert bool(reason) <= (clean == "") and "\n" not in reason
  if not reason:
    assert gate.screen(clean) == (clean, "")


@pytest.mark.parametrize("response, answer", [
  (r"\boxed{1} then \boxed{2}", "2"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
  (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
  (r"\boxed{\\}", r"\\"),  # a line break, then the end of the box
  (r"\boxed{\boxed{6}}", "6"), (r"\boxed{ \boxed {6} }", "6"),
  (r"\boxed{a \boxed{6}}", r"a \boxed{6}"),
  (r"\boxed{\boxed{1}+\boxed{2}}", r"\boxed{1}+\boxed{2}"),
  (r"\boxed{3} and \boxed{4", "3"), (r"} \boxed{3} {", "3"),
  (r"{ \boxed{3}", "3"), (r"\boxed{3}}", "3"), (r"\boxed{}", ""),
  (r"<think>\boxed{1}</think>\boxed{2}", "2"),
  (r"\boxed{1}</think>\boxed{2}</think>\boxed{3}", "3"),
  ("\\boxed{\n3\t}", "3"),
  ("\\boxed{3\x1c}", "3\x1c"),  # for the gate to refuse
])  # fmt: skip
def test_the_last_complete_box_is_the_answer(response, answer):
  assert gate.boxed(response) == answer


@pytest.mark.parametrize("response", [
  "", "6", r"\boxed 6", r"\boxed", r"\fbox{6}", r"\\boxed{6}", r"\boxed{6",
  r"\boxed{6\}", r"\boxed{{6}", r"<think>\boxed{6}",
  r"<think>\boxed{6}</think>", r"<think></think>\boxed{6}<think>",
])  # fmt: skip
def test_no_complete_box_after_the_thinking_is_no_answer(response):
  assert gate.boxed(response) is None


braced = strategies.recursive(
  strategies.text("ab 1", max_size=4),
  lambda inner: strategies.lists(inner, max_size=3).map(
    lambda parts: "".join(f"{{{part}}}" for part in parts) + r"\{\}"
  ),
  max_leaves=8,
)


@hypothesis.given(braced, strategies.text(r"ab{}\ "))
def test_balanced_text_comes_out_as_it_went_in(inside, before):
  # The space ends an escape.
  assert gate.boxed(f"{before} \\boxed{{{inside}}}") == inside.strip()


def test_only_what_goes_around_everything_is_taken_off():
  assert gate.unboxed(r" \boxed{4} ") == "4"
  assert gate.unboxed(r"\boxed{4}, \boxed{5}") == r"\boxed{4}, \boxed{5}"
  assert gate.unboxed("4") == "4"


@pytest.mark.parametrize(
  "piece", tiers.some([r"\boxed{", "{", "}", r"\boxed{x}", "\\"], 1)
)
def test_time_grows_with_the_length_only(piece):
  # The square of this is more than a test may take.
  assert gate.boxed(piece * (300_000 // len(piece))) in (None, "x")
  assert gate.boxed(r"\boxed{" * 20_000 + "6" + "}" * 20_000)
