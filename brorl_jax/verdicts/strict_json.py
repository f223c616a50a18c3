"""One JSON object per line, and its texts, read strictly.

`parse` refuses what `json.loads` accepts or fails on: repeated keys, NaN, lone
surrogates, deep nesting. The functions after it check values and convert none.
"""

import collections
import difflib
import json
import math
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

MAX_LINE = 1_000_000  # bytes
MAX_DEPTH = 16
_LONGEST = 500  # characters of an error
_DEEP = f"nested deeper than {MAX_DEPTH} levels; flatten it"

# Characters that a person does not see, or sees in another order than the
# policy: control characters except line ends and tab; soft hyphens, zero-width
# spaces, direction marks, other format marks and tags. The joiners U+200C and
# U+200D are allowed: Persian, Hindi and emoji need them.
_HIDDEN = re.compile(
  "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u202a-"
  "\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]|\r(?!\n)"
)
# Text that tokenizers read as control tokens: with these a prompt could end its
# turn and begin another. <|name|> covers most model families; DeepSeek writes
# it with full-width bars. At least two characters: <|x|> is mathematics.
_CONTROL = re.compile(
  r"<[|\uff5c][^\s<>|\uff5c]{2,64}[|\uff5c]>"
  r"|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\]"
  r"|<</?SYS>>|</s>|<(?:start|end)_of_turn>|<(?:bos|eos|pad|unk)>"
)


class Refused(ValueError):
  """An error in one record: a field, or "", and what it is and must be."""

  def __init__(self, field: str, why: str):
    if len(why) > _LONGEST:  # a value of a megabyte; the remedy is at the end
      why = f"{why[: _LONGEST - 150]}...{why[-150:]}"
    super().__init__(f"{field}: {why}" if field else why)
    self.field, self.why = field, why


def show(value: Any) -> str:
  """A value for an error message: one line, at most 60 characters."""
  text = ascii(value)
  return text if len(text) <= 60 else text[:57] + "..."


def kind(value: Any) -> str:
  """The type of a JSON value, or the value itself if it is short."""
  if isinstance(value, str):
    return "a text"
  if isinstance(value, list | dict):
    return "a list" if isinstance(value, list) else "an object"
  return show(json.dumps(value))[1:-1]


def alike(name: str, known: Collection[str]) -> list[str]:
  """The name that was meant, if any: gspo and grpo, 0.75, are two things."""
  swapped = [one for one in known if sorted(one) == sorted(name)]
  return swapped or difflib.get_close_matches(name, known, 1, cutoff=0.8)


def did_you_mean(
  name: object,
  known: Iterable[str],
  otherwise: str,
  quoted: Callable[[str], str] = str,
) -> str:
  """A remedy: the known name nearest to an unknown one, if one is near."""
  close = alike(str(name), [*known])
  return f"did you mean {quoted(close[0])}?" if close else otherwise


def parse(line: bytes) -> dict[str, Any]:
  """The one JSON object of a line of at most `MAX_LINE` bytes, in linear time.

  Strict: UTF-8 without a byte order mark, every key once, at most `MAX_DEPTH`
  levels. A value with NaN, Infinity (or 1e999) or a lone surrogate is replaced
  by its error, for whoever reads it.
  """
  try:
    text = line.decode()
  except UnicodeDecodeError as error:
    byte = f"byte {error.start + 1} is 0x{line[error.start]:02x}"
    raise Refused("", f"{byte}, not UTF-8; save it as UTF-8") from None
  if text.startswith("\ufeff"):
    raise Refused("", "begins with a byte order mark; save without it")
  if not text.strip():
    raise Refused("", "blank; remove it")
  try:
    record = json.loads(text, object_pairs_hook=_unique)
  except json.JSONDecodeError as error:
    # A missing line end causes "Extra data".
    why = f"not one JSON object: {error.msg} at character {error.pos + 1}"
    raise Refused("", f"{why}; write one object per line") from None
  except Refused:
    raise
  except RecursionError:
    raise Refused("", _DEEP) from None
  except ValueError as error:  # an integer with too many digits for int()
    raise Refused("", f"not JSON: {show(str(error))}") from None
  if not isinstance(record, dict):
    raise Refused("", f"{kind(record)}, not a JSON object")
  for name, value in record.items():
    _refuse_values(name, _name(name), 1)
    try:
      _refuse_values(value, _name(name), MAX_DEPTH - 1)
    except Refused as refused:
      if not refused.field:
        raise
      record[name] = refused
  return record


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  record = dict(pairs)
  if len(record) < len(pairs):
    counts = collections.Counter(name for name, _ in pairs)
    twice, count = counts.most_common(1)[0]
    raise Refused(_name(twice), f"occurs {count} times; keep one")
  return record


def _refuse_values(value: Any, field: str, levels: int) -> None:
  """Refuses what JSON texts hold but JSON does not; `levels` may follow."""
  if isinstance(value, float) and not math.isfinite(value):
    raise Refused(field, f"{kind(value)}; use a finite number")
  if isinstance(value, str):
    try:
      value.encode()
    except UnicodeEncodeError as error:
      lone = f"the lone surrogate U+{ord(value[error.start]):04X}; remove it"
      raise Refused(field, f"character {error.start + 1} is {lone}") from None
  if isinstance(value, list | dict) and not levels:
    raise Refused("", _DEEP)
  if isinstance(value, list):
    for i, item in enumerate(value):
      _refuse_values(item, f"{field}[{i}]", levels - 1)
  if isinstance(value, dict):
    for name, item in value.items():
      inner = f"{field}.{_name(name)}" if field else _name(name)
      _refuse_values(name, inner, levels)
      _refuse_values(item, inner, levels - 1)


def _name(key: str) -> str:
  return key if key.isidentifier() and len(key) <= 60 else show(key)


def text(value: Any, field: str) -> str:
  """Refuses no text, an empty one, control tokens and invisible characters."""
  if not isinstance(value, str):
    raise Refused(field, f"{kind(value)}; write it as text")
  if not value.strip():
    raise Refused(field, "empty; write a text")
  if hidden := _HIDDEN.search(value):
    which = f"character {hidden.start() + 1} is U+{ord(hidden[0]):04X}"
    raise Refused(field, f"{which}, which is invisible; remove it")
  if control := _CONTROL.search(value):
    why = "is a control token of chat templates; remove it"
    raise Refused(field, f"{show(control[0])} {why}")
  return value


def mapping(value: Any, field: str) -> dict[str, Any]:
  """Checks that a value is a JSON object; raises Refused."""
  if not isinstance(value, dict):
    raise Refused(field, f"{show(value)}; it must be an object")
  return value


def answer(value: Any, field: str = "answer") -> str:
  """An answer: a text, or an integer, which becomes a text."""
  if isinstance(value, int) and not isinstance(value, bool):
    return str(value)
  return text(value, field)
