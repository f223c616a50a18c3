"""Checkpoints by orbax: asynchronous, atomic, and verified.

orbax commits a step by a rename, so that a step on disk is always whole. It
can still be damaged later, and one flipped bit would silently restore a wrong
state. Each step therefore also holds a digest of every array. The store reads
a step back and compares it before it deletes an older one, and compares it
again when a run resumes from it. A step that does not match is moved aside
once an older step has been restored. An error of reading (a failing disk, too
little memory) does not show that a step is damaged, and changes nothing.

A process that is alone writes, compares and deletes in another thread, so that
a slow disk does not hold up the next step. Where there are several, all of them
compare and delete together, at the next `check`.
"""

import concurrent.futures
import contextlib
import functools
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from brorl_jax.many import processes
from brorl_jax.runs import intact, kept, stored
from brorl_jax.runs.intact import digest as digest
from brorl_jax.runs.stored import MismatchError, Unreachable, Unusable
from brorl_jax.runs.stored import NoWayBack as NoWayBack
from brorl_jax.runs.stored import read_params as read_params

# For the last save, where a process of many has failed.
_LEAVE_S = 20
# Of a save: a slow disk ends no run, and orbax measures it by the wall clock,
# which may jump.
_NEVER_S = 10**7


class Unsaved(Exception):
  """A step could not be written, or differs on disk from what was saved."""


