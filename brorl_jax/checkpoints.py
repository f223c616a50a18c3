"""Checkpoints by orbax: asynchronous, atomic, and verified when they are read.

A step on disk is whole or it is not there (orbax commits by a rename). That
does not protect from damage afterwards, and one flipped bit restores a wrong
state without a word; so each step also holds a digest of every array, and a
step that does not match is set aside by name and the one before it used.
"""

import hashlib
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import PyTree


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

  def save(self, step: int, state: PyTree, totals: dict[str, int]) -> None:
    """Saves in the background; `state` may be donated afterwards.

    Args:
      step: Must be newer than every saved one.
      state: Arrays.
      totals: Counters that outgrow 32 bits.
    """
    # Copies: on CPU the host's view of an array is the array itself, and the
    # next update would write into it while it is being saved.
    state = jax.tree.map(_own_copy, state)
    extra = {"totals": totals, "digest": digest(state)}
    self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(state), extra=ocp.args.JsonSave(extra)
      ),
    )

  def restore(self, like: PyTree) -> tuple[PyTree, dict[str, int]] | None:
    """The newest step that is whole, or None if nothing was ever saved.

    Args:
      like: Arrays, or their abstract form with shardings.

    Raises:
      ValueError: There are steps, and none can be used.
    """
    steps = sorted(self._manager.all_steps(), reverse=True)
    for step in steps:
      try:
        state, totals = self._read(step, like)
      except Exception as e:  # orbax raises many kinds for one damaged file
        lines = str(e).splitlines() or [type(e).__name__]
        aside = self._set_aside(step)
        self._warn(f"checkpoint {step} is not used ({lines[0]}): see {aside}")
        continue
      return state, totals
    if steps:
      raise ValueError(f"no checkpoint in {self._directory} can be used")
    return None

  def wait(self) -> None:
    """Returns when all saves are on disk; raises if one failed."""
    self._manager.wait_until_finished()
    self._manager.check_for_errors()

  def close(self) -> None:
    """Waits, and lets go of the directory."""
    self.wait()
    self._manager.close()

  def _read(self, step, like) -> tuple[PyTree, dict[str, int]]:
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    read = self._manager.restore(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardRestore(target), extra=ocp.args.JsonRestore()
      ),
    )
    want = read["extra"]["digest"]
    got = digest(read["state"])
    if bad := [path for path in got if got[path] != want.get(path)]:
      raise ValueError(f"{bad[0]} is not what was saved")
    return read["state"], read["extra"]["totals"]

  def _set_aside(self, step: int) -> pathlib.Path:
    to = self._directory.parent / "damaged_checkpoints" / str(step)
    shutil.rmtree(to, ignore_errors=True)
    to.parent.mkdir(exist_ok=True)
    (self._directory / str(step)).rename(to)
    self._manager.reload()
    return to


def digest(state: PyTree) -> dict[str, str]:
  """SHA-256 of each array with its dtype and shape, by path.

  Arrays that are spread over several processes are left out: no process sees
  all of such an array.
  """
  out = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(state):
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
      continue
    value = np.ascontiguousarray(np.asarray(leaf))
    head = f"{value.dtype}{value.shape}".encode()
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    out[name] = hashlib.sha256(head + value.tobytes()).hexdigest()
  return out


def _own_copy(x: Any) -> Any:
  on_cpu = isinstance(x, jax.Array) and x.devices().pop().platform == "cpu"
  return jax.numpy.copy(x) if on_cpu else x
