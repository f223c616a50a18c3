# ruff: noqa: RUF001
import pytest
import tiers
from hypothesis import given
from hypothesis import strategies as st
from messages import mentions, refuses

from brorl_jax.verdicts import math
from brorl_jax.verdicts.base import Verdict
from brorl_jax.verdicts.math.symbolic import symbolic
from brorl_jax.verdicts.stem.questions import (
  MAX_ANSWER,
  MAX_GOLD,
  check_reference,
  find,
  verify,
)

CHOICES = [
  "the ribosome", "The mitochondria", "nucleus", "a black hole", "5 m/s",
]  # fmt: skip


@pytest.mark.parametrize(
  "response, answer",
  [
    (r"so \boxed{B}.", "B"), (r"\boxed{A} no, \boxed{B}", "B"),
    (r"\boxed{\text{B}}", r"\text{B}"),
    (r"\boxed{\frac{1}{2}} \boxed{3", r"\frac{1}{2}"),
    ("<answer>A</answer> <answer> B </answer>", "B"),
    ("<answer>A</answer><answer>B", "A"),
    (r"<answer>A</answer> \boxed{B} The answer is C.", "B"),
    ("Answer: A\n<answer>B</answer>\nAnswer: C", "B"),
    ("Answer: A\nAnswer: B", "B"), ("The answer is (B).", "(B)"),
    ("the final ANSWER is **B**", "B"), ("**Answer:** B", "B"),
    ("**Answer: B.**", "B"), ("Answer:\n\n  B\nas said", "B"),
    ("Answer: B. nucleus", "B. nucleus"), ("Answer: 3.0 m/s.", "3.0 m/s"),
    ("the answer is B because", "B because"), ("The correct option is B", "B"),
    ("The right choice: **(B)**.", "(B)"), ("Correct choice:\nB", "B"),
    ("The answer is A. No!\nThe correct option is B.", "B"),
    ("The correct option is B or C", "B or C"),
    ("An incorrect option is B", None), ("The option is B", None),
    ("The correct option isn't B", None), ("The correct optional B", None),
    ("not the right choice: B", None), ("The not correct option is B", None),
    ("This is **not** the correct answer: B", None),
    ("It isn\u2019t the right choice: B", None),
    ("A non-correct option is B", None), ("NOT A RIGHT CHOICE: B", None),
    ("Answer: A\nnot the right choice: B", "A"),
    ("I see why not. The answer is B", "B"), ("If not A, the answer is B", "B"),
    ("It is a knot; the answer is B", "B"),
    (r"<think>\boxed{A}</think> Answer: B", "B"), (r"\boxed{}", ""),
    ("<answer></answer>", ""), ("Answer:", ""), ("B", None), ("", None),
    ("The answer isn't B", None), ("answer island", None),
    ("It answers is", None), (r"<think>\boxed{B}", None),
    (r"\boxed{B}</think>", None), (r"x</think><think>\boxed{B}", None),
    ("<think>Answer: B", None), ("x</think><answer>B</answer><think>", None),
    ("</answer>B<answer>", None),
  ],
)  # fmt: skip
def test_where_the_answer_is(response, answer):
  assert find(response) == answer


@pytest.mark.parametrize(
  "answer",
  [
    "B", "b", "(B)", "(b)", "[B]", "B)", "B.", "B:", "**B**", r"\text{B}",
    r"\mathbf{(B)}", r"\textbf{B.}", "Option B", "choice (B)", "Ｂ",
    "B. mitochondria", "(B) The mitochondria.", "B) the mitochondria",
    "B: mitochondria", "B - mitochondria", "B mitochondria",
    r"\text{B. Mitochondria}", "mitochondria", "The Mitochondria.",
  ],
)  # fmt: skip
def test_the_right_choice(answer):
  verdict = verify(rf"\boxed{{{answer}}}", "B", choices=CHOICES)
  assert verdict == Verdict("pass", 1.0, "", answer)
  verdict = verify(rf"\boxed{{{answer}}}", "A", choices=CHOICES)
  assert verdict == Verdict("fail", 0.0, "wrong answer", answer)


