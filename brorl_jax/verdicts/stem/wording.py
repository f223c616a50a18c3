"""Compares short answers in words, formulae or symbols by spelling."""

# ruff: noqa: RUF001 (look-alikes are what this is about)
from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterator

_GREEK = dict(
  zip(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi"
    " omicron pi rho sigma tau upsilon phi chi psi omega".split(),
    "αβγδεζηθικλμνξοπρστυφχψω",
    strict=True,
  )
)
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
ELEMENTS = frozenset(
  """
  H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu
  Zn Ga Ge As Se Br Kr Rb Sr Y Zr Nb Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba
  La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu Hf Ta W Re Os Ir Pt Au Hg Tl Pb
  Bi Po At Rn Fr Ra Ac Th Pa U Np Pu Am Cm Bk Cf Es Fm Md No Lr Rf Db Sg Bh Hs
  Mt Ds Rg Cn Nh Fl Mc Lv Ts Og
  """.split()
)


def plain(text: str) -> str:
  r"""The text without LaTeX and typography, as it could be typed.

  Commands for letters, signs and upright text become what they show, other
  commands stay. Raised characters follow a "^", lowered ones nothing, in
  Unicode and in LaTeX: "10⁻³" and "10^{-3}" are "10^-3", "H₂O" and "H_2O" are
  "H2O". Dashes are "-", and characters that do not show are dropped.
  """
  text = re.sub(r"\\[,;!:> ]|~|&nbsp;", " ", text)
  text = re.sub(r"\$|\*\*|\\[()\[\]]", "", text).replace(r"\%", "%")
  text = re.sub(
    r"\\([A-Za-z]+)(?![A-Za-z])(?!\s*\{)",
    lambda m: _COMMANDS.get(m[1], m[0]),
    text,
  )
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
      shown = unicodedata.normalize("NFKC", _TYPED.get(c, c))
      yield shown.translate(_DASHES)


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
  text = re.sub(
    r"[^\s,;:=<>/*\\]+",
    lambda m: m[0] if is_formula(m[0]) else re.sub(r"[^\W\d_]+", lower, m[0]),
    text,
  )
  return tuple(re.findall(r"\d+(?:\.\d+)?|\.\d+|[^\W\d_]+|[^\s\w.,;:]", text))


def same(a: str, b: str) -> bool:
  """Whether two texts have the same key.

  A charge and a hybrid orbital may do without its "^": Fe3+, sp3.
  """
  first, second = key(a), key(b)
  if first == second:
    return True
  if ("^" in first) == ("^" in second) or not is_formula(unwrapped(a)):
    return False
  return [t for t in first if t != "^"] == [t for t in second if t != "^"]


def is_formula(word: str) -> bool:
  """Whether a word is several elements, or one with a number, or an orbital.

  CO, Fe2, OH^- and sp3 are; Co, DNA and co2 are not.
  """
  if _HYBRID.fullmatch(word):
    return True
  if not re.fullmatch(r"(?:[A-Z][a-z]?|[0-9()\[\]^+-])+", word):
    return False
  symbols = re.findall(r"[A-Z][a-z]?", word)
  several = len(symbols) > 1 or (symbols and re.search(r"\d|\^", word))
  return bool(several) and ELEMENTS.issuperset(symbols)
