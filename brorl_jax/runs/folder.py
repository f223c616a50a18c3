"""Run directory: who may use it, config.json, and moving a run aside."""

import json
import os
import pathlib
import subprocess
from collections.abc import Mapping, Set
from typing import Any

from brorl_jax import config
from brorl_jax.errors import UserError
from brorl_jax.runs import intact, lines, lock, machine

# A resumed run may have other values of these fields and is the same run...
_MAY_DIFFER = frozenset(
  name for name, about in config.every_field().items() if about.free
)
# ... but not of these if the last step or a checkpoint affects what is sampled
# next or when the reference is reset.
_ENDS = frozenset({"run.steps", "run.save_every", "run.max_samples"})
_PART = "config.json.part"  # while config.json is being written
# Files of earlier runs, by --begin_again, and later steps, by --from_step.
ASIDE = "set_aside"
# Directories of checkpoints that were moved aside.
_UNUSED = ("damaged_checkpoints", "newer_checkpoints")
_HELP = (
  "restore the missing files (is a disk not mounted?), choose another workdir, "
  f"or pass --begin_again, which moves all files to {ASIDE}/ in this one and "
  "starts at step 1"
)


def check_empty(workdir: pathlib.Path) -> None:
  """Raises UserError if a folder is not empty or cannot be written."""
  if _writable(workdir) == workdir and any(workdir.iterdir()):
    raise UserError(
      f"workdir {workdir} is not empty; choose an empty or new folder"
    )


def _writable(workdir: pathlib.Path) -> pathlib.Path:
  """The folder, or the nearest above it that exists; raises UserError."""
  # os.path.exists is False inside an unreadable folder; Path.exists raises.
  parent = next(
    p for p in (workdir, *workdir.absolute().parents) if os.path.exists(p)
  )
  if not (parent.is_dir() and os.access(parent, os.R_OK | os.W_OK | os.X_OK)):
    raise UserError(
      f"workdir {workdir}: {parent} is not a folder that can be read and "
      "written; change its permissions or choose another"
    )
  return parent


def check(
  values: Mapping[str, Any],
  workdir: pathlib.Path,
  *,
  allow_change: bool,
  free: Set[str] = _MAY_DIFFER,
  mode: str = "train",
) -> dict[str, Any]:
  """Refuses a folder that this run may not use; writes nothing.

  Args:
    allow_change: Whether the config may differ from the run's.
    free: Fields that may always differ.
    mode: The command's --mode. A folder of another mode is refused.

  Returns:
    Fields whose values differ from the run's, with their new values.

  Raises:
    UserError: The folder cannot be written, belongs to another mode or program,
      or to a run with another config.
  """
  if not _files(workdir):
    return {}
  record = _read(workdir)
  before, of = config.flat(record["config"]), record.get("mode", "train")
  if of != mode:
    raise _of_another_mode(workdir, of, mode)
  now = config.flat(_as_json(values))
  if now.get("run.pipeline") or now.get("reference.reset_stalled"):
    free = free - _ENDS
  changed = {
    k: now.get(k)
    for k in sorted(before.keys() | now.keys())
    if before.get(k) != now.get(k) and k not in free
  }
  if changed and not allow_change:
    fields = [
      f"{intact.clipped(k)} = {intact.clipped(repr(before.get(k)))} (now "
      f"{intact.clipped(repr(v))})"
      for k, v in changed.items()
    ]
    # All records of an evaluation must come from one config.
    helps = "pass --allow_config_change"
    if mode == "evaluate":
      helps = "use these values"
    raise UserError(
      f"workdir {workdir} belongs to a run with {', '.join(fields)}; choose "
      f"another workdir, or {helps}"
    )
  return changed


def _of_another_mode(workdir: pathlib.Path, of: str, mode: str) -> UserError:
  return UserError(
    f"workdir {workdir} belongs to --mode={of}, but this is --mode={mode}; "
    "choose another workdir"
  )


def _files(workdir: pathlib.Path) -> set[str]:
  """Names of the files of a run; raises UserError for those of others."""
  if _writable(workdir) != workdir:
    return set()
  # A run that is killed at once leaves only an incomplete config.json.
  names = {p.name for p in workdir.iterdir()} - {_PART, lock.NAME, ASIDE}
  if names and not names & {"config.json", "checkpoints", "metrics.jsonl"}:
    raise UserError(
      f"workdir {workdir} holds files that do not belong to a run; choose an "
      "empty or new folder"
    )
  return names


