"""Our own checks of answers, for tasks whose scorer cannot be used.

Those scorers execute the answer, ignore text around it, raise, or accept near
misses. These are exact, and take time linear in the length of the answer.
"""

import ast
import itertools
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

Entry = Mapping[str, Any]
# Whether an answer is right, or why not; raises only if the entry is damaged.
Check = Callable[[str, Entry], bool | str]

_TIMES = "\N{MULTIPLICATION SIGN}"
_DECIMAL = r"\d{1,20}(?:\.\d{1,20})?"


# Arithmetic without executing it, unlike the library's sympy.parse_expr.
_OPERATORS: Mapping[type, Callable[..., Any]] = {
  **{ast.Add: operator.add, ast.Sub: operator.sub, ast.USub: operator.neg},
  **{ast.Mult: operator.mul, ast.Div: operator.truediv},
}


def value(text: str) -> Fraction | None:
  """What an expression of whole numbers, + - * / and ( ) comes to.

  A minus may stand at the start and after a "(", as in -(2 - 5), nowhere else
  in front of a number. Division is exact; None if it divides by zero, or is no
  such expression. The caller limits the length, and so the depth.
  """
  text = re.sub(r"\b0+(?=\d)", "", " ".join(text.split()))  # 07 is 7
  if re.search(r"[^0-9+*/() -]|[-+*/] ?-", text):
    return None
  try:
    return _value(ast.parse(text, mode="eval").body)
  except (AttributeError, KeyError, SyntaxError, ZeroDivisionError):
    return None


def _value(node: Any) -> Fraction:
  if isinstance(node, ast.UnaryOp):
    return _OPERATORS[type(node.op)](_value(node.operand))
  if isinstance(node, ast.BinOp):
    return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
  return Fraction(node.value)


_NUMBER = r"\d{1,20}(?:\.\d{1,10})?"
_FACTOR = (
  rf"(?:{_NUMBER}|\([+-]?\d{{1,20}}/\d{{1,20}}\)|[A-Za-z](?:\*\*\d{{1,3}})?)"
)
_TERM = rf"{_FACTOR}(?:\*{_FACTOR}|/\d{{1,20}})*"
_SUM = re.compile(rf"[+-]?{_TERM}(?:[+-]{_TERM})*")
_SIGNED = re.compile(rf"([+-]?)({_TERM})")
_FACTORS = re.compile(rf"([*/]?)({_FACTOR})")

# A power of each variable.
Monomial = tuple[tuple[str, int], ...]
Term = tuple[Monomial, Fraction, bool]


def terms(text: str) -> list[Term] | None:
  """Parses a polynomial that is written as a sum: -2*x**6/3 + 4*x*y + C.

    sum    = [sign] term {sign term}
    term   = factor {"*" factor | "/" integer}
    factor = number | "(" [sign] integer "/" integer ")" | letter ["**" integer]

  For each term the powers of its letters, its coefficient, and whether it is
  simplified (at most one number, no letter twice); None if it is no such sum.
  """
  if re.search(r"[\w.]\s+[\w.]|\*\s+\*", text):
    return None  # "1 2" is not 12
  dense = "".join(text.split())
  # fullmatch first, so that the second pass finds only terms.
  if not dense.isascii() or not _SUM.fullmatch(dense):
    return None
  try:
    return [_term(sign, product) for sign, product in _SIGNED.findall(dense)]
  except ZeroDivisionError:
    return None


def _term(sign: str, product: str) -> Term:
  coefficient = Fraction(-1 if sign == "-" else 1)
  powers: dict[str, int] = {}
  letters = numbers = 0
  for before, factor in _FACTORS.findall(product):
    if factor[0].isalpha():
      powers[factor[0]] = powers.get(factor[0], 0) + int(factor[3:] or 1)
      letters += 1
      continue
    number = Fraction(factor.strip("()"))
    coefficient *= 1 / number if before == "/" else number
    numbers += 1
  simplified = letters == len(powers) and numbers <= 1
  monomial = tuple(sorted((v, p) for v, p in powers.items() if p))
  return monomial, coefficient, simplified


# What the puzzles' own answers hold, and what else a table of integrals does.
_KNOWN = "C E pi exp log sqrt sin cos tan asin acos atan sinh cosh tanh"
_NAMES = frozenset(_KNOWN.split())


