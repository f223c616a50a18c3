r"""Expressions: LaTeX and plain text as tokens, and the tree of these.

plain(r"\left( 1,\,\tfrac12 \right)"), then `tokens`: ( 1 , \frac 12 )
"""

# ruff: noqa: RUF001 (signs of other alphabets are what is replaced)
import math
import operator
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

# A Fraction, or a tuple of an operator and its arguments:
#   ("symbol", name) ("constant", "pi" | "e" | "i" | "infinity")
#   ("+" | "*" | "/" | "^" | "binom" | "root" | "log", a, b) ("-", a)
#   ("!" | "abs" | "floor" | "ceil" | name of a function, a)
#   ("max" | "min", a, b, ...)
Tree = Any


class Unreadable(ValueError):
  """The text is none of what is understood here."""


class Token(NamedTuple):
  """A part of an expression; a sign is one character, or a command."""

  kind: str  # number, symbol (letter, subscript, primes), word or sign
  text: str


_TABLES = pathlib.Path(__file__).parents[1] / "tables"


def table(name: str) -> str:
  return (_TABLES / name).read_text("utf-8")


def _spellings(name: str) -> dict[str, str]:
  """The first word of each entry of a table, by every word of the entry."""
  entries = [entry.split() for entry in table(name).split(",")]
  return {word: entry[0] for entry in entries for word in entry}


