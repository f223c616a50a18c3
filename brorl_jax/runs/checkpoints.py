"""Checkpoints by orbax: asynchronous, atomic, and verified.

orbax commits a step by a rename, so that a step on disk is always whole. It
can still be damaged later, and one flipped bit would silently restore a wrong
state. Each step therefore also holds a digest of every array. The store reads
a step back and compares it before it deletes an older one, and compares it
again when a run resumes from it. A step that does not match is moved aside
once an older step has been restored. An error of reading (a failing disk, too
little memory) does not show that a step is damaged, and changes nothing.
"""

import contextlib
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from brorl_jax import processes
from brorl_jax.runs import intact, stored
from brorl_jax.runs.intact import digest as digest
from brorl_jax.runs.stored import MismatchError, Unreachable, Unusable
from brorl_jax.runs.stored import read_params as read_params

# For the last save, where a process of many has failed.
_LEAVE_S = 20


class Unsaved(Exception):
  """A step could not be written, or differs on disk from what was saved."""


class Store:
  """The steps of one run.

  Attributes:
    good: The newest step that was verified on disk.
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
    """Creates nothing; the first save creates the directory.

    Args:
      directory: Directory of the checkpoints.
      keep: Number of newest steps to keep.
      run: Identity of the run. Each step stores it, and a step of another run
        is not used. Steps of older versions store none.
      warn: Called with one line for each step that is not used.
    """
    self._directory = pathlib.Path(directory).absolute()
    self._keep, self._run, self._warn = keep, run, warn
    self._manager: ocp.CheckpointManager | None = None
    self._written = None  # step, arrays and record that are not verified yet

  def save(self, step: int, state: PyTree, progress: dict[str, Any]) -> None:
    """Saves in the background; the caller may donate `state` afterwards.

    Args:
      step: Newer than every saved step.
      state: Arrays.
      progress: The run state without arrays, as JSON.

    Raises:
      Unsaved: This step, or the one before it, could not be written.
    """
    self.wait()
    # On a CPU the host's view of an array is the array itself. Without a copy
    # the next update would write into it while it is being saved.
    state = jax.tree.map(_own_copy, state)
    record = {"ledger": progress, "leaves": intact.describe(state)}
    record |= {"digest": digest(state)}
    record |= {} if self._run is None else {"run": self._run}
    extra = intact.sealed(record)
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    with self._one_line_errors(step):
      saved = self._open().save(
        step,
        args=ocp.args.Composite(
          state=ocp.args.StandardSave(state), extra=ocp.args.JsonSave(extra)
        ),
      )
      if not saved:  # orbax silently skips steps below the newest
        raise ValueError(f"{self._directory} already has a newer step")
    self._written = step, like, intact.opened(extra)

  def restore(
    self,
    like: PyTree,
    lacks: Callable[[int], str | None] = lambda step: None,
  ) -> tuple[PyTree, dict[str, Any]] | None:
    """The newest usable step, or None if nothing was ever saved.

    Args:
      like: Arrays, or their shapes and shardings.
      lacks: From a step to the reason why the run's other files do not cover
        it, None if they do. A step that they do not cover is not used.

    Raises:
      Unusable: There are steps but none is usable, or the newest whole one has
        other arrays than `like`. No file was changed.
      Unreachable: A step cannot be read now. No file was changed.
    """
    passed: list[tuple[int, str, str]] = []
    for step in reversed(processes.first(stored.steps(self._directory))):
      if (reason := lacks(step)) is not None:
        passed.append((step, "newer_checkpoints", reason))
        continue
      try:
        state = stored.read(self._folder(step), like, self._run)
      except MismatchError as e:  # a whole step of another model
        raise Unusable(f"checkpoint {step} in {self._directory}: {e}") from e
      except Unreachable:
        raise
      except Exception as e:  # orbax raises many kinds of errors for damage
        self._require_reached(step, e)
        passed.append((step, "damaged_checkpoints", intact.one_line(e)))
        continue
      for checkpoint in passed if processes.leads() else []:
        self._set_aside(*checkpoint)
      processes.gather(None)  # nobody goes on before they are moved
      self.good = step
      return state
    if passed:
      reasons = "; ".join(f"{step}: {reason}" for step, _, reason in passed[:1])
      raise Unusable(
        f"{self._directory}: no checkpoint can be used ({reasons})"
      )
    return None

  def wait(self) -> None:
    """Waits until the last save is verified on disk, and prunes old steps.

    Raises:
      Unsaved: It could not be written, or differs from what was saved.
    """
    if self._written is None or self._manager is None:
      return
    (step, like, extra), self._written = self._written, None
    with self._one_line_errors(step):
      self._manager.wait_until_finished()
      self._manager.check_for_errors()
      stored.compare(self._folder(step), like, extra)
    self.good = step
    with self._one_line_errors(step):
      for old in processes.first(stored.steps(self._directory))[: -self._keep]:
        self._manager.delete(old)

  def close(self) -> None:
    """Waits for the last save and releases the directory."""
    try:
      self.wait()
    finally:
      if self._manager is not None:
        # The last save was verified, or its error was already raised.
        with contextlib.suppress(Exception):
          self._manager.close()

  def leave(self) -> None:
    """Lets the last save end, if it can: other processes may have gone."""
    if self._manager is None:
      return
    waits = threading.Thread(
      target=self._manager.wait_until_finished, daemon=True
    )
    waits.start()
    waits.join(_LEAVE_S)

  def _open(self) -> ocp.CheckpointManager:
    """The manager; raises if the directory was removed during the run."""
    begun = self._manager is not None or self.good is not None
    needed = self._directory if begun else self._directory.parent
    if not needed.is_dir():
      raise ValueError(f"{needed} was removed during the run")
    if self._manager is None:
      self._manager = ocp.CheckpointManager(
        self._directory,
        options=ocp.CheckpointManagerOptions(
          max_to_keep=None, enable_async_checkpointing=True
        ),
      )
    return self._manager

  @contextlib.contextmanager
  def _one_line_errors(self, step: int):
    """Turns errors inside into one line that names the last good step."""
    try:
      yield
    except Exception as e:  # from orbax, tensorstore, jax or the system
      left = "none" if self.good is None else self.good
      raise Unsaved(
        f"checkpoint {step} in {self._directory} could not be saved: "
        f"{intact.one_line(e)}; the last good step is {left}"
      ) from e

  def _require_reached(self, step: int, error: Exception) -> None:
    """Raises Unreachable if the error is not a sign of damage."""
    lost = not self._folder(step).is_dir()
    if (why := "it is missing" if lost else intact.unreachable(error)) is None:
      return
    raise Unreachable(
      f"checkpoint {step} in {self._directory} cannot be read now ({why}); no "
      "file was changed: fix this and run the same command again"
    ) from error

  def _folder(self, step: int) -> pathlib.Path:
    return self._directory / str(step)

  def _set_aside(self, step: int, where: str, reason: str) -> None:
    """Moves a step to another directory, under a free name."""
    base = to = self._directory.parent / where / str(step)
    count = 0
    while to.exists():
      to = base.with_name(f"{step}.{(count := count + 1)}")
    to.parent.mkdir(exist_ok=True)
    self._folder(step).rename(to)
    self._warn(f"checkpoint {step} is not used ({reason}): see {to}")


def _own_copy(x: Any) -> Any:
  if not isinstance(x, jax.Array):
    return x  # orbax copies arrays of numpy itself
  # Not pop(): devices() returns the set that the mesh itself holds.
  on_cpu = next(iter(x.devices())).platform == "cpu"
  return jax.numpy.copy(x) if on_cpu else x