def refuse_integral(text: str, variable: str) -> str:
  """Why sympy must not parse a text as an antiderivative; "" if it may.

  Allowed are numbers, a few functions, + - * / ** ( ), the variable and C. None
  of these can execute anything, and powers are small enough to expand.
  """
  if len(text) > 300 or not text.isascii():
    return "at most 300 characters, all ASCII"
  if re.search(r"[A-Za-z]\s*[\d.]|[\d.]\s*[A-Za-z]", text):
    return "a name next to a digit or point"  # 0x10, 1j, and sympy's E1(x)
  depth = 0
  for token in re.findall(r"\d+(?:\.\d+)?|[A-Za-z]+|\*\*|\S", text):
    depth += (token == "(") - (token == ")")
    if not 0 <= depth <= 8:
      return "parentheses unbalanced or deeper than 8"
    if token[0].isalpha():
      if token not in _NAMES and token != variable:
        return f"the name {token[:20]}"
    elif len(token) > 8 or not re.fullmatch(r"[\d.]+|\*\*|[-+*/()]", token):
      return f"the text {token[:20]}"
  # E may have any power: sympy does not expand it.
  small = r"(?:-?(?:1?\d|20)(?![\d.])|\(-?\d\d?(?:/\d\d?)?\))(?!\*\*)"
  packed = "".join(text.split())
  if re.search(rf"(?<!E)\*\*(?!{small})", packed):
    return "a power that is not a number up to 20"
  # sympy expands powers of sums. It does not expand nested functions, but their
  # derivatives have one factor per level.
  if re.search(r"\)\*\*(?!\(|[23](?!\d))", packed):
    return "a power of a bracket above 3"
  if packed.count(")**") > 2:
    return "more than two powers of brackets"
  if len(re.findall(r"[a-z]{2,}\(", packed)) > 6:
    return "more than 6 functions"
  brackets: list[bool] = []  # of the open ones, whether a function's
  for match in re.finditer(r"([A-Za-z]{2,})?\(|\)", packed):
    if match[0] == ")":
      brackets = brackets[:-1]
    elif match[1] and True in brackets:
      return "functions in functions"
    else:
      brackets.append(match[1] is not None)
  return ""


# One right value, in one form or in several.


def _same(form: Callable[[str], Any]) -> Check:
  return lambda answer, entry: form(answer) == form(entry["answer"])


def _rows(text: str) -> list[list[str]]:
  return [row for line in text.split("\n") if (row := line.split())]


def _list_parts(text: str) -> list[str]:
  """A list without its white space, with one kind of quotes."""
  return re.findall(r"[\[\],]|[^\[\],\s]+", text.replace('"', "'"))


def _same_word(answer: str, entry: Entry) -> bool:
  # ASCII only, because lower() turns a Kelvin sign into a k.
  return answer.isascii() and answer.lower() == entry["answer"].lower()


def _same_complex(answer: str, entry: Entry) -> bool | str:
  dense = re.sub(r"\s*([+-])\s*", r"\1", answer)
  match = re.fullmatch(
    rf"(?a)([+-]?{_DECIMAL}(?![\d.]*i))?(?:([+-]?)({_DECIMAL})?(i))?", dense
  )
  if not match or not dense or (match[1] and match[4] and not match[2]):
    return "refused: not a complex number such as 2.0 - 3.5i"
  imaginary = Fraction(match[3] or 1) if match[4] else Fraction(0)
  sign = -1 if match[2] == "-" else 1
  right = list(entry["metadata"]["result"])
  return [Fraction(match[1] or 0), sign * imaginary] == right


def _same_candidate(answer: str, entry: Entry) -> bool:
  metadata = entry["metadata"]
  value = lambda text: Decimal(text.replace(",", ""))
  both = metadata["candidates"], metadata["formatted_candidates"]
  each = zip(*both, strict=True)
  right = {value(text) for x, text in each if x == metadata["solution"]}
  return value(answer) in {Decimal(entry["answer"]), *right}


def _same_partitions(answer: str, entry: Entry) -> bool:
  """All ways to cut the string, each once, in any order."""
  # Nested exactly twice, so json.loads cannot overflow the stack.
  return sorted(json.loads(answer)) == sorted(entry["metadata"]["solution"])


def _expanded(answer: str, entry: Entry) -> bool | str:
  """The expanded product; the unexpanded question would be equal as well."""
  found = terms(answer)
  if found is None:
    return "refused: not a sum of terms such as -3*x**2*y"
  right = {m: c for m, c, _ in terms(entry["answer"]) or () if c}
  if {m: c for m, c, _ in found if c} != right:
    return False
  simplified = all(simple for _, _, simple in found)
  if not simplified or len(found) > max(1, len(right)):
    return "not simplified"
  return True


