"""The command.

  python -m brorl_jax.main --config=configs/n512.py --workdir=runs/n512

The same command resumes a run that was stopped. The exit status is 0 only if
the last step was reached and saved.
"""

import contextlib
import logging
import os
import pathlib
import re
import signal
import sys
import threading
from typing import Any

from brorl_jax import __version__
from brorl_jax import main as process
from brorl_jax.verdicts.sandbox.process import Output, outlast_terminal


def interrupt(signum, frame) -> None:
  """Ends the process at once: a run may be killed at any time and resumes.

  Libraries' callbacks swallow KeyboardInterrupt, or print pages of tracebacks.
  """
  del signum, frame
  show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""
  modes = {a for a in sys.argv if a.startswith("--mode=")}
  again = modes <= {"--mode=train", "--mode=evaluate"}
  what = "; the same command resumes" if again else ""
  say(f"{show_cursor}interrupted{what}")
  if processes := sys.modules.get("brorl_jax.many.processes"):
    processes.leave_word("interrupted", 130)
  os._exit(130)


def terminate(signum, frame):
  """Ends a run, with all its processes, before it trains; while it trains
  the signal gives up the step, see `train.Stop`.
  """
  del frame
  try:
    say("stopped; the same command resumes")
    if processes := sys.modules.get("brorl_jax.many.processes"):
      name = signal.Signals(signum).name
      processes.fail(f"{name}; the same command resumes", 75)
  finally:
    os._exit(75)  # processes.STOPPED


def say(line: str) -> None:
  """A last line, from a signal handler, which may have interrupted a print."""
  with contextlib.suppress(RuntimeError):
    sys.stdout.flush()
  with contextlib.suppress(OSError):
    os.write(2, f"{line}\n".encode())


if __name__ == "__main__":
  outlast_terminal()
  signal.signal(signal.SIGINT, interrupt)
  # Otherwise transformers warns at every start that PyTorch is missing.
  os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import absl.logging
from absl import app, flags
from ml_collections import config_flags

from brorl_jax import errors
from brorl_jax.config import Config
from brorl_jax.errors import UserError
from brorl_jax.main import settings

_MODES = "train evaluate plan prepare simulate export report sample serve"
# Each flag, and what --help says of it.
_HELP = """
config: A file of configs/, or its name. --config.optim.lr=1e-4 overrides a
  field.
workdir: Folder of the run: metrics, checkpoints, report. --mode=report takes
  several.
mode: train: reinforcement learning. evaluate: evaluates
  --config.policy.checkpoint=, which may be a run, on held-out prompts. plan:
  prints how much memory a run needs; no --workdir. prepare: writes public sets,
  --set, as files to train on, without prompts of the held-out files of
  --config=suite:all if that is given. simulate: the paper's token simulator for
  several N. export: writes the policy of a run, --config.policy.checkpoint=RUN,
  as a Hugging Face directory. report: compares runs and evaluations, one
  --workdir each; no --config. sample: a policy answers --prompt, --prompts or
  standard input; --workdir is a run, one of its checkpoints or a model
  directory, by default the embedded policy; no --config. serve: the same
  policy behind OpenAI's HTTP interface.
version: Prints the version.
allow_config_change: Resume a run with a changed config.
compilation_cache: Folder that keeps compiled programs between starts; off:
  none. The default is JAX_COMPILATION_CACHE_DIR, or else brorl_jax/programs in
  $XDG_CACHE_HOME or ~/.cache. Programs in it are executed unchecked: other
  users must not be able to write to it.
begin_again: Start at step 1 in the folder of a run, whose files are moved to
  set_aside/ in that folder. Every start with this flag does so.
from_step: Go back to this saved step of the run; its later checkpoints are
  moved to set_aside/ in its folder. Every start with this flag does so.
profile_step: Writes a trace of this step to profile/ in the folder of the run,
  for XProf, TensorBoard's profiler or Perfetto.
distributed: One process of many, which the cluster knows: Slurm, JobSet, TPU
  hosts.
coordinator: One process of many: HOST:PORT of process 0; with --processes and
  --process_id.
processes: The number of processes.
process_id: Which one this is, from 0.
topology: With --mode=plan: plans for devices that need not be here, and
  compiles every program for them: h100:1x8 (hosts x GPUs), h200:8x8, v5p:2x2x2,
  v5e:4x4, v6e:4x4, cpu:64, or here. Extras aot-cuda and aot-tpu bring the
  compilers.
fast: With --topology: decodes with two and three layers instead of all, leaves
  out evaluations and lets the compiler make less effort.
mean_tokens: --mode=plan: mean length of a response in the step whose seconds it
  prints; by default sampling.mean_tokens, or half of the longest.
pass_rate: --mode=plan: share of the prompts that such a step keeps.
set: --mode=prepare: sets of configs/public.py:
  deepscaler,eurus2,scp116k,llama_nemotron_if; from the Hugging Face hub, or
  NAME=FILE_OR_FOLDER.
paper: --mode=report: the paper's tables, beside published numbers.
prompt: --mode=sample: a prompt; may be given several times.
prompts: --mode=sample: a file of prompts: .jsonl or .parquet as for training,
  whose responses are scored, or a text file with one prompt per line.
n: --mode=sample: responses per prompt.
temperature: --mode=sample: temperature; 0 is greedy.
max_new_tokens: --mode=sample: longest response in tokens; by default that of
  the run, or 256 for a model that is not a run.
host: --mode=serve: address; any other needs a key, BRORL_API_KEY.
port: --mode=serve: port to listen on.
"""
_SAID = dict(re.findall(r"(?m)^(\w+): ((?:.|\n  )*)", _HELP))


