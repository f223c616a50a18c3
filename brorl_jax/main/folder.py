"""The folder of a run: whose it is, and what it says of itself."""

import hashlib
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
from collections import Counter
from collections.abc import Set
from typing import Any

import jax

from brorl_jax import intact, lines
from brorl_jax.main import lock
from brorl_jax.main.settings import Config, UserError, flatten

# A run may go on with other values of these and still be the same run; the
# first three not where the last step or a checkpoint changes what is sampled
# next or when the reference is reset.
_FREE = frozenset(
  {"steps", "save_every", "max_busy_s", "keep_checkpoints", "samples_shown"}
)
_PART = "config.json.part"  # while it is written
_ASIDE = "set_aside"  # what a run left that was begun again
# Where checkpoints go that are not used.
_UNUSED = ("damaged_checkpoints", "newer_checkpoints")
_KINDS = {"run": str, "data": dict, "machine": dict, "earlier": list}
_HELP = (
  "bring back what is missing (is a disk not mounted?), choose another "
  f"workdir, or pass --begin_again, which moves all files to {_ASIDE}/ there "
  "and starts at step 1"
)
_ANEW = (
  "the same command on another workdir writes it anew, as it was at the "
  "beginning"
)
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
  try:
    os.lstat(workdir)
  except (FileNotFoundError, NotADirectoryError, PermissionError):
    pass
  except (OSError, ValueError) as e:  # its name is too long, or has a NUL
    raise UserError(f"workdir {str(workdir)!r}: {intact.told(e)}") from None
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
  if parent != workdir or not _files(workdir):
    return {}
  record = _read(workdir)
  before, of = flatten(record["config"]), record.get("mode", "train")
  if of != mode:
    raise _of_another_mode(workdir, of, mode)
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


def _of_another_mode(workdir: pathlib.Path, of: str, mode: str) -> UserError:
  return UserError(
    f"workdir {workdir} belongs to --mode={of}, this is --mode={mode}; "
    "choose another"
  )


def _files(workdir: pathlib.Path) -> set[str]:
  """What is there beside what says nothing of a run."""
  # A run that was killed at once leaves a config.json that is not whole.
  return {p.name for p in workdir.iterdir()} - {_PART, lock.NAME, _ASIDE}


def _read(workdir: pathlib.Path) -> dict[str, Any]:
  """config.json; raises UserError if it is not that of a run."""
  path = workdir / "config.json"
  try:
    record = json.loads(path.read_text())
    record["config"] = dict(record["config"])
  except FileNotFoundError:
    if not _files(workdir) & {"checkpoints", "metrics.jsonl"}:
      raise UserError(
        f"workdir {workdir} holds files that are no run; choose another"
      ) from None
    raise UserError(f"{path} is gone; {_HELP}; {_ANEW}") from None
  except (OSError, ValueError, KeyError, TypeError) as e:
    raise UserError(f"{path} cannot be read: {e}; {_HELP}; {_ANEW}") from None
  earlier = record.get("earlier") or []
  for field, kind in _KINDS.items():
    good = isinstance(record.get(field), kind | None)
    if not good or (field == "earlier" and not all(map(_has_config, earlier))):
      raise UserError(f"{path}: {field!r} is not as a run writes it; {_HELP}")
  return record


def _has_config(record: Any) -> bool:
  return isinstance(record, dict) and isinstance(record.get("config"), dict)


def configs(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """The config of each start of the run in a folder, the newest first."""
  if not (workdir / "config.json").exists():
    return []
  record = _read(workdir)
  earlier = [one["config"] for one in record.get("earlier") or []]
  return [record["config"], *reversed(earlier)]


def begun(workdir: pathlib.Path) -> str | None:
  """Why a run must not begin here, though no checkpoint of one is found."""
  there = f"steps of a run, and {workdir / 'checkpoints'} has no checkpoint"
  for name in ("metrics.jsonl", "samples.jsonl"):
    if (path := workdir / name).exists() and path.stat().st_size:
      return f"{path} has {there}"
  curve = workdir / "eval" / "curve.jsonl"
  # Step 0 is measured before it is saved.
  if curve.exists() and any(x["step"] > 0 for x in lines.each_whole(curve)):
    return f"{curve} has {there}"
  for name in _UNUSED:
    if (path := workdir / name).is_dir():
      return f"{path} has checkpoints of a run, which are not used"
  return None


def lost(why: str) -> UserError:
  """What is told of a run that cannot go on, and was not touched."""
  return UserError(f"{why}; nothing was changed: {_HELP}")


def check_again(workdir: pathlib.Path) -> None:
  """Refuses to set aside what is no training run.

  Raises:
    UserError: It is none, or cannot be written.
  """
  if _writable(workdir) != workdir or not (names := _files(workdir)):
    return
  if "config.json" in names:
    try:
      mode = _read(workdir).get("mode", "train")
    except UserError:  # as it often is when this is needed
      mode = "train"
    if mode != "train":
      raise _of_another_mode(workdir, mode, "train")
  elif not names & {"checkpoints", "metrics.jsonl"}:
    raise UserError(
      f"workdir {workdir} holds files that are no run; choose another"
    )


def set_aside(workdir: pathlib.Path) -> pathlib.Path | None:
  """Moves all files of a run to a folder of their own; None without any."""
  if not (names := _files(workdir)):
    return None
  taken = [int(p.name) for p in (workdir / _ASIDE).glob("[0-9]*")]
  to = workdir / _ASIDE / str(max(taken, default=0) + 1)
  to.mkdir(parents=True)
  # config.json last: whatever is left when this is killed is a run to which
  # something is missing, or none.
  for name in sorted(names, key=lambda name: name == "config.json"):
    (workdir / name).rename(to / name)
  return to


def identity(c: Config, data: Any) -> str:
  """Which run it is: what it began with, but for what may change in any.

  Two runs of one config are the same numbers, and so one.
  """
  fields = flatten(json.loads(c.to_json()))
  fixed = {k: v for k, v in fields.items() if k not in _FREE}
  text = json.dumps([fixed, data], sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def machine() -> dict[str, Any]:
  """What the last bits of a number may depend on."""
  kinds = Counter(device.device_kind for device in jax.devices())
  # macOS cannot say which of them this process may use.
  mine = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
  return {"cpus": len(mine(0)), "devices": dict(kinds)}


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
    "machine": machine(),
    **found,
  }
  path = workdir / "config.json"
  if path.exists():
    before = json.loads(path.read_text())
    earlier = before.pop("earlier", [])
    if before != record:
      earlier = [*earlier, before]
    record |= {"earlier": earlier} if earlier else {}
  lines.replace(path, json.dumps(record, indent=2) + "\n")
