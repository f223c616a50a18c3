"""Errors that end a command in one line, and the exit statuses that go with it.

Status 70 and 75 are in `processes`: another process was lost, a signal.
"""

import contextlib
import errno
from collections.abc import Iterator

# The user can fix it, and the same command would fail again before.
REFUSED = 2
# The numbers of a run ended it; see "When a step goes wrong" in runs/README.md.
NUMBERS = 3
# EX_IOERR of sysexits.h: files could not be written or read. Once
# the storage works again, the same command resumes.
STORAGE = 74
# What many of them advise.
AGAIN = "fix this and run the same command again"

# Numbers of a storage that fails, whatever file it is. Others, such as ENOENT,
# may be a name that the user wrote.
_FAULTS = frozenset(
  getattr(errno, name)
  for name in "EDQUOT EFBIG EIO EMFILE ENFILE ENOSPC EROFS ESTALE".split()
)


def printable(text: str, also: str = "\n\t\xa0\u3000") -> str:
  """The text with escapes for what is not printable, and no blank in `also`."""
  shown = lambda c: c if c.isprintable() or c in also else ascii(c)[1:-1]
  return text if text.isprintable() else "".join(map(shown, text))


class UserError(Exception):
  """Something the user can fix; the message is one line and names the fix.

  It may quote names and values of files: what is not printable in them, such as
  the end of a line or a terminal's control characters, is escaped.
  """

  status = REFUSED  # exit status of the process

  def __init__(self, text: str):
    super().__init__(printable(text, ""))


class NumbersError(UserError):
  """A run cannot go on with the numbers that it has."""

  status = NUMBERS


class StorageError(UserError):
  """A file of the run could not be written or read."""

  status = STORAGE


@contextlib.contextmanager
def as_user_error(*kinds: type[Exception]) -> Iterator[None]:
  """Errors of these kinds, which say what is wrong, end the command."""
  try:
    yield
  except kinds as e:
    raise UserError(str(e)) from None


def first_line(error: BaseException) -> str:
  """What an error of a library says first, or its kind if it says nothing."""
  return (str(error).splitlines() or [type(error).__name__])[0]


def of_system(error: OSError, text: str) -> UserError:
  """The error, with this text, of a command that a system error ends."""
  return (StorageError if status(error) == STORAGE else UserError)(text)


def status(error: OSError) -> int:
  """The exit status of a command that this error of the system ends."""
  return STORAGE if error.errno in _FAULTS else REFUSED
