"""Science questions: multiple choice and short answers.

Short answers are compared by their spelling, or as measurements.
"""

# ruff: noqa: RUF001 (look-alikes are what this is about)
import contextlib
import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from brorl_jax.verdicts import base, math, strict_json
from brorl_jax.verdicts.base import Domain, Field, Verdict, judged
from brorl_jax.verdicts.math import expressions
from brorl_jax.verdicts.math.gate import boxed, screen, unboxed
from brorl_jax.verdicts.math.structure import Leaf, parse
from brorl_jax.verdicts.strict_json import Refused, kind

MAX_ANSWER = 1_000  # characters; the longest choice of GPQA-diamond has 400
MAX_GOLD = 80  # of a short answer; sentences cannot be compared by spelling
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

_SPOKEN = re.compile(
  r"\b(?:answer|(?:correct|right) (?:option|choice))[*_\s]*+(?:is\b|:)"
  r"[*_:\s]*+([^\n]*)",
  re.IGNORECASE,
)
# Searched in the few characters before what _SPOKEN found.
_DENIED = re.compile(
  r"(?:\b(?:can)?not|\bnever|\bnon|n['\u2019]t)[*_\s-]+"
  r"(?:(?:the|an?|my|our|your|be|final|best|only|correct|right)[*_\s]+){0,3}$",
  re.IGNORECASE,
)
_MAX_DENIAL = 40
_LETTER = re.compile(r"(?:(?:option|choice)\s+)?[(\[]?([A-Za-z])[)\].:]*", re.I)
_LETTER_TEXT = re.compile(r"[(\[]?([A-Za-z])(?:[)\].:]+|\s+-|(?=\s))\s*(.+)")
_HEDGES = re.compile(
  r"\b(?:or|either|maybe|perhaps|possibly|probably|depends|varies|e\.g|etc)\b",
  re.IGNORECASE,
)
_EXPRESSION = re.compile(r"\\[a-zA-Z]+|[=^*/+<>(\d]")
_NO_CHOICE = ("not a choice", "not a letter", "several letters")
_LONG_WORD = re.compile(r"[^\W\d_]{4}")


def verify(
  response: str,
  answer: str,
  *,
  choices: Sequence[str] | None = None,
  jail: Any = None,
) -> Verdict:
  r"""Scores a response by the reference answer.

    verify(r"... so \boxed{B}", "B", choices=["ribosome", "nucleus"])
    verify("The answer is 3.0e8 m/s.", r"3.00 \times 10^8 m/s")

  The answer (see `find`) must be the answer and nothing else, apart from
  punctuation and formatting: "B or C", "B, because..." and "A B C D" fail. If
  it is a letter and the box holds none, the line with the answer counts.

  With choices, it must give the right letter, "B", "b", "(B)", "B)", "option B"
  or "\text{B}"; or the right letter and that choice's text, "B. nucleus"; or
  the text alone. Texts are compared by `key`.

  Without, what is equal:
    words and formulae by spelling, as `key` says
    a number with a unit, as `same_quantity` says: rounding is allowed for a
      measurement, another unit is not
    a letter, in its case, as with choices
    an expression by `math.verify`, if the right answer is one

  `answer` is what `check_reference` returns, and `jail` is for `math.verify`.
  ValueError if the response is no text, or the answer no letter of a choice.
  """
  base.require_text(response)
  given = find(response)
  if not given:
    return judged("no answer" if given is None else "empty answer", "")
  if fail := base.overlong(given, MAX_ANSWER):
    return fail
  if choices is not None:
    letters = LETTERS[: len(choices)]
    if len(answer) != 1 or answer not in letters:
      must = f"with {len(choices)} choices use one of {letters}"
      raise ValueError(f"answer = {answer!r}; {must}")
  elif len(answer) != 1 or answer not in LETTERS:
    return _short(given, answer, jail)
  fault = _choice_fault(given, answer, choices)
  if fault in _NO_CHOICE and (line := _line_beside(given, response)):
    given, fault = line, _choice_fault(line, answer, choices)
  return judged(fault, given)


def find(response: str) -> str | None:
  r"""The text of the answer, or None if there is none.

  It is the first of these that exists after the thinking: the last
  complete \boxed{...}; the last <answer>...</answer>; the rest of the line, or
  the next line that is not blank, after the last "answer:", "answer is",
  "correct option is", "right choice:" and the like, in any case, but not after
  a "not", as in "not the right choice:".
  """
  tail = base.after_thinking(response)
  for answer in (boxed(tail), base.tagged(tail)):
    if answer is not None:
      return answer
  return _spoken(tail)


