r"""LaTeX and plain text as a sequence of tokens, spelled one way.

  tokens(r"\left( 1,\,\tfrac12 \right)")   # ( 1 , \frac 12 )

Sizes, spaces and styles are dropped, signs of other alphabets become commands,
thousands lose their separators, and words differ from products of letters.

Words next to a number are units, which may be left out but not exchanged. None
is converted: 5 m is not 500 cm, for a question that names its unit wants it.
The base that a number is written in and the modulus of a congruence are units
too, "(base 8)" and "(mod 7)".
"""

# ruff: noqa: RUF001 (signs of other alphabets are what is replaced)
from __future__ import annotations

import dataclasses
import re
from typing import Literal

from brorl_jax.verdicts.math.nodes import Unreadable

Kind = Literal["number", "symbol", "command", "sign", "word"]


@dataclasses.dataclass(frozen=True, slots=True)
class Token:
  r"""One token.

  Attributes:
    kind: "number" (0.5, 1e3), "symbol" (a letter, with its subscript and
      primes), "command" (`\frac`, with the backslash), "sign" (one character,
      or an escaped bracket), or "word".
    text: As it is compared.
  """

  kind: Kind
  text: str


# Commands that are variables.
LETTERS = frozenset(
  r"""\alpha \beta \gamma \delta \epsilon \varepsilon \zeta \eta \theta
  \vartheta \iota \kappa \lambda \mu \nu \xi \rho \sigma \tau \upsilon \phi
  \varphi \chi \psi \omega \Gamma \Delta \Theta \Lambda \Xi \Sigma \Phi \Psi
  \Omega \ell""".split()
)
_SAME = {
  r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac",
  r"\dbinom": r"\binom", r"\tbinom": r"\binom",
  r"\le": r"\leq", r"\leqslant": r"\leq", r"\ge": r"\geq",
  r"\geqslant": r"\geq", r"\ne": r"\neq", r"\lt": "<", r"\gt": ">",
  r"\varnothing": r"\emptyset", r"\mid": "|", r"\vert": "|", r"\lvert": "|",
  r"\rvert": "|", r"\|": "|", r"\colon": ":",
  r"\lbrace": r"\{", r"\rbrace": r"\}",
  r"\lbrack": "[", r"\rbrack": "]", r"\lparen": "(", r"\rparen": ")",
  r"\ast": "*", r"\cdot": "*", r"\times": "*", r"\div": "/", r"\%": "%",
  r"\vee": r"\lor", r"\wedge": r"\land", r"\arcsec": r"\asec",
  r"\degree": r"\circ", r"\deg": r"\circ", r"\backslash": r"\setminus",
  r"\smallsetminus": r"\setminus", r"\imath": "i", r"\infin": r"\infty",
  r"\tg": r"\tan", r"\ctg": r"\cot", r"\arctg": r"\arctan",
  r"\pounds": "£", r"\euro": "€", r"\R": r"\mathbb{R}", r"\Z": r"\mathbb{Z}",
}  # fmt: skip
_UNICODE = str.maketrans({
  "×": "*", "·": "*", "⋅": "*", "∙": "*", "÷": "/", "∕": "/", "⁄": "/",
  "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "∞": r"\infty ",
  "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "∈": r"\in ",
  "±": r"\pm ", "∓": r"\mp ", "√": r"\sqrt ", "π": r"\pi ", "θ": r"\theta ",
  "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "λ": r"\lambda ",
  "°": r"^\circ ", "²": "^{2}", "³": "^{3}", "½": r"\frac{1}{2}",
  "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}",
  "⅔": r"\frac{2}{3}", "ℝ": r"\mathbb{R}", "′": "'",
})  # fmt: skip
_DROPPED = re.compile(
  r"\\(?:left|right|middle)(?:\.|(?![A-Za-z]))"
  r"|\\(?:[bB]igg?[lrm]?|displaystyle|textstyle|scriptstyle"
  r"|limits|nolimits|rm|bf|it|mathopen|mathclose)(?![A-Za-z])"
)
_SPACE = re.compile(
  r"(?<!\\)\\(?:[,;:!> ]|(?:q?quad|thinspace)(?![A-Za-z])"
  r"|hspace\*?\{[^{}]*\}|phantom\{[^{}]*\})|~|\s+"
)
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\{,\}| )\d{3})+(?![\d ]*\d)")
_FUNCTIONS = (
  "sin cos tan sec csc cot arcsin arccos arctan sinh cosh tanh log ln exp"
  " sqrt pi"
).split()
_BASES = dict(
  zip(
    "two three four five six seven eight nine ten eleven twelve".split(),
    range(2, 13),
    strict=True,
  )
) | {"sixteen": 16}
_TOKEN = re.compile(
  r"""
  (?P<modulus>\\pmod\s*(?:\d+|\{\s*\d+\s*\})
    |\(\s*(?:\\?b?mod|\\(?:text|mathrm)\s*\{\s*mod\s*\})\s*
      (?:\d+|\{\s*\d+\s*\})\s*\))
  # Digits that are letters only where their base needs some: 2A_1 is a product.
  | (?P<based>(?P<round>\()?(?P<digits>\d+(?:\.\d+)?
      |(?=[A-F]*\d)[\dA-F]+(?=\)?_\{1[1-6]\}))(?(round)\))
    _(?:(?P<base>\d+)|\{(?:\\text\{)?\s*(?P<braced>\w+)\s*\}?\}))
  | (?P<wrapped>\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it|sf)|operatorname\*?|mbox)
    \s*\{(?P<inner>[^{}]*)\})
  | (?P<environment>\\(?:begin|end)\s*\{\w+\*?\})
  | (?P<letters_of>\\mathbb\s*\{?\s*[A-Z]\s*\}?)
  | (?P<command>\\[A-Za-z]+)
  | (?P<escaped>\\.)
  | (?P<number>(?:\d+(?:\.(?:\d+|(?=\s*\\(?:overline|dot))))?|\.\d+)
    (?:[eE][+-]?\d{1,3}(?![\dA-Za-z.]))?)
  | (?P<word>[A-Za-z]+)
  | (?P<sign>\S)
  """,
  re.VERBOSE,
)


