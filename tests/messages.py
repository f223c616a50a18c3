"""Whether a message names what it must, however it is worded."""

import re


def mentions(message: str, pattern: str) -> bool:
  """Whether a line of a message holds every part of a pattern, in any order.

  Args:
    message: The text of an error, or what a command printed.
    pattern: Fields, values and key words, separated by " ... ".
  """
  return any(
    all(_holds(line, part) for part in pattern.split(" ... "))
    for line in message.splitlines()
  )


def _holds(message: str, part: str) -> bool:
  """Whether a part occurs and is not the piece of a longer word or number."""
  begin = r"(?<![\w])" if re.match(r"\w", part) else ""
  end = r"(?!\w|\.\d)" if re.search(r"\w$", part) else ""
  return re.search(begin + re.escape(part) + end, message) is not None