def _spoken(tail: str) -> str | None:
  line = None
  for spoken in _SPOKEN.finditer(tail):
    before = tail[max(0, spoken.start() - _MAX_DENIAL) : spoken.start()]
    if not _DENIED.search(before):
      line = spoken[1].strip("*_ ").removesuffix(".").strip("*_ ")
  return line


def _line_beside(box: str, response: str) -> str | None:
  """The answer line after a box that holds no choice, or around a formula."""
  tail = base.after_thinking(response)
  after = _spoken(tail.rpartition(r"\boxed")[2])
  line = after or (_spoken(tail) if _is_expression(box) else None)
  return line if line and len(line) <= MAX_ANSWER else None


def check_reference(answer: str, choices: Sequence[str] | None = None) -> str:
  """The right answer as `verify` takes it: without a box, or a choice's letter.

  Raises ValueError if it cannot be compared: it is empty, names no choice,
  hedges ("4 or 5") or is a sentence, or the choices are wrong.
  """
  base.require_text(answer, "answer")
  bare = unboxed(answer)
  if not bare.strip():
    raise ValueError("answer is empty; write the reference answer")
  if choices is not None:
    _check_choices(choices)
    letter, fault = _read_choice(bare, choices)
    if letter is None:
      letters = f"one of A to {LETTERS[len(choices) - 1]}"
      fault += f"; use {letters} or the text of a choice"
      raise ValueError(f"answer = {answer[:MAX_GOLD]!r}: {fault}")
    return letter
  if len(bare) > MAX_GOLD:
    has = f"answer has {len(bare)} characters, more than {MAX_GOLD}"
    why = "a sentence cannot be compared by spelling"
    raise ValueError(f"{has}: {why}; drop the line")
  hedge = _HEDGES.search(plain(bare))
  if hedge or not key(bare):
    fault = f"is ambiguous ({hedge[0]!r})" if hedge else "has no content"
    raise ValueError(f"answer = {bare!r} {fault}; drop the line")
  return bare


def _short(given: str, answer: str, jail: Any) -> Verdict:
  if same_quantity(given, answer):
    return judged("", given)
  right = read_quantity(answer)
  asked, wanted = given, answer
  if right is not None and right.known:
    # Not by spelling, which ignores case: MeV is not meV.
    if right.unit or read_quantity(given) is not None:
      return judged("wrong answer", given)
    asked, wanted = _nearness(given, right) or (given, answer)
  elif same_words(given, answer) or same_words(_LEFT.sub("", given), answer):
    return judged("", given)
  elif not _is_expression(answer):
    return judged("wrong answer", given)
  verdict = math.verify(f"\\boxed{{{asked}}}", wanted, jail=jail)
  return Verdict(verdict.status, verdict.score, verdict.reason, given)


def _choice_fault(text: str, answer: str, choices: Sequence[str] | None) -> str:
  if choices is not None:
    letter, fault = _read_choice(text, choices)
    return fault or ("" if letter == answer else "wrong answer")
  alone = _LETTER.fullmatch(unwrapped(text))
  if alone:
    return "" if alone[1] == answer else "wrong answer"
  return "several letters" if _sprays(text) else "not a letter"


def _read_choice(given: str, choices: Sequence[str]) -> tuple[str | None, str]:
  bare = unwrapped(given)
  texts = dict(zip(LETTERS, map(key, choices), strict=False))
  if alone := _LETTER.fullmatch(bare):
    letter = alone[1].upper()
    if letter not in texts:
      return None, f"no such choice: {letter}"
    return letter, ""
  wanted = key(given)
  for letter, text in texts.items():
    if text == wanted:
      return letter, ""
  both = _LETTER_TEXT.fullmatch(bare)
  if both and texts.get(both[1].upper()) == key(both[2]):
    return both[1].upper(), ""
  return None, "several letters" if _sprays(bare) else "not a choice"


def _sprays(text: str) -> bool:
  """Whether single capitals of more than one kind stand in a text."""
  return len(set(re.findall(r"(?<![^\W_])[A-Z](?![^\W_])", text))) > 1


