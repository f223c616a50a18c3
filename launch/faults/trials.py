"""One fault each: a run is broken, goes on, and must end as its twin.

A trial returns what is wrong, None if nothing is. Its name is that of the run's
folder.
"""

import errno
import functools
import pathlib
import random
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from launch.faults import damage, runs, stages
from launch.faults.runs import Site
from launch.faults.zygote import Start

LIMIT_S = 240.0  # of one start; an undisturbed one takes a few seconds
STORAGE_S = 60.0  # in which a run that cannot write ends
_DAY_S = 86_400.0
_ON = {"kind": "kill", "stage": "after step 5"}

# What the line of a run that cannot write says of its steps.
_LEFT = ("last good step is", "nothing was started")

Wrong = str | None


def goes_on(site: Site, workdir: pathlib.Path) -> Wrong:
  """The same command once more: it ends, and the run is as its twin."""
  start = site.start(workdir)
  if (status := start.ended(LIMIT_S)) != runs.DONE:
    return f"the next start ended with {status}: {start.said()[-500:]}"
  return _differs(workdir, site.twin)


def _differs(workdir: pathlib.Path, twin: pathlib.Path) -> Wrong:
  found = runs.differences(workdir, twin)
  return f"not as its twin: {'; '.join(found[:5])}" if found else None


def _wait(start: Start, workdir: pathlib.Path, count: int) -> None:
  """Waits until metrics.jsonl has so many lines, or the start has ended."""
  end, path = time.monotonic() + LIMIT_S, workdir / "metrics.jsonl"
  while start.status() is None and time.monotonic() < end:
    if path.exists() and path.read_bytes().count(b"\n") >= count:
      return
    time.sleep(0.005)


def _status(start: Start, *wanted: int, within_s: float = LIMIT_S) -> Wrong:
  status = start.ended(within_s)
  if status in wanted:
    return None
  return f"status {status}, not {wanted}: {start.said()[-500:]}"


def random_kills(
  site: Site, workdir: pathlib.Path, seed: int, count: int = 1
) -> Wrong:
  """SIGKILL at random moments of one run, which goes on after each.

  A run that ends meanwhile is compared, and another begins.
  """
  assert site.twin
  rng, killed = random.Random(f"kill {seed}"), 0
  while killed < count:
    start = site.start(workdir)
    time.sleep(rng.uniform(0.0, site.seconds))
    start.send(signal.SIGKILL)
    if wrong := _status(start, -signal.SIGKILL, runs.DONE):
      return f"after {killed} kills: {wrong}"
    if start.status() == runs.DONE:
      if wrong := _differs(workdir, site.twin):
        return f"after {killed} kills: {wrong}"
      shutil.rmtree(workdir)
    else:
      killed += 1
  return goes_on(site, workdir)


def stage_kill(site: Site, workdir: pathlib.Path, stage: str) -> Wrong:
  """SIGKILL at a named moment."""
  if stages.STAGES[stage].resumed:
    wrong = _status(site.start(workdir, _ON), -signal.SIGKILL)
    if wrong:
      return wrong
  start = site.start(workdir, {"kind": "kill", "stage": stage})
  return _status(start, -signal.SIGKILL) or goes_on(site, workdir)


def term(site: Site, workdir: pathlib.Path, moment: int) -> Wrong:
  """SIGTERM after so many steps; 0: before the first, perhaps before any."""
  rng, start = random.Random(f"term {moment}"), site.start(workdir)
  _wait(start, workdir, moment)
  wait_s = rng.uniform(0.0, 0.1 if moment else site.seconds / 2)
  time.sleep(wait_s)
  start.send(signal.SIGTERM)
  if wrong := _status(start, runs.STOPPED):
    return wrong
  done = [x["step"] for x in runs.lines(workdir / "metrics.jsonl")]
  if done and done[-1] != runs.steps(workdir)[-1]:
    return f"step {done[-1]} is lost: saved are {runs.steps(workdir)}"
  return goes_on(site, workdir)


