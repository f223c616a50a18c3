"""One fault each: a run is broken, resumes, and must end as its twin.

A trial returns what is wrong, None if nothing is. Its name is that of the run's
folder.
"""

import pathlib
import random
import shutil
import signal
import time

from launch.faults import damage, runs, stages
from launch.faults.runs import Site
from launch.faults.zygote import Start

LIMIT_S = 240.0  # of one start; an undisturbed one takes a few seconds

Wrong = str | None


def goes_on(site: Site, workdir: pathlib.Path) -> Wrong:
  """The same command once more: it ends, and the run is as its twin."""
  start = site.start(workdir)
  return _status(start, runs.DONE) or _differs(workdir, site.twin)


def _differs(workdir: pathlib.Path, twin: pathlib.Path) -> Wrong:
  found = runs.differences(workdir, twin)
  return f"not as its twin: {'; '.join(found[:5])}" if found else None


def _wait(start: Start, workdir: pathlib.Path, count: int) -> None:
  """Waits until metrics.jsonl has this many lines, or the start has ended."""
  end, path = time.monotonic() + LIMIT_S, workdir / "metrics.jsonl"
  while start.status() is None and time.monotonic() < end:
    if path.exists() and path.read_bytes().count(b"\n") >= count:
      return
    time.sleep(0.005)


def _status(start: Start, *wanted: int) -> Wrong:
  status = start.ended(LIMIT_S)
  if status in wanted:
    return None
  return f"status {status}, not {wanted}: {start.said()[-500:]}"


def random_kills(
  site: Site, workdir: pathlib.Path, seed: int, count: int = 1
) -> Wrong:
  """SIGKILL at random moments of one run, which resumes after each.

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
  first = [stages.AFTER_FIVE] if stages.STAGES[stage].resumed else []
  for name in (*first, stage):
    if wrong := _status(site.start(workdir, name), -signal.SIGKILL):
      return wrong
  return goes_on(site, workdir)


def term(site: Site, workdir: pathlib.Path, moment: int) -> Wrong:
  """SIGTERM after this many steps; 0: before the first, perhaps before any."""
  rng, start = random.Random(f"term {moment}"), site.start(workdir)
  _wait(start, workdir, moment)
  time.sleep(rng.uniform(0.0, 0.1 if moment else site.seconds / 2))
  start.send(signal.SIGTERM)
  if wrong := _status(start, runs.STOPPED):
    return wrong
  done = [x["step"] for x in runs.lines(workdir / "metrics.jsonl")]
  if done and done[-1] != runs.steps(workdir)[-1]:
    return f"step {done[-1]} is lost: saved are {runs.steps(workdir)}"
  return goes_on(site, workdir)


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
  older step replaces it, or it is refused in one line. Of lines that were
  changed, and are still lines, nobody can tell: theirs alone may differ.
  """
  shutil.copytree(broken(site), workdir)
  restore = damage.damage(workdir / file, way, f"{file} {way}")
  start = site.start(workdir)
  if wrong := _status(start, runs.DONE, runs.REFUSED):
    return wrong
  if start.status() == runs.DONE:
    lost = str(file) if file.suffix == ".jsonl" else None
    found = runs.differences(workdir, site.twin)
    wrong = [x for x in found if x.replace(",", ":").split(":")[0] != lost]
    return f"nobody was told: {wrong[:5]}" if wrong else None
  if wrong := runs.complaint(start.said()):
    return wrong
  restore()
  return goes_on(site, workdir)