def _flag(define: Any, name: str, default: Any = None, *args, **how) -> Any:
  return define(name, default, *args, " ".join(_SAID[name].split()), **how)


_CONFIG = _flag(config_flags.DEFINE_config_file, "config", lock_config=True)
_WORKDIR = _flag(flags.DEFINE_multi_string, "workdir", [])
_MODE = _flag(flags.DEFINE_enum, "mode", "train", _MODES.split())
_VERSION = _flag(flags.DEFINE_bool, "version", False)
_ALLOW_CHANGE = _flag(flags.DEFINE_bool, "allow_config_change", False)
_PROGRAMS = _flag(flags.DEFINE_string, "compilation_cache")
_BEGIN_AGAIN = _flag(flags.DEFINE_bool, "begin_again", False)
_FROM_STEP = _flag(flags.DEFINE_integer, "from_step")
_PROFILE = _flag(flags.DEFINE_integer, "profile_step")
_DISTRIBUTED = _flag(flags.DEFINE_bool, "distributed", False)
_COORDINATOR = _flag(flags.DEFINE_string, "coordinator")
_COUNT = _flag(flags.DEFINE_integer, "processes")
_INDEX = _flag(flags.DEFINE_integer, "process_id")
_TOPOLOGY = _flag(flags.DEFINE_string, "topology")
_FAST = _flag(flags.DEFINE_bool, "fast", False)
_MEAN_TOKENS = _flag(flags.DEFINE_float, "mean_tokens")
_PASS_RATE = _flag(flags.DEFINE_float, "pass_rate", 0.62)
_SET = _flag(flags.DEFINE_multi_string, "set", [])
_PAPER = _flag(flags.DEFINE_bool, "paper", False)
_PROMPT = _flag(flags.DEFINE_multi_string, "prompt", [])
_PROMPTS = _flag(flags.DEFINE_string, "prompts")
_N = _flag(flags.DEFINE_integer, "n", 1)
_TEMPERATURE = _flag(flags.DEFINE_float, "temperature", 1.0)
_MAX_NEW_TOKENS = _flag(flags.DEFINE_integer, "max_new_tokens")
_HOST = _flag(flags.DEFINE_string, "host", "127.0.0.1")
_PORT = _flag(flags.DEFINE_integer, "port", 8000)
# Flags of one mode; any other refuses them.
_OF_MODE = {
  "train": (
    *(_BEGIN_AGAIN, _FROM_STEP, _PROFILE),
    *(_DISTRIBUTED, _COORDINATOR, _COUNT, _INDEX),
  ),
  "plan": (_TOPOLOGY, _FAST, _MEAN_TOKENS, _PASS_RATE),
  "prepare": (_SET,),
  "report": (_PAPER,),
  "sample": (_PROMPT, _PROMPTS, _N, _TEMPERATURE, _MAX_NEW_TOKENS),
  "serve": (_HOST, _PORT),
}


def main(argv: list[str]) -> None:
  """Runs the mode; errors that end it are one line, with their status."""
  try:
    if _VERSION.value:
      return print("brorl_jax", __version__)
    if len(argv) > 1:
      raise UserError(f"{argv[1]!r} is not a flag; see --help")
    check_flags()
    prepare()
    c = checked_config()
    if many():
      from brorl_jax.many import processes

      processes.start(_COORDINATOR.value, _COUNT.value, _INDEX.value)
    # Shells leave the ~ of --workdir=~/run unchanged.
    each = map(os.path.expanduser, _WORKDIR.value or ["."])
    run_mode([*map(pathlib.Path, each)], c)
    sys.stdout.flush()
  except UserError as e:
    refuse(str(e), e.status)
  except OSError as e:  # a full or failing disk, too many open files
    if isinstance(e, BrokenPipeError) and e.filename:
      return  # its reader has had enough
    where = f"{e.filename}: " if e.filename else ""
    refuse(f"{where}{e.strerror or e}", errors.status(e))
  except KeyboardInterrupt:  # raised, not sent
    interrupt(signal.SIGINT, None)


