"""The folder of a run: whose it is, and what it says of itself."""

import fcntl
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Set
from typing import IO, Any

from brorl_jax.main.settings import Config, UserError, flatten

# A run may go on with other values of these and still be the same run; the
# first three not where the last step or a checkpoint changes what is sampled
# next or when the reference is reset.
_FREE = frozenset(
  {"steps", "save_every", "max_busy_s", "keep_checkpoints", "samples_shown"}
)
_LOCK = ".lock"  # names the process that works in the folder
_PART = "config.json.part"  # while it is written
_LIBRARIES = (
  "jax",
  "flax",
  "optax",
  "orbax-checkpoint",
  "transformers",
  "reasoning-gym",
  "mpmath",
  "sympy",
  "grain",
  "numpy",
)


def check_empty(workdir: pathlib.Path) -> None:
  """Refuses a folder that holds anything, or that cannot be written.

  Raises:
    UserError: It is one.
  """
  if _writable(workdir) == workdir and any(workdir.iterdir()):
    raise UserError(f"workdir {workdir} is not an empty folder")


def _writable(workdir: pathlib.Path) -> pathlib.Path:
  """The folder, or the nearest above it that exists; raises UserError."""
  # os.path: what lies in a closed folder does not exist, rather than raise.
  parent = next(
    p for p in (workdir, *workdir.absolute().parents) if os.path.exists(p)
  )
  if not parent.is_dir():
    raise UserError(f"workdir {workdir}: {parent} is not a folder")
  if not os.access(parent, os.R_OK | os.W_OK | os.X_OK):
    raise UserError(f"workdir {workdir}: {parent} cannot be read and written")
  return parent


def check(
  c: Config,
  workdir: pathlib.Path,
  *,
  allow_change: bool,
  free: Set[str] = _FREE,
  mode: str = "train",
) -> dict[str, Any]:
  """Refuses a folder that this run may not use; nothing is written.

  Args:
    c: The config.
    workdir: The folder.
    allow_change: Whether a run with another config is accepted.
    free: Fields in which another config is accepted in any case.
    mode: Of the command; a folder of another one's is refused.

  Returns:
    Fields that the run had other values of, with those it has now.

  Raises:
    UserError: It cannot be written, belongs to something else, or to a run
      with another config.
  """
  parent = _writable(workdir)
  # A run that was killed at once leaves a config.json that is not whole.
  mine = {_PART, _LOCK}
  if parent != workdir or {p.name for p in workdir.iterdir()} <= mine:
    return {}
  path = workdir / "config.json"
  try:
    record = json.loads(path.read_text())
    before, of = flatten(dict(record["config"])), record.get("mode", "train")
  except FileNotFoundError:
    raise UserError(
      f"workdir {workdir} holds files that are no run; choose another"
    ) from None
  except (OSError, ValueError, KeyError, TypeError) as e:
    raise UserError(f"{path} cannot be read: {e}") from None
  if of != mode:
    raise UserError(
      f"workdir {workdir} belongs to --mode={of}, this is --mode={mode}; "
      "choose another"
    )
  now = flatten(json.loads(c.to_json()))
  if now.get("pipeline") or now.get("reset_stalled"):
    free = free - {"steps", "save_every", "max_busy_s"}
  changed = {
    k: now.get(k)
    for k in sorted(before.keys() | now.keys())
    if before.get(k) != now.get(k) and k not in free
  }
  if changed and not allow_change:
    told = [f"{k} = {before.get(k)!r} (now {v!r})" for k, v in changed.items()]
    # An evaluation has records of all its prompts alike, or none.
    helps = (
      "give these values again"
      if mode == "evaluate"
      else "pass --allow_config_change"
    )
    raise UserError(
      f"workdir {workdir} belongs to a run with {', '.join(told)}; choose "
      f"another, or {helps}"
    )
  return changed


def hold(workdir: pathlib.Path) -> IO[str]:
  """Makes the folder and keeps other processes out of it while this one lives.

  Raises:
    UserError: It cannot be made, or another process holds it.
  """
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    lock = (workdir / _LOCK).open("a+")
  except OSError as e:
    raise UserError(f"workdir {workdir} cannot be written: {e}") from None
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError:
    lock.seek(0)
    holder = lock.read().strip()
    lock.close()
    raise UserError(
      f"workdir {workdir} is in use by process {holder}"
    ) from None
  lock.truncate(0)
  lock.write(f"{os.getpid()}\n")
  lock.flush()
  return lock


def said(workdir: pathlib.Path, what: str) -> Any:
  """What config.json of an earlier start says, None if there is none."""
  path = workdir / "config.json"
  return json.loads(path.read_text()).get(what) if path.exists() else None


def write_config(c: Config, workdir: pathlib.Path, **found: Any) -> None:
  """config.json: the resolved config, the commit, the versions, and `found`.

  What an earlier start of the run had, if it differs, goes below "earlier".
  """
  root = pathlib.Path(__file__).parents[2]
  try:
    commit = subprocess.run(
      ["git", "describe", "--always", "--dirty", "--abbrev=40"],
      cwd=root,
      capture_output=True,
      text=True,
      timeout=10,
    ).stdout.strip()
  except (OSError, subprocess.SubprocessError):
    commit = ""
  record = {
    "config": json.loads(c.to_json()),
    "git_commit": commit or None,
    "python": sys.version.split()[0],
    "versions": {name: importlib.metadata.version(name) for name in _LIBRARIES},
    **found,
  }
  path = workdir / "config.json"
  if path.exists():
    before = json.loads(path.read_text())
    earlier = before.pop("earlier", [])
    if before != record:
      earlier = [*earlier, before]
    record |= {"earlier": earlier} if earlier else {}
  part = workdir / _PART
  part.write_text(json.dumps(record, indent=2) + "\n")
  part.replace(path)
