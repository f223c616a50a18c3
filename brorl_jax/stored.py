"""One step of a run on disk: its record, its arrays, and what both must be."""

import json
import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from brorl_jax import intact

# To the host: on the devices there may be no room for a second state.
_ON_HOST = ocp.RestoreArgs(restore_type=np.ndarray)


class Unusable(ValueError):
  """There are checkpoints, but none that this run can go on from."""


class Unreachable(Unusable):
  """They cannot be read now, which says nothing about them."""


class MismatchError(Exception):
  """A step is whole, but holds other arrays than the run needs."""


def read(
  folder: pathlib.Path, like: PyTree, run: str | None
) -> tuple[PyTree, dict[str, Any]]:
  """State and ledger of a step, verified.

  Args:
    folder: Of the step, whose number is its name.
    like: Arrays, or their abstract form with shardings.
    run: Which run's it should be.

  Raises:
    MismatchError: It holds other arrays.
    Exception: Of many kinds, if it is damaged or cannot be read; which of
      both, `intact.unreachable` says.
  """
  extra = _record(folder, run)
  # First, because orbax casts to the wanted dtype without a word.
  saved, wanted = extra["leaves"], intact.describe(like)
  missing = dict.fromkeys(saved.keys() - wanted.keys(), "no such array")
  _require_same(saved, wanted | missing)
  target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
  with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
    state = reader.restore(
      folder / "state", args=ocp.args.StandardRestore(target)
    )
  _require_digest(state, extra["digest"])
  _require_step(state, int(folder.name))
  return state, extra["ledger"]


def compare(folder: pathlib.Path, like: PyTree, extra: dict[str, Any]) -> None:
  """Reads a step back that was just written.

  Args:
    folder: Of the step.
    like: Its arrays in abstract form.
    extra: Its record.

  Raises:
    Exception: It is not what was written, or cannot be read.
  """
  if _record(folder, None) != extra:
    raise intact.Damage("its record is not what was saved")
  wanted = extra["digest"]
  item = jax.tree_util.tree_map_with_path(
    lambda path, x: x if intact.name(path) in wanted else ocp.PLACEHOLDER, like
  )
  how = jax.tree.map(lambda _: _ON_HOST, like)
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
    state = reader.restore(
      folder / "state",
      args=ocp.args.PyTreeRestore(item=item, restore_args=how),
    )
  found = intact.digest(state)
  for path, value in wanted.items():
    if found.get(path) != value:
      raise intact.Damage(f"{path} is not what was saved")


def steps(directory: pathlib.Path) -> list[int]:
  """The steps in a directory of checkpoints, ascending; [] if it is gone.

  Raises:
    Unreachable: It cannot be read.
  """
  try:
    return sorted(int(p.name) for p in directory.iterdir() if p.name.isdigit())
  except FileNotFoundError:
    return []
  except OSError as e:
    raise Unreachable(
      f"{intact.told(e)}; nothing was changed: mend that, and start again"
    ) from e


def read_params(
  directory: str | pathlib.Path,
  step: int | None,
  like: PyTree,
  run: str | None = None,
) -> tuple[int, PyTree]:
  """Parameters alone, of the newest step or of one, verified.

  Args:
    directory: Of the checkpoints of a run; nothing in it is changed.
    step: Which; None takes the newest.
    like: Abstract parameters with shardings.
    run: Which run's they should be.

  Returns:
    The step and its parameters.

  Raises:
    Unusable: There is no such step, it is damaged, of another policy or of
      another run.
  """
  directory = pathlib.Path(directory).absolute()
  there = steps(directory)
  if not there or step not in (None, *there):
    have = ", ".join(map(str, there)) or "none"
    what = "checkpoint" if step is None else f"checkpoint {step}"
    raise Unusable(f"there is no {what} in {directory}; there are: {have}")
  step = there[-1] if step is None else step
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
      found = reader.restore(directory / str(step) / "state", args=args)
    _require_digest(found, extra["digest"])
    _require_step(found, step)
  except Exception as e:  # orbax raises many kinds for one damaged file
    raise Unusable(f"checkpoint {step} in {directory}: {intact.told(e)}") from e
  return step, found["params"]


def _record(folder: pathlib.Path, run: str | None) -> dict[str, Any]:
  """What a step says of itself, if it is as it was saved, and by this run."""
  text = (folder / "extra" / "metadata").read_bytes()
  extra = intact.opened(json.loads(text))
  saved_by = extra.get("run")
  if run is not None and saved_by not in (None, run):
    raise intact.Damage(f"it is of another run: {saved_by}, this one is {run}")
  return extra


def _require_same(saved: dict[str, str], wanted: dict[str, str]) -> None:
  for path in sorted(wanted):
    if saved.get(path) != wanted[path]:
      raise MismatchError(
        f"{path} is {saved.get(path, 'not there')}, this run needs "
        f"{wanted[path]}"
      )


def _require_digest(state: PyTree, saved: dict[str, str]) -> None:
  for path, value in intact.digest(state).items():
    if value != saved.get(path):
      raise intact.Damage(f"{path} is not what was saved")


def _require_step(state: PyTree, step: int) -> None:
  """A copy under another number is whole, and not what it is called."""
  count = dict(intact.leaves(state)).get("step")
  if count is not None and int(count) != step:
    raise intact.Damage(f"its state is that of step {int(count)}")
