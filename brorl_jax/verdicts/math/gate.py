"""Finds the answer of a response, and refuses what must not be parsed.

It runs before every parser, in the trusted process, in linear time and without
libraries. Every machine refuses the same text for the same reason.
"""

# ruff: noqa: RUF001 (look-alikes are what this is about)
import re
import unicodedata
from collections.abc import Iterator, Sequence

from brorl_jax.verdicts.base import after_thinking

# White space around an answer; str.strip would also remove control characters.
_SPACES = " \t\r\n"
# An escaped character (`\{`, `\\`) is one item, so its brace does not count.
_ITEM = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
# Nested boxes to remove; more are refused later.
_MAX_NESTED = 4


def boxed(response: str) -> str | None:
  r"""What stands in the last complete `\boxed{...}` after the thinking.

  Of boxes in boxes the outer one is the answer; `\boxed{\boxed{6}}` says 6. A
  box that is never closed is none, so what came before it counts; `\boxed 6`,
  `\fbox{6}` and an answer without a box are none.
  """
  tail = after_thinking(response)
  answer = None
  for opening, start, end in _pairs(tail):
    if len(opening) > 1:
      # An outer box closes after its inner ones and replaces them.
      answer = (start, end)
  return None if answer is None else unboxed(tail[slice(*answer)])


def _pairs(text: str) -> Iterator[tuple[str, int, int]]:
  """Each brace or box with where its inside starts and ends, as it closes."""
  opened: list[tuple[str, int]] = []
  for item in _ITEM.finditer(text):
    part = item.group()
    if part == "{" or len(part) > 2:
      opened.append((part, item.end()))
    elif part == "}" and opened:
      yield *opened.pop(), item.start()


def unboxed(text: str) -> str:
  r"""The text without the boxes that go around all of it."""
  text = text.strip(_SPACES)
  for _ in range(_MAX_NESTED):
    start = _ITEM.match(text)
    if not start or len(start.group()) < 3 or not text.endswith("}"):
      break
    # `\boxed{1}+\boxed{2}` also starts and ends like a box.
    if (start.group(), start.end(), len(text) - 1) not in _pairs(text):
      break
    text = text[start.end() : -1].strip(_SPACES)
  return text


MAX_LENGTH = 400  # characters; the longest references of public sets have 150
_MAX_DEPTH = 12
_MAX_DIGITS = 40  # of one number
_MAX_ITEMS = 32  # of a list
_MAX_CELLS = 64  # of a matrix
_MAX_POWERS = 6
_MAX_EXPONENT = 2_500
_MAX_NAME = 32  # letters in a row