def _check_choices(choices: Sequence[str]) -> None:
  if isinstance(choices, str) or not isinstance(choices, Sequence):
    given = type(choices).__name__
    raise ValueError(f"choices is a {given}; use a list of texts")
  if not 2 <= (n := len(choices)) <= len(LETTERS):
    raise ValueError(f"choices has {n} texts; use 2 to {len(LETTERS)}")
  seen: dict[tuple[str, ...], str] = {}
  for letter, choice in zip(LETTERS, choices, strict=False):
    if not isinstance(choice, str) or not choice.strip():
      raise ValueError(f"choice {letter} = {choice!r}; write its text")
    same = seen.setdefault(key(choice), letter)
    if same != letter:
      both = f"choices {same} and {letter} are both {choice!r}"
      raise ValueError(f"{both}; drop the question")
    alone = _LETTER.fullmatch(unwrapped(choice))
    others = LETTERS[: len(choices)].replace(letter, "")
    if alone and alone[1].upper() in others:
      why = "is the letter of another choice; drop the question"
      raise ValueError(f"choice {letter} = {choice!r} {why}")


def _is_expression(answer: str) -> bool:
  """Whether it may be a math formula, not chemistry or words."""
  text = plain(answer)
  if not _EXPRESSION.search(text) or any(map(is_formula, text.split())):
    return False
  return not _LONG_WORD.search(re.sub(r"\\[A-Za-z]+", " ", text))


# Words, formulae and symbols by spelling.

_greek = lambda c: unicodedata.name(c).split()[-1].lower().replace("md", "mbd")
_GREEK = {_greek(c): c for c in "αβγδεζηθικλμνξοπρστυφχψω"}
_GREEK |= {name.capitalize(): c.upper() for name, c in _GREEK.items()}
_GREEK_NAME = {c: name for name, c in _GREEK.items()}
_TYPED = {
  **dict(zip("ϵϑϕϱς", "εθφρσ", strict=True)),
  **dict.fromkeys("‐‑‒–—−", "-"),
  **dict.fromkeys("’‘′", "'"),
}
_DASHES = str.maketrans("−⁄", "-/")
_COMMANDS = {
  **_GREEK,
  **{f"var{name}": _GREEK[name] for name in ("epsilon", "theta", "phi", "rho")},
  **{"times": "×", "cdot": "·", "pm": "±", "degree": "°", "circ": "°"},
  **{"leq": "≤", "le": "≤", "geq": "≥", "ge": "≥", "neq": "≠", "ne": "≠"},
  **{"approx": "≈", "sim": "~", "infty": "∞", "rightarrow": "→", "to": "→"},
  **{"AA": "Å", "angstrom": "Å", "ohm": "Ω", "hbar": "ħ", "ell": "l"},
  **{"textmu": "μ", "upmu": "μ", "celsius": "°C"},
  **{"left": "", "right": "", "displaystyle": "", "quad": " ", "qquad": " "},
}
_WRAPPER = re.compile(
  r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it|sf|cal)|boldsymbol|operatorname"
  r"|mbox|ce|rm|bf|boxed)\s*\{([^{}]*)\}"
)
_MAX_NESTED = 8
_AROUND = ('""', "''", "“”", "``", "()", "[]", "{}")
_HYBRID = re.compile(r"sp\^?[23](?:d\^?\d?)?")
# Between words; not a minus before a function.
_FUNCTIONS = "sin|cos|tan|sec|csc|cot|log|ln|exp|sqrt|arc|lim|max|min|det"
_HYPHEN = re.compile(
  rf"(?<=[^\W\d_]{{3}})-(?!{_FUNCTIONS})(?=\w\w)"
  rf"|(?<=[α-ωΑ-Ω])-(?!{_FUNCTIONS})(?=[^\W\d_]{{3}})"
)
ELEMENTS = frozenset(expressions.table("elements.txt").split())


def plain(text: str) -> str:
  """The text without LaTeX and typography, as it could be typed.

  Raised characters follow a "^", lowered ones nothing: "10⁻³" and "10^{-3}" are
  "10^-3", "H₂O" and "H_2O" are "H2O". Unknown commands stay.
  """
  text = re.sub(r"\\[,;!:> ]|~|&nbsp;", " ", text)
  text = re.sub(r"\$|\*\*|\\[()\[\]]", "", text).replace(r"\%", "%")
  command = r"\\([A-Za-z]+)(?![A-Za-z])(?!\s*\{)"
  text = re.sub(command, lambda m: _COMMANDS.get(m[1], m[0]), text)
  text = "".join(_typed(text))
  for _ in range(_MAX_NESTED):
    before = text
    text = re.sub(r"\^\{([^{}]*)\}", r"^\1", text)
    text = re.sub(r"_\{([^{}]*)\}", r"\1", text)
    text = _WRAPPER.sub(r"\1", text)
    if text == before:
      break
  return " ".join(text.replace("_", "").replace("^°", "°").split())