class _Written(NamedTuple):
  """A step that is not verified yet."""

  step: int
  like: PyTree  # shapes of its arrays
  record: dict[str, Any]


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
    keep_every: int = 0,
    run: str,
    warn: Callable[[str], None] = print,
  ):
    """Creates nothing; the first save creates the directory.

    Args:
      keep: Number of newest steps to keep, see `kept.superfluous`.
      keep_every: Multiples of this are kept too; 0: none.
      run: Identity of the run. Each step stores it, and a step of another run
        is not used.
      warn: Called with one line for each step that is not used.
    """
    self._directory = pathlib.Path(directory).absolute()
    self._keep, self._every = keep, keep_every
    self._run, self._warn = run, warn
    self._manager: ocp.CheckpointManager | None = None
    self._scores: dict[int, float | None] = {}  # of steps on disk
    self._threads = concurrent.futures.ThreadPoolExecutor(1, "save")
    self._saving: concurrent.futures.Future[None] | _Later | None = None

  def save(
    self,
    step: int,
    state: PyTree,
    progress: dict[str, Any],
    score: float | None = None,
  ) -> None:
    """Saves in the background; the caller may donate `state` afterwards.

    Args:
      step: Newer than every saved step.
      progress: The run state without arrays, as JSON.
      score: Held-out score of this state; None if it was not evaluated.

    Raises:
      Unsaved: This step, or the one before it, could not be written.
    """
    self.wait()
    record: dict[str, Any] = {"ledger": progress}
    record |= {} if score is None else {"score": score}
    record |= {"run": self._run}
    # In a list, so that they are gone when the step is compared, for which a
    # second state is read.
    arrays = [jax.tree.map(_own_copy, state)]
    begin = functools.partial(self._begin, step, arrays, record)
    alone = processes.alone()
    if not (alone and all(map(_on_host, jax.tree.leaves(state)))):
      # orbax copies them to the host before it returns.
      written = begin()
      begin = lambda: written
    later = self._threads.submit if alone else _Later
    self._saving = later(lambda: self._verify(begin()))

  def _begin(
    self, step: int, arrays: list[PyTree], record: dict[str, Any]
  ) -> _Written:
    """Begins to write a step; takes the arrays out of their list."""
    state = arrays.pop()
    record |= {"leaves": intact.describe(state), "digest": digest(state)}
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
    return _Written(step, like, intact.opened(extra))

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
      Unsaved: An older step, which is not kept, cannot be deleted.
    """
    passed: list[tuple[int, str, str]] = []
    for step in reversed(processes.first(stored.steps(self._directory))):
      if (reason := lacks(step)) is not None:
        passed.append((step, "newer_checkpoints", reason))
        continue
      try:
        state = self._read(step, like)
      except intact.Damage as e:
        passed.append((step, "damaged_checkpoints", str(e)))
        continue
      for checkpoint in passed if processes.leads() else []:
        self._set_aside(*checkpoint)
      processes.gather(None)  # nobody goes on before they are moved
      self.good = step
      self._prune(step)  # a kill after the last save leaves what it deletes
      return state
    if passed:
      reasons = "; ".join(f"{step}: {reason}" for step, _, reason in passed[:1])
      raise Unusable(
        f"{self._directory}: no checkpoint can be used ({reasons})"
      )
    return None

  def require(
    self,
    step: int,
    like: PyTree,
    lacks: Callable[[int], str | None] = lambda step: None,
  ) -> None:
    """Checks that a run can go back to a step; changes no file.

    Args:
      step: A saved step.
      like: See `restore`.
      lacks: See `restore`.

    Raises:
      NoWayBack: It is damaged, or the run's other files do not cover it.
      Unusable: See `restore`.
    """
    if (why := lacks(step)) is None:
      try:
        self._read(step, like)
      except intact.Damage as e:
        why = str(e)
    if why is not None:
      others = [s for s in stored.steps(self._directory) if s != step]
      raise NoWayBack(
        f"checkpoint {step} in {self._directory} cannot be used ({why}); no "
        f"file was changed; there are also: {stored.listed(others)}"
      )

  def check(self) -> None:
    """Raises the error of the last save, if it is over; may prune old steps.

    Waits while no step is on disk, and where there are several processes.

    Raises:
      Unsaved: See `wait`.
    """
    if self._saving is not None and (self.good is None or self._saving.done()):
      self.wait()

  def wait(self) -> None:
    """Waits until the last save is verified on disk, and prunes old steps.

    Raises:
      Unsaved: It could not be written, or differs from what was saved.
    """
    saving, self._saving = self._saving, None
    if saving is not None:
      saving.result()

  def _verify(self, written: _Written) -> None:
    """Waits for a step, compares it with what was saved and deletes others."""
    step, like, extra = written
    with self._one_line_errors(step):
      manager = self._open()
      manager.wait_until_finished()
      manager.check_for_errors()
      stored.compare(self._folder(step), like, extra)
    self.good, self._scores[step] = step, extra.get("score")
    self._prune(step)

  def _prune(self, step: int) -> None:
    """Deletes what is superfluous now that a step is good."""
    with self._one_line_errors(step):
      for old in processes.first(self._superfluous()):
        self._open().delete(old)

  def _superfluous(self) -> list[int]:
    """The steps to delete; process 0 reads what it does not know of them."""
    if not processes.leads():
      return []
    saved = stored.steps(self._directory)
    for step in saved:
      if step not in self._scores:
        self._scores[step] = stored.score(self._folder(step))
    scores = {s: self._scores[s] for s in saved}
    return kept.superfluous(scores, newest=self._keep, every=self._every)

  def close(self) -> None:
    """Waits for the last save and releases the directory."""
    try:
      self.wait()
    finally:
      if self._manager is not None:
        # The last save was verified, or its error was already raised.
        with contextlib.suppress(Exception):
          self._manager.close()
      self._threads.shutdown()

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
          max_to_keep=None,
          enable_async_checkpointing=True,
          async_options=ocp.AsyncOptions(
            timeout_secs=_NEVER_S,
            # Otherwise a folder that cannot be made is an error only after
            # five minutes, for which orbax waits for it.
            create_directories_asynchronously=False,
          ),
        ),
      )
    return self._manager

  @contextlib.contextmanager
  def _one_line_errors(self, step: int) -> Iterator[None]:
    """Turns errors inside into one line that names the last good step."""
    try:
      yield
    except Exception as e:  # from orbax, tensorstore, jax or the system
      left = "none" if self.good is None else self.good
      raise Unsaved(
        f"checkpoint {step} in {self._directory} could not be saved: "
        f"{intact.one_line(e)}; the last good step is {left}"
      ) from e

  def _read(self, step: int, like: PyTree) -> tuple[PyTree, dict[str, Any]]:
    """A step, verified.

    Raises:
      Damage: It is damaged, in one line.
      Unusable: It cannot be read now, or it is a whole step of another model.
    """
    try:
      return stored.read(self._folder(step), like, self._run)
    except MismatchError as e:
      raise Unusable(f"checkpoint {step} in {self._directory}: {e}") from e
    except Unreachable:
      raise
    except Exception as e:  # orbax raises many kinds of errors for damage
      self._require_reached(step, e)
      raise intact.Damage(intact.one_line(e)) from e

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
  """A copy of an array on the host, which is saved while the run goes on.

  On a CPU the host's view of an array is the array itself. Without a copy the
  next update would write into it while it is being saved.
  """
  if isinstance(x, np.ndarray):
    return x.copy()
  return jax.numpy.copy(x) if isinstance(x, jax.Array) and _on_host(x) else x


def _on_host(x: Any) -> bool:
  # Not pop(): devices() returns the set that the mesh itself holds.
  return (
    not isinstance(x, jax.Array) or next(iter(x.devices())).platform == "cpu"
  )


class _Later:
  """Something that is done when somebody asks for it; see `Future`."""

  def __init__(self, work: Callable[[], None]):
    self.result = work

  def done(self) -> bool:
    return True
