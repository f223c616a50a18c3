"""A lock: one process at a time may use the folder of a run."""

import fcntl
import os
import pathlib

from brorl_jax import errors
from brorl_jax.errors import UserError

NAME = ".lock"  # file with the id of the process


class Lock:
  """The lock of a folder, held until it is closed or the process ends."""

  def __init__(self, path: pathlib.Path):
    self._path, self._new = path, not path.exists()
    self._file = path.open("a+")
    try:
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      self._file.seek(0)
      holder = self._file.read().strip()
      self._file.close()
      raise UserError(
        f"workdir {path.parent} is in use by process {holder}; wait for it, or "
        "choose another workdir"
      ) from None
    self._file.seek(0)
    self._before = self._file.read()
    self._write(f"{os.getpid()}\n")

  def _write(self, text: str) -> None:
    self._file.truncate(0)
    self._file.write(text)
    self._file.flush()

  def undo(self) -> None:
    """Restores the file, after a start that was refused."""
    if self._new:
      self._path.unlink()
    else:
      self._write(self._before)

  def close(self) -> None:
    self._file.close()

  def __enter__(self) -> "Lock":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()


def hold(workdir: pathlib.Path) -> Lock:
  """Creates the folder and takes its lock.

  Raises:
    UserError: The folder cannot be created, or another process has the lock.
  """
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    return Lock(workdir / NAME)
  except OSError as e:
    raise errors.of_system(
      e,
      f"workdir {workdir} cannot be written: {e}; nothing was started: fix "
      "this and run the same command again",
    ) from None
