"""Going back to an earlier step of a run; what came after is kept beside it.

It can be killed at any moment: the same command ends in the same state. Until
all is moved, `_BEGUN` in the new folder says to which step. The lines of a file
are copied there before any is dropped, and all are dropped at once.
"""

import json
import pathlib
from typing import Any

from brorl_jax import processes
from brorl_jax.errors import StorageError, UserError
from brorl_jax.runs import events, folder, lines, stored, sums

_BEGUN = "unfinished"  # holds the step
_EVENTS = "events.jsonl"
_CONFIG = "config.json"  # with it the checkpoints can be used where they are
_TRACKER = "wandb_id"  # wandb takes no step twice: a new run of wandb begins


def require_saved(workdir: pathlib.Path, step: int) -> None:
  """Refuses a step that is not there; raises UserError."""
  try:
    stored.find(workdir / "checkpoints", step)
  except stored.NoWayBack as e:
    raise UserError(f"--from_step={step}: {e}") from None
  except stored.Unreachable as e:
    raise StorageError(str(e)) from None


def before_start(workdir: pathlib.Path, step: int | None) -> None:
  """Goes back to a step, if one is given; every process calls this.

  Raises:
    OSError: See `go_back`.
  """
  if processes.leads():
    _forget(workdir, step)
    if step is not None:
      to = go_back(workdir, step)
      print(
        f"nothing is after step {step}"
        if to is None
        else f"moved what was after step {step} to {to}"
      )
  processes.gather(None)  # nobody reads the steps before


def go_back(workdir: pathlib.Path, step: int) -> pathlib.Path | None:
  """Makes a saved step the newest of a run.

  Args:
    workdir: Folder of the run, whose lock this process has.
    step: The step.

  Returns:
    The folder with the checkpoints and lines after it; None without any.

  Raises:
    OSError: A file cannot be moved or copied; the same call goes on.
  """
  saved = workdir / "checkpoints"
  later = [s for s in stored.steps(saved) if s > step]
  files = [*workdir.glob("*.jsonl"), *workdir.glob("eval/*.jsonl")]
  after = {p: rest for p in files if (rest := _later(p, step))}
  if (to := _begun(workdir, step)) is None:
    if not later and not after:
      return None
    to = _begin(workdir, step)
  for path, rest in after.items():
    copy = to / path.relative_to(workdir)
    copy.parent.mkdir(exist_ok=True)
    lines.write_whole(copy, "".join(json.dumps(x) + "\n" for x in rest))
  if not (to / _CONFIG).exists():
    lines.write_whole(to / _CONFIG, (workdir / _CONFIG).read_text())
  for newer in reversed(later):
    (to / saved.name).mkdir(exist_ok=True)
    (saved / str(newer)).rename(to / saved.name / str(newer))
  if (workdir / _TRACKER).exists():
    (workdir / _TRACKER).rename(to / _TRACKER)
  sums.shorten(workdir, step)
  for path in files:
    _open(path, step).close()
  _tell(workdir, step, to)
  (to / _BEGUN).unlink()
  return to


def _later(path: pathlib.Path, step: int) -> list[dict[str, Any]]:
  """The lines after a step; events of processes stay where they are."""
  found = lines.later(path, step)
  if path.name == _EVENTS:
    return [line for line in found if not events.of_process(line)]
  return found


def _open(path: pathlib.Path, step: int) -> lines.JsonLines:
  """A file without the lines after a step; events of processes stay."""
  keep = events.of_process if path.name == _EVENTS else lambda line: False
  return lines.JsonLines(path, after=step, warn=print, keep=keep)


def _forget(workdir: pathlib.Path, step: int | None) -> None:
  """Leaves what a killed `go_back` began, unless this start goes on with it."""
  for path in folder.asides(workdir):
    if _step(path) not in (None, step):
      (path / _BEGUN).unlink()


def _begun(workdir: pathlib.Path, step: int) -> pathlib.Path | None:
  """The folder of a call for this step that was killed."""
  return next((p for p in folder.asides(workdir) if _step(p) == step), None)


def _step(path: pathlib.Path) -> int | None:
  """The step of a call that was killed; None if it was not."""
  begun = path / _BEGUN
  text = begun.read_text().strip() if begun.exists() else ""
  return int(text) if text.isdecimal() else None


def _begin(workdir: pathlib.Path, step: int) -> pathlib.Path:
  left = f"{_BEGUN}.part"  # of a call that was killed in the next lines
  empty = [
    path
    for path in folder.asides(workdir)[-1:]
    if {x.name for x in path.iterdir()} <= {left}
  ]
  to = empty[0] if empty else folder.new_aside(workdir)
  lines.write_whole(to / _BEGUN, f"{step}\n")
  return to


def _tell(workdir: pathlib.Path, step: int, to: pathlib.Path) -> None:
  """Writes the event, once."""
  metrics = to / "metrics.jsonl"
  written = lines.read_lines(metrics) if metrics.exists() else []
  last = [step, *stored.steps(to / "checkpoints")]
  last += [line["step"] for line in written]
  kept = to.relative_to(workdir).as_posix()
  what = {"event": "back", "from": max(last), "kept": kept}
  path = workdir / _EVENTS
  out = _open(path, step)
  if not any(what.items() <= one.items() for one in lines.read_lines(path)):
    out.write({"step": step, "time": events.now(), **what})
    out.sync()
  out.close()