def two_terms(site: Site, workdir: pathlib.Path) -> Wrong:
  """A second SIGTERM, in the same step, ends the process at once."""
  start = site.start(workdir, {"kind": "waits", "step": 5, "seconds": 60.0})
  _wait(start, workdir, 4)
  time.sleep(1.0)  # it waits now
  start.send(signal.SIGTERM)
  time.sleep(0.5)
  if start.status() is not None:
    return "the first SIGTERM did not let the step end"
  start.send(signal.SIGTERM)
  wrong = _status(start, -signal.SIGTERM, within_s=5.0)
  return wrong or goes_on(site, workdir)


def pause(site: Site, workdir: pathlib.Path) -> Wrong:
  """SIGSTOP, and SIGCONT two seconds later."""
  start = site.start(workdir)
  _wait(start, workdir, 3)
  start.send(signal.SIGSTOP)
  time.sleep(2.0)
  start.send(signal.SIGCONT)
  return _status(start, runs.DONE) or _differs(workdir, site.twin)


def broken(site: Site) -> pathlib.Path:
  """The folder of a run that was killed after step 8; made once."""
  workdir = site.folder / "broken"
  if not workdir.exists():
    start = site.start(workdir)
    _wait(start, workdir, 8)
    start.send(signal.SIGKILL)
    start.ended(LIMIT_S)
  return workdir


def damaged(
  site: Site, workdir: pathlib.Path, file: pathlib.Path, way: str
) -> Wrong:
  """A file has other bytes at the next start, and then its own again.

  The start either ends as the twin, because it does without the file or an
  older step replaces it, or it is refused in one line.
  """
  shutil.copytree(broken(site), workdir)
  restore = damage.damage(workdir / file, way, f"{file} {way}")
  start = site.start(workdir)
  if wrong := _status(start, runs.DONE, runs.REFUSED):
    return wrong
  if start.status() == runs.DONE:
    wrong = _differs(workdir, site.twin)
    return f"nobody was told: {wrong}" if wrong else None
  if wrong := runs.complaint(start.said()):
    return wrong
  restore()
  return goes_on(site, workdir)


def two_runs(site: Site, workdir: pathlib.Path) -> Wrong:
  """A second run on the folder of one is refused; the first ends as ever."""
  first = site.start(workdir)
  _wait(first, workdir, 1)
  second = site.start(workdir)
  wrong = _status(second, runs.REFUSED) or runs.complaint(second.said())
  if wrong or "in use by process" not in second.said():
    first.send(signal.SIGKILL)
    return wrong or f"another reason: {second.said()}"
  return _status(first, runs.DONE) or _differs(workdir, site.twin)


def vanishes(site: Site, workdir: pathlib.Path) -> Wrong:
  """The folder is moved away during the run, and back after its end."""
  start, away = site.start(workdir), workdir.with_name(f"{workdir.name} away")
  _wait(start, workdir, 4)
  workdir.rename(away)
  wrong = _stops(site, start)
  if workdir.exists():
    left = sorted(str(p.relative_to(workdir)) for p in workdir.rglob("*"))
    return wrong or f"it made another folder, with {left[:5]}"
  away.rename(workdir)
  return wrong or goes_on(site, workdir)


def _stops(site: Site, start: Start) -> Wrong:
  """It ends within a minute, with the status of storage and one line.

  The line names the last good step, where there was a start. The minute is that
  after the fault, which may be as late as the run is long.
  """
  within_s = STORAGE_S + 2 * site.seconds
  if wrong := _status(start, runs.STORAGE, within_s=within_s):
    return wrong
  if not any(word in start.said() for word in _LEFT):
    return f"no last good step: {start.said()[-500:]}"
  return runs.complaint(start.said())


def storage(
  site: Site, workdir: pathlib.Path, fault: Mapping[str, Any]
) -> Wrong:
  """Writes fail during the run; the storage mended, the run goes on."""
  if fault["kind"] == "fails":
    fault = {**fault, "below": str(workdir)}
  wrong = _stops(site, site.start(workdir, fault))
  return wrong or goes_on(site, workdir)