def _typed(text: str) -> Iterator[str]:
  raised = False
  for c in text:
    was_raised = raised
    raised = unicodedata.decomposition(c).startswith("<super>")
    if raised and not was_raised:
      yield "^"
    if unicodedata.category(c) != "Cf":
      yield unicodedata.normalize("NFKC", _TYPED.get(c, c)).translate(_DASHES)


def unwrapped(text: str) -> str:
  """`plain` without quotes or brackets around it all and stops at its end."""
  text = plain(text).strip().rstrip(".,;: ")
  for _ in range(_MAX_NESTED):
    inside, around = text[1:-1], text[:1] + text[-1:]
    if len(text) < 2 or around not in _AROUND:
      break
    if around[0] in "([{" and not _balanced(inside):
      break
    text = inside.strip().rstrip(".,;: ")
  return text


def _balanced(text: str) -> bool:
  steps = ((c in "([{") - (c in ")]}") for c in text)
  depths = [0, *itertools.accumulate(steps)]
  return min(depths) == depths[-1] == 0


def key(text: str) -> tuple[str, ...]:
  r"""A key that is equal for equivalent texts, in linear time.

    key(r"The $\beta$-carotene.") == key("beta carotene")
    key(r"SO_4^{2-}") == key("SO₄²⁻")
    key("CO") != key("Co")

  By spelling alone: no synonyms, no plurals, no rounding. Beyond `plain`: no
  article at the start, no punctuation at the end, no quotes or brackets around
  it all; no ".", ",", ";" and ":" but in a number; no hyphen inside words;
  Greek letters by name. Case does not count, except in a chemical formula, in a
  single letter and in a short word of an equation: CO is not Co, g is not G,
  and PV = nRT is not pv = nrt.
  """
  text = unwrapped(text)
  text = re.sub(r"^(?:the\s+|an?\s+(?=\w\w))", "", text, flags=re.IGNORECASE)
  text = re.sub(r"(?<=[^\W\d_])'(?=[^\W\d_]{1,2}(?!\w))", "", text)
  text = _HYPHEN.sub(" ", text)
  text = "".join(f" {_GREEK_NAME[c]} " if c in _GREEK_NAME else c for c in text)
  folded = 4 if re.search(r"[=^*/+<>]", text) else 2  # letters of such a word
  lower = lambda m: m[0].lower() if len(m[0]) >= folded else m[0]
  fold = lambda x: x if is_formula(x) else re.sub(r"[^\W\d_]+", lower, x)
  text = re.sub(r"[^\s,;:=<>/*\\]+", lambda m: fold(m[0]), text)
  return tuple(re.findall(r"\d+(?:\.\d+)?|\.\d+|[^\W\d_]+|[^\s\w.,;:]", text))


def same_words(a: str, b: str) -> bool:
  """Whether two texts have the same key."""
  first, second = key(a), key(b)
  if first == second:
    return True
  # A charge and a hybrid orbital may do without its "^": Fe3+, sp3.
  if ("^" in first) == ("^" in second) or not is_formula(unwrapped(a)):
    return False
  return [t for t in first if t != "^"] == [t for t in second if t != "^"]


def is_formula(word: str) -> bool:
  """Whether a word is several elements, or one with a number, or an orbital."""
  # CO, Fe2, OH^- and sp3 are; Co, DNA and co2 are not.
  if _HYBRID.fullmatch(word):
    return True
  if not re.fullmatch(r"(?:[A-Z][a-z]?|[0-9()\[\]^+-])+", word):
    return False
  symbols = re.findall(r"[A-Z][a-z]?", word)
  several = len(symbols) > 1 or (symbols and re.search(r"\d|\^", word))
  return bool(several) and ELEMENTS.issuperset(symbols)


# Numbers with units, as measurements.

MAX_EXPONENT = 500  # larger powers of ten are not measurements
_MAX_DIGITS = 60
# SciBench's scorer allows 5 %, TheoremQA's 4 %, and so do many after them. A
# policy learns whatever its reward allows, so this is the least that forgives
# another value of g or R, and a digit less: 1.6 for 1.61, but not 9.7 for 9.81.
_TOLERANCE = Fraction(1, 100)