_ASCII = {
  **dict.fromkeys("−–﹣－‐‑", "-"),
  **dict.fromkeys("\u00a0\u2002\u2003\u2009\u202f\u3000\n\t\r", " "),
  **{"，": ",", "．": ".", "（": "(", "）": ")", "％": "%", "＝": "="},
}
_TEXT = re.compile(
  r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it|sf)|operatorname|mbox)"
  r"\s*\{([^{}]{0,60})\}"
)
# $4$ and $5$, which the parser reads without these marks.
_FORMULAS = re.compile(
  r"(?<!\\)\$((?:\\\$|[^$])+)\$(?=\s*(?:$|,|and\b|or\b|\\text\s*\{\s*(?:and|or)))"
)
_CODE = re.compile(
  r"""__|["`;@#]|(?<![A-Za-z)}\]'])'|'(?=\w)"""
  r"|\b(?:import|exec|eval|lambda|open|sys|os|exit|quit|globals|locals"
  r"|getattr|class|for|if|while|print|def|del|return|yield)\b"
  r"|\)\s*\(\s*\)|\.\s*[A-Za-z_]{2}|<[A-Za-z]{2,}>|</[A-Za-z]|<\|\s*\w+\s*\|>|//|\[\s*\]"
)
_CODE_IN_TEXT = re.compile(
  r"""__|["`;@#]|\\[xu0]|\(\s*['"]|\w\(|(?<!\bsq)(?<!\bcu)(?<!\b[Nn]o)\.\s*\w{2}"""
)
_SPENDING = (
  r"\\(?:sum|prod|int|iint|iiint|oint|lim|limsup|liminf|bigcup|bigcap|coprod"
  r"|input|include|def|gdef|edef|let|newcommand|renewcommand|csname|loop|write"
  r"|read|openin|openout|href|url|usepackage|catcode|expandafter|require)"
  r"(?![A-Za-z])"
)
_FUNCTION = (
  r"\\?(?:a(?:rc?)?)?(?:sin|cos|tan|sec|csc|cot)h?(?![a-z])"
  r"|\\?(?:log|lg|ln|exp|sqrt)(?![a-z])"
)
_NAME = re.compile(rf"\s*(?:{_FUNCTION})\s*$")
_NUMBER = re.compile(r"\d+")
_POWER = re.compile(r"\^|\*\s*\*")
_BASE_IS_A_SUM = re.compile(r"\([^()]*[+a-zA-Z-][^()]*\)\s*$")
_CHOOSE = re.compile(r"\{ ?(\w{1,4}) ?\\choose(?![A-Za-z]) ?(\w{1,4}) ?\}")
# Each argument in braces, or one character.
_SMALL = r"\s*(\{(?:[a-zA-Z\s+-]|(?<!\d)\d{1,4}(?!\d)){1,20}\}|\w)"
_BINOMIAL = re.compile(rf"\\[dt]?binom(?:{_SMALL}{_SMALL})?")
_SMALL_FACTORIAL = re.compile(
  r"\((?:[a-z\s+-]|(?<!\d)\d{1,3}(?!\d)){1,20}\)!(?!\s*!)"
)
# A power's exponent as TeX and plain text write it: in braces, in brackets, a
# command, or what follows up to the next operator.
_BARE_EXPONENT = re.compile(r"[+-]?\s*(?:\\[A-Za-z]+|\d+|[A-Za-z])")
# What is refused where it occurs this often, and the reason.
_Table = Sequence[tuple[str, int, str]]
_LOOKS: _Table = (
  (_SPENDING, 1, "unbounded operator"),
  (r"\\boxed", 1, "box in the answer"),
  (r"(?<!\\)\$", 3, "several formulas"),
  (f"[A-Za-z]{{{_MAX_NAME + 1}}}", 1, f"name of more than {_MAX_NAME} letters"),
)
_SIZES: _Table = (
  (",", _MAX_ITEMS, f"more than {_MAX_ITEMS} items"),
  (r"&|\\\\", _MAX_CELLS, f"more than {_MAX_CELLS} cells"),
  (r"\|", 9, "too many bars"),
  (rf"\d{{{_MAX_DIGITS + 1}}}", 1, f"number of more than {_MAX_DIGITS} digits"),
  (r"\d\s*[eE]\s*[+-]?\s*\d{4}", 1, "exponent too large"),
  (_FUNCTION, 9, "more than 8 functions"),
)


def screen(text: str) -> tuple[str, str]:
  r"""The normalized text, or the reason why it is refused; the other is "".

  Only foreign digits, dashes and spaces are changed, to ASCII ones, \choose to
  \binom, and the marks of several formulas are left out: $4$ and $5$.
  """
  if len(text) > MAX_LENGTH:
    return "", f"{len(text)} characters, at most {MAX_LENGTH}"
  clean, reason = _ascii(text)
  if reason:
    return "", reason
  unmarked = _FORMULAS.sub(r"\1", clean) if clean.count("$") > 1 else clean
  clean = clean if re.search(r"(?<!\\)\$", unmarked) else unmarked
  clean = _CHOOSE.sub(r"\\binom{\1}{\2}", clean)
  bare = _TEXT.sub(lambda m: m[1] if _NAME.match(m[1]) else " ", clean)
  # `\;` and `\#` are TeX's; the rest of what has a meaning in code is refused.
  code = _CODE.search(bare.replace(r"\;", " ").replace(r"\#", " "))
  if code or any(map(_CODE_IN_TEXT.search, _TEXT.findall(clean))):
    return "", "code-like text"
  reason = _counted(bare, _LOOKS) or _brackets(bare) or _counted(bare, _SIZES)
  reason = reason or _powers(bare) or _factorials(bare)
  return "" if reason else clean.strip(" "), reason


