"""Starts the command in forks of a process that has imported it.

  zygote = Zygote(logs)
  start = zygote.start(["--config=n512", "--workdir=run"], "before an update")
  start.ended(60)                                      # its exit status

Importing takes longer than a tiny run. The process has not touched a device, so
that a fork of it is like a fresh start; each fork is its own session.
"""

import importlib
import json
import os
import pathlib
import runpy
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from launch.faults import stages

ROOT = pathlib.Path(__file__).parents[2]
# What a start imports before it reads its flags, or soon after.
_IMPORTED = (
  "brorl_jax.main.sample",
  "brorl_jax.main.train",
  "reasoning_gym",
  "transformers.models.auto.configuration_auto",
  "transformers.models.qwen2.configuration_qwen2",
)
_POLL_S = 0.01
_READY_S = 120.0


class Start:
  """A start of the command.

  Attributes:
    pid: Its process.
  """

  def __init__(self, pid: int, log: pathlib.Path):
    self.pid, self._log = pid, log
    self._status = log.with_suffix(".status")

  def said(self) -> str:
    """Standard output and standard error so far."""
    return self._log.read_text(errors="replace")

  def status(self) -> int | None:
    """The exit status, that of a signal negative; None while it runs."""
    return int(self._status.read_text()) if self._status.exists() else None

  def ended(self, within_s: float) -> int:
    """Waits for the exit status.

    Raises:
      TimeoutError: It still ran after that time, and was killed.
    """
    end = time.monotonic() + within_s
    while (status := self.status()) is None:
      if time.monotonic() > end:
        self.send(signal.SIGKILL)
        raise TimeoutError(f"no end in {within_s:.0f} s: {self.said()[-500:]}")
      time.sleep(_POLL_S)
    return status

  def send(self, number: int) -> None:
    """Sends a signal, unless it has ended."""
    if self.status() is None:
      os.kill(self.pid, number)


class Zygote:
  """The process that forks; it and its forks end with this one."""

  def __init__(self, logs: pathlib.Path, environment: Mapping[str, str]):
    """Starts it.

    Args:
      logs: Folder for what the starts write.
      environment: Variables of the starts, besides those of this process.
    """
    logs.mkdir(parents=True, exist_ok=True)
    self._logs, self._count = logs, 0
    self._process = subprocess.Popen(
      [sys.executable, "-m", "launch.faults.zygote"],
      cwd=ROOT,
      env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    self._answer()

  def start(self, flags: Sequence[str], stage: str | None = None) -> Start:
    """Starts the command, and kills it at one of `stages.STAGES`."""
    self._count += 1
    log = self._logs / f"{self._count}.log"
    assert self._process.stdin
    line = json.dumps({"flags": [*flags], "stage": stage, "log": str(log)})
    self._process.stdin.write(f"{line}\n")
    self._process.stdin.flush()
    return Start(self._answer(), log)

  def _answer(self) -> int:
    assert self._process.stdout
    ready, _, _ = select.select([self._process.stdout], [], [], _READY_S)
    line = self._process.stdout.readline() if ready else ""
    if not line:
      self._process.kill()
      raise RuntimeError("the process that starts runs has no answer")
    return int(line)

  def close(self) -> None:
    """Ends it, and the starts that still run."""
    assert self._process.stdin and self._process.stdout
    self._process.stdin.close()
    self._process.wait()
    self._process.stdout.close()


def _fork(order: Mapping[str, Any]) -> int:
  """Starts the command as an order says; the process id."""
  if pid := os.fork():
    return pid
  try:
    os.setsid()
    out = os.open(order["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for file, number in ((nothing, 0), (out, 1), (out, 2)):
      os.dup2(file, number)
    if order["stage"] is not None:
      stages.kill_at(stages.STAGES[order["stage"]])
    sys.argv = ["brorl_jax.main", *order["flags"]]
    runpy.run_module("brorl_jax.main", run_name="__main__", alter_sys=True)
    _leave(0)
  except SystemExit as e:
    _leave(e.code if isinstance(e.code, int) else int(e.code is not None))
  except BaseException:
    traceback.print_exc()
    _leave(1)
  raise AssertionError("not reached")


def _leave(status: int) -> None:
  """Ends a fork as Python ends: waits for its threads, flushes."""
  import atexit
  import threading

  threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
  atexit._run_exitfuncs()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)


def main() -> None:
  """Forks at each line of standard input, until its end."""
  logs: dict[int, pathlib.Path] = {}
  for name in _IMPORTED:
    importlib.import_module(name)
  print(os.getpid(), flush=True)
  orders, data = sys.stdin.fileno(), b""
  while True:
    _reap(logs)
    if not select.select([orders], [], [], _POLL_S)[0]:
      continue
    part = os.read(orders, 1 << 16)
    if not part:
      break
    *lines, data = (data + part).split(b"\n")
    for line in lines:
      order = json.loads(line)
      pid = _fork(order)
      logs[pid] = pathlib.Path(order["log"])
      print(pid, flush=True)
  for pid in logs:
    os.killpg(pid, signal.SIGKILL)


def _reap(logs: dict[int, pathlib.Path]) -> None:
  """Writes the exit statuses of forks that have ended beside their logs."""
  for pid in [*logs]:
    done, status = os.waitpid(pid, os.WNOHANG)
    if done:
      log = logs.pop(pid)
      part = log.with_suffix(".part")
      part.write_text(str(os.waitstatus_to_exitcode(status)))
      part.rename(log.with_suffix(".status"))


if __name__ == "__main__":
  main()
