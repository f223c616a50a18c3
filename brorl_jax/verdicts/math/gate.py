r"""Finds the answer of a response, and refuses what must not be parsed.

`boxed` reads the last complete box in one pass of a regular expression without
backtracking. `screen` refuses bombs, code and disguised characters. It runs
before every parser, in the trusted process, and uses no library. Its time is
linear for texts of at most `MAX_LENGTH` characters and constant for longer
ones. Every machine refuses the same text for the same reason.
"""

# ruff: noqa: RUF001 (look-alikes are what this is about)
from __future__ import annotations

import re
import unicodedata

# White space around an answer; str.strip would also remove control characters.
_SPACES = " \t\r\n"
_END, _START = "</think>", "<think>"
# An escaped character (`\{`, `\\`) is one item, so its brace does not count.
_ITEM = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
# Nested boxes to remove; more are refused later.
_MAX_NESTED = 4


def boxed(response: str) -> str | None:
  r"""What stands in the last complete `\boxed{...}` after the thinking.

  Only what follows the last `</think>` counts, and where a `<think>` comes
  after it, or there is one and no `</think>`, the response is still thinking
  and has no answer. Of boxes in boxes the outer one is the answer;
  `\boxed{\boxed{6}}` says 6. A box that is never closed is none, so what came
  before it counts; `\boxed 6`, `\fbox{6}` and an answer without a box are none.

  Returns:
    The text in the box, without outer spaces, or None.
  """
  tail = response.rpartition(_END)[2]
  if _START in tail:
    return None
  span = None
  boxes = 0  # open ones
  stack: list[int] = []  # where a box's text starts, or -1 for a bare brace
  for item in _ITEM.finditer(tail):
    text = item.group()
    if text == "{":
      stack.append(-1)
    elif text == "}":
      if stack and (start := stack.pop()) >= 0:
        boxes -= 1
        # An outer box closes after its inner ones and replaces them.
        span = (start, item.start())
    elif len(text) > 2:
      stack.append(item.end())
      boxes += 1
  if span is None:
    return None
  return unboxed(tail[span[0] : span[1]])


def unboxed(text: str) -> str:
  r"""The text without the boxes that go around all of it."""
  text = text.strip(_SPACES)
  for _ in range(_MAX_NESTED):
    start = _ITEM.match(text)
    if not start or len(start.group()) < 3 or not text.endswith("}"):
      break
    inner = text[start.end() : -1]
    # `\boxed{1}+\boxed{2}` also starts and ends like a box.
    if not _closed(inner):
      break
    text = inner.strip(_SPACES)
  return text


def _closed(text: str) -> bool:
  """Whether every brace in the text has its partner in the text."""
  depth = 0
  for item in _ITEM.finditer(text):
    part = item.group()
    if part == "{" or len(part) > 2:
      depth += 1
    elif part == "}":
      depth -= 1
      if depth < 0:
        return False
  return depth == 0


MAX_LENGTH = 400  # characters; the longest references of public sets have 150
_MAX_DEPTH = 12
_MAX_DIGITS = 40  # of one number
_MAX_ITEMS = 32  # of a list
_MAX_CELLS = 64  # of a matrix
_MAX_POWERS = 6
_MAX_EXPONENT = 2_500
_MAX_NAME = 32  # letters in a row

