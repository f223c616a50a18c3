"""The moments of a run at which it can be killed, by name.

Each is the n-th call of a function of the package or of a library: before it,
after it, or in the middle of what it writes. The package has no hooks.
"""

import functools
import importlib
import itertools
import json
import os
import pathlib
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Hook = Callable[..., object]


class Stage(NamedTuple):
  """A moment.

  Attributes:
    target: "module:function" or "module:Class.method".
    nth: Which call, among those that `when` counts.
    how: "before" and "after" the call, or a function that is called instead of
      it, writes a part of what it writes, and kills.
    when: From the arguments of a call to whether it counts.
    resumed: Whether it is a moment of the second start: the first one is killed
      at `AFTER_FIVE`.
  """

  target: str
  nth: int = 1
  how: str | Hook = "before"
  when: Callable[..., bool] = lambda *_, **__: True
  resumed: bool = False


def kill() -> None:
  os.kill(os.getpid(), signal.SIGKILL)


def kill_at(stage: Stage) -> None:
  """Lets this process be killed at a stage."""
  module, _, path = stage.target.partition(":")
  *above, name = path.split(".")
  owner = functools.reduce(getattr, above, importlib.import_module(module))
  real, count = getattr(owner, name), itertools.count(1)

  @functools.wraps(real)
  def call(*args: Any, **kwargs: Any) -> Any:
    if not stage.when(*args, **kwargs) or next(count) != stage.nth:
      return real(*args, **kwargs)
    if callable(stage.how):
      return stage.how(real, *args, **kwargs)
    if stage.how == "after":
      real(*args, **kwargs)
    kill()

  setattr(owner, name, call)


def _half_a_line(real: Hook, file: Any, *lines: Mapping[str, Any]) -> None:
  del real
  text = "".join(json.dumps(dict(line)) + "\n" for line in lines).encode()
  file._file.write(text[: len(text) - len(text.splitlines()[-1]) // 2])
  kill()


def _half_a_file(real: Hook, path: pathlib.Path, text: str) -> None:
  del real
  path.with_name(f"{path.name}.part").write_text(text[: len(text) // 2])
  kill()


def _half_a_page(real: Hook, path: pathlib.Path, text: str) -> None:
  real(path, text[: len(text) // 2])
  kill()


def _half_a_removal(real: Hook, manager: Any, step: int) -> None:
  del real
  shutil.rmtree(pathlib.Path(manager.directory) / str(step) / "state")
  kill()


def _while_it_is_written(real: Hook, store: Any, *args: Any, **how: Any) -> Any:
  """Kills once the step's folder has files, and not yet its name."""

  def watch() -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
      for part in store._directory.glob(f"*{_UNFINISHED}*"):
        if any(path.is_file() for path in part.rglob("*")):
          kill()
      time.sleep(0.0005)

  threading.Thread(target=watch, daemon=True).start()
  return real(store, *args, **how)


_UNFINISHED = "orbax-checkpoint-tmp"  # in the names of folders of orbax


def _of_file(name: str) -> Callable[..., bool]:
  """Counts calls of `JsonLines.write` on a file."""
  return lambda file, *_, **__: file._path.name == name


def _of_event(kind: str) -> Callable[..., bool]:
  return lambda file, *lines: (
    file._path.name == "events.jsonl" and lines[0].get("event") == kind
  )


def _of_path(name: str) -> Callable[..., bool]:
  return lambda path, *_, **__: path.name == name


def _to(name: str) -> Callable[..., bool]:
  return lambda source, to, **_: pathlib.Path(to).name == name


_LINES = "brorl_jax.runs.lines:JsonLines.write"
_WHOLE = "brorl_jax.runs.lines:write_whole"
_SAVE = "brorl_jax.runs.checkpoints:Store.save"
_LOCK = "brorl_jax.runs.folder:hold"
_CONFIG = "brorl_jax.runs.folder:write_config"
_READ = "brorl_jax.runs.checkpoints:read_step"
_REMOVE = "orbax.checkpoint:CheckpointManager.delete"
_FINISH = "brorl_jax.main.train:finish"
_SCORES = "brorl_jax.stages.scoring:Scorer"

AFTER_FIVE = "after step 5"
# A run of 12 steps saves 0, 3, 6, 9 and 12, and evaluates 0, 4, 8 and 12.
STAGES = {
  "before the folder is locked": Stage(_LOCK),
  "after the folder is locked": Stage(_LOCK, how="after"),
  "in config.json": Stage(
    _WHOLE, how=_half_a_file, when=_of_path("config.json")
  ),
  "before config.json has its name": Stage(
    "os:replace", when=_to("config.json")
  ),
  "after config.json": Stage(_CONFIG, how="after"),
  "during the first evaluation": Stage(f"{_SCORES}.score_responses"),
  "between records and curve": Stage(_LINES, when=_of_file("curve.jsonl")),
  "before the first save": Stage(_SAVE),
  "while verdicts are awaited": Stage(f"{_SCORES}.scores", 5),
  "before an update": Stage("brorl_jax.learner.update:minibatch_step", 5),
  "between an update and its line": Stage(
    "brorl_jax.learner.update:_apply", 6, "after"
  ),
  "in a line of metrics": Stage(
    _LINES, 5, _half_a_line, _of_file("metrics.jsonl")
  ),
  "between metrics and samples": Stage(
    _LINES, 5, "after", _of_file("metrics.jsonl")
  ),
  "in a line of samples": Stage(
    _LINES, 7, _half_a_line, _of_file("samples.jsonl")
  ),
  "in an event": Stage(_LINES, 2, _half_a_line, _of_file("events.jsonl")),
  "as a phase begins": Stage(_LINES, 1, "after", _of_event("phase")),
  "in the records of an evaluation": Stage(
    _LINES, 2, _half_a_line, _of_file("records.jsonl")
  ),
  "after an evaluation": Stage(_LINES, 2, "after", _of_file("curve.jsonl")),
  "in a reset of the reference": Stage("brorl_jax.runs.run_state:was_reset", 2),
  "between lines and checkpoint": Stage(_SAVE, 3),
  "while a step is written": Stage(_SAVE, 3, _while_it_is_written),
  "before a step has its name": Stage(
    "os:rename", 3, when=lambda source, *_, **__: _UNFINISHED in str(source)
  ),
  "between a step and its check": Stage(
    "brorl_jax.runs.checkpoints:compare", 2
  ),
  "while a step is checked": Stage(
    "brorl_jax.runs.intact:digest", 2, when=lambda *args: len(args) > 1
  ),
  "before an old step is removed": Stage(_REMOVE),
  "while an old step is removed": Stage(_REMOVE, how=_half_a_removal),
  "between the last step and the page": Stage(_FINISH),
  "in the page": Stage(
    "pathlib:Path.write_text", how=_half_a_page, when=_of_path("index.html")
  ),
  "before a step is read": Stage(_READ, resumed=True),
  "after a step is read": Stage(_READ, how="after", resumed=True),
  "in the rest of metrics": Stage(
    _WHOLE, 1, _half_a_file, _of_path("metrics.jsonl"), True
  ),
  "between two files that are cut": Stage(
    "os:replace", 1, "after", _to("samples.jsonl"), True
  ),
  "before the resume is told": Stage(
    _LINES, 1, when=_of_event("resume"), resumed=True
  ),
  "in config.json of a resume": Stage(
    _WHOLE, 1, _half_a_file, _of_path("config.json"), True
  ),
  AFTER_FIVE: Stage(_LINES, 5, "after", _of_file("samples.jsonl")),
}
