r"""Which part of a response is its answer: the last complete box.

Linear in the response: one pass of a regular expression that cannot go back.
"""

from __future__ import annotations

import re

# What may stand around an answer; str.strip would take control characters too.
_SPACES = " \t\r\n"
_END, _START = "</think>", "<think>"
# An escaped character (`\{`, `\\`) is one item, so its brace does not count.
_ITEM = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
# Boxes around boxes that are taken off; more of them are refused later.
_MAX_NESTED = 4


def boxed(response: str) -> str | None:
  r"""What stands in the last complete `\boxed{...}` after the thinking.

  Only what follows the last `</think>` counts, and where a `<think>` comes
  after it, or there is one and no `</think>`, the response is still thinking
  and has no answer. Of boxes in boxes the outer one is the answer;
  `\boxed{\boxed{6}}` says 6. A box that is never closed is none, so what came
  before it counts; `\boxed 6`, `\fbox{6}` and an answer without a box are none.

  Args:
    response: Everything the policy wrote.

  Returns:
    The text in the box, without outer spaces, or None.
  """
  tail = response.rpartition(_END)[2]
  if _START in tail:
    return None
  found = None
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
        found = (start, item.start())
    elif len(text) > 2:
      stack.append(item.end())
      boxes += 1
  if found is None:
    return None
  return unboxed(tail[found[0] : found[1]])


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
