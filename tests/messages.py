"""Whether a message names what it must, however it is worded."""

import contextlib
import re
import signal
from collections.abc import Iterator

import pytest


def mentions(message: str, pattern: str) -> bool:
  """Whether one line holds every part of a pattern, in any order.

  The parts are fields, values and key words, separated by " ... ".
  """
  return any(all(_holds(line, part) for part in pattern.split(" ... "))
    for line in message.splitlines())  # fmt: skip


@contextlib.contextmanager
def refuses(kind: type[Exception], pattern: str) -> Iterator[None]:
  """What is done here ends with an error of one line that mentions this."""
  with pytest.raises(kind) as e:
    yield
  said = str(e.value)
  assert mentions(said, pattern), said
  assert "\n" not in said


@contextlib.contextmanager
def interrupted(seconds: float) -> Iterator[None]:
  """What is done here is ended by a KeyboardInterrupt after that time."""
  before = signal.signal(signal.SIGALRM, signal.default_int_handler)
  try:
    signal.setitimer(signal.ITIMER_REAL, seconds)
    with pytest.raises(KeyboardInterrupt):
      yield
  finally:
    signal.signal(signal.SIGALRM, before)


def _holds(message: str, part: str) -> bool:
  """Whether a part occurs and is not the piece of a longer word or number."""
  begin = r"(?<![\w])" if re.match(r"\w", part) else ""
  end = r"(?!\w|\.\d)" if re.search(r"\w$", part) else ""
  return re.search(begin + re.escape(part) + end, message) is not None