@pytest.mark.parametrize(
  "answer, reason",
  [
    ("A or B", "several letters"), ("A, B", "several letters"),
    ("B and A", "several letters"), ("A/B", "several letters"),
    ("A B C D E", "several letters"), ("(A)(B)", "several letters"),
    ("B, not A", "several letters"), ("B. or maybe A.", "several letters"),
    ("ABCDE", "not a choice"), ("BB", "not a choice"),
    ("a or b", "not a choice"), ("not B", "not a choice"),
    ("B, because", "not a choice"), ("B?", "not a choice"),
    ("B. nucleus", "not a choice"), ("B. mitochondria nucleus", "not a choice"),
    ("mitochondria nucleus", "not a choice"),
    ("mitochondria or nucleus", "not a choice"),
    ("mitochondri", "not a choice"),
    ("В", "not a choice"),  # Cyrillic
    ("2", "not a choice"), ("True", "not a choice"), ("F", "no such choice: F"),
    ("z", "no such choice: Z"), ("the ribosome", "wrong answer"),
    ("A black hole", "wrong answer"),  # choice D, not the letter A
    ("D. a black hole", "wrong answer"), ("C", "wrong answer"),
    ("", "empty answer"),
    ("x" * (MAX_ANSWER + 1), "1001 ... at most 1000"),
  ],
)  # fmt: skip
def test_no_right_choice(answer, reason):
  verdict = verify(rf"\boxed{{{answer}}}", "B", choices=CHOICES)
  assert (verdict.status, verdict.score) == ("fail", 0.0)
  assert mentions(verdict.reason, reason)
  assert verdict.answer == answer[:MAX_ANSWER]


@given(
  st.sampled_from("ABCDE"),
  st.sets(st.sampled_from("ABCDE"), min_size=2),
  st.sampled_from([" or ", ", ", " and ", " ", "/", "; ", ""]),
)
def test_no_spray_of_letters_passes(right, letters, between):
  spray = between.join(sorted(letters))
  for form in (
    rf"\boxed{{{spray}}}",
    f"Answer: {spray}",
    rf"\boxed{{({spray})}}",
  ):
    assert verify(form, right, choices=CHOICES).status == "fail"
    assert verify(form, right).status == "fail"


@given(st.text(max_size=60), st.sampled_from("ABCDE"))
def test_one_text_is_right_for_one_choice_at_most(text, _right):
  statuses = [
    verify(f"<answer>{text}</answer>", letter, choices=CHOICES).status
    for letter in "ABCDE"
  ]
  assert statuses.count("pass") <= 1
  assert "invalid" not in statuses


def test_a_letter_without_choices_is_a_symbol():
  for answer in ("C", "(C)", r"\text{C}", "C.", "option C"):
    assert verify(rf"\boxed{{{answer}}}", "C").status == "pass"
  for answer, reason in [
    ("c", "wrong answer"),
    ("B", "wrong answer"),
    ("C. carbon", "not a letter"),
    ("carbon", "not a letter"),
    ("A, C", "several letters"),
  ]:
    assert verify(rf"\boxed{{{answer}}}", "C").reason == reason


@pytest.fixture
def asked(monkeypatch):
  """What mathematics is asked; it says that nothing is right."""
  seen = []

  def answer(response, gold, *, jail=None):
    seen.append((response, gold, jail))
    return Verdict("fail", 0.0, "not equal", "?")

  monkeypatch.setattr(math, "verify", answer)
  return seen