_SIGNS = {
  **dict.fromkeys("−–﹣－‐‑", "-"),
  **dict.fromkeys("\u00a0\u2002\u2003\u2009\u202f\u3000\n\t\r", " "),
  **{"，": ",", "．": ".", "（": "(", "）": ")", "％": "%", "＝": "="},
}
_TEXT = re.compile(
  r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it|sf)|operatorname|mbox)"
  r"\s*\{([^{}]{0,60})\}"
)
_CODE = re.compile(
  r"""__|["`;@#]|(?<![A-Za-z)}\]'])'|'(?=\w)"""
  r"|\b(?:import|exec|eval|lambda|open|sys|os|exit|quit|globals|locals"
  r"|getattr|class|for|if|while|print|def|del|return|yield)\b"
  r"|\)\s*\(\s*\)|\.\s*[A-Za-z_]{2}|<[A-Za-z]{2,}>|</[A-Za-z]|<\|\s*\w+\s*\|>|//|\[\s*\]"
)
_CODE_IN_TEXT = re.compile(r"""__|["`;@#]|\\[xu0]|\(\s*['"]|\w\(|\.\s*\w{2}""")
_SPENDING = re.compile(
  r"\\(?:sum|prod|int|iint|iiint|oint|lim|limsup|liminf|bigcup|bigcap|coprod"
  r"|input|include|def|gdef|edef|let|newcommand|renewcommand|csname|loop|write"
  r"|read|openin|openout|href|url|usepackage|catcode|expandafter|require)"
  r"(?![A-Za-z])"
)
_FUNCTION = re.compile(
  r"\\?(?:a(?:rc)?)?(?:sin|cos|tan|sec|csc|cot)h?(?![a-z])"
  r"|\\?(?:log|ln|exp|sqrt)(?![a-z])"
)
_NUMBER = re.compile(r"\d+")
_NAME = re.compile(rf"[A-Za-z]{{{_MAX_NAME + 1}}}")
_POWER = re.compile(r"\^|\*\s*\*")
_BASE_IS_A_SUM = re.compile(r"\([^()]*[+a-zA-Z-][^()]*\)\s*$")
_SMALL_FACTORIAL = re.compile(
  r"\((?:[a-z\s+-]|(?<!\d)\d{1,3}(?!\d)){1,20}\)!(?!\s*!)"
)
# A power's exponent as TeX and plain text write it: in braces, in brackets, a
# command, or what follows up to the next operator.
_BARE_EXPONENT = re.compile(r"[+-]?\s*(?:\\[A-Za-z]+|\d+|[A-Za-z])")


def screen(text: str) -> tuple[str, str]:
  """The normalized text, or the reason why it is refused.

  Foreign decimal digits, dashes and spaces become ASCII ones; that is all that
  is changed.

  Returns:
    The clean text, stripped, and ""; or "" and the reason.
  """
  if len(text) > MAX_LENGTH:
    return "", f"{len(text)} characters, at most {MAX_LENGTH}"
  clean, reason = _ascii(text)
  if reason:
    return "", reason
  if _code_in_text(clean):
    return "", "code-like text"
  bare = _TEXT.sub(" ", clean)
  for look in (_looks, _brackets, _sizes, _powers, _factorials):
    reason = look(bare)
    if reason:
      return "", reason
  return clean.strip(" "), ""


def _ascii(text: str) -> tuple[str, str]:
  out = []
  for c in text:
    if c in _SIGNS:
      c = _SIGNS[c]
    elif c > "\u007f" or c < " " or c == "\u007f":
      category = unicodedata.category(c)
      if category == "Nd":
        c = str(unicodedata.digit(c))
      elif category[0] == "C":
        return "", f"control or format character U+{ord(c):04X}"
      elif category in ("Mn", "Me", "Zl", "Zp"):
        return "", f"combining or separating character U+{ord(c):04X}"
    out.append(c)
  return "".join(out), ""


def _code_in_text(text: str) -> bool:
  return any(_CODE_IN_TEXT.search(m.group(1)) for m in _TEXT.finditer(text))


def _looks(bare: str) -> str:
  # `\;` and `\"` are TeX's; the rest of what has a meaning in code is refused.
  if _CODE.search(bare.replace(r"\;", " ").replace(r"\#", " ")):
    return "code-like text"
  if _SPENDING.search(bare):
    return "unbounded operator"
  if r"\boxed" in bare:
    return "box in the answer"
  if bare.replace(r"\$", "").count("$") > 2:
    return "several formulas"
  if _NAME.search(bare):
    return f"name of more than {_MAX_NAME} letters"
  return ""