# Commands that are variables, and that apply to what follows, as \sin does.
LETTERS = frozenset(table("letters.txt").split())
FUNCTIONS = frozenset(table("functions.txt").split())
_SAME = _spellings("commands.txt")
# Functions and numbers that may be written without a backslash, and operators.
_NAMES = {x[1:] for x in FUNCTIONS} | {"sqrt", "pi", "gcd", "lcm"}
_OPERATORS = {x[1:] for x, same in _SAME.items() if same in FUNCTIONS}
_OPERATORS |= _NAMES | {"max", "min"}
_UNICODE = str.maketrans({
  **{x: f"{same} " for x, same in _SAME.items() if len(x) == 1 and x > "~"},
  "°": r"^\circ ", "²": "^{2}", "³": "^{3}", "½": r"\frac{1}{2}", "′": "'",
  "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}",
  "⅔": r"\frac{2}{3}",
})  # fmt: skip
_DROPPED = re.compile(
  r"\\(?:left|right|middle)(?:\.|(?![A-Za-z]))"
  r"|\\(?:[bB]igg?[lrm]?|displaystyle|textstyle|scriptstyle"
  r"|limits|nolimits|rm|bf|it|mathopen|mathclose|boldsymbol|bm|underline"
  r"|[Ll]arge|LARGE|[Hh]uge)(?![A-Za-z])"
  r"|\\(?:text)?color\s*(?:\[\w{0,9}\]\s*)?\{[^{}]{0,32}\}"
)
# Room between rows, \\[4pt], and how a column is set, \begin{pmatrix*}[r].
_SETTING = re.compile(
  r"(\\\\)\s*\[\s*-?[\d.]+\s*[a-z]{2}\s*\]"
  r"|(\\begin\s*\{\w+\*?\})\s*\[[clrtb]\]"
)
_BRACED_SIGN = re.compile(r"(?<!\\)(?<!\\text)\{\s*([:=])\s*\}")
_STOP = re.compile(r"(?:[.,]|\\text\s*\{[\s.,]*\}|\\+)$")
# Also a program's ~=, but x~=~1 has TeX's spaces.
UNEQUAL = re.compile(
  r"\\(?:center)?not\s*(?:=|\{\s*=\s*\})|\\cancel\s*\{\s*=\s*\}"
  r"|^\s*~(?=[^=~]*=)|(?<!\\)~\s*=(?!\s*~)"
)
# Thousands as TeX sets them: only digits that belong together are set closer.
_SPACED = r"(?:\\[!,;:> ]|~|\\quad(?![A-Za-z]))"
_CLOSER = re.compile(rf"(?<=\d){_SPACED}*,{_SPACED}+(?=\d{{3}}(?!\d))")
_SPACE = re.compile(
  r"(?<!\\)\\(?:[,;:!> ]|(?:q?quad|thinspace)(?![A-Za-z])"
  r"|hspace\*?\{[^{}]*\}|phantom\{[^{}]*\})|~|\s+"
)
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\{,\}| )\d{3})+(?![\d ]*\d)")
_NUMERALS = "one two three four five six seven eight nine ten eleven twelve"
_BASES = {w: n for n, w in enumerate(_NUMERALS.split(), 1)} | {"sixteen": 16}
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
  | (?P<braced_command>\\(?:begin|end)\s*\{\w+\*?\}
    |\\mathbb\s*\{?\s*[A-Z]\s*\}?)
  | (?P<command>\\[A-Za-z]+|\\.)
  | (?P<number>(?:\d+(?:\.(?:\d+|(?=\s*\\(?:overline|dot))))?|\.\d+)
    (?:[eE][+-]?\d{1,3}(?![\dA-Za-z.]))?)
  | (?P<word>[A-Za-z]+)
  | (?P<sign>\S)
  """,
  re.VERBOSE,
)
# A formula's marks.
_MARKED = re.compile(
  r"\$([^$]+)\$|\\\(((?:(?!\\\().)+)\\\)|\\\[((?:(?!\\\[).)+)\\\]"
)


def plain(text: str) -> str:
  """The text with one spelling for spaces, thousands and foreign signs."""
  text = text.translate(_UNICODE)
  text = UNEQUAL.sub(r" \\neq ", text) if "=" in text else text
  if "\\" in text or "{" in text or "~" in text:
    text = _CLOSER.sub(lambda m: "{,}" if r"\!" in m[0] else ",", text)
    text = _SETTING.sub(r"\1\2", _DROPPED.sub(" ", text))
    text = _BRACED_SIGN.sub(r"\1", text)
  text, before = _SPACE.sub(" ", text).strip(), ""
  while text != before:
    before = text
    if marked := _MARKED.fullmatch(text):
      text = marked[marked.lastindex or 0].strip()
    text = _STOP.sub("", text).rstrip()
  return _THOUSANDS.sub(lambda m: re.sub(r"\{,\}| ", "", m.group()), text)


def tokens(text: str) -> tuple[Token, ...]:
  """The tokens of a text that `plain` made."""
  out: list[Token] = []
  for found in _TOKEN.finditer(text):
    part = found.group()
    match found.lastgroup:
      case "wrapped":
        out += _wrapped(part, found["inner"])
      case "modulus":
        out.append(Token("word", f"(mod {re.sub(r'[^0-9]', '', part)})"))
      case "based":
        out += _based(found["digits"], found["base"] or found["braced"])
      case "command":
        part = _SAME.get(part, part)
        out.append(Token("symbol" if part.isalpha() else "sign", part))
      case "braced_command":
        out.append(Token("sign", re.sub(r"[\s{}]", "", part)))
      case "number":
        out.append(Token("number", part))
      case "word":
        out += _letters(part, after=bool(out))
      case _:
        out.append(Token("sign", part))
  return tuple(_with_subscripts(out))


def _based(digits: str, base: str) -> list[Token]:
  """A number of another base, as its digits with the base for a unit."""
  size = int(base) if base.isdecimal() else _BASES.get(base, 0)
  if not 2 <= size <= 36 or any(int(d, 36) >= size for d in digits if d != "."):
    raise Unreadable(f"{digits} is no number of base {base}")
  number = Token("number", digits)
  if not digits.isdecimal() and "." not in digits:
    number = Token("symbol", digits.lstrip("0"))
  return [number, Token("word", f"(base {size})")]


def _wrapped(whole: str, inner: str) -> list[Token]:
  r"""`\text{ m}` is a word; `\mathrm{e}` is a letter, `\mathbf{i}` a vector."""
  name = inner.strip()
  if whole.startswith(r"\mathbf") and name in ("i", "j", "k"):
    return [Token("symbol", rf"\hat{name}")]
  upright = whole.startswith((r"\mathrm", r"\mathbf", r"\mathit"))
  if upright and name in ("e", "i", "d", "x", "y", "z"):
    return [Token("symbol", name)]
  operator = whole.startswith(r"\operator") and name in _OPERATORS
  if operator or (name in _NAMES and not known_unit(name)):
    return [Token("sign", _SAME.get(rf"\{name}", rf"\{name}"))]
  out = []
  for found in _TOKEN.finditer(inner.replace("'", "")):
    part, kind = found.group(), found.lastgroup
    if part.casefold() in ("or", "and"):
      part = part.casefold()
    out.append(Token(kind if kind in ("word", "number") else "sign", part))
  return out


def _letters(part: str, *, after: bool) -> list[Token]:
  """A run of letters: a function, a unit, a link word, or a product."""
  if part in _NAMES:
    return [Token("sign", f"\\{part}")]
  if part.casefold() in ("or", "and"):
    return [Token("word", part.casefold())]
  if after and len(part) > 1 and known_unit(part):
    return [Token("word", part)]
  return [Token("symbol", letter) for letter in part]


def _with_subscripts(parts: list[Token]) -> list[Token]:
  r"""`x`, `_`, `1` become one symbol; `\log`, `_` stay as they are."""
  out: list[Token] = []
  at = 0
  while at < len(parts):
    token, at = parts[at], at + 1
    of_log = token.text == "_" and out and out[-1].text == r"\log"
    if token.text not in ("_", "'") or of_log:
      out.append(token)
      continue
    if not out or (out[-1].kind != "symbol" and out[-1].text not in LETTERS):
      raise Unreadable(f"{token.text} without a letter")
    text = token.text
    if text == "_":
      below, at = _subscript(parts, at)
      text += below
    out[-1] = Token("symbol", out[-1].text + text)
  return out


def _subscript(parts: list[Token], at: int) -> tuple[str, int]:
  texts = [part.text for part in parts[at:]]
  end = texts.index("}") if texts[:1] == ["{"] and "}" in texts else 0
  if end > 1:
    return "".join(texts[1:end]), at + end + 1
  if not texts or parts[at].kind == "sign":
    raise Unreadable("_ without a subscript")
  return texts[0], at + 1


# Each unit with its other spellings, and what is counted. No word that scales
# a number is one, nor an abbreviation of one: k, K, M, B, bn, mil, doz.
_UNITS = _spellings("units.txt")


def known_unit(word: str) -> str | None:
  """One spelling of a run of letters that is a unit, not a product."""
  if len(word) < 3:  # where M is no m
    return _UNITS.get(word)
  word = _UNITS.get(word) or word.casefold()
  plural = len(word) > 3 and word not in _UNITS
  return _UNITS.get(word.removesuffix("s") if plural else word)


def canonical_unit(words: str) -> str | None:
  """One spelling for a unit, or None for words that are no unit.

  Units may be left out but not exchanged. None is converted: 5 m is not 500 cm,
  for a question that names its unit wants it. The base of a number and the
  modulus of a congruence are units too, "(base 8)" and "(mod 7)". A word that
  no table knows may scale its number, as tenths do: with it a unit starts with
  "?", and may not be left out.
  """
  if re.fullmatch(r"\((?:base|mod) \d+\)", words):
    return words
  words = re.sub(r"\bper ", "/", re.sub(r"[{}*]", " ", words))
  words = re.sub(r"\b([ap]) ?\. ?m\b ?\.?", r"\1m", words).replace(".", " ")
  words = re.sub(r"\s*([/^])\s*", r"\1", " ".join(words.split()))
  words = re.sub(r"\b(?:square|sq) (\w+)", r"\1^2", words)
  words = re.sub(r"\b(?:cubic|cu) (\w+)", r"\1^3", words)
  factor = r"[A-Za-z]+(?:\^-?\d)?"
  if not re.fullmatch(rf"{factor}(?:[ /]{factor}){{0,3}}", words):
    return None
  parts = re.split(r"([ /])", words)
  names = [part.partition("^") for part in parts]
  known = all(known_unit(name[0]) for name in names[::2])
  spelt = [(known_unit(a) or a) + b + c for a, b, c in names]
  return "".join(spelt) if known else "?" + "".join(spelt).casefold()


# Exact operations. Nothing is rounded; numbers stay below 2**30,000, and one
# operation costs at most milliseconds, whatever the text.

_MAX_BITS = 30_000
_MAX_FACTORIAL = 2_500


def combined(name: str, *values: Tree) -> Tree:
  """The value of an operation if it is rational, else the tree of it."""
  if values[-1] == 0 and name in _NOT_ZERO:
    raise Unreadable(_NOT_ZERO[name])
  if name == "root" and values[1] == 1:
    return values[0]
  rational = all(isinstance(value, Fraction) for value in values)
  value = _EXACT[name](*values) if rational and name in _EXACT else None
  if value is None:
    return (name, *values)
  if isinstance(value, tuple):
    return value
  value = Fraction(value)
  if max(_bits(value)) > _MAX_BITS:
    raise Unreadable("too large")
  return value


def _bits(value: Fraction) -> tuple[int, int]:
  return value.numerator.bit_length(), value.denominator.bit_length()


def _wholes(what: str, *values: Tree, small: bool = True) -> list[int]:
  for n in values:
    whole = isinstance(n, Fraction) and n.denominator == 1
    if not whole or (small and not 0 <= n <= _MAX_FACTORIAL):
      raise Unreadable(f"{what} of something other than small integers")
  return [int(n) for n in values]


def _power(a: Fraction, b: Fraction) -> Tree:
  if a == 0 and b <= 0:
    raise Unreadable("zero to a power that is not positive")
  if b.denominator > 1:
    if a < 0:  # the principal value is complex
      return None
    above = combined("^", a, Fraction(b.numerator))
    return combined("root", above, Fraction(b.denominator))
  if abs(a) == 1:
    return a if b.numerator % 2 else Fraction(1)
  if max(_bits(a)) * abs(b.numerator) > _MAX_BITS:
    raise Unreadable("too large")
  return a**b.numerator


def _root(a: Fraction, degree: Fraction) -> Fraction | None:
  """The real root where it is rational."""
  sign = -1 if a < 0 and degree % 2 else 1
  if sign * a < 0 or degree.denominator > 1 or not 2 <= degree <= 100:
    return None
  parts = (sign * a).as_integer_ratio()
  above, below = (_whole_root(n, int(degree)) for n in parts)
  return sign * Fraction(above, below) if above is not None and below else None


def _whole_root(n: int, degree: int) -> int | None:
  """By Newton's method, from above."""
  root = 1 << -(-n.bit_length() // degree)
  while root:
    smaller = ((degree - 1) * root + n // root ** (degree - 1)) // degree
    if smaller >= root:
      break
    root = smaller
  return root if root**degree == n else None


# Of rational numbers; None if the value is no rational number.
_EXACT: dict[str, Callable[..., Any]] = {
  **{"+": operator.add, "*": operator.mul, "/": operator.truediv},
  **{"-": operator.neg, "^": _power, "root": _root, "abs": abs},
  **{"floor": math.floor, "ceil": math.ceil},
  "max": lambda *values: max(values),
  "min": lambda *values: min(values),
  "!": lambda n: math.factorial(*_wholes("factorial", n)),
  "binom": lambda *n: math.comb(*_wholes("binomial", *n)),
}
_NOT_ZERO = {"/": "division by zero", "root": "root of degree zero"}


_CLOSING = {"(": ")", "[": "]", "{": "}"}
_CLOSING |= {r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
_ROUNDED = {r"\lfloor": "floor", r"\lceil": "ceil"}
_CONSTANTS = {r"\pi": "pi", r"\infty": "infinity"}
_OF_TWO = {r"\frac": "/", r"\binom": "binom"}
_OF_WHOLES = {r"\gcd": math.gcd, r"\lcm": math.lcm}
_OF_SEVERAL = (r"\max", r"\min", *_OF_WHOLES)
# Names of vectors, segments and estimates: with their letters one symbol.
_MARKED_NAMES = "hat vec bar overline overrightarrow widehat tilde"
MARKS = tuple(rf"\{name}" for name in _MARKED_NAMES.split())
# What may begin a factor, apart from numbers, symbols and bars.
_STARTS = FUNCTIONS.union(
  LETTERS, _CLOSING, _CONSTANTS, _OF_TWO, _OF_SEVERAL, MARKS, [r"\sqrt"]
)
DEGREES = (("^", r"\circ"), ("^", "{", r"\circ", "}"), (r"\circ",))
_END = Token("sign", "")


def read(tokens: Sequence[Token]) -> Tree:
  r"""The tree of an expression; every rational part of it is one Fraction.

    read(tokens(r"\frac{1}{2}+0.25"))   # Fraction(3, 4)
    read(tokens(r"2\sqrt{3}"))          # ("*", Fraction(2), ("root", ...))

  A number before a proper fraction is a mixed number; two numbers side by side
  are no expression. Raises Unreadable if it is none, undefined or too large.
  """
  reader = _Reader(tokens)
  tree = reader.sum()
  if reader.next is not _END:
    raise Unreadable(f"unexpected {reader.next.text}")
  return tree


class _Reader:
  """Recursive descent; `next` is the token that was not used yet."""

  def __init__(self, tokens: Sequence[Token]):
    self._tokens = [*tokens, _END]
    self._at = 0
    self._bars = 0  # open absolute values

  @property
  def next(self) -> Token:
    return self._tokens[self._at]

  def take(self) -> Token:
    token = self.next
    if token is _END:
      raise Unreadable("ends too early")
    self._at += 1
    return token

  def accept(self, *texts: str) -> bool:
    ahead = self._tokens[self._at : self._at + len(texts)]
    accepted = tuple(token.text for token in ahead) == texts
    self._at += accepted * len(texts)
    return accepted

  def expect(self, text: str) -> None:
    if not self.accept(text):
      raise Unreadable(f"{text} is missing")

  def sum(self) -> Tree:
    tree = self.product()
    while self.next.text in ("+", "-"):
      plus, term = self.take().text == "+", self.product()
      tree = combined("+", tree, term if plus else combined("-", term))
    return tree

  def product(self) -> Tree:
    tree = self.signed_power()
    while True:
      if self.next.text in ("*", "/"):
        tree = combined(self.take().text, tree, self.signed_power())
      elif not self.starts_factor():
        return tree
      elif self.next.kind == "number" and not self.follows_power():
        raise Unreadable("two numbers side by side")
      else:
        tree = combined("*", tree, self.power())

  def signed_power(self) -> Tree:
    minus = False
    while self.next.text in ("+", "-"):
      minus ^= self.take().text == "-"
    tree = self.power()
    return combined("-", tree) if minus else tree

  def starts_factor(self) -> bool:
    token = self.next
    if token.text == "|":
      return not self._bars
    return token.kind in ("number", "symbol") or token.text in _STARTS

  def follows_power(self) -> bool:
    """Whether a power of a number is next: (n-2) 2^n, but not 5 2^n."""
    before, _, after = self._tokens[self._at - 1 : self._at + 2]
    return before.kind != "number" and after.text == "^"

  def power(self) -> Tree:
    base = self.postfix(self.primary())
    if self.accept("*", "*") or self.accept("^"):
      base = self.postfix(combined("^", base, self.exponent()))
    return base

  def postfix(self, tree: Tree) -> Tree:
    while True:
      if self.accept("!"):
        tree = combined("!", tree)
      elif self.accept("%"):
        tree = combined("/", tree, Fraction(100))
      elif any(self.accept(*form) for form in DEGREES):
        degree = combined("/", ("constant", "pi"), Fraction(180))
        tree = combined("*", tree, degree)
      else:
        return tree

  def exponent(self) -> Tree:
    if self.next.text in ("+", "-"):
      return self.signed_power()
    if self.next.text == "{":
      return self.argument()
    return self.postfix(self.primary())

  def argument(self) -> Tree:
    r"""What a command takes: braces, one digit, one letter, a command."""
    if self.accept("{"):
      tree = self.sum()
      self.expect("}")
      return tree
    token = self.next
    if token.kind == "number" and token.text.isdigit() and len(token.text) > 1:
      # TeX takes one digit: \frac12 is a half.
      self._tokens[self._at] = Token("number", token.text[1:])
      return Fraction(token.text[0])
    return self.primary()

  def primary(self) -> Tree:
    token = self.take()
    name = token.text
    if token.kind == "number":
      return self.mixed(name)
    if token.kind == "symbol":
      return ("constant" if name in ("e", "i") else "symbol", name)
    if token.kind == "word":
      raise Unreadable(f"word {name}")
    if name in _CLOSING:
      tree = self.outside_bars()
      self.expect(_CLOSING[name])
      return combined(_ROUNDED[name], tree) if name in _ROUNDED else tree
    if name == "|":
      self._bars += 1
      tree = self.sum()
      self._bars -= 1
      self.expect("|")
      return combined("abs", tree)
    return self.command(name)

  def outside_bars(self) -> Tree:
    """A sum in which a bar opens an absolute value."""
    bars, self._bars = self._bars, 0
    tree = self.sum()
    self._bars = bars
    return tree

  def command(self, name: str) -> Tree:
    if name in _CONSTANTS:
      return ("constant", _CONSTANTS[name])
    if name in LETTERS:
      return ("symbol", name)
    if name in _OF_TWO:
      return combined(_OF_TWO[name], self.argument(), self.argument())
    if name == r"\sqrt":
      degree: Tree = Fraction(2)
      if self.accept("["):
        degree = self.sum()
        self.expect("]")
      return combined("root", self.argument(), degree)
    if name in FUNCTIONS:
      return self.function(name[1:])
    if name in _OF_WHOLES:
      numbers = _wholes("common divisor", *self.arguments(), small=False)
      return Fraction(_OF_WHOLES[name](*numbers))
    if name in _OF_SEVERAL:
      return combined(name[1:], *self.arguments())
    if name in MARKS and (letters := self.letters()):
      return ("symbol", name + letters)
    is_command = name[0] == "\\" and name[1:].isalpha()
    raise Unreadable(f"{'unknown' if is_command else 'stray'} {name}")

  def arguments(self) -> list[Tree]:
    """What stands in brackets, between commas."""
    braced = self.next.text != "("
    self.expect(r"\{" if braced else "(")
    arguments = [self.outside_bars()]
    while self.accept(","):
      arguments.append(self.outside_bars())
    self.expect(r"\}" if braced else ")")
    return arguments

  def letters(self) -> str:
    """Takes a letter, or some in braces; "" if there are none."""
    braced = self.next.text == "{"
    at = end = self._at + braced
    while self._tokens[end].kind == "symbol" and (braced or end == at):
      end += 1
    if end == at or (braced and self._tokens[end].text != "}"):
      return ""
    self._at = end + braced
    texts = [token.text for token in self._tokens[at:end]]
    return " ".join(text.removeprefix(r"\hat") for text in texts)

  def function(self, name: str) -> Tree:
    base: Tree = Fraction(10)
    exponent: Tree = None
    while self.next.text in ("^", "_"):
      if self.take().text == "_":
        base = self.argument()
      else:
        exponent = self.exponent()
    if exponent == -1 and rf"\arc{name}" in FUNCTIONS:
      name, exponent = f"arc{name}", None
    value = self.operand()
    if name == "exp":
      tree = combined("^", ("constant", "e"), value)
    else:
      tree = ("log", value, base) if name == "log" else (name, value)
    return tree if exponent is None else combined("^", tree, exponent)

  def operand(self) -> Tree:
    r"""What a function without brackets applies to: `\sin 2x \cos x`."""
    if self.accept("("):
      tree = self.outside_bars()
      self.expect(")")
      return tree
    tree = self.signed_power()
    while self.starts_factor() and self.next.kind != "number":
      if self.next.text in FUNCTIONS or self.next.text in _CLOSING:
        break
      tree = combined("*", tree, self.power())
    return tree

  def mixed(self, digits: str) -> Tree:
    if self.next.text in (r"\overline", r"\dot"):
      return self.repeating(digits)
    value = Fraction(digits)
    if not digits.isdigit() or self.next.text != r"\frac":
      return value
    at, saved = self._at, [*self._tokens]
    self.take()
    above, below = self.argument(), self.argument()
    rational = isinstance(above, Fraction) and isinstance(below, Fraction)
    if rational and above.denominator == below.denominator == 1:
      if 0 < above < below:
        return value + above / below
    self._at, self._tokens = at, saved
    return value

  def repeating(self, digits: str) -> Fraction:
    r"""`0.1\overline{6}` is a sixth."""
    self.take()
    braced = self.accept("{")
    period = self.take().text
    if braced:
      self.expect("}")
    if not period.isdigit() or "e" in digits.casefold():
      raise Unreadable("a bar over what are no digits")
    tail = Fraction(int(period), 10 ** len(period) - 1)
    return Fraction(digits) + tail / 10 ** len(digits.partition(".")[2])


def subtrees(tree: Tree) -> Iterator[Tree]:
  """The tree and all of its parts."""
  yield tree
  if isinstance(tree, tuple) and tree[0] not in ("symbol", "constant"):
    for argument in tree[1:]:
      yield from subtrees(argument)


def variables(tree: Tree) -> set[str]:
  """The names in a tree."""
  operations = [part for part in subtrees(tree) if isinstance(part, tuple)]
  return {part[1] for part in operations if part[0] == "symbol"}


def decimal_step(digits: str) -> Fraction | None:
  """One unit of a decimal's last digit; None without a decimal point."""
  digits, _, exponent = digits.casefold().partition("e")
  if "." not in digits:
    return None
  return Fraction(10) ** (int(exponent or 0) - len(digits.partition(".")[2]))
