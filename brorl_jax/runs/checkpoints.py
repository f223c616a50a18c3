"""Checkpoints by orbax: asynchronous, atomic, and verified.

orbax commits a step by a rename, so that a step on disk is always whole. It can
still be damaged later, and one flipped bit would silently restore a wrong
state. So each step holds a digest of every array. It is read back and compared
before an older one is deleted, and again when a run resumes from it. A step
that does not match is moved aside once an older one has been restored. An error
of reading (a failing disk, too little memory) is no damage and changes nothing.

A process that is alone compares and deletes in another thread: a slow disk must
not hold up the next step. Several do it at the next `check`.
"""

import concurrent.futures
import contextlib
import itertools
import math
import pathlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from brorl_jax.errors import AGAIN
from brorl_jax.many import processes
from brorl_jax.runs import folder, intact, lines

_UNCHANGED = f"no file was changed: {AGAIN}"
_LEAVE_S = 20  # for the last save, where a process of many has failed
# Of a save: a slow disk ends no run, and orbax's wall clock may jump.
_NEVER_S = 10**7
# Restore to the host: a second state may not fit on the devices.
_ON_HOST = ocp.RestoreArgs(restore_type=np.ndarray)
# On a CPU a larger state is saved without a copy and read back in parts of this
# size, or of one array: of 135M parameters with moments and a reference it is
# 2.2 GB. An update waits for the end of both, or it takes memory beside them.
_MUCH = 2**28


class Unusable(ValueError):
  """There are checkpoints, but this run cannot resume from any of them."""


class Unreachable(Unusable):
  """Checkpoints cannot be read now; they may still be whole."""


class NoWayBack(Unusable):
  """A run cannot go back to the step that was asked for."""


class Unsaved(Exception):
  """A step could not be written, or differs on disk from what was saved."""