_LONG = "tera giga mega kilo hecto deci centi milli micro nano pico femto atto"
_PREFIXES = {"": "", **dict(zip(_LONG.split(), "TGMkhdcmμnpfa", strict=True))}
# A symbol and its names, the plural's s apart. The first part takes any prefix.
_PREFIXED, _OTHER = expressions.table("measures.txt").split(";")


def _spellings() -> dict[str, str]:
  symbols = {}
  for names, prefixes in ((_OTHER, {"": ""}), (_PREFIXED, _PREFIXES)):
    for long, short in prefixes.items():
      for symbol, *others in map(str.split, names.split(",")):
        symbols.setdefault(short + symbol, short + symbol)
        if short == "μ":
          symbols.setdefault(f"u{symbol}", short + symbol)
        for name in others:
          symbols[long + name] = symbols[f"{long}{name}s"] = short + symbol
  return symbols | {"ml": "mL", "kcals": "kcal", "Kg": "kg", "atms": "atm"}


_UNITS = _spellings()
_NUMBER = re.compile(
  r"([+-]?)\s*(\d{1,3}(?:,\d{3})+|\d*)(?:\.(\d*))?"
  r"(?:\s*[x×·*]\s*10\s*\^?\s*\(?([+-]?\d{1,4})\)?|[eE]([+-]?\d{1,4}))?"
)
_POWER_OF_TEN = re.compile(r"([+-]?)10\s*\^\s*\(?([+-]?\d{1,4})\)?(?!\d)")
_FRACTION = re.compile(r"([+-]?\d{1,20})\s*/\s*(\d{1,20})(?![\d.])")
_FRAC = re.compile(r"\\[dt]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_UNIT_FRAC = re.compile(
  r"([^/]*)\\[dt]?frac\s*\{\s*([^\W\d_][^{}/]*)\}\s*\{\s*([^\W\d_][^{}/]*)\}"
)
_LEFT = re.compile(r"^\s*[A-Za-z]\s*=")  # F = ma names ma
_FACTOR = re.compile(
  r"\s*([/·*.])?\s*\(?\s*([^\W\d_]+|°[CF]?|%)(?:\^\(?|)([+-]?\d)?\)?\s*\)?"
)
_DEGREES = re.compile(r"\bdegrees?\s+([CF])(?:elsius|ahrenheit)?\b", re.I)
_BEFORE = re.compile(
  r"(?:(?!(?:not|isnt|no|never|wrong|false|half|twice)\b)"
  r"([A-Za-zα-ωΑ-Ω][A-Za-z0-9]{0,7})\s*=|(pH)(?: of| is)?)?\s*"
  r"(?:[≈~=]|about |approximately |approx\.? )?\s*"
)


class Quantity(NamedTuple):
  """A number as it was written."""

  value: Fraction
  # One unit of its last digit, or 0 for a whole number or a fraction.
  step: Fraction
  unit: dict[str, int]  # symbol -> power, which is not 0
  known: bool  # whether all of these are known as units
  name: str  # what stands before it, "v" in "v = 5", or ""


def read_quantity(text: str) -> Quantity | None:
  """The quantity of a text; "v = ", "pH", "≈", "about" may stand before it."""
  if expressions.UNEQUAL.search(text):
    return None
  text = _FRAC.sub(r"\1/\2", plain(text)).strip().rstrip(".,; ")
  if divided := _UNIT_FRAC.fullmatch(text):
    text = "{} {}/{}".format(*divided.groups())
  before = _BEFORE.match(text)
  number = _read_number(text, before.end() if before else 0)
  unit = _read_unit(text[number[2] :]) if number else None
  if number is None or unit is None:
    return None
  powers, known = unit
  # 1s and 3d are orbitals as well.
  known = known and not re.fullmatch(r"\d[A-Za-z]", text)
  name = (before[1] or before[2] or "") if before else ""
  return Quantity(*number[:2], powers, known, name)