# What fails, and at which of the writes of a run.
STORAGES: dict[str, dict[str, Any]] = {
  f"{errno.errorcode[number]} from write {nth}": {
    "kind": "fails",
    "number": number,
    "nth": nth,
  }
  for number, nth in (
    (errno.ENOSPC, 1),
    (errno.ENOSPC, 20),
    (errno.EROFS, 3),
    (errno.EIO, 30),
    (errno.EDQUOT, 40),
    (errno.EMFILE, 50),
  )
} | {
  "files of at most 64 KiB": {
    "kind": "limited",
    "what": "FSIZE",
    "most": 1 << 16,
  },
  "no more open files": {"kind": "limited", "what": "NOFILE", "most": 16},
}


def slow(site: Site, workdir: pathlib.Path) -> Wrong:
  """Each write takes .1 s."""
  fault = {"kind": "slow", "below": str(workdir), "seconds": 0.1}
  start = site.start(workdir, fault)
  return _status(start, runs.DONE) or _differs(workdir, site.twin)


def clock(site: Site, workdir: pathlib.Path, days: float) -> Wrong:
  """The wall clock jumps; nothing that is measured is negative."""
  fault = {"kind": "clock", "by": days * _DAY_S, "step": 4}
  start = site.start(workdir, fault)
  if wrong := _status(start, runs.DONE) or _differs(workdir, site.twin):
    return wrong
  for line in runs.lines(workdir / "metrics.jsonl"):
    for name, value in line.items():
      if name.startswith("time/") and not 0 <= value < _DAY_S / 2:
        return f"step {line['step']}: {name} is {value}"
  return None


def worker(
  site: Site, workdir: pathlib.Path, how: str, *, during: bool
) -> Wrong:
  """A verifier's process is killed or stopped, in a question or before one.

  The verdict is right, or it is invalid and counted.
  """
  number = getattr(signal, how)
  fault = {"kind": "worker", "number": number, "nth": 60, "during": during}
  start = site.start(workdir, fault)
  if wrong := _status(start, runs.DONE, runs.REFUSED):
    return wrong
  found = runs.lines(workdir / "metrics.jsonl")
  if start.status() == runs.REFUSED:  # above 1 % of the step
    if "verifiers failed on" not in start.said():
      return f"another reason: {start.said()[-500:]}"
    return runs.complaint(start.said()) or goes_on(site, workdir)
  if any(line["reward/invalid_fraction"] for line in found):
    replaced = sum(line["score/replaced_workers"] for line in found)
    return None if replaced else "an invalid verdict, but no replaced worker"
  return _differs(workdir, site.twin)


def nan(site: Site, workdir: pathlib.Path, step: int) -> Wrong:
  """A gradient that is not finite: the update is skipped, and said so."""
  every = (
    "--config.optim.minibatches=1",
    "--config.run.save_every=1",
    f"--config.run.keep_checkpoints={runs.STEPS}",
  )
  start = site.start(workdir, {"kind": "nan", "step": step}, *every)
  if wrong := _status(start, runs.DONE):
    return wrong
  skipped = [
    line["step"]
    for line in runs.lines(workdir / "metrics.jsonl")
    if line["update/skipped"]
  ]
  told = [
    line["step"]
    for line in runs.lines(workdir / "events.jsonl")
    if line["event"] == "skip"
  ]
  if skipped != [step] or told != [step]:
    return f"skipped: {skipped} in metrics, {told} in events; not [{step}]"
  before, after = (
    runs.record(workdir, at)["digest"] for at in (step - 1, step)
  )
  moved = [
    name
    for name, value in after.items()
    if name.startswith(("params/", "opt/")) and value != before[name]
  ]
  return f"step {step} moved {moved[:3]}" if moved else None


# Trials without a number of their own.
SINGLE: dict[str, Callable[[Site, pathlib.Path], Wrong]] = {
  "a second SIGTERM": two_terms,
  "SIGSTOP and SIGCONT": pause,
  "two runs": two_runs,
  "vanishing storage": vanishes,
  "slow storage": slow,
  "clock a day ahead": functools.partial(clock, days=1.0),
  "clock a day back": functools.partial(clock, days=-1.0),
  "killed worker": functools.partial(worker, how="SIGKILL", during=False),
  "worker killed in a question": functools.partial(
    worker, how="SIGKILL", during=True
  ),
  "stopped worker": functools.partial(worker, how="SIGSTOP", during=False),
}
SINGLE |= {
  name: functools.partial(storage, fault=fault)
  for name, fault in STORAGES.items()
}
