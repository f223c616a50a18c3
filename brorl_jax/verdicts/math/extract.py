r"""Extracts the answer of a response: the last complete box.

It takes linear time: one pass of a regular expression without backtracking.
"""

from __future__ import annotations

import re

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
