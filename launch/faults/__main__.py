"""Breaks runs by the hundred; see launch/soak.sh.

  python -m launch.faults --kills=200 --workdir=DIR

One line of JSON per trial on standard output, and a table at the end. The
status is 1 if a trial was not as it must be.
"""

import argparse
import collections
import functools
import json
import pathlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator

from launch.faults import damage, runs, stages, trials

Trial = tuple[str, str, Callable[[pathlib.Path], trials.Wrong]]


def planned(site: runs.Site, kills: int) -> Iterator[Trial]:
  """Kind, name and function of each trial."""
  of = lambda function, **how: functools.partial(function, site, **how)
  for seed in range(kills):
    yield "kill", f"at random {seed}", of(trials.random_kills, seed=seed)
  for stage in stages.STAGES:
    yield "stage", stage, of(trials.stage_kill, stage=stage)
  for moment in range(10):
    yield "SIGTERM", f"after step {moment}", of(trials.term, moment=moment)
  for file in damage.files(trials.broken(site)):
    for way in damage.WAYS:
      trial = of(trials.damaged, file=file, way=way)
      yield "damage", f"{way}: {file}", trial


def broken(site: runs.Site, kills: int) -> dict[str, list[bool]]:
  """Whether each trial was as it must be, by kind."""
  out = collections.defaultdict[str, list[bool]](list)
  for kind, name, trial in planned(site, kills):
    workdir = site.folder / "run"
    begin = time.monotonic()
    try:
      wrong = trial(workdir)
    except (TimeoutError, OSError, KeyError, ValueError) as e:
      wrong = f"{type(e).__name__}: {e}"
    spent = round(time.monotonic() - begin, 1)
    out[kind].append(wrong is None)
    line = {"kind": kind, "trial": name, "wrong": wrong, "seconds": spent}
    print(json.dumps(line), flush=True)
    if wrong is not None:  # to be looked at
      workdir.rename(site.folder / f"wrong {sum(map(len, out.values()))}")
    shutil.rmtree(workdir, ignore_errors=True)
  return out


def main() -> None:
  parser = argparse.ArgumentParser(
    prog="launch/soak.sh", description="Breaks runs; see launch/README.md."
  )
  parser.add_argument("--kills", type=int, default=200, help="kills at random")
  parser.add_argument("--workdir", required=True, type=pathlib.Path)
  given = parser.parse_args()
  folder = given.workdir.absolute()
  if folder.exists() and any(folder.iterdir()):
    parser.error(f"--workdir={given.workdir} is not empty; name a new folder")
  with runs.Site(folder) as site:
    found = broken(site, given.kills)
  for kind, every in found.items():
    print(f"{kind:10} {sum(every)} of {len(every)}")
  sys.exit(0 if all(map(all, found.values())) else 1)


if __name__ == "__main__":
  main()
