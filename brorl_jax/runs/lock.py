"""A lock: one process at a time may use the folder of a run."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator

from brorl_jax import errors
from brorl_jax.errors import UserError

NAME = ".lock"  # file with the id of the process


@contextlib.contextmanager
def hold(workdir: pathlib.Path) -> Iterator[None]:
  """Creates the folder and has its lock, at most until the process ends.

  Raises:
    UserError: The folder cannot be written, or another process has the lock.
  """
  with contextlib.ExitStack() as stack:
    try:
      workdir.mkdir(parents=True, exist_ok=True)
      file = stack.enter_context((workdir / NAME).open("a+"))
      _take(file.fileno(), workdir)
      file.truncate(0)
      file.write(f"{os.getpid()}\n")
      file.flush()
    except OSError as e:
      raise errors.of_system(
        e,
        f"workdir {workdir} cannot be written: {e}; nothing was started: fix "
        "this and run the same command again",
      ) from None
    yield


def _take(file: int, workdir: pathlib.Path) -> None:
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError:
    holder = (workdir / NAME).read_text().strip()
    raise UserError(
      f"workdir {workdir} is in use by process {holder}; wait for it, or "
      "choose another workdir"
    ) from None
