"""Going back to an earlier step of a run; later checkpoints are kept beside it.

It can be killed at any moment: they gather in a folder that has its number
only once all are there, and every start finishes it. A resume drops the lines.
"""

import pathlib

from brorl_jax.errors import StorageError, UserError
from brorl_jax.many import processes
from brorl_jax.runs import folder, lines, stored

# With the config the checkpoints can be used where they are.
_CONFIG = "config.json"
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
  """Goes back to a step, if one is given; every process calls this."""
  if processes.leads() and (to := _go_back(workdir, step)) is not None:
    print(f"moved later checkpoints to {to}")
  processes.gather(None)  # nobody reads the steps before


def _go_back(workdir: pathlib.Path, step: int | None) -> pathlib.Path | None:
  saved, part = workdir / "checkpoints", workdir / folder.ASIDE / "unfinished"
  later = [s for s in stored.steps(saved) if step is not None and s > step]
  if later:
    (part / saved.name).mkdir(parents=True, exist_ok=True)
    lines.write_whole(part / _CONFIG, (workdir / _CONFIG).read_text())
  for newer in reversed(later):
    (saved / str(newer)).rename(part / saved.name / str(newer))
  if not part.exists():
    return None
  if (workdir / _TRACKER).exists():
    (workdir / _TRACKER).rename(part / _TRACKER)
  to = folder.next_aside(workdir)
  part.rename(to)
  return to
