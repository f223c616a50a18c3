# ruff: noqa: RUF001
import json
import pathlib
from fractions import Fraction

import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import mentions, refuses

from brorl_jax.verdicts import math, stem
from brorl_jax.verdicts.base import Verdict
from brorl_jax.verdicts.math.symbolic import symbolic

few = settings(max_examples=30)
HERE = pathlib.Path(__file__).parent
CASES = (HERE / "stem_cases.jsonl").read_text().splitlines()


def cases(kind):
  """The labelled cases of a kind, as parametrize takes them."""
  every = [[*json.loads(line).values()] for line in CASES]
  assert any(case[0] == kind for case in every)  # or they would be skipped
  return [case[1:] for case in every if case[0] == kind]


class Near:
  def ask(self, judge, *args, timeout):
    return symbolic(*args)


CHOICES = [
  "the ribosome", "The mitochondria", "nucleus", "a black hole", "5 m/s",
]  # fmt: skip


@pytest.mark.parametrize("response, answer", cases("find"))
def test_where_the_answer_is(response, answer):
  assert stem.find(response) == answer


@pytest.mark.parametrize("answer", [
  "B", "b", "(B)", "(b)", "[B]", "B)", "B.", "B:", "**B**", r"\text{B}",
  r"\mathbf{(B)}", r"\textbf{B.}", "Option B", "choice (B)", "Ｂ",
  "B. mitochondria", "(B) The mitochondria.", "B) the mitochondria",
  "B: mitochondria", "B - mitochondria", "B mitochondria",
  r"\text{B. Mitochondria}", "mitochondria", "The Mitochondria.",
])  # fmt: skip
def test_the_right_choice(answer):
  verdict = stem.verify(rf"\boxed{{{answer}}}", "B", choices=CHOICES)
  assert verdict == Verdict("pass", 1.0, "", answer)
  verdict = stem.verify(rf"\boxed{{{answer}}}", "A", choices=CHOICES)
  assert verdict == Verdict("fail", 0.0, "wrong answer", answer)


@pytest.mark.parametrize("answer, reason", [
  ("A or B", "several letters"), ("A, B", "several letters"),
  ("B and A", "several letters"), ("A/B", "several letters"),
  ("A B C D E", "several letters"), ("(A)(B)", "several letters"),
  ("B, not A", "several letters"), ("B. or maybe A.", "several letters"),
  ("ABCDE", "not a choice"), ("BB", "not a choice"), ("a or b", "not a choice"),
  ("not B", "not a choice"), ("B, because", "not a choice"),
  ("B?", "not a choice"), ("B. nucleus", "not a choice"),
  ("B. mitochondria nucleus", "not a choice"),
  ("mitochondria nucleus", "not a choice"),
  ("mitochondria or nucleus", "not a choice"), ("mitochondri", "not a choice"),
  ("В", "not a choice"),  # Cyrillic
  ("2", "not a choice"), ("True", "not a choice"), ("F", "no such choice: F"),
  ("z", "no such choice: Z"), ("the ribosome", "wrong answer"),
  ("A black hole", "wrong answer"),  # choice D, not the letter A
  ("D. a black hole", "wrong answer"), ("C", "wrong answer"),
  ("", "empty answer"), ("x" * (stem.MAX_ANSWER + 1), "1001 ... at most 1000"),
])  # fmt: skip
def test_no_right_choice(answer, reason):
  verdict = stem.verify(rf"\boxed{{{answer}}}", "B", choices=CHOICES)
  assert (verdict.status, verdict.score) == ("fail", 0.0)
  assert mentions(verdict.reason, reason)
  assert verdict.answer == answer[: stem.MAX_ANSWER]


@few
@given(st.sampled_from("ABCDE"), st.sets(st.sampled_from("ABCDE"), min_size=2),
  st.sampled_from([" or ", ", ", " and ", " ", "/", "; ", ""]))  # fmt: skip