@pytest.mark.parametrize(
  "gold, right, wrong",
  [
    ("mitochondria", ["Mitochondria.", "the mitochondria"], ["nucleus",
      "not mitochondria", "mitochondria or nucleus"]),
    ("CO_2", ["CO2", "CO₂", r"\ce{CO2}"], ["Co2", "CO", "co2",
      "carbon dioxide"]),
    ("3.0e8 m/s", [r"3.00\times10^{8}\,\text{m/s}", "3.0e8"], ["3.0e8 km/s",
      "3.1e8 m/s", "3", "fast"]),
    ("4 MeV", ["4 MeV", "4.0 MeV"], ["4 meV", "4 Mev"]),
    ("42", ["42", "42.0", r"\text{42}"], ["42.3", "-42", "41", "42 apples"]),
    ("5 million", ["5 million", "5 Million"], ["5", "5 billion", "5000000"]),
    ("7.4", ["pH 7.4", r"\text{pH} = 7.4"], ["pH 7.5", "pH 74"]),
    ("pH 7.4", ["7.4", "pH of 7.4", "pH is 7.40"], ["7.5", "8.4"]),
    ("7.4 M", ["7.4"], ["pH 7.4"]),
    ("pH 7.4", ["pH = 7.4"], ["7.4 M", "pOH=7.4", "pK_a=7.4"]),
    ("2 HCl", ["2HCl", "2 HCl"], ["2 HCL", "2", "HCl"]),
    ("sp^3", ["sp3", "sp³"], ["sp2", "sp"]),
    ("β-decay", [r"\beta-decay", "beta decay"], ["alpha decay", "decay"]),
    ("increases", ["Increases"], ["decreases", "increases then decreases"]),
  ],
)  # fmt: skip
def test_short_answers(asked, gold, right, wrong):
  for text in right:
    assert verify(rf"\boxed{{{text}}}", gold).status == "pass", text
  for text in wrong:
    verdict = verify(rf"\boxed{{{text}}}", gold)
    assert (verdict.status, verdict.reason) == ("fail", "wrong answer"), text
  assert asked == []


def test_expressions_are_for_mathematics(asked):
  jail = object()
  verdict = verify(r"\boxed{mv^2/2}", r"\frac{1}{2}mv^2", jail=jail)
  assert asked == [(r"\boxed{mv^2/2}", r"\frac{1}{2}mv^2", jail)]
  assert verdict == Verdict("fail", 0.0, "not equal", "mv^2/2")
  assert verify(r"\boxed{\sqrt{2}}", "1.41421").reason == "not equal"
  assert verify(r"\boxed{2\pi r}", r"2\pi r").status == "pass"  # by spelling
  assert len(asked) == 2
  # Numbers with units, formulae of chemistry and words are not.
  for answer, gold in [("\\pi m", "3.1416 m"), ("2HO", "H2O"), ("x+y", "left")]:
    assert verify(rf"\boxed{{{answer}}}", gold).reason == "wrong answer"
  assert len(asked) == 2


def test_the_verdict_of_mathematics_stands(monkeypatch):
  for status in ("pass", "invalid"):
    said = Verdict(status, float(status == "pass"), "because", "mv")
    monkeypatch.setattr(math, "verify", lambda *_, jail, said=said: said)
    assert verify(r"\boxed{mv}", "p=mv").status == status


class Near:
  """The judge of the jail in this process."""

  def ask(self, judge, *args, timeout):
    return symbolic(*args)


def test_mathematics_itself():
  say = lambda text, gold: (
    verify(rf"\boxed{{{text}}}", gold, jail=Near()).status
  )
  assert say(r"0.5 \cdot \pi", r"\frac{\pi}{2}") == "pass"
  assert say(r"2\pi", r"\frac{\pi}{2}") == "fail"
  for gold in ("7.4", "pH 7.4"):
    assert say("pOH 7.4", gold) == "fail"