def _antiderivative(answer: str, entry: Entry) -> bool | str:
  variable = entry["metadata"]["variable"]
  found, right = terms(answer), terms(entry["answer"])
  if found is None:
    return "refused: not a sum of terms such as -3*x**2/5"
  if right is None:
    raise ValueError(f"entry.answer = {entry['answer']!r} is not a sum")
  letters = {letter for monomial, _, _ in found for letter, _ in monomial}
  if not letters <= {variable, "C"}:
    return "refused: a letter other than the variable and C"
  return _varying(found, variable) == _varying(right, variable)


def _varying(sum_: list[Term], variable: str) -> dict[Monomial, Fraction]:
  total: dict[Monomial, Fraction] = {}
  for monomial, coefficient, _ in sum_:
    if variable in dict(monomial):
      total[monomial] = total.get(monomial, Fraction(0)) + coefficient
  return {monomial: c for monomial, c in total.items() if c}


# Puzzles with many right answers.


def _reaches(
  answer: str, numbers: Sequence[int], target: int, operators: str
) -> bool | str:
  """Whether an expression with every number once equals the target."""
  if len(answer) > 200 or not re.fullmatch(r"[0-9+\-*/() ]+", answer):
    return "refused: not up to 200 digits, + - * / ( ) and spaces"
  # Checked first, because it bounds the size of the computation.
  if sorted(map(int, re.findall(r"\d+", answer))) != sorted(numbers):
    return "wrong numbers"
  if not set(answer) & set("+-*/") <= set(operators):
    return f"wrong operators: use {operators}"
  result = value(answer)
  return "refused: cannot be evaluated" if result is None else result == target


def _countdown(answer: str, entry: Entry) -> bool | str:
  metadata = entry["metadata"]
  return _reaches(answer, metadata["numbers"], metadata["target"], "+-*/")


def _puzzle24(answer: str, entry: Entry) -> bool | str:
  # Only the question lists the operators.
  listed = re.search(r"operators ([-+*/, ]+)\.", entry.get("question") or "")
  operators = "".join(o for o in "+-*/" if not listed or o in listed[1])
  return _reaches(answer, entry["metadata"]["numbers"], 24, operators)


def _coloring(answer: str, entry: Entry) -> bool:
  """A color for every vertex, another one at the other end of each edge."""
  puzzle = entry["metadata"]["puzzle"]
  pairs = re.findall(r'"(\d+)"\s*:\s*(\d+)', answer)
  color = {int(vertex): int(value) for vertex, value in pairs}
  return (
    sorted(int(vertex) for vertex, _ in pairs) == sorted(puzzle["vertices"])
    and {*color.values()} <= {*puzzle["color_options"]}
    and all(color[a] != color[b] for a, b in puzzle["edges"])
  )


def _hanoi(answer: str, entry: Entry) -> bool | str:
  """Legal moves that solve it, at most as many as in the stored answer."""
  metadata = entry["metadata"]
  pegs: dict[int, list[int]] = {i + 1: [] for i in range(metadata["num_pegs"])}
  tower = list(range(metadata["num_disks"], 0, -1))
  pegs[metadata["start_peg"]] = list(tower)
  limit, target = metadata["solution_length"], metadata["target_peg"]
  lines = [line for line in answer.split("\n") if line.strip()]
  for line in lines:
    move = re.fullmatch(
      r"(?a)\s*Move disk (\d{1,3}) from Peg (\d{1,3}) to Peg (\d{1,3})\s*", line
    )
    if not move:
      return "refused: a line that is not a move"
    disk, start, end = map(int, move.groups())
    if start not in pegs or end not in pegs or pegs[start][-1:] != [disk]:
      return "illegal move"
    pegs[start].pop()
    if pegs[end] and pegs[end][-1] < disk:
      return "illegal move"
    pegs[end].append(disk)
  return "too many moves" if len(lines) > limit else pegs[target] == tower


def _survo(answer: str, entry: Entry) -> bool | str:
  """Accepts any filling: one puzzle in sixty has two."""
  metadata = entry["metadata"]
  puzzle = metadata["puzzle"]
  candidates = sorted(metadata["candidate_numbers"])
  rows = _rows(answer)
  if not all(re.fullmatch(r"(?a)\d{1,9}", w) for row in rows for w in row):
    return "refused: not rows of numbers"
  grid = [[*map(int, row)] for row in rows]
  if [len(row) for row in grid] != [len(row) for row in puzzle]:
    return False
  flat = itertools.chain.from_iterable
  cells = [*zip(flat(puzzle), flat(grid), strict=True)]
  kept = all(given in (0, filled) for given, filled in cells)
  filled = sorted(filled for given, filled in cells if given == 0)
  lines = (*grid, *zip(*grid, strict=True))
  sums = all(sum(line[:-1]) == line[-1] for line in lines)
  return kept and filled == candidates and sums


