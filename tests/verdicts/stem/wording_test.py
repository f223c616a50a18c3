# ruff: noqa: RUF001
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brorl_jax.verdicts.stem.wording import (
  is_formula,
  key,
  plain,
  same,
  unwrapped,
)


@pytest.mark.parametrize(
  "text, typed",
  [
    ("", ""), (r"\text{B}", "B"), (r"\textbf{\mathrm{B}}", "B"),
    (r"$\beta$-decay", "β-decay"), (r"\Delta G^\circ", "Δ G°"),
    (r"10^{-3}", "10^-3"), ("10⁻³", "10^-3"), ("H₂O", "H2O"),
    (r"\ce{SO_4^{2-}}", "SO4^2-"), ("SO₄²⁻", "SO4^2-"),
    (r"3\,\text{m}", "3 m"), (r"\frac{1}{2}", r"\frac{1}{2}"),
    (r"\text{50\%}", "50%"), ("ｆｕｌｌ　ｗｉｄｔｈ", "full width"),
    ("a\u200bb\u2060", "ab"), ("½", "1/2"), ("−5 – 3", "-5 - 3"),
    ("µ Å Ω", "μ Å Ω"), ("**bold**", "bold"), (r"\alpha\beta", "αβ"),
    (r"\alphabet", r"\alphabet"), ("В", "В"),  # Cyrillic, and stays so
  ],
)  # fmt: skip
def test_plain_by_hand(text, typed):
  assert plain(text) == typed


@pytest.mark.parametrize(
  "a, b",
  [
    ("The mitochondria.", "mitochondria"), ("A black hole", "black hole"),
    ("MITOCHONDRIA", "Mitochondria"), (r"$\beta$-carotene", "beta carotene"),
    ("α-helix", r"$\alpha$ helix"),
    (r"\Delta H", "delta H"), ("Newton's second law", "newtons second law"),
    ("(mitochondria)", '"mitochondria"'), ("well-known", "well known"),
    ("COVID-19", "covid 19"),
    (r"H_2O", "H₂O"), (r"\ce{Ca^{2+}}", "Ca²⁺"), ("Ca2+", "Ca^{2+}"),
    ("sp3", "sp³"),
    ("meiosis, then mitosis", "meiosis then mitosis"), (r"F = ma", "F=ma"),
    ("1, 2, 3", "1,2,3"), ("No", "no"), ("Iron", "iron"),
  ],
)  # fmt: skip
def test_what_says_the_same(a, b):
  assert same(a, b) and same(b, a)


@pytest.mark.parametrize(
  "a, b",
  [
    ("CO", "Co"), ("CO2", "Co2"), ("H2O", "h2o"), ("NO", "no"),
    ("O^{2-}", "O_2^-"), ("Fe^{2+}", "Fe^{3+}"), ("Na^+", "Na^-"), ("g", "G"),
    ("p", "P"), ("PV = nRT", "pv = nrt"), ("mx = 2", "MX = 2"), ("x-1", "x1"),
    ("x-1", "x 1"), ("x - \\sin y", "x \\sin y"), ("sinh-cos", "sinh cos"),
    ("k (T_1 + T_2)", "k T_1 + T_2"), ("n!", "n"), ("f'", "f"), ("5'", "5"),
    ("12", "1 2"), ("1.5", "15"), ("x^2", "x2"),
    ("(+)-limonene", "(-)-limonene"), ("2-butanol", "1-butanol"),
    ("(R)-2-butanol", "2-butanol"), ("electron", "electrons"), ("a", ""),
    ("increases", "decreases"), ("mitochondria or nucleus", "mitochondria"),
    ("not mitochondria", "mitochondria"), (">5", "<5"),
  ],
)  # fmt: skip
def test_what_does_not_say_the_same(a, b):
  assert not same(a, b) and not same(b, a)


@pytest.mark.parametrize(
  "word, formula",
  [
    ("CO", True), ("H2O", True), ("Fe2", True), ("OH^-", True),
    ("Ca(OH)2", True), ("NaCl", True), ("sp3", True), ("sp^2", True),
    ("sp4", False), ("Co", False), ("I", False), ("YES", False), ("DNA", False),
    ("co2", False), ("42", False), ("Xy2", False), ("", False),
  ],
)  # fmt: skip
def test_formulae_by_hand(word, formula):
  assert is_formula(word) is formula


def test_what_goes_around_all_is_taken_off():
  assert unwrapped(r"\text{(B)}.") == "B"
  assert unwrapped("[{x}]") == "x"
  assert unwrapped("(a)(b)") == "(a)(b)"
  assert unwrapped('"') == '"'


@given(st.text(st.characters(exclude_characters="\\"), max_size=40))
def test_any_text_is_like_itself_and_like_its_plain_form(text):
  assert same(text, text)
  assert key(f"  {text} ") == key(text)
  assert key(text.replace("$", "")) == key(text)


WORDS = st.lists(
  st.sampled_from("cell wall Golgi β CO2 NaCl well 3.5 2 ATP".split()),
  min_size=1,
  max_size=5,
)


@given(WORDS)
def test_formatting_does_not_matter(words):
  text = " ".join(words)
  for other in (
    f"The {text}.",
    rf"\text{{{text}}}",
    f"**{text}**",
    f"({text})",
    text.replace("β", r"\beta").replace("CO2", "CO_2"),
    text.replace("cell", "CELL").replace("CO2", "CO₂"),
  ):
    assert same(other, text), other


@given(WORDS, WORDS)
def test_other_words_are_other_answers(a, b):
  assert same(" ".join(a), " ".join(b)) == (a == b)


@settings(max_examples=40)
@given(st.sampled_from(list(r"\{}$^_()'-. αaA1~")), st.integers(1, 500))
def test_long_answers_are_read(sign, n):
  assert isinstance(key(sign * n + "x" + sign * n), tuple)
