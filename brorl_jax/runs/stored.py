"""Reads and verifies one step of a run on disk."""

import itertools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from brorl_jax.many import processes
from brorl_jax.runs import intact

# Restore to the host: a second state may not fit on the devices.
_ON_HOST = ocp.RestoreArgs(restore_type=np.ndarray)


class Unusable(ValueError):
  """There are checkpoints, but this run cannot resume from any of them."""


class Unreachable(Unusable):
  """Checkpoints cannot be read now; they may still be whole."""


class NoWayBack(Unusable):
  """A run cannot go back to the step that was asked for."""


class MismatchError(Exception):
  """A step is whole, but its arrays are not those of the run."""


def read(
  folder: pathlib.Path, like: PyTree, run: str
) -> tuple[PyTree, dict[str, Any]]:
  """Arrays and run state of a step, verified.

  Args:
    folder: Folder of the step; its name is the number of the step.
    like: Arrays, or their shapes and shardings.
    run: Identity of the run that must have written it.

  Raises:
    MismatchError: It holds other arrays.
    Unreachable: One of several processes cannot read it.
    Exception: It is damaged or cannot be read; `intact.unreachable` tells them
      apart.
  """
  extra = _record(folder, run)
  # Before restoring, because orbax silently casts to the wanted dtype.
  saved, wanted = extra["leaves"], intact.describe(like)
  missing = dict.fromkeys(saved.keys() - wanted.keys(), "no such array")
  _require_same(saved, wanted | missing)
  target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
  with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
    try:
      state = reader.restore(
        folder / "state", args=ocp.args.StandardRestore(target)
      )
    except Exception as e:
      if processes.alone():
        raise
      # The others may have read their shards: they cannot take an older step
      # without this process, nor this process another than they.
      raise Unreachable(
        f"process {jax.process_index()} cannot read checkpoint {folder}: "
        f"{intact.one_line(e)}; no file was changed: if it is damaged, move it "
        "away and run the same command again"
      ) from e
  _require_digest(state, extra["digest"])
  _require_step(state, int(folder.name))
  return state, extra["ledger"]


def compare(folder: pathlib.Path, like: PyTree, extra: dict[str, Any]) -> None:
  """Reads a step that was just written and compares it.

  Args:
    like: Shapes of its arrays.
    extra: Its record.

  Raises:
    Exception: It differs from what was written, or cannot be read.
  """
  if _record(folder, None) != extra:
    raise intact.Damage("its record differs from what was saved")
  # Each process reads its share of the arrays.
  every, me = jax.process_count(), jax.process_index()
  wanted = dict([*extra["digest"].items()][me::every])
  item = jax.tree_util.tree_map_with_path(
    lambda path, x: x if intact.name(path) in wanted else ocp.PLACEHOLDER, like
  )
  how = jax.tree.map(lambda _: _ON_HOST, like)
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
    state = reader.restore(
      folder / "state",
      args=ocp.args.PyTreeRestore(item=item, restore_args=how),
    )
  digests = intact.digest(state, wanted)
  differ = [p for p, value in wanted.items() if digests.get(p) != value]
  for path in itertools.chain(*processes.gather(differ)):
    raise intact.Damage(f"{path} differs from what was saved")


def steps(directory: pathlib.Path) -> list[int]:
  """The steps in a directory of checkpoints, ascending; [] if it is missing.

  Raises:
    Unreachable: It cannot be read.
  """
  try:
    return sorted(
      int(p.name) for p in directory.iterdir() if p.name.isdecimal()
    )
  except FileNotFoundError:
    return []
  except OSError as e:
    raise Unreachable(
      f"{intact.one_line(e)}; no file was changed: fix this and run the same "
      "command again"
    ) from e


def find(directory: pathlib.Path, step: int | None) -> int:
  """The step; the newest if it is None.

  Raises:
    NoWayBack: It was not saved, or was deleted since.
    Unreachable: See `steps`.
  """
  if not (saved := steps(directory)) or step not in (None, *saved):
    what = "checkpoint" if step is None else f"checkpoint {step}"
    raise NoWayBack(
      f"there is no {what} in {directory}; there are: {listed(saved)}"
    )
  return saved[-1] if step is None else step


def listed(saved: Sequence[int]) -> str:
  """Steps for a message: "3, 6"."""
  return ", ".join(map(str, saved)) or "none"


def score(folder: pathlib.Path) -> float | None:
  """The held-out score of a step; None if it has none or is damaged.

  Raises:
    OSError: It cannot be read now.
  """
  try:
    value = _record(folder, None).get("score")
    return float(value) if isinstance(value, int | float) else None
  except OSError as e:
    if intact.unreachable(e) is not None:
      raise
  except ValueError:
    pass
  return None


def read_params(
  directory: str | pathlib.Path,
  step: int | None,
  like: PyTree,
  run: str | None = None,
) -> tuple[int, PyTree]:
  """Only the parameters of a step, verified.

  Args:
    directory: Checkpoints of a run; nothing in it is changed.
    step: The step; None takes the newest.
    like: Shapes and shardings of the parameters.
    run: Identity of the run that must have written it; None accepts any.

  Returns:
    The step and its parameters.

  Raises:
    Unusable: There is no such step, it is damaged, or it belongs to another
      policy or run.
  """
  directory = pathlib.Path(directory).absolute()
  step = find(directory, step)
  item = {"params": like}
  how = ocp.checkpoint_utils.construct_restore_args(item)
  try:
    extra = _record(directory / str(step), run)
    _require_same(extra["leaves"], intact.describe(item))
    if "step" in extra["leaves"]:
      item["step"], how["step"] = np.int32(0), _ON_HOST
    args = ocp.args.PyTreeRestore(
      item=item, restore_args=how, partial_restore=True
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
      state = reader.restore(directory / str(step) / "state", args=args)
    _require_digest(state, extra["digest"])
    _require_step(state, step)
  except Exception as e:  # orbax raises many kinds for one damaged file
    raise Unusable(
      f"checkpoint {step} in {directory}: {intact.one_line(e)}"
    ) from e
  return step, state["params"]


def _record(folder: pathlib.Path, run: str | None) -> dict[str, Any]:
  """The record of a step, checked to be unchanged and of this run."""
  text = (folder / "extra" / "metadata").read_bytes()
  try:
    record = json.loads(text)
  except (ValueError, RecursionError):  # bytes that are no text, or no JSON
    raise intact.Damage("its record differs from what was saved") from None
  extra = intact.opened(record)
  saved_by = extra.get("run")
  if run is not None and saved_by != run:
    raise intact.Damage(f"it is of another run: {saved_by} saved it, not {run}")
  return extra


def _require_same(saved: dict[str, str], wanted: dict[str, str]) -> None:
  for path in sorted(wanted):
    if saved.get(path) != wanted[path]:
      raise MismatchError(
        f"{path} is {str(saved.get(path, 'missing'))[:80]}, but this run needs "
        f"{wanted[path]}"
      )


def _require_digest(state: PyTree, saved: dict[str, str]) -> None:
  for path, value in intact.digest(state, saved).items():
    if value != saved.get(path):
      raise intact.Damage(f"{path} differs from what was saved")


def _require_step(state: PyTree, step: int) -> None:
  """Refuses a step that was copied to another number."""
  count = dict(intact.leaves(state)).get("step")
  if count is not None and int(count) != step:
    raise intact.Damage(f"its state is of step {int(count)}")
