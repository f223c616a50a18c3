"""One process at a time works in the folder of a run."""

import fcntl
import os
import pathlib

from brorl_jax.main.settings import UserError

NAME = ".lock"  # of the file, which names the process


class Lock:
  """Keeps other processes out of a folder while this one lives."""

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
        f"workdir {path.parent} is in use by process {holder}"
      ) from None
    self._file.seek(0)
    self._before = self._file.read()
    self._write(f"{os.getpid()}\n")

  def _write(self, text: str) -> None:
    self._file.truncate(0)
    self._file.write(text)
    self._file.flush()

  def undo(self) -> None:
    """Leaves the file as it was found, for a start that was refused."""
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
  """Makes the folder and keeps other processes out of it while this one lives.

  Raises:
    UserError: It cannot be made, or another process holds it.
  """
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    return Lock(workdir / NAME)
  except OSError as e:
    raise UserError(f"workdir {workdir} cannot be written: {e}") from None