def _ascii(text: str) -> tuple[str, str]:
  out = []
  for c in text:
    if c in _ASCII:
      c = _ASCII[c]
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


def _counted(bare: str, table: _Table) -> str:
  for what, n, why in table:
    find = re.compile(what)  # few match once, which search tells sooner
    if find.search(bare) and (n == 1 or len(find.findall(bare)) >= n):
      return why
  return ""


def _brackets(bare: str) -> str:
  r"""`\{` opens a set, and so counts as a bracket."""
  depth = braces = 0
  for bracket in re.findall(r"\\.|[(\[{)\]}]", bare):
    step = (bracket[-1] in "([{") - (bracket[-1] in ")]}")
    if bracket[0] == "\\" and bracket[-1] not in "{}":
      step = 0
    depth += step
    if bracket in "{}":
      braces += step
    if depth > _MAX_DEPTH:
      return f"brackets deeper than {_MAX_DEPTH}"
    if depth < 0 or braces < 0:
      return "unbalanced brackets"
  return "unbalanced brackets" if depth or braces else ""


def _powers(bare: str) -> str:
  powers = [match.end() for match in _POWER.finditer(bare)]
  if len(powers) > _MAX_POWERS:
    return f"more than {_MAX_POWERS} powers"
  for start in powers:
    exponent, end = _exponent(bare, start)
    if re.match(r"\s*(?:\^|!|\*\*)", bare[end:]):
      return "power of a power"
    if _POWER.search(exponent) or "!" in exponent:
      return "power in an exponent"
    numbers = [int(n) for n in _NUMBER.findall(exponent)]
    base = bare[: start - 1].rstrip("* ")[-80:]
    most = 40 if _BASE_IS_A_SUM.search(base) else _MAX_EXPONENT
    if max(numbers, default=0) > most or len(numbers) > 4:
      return "exponent too large"
  return ""


def _exponent(bare: str, start: int) -> tuple[str, int]:
  while bare[start : start + 1] == " ":
    start += 1
  if bare[start : start + 1] in ("{", "("):
    depth = 0
    for i in range(start, len(bare)):
      depth += (bare[i] in "{([") - (bare[i] in "})]")
      if depth == 0:
        return bare[start : i + 1], i + 1
    return bare[start:], len(bare)
  match = _BARE_EXPONENT.match(bare, start)
  end = match.end() if match else start
  if match and "\\" in match.group():  # `\frac{1}{2}`: its arguments too
    while bare[end : end + 1] == "{":
      end = _exponent(bare, end)[1]
  return bare[start:end], end


def _factorials(bare: str) -> str:
  if "!" not in bare and "\\" not in bare:
    return ""
  # `(n-1)!` may stay, for what is in the bracket is small.
  bare = _SMALL_FACTORIAL.sub(" ", bare)
  if re.search(r"![\s!]*!|[)\]}]\s*!|\d{5}\s*!", bare) or bare.count("!") > 3:
    return "factorial too large"
  if any(int(n) > _MAX_EXPONENT for n in re.findall(r"(\d+)\s*!", bare)):
    return "factorial too large"
  if re.search(r"[A-Za-z]{4}\s*!", bare):
    return "factorial of a word"
  for found in _BINOMIAL.finditer(bare):
    numbers = map(int, _NUMBER.findall(f"{found[1]} {found[2]}"))
    if not found[1] or max(numbers, default=0) > _MAX_EXPONENT:
      return "binomial too large"
  return "root too large" if re.search(r"\\sqrt\s*\[\s*\d{4}", bare) else ""
