"""Run directory: whose it is, config.json with the machine, moving a run aside.

One process at a time may use it.
"""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from brorl_jax import config, errors
from brorl_jax.errors import UserError
from brorl_jax.many import processes
from brorl_jax.runs import intact, lines

# A resumed run may have other values of these fields and is the same run...
_MAY_DIFFER = frozenset(k for k, x in config.every_field().items() if x.free)
# ... but not of these if the last step or a checkpoint affects what is sampled
# next or when the reference is reset.
_ENDS = frozenset({"run.steps", "run.save_every", "run.max_samples"})
_PART = "config.json.part"  # while config.json is being written
# Files of earlier runs, by --begin_again, and later steps, by --from_step.
ASIDE = "set_aside"
_LOCK = ".lock"  # file with the id of the process
_HELP = (
  "restore the missing files (is a disk not mounted?), choose another workdir, "
  f"or pass --begin_again, which moves all files to {ASIDE}/ in this one and "
  "starts at step 1"
)
_NEW = "choose an empty or new folder"
_FEW = 4  # names in a line
_PYTHON = platform.python_version()
# Settings of XLA and jax that may change how a number is computed.
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
_JAX_FLAGS = """
  jax_default_matmul_precision jax_default_prng_impl jax_threefry_partitionable
  jax_disable_most_optimizations jax_enable_x64
""".split()
_CPUINFO = pathlib.Path("/proc/cpuinfo")
_LIBRARIES = """
  jax jaxlib jax-cuda12-plugin libtpu flax optax orbax-checkpoint transformers
  tokenizers reasoning-gym mpmath sympy grain numpy
""".split()


@contextlib.contextmanager
def hold(workdir: pathlib.Path) -> Iterator[None]:
  """Creates the folder and has its lock; UserError if that cannot be."""
  with contextlib.ExitStack() as stack:
    try:
      workdir.mkdir(parents=True, exist_ok=True)
      file = stack.enter_context((workdir / _LOCK).open("a+"))
      try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
      except OSError:
        holder = (workdir / _LOCK).read_text().strip()
        used = f"workdir {workdir} is in use by process {holder}"
        must = "wait for it, or choose another workdir"
        raise UserError(f"{used}; {must}") from None
      file.truncate(0)
      file.write(f"{os.getpid()}\n")
      file.flush()
    except OSError as e:
      why = f"workdir {workdir} cannot be written: {e}; nothing was started"
      raise errors.of_system(e, f"{why}: {errors.AGAIN}") from None
    yield


def check_empty(workdir: pathlib.Path) -> None:
  """Raises UserError if a folder is not empty or cannot be written."""
  if _exists(workdir) and any(workdir.iterdir()):
    raise UserError(f"workdir {workdir} is not empty; {_NEW}")


def _exists(workdir: pathlib.Path) -> bool:
  """Whether there is such a folder; UserError if it could not be written."""
  # os.path.exists is False inside an unreadable folder; Path.exists raises.
  places = workdir, *workdir.absolute().parents
  parent = next(filter(os.path.exists, places))
  if not (parent.is_dir() and os.access(parent, os.R_OK | os.W_OK | os.X_OK)):
    why = f"{parent} is not a folder that can be read and written"
    must = "change its permissions or choose another"
    raise UserError(f"workdir {workdir}: {why}; {must}")
  return parent == workdir


def check(
  values: Mapping[str, Any],
  workdir: pathlib.Path,
  *,
  allow_change: bool,
  mode: str = "train",
) -> dict[str, Any]:
  """Refuses a folder that this run may not use; writes nothing.

  Returns the fields whose values differ from the run's, with their new values.
  Raises UserError if the folder cannot be written, or belongs to another mode,
  another program or a run with another config.
  """
  if not files(workdir):
    return {}
  record = _read(workdir)
  if (of := record.get("mode", "train")) != mode:
    its = f"workdir {workdir} belongs to --mode={of}"
    raise UserError(f"{its}, but this is --mode={mode}; choose another workdir")
  before, now = config.flat(record["config"]), config.flat(_as_json(values))
  # A simulation always starts again.
  free = _MAY_DIFFER if mode != "simulate" else frozenset()
  best = now.get("reference.reset_to") == "best"
  if best or now.get("reference.reset_stalled"):
    free = free - _ENDS
  fields = sorted((before.keys() | now.keys()) - free)
  changed = {k: now.get(k) for k in fields if before.get(k) != now.get(k)}
  # Its checkpoints hold this adapter, and are read with its scale.
  fixed = {k: v for k, v in changed.items() if k.startswith("policy.lora_")}
  if named := fixed or (not allow_change and changed):
    each = [f"{k} = {before.get(k)!r} (now {v!r})" for k, v in named.items()]
    # All records of an evaluation must come from one config.
    same = fixed or mode == "evaluate"
    helps = "use these values" if same else "pass --allow_config_change"
    its = f"workdir {workdir} belongs to a run with {few(each)}"
    raise UserError(f"{its}; choose another workdir, or {helps}")
  return changed


