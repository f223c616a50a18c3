"""Checkpoints by orbax: asynchronous, atomic, and verified.

A step on disk is whole or it is not there (orbax commits by a rename). That
does not protect from damage afterwards, and one flipped bit restores a wrong
state without a word; so each step also holds a digest of every array. A step
is read back and compared before an older one is deleted, and compared again
when a run goes on from it. One that does not match is set aside by name once
an older one is in hand. What cannot be read at all (a disk that fails, too
little memory) says nothing about a step, and changes nothing.
"""

import contextlib
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from brorl_jax import intact, stored
from brorl_jax.intact import digest as digest
from brorl_jax.stored import MismatchError, Unreachable, Unusable
from brorl_jax.stored import read_params as read_params


class Unsaved(Exception):
  """A step could not be written, or is not on disk what it should be."""


class Store:
  """The steps of one run.

  Attributes:
    good: The newest step that is known to be whole on disk.
  """

  good: int | None = None

  def __init__(
    self,
    directory: str | pathlib.Path,
    *,
    keep: int,
    run: str | None = None,
    warn: Callable[[str], None] = print,
  ):
    """Makes nothing; the first save makes the directory.

    Args:
      directory: Of the checkpoints; orbax wants it absolute.
      keep: Newest steps that are kept.
      run: Which run it is. Each step says so, and one that says otherwise is
        not used; older ones say nothing.
      warn: Receives one line for each step that could not be used.
    """
    self._directory = pathlib.Path(directory).absolute()
    self._keep, self._run, self._warn = keep, run, warn
    self._manager: ocp.CheckpointManager | None = None
    self._written = None  # step, arrays and record that are not read back yet

  def save(self, step: int, state: PyTree, ledger: dict[str, Any]) -> None:
    """Saves in the background; `state` may be donated afterwards.

    Args:
      step: Must be newer than every saved one.
      state: Arrays.
      ledger: What is to be remembered beside arrays, as JSON.

    Raises:
      Unsaved: It cannot be written, or the step before it was not.
    """
    self.wait()
    # Copies: on CPU the host's view of an array is the array itself, and the
    # next update would write into it while it is being saved.
    state = jax.tree.map(_own_copy, state)
    record = {"ledger": ledger, "leaves": intact.describe(state)}
    record |= {"digest": digest(state)}
    record |= {} if self._run is None else {"run": self._run}
    extra = intact.sealed(record)
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    with self._told(step):
      saved = self._open().save(
        step,
        args=ocp.args.Composite(
          state=ocp.args.StandardSave(state), extra=ocp.args.JsonSave(extra)
        ),
      )
      if not saved:  # orbax leaves out steps below the newest without a word
        raise ValueError(f"{self._directory} has a newer step")
    self._written = step, like, intact.opened(extra)

  def restore(
    self,
    like: PyTree,
    lacks: Callable[[int], str | None] = lambda step: None,
  ) -> tuple[PyTree, dict[str, Any]] | None:
    """The newest step that can be used, or None if nothing was ever saved.

    Args:
      like: Arrays, or their abstract form with shardings.
      lacks: What the run's other files lack of the steps up to this one; a
        step that they do not cover is not used.

    Raises:
      Unusable: There are steps, and none can be used, or the newest whole one
        holds other arrays than `like`. All of them are where they were.
      Unreachable: One cannot be read, whatever it holds. They are there too.
    """
    passed: list[tuple[int, str, str]] = []
    for step in reversed(stored.steps(self._directory)):
      if (reason := lacks(step)) is not None:
        passed.append((step, "newer_checkpoints", reason))
        continue
      try:
        found = stored.read(self._folder(step), like, self._run)
      except MismatchError as e:  # a whole step, only not of this model
        raise Unusable(f"checkpoint {step} in {self._directory}: {e}") from e
      except Exception as e:  # orbax raises many kinds for one damaged file
        self._require_reached(step, e)
        passed.append((step, "damaged_checkpoints", intact.told(e)))
        continue
      for one in passed:
        self._set_aside(*one)
      self.good = step
      return found
    if passed:
      reasons = "; ".join(f"{step}: {reason}" for step, _, reason in passed[:1])
      raise Unusable(
        f"no checkpoint in {self._directory} can be used ({reasons})"
      )
    return None

  def wait(self) -> None:
    """Returns when what was saved is on disk, read back, and the rest pruned.

    Raises:
      Unsaved: It is not what was saved, or could not be written.
    """
    if self._written is None or self._manager is None:
      return
    (step, like, extra), self._written = self._written, None
    with self._told(step):
      self._manager.wait_until_finished()
      self._manager.check_for_errors()
      stored.compare(self._folder(step), like, extra)
    self.good = step
    with self._told(step):
      for old in stored.steps(self._directory)[: -self._keep]:
        self._manager.delete(old)

  def close(self) -> None:
    """Waits, and lets go of the directory."""
    try:
      self.wait()
    finally:
      if self._manager is not None:
        # What it holds was read back, or its failure has been told.
        with contextlib.suppress(Exception):
          self._manager.close()

  def _open(self) -> ocp.CheckpointManager:
    """The manager; raises if what was there is gone, rather than make it."""
    begun = self._manager is not None or self.good is not None
    needed = self._directory if begun else self._directory.parent
    if not needed.is_dir():
      raise ValueError(f"{needed} was removed while the run went on")
    if self._manager is None:
      self._manager = ocp.CheckpointManager(
        self._directory,
        options=ocp.CheckpointManagerOptions(
          max_to_keep=None, enable_async_checkpointing=True
        ),
      )
    return self._manager

  @contextlib.contextmanager
  def _told(self, step: int):
    """What fails inside is told in one line, with what is left."""
    try:
      yield
    except Exception as e:  # of orbax, tensorstore, jax and the system
      left = "none" if self.good is None else self.good
      raise Unsaved(
        f"checkpoint {step} in {self._directory} could not be saved: "
        f"{intact.told(e)}; the last good step is {left}"
      ) from e

  def _require_reached(self, step: int, error: Exception) -> None:
    """Raises Unreachable if a step could not be read, whatever it holds."""
    gone = not self._folder(step).is_dir()
    if (why := "it is gone" if gone else intact.unreachable(error)) is None:
      return
    raise Unreachable(
      f"checkpoint {step} in {self._directory} cannot be read now ({why}); "
      "nothing was changed: mend that, and start again"
    ) from error

  def _folder(self, step: int) -> pathlib.Path:
    return self._directory / str(step)

  def _set_aside(self, step: int, where: str, reason: str) -> None:
    """Moves a step out of the way, beside others of its number."""
    base = to = self._directory.parent / where / str(step)
    count = 0
    while to.exists():
      to = base.with_name(f"{step}.{(count := count + 1)}")
    to.parent.mkdir(exist_ok=True)
    self._folder(step).rename(to)
    self._warn(f"checkpoint {step} is not used ({reason}): see {to}")


def _own_copy(x: Any) -> Any:
  if not isinstance(x, jax.Array):
    return x  # orbax copies these itself
  # Not pop(): devices() is the very set that the mesh keeps.
  on_cpu = next(iter(x.devices())).platform == "cpu"
  return jax.numpy.copy(x) if on_cpu else x