def _brackets(bare: str) -> str:
  depth = braces = 0
  escaped = False
  for c in bare:
    if escaped:
      escaped = False
      # `\{` opens a set, and so counts as a bracket.
      if c not in "{}":
        continue
      braces -= (c == "{") - (c == "}")
    elif c == "\\":
      escaped = True
      continue
    if c in "([{":
      depth += 1
      braces += c == "{"
    elif c in ")]}":
      depth -= 1
      braces -= c == "}"
    if depth > _MAX_DEPTH:
      return f"brackets deeper than {_MAX_DEPTH}"
    if depth < 0 or braces < 0:
      return "unbalanced brackets"
  return "unbalanced brackets" if depth or braces else ""


def _sizes(bare: str) -> str:
  if bare.count(",") >= _MAX_ITEMS:
    return f"more than {_MAX_ITEMS} items"
  if bare.count("&") + bare.count(r"\\") >= _MAX_CELLS:
    return f"more than {_MAX_CELLS} cells"
  if bare.count("|") > 8:
    return "too many bars"
  if any(len(number) > _MAX_DIGITS for number in _NUMBER.findall(bare)):
    return f"number of more than {_MAX_DIGITS} digits"
  if re.search(r"\d\s*[eE]\s*[+-]?\s*\d{4}", bare):
    return "exponent too large"
  if len(_FUNCTION.findall(bare)) > 8:
    return "more than 8 functions"
  return ""


def _powers(bare: str) -> str:
  powers = [match.end() for match in _POWER.finditer(bare)]
  if len(powers) > _MAX_POWERS:
    return f"more than {_MAX_POWERS} powers"
  for start in powers:
    exponent, end = _exponent(bare, start)
    rest = bare[end:].lstrip()
    if rest[:1] in ("^", "!") or rest[:2] == "**":
      return "power of a power"
    if _POWER.search(exponent) or "!" in exponent:
      return "power in an exponent"
    numbers = [int(n) for n in _NUMBER.findall(exponent)]
    if not numbers:
      continue
    if max(numbers) > _MAX_EXPONENT or len(numbers) > 4:
      return "exponent too large"
    before = bare[: start - 1].rstrip("* ")
    if max(numbers) > 40 and _BASE_IS_A_SUM.search(before[-80:]):
      return "exponent too large"
  return ""


def _exponent(bare: str, start: int) -> tuple[str, int]:
  """The exponent that starts there, and where it ends."""
  while start < len(bare) and bare[start] == " ":
    start += 1
  if start < len(bare) and bare[start] in "{(":
    depth = 0
    for i in range(start, len(bare)):
      depth += (bare[i] in "{([") - (bare[i] in "})]")
      if depth == 0:
        return bare[start : i + 1], i + 1
    return bare[start:], len(bare)
  match = _BARE_EXPONENT.match(bare, start)
  end = match.end() if match else start
  if match and "\\" in match.group():  # `\frac{1}{2}`: its arguments too
    while end < len(bare) and bare[end] == "{":
      end = _exponent(bare, end)[1]
  return bare[start:end], end


def _factorials(bare: str) -> str:
  # `(n-1)!` may stay, for what is in the bracket is small.
  bare = _SMALL_FACTORIAL.sub(" ", bare)
  if re.search(r"![\s!]*!|[)\]}]\s*!|\d{5}\s*!", bare) or bare.count("!") > 3:
    return "factorial too large"
  if any(int(n) > _MAX_EXPONENT for n in re.findall(r"(\d+)\s*!", bare)):
    return "factorial too large"
  if re.search(r"[A-Za-z]{4}\s*!", bare):
    return "factorial of a word"
  for match in re.finditer(r"\\[dt]?binom", bare):
    sizes = re.match(
      r"\s*\{\s*(\w{1,4})\s*\}\s*\{\s*(\w{1,4})\s*\}",
      bare[match.end() : match.end() + 40],
    )
    if not sizes or any(
      n.isdecimal() and int(n) > _MAX_EXPONENT for n in sizes.groups()
    ):
      return "binomial too large"
  if re.search(r"\\sqrt\s*\[\s*\d{4}", bare):
    return "root too large"
  return ""