def test_no_spray_of_letters_passes(right, letters, between):
  spray = between.join(sorted(letters))
  for form in (
    rf"\boxed{{{spray}}}", f"Answer: {spray}", rf"\boxed{{({spray})}}"
  ):  # fmt: skip
    assert stem.verify(form, right, choices=CHOICES).status == "fail"
    assert stem.verify(form, right).status == "fail"


@few
@given(st.text(max_size=60), st.sampled_from("ABCDE"))
def test_one_text_is_right_for_one_choice_at_most(text, _right):
  said = f"<answer>{text}</answer>"
  statuses = [stem.verify(said, x, choices=CHOICES).status for x in "ABCDE"]
  assert statuses.count("pass") <= 1 and "invalid" not in statuses


@pytest.mark.parametrize("answer, reason", [
  ("C", ""), ("(C)", ""), (r"\text{C}", ""), ("C.", ""), ("option C", ""),
  ("c", "wrong answer"), ("B", "wrong answer"), ("C. carbon", "not a letter"),
  ("carbon", "not a letter"), ("A, C", "several letters"),
])  # fmt: skip
def test_a_letter_without_choices_is_a_symbol(answer, reason):
  assert stem.verify(rf"\boxed{{{answer}}}", "C").reason == reason


@pytest.fixture
def asked(monkeypatch):
  """What mathematics is asked; it says that nothing is right."""
  seen = []

  def answer(response, gold, *, jail=None):
    seen.append((response, gold, jail))
    return Verdict("invalid", 0.0, "not equal", "?")

  monkeypatch.setattr(math, "verify", answer)
  return seen


@pytest.mark.parametrize("gold, right, wrong", [
  ("mitochondria", ["Mitochondria."], ["nucleus", "not mitochondria"]),
  ("CO_2", ["CO₂", r"\ce{CO2}"], ["Co2", "CO", "co2", "carbon dioxide"]),
  ("3.0e8 m/s", [r"3.00\times10^{8}\,\text{m/s}", "3.0e8"], ["3.0e8 km/s",
    "3.1e8 m/s", "3", "fast"]),
  ("4 MeV", ["4.0 MeV"], ["4 meV", "4 Mev"]),
  ("42", ["42.0", r"\text{42}"], ["42.3", "-42", "42 apples"]),
  ("5 million", ["5 Million"], ["5", "5 billion", "5000000"]),
  ("7.4", ["pH 7.4", r"\text{pH} = 7.4"], ["pH 7.5", "pH 74"]),
  ("pH 7.4", ["7.4", "pH is 7.40"], ["7.5", "7.4 M", "pOH=7.4", "pK_a=7.4"]),
  ("2 HCl", ["2HCl"], ["2 HCL", "2", "HCl"]), ("sp^3", ["sp3"], ["sp2"]),
  ("3.1416 m", ["3.1416"], [r"\pi m"]), ("H2O", [r"H_2O"], ["2HO"]),
  ("left", ["Left"], ["x+y"]), (r"2\pi r", [r"2\pi r"], []),  # by spelling
])  # fmt: skip
def test_short_answers(asked, gold, right, wrong):
  of = lambda text: stem.verify(rf"\boxed{{{text}}}", gold)
  assert [text for text in right if of(text).status != "pass"] == []
  assert [text for text in wrong if of(text).reason != "wrong answer"] == []
  assert asked == []


def test_expressions_are_for_mathematics(asked):
  jail = object()
  verdict = stem.verify(r"\boxed{mv^2/2}", r"\frac{1}{2}mv^2", jail=jail)
  assert asked == [(r"\boxed{mv^2/2}", r"\frac{1}{2}mv^2", jail)]
  assert verdict == Verdict("invalid", 0.0, "not equal", "mv^2/2")
  assert stem.verify(r"\boxed{\sqrt{2}}", "1.41421").reason == "not equal"


@pytest.mark.parametrize("text, gold, status", [
  (r"0.5 \cdot \pi", r"\frac{\pi}{2}", "pass"), ("pOH 7.4", "7.4", "fail"),
  (r"2\pi", r"\frac{\pi}{2}", "fail"), ("pOH 7.4", "pH 7.4", "fail"),
])  # fmt: skip
def test_mathematics_itself(text, gold, status):
  assert stem.verify(rf"\boxed{{{text}}}", gold, jail=Near()).status == status


