import hypothesis
import pytest
import tiers
from hypothesis import strategies

from brorl_jax.verdicts.math import extract


@pytest.mark.parametrize(
  "response, answer",
  [
    (r"\boxed{1} then \boxed{2}", "2"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{\\}", r"\\"),  # a line break, then the end of the box
    (r"\boxed{\boxed{6}}", "6"),
    (r"\boxed{ \boxed {6} }", "6"),
    (r"\boxed{a \boxed{6}}", r"a \boxed{6}"),
    (r"\boxed{\boxed{1}+\boxed{2}}", r"\boxed{1}+\boxed{2}"),
    (r"\boxed{3} and \boxed{4", "3"),
    (r"} \boxed{3} {", "3"),
    (r"{ \boxed{3}", "3"),
    (r"\boxed{3}}", "3"),
    (r"\boxed{}", ""),
    (r"<think>\boxed{1}</think>\boxed{2}", "2"),
    (r"\boxed{1}</think>\boxed{2}</think>\boxed{3}", "3"),
    ("\\boxed{\n3\t}", "3"),
    ("\\boxed{3\x1c}", "3\x1c"),  # for the gate to refuse
  ],
)
def test_the_last_complete_box_is_the_answer(response, answer):
  assert extract.boxed(response) == answer


@pytest.mark.parametrize(
  "response",
  [
    "", "6", r"\boxed 6", r"\boxed", r"\fbox{6}", r"\\boxed{6}", r"\boxed{6",
    r"\boxed{6\}", r"\boxed{{6}", r"<think>\boxed{6}",
    r"<think>\boxed{6}</think>", r"<think></think>\boxed{6}<think>",
  ],
)  # fmt: skip
def test_no_complete_box_after_the_thinking_is_no_answer(response):
  assert extract.boxed(response) is None


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
  found = extract.boxed(f"{before} \\boxed{{{inside}}}")
  assert found == inside.strip()


def test_only_what_goes_around_everything_is_taken_off():
  assert extract.unboxed(r" \boxed{4} ") == "4"
  assert extract.unboxed(r"\boxed{4}, \boxed{5}") == r"\boxed{4}, \boxed{5}"
  assert extract.unboxed("4") == "4"


@pytest.mark.parametrize(
  "piece", tiers.some([r"\boxed{", "{", "}", r"\boxed{x}", "\\"], 1)
)
def test_time_grows_with_the_length_only(piece):
  # Quadratic in 2,000,000 characters would be more than a test may take.
  assert extract.boxed(piece * (2_000_000 // len(piece))) in (None, "x")
  assert extract.boxed(r"\boxed{" * 100_000 + "6" + "}" * 100_000)