def _read(workdir: pathlib.Path) -> dict[str, Any]:
  """The contents of config.json; raises UserError if no run wrote it."""
  path = workdir / "config.json"
  try:
    record = json.loads(path.read_text())
    config = record.get("config") if isinstance(record, dict) else None
    if not isinstance(config, dict):
      raise ValueError("it does not hold the config of a run")
  except (OSError, ValueError, RecursionError) as e:
    raise UserError(f"{path} cannot be read: {e}; {_HELP}") from None
  return record


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
  """The values as config.json gives them back: tuples become lists."""
  return json.loads(json.dumps(values))


def configs(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """The config of each start of the run, the newest first."""
  if not (workdir / "config.json").exists():
    return []
  record = _read(workdir)
  earlier = [one["config"] for one in record.get("earlier") or []]
  return [record["config"], *reversed(earlier)]


def begun(workdir: pathlib.Path) -> str | None:
  """Why a run must not start here although there is no checkpoint, or None."""
  # Step 0 is evaluated before it is saved, so eval/ may have lines.
  for name in ("metrics.jsonl", "samples.jsonl", *_UNUSED):
    path = workdir / name
    if path.is_dir() or (path.exists() and path.stat().st_size):
      checkpoints = workdir / "checkpoints"
      return f"{path} has steps of a run, but {checkpoints} has no checkpoint"
  return None


def lost(why: str) -> UserError:
  """The error of a run that cannot resume and was not changed."""
  return UserError(f"{why}; no file was changed: {_HELP}")


def check_again(workdir: pathlib.Path) -> None:
  """Raises UserError if a folder holds no training run, and is not empty."""
  if "config.json" not in _files(workdir):
    return
  try:
    mode = _read(workdir).get("mode", "train")
  except UserError:  # damaged, as it often is when this is needed
    return
  if mode != "train":
    raise _of_another_mode(workdir, mode, "train")


def set_aside(workdir: pathlib.Path) -> pathlib.Path | None:
  """Moves all files of a run to a new folder; None if there are none."""
  if not (names := _files(workdir)):
    return None
  to = next_aside(workdir)
  to.mkdir(parents=True)
  # If this is killed, the rest is still refused as a run with missing files:
  # without lines a checkpoint is not used, and config.json is the last to go.
  when = {"metrics.jsonl": -1, "config.json": 1}
  for name in sorted(names, key=lambda name: (when.get(name, 0), name)):
    (workdir / name).rename(to / name)
  return to


def next_aside(workdir: pathlib.Path) -> pathlib.Path:
  """The next folder in set_aside/, which does not exist yet."""
  made = [p.name for p in (workdir / ASIDE).glob("*") if p.name.isdecimal()]
  return workdir / ASIDE / str(max(map(int, made), default=0) + 1)


def identity(values: Mapping[str, Any], data: Any) -> str:
  """Identity of a run: a hash of its data and of the fields that stay fixed.

  Two runs of the same config produce the same numbers and count as one.
  """
  fields = config.flat(_as_json(values))
  fixed = {k: v for k, v in fields.items() if k not in _MAY_DIFFER}
  return intact.seal([fixed, data])[:16]


def stored(workdir: pathlib.Path, what: str) -> Any:
  """An entry of config.json; None without one or without the file."""
  path = workdir / "config.json"
  return _read(workdir).get(what) if path.exists() else None


def write_config(
  values: Mapping[str, Any], workdir: pathlib.Path, **entries: Any
) -> None:
  """Writes config.json: the config, git commit, versions and `entries`.

  If the file of an earlier start differs, it is kept under "earlier".
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
    "config": _as_json(values),
    "git_commit": commit or None,
    "python": machine.PYTHON,
    "versions": machine.versions(),
    "machine": machine.here(),
    **entries,
  }
  path = workdir / "config.json"
  if path.exists():
    before = json.loads(path.read_text())
    earlier = before.pop("earlier", [])
    if before != record:
      earlier = [*earlier, before]
    record |= {"earlier": earlier} if earlier else {}
  lines.write_whole(path, json.dumps(record, indent=2) + "\n")
