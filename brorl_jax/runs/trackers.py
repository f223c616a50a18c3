"""Trackers of a run: TensorBoard, and optionally Weights & Biases.

Both show metrics.jsonl, histograms and samples. None stops a run if it fails.
"""

import contextlib
import html
import pathlib
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from brorl_jax.errors import first_line
from brorl_jax.runs import lines

# Numbers, histograms and texts of a step, by name.
Values = Mapping[str, float | str | np.ndarray]
_BINS = 32  # of a histogram
_START_S = 15.0  # wait for wandb's server when a run starts
_FINISH_S = 60.0  # wait for uploads when it ends


# It would import torch if that is installed, for tensors that nobody gives it:
# 1.7 CPU-seconds and 190 MiB. Commands that need a tokenizer still load it,
# with transformers. An import of None fails.
_hidden = sys.modules.setdefault("torch", None) is None  # pyright: ignore
try:
  from tensorboardX import event_file_writer, summary
  from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore
finally:
  if _hidden:
    del sys.modules["torch"]


class TensorBoard:
  """Event files in the run's folder.

  What cannot be written is left out: other files tell of a full disk.
  """

  def __init__(self, workdir: pathlib.Path, *, after: int):
    """Opens a new file, which hides events of steps past `after`."""
    # Not its SummaryWriter, of which a thread writes: a full disk ends that, or
    # a clock that goes back by 25 days, and the run waits for it forever.
    self._events = event_file_writer.EventsWriter(str(workdir / "events"))
    # Its own flush and close wait for the disk.
    self._file: Any = self._events._py_recordio_writer._writer
    self._add(after + 1, session_log=SessionLog(status=SessionLog.START))

  def write(self, step: int, values: Values) -> None:
    for name, value in values.items():
      with contextlib.suppress(Exception):
        if isinstance(value, str):  # Markdown: indented is shown as it is
          shown = summary.text(name, textwrap.indent(value, "    "))
        elif isinstance(value, np.ndarray):
          shown = summary.histogram(name, value, _BINS)
        else:
          shown = summary.scalar(name, value)
        self._add(step, summary=shown)
    with contextlib.suppress(OSError):  # so that they survive a kill
      self._file.flush()

  def _add(self, step: int, **what: Any) -> None:
    self._events.write_event(Event(step=step, wall_time=time.time(), **what))

  def close(self) -> None:
    with contextlib.suppress(OSError):
      self._file.close()


class Wandb:
  """A run of Weights & Biases, continued by each start in the same folder.

  wandb uploads from a separate process. Without a login, or if its server does
  not answer at the start, it records to `wandb/` in the run's folder, for
  `wandb sync`. A later failure ends the tracking but not the training.

  wandb accepts no step twice. A step that is computed again after a kill has
  the same numbers except for times; wandb keeps the first ones.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    project: str,
    *,
    config: Mapping[str, Any],
    warn: Callable[[str], None],
  ):
    self._warn, file = warn, workdir / "wandb_id"
    new = not file.exists()
    if new:
      lines.write_whole(file, f"{uuid.uuid4().hex[:8]}\n")
    self._run: Any = _start(
      warn,
      project=project,
      id=file.read_text().strip(),
      name=workdir.absolute().name if new else None,
      dir=str(workdir.absolute()),
      config=dict(config),
      resume="allow",
      allow_val_change=True,
    )

  @property
  def where(self) -> str:
    """The address to open, or the command to upload."""
    if self._run is None:
      return "off"
    return self._run.url or f"wandb sync {self._run.settings.sync_dir}"

  def write(self, step: int, values: Values) -> None:
    with self._surviving():
      if self._run is not None and step >= self._run.step:
        line = {name: _shown(value) for name, value in values.items()}
        self._run.log(line, step=step)

  def close(self) -> None:
    with self._surviving():
      if self._run is not None:
        self._run.finish()

  @contextlib.contextmanager
  def _surviving(self):
    try:
      yield
    except Exception as e:  # from its process, a disk or the network
      self._run = None
      self._warn(f"wandb is off from now on: {first_line(e)}")


def _shown(value: float | str | np.ndarray) -> Any:
  import wandb

  if isinstance(value, str):
    return wandb.Html(f"<pre>{html.escape(value)}</pre>")
  if isinstance(value, np.ndarray):
    return wandb.Histogram(np_histogram=np.histogram(value, bins=_BINS))
  return value


def _start(warn: Callable[[str], None], **how: Any) -> Any:
  """A run of wandb, offline if there is no connection; None if it fails."""
  import wandb  # optional, and takes a second to import

  settings = wandb.Settings(
    silent=True,
    console="off",  # do not capture the terminal
    init_timeout=_START_S,
    finish_timeout=_FINISH_S,
  )
  try:
    online = wandb.setup(settings=settings).settings.mode == "online"
    # Without prompt=False it would wait for input on the terminal.
    if online and not wandb.login(prompt=False, verify=False):
      raise ValueError("no API key; run wandb login")
    return wandb.init(**how)
  except Exception as e:
    warn(f"wandb: {first_line(e)}; recording offline")
  try:
    wandb.teardown()  # otherwise the id would be in use
    wandb.setup(settings=settings)
    return wandb.init(**how, mode="offline")
  except Exception as e:
    warn(f"wandb is off: {first_line(e)}")
    return None