def test_every_line_of_the_corpus_is_judged_as_labelled():
  corpus = HERE.parent / "hostile" / "stem.jsonl"
  for line in map(json.loads, corpus.read_text().splitlines()):
    gold = stem.check_reference(line["gold"], choices := line["choices"])
    verdict = stem.verify(line["response"], gold, choices=choices, jail=Near())
    assert verdict.status == ("pass" if line["expected"] else "fail"), line


@pytest.mark.parametrize("answer, choices, gold", [
  ("B", CHOICES, "B"), ("b", CHOICES, "B"), ("(B)", CHOICES, "B"),
  (r"\boxed{B}", CHOICES, "B"), ("B. mitochondria", CHOICES, "B"),
  ("the mitochondria", CHOICES, "B"), ("a black hole", CHOICES, "D"),
  (" nucleus ", None, "nucleus"),
  (r"\boxed{3.0\ \text{m}}", None, r"3.0\ \text{m}"), ("C", None, "C"),
  ("x" * stem.MAX_GOLD, None, "x" * stem.MAX_GOLD),
  ("ordinary matter", None, "ordinary matter"), ("A", ["A", "B", "G"], "A"),
])  # fmt: skip
def test_golds_are_read(answer, choices, gold):
  assert stem.check_reference(answer, choices) == gold
  verdict = stem.verify(rf"\boxed{{{answer}}}", gold, choices=choices)
  assert verdict.status == "pass"


@pytest.mark.parametrize("answer, choices, message", [
  (None, None, "answer ... NoneType"), (3, CHOICES, "answer ... text"),
  ("", None, "answer ... empty"), (r"\boxed{ }", None, "answer ... empty"),
  ("  ", CHOICES, "answer ... empty"), ("F", CHOICES, "answer ... 'F'"),
  ("A or B", CHOICES, "answer ... 'A or B' ... letters"),
  ("B. nucleus", CHOICES, "answer ... 'B. nucleus'"),
  ("x" * (stem.MAX_GOLD + 1), None, "answer ... 81 ... 80"),
  ("4 or 5", None, "answer ... '4 or 5' ... 'or'"),
  ("probably iron", None, "answer ... 'probably iron' ... 'probably'"),
  ("...", None, "answer ... '...'"), ("A", ["x"], "choices ... 1 ... 2 to 26"),
  ("A", ["x"] * 27, "choices ... 27 ... 2 to 26"),
  ("A", "xy", "choices ... list"), ("A", 3, "choices ... list"),
  ("A", ["x", " "], "choice B ... ' '"), ("A", ["x", 3], "choice B ... 3"),
  ("A", ["the cell", "nucleus", "Cell."], "choices A and C ... 'Cell.'"),
  ("A", ["b", "x"], "choice A ... 'b'"),
])  # fmt: skip
def test_unusable_golds_are_refused_in_one_line(answer, choices, message):
  with refuses(ValueError, message):
    stem.check_reference(answer, choices)


@pytest.mark.parametrize("answer", ["F", "b", "", "AB", "mitochondria"])
def test_an_answer_that_is_no_letter_is_refused(answer):
  with refuses(ValueError, "answer ... 5 choices ... ABCDE"):
    stem.verify("Answer: B", answer, choices=CHOICES)
  with refuses(ValueError, "response ... bytes"):
    stem.verify(b"B", "B")  # pyright: ignore


