"""Breaks runs for a long time, and lets one run for long; see launch/soak.sh.

  python -m launch.faults --kills=200 --steps=2000 --workdir=DIR

One line of JSON per trial on standard output, and a table at the end. The
status is 1 if a trial or the long run was not as it must be.
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
from typing import Any

from launch.faults import damage, runs, stages, trials, watch

_SHOWN = 20  # steps between two lines of the long run
_LONG_S = 6 * 3600.0

Trial = tuple[str, str, Callable[[pathlib.Path], trials.Wrong]]


def planned(site: runs.Site, kills: int) -> Iterator[Trial]:
  """Kind, name and function of each trial."""
  part = functools.partial
  for seed in range(kills):
    yield (
      "kill",
      f"at random {seed}",
      part(trials.random_kills, site, seed=seed),
    )
  for stage in stages.STAGES:
    yield "stage", stage, part(trials.stage_kill, site, stage=stage)
  for moment in range(10):
    name = f"SIGTERM after step {moment}"
    yield "SIGTERM", name, part(trials.term, site, moment=moment)
  for name, trial in trials.SINGLE.items():
    yield "other", name, part(trial, site)
  for file in damage.files(trials.broken(site)):
    for way in damage.WAYS:
      name = f"{way}: {file}"
      yield "damage", name, part(trials.damaged, site, file=file, way=way)


def _print(**values: Any) -> None:
  print(json.dumps(values), flush=True)


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
    _print(kind=kind, trial=name, wrong=wrong, seconds=spent)
    if wrong is not None:  # to be looked at
      workdir.rename(site.folder / f"wrong {sum(map(len, out.values()))}")
    shutil.rmtree(workdir, ignore_errors=True)
  return out


def long_run(site: runs.Site, steps: int) -> dict[str, Any]:
  """What a run of many steps holds every 100 of them, and how much it grew."""
  into, workdir = site.folder / "held.jsonl", site.folder / "long"
  more = (
    f"--config.run.steps={steps}",
    "--config.optim.lr=1e-6",  # at which its prompts are not learnt by heart
    # Often enough for threads and buffers to be there by step 100.
    "--config.run.save_every=5",
    "--config.eval.every=20",
  )
  # Every step: some come while a step is saved, when more is held.
  fault = {"kind": "recorded", "into": str(into), "every": 1}
  start = site.start(workdir, fault, *more)
  if (status := start.ended(_LONG_S)) != runs.DONE:
    raise RuntimeError(f"the long run ended with {status}: {start.said()}")
  return {"lines": runs.lines(into), "grown": watch.grown(runs.lines(into))}


def main() -> None:
  parser = argparse.ArgumentParser(
    prog="launch/soak.sh", description="Breaks runs; see launch/README.md."
  )
  number = functools.partial(parser.add_argument, type=int)
  number("--kills", default=200, help="kills at random; 0: no trials at all")
  number("--steps", default=2000, help="of the long run; 0: none")
  parser.add_argument("--workdir", required=True, type=pathlib.Path)
  given = parser.parse_args()
  folder = given.workdir.absolute()
  if folder.exists() and any(folder.iterdir()):
    parser.error(f"--workdir={given.workdir} is not empty; name a new folder")
  if 0 < given.steps < 2 * watch.SETTLED:
    parser.error(
      f"--steps={given.steps} shows no growth; use 0, or 200 or more"
    )
  table, good = [], True
  with runs.Site(folder) as site:
    if given.kills:
      for kind, every in broken(site, given.kills).items():
        table.append(f"{kind:10} {sum(every)} of {len(every)}")
        good &= all(every)
    if given.steps:
      found = long_run(site, given.steps)
      for line in found["lines"][_SHOWN - 1 :: _SHOWN]:
        _print(kind="held", **line)
      for name, share in found["grown"].items():
        within = share <= watch.SHARE
        table.append(f"{name:10} +{share:.2%}  {'' if within else 'too much'}")
        good &= within
  print(*table, sep="\n")
  sys.exit(0 if good else 1)


if __name__ == "__main__":
  main()