class Store:
  """The steps of one run; `good` is the newest that was verified on disk."""

  good: int | None = None
  _few: Any = 96  # see `_few`

  def __init__(
    self,
    directory: str | pathlib.Path,
    *,
    keep: int,
    keep_every: int = 0,
    run: str,
    from_step: int | None = None,
    warn: Callable[[str], None] = print,
    part: Callable[[Any], Any] = lambda state: state,
    whole: Callable[[Any, Any], Any] = lambda part, like: part,
  ):
    """Creates nothing; the first save creates the directory.

    For `keep` and `keep_every` see `superfluous`. Each step stores the identity
    `run`; a step of another run is not used. `from_step` is the step to go back
    to; None: the newest. `warn` gets a line for each step that is not used.
    A step holds a `part` of the state, of which another makes a `whole`.
    """
    self._directory = pathlib.Path(directory).absolute()
    self._keep, self._every = keep, keep_every
    self._run, self._from, self._warn = run, from_step, warn
    self._part, self._whole = part, whole
    self._manager: ocp.CheckpointManager | None = None
    self._threads = concurrent.futures.ThreadPoolExecutor(1, "save")
    self._finish: Callable[[], None] | None = None  # of the last save
    self._over = lambda: True  # whether that would not wait
    self._idle = threading.Event()  # clear while a large save is not verified
    self._idle.set()

  def save(
    self,
    step: int,
    state: PyTree,
    progress: dict[str, Any],
    score: float | None = None,
  ) -> None:
    """Saves in the background; call `release` before `state` is donated.

    The step is newer than every saved one, `progress` the run state without
    arrays, as JSON; without a `score` the state was not evaluated. Raises
    Unsaved if this step, or the one before it, could not be written.
    """
    # One save at a time: a second would need the host's memory twice.
    self.wait()
    state = self._part(state)
    self._few, size = _few(state), sum(x.nbytes for x in jax.tree.leaves(state))
    if _on_cpu() and processes.alone() and size > _MUCH:
      self._idle.clear()
    else:
      state = jax.tree.map(_own_copy, state)
    record: dict[str, Any] = {"ledger": progress}
    record |= {} if score is None else {"score": score}
    # Digests are of what the loop holds, not the disk: bad writes show too.
    record |= {"run": self._run, "leaves": intact.describe(state)}
    extra = intact.sealed(record | {"digest": intact.digest(state)})
    args = ocp.args.Composite(
      state=ocp.args.StandardSave(state), extra=ocp.args.JsonSave(extra)
    )
    with self._one_line_errors(step):
      saved = self._open().save(step, args=args)
      if not saved:  # orbax silently skips steps below the newest
        raise ValueError(f"{self._directory} already has a newer step")
    record = {key: x for key, x in extra.items() if key != "seal"}
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    self._finish = lambda: self._verify(step, like, record)
    if processes.alone():
      saving = self._threads.submit(self._finish)
      self._finish, self._over = saving.result, saving.done

  def restore(
    self, like: PyTree, lacks: Callable[[int], str | None] = lambda step: None
  ) -> tuple[PyTree, dict[str, Any]] | None:
    """The newest usable step or `from_step`; None if nothing was ever saved.

    Steps that are newer or damaged are moved aside. `like` is deleted before
    one is read: two states may not fit. `lacks(step)` is the reason why the
    run's other files do not cover a step, which is then not used, or None.

    Raises:
      Unusable: There are steps but none is usable, or the newest whole one has
        other arrays than `like`. No file was changed.
      Unreachable: A step cannot be read now. No file was changed.
      NoWayBack: `from_step` is not there or not usable. No file was changed.
      Unsaved: An older step, which is not kept, cannot be deleted.
    """
    saved, back = processes.first(steps(self._directory)), self._from
    passed = list[tuple[int, str]]()
    if back is not None:
      later = [s for s in reversed(saved) if s > back]
      passed = [(s, f"--from_step={back}") for s in later]
      saved = [_find(self._directory, back)]
    part = jax.tree.map(ocp.utils.to_shape_dtype_struct, self._part(like))
    newest, self._few = len(passed), _few(part)
    if saved:
      jax.tree.map(lambda x: x.delete(), self._part(like))
    for step in reversed(saved):
      try:
        if (why := lacks(step)) is not None:
          raise intact.Damage(why)
        state, progress = self._read(step, part)
      except intact.Damage as e:
        passed.append((step, str(e)))
        continue
      # Only after an older step was read: a start that fails moves nothing.
      if processes.leads():
        self._set_aside(passed)
      processes.gather(None)  # nobody continues before they are moved
      self.good = step
      self._prune(step)  # a kill after the last save leaves what it deletes
      return self._whole(state, like), progress
    if not saved:
      return None
    step, why = passed[newest]
    text = f"checkpoint {step} in {self._directory} cannot be used ({why}); "
    if back is None:
      raise Unusable(f"{text}nor can an older one")
    others = [s for s in steps(self._directory) if s != step]
    listed = ", ".join(map(str, others)) or "none"
    raise NoWayBack(f"{text}there are also: {listed}")

  def release(self) -> None:
    """Waits until the arrays of the last save may go."""
    self._idle.wait()

  def check(self) -> None:
    """`wait`, but only for a save that is over, the first, or of several."""
    if self.good is None or self._over():
      self.wait()

  def wait(self) -> None:
    """Waits until the last save is verified on disk, and prunes old steps.

    Raises Unsaved if it could not be written, or differs from what was saved.
    """
    finish, self._finish = self._finish, None
    if finish is not None:
      finish()

  def _verify(self, step: int, like: PyTree, extra: dict[str, Any]) -> None:
    try:
      with self._one_line_errors(step):
        manager = self._open()
        manager.wait_until_finished()
        processes.trim()
        manager.check_for_errors()
        compare(self._directory / str(step), like, extra)
      # Not before: until then only the older step is known to be whole.
      self.good = step
    finally:
      self._idle.set()
    self._prune(step)

  def _prune(self, step: int) -> None:
    processes.trim()
    with self._one_line_errors(step):
      gone = list[int]()
      if processes.leads():
        gone = superfluous(self._scores(), newest=self._keep, every=self._every)
      for old in processes.first(gone):
        self._open().delete(old)

  def best(self, like: PyTree) -> tuple[int, float, PyTree] | None:
    """The saved step of the best score, that score, and its parameters, which
    are like these. None if none has a score. Raises Unusable, Unsaved.
    """
    self.wait()
    scores = processes.first(self._scores() if processes.leads() else {})
    step = _first_best(scores)
    if step is None or (score := scores[step]) is None:
      return None
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    _, params = read_params(self._directory, step, like, self._run)
    return step, score, params

  def _scores(self) -> dict[int, float | None]:
    saved = steps(self._directory)
    return {step: _score(self._directory / str(step)) for step in saved}

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
    if self._manager is not None:
      wait = self._manager.wait_until_finished
      thread = threading.Thread(target=wait, daemon=True)
      thread.start()
      thread.join(_LEAVE_S)

  def _open(self) -> ocp.CheckpointManager:
    begun = self._manager is not None or self.good is not None
    needed = self._directory if begun else self._directory.parent
    if not needed.is_dir():
      raise ValueError(f"{needed} was removed during the run")
    if self._manager is None:
      self._manager = ocp.CheckpointManager(
        self._directory,
        item_handlers={
          "state": ocp.StandardCheckpointHandler(save_concurrent_gb=self._few),
          "extra": ocp.JsonCheckpointHandler(),
        },
        options=ocp.CheckpointManagerOptions(
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
    try:
      yield
    except Exception as e:  # from orbax, tensorstore, jax or the system
      left = "none" if self.good is None else self.good
      which = f"checkpoint {step} in {self._directory}"
      why = f"{intact.one_line(e)}; the last good step is {left}"
      raise Unsaved(f"{which} could not be saved: {why}") from e

  def _read(self, step: int, like: PyTree) -> tuple[PyTree, dict[str, Any]]:
    """A step, verified; Damage or Unusable tells in one line why not."""
    try:
      return read_step(self._directory / str(step), like, self._run)
    except Unusable:
      raise
    except Exception as e:  # orbax raises many kinds of errors for damage
      if (why := intact.unreachable(e)) is None:
        raise intact.Damage(intact.one_line(e)) from e
      which = f"checkpoint {step} in {self._directory}"
      why = f"cannot be read now ({why}); {_UNCHANGED}"
      raise Unreachable(f"{which} {why}") from e

  def _set_aside(self, passed: list[tuple[int, str]]) -> None:
    """Moves steps, the newest first, and says why they are not used.

    With the config they can be used where they are then. wandb takes no step
    twice: without its id a new run of wandb begins. After a kill the next start
    moves the rest to another folder.
    """
    if not passed:
      return
    run = self._directory.parent
    to = folder.next_aside(run)
    (to / "checkpoints").mkdir(parents=True)
    if (run / "config.json").exists():
      lines.write_whole(to / "config.json", (run / "config.json").read_text())
    if (run / "wandb_id").exists():
      (run / "wandb_id").rename(to / "wandb_id")
    # The newest first: after a kill in between the newest left is still unused.
    for step, why in passed:
      (self._directory / str(step)).rename(to / "checkpoints" / str(step))
      self._warn(f"checkpoint {step} is not used ({why}): see {to}")


def _own_copy(x: Any) -> Any:
  """A copy of an array on the host, which is saved during the next steps.

  On a CPU the host's view of an array is the array itself. Without a copy the
  next update would write into it while it is being saved.
  """
  if isinstance(x, np.ndarray):
    return x.copy()
  return jax.numpy.copy(x) if isinstance(x, jax.Array) and _on_cpu() else x


def _few(state: PyTree) -> Any:
  """GB of arrays that orbax handles at a time, and holds twice more (without it
  3.4 of 135M parameters on a CPU); one that is not smaller is refused.
  """
  each = (x for x in jax.tree.leaves(state) if x is not ocp.PLACEHOLDER)
  largest = max((x.size * x.dtype.itemsize for x in each), default=0)
  return max(2 * largest, _MUCH) * 1e-9 if _on_cpu() else 96


def _on_cpu() -> bool:
  return jax.default_backend() == "cpu"


def superfluous(
  scores: Mapping[int, float | None], *, newest: int, every: int
) -> list[int]:
  """The steps to delete, ascending.

  The `newest` stay, multiples of `every` (0: none), and the first of the best.
  """
  saved = sorted(scores)
  often = (s for s in saved if every and s % every == 0)
  stay = {*saved[-newest:], *often, _first_best(scores)}
  return [s for s in saved if s not in stay]


def _first_best(scores: Mapping[int, float | None]) -> int | None:
  known = {s: score for s, score in scores.items() if score is not None}
  # Of equals the earliest, so that a resumed run keeps what it kept before.
  return min(known, key=lambda s: (-known[s], s)) if known else None


def read_step(
  where: pathlib.Path, like: PyTree, run: str
) -> tuple[PyTree, dict[str, Any]]:
  """Arrays like these and run state of a step of this run, verified.

  Raises Unusable if it holds other arrays, Unreachable if one of several
  processes cannot read it, and an Exception of any kind if it is damaged or
  cannot be read; `intact.unreachable` tells them apart.
  """
  extra = _record(where, run)
  # Before restoring, because orbax silently casts to the wanted dtype.
  saved, wanted = extra["leaves"], intact.describe(like)
  missing = dict.fromkeys(saved.keys() - wanted.keys(), "no such array")
  _require_same(where, saved, wanted | missing)
  target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
  how = ocp.checkpoint_utils.construct_restore_args(target)
  try:
    state = _arrays(where, target, how)
  except Exception as e:
    if processes.alone():
      raise
    # The others may have read their shards: they cannot take an older step
    # without this process, nor this process another than they.
    raise Unreachable(
      f"process {jax.process_index()} cannot read checkpoint {where}: "
      f"{intact.one_line(e)}; no file was changed: if it is damaged, move it "
      "away and run the same command again"
    ) from e
  _require_digest(state, extra["digest"])
  return state, extra["ledger"]


def compare(where: pathlib.Path, like: PyTree, extra: dict[str, Any]) -> None:
  """Reads a step that was just written; raises if it is not as its record."""
  if _record(where, None) != extra:
    raise intact.Damage("its record differs from what was saved")
  # Each process reads its share of the arrays.
  every, me = jax.process_count(), jax.process_index()
  wanted = dict([*extra["digest"].items()][me::every])
  differ, none = list[str](), ocp.PLACEHOLDER
  for part in _parts(like, wanted):
    read = lambda path, x, part=part: x if intact.name(path) in part else none
    item = jax.tree_util.tree_map_with_path(read, like)
    # A placeholder is not read: N processes read each array once, not N times.
    state = _arrays(where, item, jax.tree.map(lambda _: _ON_HOST, like))
    found = {name: x for name, x in intact.leaves(state) if name in part}
    digests = intact.digest(found, wanted)
    differ += [p for p in part if digests.get(p) != wanted[p]]
  for path in itertools.chain(*processes.gather(differ)):
    raise intact.Damage(f"{path} differs from what was saved")


def _parts(like: PyTree, names: Collection[str]) -> Iterator[list[str]]:
  """These arrays in parts of at most `_MUCH` bytes, or of one array; in one
  part if there are several processes, which read together.
  """
  part, held = list[str](), 0
  most = _MUCH if processes.alone() else math.inf
  for name, x in intact.leaves(like):
    size = x.size * x.dtype.itemsize
    if part and held + size > most:
      yield part
      part, held = [], 0
    if name in names:
      part, held = [*part, name], held + size
  yield part


def _arrays(where: pathlib.Path, item: PyTree, how: PyTree, **more: Any):
  args = ocp.args.PyTreeRestore(item=item, restore_args=how, **more)
  handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=_few(item))
  with ocp.Checkpointer(handler) as reader:
    return reader.restore(where / "state", args=args)


def steps(directory: pathlib.Path) -> list[int]:
  """The steps in a directory, ascending; raises Unreachable if not readable."""
  try:
    names = [p.name for p in directory.iterdir()]
    return sorted(int(name) for name in names if name.isdecimal())
  except FileNotFoundError:
    return []
  except OSError as e:
    raise Unreachable(f"{intact.one_line(e)}; {_UNCHANGED}") from e


def _find(directory: pathlib.Path, step: int | None) -> int:
  """The step, the newest if it is None; raises NoWayBack if it is not there."""
  if not (saved := steps(directory)) or step not in (None, *saved):
    what = "checkpoint" if step is None else f"checkpoint {step}"
    there = ", ".join(map(str, saved)) or "none"
    raise NoWayBack(f"there is no {what} in {directory}; there are: {there}")
  return saved[-1] if step is None else step


def _score(where: pathlib.Path) -> float | None:
  """The held-out score of a step; None if it has none or is damaged."""
  # A damaged step may go like any other; one that storage hides now may not.
  try:
    return _record(where, None).get("score")
  except (OSError, intact.Damage) as e:
    if intact.unreachable(e) is not None:
      raise
    return None


def read_params(
  directory: str | pathlib.Path,
  step: int | None,
  like: PyTree,
  run: str | None = None,
) -> tuple[int, PyTree]:
  """A step, the newest if it is None, and its parameters alone, verified.

  `like` has their shapes and shardings, `run` is the identity of the run that
  must have written them; None accepts any. Nothing is changed. Raises Unusable
  if there is no such step, it is damaged, or of another policy or run.
  """
  directory = pathlib.Path(directory).absolute()
  step = _find(directory, step)
  where, item = directory / str(step), {"params": like}
  how = ocp.checkpoint_utils.construct_restore_args(item)
  try:
    extra = _record(where, run)
    _require_same(where, extra["leaves"], intact.describe(item))
    state = _arrays(where, item, how, partial_restore=True)
    _require_digest(state, extra["digest"])
  except Unusable:
    raise
  except Exception as e:  # orbax raises many kinds for one damaged file
    which = f"checkpoint {step} in {directory}"
    raise Unusable(f"{which}: {intact.one_line(e)}") from e
  return step, state["params"]


def _record(where: pathlib.Path, run: str | None) -> dict[str, Any]:
  """The record of a step, checked to be unchanged and of this run."""
  extra = intact.opened((where / "extra" / "metadata").read_bytes())
  saved_by = extra.get("run")
  if run is not None and saved_by != run:
    both = f"its run is {saved_by}, but config.json has run = {run}"
    must = "move it back to the folder of that run"
    raise intact.Damage(f"another run saved it: {both}; {must}")
  return extra


def _require_same(
  where: pathlib.Path, saved: dict[str, str], wanted: dict[str, str]
) -> None:
  for path in sorted(wanted):
    if saved.get(path) != wanted[path]:
      which = f"checkpoint {where.name} in {where.parent}"
      has, need = saved.get(path, "missing"), wanted[path]
      raise Unusable(f"{which}: {path} is {has}, but this run needs {need}")


def _require_digest(state: PyTree, saved: dict[str, str]) -> None:
  for path, value in intact.digest(state, saved).items():
    if value != saved.get(path):
      raise intact.Damage(f"{path} differs from what was saved")
