r"""Expressions, from tokens to a tree, and leaves: one with its unit.

read(tokens(r"\frac{1}{2}+0.25"))        # Fraction(3, 4)
read(tokens(r"2\sqrt{3}"))               # ("*", Fraction(2), ("root", ...))
leaf(tokens(r"1\text{ cm}"))             # Leaf("1", 1, "cm")

Every rational part of a tree is one Fraction. Nothing is rounded. Numbers stay
below 2**30,000, and an operation costs at most milliseconds, whatever the text.
What has no value raises Unreadable.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction

from brorl_jax.verdicts.math.nodes import Items, Leaf, Node, Tree, Unreadable
from brorl_jax.verdicts.math.tokens import LETTERS, Token, canonical_unit

_MAX_BITS = 30_000
_MAX_FACTORIAL = 2_500
_FUNCTIONS = frozenset(
  "sin cos tan sec csc cot arcsin arccos arctan sinh cosh tanh ln exp".split()
)
_SEVERAL = (r"\max", r"\min", r"\gcd")
# Names of vectors, segments and estimates: with their letters one symbol.
_MARKS = (
  r"\hat", r"\vec", r"\bar", r"\overline", r"\overrightarrow", r"\widehat",
  r"\tilde",
)  # fmt: skip
_CLOSING = {
  "(": ")",
  "[": "]",
  "{": "}",
  r"\lfloor": r"\rfloor",
  r"\lceil": r"\rceil",
}
# What may begin a factor, apart from numbers, symbols and bars.
_STARTS = frozenset(
  r"\frac \sqrt \binom \pi \infty \log".split()
  + [f"\\{name}" for name in _FUNCTIONS]
).union(_CLOSING, _SEVERAL, _MARKS, LETTERS)
_END = Token("sign", "")


def decimal_step(text: str) -> Fraction | None:
  """One unit of a decimal's last digit; None without a decimal point."""
  digits, _, exponent = text.casefold().partition("e")
  if "." not in digits:
    return None
  return Fraction(10) ** (int(exponent or 0) - len(digits.partition(".")[2]))


def _small(value: Fraction) -> Fraction:
  if max(value.numerator.bit_length(), value.denominator.bit_length()) > (
    _MAX_BITS
  ):
    raise Unreadable("too large")
  return value


def _of_two(
  sign: str,
  function: Callable[[Fraction, Fraction], Fraction],
  a: Tree,
  b: Tree,
) -> Tree:
  if isinstance(a, Fraction) and isinstance(b, Fraction):
    return _small(function(a, b))
  return (sign, a, b)


def add(a: Tree, b: Tree) -> Tree:
  """a + b."""
  return _of_two("+", operator.add, a, b)


def negative(a: Tree) -> Tree:
  """-a."""
  return -a if isinstance(a, Fraction) else ("-", a)


def multiply(a: Tree, b: Tree) -> Tree:
  """a b."""
  return _of_two("*", operator.mul, a, b)


def divide(a: Tree, b: Tree) -> Tree:
  """a / b."""
  if b == 0:
    raise Unreadable("division by zero")
  return _of_two("/", operator.truediv, a, b)


def raise_to(a: Tree, b: Tree) -> Tree:
  """a to the power b; exact for a whole b."""
  if not (isinstance(a, Fraction) and isinstance(b, Fraction)):
    return ("^", a, b)
  if a == 0 and b <= 0:
    raise Unreadable("zero to a power that is not positive")
  if b.denominator > 1:
    if a < 0:  # the principal value is complex
      return ("^", a, b)
    return root(raise_to(a, Fraction(b.numerator)), Fraction(b.denominator))
  bits = max(a.numerator.bit_length(), a.denominator.bit_length())
  if abs(a) != 1 and bits * abs(b.numerator) > _MAX_BITS:
    raise Unreadable("too large")
  if abs(a) == 1:
    return a if b.numerator % 2 else Fraction(1)
  return a**b.numerator


def root(a: Tree, degree: Tree) -> Tree:
  """The principal root, exact where it is rational and not negative."""
  if degree == 0:
    raise Unreadable("root of degree zero")
  if degree == 1:
    return a
  if isinstance(a, Fraction) and isinstance(degree, Fraction) and a >= 0:
    if degree.denominator == 1 and 2 <= degree <= 100:
      above = _whole_root(a.numerator, int(degree))
      below = _whole_root(a.denominator, int(degree))
      if above is not None and below is not None:
        return Fraction(above, below)
  return ("root", a, degree)