@pytest.mark.parametrize(
  "answer, choices, gold",
  [
    ("B", CHOICES, "B"), ("b", CHOICES, "B"), ("(B)", CHOICES, "B"),
    (r"\boxed{B}", CHOICES, "B"), ("B. mitochondria", CHOICES, "B"),
    ("the mitochondria", CHOICES, "B"), ("a black hole", CHOICES, "D"),
    (" nucleus ", None, "nucleus"),
    (r"\boxed{3.0\ \text{m}}", None, r"3.0\ \text{m}"), ("C", None, "C"),
    ("x" * MAX_GOLD, None, "x" * MAX_GOLD),
    ("ordinary matter", None, "ordinary matter"), ("A", ["A", "B", "G"], "A"),
  ],
)  # fmt: skip
def test_golds_are_read(answer, choices, gold):
  assert check_reference(answer, choices) == gold
  assert verify(rf"\boxed{{{answer}}}", gold, choices=choices).status == "pass"


@pytest.mark.parametrize(
  "answer, choices, message",
  [
    (None, None, "answer ... NoneType"), (3, CHOICES, "answer ... text"),
    ("", None, "answer ... empty"), (r"\boxed{ }", None, "answer ... empty"),
    ("  ", CHOICES, "answer ... empty"), ("F", CHOICES, "answer ... 'F'"),
    ("A or B", CHOICES, "answer ... 'A or B' ... letters"),
    ("B. nucleus", CHOICES, "answer ... 'B. nucleus'"),
    ("x" * (MAX_GOLD + 1), None, "answer ... 81 ... 80"),
    ("4 or 5", None, "answer ... '4 or 5' ... 'or'"),
    ("probably iron", None, "answer ... 'probably iron' ... 'probably'"),
    ("...", None, "answer ... '...'"),
    ("A", ["x"], "choices ... 1 ... 2 to 26"),
    ("A", ["x"] * 27, "choices ... 27 ... 2 to 26"),
    ("A", "xy", "choices ... list"), ("A", 3, "choices ... list"),
    ("A", ["x", " "], "choice B ... ' '"), ("A", ["x", 3], "choice B ... 3"),
    ("A", ["the cell", "nucleus", "Cell."], "choices A and C ... 'Cell.'"),
    ("A", ["b", "x"], "choice A ... 'b'"),
  ],
)  # fmt: skip
def test_unusable_golds_are_refused_in_one_line(answer, choices, message):
  with refuses(ValueError, message):
    check_reference(answer, choices)


@pytest.mark.parametrize("answer", ["F", "b", "", "AB", "mitochondria"])
def test_an_answer_that_is_no_letter_is_refused(answer):
  with refuses(ValueError, "answer ... 5 choices ... ABCDE"):
    verify("Answer: B", answer, choices=CHOICES)


def test_a_response_must_be_text():
  with refuses(ValueError, "response ... bytes"):
    verify(b"B", "B")  # pyright: ignore


@pytest.mark.timeout(60)  # the square of this is hours
@pytest.mark.parametrize(
  "unit",
  tiers.some([
    r"\boxed{", r"\boxed", "{", "}", r"\boxed{A}", "<answer>", "</answer>",
    "<answer></answer>", "answer ", "answer:", "answer:\n", "answer* ", "*",
    "Answer is (", "</think>", "\n", " ", "\\", "(", "A ", "A", "$", "_{", "^{",
    r"\text{", "1", "1,", "°", "α-", "\u0300",
  ], 1, 10),
)  # fmt: skip
def test_many_characters_are_read_once(unit):
  text = unit * (300_000 // len(unit))
  for response in (
    text,
    rf"\boxed{{{text}}}",
    f"<answer>{text}</answer>",
    f"Answer: {text}",
  ):
    assert verify(response, "B", choices=CHOICES).status == "fail"


@pytest.mark.parametrize(
  "unit",
  [r"\text{", "{", "(", "^{", "_", "1,", "m", "m/", " ", "-", "A", "α", "'",
   "1e", "$", "\\", "A ", "²", "Ǆ", "ﷺ"],
)  # fmt: skip
def test_an_answer_of_any_length_is_read(asked, unit):
  for n in (1, 7, 999):
    text = (unit * n)[:MAX_ANSWER]
    for gold in ("5 m", "words", "x^2"):
      assert verify(f"<answer>{text}</answer>", gold).status == "fail"
