"""A short run that has everything, and what two runs must have in common.

Twelve steps with saves every three, evaluations every four, resets of the
reference every three and a phase from step 7 on.
"""

import json
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from brorl_jax.main.recorder import OF_PROCESS
from brorl_jax.runs import intact
from launch.faults import zygote

# Exit statuses, as launch/README.md has them; those of signals are negative.
DONE, REFUSED, STOPPED = 0, 2, 75
FLAGS = """
  --config=smoke --config.sampling.n=16 --config.sampling.samples=64
  --config.sampling.in_flight=64 --config.sampling.max_new_tokens=6
  --config.optim.rows=8 --config.optim.blocks=4 --config.theory.prompts=0
  --config.eval.prompts=1 --config.eval.n=2 --config.eval.every=4
  --config.run.steps=12 --config.run.save_every=3
  --config.run.keep_checkpoints=2 --config.reference.reset_every=3
  --config.run.phases=({'from_step':7,'reward.length':'cosine'},)
""".split()
LINES = ("metrics.jsonl", "samples.jsonl", "events.jsonl")
LINES += ("eval/curve.jsonl", "eval/records.jsonl")
# Numbers of the clock and of the process.
_TIMED = ("time", "score/", "memory/", "seconds")
_TIMED += ("rollout/tokens_per_s", "rollout/samples_per_s")


class Site:
  """A folder for runs, whose compiled programs and process they share.

  Attributes:
    folder: The folder.
    seconds: That an undisturbed run takes with compiled programs; 0 before
      `twin` was asked for.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    *,
    flags: Sequence[str] = (),
    programs: pathlib.Path | None = None,
    environment: Mapping[str, str] | None = None,
  ):
    """Starts the process; nothing is run yet.

    Args:
      folder: Of the runs.
      flags: More flags of all runs.
      programs: Folder that keeps compiled programs; None: one in `folder`.
      environment: Variables of all runs.
    """
    self.folder, self.seconds = folder, 0.0
    programs = programs or folder / "programs"
    self._flags = [*FLAGS, *flags, f"--compilation_cache={programs}"]
    self._zygote = zygote.Zygote(folder / "logs", environment or {})

  def start(
    self, workdir: pathlib.Path, stage: str | None = None, *more: str
  ) -> zygote.Start:
    """Starts the run of a folder, or resumes it; kills it at a stage."""
    flags = [*self._flags, f"--workdir={workdir}", *more]
    return self._zygote.start(flags, stage)

  @property
  def twin(self) -> pathlib.Path:
    """The folder of a run that nobody disturbed."""
    twin = self.folder / "twin"
    if not self.seconds:
      begin, start = time.monotonic(), self.start(twin)
      if start.ended(300) != DONE:
        raise RuntimeError(f"the undisturbed run failed: {start.said()}")
      # The other runs find its compiled programs.
      compiling = sum(x["time/compile_s"] for x in lines(twin / LINES[0]))
      self.seconds = time.monotonic() - begin - compiling
    return twin

  def __enter__(self) -> "Site":
    return self

  def __exit__(self, *_: object) -> None:
    self._zygote.close()


def lines(path: pathlib.Path) -> list[dict[str, Any]]:
  """The whole lines of a file; none if it is missing."""
  text = path.read_text() if path.exists() else ""
  whole = text[: text.rfind("\n") + 1]
  return [json.loads(line) for line in whole.splitlines()]


def steps(workdir: pathlib.Path) -> list[int]:
  """The steps that are saved, ascending."""
  folder = workdir / "checkpoints"
  names = [p.name for p in folder.iterdir()] if folder.exists() else []
  return sorted(int(name) for name in names if name.isdigit())


def record(workdir: pathlib.Path, step: int) -> dict[str, Any]:
  """What is saved of a step besides its arrays: digests, run state."""
  path = workdir / "checkpoints" / str(step) / "extra" / "metadata"
  return json.loads(path.read_text())


def arrays(workdir: pathlib.Path, step: int) -> dict[str, str]:
  """SHA-256 of each array of a step, read from the disk; see intact.digest."""
  folder = workdir / "checkpoints" / str(step) / "state"
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
    found: Any = reader.metadata(folder)
    how = jax.tree.map(
      lambda _: ocp.RestoreArgs(restore_type=np.ndarray),
      found.item_metadata.tree,
    )
    state = reader.restore(
      folder, args=ocp.args.PyTreeRestore(restore_args=how)
    )
  return intact.digest(state)


def differences(run: pathlib.Path, twin: pathlib.Path) -> list[str]:
  """Where two runs differ, times and what tells of starts aside.

  Compares every line of their files, how many steps are saved, the record of
  each that both have, with digests of its arrays, and these with the arrays as
  they are on disk.
  """
  return [*_differences(run, twin)]


def _differences(run: pathlib.Path, twin: pathlib.Path) -> Iterator[str]:
  for name in LINES:
    both = [[*_untimed(lines(one / name))] for one in (run, twin)]
    if len(both[0]) != len(both[1]):
      yield f"{name}: {len(both[0])} lines, not {len(both[1])}"
    for number, (a, b) in enumerate(zip(*both, strict=False), 1):
      keys = sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))
      if keys:
        yield f"{name}, line {number}: {', '.join(keys)}"
  both = steps(run), steps(twin)
  # SIGTERM saves a step that the twin does not have. With the best score it
  # stays beside the newest ones.
  more = len(both[0]) - len(both[1])
  mine = len({*both[0]} - {*both[1]})
  if more not in (0, min(mine, 1)) or both[0][-1:] != both[1][-1:]:
    yield f"checkpoints: {both[0]}, not {both[1]}"
    return
  for step in both[0]:
    if step in both[1] and record(run, step) != record(twin, step):
      yield f"checkpoint {step}: its record"
    if arrays(run, step) != record(run, step)["digest"]:
      yield f"checkpoint {step}: its arrays"


def _untimed(every: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
  for line in every:
    if line.get("event") not in OF_PROCESS:
      yield {k: x for k, x in line.items() if not k.startswith(_TIMED)}


def complaint(said: str) -> str | None:
  """What is wrong with how a start that failed says so; None if nothing is.

  It must be one line that begins with "error: ", without a traceback.
  """
  if "Traceback" in said:
    return "a traceback"
  errors = [x for x in said.splitlines() if x.startswith("error: ")]
  return None if len(errors) == 1 else f"{len(errors)} error lines"