def _each(tasks: str, check: Check) -> dict[str, Check]:
  return dict.fromkeys(tasks.split(), check)


CHECKS: Mapping[str, Check] = {
  **_each("bf string_insertion", _same(str)),
  **_each("arc_agi binary_matrix rearc spiral_matrix", _same(_rows)),
  **_each("game_of_life list_functions number_sorting", _same(_list_parts)),
  **_each("calendar_arithmetic figlet_font game_of_life_halting", _same_word),
  "bitwise_arithmetic": _same(lambda text: int(text, 16)),
  "complex_arithmetic": _same_complex,
  "countdown": _countdown,
  "graph_color": _coloring,
  "gsm_symbolic": _same(Fraction),
  "n_queens": lambda answer, entry: (
    _rows(answer) in map(_rows, entry["metadata"]["valid_answers"])
  ),
  "number_format": _same_candidate,
  "palindrome_partitioning": _same_partitions,
  "polynomial_multiplication": _expanded,
  "pool_matrix": _same(lambda text: [[*map(Fraction, r)] for r in _rows(text)]),
  "prime_factorization": _same(lambda x: sorted(map(int, x.split(_TIMES)))),
  "puzzle24": _puzzle24,
  "simple_integration": _antiderivative,
  "survo": _survo,
  "tower_of_hanoi": _hanoi,
}

_GROUPED = r"\d{1,3}(?:,\d{3})+(?:\.\d{1,20})?"
_REAL = rf"(?a:[+-]?{_DECIMAL})"
_COLOR = r'"\d{1,9}"\s*:\s*\d{1,9}'
_MOVE = r'"(?:(?:fill|empty) [A-Z]|pour [A-Z]->[A-Z])"'
_COMMA, _LINE = r"\s*,\s*", r"[ \t]*\n[ \t]*"
_several = lambda one, between: f"{one}(?:{between}{one})*"
_listed = lambda one: rf"\[\s*{_several(one, _COMMA)}\s*\]"
_HEXADECIMAL = r"[+-]?0[xX][0-9a-fA-F]+"
_COLORS = rf"(?a)\{{\s*{_several(_COLOR, _COMMA)}\s*\}}"
_WRITTEN = rf"(?a)[+-]?(?:{_GROUPED}|{_DECIMAL}(?:[eE][+-]?\d{{1,3}})?)"
_WORDS = _listed('"[a-z]+"')
_PRIMES = "(?a)" + _several(r"\d{1,20}", rf"\s*{_TIMES}\s*")

# Pattern and name of the forms of answers, for our checks and for scorers that
# are sound but ignore extra text. An answer of another form is refused.
FORMS: Mapping[str, tuple[str, str]] = {
  "bitwise_arithmetic": (_HEXADECIMAL, "a hexadecimal number such as -0x1f"),
  "graph_color": (_COLORS, "a JSON object of vertices and colors"),
  "gsm_symbolic": (rf"(?a)[+-]?{_DECIMAL}", "a number such as -12.5"),
  "number_format": (_WRITTEN, "a number such as -1,234.5 or 1.2e+3"),
  "palindrome_partitioning": (_listed(_WORDS), "a list of lists of letters"),
  "prime_factorization": (_PRIMES, f"numbers joined by {_TIMES}"),
  "jugs": (_listed(_MOVE), "a JSON list of moves"),
  "kakurasu": (_several(_several("[01]", r"[ \t]+"), _LINE), "rows of 0 and 1"),
  "pool_matrix": (_several(_REAL, r"\s+"), "rows of numbers"),
  "propositional_logic": (
    "[A-Z\u2228\u2227\u2192\u2194\u00ac() ]+",
    "a formula of variables such as \u00ac(P \u2227 Q)",
  ),
  "quantum_lock": (_several("[ABC]", r"\s*→\s*"), "letters and arrows"),
  "rubiks_cube": (_several("[LRUDFB]'?2?", r"\s+"), "moves such as U R' F"),
  "sokoban": (r"[LDUR]+", "the letters L, D, U and R"),
}