@pytest.mark.timeout(60)  # the square of this is hours
@pytest.mark.parametrize("unit", tiers.some([
  r"\boxed{", r"\boxed", "{", "}", r"\boxed{A}", "<answer>", "</answer>",
  "<answer></answer>", "answer ", "answer:", "answer:\n", "answer* ", "*",
  "Answer is (", "</think>", "\n", " ", "\\", "(", "A ", "A", "$", "_{", "^{",
  r"\text{", "1", "1,", "°", "α-", "\u0300",
], 1, 10))  # fmt: skip
def test_many_characters_are_read_once(unit):
  text = unit * (300_000 // len(unit))
  for response in (
    text, rf"\boxed{{{text}}}", f"<answer>{text}</answer>", f"Answer: {text}"
  ):  # fmt: skip
    assert stem.verify(response, "B", choices=CHOICES).status == "fail"


# Words, formulae and symbols by spelling.


@pytest.mark.parametrize("text, typed", [
  ("", ""), (r"\text{B}", "B"), (r"\textbf{\mathrm{B}}", "B"),
  (r"$\beta$-decay", "β-decay"), (r"\Delta G^\circ", "Δ G°"),
  (r"10^{-3}", "10^-3"), ("10⁻³", "10^-3"), ("H₂O", "H2O"),
  (r"\ce{SO_4^{2-}}", "SO4^2-"), ("SO₄²⁻", "SO4^2-"),
  (r"3\,\text{m}", "3 m"), (r"\frac{1}{2}", r"\frac{1}{2}"),
  (r"\text{50\%}", "50%"), ("ｆｕｌｌ　ｗｉｄｔｈ", "full width"),
  ("a\u200bb\u2060", "ab"), ("½", "1/2"), ("−5 – 3", "-5 - 3"),
  ("µ Å Ω", "μ Å Ω"), ("**bold**", "bold"), (r"\alpha\beta", "αβ"),
  (r"\alphabet", r"\alphabet"), ("В", "В"),  # Cyrillic, and stays so
])  # fmt: skip
def test_plain_by_hand(text, typed):
  assert stem.plain(text) == typed


@pytest.mark.parametrize("a, b", [
  ("The mitochondria.", "mitochondria"), ("A black hole", "black hole"),
  ("MITOCHONDRIA", "Mitochondria"), (r"$\beta$-carotene", "beta carotene"),
  ("α-helix", r"$\alpha$ helix"), (r"\Delta H", "delta H"),
  ("Newton's second law", "newtons second law"),
  ("(mitochondria)", '"mitochondria"'), ("well-known", "well known"),
  ("COVID-19", "covid 19"), (r"H_2O", "H₂O"), (r"\ce{Ca^{2+}}", "Ca²⁺"),
  ("Ca2+", "Ca^{2+}"), ("sp3", "sp³"),
  ("meiosis, then mitosis", "meiosis then mitosis"), (r"F = ma", "F=ma"),
  ("1, 2, 3", "1,2,3"), ("No", "no"), ("Iron", "iron"),
])  # fmt: skip
def test_what_says_the_same(a, b):
  assert stem.same_words(a, b) and stem.same_words(b, a)


@pytest.mark.parametrize("a, b", [
  ("CO", "Co"), ("CO2", "Co2"), ("H2O", "h2o"), ("NO", "no"),
  ("O^{2-}", "O_2^-"), ("Fe^{2+}", "Fe^{3+}"), ("Na^+", "Na^-"), ("g", "G"),
  ("p", "P"), ("PV = nRT", "PV = nrt"), ("mx = 2", "MX = 2"), ("x-1", "x1"),
  ("x-1", "x 1"), ("x - \\sin y", "x \\sin y"), ("sinh-cos", "sinh cos"),
  ("k (T_1 + T_2)", "k T_1 + T_2"), ("n!", "n"), ("f'", "f"), ("5'", "5"),
  ("12", "1 2"), ("1.5", "15"), ("x^2", "x2"),
  ("(+)-limonene", "(-)-limonene"), ("2-butanol", "1-butanol"),
  ("(R)-2-butanol", "2-butanol"), ("electron", "electrons"), ("a", ""),
  ("increases", "decreases"), ("mitochondria or nucleus", "mitochondria"),
  ("not mitochondria", "mitochondria"), (">5", "<5"),
])  # fmt: skip
def test_what_does_not_say_the_same(a, b):
  assert not stem.same_words(a, b) and not stem.same_words(b, a)


@pytest.mark.parametrize("text, inside", [
  (r"\text{(B)}.", "B"), ("[{x}]", "x"), ("(a)(b)", "(a)(b)"), ('"', '"')
])  # fmt: skip
def test_what_goes_around_all_is_taken_off(text, inside):
  assert stem.unwrapped(text) == inside


@pytest.mark.parametrize("word, formula", [
  ("CO", True), ("H2O", True), ("Fe2", True), ("OH^-", True),
  ("Ca(OH)2", True), ("NaCl", True), ("sp3", True), ("sp^2", True),
  ("sp4", False), ("Co", False), ("I", False), ("YES", False), ("DNA", False),
  ("co2", False), ("42", False), ("Xy2", False), ("", False),
])  # fmt: skip
def test_formulae_by_hand(word, formula):
  assert stem.is_formula(word) is formula


@few
@given(st.text(st.characters(exclude_characters="\\"), max_size=40))
def test_any_text_is_like_itself_and_like_its_plain_form(text):
  assert stem.same_words(text, text)
  assert stem.key(f"  {text} ") == stem.key(text)
  assert stem.key(text.replace("$", "")) == stem.key(text)


WORDS = st.lists(
  st.sampled_from("cell wall Golgi β CO2 NaCl well 3.5 2 ATP".split()),
  min_size=1, max_size=5,
)  # fmt: skip


@few
@given(WORDS)
def test_formatting_does_not_matter(words):
  text = " ".join(words)
  for other in (f"The {text}.", rf"\text{{{text}}}", f"**{text}**",
    f"({text})", text.replace("β", r"\beta").replace("CO2", "CO_2"),
    text.replace("cell", "CELL").replace("CO2", "CO₂")):  # fmt: skip
    assert stem.same_words(other, text), other


# Numbers with units.


@pytest.mark.parametrize("text, value, step, unit", cases("quantity"))
def test_quantities_by_hand(text, value, step, unit):
  quantity = stem.read_quantity(text)
  assert quantity is not None
  assert (quantity.value, quantity.step) == (Fraction(value), Fraction(step))
  assert (quantity.unit, quantity.known) == (unit, "million" not in unit)


@pytest.mark.parametrize("text", [
  "", "m", "five", "5 5", "5 or 6", "5, 6", "1,2345", "5!", "5±0.1", "1/0",
  "2(3)", "x^2", "5-6", "1:2", "2-butanol", "9" * 61, "1e99999",
  f"1e{stem.MAX_EXPONENT + 1}", f"10^{stem.MAX_EXPONENT + 1}", "..", "-",
  "5 m/s or 6 m/s", "e5", "pH", "H 7", "pOH 7", "PH 7", "pH is", "pH or 7",
])  # fmt: skip
def test_what_is_no_quantity(text):
  assert stem.read_quantity(text) is None and not stem.same_quantity(text, "5")
  assert not stem.same_quantity("5", text)


@pytest.mark.parametrize("gold, right, wrong", cases("measurement"))
def test_the_same_measurement(gold, right, wrong):
  # A rounded gold allows 1 % at most: 0.5 is not 0.506.
  assert [text for text in right if not stem.same_quantity(text, gold)] == []
  assert [text for text in wrong if stem.same_quantity(text, gold)] == []


NUMBERS = st.decimals(
  min_value=-(10**6), max_value=10**6, places=3, allow_nan=False
).filter(bool)
UNITS = st.sampled_from(["", " m", " kg m^2", " J/mol", "%", " °C"])


@few
@given(NUMBERS, UNITS)
def test_a_quantity_is_itself_however_it_is_written(number, unit):
  gold = f"{number}{unit}"
  power = f"{number.scaleb(2)}" + r" \times 10^{-2}" + unit
  for text in (gold, f"${number}$ {unit}", f"v = {gold}", power):
    assert stem.same_quantity(text, gold), text


@few
@given(NUMBERS, UNITS)
def test_what_is_off_is_seen(number, unit):
  gold = f"{number}{unit}"
  for factor in ("-1", "1.02", "0.98", "10", "0.1"):
    wrong = Fraction(number) * Fraction(factor)
    text = f"{wrong.numerator}/{wrong.denominator}"
    assert not stem.same_quantity(text, gold), text
