"""A run of several processes: process 0 writes its files, all do the rest."""

import contextlib
import hashlib
import itertools
import os
import pathlib
import platform
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jaxtyping import PyTree

from brorl_jax import config, train, types
from brorl_jax.config import Config
from brorl_jax.errors import UserError
from brorl_jax.main.recorder import Recorder
from brorl_jax.many import processes
from brorl_jax.many.meshes import Axes
from brorl_jax.plan import memory
from brorl_jax.rollout.dynamic_sampling import SampledGroups
from brorl_jax.runs import checkpoints, folder

# A network's file system may show a file late.
_SEEN_S = 30
_CLOSED = "Event loop is closed"  # of asyncio


def decisions(
  c: Config,
  data: Mapping[str, Any],
  functions: Mapping[str, Any],
  source: pathlib.Path,
) -> dict[str, Any]:
  """What decides the numbers of a run, which must be the same everywhere.

  Of the weights in `source` the sizes are compared.
  """
  policy = hashlib.sha256()
  for path in sorted(source.iterdir()):
    if path.suffix == ".json":
      policy.update(path.read_bytes())
    if path.suffix == ".safetensors":
      policy.update(f"{path.name} {path.stat().st_size}".encode())
  code = hashlib.sha256()
  root = pathlib.Path(__file__).parents[1]
  for path in sorted(root.rglob("*.py")):
    code.update(path.read_bytes())
  fields = config.flat(config.as_dict(c))
  return {
    **{f"config.{name}": value for name, value in fields.items()},
    **{f"data {name}": value for name, value in data.items()},
    **{f"function {name}": value for name, value in functions.items()},
    **folder.versions(),
    "Python": platform.python_version(),
    "the policy's files (a hash)": policy.hexdigest()[:16],
    "the code of brorl_jax (a hash)": code.hexdigest()[:16],
  }


def require_one_folder(workdir: pathlib.Path) -> None:
  """Raises UserError, in all processes, if they do not see the same folder."""
  if processes.alone():
    return
  path, token = workdir / ".shared", processes.first(os.urandom(8).hex())
  if processes.leads():
    path.write_text(token)
  processes.gather(None)
  end = time.monotonic() + _SEEN_S
  while not (seen := _says(path, token)) and time.monotonic() < end:
    time.sleep(0.2)
  every = processes.gather(seen)
  if processes.leads():
    path.unlink(missing_ok=True)
  if not all(every):
    raise UserError(
      f"--workdir={workdir}: process {every.index(False)} does not see what "
      "process 0 writes there; give a folder on a file system of all hosts"
    )


def _says(path: pathlib.Path, token: str) -> bool:
  with contextlib.suppress(OSError):
    return path.read_text() == token
  return False


@contextlib.contextmanager
def closing(store: checkpoints.Store) -> Iterator[None]:
  """`contextlib.closing`, but for an error in one process of many.

  Closing needs all of them, and the others may wait for this one elsewhere. A
  run whose numbers end it ends in all of them, with the last step saved.
  """
  try:
    yield
  except BaseException as e:
    together = processes.alone() or isinstance(e, train.RunEnded)
    store.close() if together else store.leave()
    raise
  store.close()


@contextlib.contextmanager
def no_closed_loops() -> Iterator[None]:
  """Leaves out what is printed after a save has failed.

  orbax closes its event loop at the first error. Every other write that
  tensorstore then ends calls that loop, and the interpreter prints a traceback
  of "Event loop is closed" for each: 40 of them above the one line.
  """
  before = sys.unraisablehook

  def other(unraisable: Any) -> None:
    error = unraisable.exc_value
    if not (type(error) is RuntimeError and str(error) == _CLOSED):
      before(unraisable)

  sys.unraisablehook = other
  try:
    yield
  finally:
    sys.unraisablehook = before


def summary(axes: Axes, params: PyTree) -> str:
  """The mesh, and what processes send each other before they sample."""
  if processes.alone():
    return f"mesh ({axes})"
  copied = memory.size(sum(x.nbytes for x in jax.tree.leaves(params)))
  return (
    f"mesh ({axes}) of {jax.process_count()} processes; before a step samples, "
    f"each makes its own copy of the parameters: {copied}"
  )


class Together:
  """The recorder of one process of many; see `train.StepRecorder`.

  Files are read and written by process 0, which tells the others what it found.
  """

  started = False  # whether the files have been begun

  def __init__(self, recorder: Recorder):
    self._recorder = recorder

  def lacks(self, step: int) -> str | None:
    leads = processes.leads()
    return processes.first(self._recorder.lacks(step) if leads else None)

  def start(self, done: int) -> None:
    if processes.leads():
      self._recorder.start(done)
    processes.first(None)  # a start that fails ends here for all
    self.started = True

  def event(self, step: int, what: Mapping[str, Any]) -> None:
    if processes.leads():
      self._recorder.event(step, what)

  def step(
    self,
    step: int,
    scalars: Mapping[str, Any],
    kept: types.Groups,
    sampled: SampledGroups,
  ) -> None:
    if processes.leads():
      self._recorder.step(step, scalars, kept, sampled)

  def dump(
    self,
    step: int,
    kept: types.Groups,
    credit: types.Credit,
    drawn: types.Groups,
  ) -> None:
    if processes.leads():
      self._recorder.dump(step, kept, credit, drawn)

  def evaluate(self, step: int, params: PyTree) -> float:
    if processes.leads():
      return processes.first(self._recorder.evaluate(step, params))
    for _ in itertools.chain(*self._recorder.measured(step, params)):
      pass
    return processes.first(0.0)

  def sync(self) -> None:
    if processes.leads():
      self._recorder.sync()


class Stop:
  """What all processes agree on at the end of a step.

  The first SIGTERM asks for the end; a second one ends this process at once.
  """

  asked = False  # by a SIGTERM to any process

  def __enter__(self) -> "Stop":
    # Until here, see __main__.terminate.
    self._before = signal.signal(signal.SIGTERM, self._on_signal)
    return self

  def __exit__(self, *_: object) -> None:
    signal.signal(signal.SIGTERM, self._before)

  def _on_signal(self, *_: object) -> None:
    self.asked = True
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

  def __call__(self) -> bool:
    self.asked = any(processes.gather(self.asked))
    return self.asked
