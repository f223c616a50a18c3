"""The command.

  python -m brorl_jax.main --config=configs/n512.py --workdir=runs/n512

Every field of the config can be overridden: --config.lr=1e-4. The same command
again resumes a run that was stopped. The status is 0 only if the last step was
reached and saved.
"""

import ctypes
import os
import pathlib
import signal
import sys


def interrupt(signum, frame) -> None:
  """Ends at once: a run may be killed at any moment, and resumes the same.

  Not by KeyboardInterrupt, which libraries swallow in their callbacks, or turn
  into pages of tracebacks while they shut down.
  """
  del signum, frame
  show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""
  sys.stdout.flush()
  resumes = ("--mode=train", "--mode=evaluate")
  other = [a for a in sys.argv if a.startswith("--mode=") and a not in resumes]
  what = "begins again" if other else "resumes"
  os.write(2, f"{show_cursor}interrupted; the same command {what}\n".encode())
  os._exit(130)


if __name__ == "__main__":
  signal.signal(signal.SIGINT, interrupt)

from absl import app, flags
from ml_collections import config_flags

from brorl_jax.main import settings

_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "Which run: a file of configs/.", lock_config=True
)
_WORKDIR = flags.DEFINE_multi_string(
  "workdir",
  [],
  "Folder of the run: metrics, checkpoints, report. --mode=report takes many.",
)
_MODE = flags.DEFINE_enum(
  "mode",
  "train",
  ["train", "evaluate", "plan", "warmup", "simulate", "export", "report"],
  "train: reinforcement learning. evaluate: samples held-out prompts with "
  "--config.checkpoint=, which may be a run. plan: prints the memory that it "
  "would need; without --workdir. warmup: makes the embedded policy. simulate: "
  "the paper's token simulator over N. export: a run's policy, "
  "--config.checkpoint=RUN, as a Hugging Face directory. report: compares "
  "runs and evaluations, a --workdir each; without --config.",
)
_ALLOW_CHANGE = flags.DEFINE_bool(
  "allow_config_change",
  False,
  "Resume a run although it was started with another config.",
)
_BEGIN_AGAIN = flags.DEFINE_bool(
  "begin_again",
  False,
  "Begin at step 1 in a folder that holds a run, whose files are moved to "
  "set_aside/ in it; each start with this flag does so.",
)
_PROGRAMS = flags.DEFINE_string(
  "compilation_cache",
  None,
  "Folder in which compiled programs are kept from one start to the next; off: "
  "none. Without it JAX_COMPILATION_CACHE_DIR, or else brorl_jax/programs in "
  "$XDG_CACHE_HOME or ~/.cache. Programs are run as they are found there: it "
  "must be a folder that nobody else can write to.",
)


def main(argv: list[str]) -> None:
  """Dispatches; what the user can mend is one line and status 2."""
  try:
    if len(argv) > 1:
      raise settings.UserError(f"{argv[1]!r} is not a flag; see --help")
    workdirs = [home(one) for one in folders()]
    keep_freed_memory()
    # It would say on every start that there is no PyTorch, which is intended.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    workdir = workdirs[0]
    # Not above: jax and transformers take seconds to load, and --help or a
    # misspelt flag should not cost that.
    from brorl_jax.main import programs

    programs.keep(_PROGRAMS.value)
    if _MODE.value == "train":
      from brorl_jax.main import training

      training.run(
        _CONFIG.value,
        workdir,
        allow_change=_ALLOW_CHANGE.value,
        begin_again=_BEGIN_AGAIN.value,
      )
    elif _MODE.value == "evaluate":
      from brorl_jax.main import evaluating

      evaluating.run(_CONFIG.value, workdir)
    elif _MODE.value == "plan":
      from brorl_jax.main import planning

      planning.run(_CONFIG.value)
    elif _MODE.value == "warmup":
      from brorl_jax.main import warming

      warming.run(_CONFIG.value, workdir)
    elif _MODE.value == "export":
      from brorl_jax.main import exporting

      exporting.run(_CONFIG.value, workdir)
    elif _MODE.value == "report":
      from brorl_jax.main import reporting

      reporting.run(workdirs)
    else:
      from brorl_jax.main import simulating

      simulating.run(_CONFIG.value, workdir, allow_change=_ALLOW_CHANGE.value)
  except settings.UserError as e:
    print(f"error: {e}", file=sys.stderr)
    sys.exit(2)
  except OSError as e:  # a full or failing disk, too many open files
    where = f"{e.filename}: " if e.filename else ""
    print(f"error: {where}{e.strerror or e}", file=sys.stderr)
    sys.exit(2)
  except KeyboardInterrupt:  # raised, not sent
    interrupt(signal.SIGINT, None)


def folders() -> list[str]:
  """The work folders; raises UserError if the mode needs other flags."""
  mode, given = _MODE.value, _WORKDIR.value
  if mode != "train" and _BEGIN_AGAIN.value:
    raise settings.UserError(f"--begin_again is not for --mode={mode}")
  if mode == "report" and _CONFIG.value is not None:
    raise settings.UserError(
      "--mode=report takes no --config: runs have theirs"
    )
  if mode != "report" and _CONFIG.value is None:
    raise settings.UserError("--config is missing; see --help")
  if mode != "plan" and not all(given or [""]):
    raise settings.UserError("--workdir is missing; see --help")
  if mode != "report" and len(given) > 1:
    raise settings.UserError(
      f"--workdir is given {len(given)} times; --mode={mode} takes one, "
      "--mode=report many"
    )
  return given or ["."]


def home(workdir: str) -> pathlib.Path:
  """~ is a home folder: shells leave it as it is in --workdir=~/run."""
  try:
    return pathlib.Path(workdir).expanduser()
  except RuntimeError as e:
    raise settings.UserError(f"workdir {workdir}: {e}") from None


def keep_freed_memory() -> None:
  """Tells glibc to reuse large blocks instead of returning them.

  XLA frees its work space after every call; getting it back from the kernel
  page by page took half of an update on CPU. Elsewhere this does nothing.
  """
  try:
    mallopt = ctypes.CDLL(None).mallopt
  except (AttributeError, OSError, TypeError):
    return
  M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
  mallopt(M_MMAP_MAX, 0)
  mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
  mallopt(M_TOP_PAD, 64 << 20)


if __name__ == "__main__":
  app.run(main, flags_parser=settings.parse_flags)