def _whole_root(n: int, degree: int) -> int | None:
  if degree == 2:
    root = math.isqrt(n)
    return root if root**2 == n else None
  low, high = 0, 1 << (n.bit_length() // degree + 1)
  while low < high:
    middle = (low + high) // 2
    if middle**degree < n:
      low = middle + 1
    else:
      high = middle
  return low if low**degree == n else None


def rounded(name: str, a: Tree) -> Tree:
  """The floor or the ceiling of a."""
  kind = "floor" if name == r"\lfloor" else "ceil"
  if isinstance(a, Fraction):
    return Fraction(math.floor(a) if kind == "floor" else math.ceil(a))
  return (kind, a)


def factorial(a: Tree) -> Tree:
  """a!."""
  if not isinstance(a, Fraction):
    return ("!", a)
  if a.denominator > 1 or not 0 <= a <= _MAX_FACTORIAL:
    raise Unreadable("factorial of something other than a small integer")
  return _small(Fraction(math.factorial(a.numerator)))


def binomial(n: Tree, k: Tree) -> Tree:
  """n over k."""
  if not (isinstance(n, Fraction) and isinstance(k, Fraction)):
    return ("binom", n, k)
  whole = n.denominator == 1 == k.denominator
  if not whole or min(n, k) < 0 or max(n, k) > _MAX_FACTORIAL:
    raise Unreadable("binomial of something other than small integers")
  return _small(Fraction(math.comb(n.numerator, k.numerator)))


def _of_several(name: str, values: Sequence[Tree]) -> Tree:
  """The maximum, the minimum or, of whole numbers, the common divisor."""
  numbers = [value for value in values if isinstance(value, Fraction)]
  if name == "gcd":
    if len(numbers) < len(values) or any(n.denominator > 1 for n in numbers):
      raise Unreadable("common divisor of something other than integers")
    return Fraction(math.gcd(*(n.numerator for n in numbers)))
  if len(numbers) == len(values):
    return max(numbers) if name == "max" else min(numbers)
  return (name, *values)


def read(tokens: Sequence[Token]) -> Tree:
  """The tree of an expression.

  A number before a proper fraction is a mixed number; two numbers side by side
  are no expression.

  Raises:
    Unreadable: If it is none, or is undefined, or too large.
  """
  reader = _Reader(tokens)
  try:
    tree = reader.sum()
  except RecursionError:
    raise Unreadable("too deep") from None
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

  def is_next(self, *texts: str) -> bool:
    return self.next.kind in ("sign", "command") and self.next.text in texts

  def accept(self, *texts: str) -> bool:
    """Takes the next token if it is one of these."""
    accepted = self.is_next(*texts)
    self._at += accepted
    return accepted

  def expect(self, text: str) -> None:
    if not self.accept(text):
      raise Unreadable(f"{text} is missing")

  def minus(self) -> bool:
    """Takes all signs; whether they are a minus."""
    minus = False
    while self.is_next("+", "-"):
      minus ^= self.take().text == "-"
    return minus

  def sum(self) -> Tree:
    tree = self.product()
    while self.is_next("+", "-"):
      if self.take().text == "+":
        tree = add(tree, self.product())
      else:
        tree = add(tree, negative(self.product()))
    return tree

  def product(self) -> Tree:
    minus, tree = self.minus(), self.power()
    while True:
      if self.is_next("*", "/"):
        combine = multiply if self.take().text == "*" else divide
        if self.is_next("*"):  # Python's power is read as one
          raise Unreadable("** inside a product")
        tree = combine(tree, self.signed_power())
      elif self.starts_factor():
        if self.next.kind == "number":
          raise Unreadable("two numbers side by side")
        tree = multiply(tree, self.power())
      else:
        return negative(tree) if minus else tree

  def signed_power(self) -> Tree:
    minus, tree = self.minus(), self.power()
    return negative(tree) if minus else tree

  def starts_factor(self) -> bool:
    token = self.next
    if token.kind in ("number", "symbol"):
      return True
    if token.text == "|":
      return not self._bars
    return token.kind in ("sign", "command") and token.text in _STARTS

  def power(self) -> Tree:
    base = self.postfix(self.primary())
    python = self.is_next("*") and self._tokens[self._at + 1].text == "*"
    if self.is_next("^") or python:
      self._at += 1 + python
      base = self.postfix(raise_to(base, self.exponent()))
    return base

  def postfix(self, tree: Tree) -> Tree:
    while True:
      if self.accept("!"):
        tree = factorial(tree)
      elif self.accept("%"):
        tree = divide(tree, Fraction(100))
      elif self.is_degree():
        tree = multiply(tree, divide(("constant", "pi"), Fraction(180)))
      else:
        return tree

  def is_degree(self) -> bool:
    r"""Takes `^\circ` or `^{\circ}` if it is next."""
    for form in (("^", r"\circ"), ("^", "{", r"\circ", "}"), (r"\circ",)):
      ahead = self._tokens[self._at : self._at + len(form)]
      if tuple(token.text for token in ahead) == form:
        self._at += len(form)
        return True
    return False

  def exponent(self) -> Tree:
    if self.is_next("+", "-"):
      return self.signed_power()
    if self.is_next("{"):
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
    if token.kind == "number":
      return self.mixed(token)
    if token.kind == "symbol":
      constant = token.text in ("e", "i")
      return ("constant" if constant else "symbol", token.text)
    if token.kind == "word":
      raise Unreadable(f"word {token.text}")
    if token.text in _CLOSING:
      tree = self.outside_bars(self.sum)
      self.expect(_CLOSING[token.text])
      return rounded(token.text, tree) if len(token.text) > 1 else tree
    if token.text == "|":
      self._bars += 1
      tree = self.sum()
      self._bars -= 1
      self.expect("|")
      return abs(tree) if isinstance(tree, Fraction) else ("abs", tree)
    return self.command(token)

  def outside_bars(self, inner: Callable[[], Tree]) -> Tree:
    bars, self._bars = self._bars, 0
    tree = inner()
    self._bars = bars
    return tree

  def command(self, token: Token) -> Tree:
    name = token.text
    if name == r"\pi":
      return ("constant", "pi")
    if name == r"\infty":
      return ("constant", "infinity")
    if name in LETTERS:
      return ("symbol", name)
    if name == r"\frac":
      above = self.argument()
      return divide(above, self.argument())
    if name == r"\binom":
      above = self.argument()
      return binomial(above, self.argument())
    if name == r"\sqrt":
      degree: Tree = Fraction(2)
      if self.accept("["):
        degree = self.sum()
        self.expect("]")
      return root(self.argument(), degree)
    if is_function(name):
      return self.function(name[1:])
    if name in _SEVERAL:
      return _of_several(name[1:], self.arguments())
    if name in _MARKS and (letters := self.letters()):
      return ("symbol", name + letters)
    if name.startswith("\\") and name[1:].isalpha():
      raise Unreadable(f"unknown {name}")
    raise Unreadable(f"stray {name}")

  def arguments(self) -> list[Tree]:
    """What stands in brackets, between commas."""
    opening, closing = ("(", ")") if self.is_next("(") else (r"\{", r"\}")
    arguments, separator = [], opening
    while not arguments or self.is_next(","):
      self.expect(separator)
      arguments.append(self.outside_bars(self.sum))
      separator = ","
    self.expect(closing)
    return arguments

  def letters(self) -> str:
    """Takes a letter, or some in braces; "" if there are none."""
    braced = self.is_next("{")
    at = self._at + braced
    end = at
    while self._tokens[end].kind == "symbol" and (braced or end == at):
      end += 1
    if end == at or (braced and self._tokens[end].text != "}"):
      return ""
    self._at = end + braced
    return " ".join(token.text for token in self._tokens[at:end])

  def function(self, name: str) -> Tree:
    base: Tree = Fraction(10)
    exponent: Tree = None
    while self.is_next("^", "_"):
      if self.take().text == "_":
        base = self.argument()
      else:
        exponent = self.exponent()
    if exponent == -1 and name in ("sin", "cos", "tan"):
      name, exponent = f"arc{name}", None
    value = self.operand()
    if name == "exp":
      tree = raise_to(("constant", "e"), value)
    else:
      tree = ("log", value, base) if name == "log" else (name, value)
    return tree if exponent is None else raise_to(tree, exponent)

  def operand(self) -> Tree:
    r"""What a function without brackets applies to: `\sin 2x \cos x`."""
    if self.accept("("):
      tree = self.outside_bars(self.sum)
      self.expect(")")
      return tree
    tree = self.signed_power()
    while self.starts_factor() and self.next.kind != "number":
      if is_function(self.next.text) or self.next.text in _CLOSING:
        break
      tree = multiply(tree, self.power())
    return tree

  def mixed(self, token: Token) -> Tree:
    """A number, or a number and a proper fraction."""
    value = Fraction(token.text)
    if self.is_next(r"\overline", r"\dot"):
      return self.repeating(token.text)
    if not (self.is_next(r"\frac") and token.text.isdigit()):
      return value
    at, saved = self._at, list(self._tokens)
    self.take()
    above, below = self.argument(), self.argument()
    whole = (
      isinstance(n, Fraction) and n.denominator == 1 for n in (above, below)
    )
    if all(whole) and 0 < above < below:
      return value + above / below
    self._at, self._tokens = at, saved
    return value

  def repeating(self, text: str) -> Fraction:
    r"""`0.1\overline{6}` is a sixth."""
    self.take()
    braced = self.accept("{")
    period = self.take()
    if braced:
      self.expect("}")
    if not period.text.isdigit() or "e" in text.casefold():
      raise Unreadable("a bar over what are no digits")
    places = len(text.partition(".")[2])
    tail = Fraction(int(period.text), 10 ** len(period.text) - 1)
    return Fraction(text) + tail / 10**places


def is_function(command: str) -> bool:
  r"""Whether a command applies to what follows, as `\sin` does."""
  return command[1:] in _FUNCTIONS or command == r"\log"


def leaf(part: Sequence[Token]) -> Node:
  """An expression; one that cannot be read has no tree but a reason."""
  signed = [i for i, token in enumerate(part) if token.text in (r"\pm", r"\mp")]
  if len(signed) == 1:
    i = signed[0]
    both = [
      leaf([*part[:i], Token("sign", sign), *part[i + 1 :]]) for sign in "+-"
    ]
    return Items("list", tuple(both))
  bare, unit = without_unit(part)
  text = " ".join(token.text for token in bare)
  try:
    tree = read(bare)
  except Unreadable as error:
    text = " ".join(token.text for token in part)
    return Leaf(text, None, why=str(error))
  digits = [token for token in bare if token.text not in "+-"]
  step = None
  based = unit.startswith("(base")  # its last digit is not a tenth
  if len(digits) == 1 and digits[0].kind == "number" and not based:
    step = decimal_step(digits[0].text)
  return Leaf(text, tree, unit, step)


def without_unit(part: Sequence[Token]) -> tuple[Sequence[Token], str]:
  """Splits an expression from its unit."""
  if part[0].text in (r"\$", "$", "£", "€") and len(part) > 1:
    return part[1:], "dollar" if "$" in part[0].text else part[0].text
  if part[-1].text in (r"\$", "$", "£", "€") and len(part) > 1:
    return part[:-1], "dollar" if "$" in part[-1].text else part[-1].text
  end = next((i for i, t in enumerate(part) if t.kind == "word"), len(part))
  bare, words = part[:end], part[end:]
  if not bare:
    return part, ""
  unit = ""
  if words:
    canon = canonical_unit(" ".join(token.text for token in words))
    if canon is None:
      return part, ""
    if canon == "percent":
      return [*bare, Token("sign", "%")], ""
    unit = canon
  texts = [token.text for token in bare]
  for form in (["^", r"\circ"], ["^", "{", r"\circ", "}"], [r"\circ"]):
    if texts[-len(form) :] == form and len(texts) > len(form):
      # Inside an expression a degree is a number, pi / 180.
      inside = any(t in ("+", "-", "*", "/") for t in texts[1 : -len(form)])
      function = any(is_function(t) for t in texts)
      if not inside and not function:
        return bare[: -len(form)], " ".join(["degree", unit]).strip()
  return bare, unit