def files(workdir: pathlib.Path) -> set[str]:
  """Names of the files of a run; raises UserError for those of others."""
  if not _exists(workdir):
    return set()
  # A run that is killed at once leaves only an incomplete config.json.
  names = {p.name for p in workdir.iterdir()} - {_PART, _LOCK, ASIDE}
  if names and not names & {"config.json", "checkpoints", "metrics.jsonl"}:
    others = f"workdir {workdir} holds files that do not belong to a run"
    raise UserError(f"{others}; {_NEW}")
  return names


def _read(workdir: pathlib.Path) -> dict[str, Any]:
  path = workdir / "config.json"
  try:
    record = json.loads(path.read_text())
    if not isinstance(record, dict) or not isinstance(record["config"], dict):
      raise ValueError("it does not hold the config of a run")
  except (OSError, ValueError, KeyError, RecursionError) as e:
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
  earlier = [start["config"] for start in record.get("earlier") or []]
  return [record["config"], *reversed(earlier)]


def begun(workdir: pathlib.Path) -> str | None:
  """Why a run must not start here although there is no checkpoint, or None."""
  # Step 0 is evaluated before it is saved, so eval/ may have lines.
  for path in (workdir / "metrics.jsonl", workdir / "samples.jsonl"):
    if path.exists() and path.stat().st_size:
      checkpoints = workdir / "checkpoints"
      return f"{path} has steps of a run, but {checkpoints} has no checkpoint"
  return None


def few(names: Sequence[str]) -> str:
  """The first names of a list, and how many more there are."""
  more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
  return ", ".join(names[:_FEW]) + more


def lost(why: str) -> UserError:
  """The error of a run that cannot resume and was not changed."""
  return UserError(f"{why}; no file was changed: {_HELP}")


def set_aside(workdir: pathlib.Path) -> pathlib.Path | None:
  """Moves all files of a run to a new folder; None if there are none."""
  if not (names := files(workdir)):
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
  """Writes config.json; keeps what an earlier start had under "earlier"."""
  root = pathlib.Path(__file__).parents[2]
  git = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
  try:
    done = subprocess.run(
      git, cwd=root, capture_output=True, text=True, timeout=10
    )
    commit = done.stdout.strip() or None
  except (OSError, subprocess.SubprocessError):
    commit = None
  record = {
    "config": _as_json(values),
    "git_commit": commit,
    "python": _PYTHON,
    "versions": versions(),
    "machine": here(),
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


def versions() -> dict[str, str]:
  """The installed libraries that may affect a number."""
  found = {}
  for name in _LIBRARIES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found[name] = importlib.metadata.version(name)
  return found


def here() -> dict[str, Any]:
  """The hardware and flags that may affect the last bits of a number."""
  flags = {name: os.environ.get(name, "") for name in _FLAGS}
  flags |= {name: str(jax.config.values[name]) for name in _JAX_FLAGS}
  found = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
  named = [x for x in found if x.startswith(("model name", "CPU part"))] or [""]
  return {
    "cpus": len(processes.cores()),
    "processor": named[0].partition(":")[2].strip() or platform.processor(),
    "devices": dict(Counter(device.device_kind for device in jax.devices())),
    "processes": jax.process_count(),
    "flags": flags,
  }


def differences(workdir: pathlib.Path) -> dict[str, tuple[Any, Any]]:
  """What may change the bits of a run that resumes here: before and now."""
  if not (workdir / "config.json").exists():
    return {}
  last, now = _read(workdir), here()
  before = last.get("machine") or {}
  before |= before.pop("flags", {})
  now |= now.pop("flags")
  before |= {"Python": last.get("python"), **(last.get("versions") or {})}
  now |= {"Python": _PYTHON, **versions()}
  both = {name: (before.get(name), now.get(name)) for name in {**now, **before}}
  return {name: (a, b) for name, (a, b) in both.items() if a != b}
