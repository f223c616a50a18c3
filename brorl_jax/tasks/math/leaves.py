r"""Leaves of an answer: an expression and its unit.

leaf(tokens(r"1\text{ cm}"))   # Leaf("1", 1, "cm")
"""

from __future__ import annotations

from collections.abc import Sequence

from brorl_jax.tasks.math import exact, reader, units
from brorl_jax.tasks.math.nodes import Items, Leaf, Node
from brorl_jax.tasks.math.tokens import Token, Unreadable


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
    tree = reader.read(bare)
  except Unreadable as error:
    text = " ".join(token.text for token in part)
    return Leaf(text, None, why=str(error))
  digits = [token for token in bare if token.text not in "+-"]
  step = None
  based = unit.startswith("(base")  # its last digit is not a tenth
  if len(digits) == 1 and digits[0].kind == "number" and not based:
    step = exact.decimal_step(digits[0].text)
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
    canon = units.canon(" ".join(token.text for token in words))
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
      function = any(reader.is_function(t) for t in texts)
      if not inside and not function:
        return bare[: -len(form)], " ".join(["degree", unit]).strip()
  return bare, unit
