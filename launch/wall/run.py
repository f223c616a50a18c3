"""Runs the arms, each on a core of its own, and writes their results.

  python -m launch.wall.run runs/wall --hours=1 --arms=n16,n512,need --seeds=3

Repeating the command resumes: what has a result is not run again.
"""

import argparse
import concurrent.futures
import os
import pathlib
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence

from brorl_jax.many.processes import STOPPED
from launch.wall import arms, prepare

ROOT = pathlib.Path(__file__).parents[2]
_PR_SET_PDEATHSIG = 1
# Ends when this process does. Not a preexec_fn: jax has threads, and between
# fork and exec nothing may need their locks.
_WITH_ME = (
  "import ctypes, os, sys; "
  f"ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {signal.SIGKILL:d}); "
  "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


def train(
  folder: pathlib.Path,
  given: Sequence[str],
  cores: Collection[int],
  enough: Callable[[], bool] = lambda: False,
) -> None:
  """A run with these flags to its end, or until there is `enough` of it; then
  it saves. SystemExit names the log.
  """
  folder.parent.mkdir(parents=True, exist_ok=True)
  log = folder.with_name(f"{folder.name}.log")
  command = [
    *(sys.executable, "-c", _WITH_ME, "-m", "brorl_jax.main"),
    *(f"--workdir={folder}", *given),
  ]
  environment = os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
  with log.open("a") as out:
    process = subprocess.Popen(
      command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT
    )
    os.sched_setaffinity(process.pid, cores)
    while process.poll() is None and not enough():
      time.sleep(1.0)
    process.terminate()
    if process.wait() not in (0, STOPPED if enough() else 0):
      tail = "\n".join(log.read_text().splitlines()[-3:])
      raise SystemExit(f"error: {folder} failed; {log} ends with:\n{tail}")


def run(name: str, seed: int, root: pathlib.Path, core: int) -> None:
  """One run of an arm, with its result."""
  folder = root / "runs" / f"{name}-{seed}"
  train(folder, arms.flags(arms.ARMS[name], root, seed=seed), {core})
  found = arms.measured(folder)
  arms.write(root / "results" / name / f"{seed}.json", found)
  last = {k: found["points"][k][-1] for k in ("busy_s", "pass_at_1", "dead")}
  print(f"{name}, seed {seed}: {last}", flush=True)


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("root", type=pathlib.Path)
  add = parser.add_argument
  add("--hours", type=float, default=1.0, help="after which none is begun")
  add("--arms", default=",".join(arms.ARMS), help="of launch/wall/arms.py")
  add("--seeds", type=int, default=5, help="runs of each arm")
  a = parser.parse_args()
  if a.hours <= 0 or a.seeds < 1:
    raise SystemExit(
      f"error: --hours={a.hours:g} --seeds={a.seeds}: give more than 0 of both"
    )
  end, root = time.monotonic() + 3600 * a.hours, a.root.absolute()
  names = a.arms.split(",")
  if unknown := {*names} - {*arms.ARMS}:
    known = ", ".join(arms.ARMS)
    raise SystemExit(f"error: --arms={min(unknown)} is not one of {known}")
  for task in {arms.ARMS[name].task for name in names} - {"own"}:
    if not (arms.folder_of(task, root) / "done").exists():
      prepare.prepare(arms.folder_of(task, root), task)
  cores = queue.SimpleQueue[int]()
  for core in (every := sorted(os.sched_getaffinity(0))):
    cores.put(core)

  def one(job: tuple[int, str]) -> None:
    seed, name = job
    result = root / "results" / name / f"{seed}.json"
    if result.exists() or time.monotonic() > end:
      return
    core = cores.get()
    try:
      run(name, seed, root, core)
    finally:
      cores.put(core)

  jobs = [(seed, name) for seed in range(a.seeds) for name in names]
  with concurrent.futures.ThreadPoolExecutor(len(every)) as pool:
    list(pool.map(one, jobs))


if __name__ == "__main__":
  main()