def same_quantity(answer: str, gold: str) -> bool:
  r"""Whether an answer equals the reference; False if one is not a quantity.

    same_quantity(r"3.0 \times 10^8 m/s", "3.00e8 m s^-1")  # True
    same_quantity("5 km", "5000 m")  # False: not converted

  Whole numbers and fractions are compared exactly. If the reference has a
  decimal point or a power of ten it was measured: what differs by no more than
  1 % is equal.

  Units may be left out, for a question often names its own, but not exchanged:
  none is converted, and a prefix is part of it. "m/s", "m s^-1" and "meters per
  second" are one unit; after a "/" all is divided by. mW is not MW. A word that
  is not known as a unit must be there in both: "5 million" is not 5, and
  neither must the letter of "3d" be left out, which may be no unit. A pH has no
  unit: pH 7 is neither 7 M nor pOH = 7. 5 % is 0.05, not a bare 5.
  """
  given, right = read_quantity(answer), read_quantity(gold)
  if given is None or right is None:
    return False
  if given.unit == {"%": 1} and not right.unit:
    given = given._replace(value=given.value / 100, unit={})
  fraction = given.value.denominator > 1 and not given.step  # is exact
  near = abs((given if fraction else right).value) * _TOLERANCE
  equal = abs(given.value - right.value) <= (near if right.step else 0)
  return equal and _same_unit(given, right)


def _nearness(given: str, right: Quantity) -> tuple[str, str] | None:
  r"""Asks `math.verify` whether an exact value is near: \sqrt{2} for 1.41."""
  variables, gap = expressions.variables, abs(right.value) / 99  # 1 % of it
  with contextlib.suppress(expressions.Unreadable):
    match parse(screen(given)[0]):
      case Leaf(text, tree, unit="") if right.step and not variables(tree):
        return rf"\max(|({text})-({right.value})|,{gap})", str(gap)
  return None


def _same_unit(given: Quantity, right: Quantity) -> bool:
  names = {given.name, right.name}
  if "pH" in names:  # has no unit; pOH and pKa differ
    return not given.unit and not right.unit and names <= {"", "pH"}
  if given.unit and right.unit:
    return given.unit == right.unit
  return (given.known or not given.unit) and (right.known or not right.unit)


def _read_number(text: str, at: int) -> tuple[Fraction, Fraction, int] | None:
  """Value, unit of the last digit, and where the number ends."""
  if match := _FRACTION.match(text, at):
    below = int(match[2])
    value = Fraction(int(match[1]), below) if below else None
    return None if value is None else (value, Fraction(0), match.end())
  if match := _POWER_OF_TEN.match(text, at):
    digits, decimals, exponent, step = "1", "", match[2], False
  elif match := _NUMBER.match(text, at):
    whole, decimals = match[2].replace(",", ""), match[3] or ""
    digits, exponent = whole + decimals, match[4] or match[5]
    step = match[3] is not None or exponent is not None
  else:
    return None
  power = int(exponent or 0)
  if not digits or len(digits) > _MAX_DIGITS or abs(power) > MAX_EXPONENT:
    return None
  last = Fraction(10) ** (power - len(decimals))
  value = int(match[1] + digits) * last
  return value, last if step else Fraction(0), match.end()


def _read_unit(text: str) -> tuple[dict[str, int], bool] | None:
  text = _DEGREES.sub(lambda m: "°" + m[1].upper(), text)
  text = re.sub(r"\bper\b", "/", text).strip()
  text = re.sub(r"(μ|°(?=\s+[CF]\b))\s+(?=[^\W\d_])", r"\1", text)
  powers: Counter[str] = Counter()
  at, sign, known = 0, 1, True
  while at < len(text):
    factor = _FACTOR.match(text, at)
    if factor is None:
      return None
    sign = -1 if factor[1] == "/" else sign
    symbol = _UNITS.get(factor[2])
    if symbol is None and len(factor[2]) > 3:
      symbol = _UNITS.get(factor[2].lower())  # a name, such as Meters
    known = known and symbol is not None
    powers[symbol or factor[2]] += sign * int(factor[3] or 1)
    at = factor.end()
  return {unit: power for unit, power in powers.items() if power}, known


def _choices(value: Any) -> list[str]:
  if not isinstance(value, list):
    raise Refused("choices", f"{kind(value)}; write a list of texts")
  return [strict_json.text(c, f"choices[{i}]") for i, c in enumerate(value)]


DOMAIN = Domain(
  name="stem",
  verify=lambda response, entry, jail: verify(response, **entry, jail=jail),
  fields={
    "answer": Field(strict_json.answer),
    "choices": Field(_choices, optional=True, in_prompt=True),
  },
  check_reference=lambda read: {**read, "answer": check_reference(**read)},
  needs_jail="libraries",
  one_answer=True,
)