def plain(text: str) -> str:
  """The text with one spelling for spaces, thousands and foreign signs."""
  text = text.translate(_UNICODE)
  text = _SPACE.sub(" ", _DROPPED.sub("", text)).strip()
  # A formula's marks, a full stop at the end.
  while True:
    before = text
    for start, end in (("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
      inner = text[len(start) : -len(end)]
      if (
        len(text) > len(start + end)
        and text.startswith(start)
        and text.endswith(end)
        and start not in inner
      ):
        text = inner.strip()
    if text.endswith((".", ",")):
      text = text[:-1].rstrip()
    if text == before:
      break
  return _THOUSANDS.sub(lambda m: re.sub(r"\{,\}| ", "", m.group()), text)


def tokens(text: str) -> tuple[Token, ...]:
  """The tokens of a text that `plain` made.

  Raises:
    Unreadable: At a subscript or mark without its letter.
  """
  out: list[Token] = []
  for matched in _TOKEN.finditer(text):
    part = matched.group()
    match matched.lastgroup:
      case "inner" | "wrapped":
        out += _wrapped(matched.group("wrapped"), matched.group("inner"))
      case "modulus":
        out.append(Token("word", f"(mod {re.sub(r'[^0-9]', '', part)})"))
      case "based":
        base = matched.group("base") or matched.group("braced")
        out += _based(matched.group("digits"), base)
      case "command":
        out += _command(part)
      case "escaped":
        same = _SAME.get(part, part)
        out.append(Token("sign" if part != r"\\" else "command", same))
      case "environment" | "letters_of":
        spelled = re.sub(r"[\s{}]", "", part)
        out.append(Token("command", spelled))
      case "number":
        out.append(Token("number", part))
      case "word":
        out += _letters(part, after=bool(out))
      case _:
        out.append(Token("sign", part))
  return tuple(_with_subscripts(out))


def _command(part: str) -> list[Token]:
  part = _SAME.get(part, part)
  if len(part) == 1:
    return [Token("symbol" if part.isalpha() else "sign", part)]
  if part in (r"\{", r"\}"):
    return [Token("sign", part)]
  return [Token("command", part)]


def _based(digits: str, base: str) -> list[Token]:
  """A number of another base, as its digits with the base for a unit."""
  size = int(base) if base.isdecimal() else _BASES.get(base, 0)
  if not 2 <= size <= 36 or any(int(d, 36) >= size for d in digits if d != "."):
    raise Unreadable(f"{digits} is no number of base {base}")
  kind = "number" if digits.isdecimal() or "." in digits else "symbol"
  number = Token(kind, digits if kind == "number" else digits.lstrip("0"))
  return [number, Token("word", f"(base {size})")]


def _wrapped(whole: str, inner: str) -> list[Token]:
  r"""`\text{ m}` is a word; `\mathrm{e}` is a letter."""
  upright = whole.startswith((r"\mathrm", r"\mathbf", r"\mathit"))
  if upright and inner.strip() in ("e", "i", "d", "x", "y", "z"):
    return [Token("symbol", inner.strip())]
  out = []
  for matched in _TOKEN.finditer(inner.replace("'", "")):
    part = matched.group()
    if matched.lastgroup == "word":
      out.append(Token("word", part))
    elif matched.lastgroup == "number":
      out.append(Token("number", part))
    else:
      out.append(Token("sign", part))
  return out


def _letters(part: str, *, after: bool) -> list[Token]:
  """A run of letters: a function, a unit, a link word, or a product."""
  if part in _FUNCTIONS:
    return [Token("command", "\\" + part)]
  if part.casefold() in ("or", "and"):
    return [Token("word", part)]
  if after and len(part) > 1 and is_unit(part):
    return [Token("word", part)]
  return [Token("symbol", letter) for letter in part]


def _with_subscripts(parts: list[Token]) -> list[Token]:
  r"""`x`, `_`, `1` become one symbol; `\log`, `_` stay as they are."""
  out: list[Token] = []
  i = 0
  while i < len(parts):
    token = parts[i]
    mark = token.kind == "sign" and token.text in ("_", "'")
    last = out[-1] if out else None
    named = last is not None and (last.kind == "symbol" or last.text in LETTERS)
    if not mark or (token.text == "_" and last and last.text == r"\log"):
      out.append(token)
      i += 1
      continue
    if not named or last is None:
      raise Unreadable(f"{token.text} without a letter")
    if token.text == "'":
      out[-1] = Token("symbol", last.text + "'")
      i += 1
      continue
    text, i = _subscript(parts, i + 1)
    out[-1] = Token("symbol", f"{last.text}_{text}")
  return out


def _subscript(parts: list[Token], i: int) -> tuple[str, int]:
  if i < len(parts) and parts[i].text == "{":
    text = ""
    i += 1
    while i < len(parts) and parts[i].text != "}":
      text += parts[i].text
      i += 1
    if text and i < len(parts):
      return text, i + 1
  elif i < len(parts) and parts[i].kind in ("number", "symbol", "word"):
    return parts[i].text, i + 1
  raise Unreadable("_ without a subscript")


# Each unit with its other spellings.
_UNIT_NAMES = """
  m meter meters metre metres, cm centimeter centimeters centimetre centimetres,
  mm millimeter millimeters millimetre millimetres,
  km kilometer kilometers kilometre kilometres, in inch inches, ft foot feet,
  yd yard yards yds, mi mile miles, g gram grams, mg milligram milligrams,
  kg kilogram kilograms kgs, lb pound pounds lbs, oz ounce ounces,
  s second seconds sec secs, ms millisecond milliseconds,
  min minute minutes mins, h hour hours hr hrs, day days, week weeks,
  month months, year years yr yrs, l L liter liters litre litres,
  ml mL milliliter milliliters, gal gallon gallons, n N newton newtons,
  j J joule joules, w W watt watts, hz Hz hertz, pa Pa pascal pascals,
  k K kelvin, mol mole moles, mph, kmh kph, degree degrees deg,
  radian radians rad rads, dollar dollars usd USD bucks, cent cents, euro euros,
  unit units, a.m. am AM, p.m. pm PM, percent, bit bits, byte bytes
"""
_UNITS = {
  word: names.split()[0]
  for names in _UNIT_NAMES.split(",")
  for word in names.split()
}
# Words that would change the number they stand next to, or take it back.
_NOT_UNITS = frozenset(
  """
  zero one two three four five six seven eight nine ten eleven twelve thirteen
  fourteen fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty
  sixty seventy eighty ninety hundred hundreds thousand thousands million
  millions billion billions trillion dozen dozens half halves third thirds
  quarter quarters double triple pair pairs score
  or and not no nor but maybe perhaps possibly probably either neither both
  about approximately approx around roughly nearly almost least most more less
  fewer than over under above below between to if unless when then else except
  is are was were be equals equal plus minus times divided multiplied mod modulo
  base factorial squared cubed root power negative positive undefined infinity
  infinite none any all every same gold answer correct true false yes wrong pi e
  i log sin cos tan where such that for with without also otherwise instead
  """.split()
)


def is_unit(word: str) -> bool:
  """Whether a bare run of letters is a unit rather than a product."""
  return word in _UNITS or word.casefold() in _UNITS


def canonical_unit(words: str) -> str | None:
  """One spelling for a unit, or None for words that are no unit.

  Words follow a number; "square feet" and "m/s^2" are units.
  """
  if re.fullmatch(r"\((?:base|mod) \d+\)", words):
    return words
  words = re.sub(r"[{}*]", " ", words).replace("per ", "/")
  words = re.sub(r"\s*([/^.])\s*", r"\1", " ".join(words.split()))
  words = re.sub(r"\ba\.m\b\.?", "am", words)
  words = re.sub(r"\bp\.m\b\.?", "pm", words)
  words = re.sub(r"\b(?:square|sq) (\w+)", r"\1^2", words)
  words = re.sub(r"\bcubic (\w+)", r"\1^3", words)
  if not re.fullmatch(
    r"[A-Za-z]+(?:\^-?\d)?(?:[ /][A-Za-z]+(?:\^-?\d)?){0,3}", words
  ):
    return None
  parts = re.split(r"([ /])", words)
  if any(part.casefold() in _NOT_UNITS for part in parts):
    return None
  return "".join(_canonical_factor(part) for part in parts)


def _canonical_factor(part: str) -> str:
  word, power, exponent = part.partition("^")
  same = _UNITS.get(word) or _UNITS.get(word.casefold())
  if same is None:
    same = word.casefold()
    if len(same) > 3 and same.endswith("s"):
      same = same[:-1]
  return same + power + exponent
