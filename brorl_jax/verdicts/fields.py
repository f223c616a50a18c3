"""Reads the values of fields strictly, without converting types."""

from __future__ import annotations

import re
from typing import Any

from brorl_jax.verdicts.strict_json import Refused, kind, show

# Characters that a person does not see, or sees in another order than the
# policy: control characters except newline and tab; soft hyphens, zero-width
# spaces, direction marks, other format marks and tags. The joiners U+200C and
# U+200D are allowed: Persian, Hindi and emoji need them.
_HIDDEN = re.compile(
  "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f"
  "\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
# Text that tokenizers read as control tokens: with these a prompt could end its
# turn and begin another. <|name|> covers most model families; DeepSeek writes
# it with full-width bars. At least two characters: <|x|> is mathematics.
_CONTROL = re.compile(
  r"<[|\uff5c][^\s<>|\uff5c]{2,64}[|\uff5c]>"
  r"|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\]"
  r"|<</?SYS>>|</s>|<(?:start|end)_of_turn>|<(?:bos|eos|pad|unk)>"
)


def text(value: Any, field: str) -> str:
  """Checks a text that the policy or a person reads.

  Raises:
    Refused: It is not a text, empty, or has control tokens or invisible
      characters.
  """
  if not isinstance(value, str):
    raise Refused(field, f"{kind(value)}; write it as text")
  if not value.strip():
    raise Refused(field, "empty; write a text")
  hidden = _HIDDEN.search(value)
  if hidden:
    raise Refused(
      field,
      f"character {hidden.start() + 1} is U+{ord(hidden[0]):04X}, which is"
      " invisible; remove it",
    )
  control = _CONTROL.search(value)
  if control:
    raise Refused(
      field,
      f"{show(control[0])} is a control token of chat templates; remove it",
    )
  return value


def mapping(value: Any, field: str) -> dict[str, Any]:
  """Checks that a value is a JSON object; raises Refused."""
  if not isinstance(value, dict):
    raise Refused(field, f"{show(value)}; it must be an object")
  return value


def answer(value: Any, asked: str) -> str:
  """The field "answer": a text, or an integer, which becomes a text."""
  del asked
  if isinstance(value, int) and not isinstance(value, bool):
    return str(value)
  if not isinstance(value, str):
    raise Refused("answer", f"{kind(value)}; write it as text")
  return text(value, "answer")
