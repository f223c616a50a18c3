"""Checkpoints by orbax: asynchronous, atomic, and verified when they are read.

A step on disk is whole or it is not there (orbax commits by a rename). That
does not protect from damage afterwards, and one flipped bit restores a wrong
state without a word; so each step also holds a digest of every array, and a
step that does not match is set aside by name and the one before it used.
"""

import hashlib
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import PyTree


class Unusable(ValueError):
  """There are checkpoints, but none that this run can go on from."""


class Store:
  """The steps of one run, newest first."""

  def __init__(
    self,
    directory: str | pathlib.Path,
    *,
    keep: int,
    warn: Callable[[str], None] = print,
  ):
    """Opens or makes the directory.

    Args:
      directory: Of the checkpoints; orbax wants it absolute.
      keep: Newest steps that are kept.
      warn: Receives one line for each step that could not be used.
    """
    self._directory = pathlib.Path(directory).absolute()
    self._warn = warn
    self._manager = ocp.CheckpointManager(
      self._directory,
      options=ocp.CheckpointManagerOptions(
        max_to_keep=keep, enable_async_checkpointing=True
      ),
    )

  def save(self, step: int, state: PyTree, ledger: dict[str, Any]) -> None:
    """Saves in the background; `state` may be donated afterwards.

    Args:
      step: Must be newer than every saved one.
      state: Arrays.
      ledger: What is to be remembered beside arrays, as JSON.
    """
    # Copies: on CPU the host's view of an array is the array itself, and the
    # next update would write into it while it is being saved.
    state = jax.tree.map(_own_copy, state)
    extra = {
      "ledger": ledger,
      "leaves": describe(state),
      "digest": digest(state),
    }
    extra["seal"] = _seal(extra)
    self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(state), extra=ocp.args.JsonSave(extra)
      ),
    )

  def restore(self, like: PyTree) -> tuple[PyTree, dict[str, Any]] | None:
    """The newest step that is whole, or None if nothing was ever saved.

    Args:
      like: Arrays, or their abstract form with shardings.

    Raises:
      Unusable: There are steps, and none can be used, or the newest whole
        one holds other arrays than `like`.
    """
    steps = sorted(self._manager.all_steps(), reverse=True)
    for step in steps:
      try:
        state, ledger = self._read(step, like)
      except MismatchError as e:  # a whole step, only not of this model
        raise Unusable(f"checkpoint {step} in {self._directory}: {e}") from e
      except Exception as e:  # orbax raises many kinds for one damaged file
        lines = str(e).splitlines() or [type(e).__name__]
        aside = self._set_aside(step)
        self._warn(f"checkpoint {step} is not used ({lines[0]}): see {aside}")
        continue
      return state, ledger
    if steps:
      raise Unusable(f"no checkpoint in {self._directory} can be used")
    return None

  def wait(self) -> None:
    """Returns when all saves are on disk; raises if one failed."""
    self._manager.wait_until_finished()
    self._manager.check_for_errors()

  def close(self) -> None:
    """Waits, and lets go of the directory."""
    self.wait()
    self._manager.close()

  def _read(self, step, like) -> tuple[PyTree, dict[str, Any]]:
    item = lambda **args: self._manager.restore(
      step, args=ocp.args.Composite(**args)
    )
    extra = item(extra=ocp.args.JsonRestore())["extra"]
    if extra.pop("seal") != _seal(extra):
      raise ValueError("its record is not what was saved")
    # First, because orbax casts to the wanted dtype without a word.
    saved, wanted = extra["leaves"], describe(like)
    missing = dict.fromkeys(saved.keys() - wanted.keys(), "no such array")
    _require_same(saved, wanted | missing)
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    state = item(state=ocp.args.StandardRestore(target))["state"]
    _require_digest(state, extra["digest"])
    return state, extra["ledger"]

  def _set_aside(self, step: int) -> pathlib.Path:
    to = self._directory.parent / "damaged_checkpoints" / str(step)
    shutil.rmtree(to, ignore_errors=True)
    to.parent.mkdir(exist_ok=True)
    (self._directory / str(step)).rename(to)
    self._manager.reload()
    return to


def read_params(
  directory: str | pathlib.Path, step: int | None, like: PyTree
) -> tuple[int, PyTree]:
  """Parameters alone, of the newest step or of one, verified.

  Args:
    directory: Of the checkpoints of a run; nothing in it is changed.
    step: Which; None takes the newest.
    like: Abstract parameters with shardings.

  Returns:
    The step and its parameters.

  Raises:
    Unusable: There is no such step, it is damaged, or of another policy.
  """
  directory = pathlib.Path(directory).absolute()
  names = [p.name for p in directory.glob("*") if p.name.isdigit()]
  steps = sorted(map(int, names))
  if not steps or step not in (None, *steps):
    have = ", ".join(map(str, steps)) or "none"
    what = "checkpoint" if step is None else f"checkpoint {step}"
    raise Unusable(f"there is no {what} in {directory}; there are: {have}")
  step = steps[-1] if step is None else step
  args = ocp.args.PyTreeRestore(
    item={"params": like},
    restore_args=ocp.checkpoint_utils.construct_restore_args({"params": like}),
    partial_restore=True,
  )
  try:
    extra = json.loads((directory / str(step) / "extra/metadata").read_text())
    if extra.pop("seal") != _seal(extra):
      raise ValueError("its record is not what was saved")
    _require_same(extra["leaves"], describe({"params": like}))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
      params = reader.restore(directory / str(step) / "state", args=args)
    _require_digest(params, extra["digest"])
  except Exception as e:  # orbax raises many kinds for one damaged file
    lines = str(e).splitlines() or [type(e).__name__]
    raise Unusable(f"checkpoint {step} in {directory}: {lines[0]}") from e
  return step, params["params"]


def _require_same(saved: dict[str, str], wanted: dict[str, str]) -> None:
  for path in sorted(wanted):
    if saved.get(path) != wanted[path]:
      raise MismatchError(
        f"{path} is {saved.get(path, 'not there')}, this run needs "
        f"{wanted[path]}"
      )


def _require_digest(state: PyTree, saved: dict[str, str]) -> None:
  for path, value in digest(state).items():
    if value != saved.get(path):
      raise ValueError(f"{path} is not what was saved")


class MismatchError(Exception):
  """A step is whole, but holds other arrays than the run needs."""


def describe(state: PyTree) -> dict[str, str]:
  """Dtype and shape of each array, by path: "float32[3, 4]"."""
  return {
    path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in _leaves(state)
  }


def digest(state: PyTree) -> dict[str, str]:
  """SHA-256 of each array, by path.

  Arrays that are spread over several processes are left out: no process sees
  all of such an array.
  """
  out = {}
  for path, leaf in _leaves(state):
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
      continue
    value = np.ascontiguousarray(np.asarray(leaf))
    out[path] = hashlib.sha256(value.tobytes()).hexdigest()
  return out


def _leaves(state: PyTree) -> Iterator[tuple[str, Any]]:
  for path, leaf in jax.tree_util.tree_leaves_with_path(state):
    yield jax.tree_util.keystr(path, simple=True, separator="/"), leaf


def _seal(extra: dict[str, Any]) -> str:
  text = json.dumps(extra, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def _own_copy(x: Any) -> Any:
  if not isinstance(x, jax.Array):
    return x  # orbax copies these itself
  # Not pop(): devices() is the very set that the mesh keeps.
  on_cpu = next(iter(x.devices())).platform == "cpu"
  return jax.numpy.copy(x) if on_cpu else x