def check_flags() -> None:
  """Raises UserError if flags do not fit the mode, or each other."""
  mode, given = _MODE.value, _WORKDIR.value
  for its, flag in [(m, f) for m, some in _OF_MODE.items() for f in some]:
    if mode != its and flag.present:
      where = f"--mode={its}, not --mode={mode}"
      raise UserError(f"--{flag.name} is for {where}; leave it out")
  if _BEGIN_AGAIN.value and _FROM_STEP.value is not None:
    both = "--begin_again and --from_step"
    raise UserError(f"{both} exclude each other; leave out one")
  three = _COORDINATOR.value, _COUNT.value, _INDEX.value
  if None in three and three != (None,) * 3:
    raise UserError(
      "--coordinator, --processes and --process_id are given together; or "
      "--distributed alone, where the cluster knows them"
    )
  alone = mode in ("report", "sample", "serve")
  if alone and _CONFIG.value is not None:
    raise UserError(f"--config is not for --mode={mode}; leave it out")
  if not alone and _CONFIG.value is None and mode != "prepare":
    raise UserError("--config is missing; see --help")
  if mode == "prepare" and not _SET.value:
    raise UserError("--set is missing; see --help")
  if mode not in ("plan", "sample", "serve") and not all(given or [""]):
    raise UserError("--workdir is missing; see --help")
  if mode != "report" and len(given) > 1:
    one = f"--mode={mode} takes one; only --mode=report takes several"
    raise UserError(f"--workdir is given {len(given)} times; {one}")


def prepare() -> None:
  """What comes before jax is loaded."""
  # jax tells of every kind of device that is not here.
  logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)
  # jax logs every connection, orbax every file.
  absl.logging.set_verbosity(absl.logging.ERROR)
  process.keep_freed_memory()
  process.take_most_of_a_gpu()
  if _MODE.value == "train":
    for number in process.stop_signals():
      signal.signal(number, terminate)
  if _MODE.value in ("plan", "sample", "serve"):  # the others write files
    Output.required = 1


def checked_config() -> Config | None:
  """The config of the mode; raises UserError before jax is loaded."""
  if _MODE.value in ("train", "plan"):
    return settings.training(_CONFIG.value)
  if _MODE.value in ("evaluate", "export", "prepare") and _CONFIG.value:
    return settings.typed(_CONFIG.value)
  return None


def many() -> bool:
  """Whether the flags say that this is one process of many."""
  return _DISTRIBUTED.value or _COORDINATOR.value is not None


def run_mode(workdirs: list[pathlib.Path], c: Config | None) -> None:
  """Runs the mode in its folders, with its config if it has one."""
  # Imported here: jax and transformers take seconds to load.
  workdir, mode = workdirs[0], _MODE.value
  process.keep_programs(_PROGRAMS.value)
  if c and mode == "train":
    from brorl_jax.main import train
    from brorl_jax.plan import resolve

    resumes = None if _BEGIN_AGAIN.value else workdir
    this = resolve.resolve(c, resolve.here(c.devices), resumes)
    how = {x.name: x.value for x in (_BEGIN_AGAIN, _FROM_STEP, _PROFILE)}
    how["allow_change"] = _ALLOW_CHANGE.value
    if train.run(this, workdir, **how) is not None:
      sys.exit(train.processes.STOPPED)
  elif c and mode == "evaluate":
    from brorl_jax.main import evaluate
    from brorl_jax.plan import resolve

    here = resolve.here(c.devices)
    evaluate.run(resolve.evaluation(c, here, workdir), workdir)
  elif c and mode == "plan":
    from brorl_jax.main import plan
    from brorl_jax.plan import topology

    where = plan.assumed(c, topology.named(_TOPOLOGY.value, fast=_FAST.value))
    case = _MEAN_TOKENS.value, _PASS_RATE.value
    plan.run(plan.resolved(c, where), where, *case, fast=_FAST.value)
  elif mode == "prepare":
    from brorl_jax.main import prepare as sets

    sets.run(",".join(_SET.value).split(","), workdir, c)
  elif c:
    from brorl_jax.main import export

    export.run(c.policy, workdir)
  elif mode == "sample":
    from brorl_jax.main import sample

    how = {flag.name: flag.value for flag in _OF_MODE[mode]}
    sample.run(str(workdir) if _WORKDIR.value else "", **how)
  elif mode == "serve":
    from brorl_jax.main import serve

    how = {flag.name: flag.value for flag in _OF_MODE[mode]}
    serve.run(str(workdir) if _WORKDIR.value else "", **how)
  elif mode == "report":
    from brorl_jax.main import report

    report.run(workdirs, tables=_PAPER.value)
  else:
    from brorl_jax.main import simulate

    simulate.run(_CONFIG.value, workdir, allow_change=_ALLOW_CHANGE.value)


def refuse(line: str, status: int) -> None:
  """Ends with one line and a status, in all processes of a run."""
  print(f"error: {line}", file=sys.stderr)
  if many() and "jax" in sys.modules:
    from brorl_jax.many import processes

    processes.fail(line, status)
  main_thread = threading.main_thread()
  left = [t for t in threading.enumerate() if t is not main_thread]
  if not all(thread.daemon for thread in left):
    # Python would wait for them: after a save that failed, orbax's wait for its
    # other parts, ten minutes or more. What a run opens is closed by now.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
  sys.exit(status)


if __name__ == "__main__":
  app.run(main, flags_parser=settings.parse_flags)
