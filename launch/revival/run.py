"""The revival experiment: saturate with N = 16, continue in arms, compare.

  python launch/revival/run.py runs/revival

Wings (`countdown.py`, `puzzles.py`) hold the prompts, `configs/revival.py` the
arms. In each wing

1. N = 16 trains until it stands still: the last third of its steps gained
   nothing that a paired test over prompts calls significant (one-sided p of
   5 %). If it still gains, it goes on for half as long again.
2. From its last checkpoint, with a new optimizer as from a published model,
   each arm gets the same processor seconds (time/busy_s). Its learning rate is
   chosen before, with a seed of its own, among rates a factor 3 apart; one more
   is tried as long as the best is the least or greatest of them.
3. Three seeds of each arm. On countdown the same once more from the policy that
   N = 16 began with, for what happens on the way.

`sweep` is another thing: N from 4 to 512 at a constant number of samples.

Every run is `python -m brorl_jax.main` in a folder of its own; the same command
again goes on where it stopped. Runs that do not wait for each other share the
cores, one core each.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import queue
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from brorl_jax import metrics
from brorl_jax.rl import stats

# In front of a process that ends when this one does. Not as a preexec_fn: jax
# has threads, and between fork and exec nothing may need their locks.
PR_SET_PDEATHSIG = 1
_WITH_ME = (
  "import ctypes, os, sys; "
  f"ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {signal.SIGKILL:d}); "
  "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
ROOT = pathlib.Path(__file__).parents[2]
HERE = pathlib.Path(__file__).parent
SEEDS, TUNING_SEED = (0, 1, 2), 100
GRID, MOST_RATES = (-1, 0, 1), 5  # powers of 3 of the wing's rate
SATURATED_P, LONGER, MOST_TRIES = 0.05, 1.5, 5
ARMS = ("n16", "n512_equal_samples", "n512_paper", "n512_equal_prompts")
SWEEP = (4, 8, 16, 32, 64, 128, 256, 512)


@dataclasses.dataclass(frozen=True)
class Wing:
  """Prompts, and how long each run on them takes.

  Attributes:
    name: Of configs/revival.py.
    lr: Of N = 16 until it stands still, and the middle of the rates tried.
    saturate_s: Processor seconds of N = 16 before that is asked.
    seconds: Processor seconds of an arm.
    arms: By branch: from where the arms go on.
    exact: Whether right responses are known, and read from checkpoints.
  """

  name: str
  lr: float
  saturate_s: float
  seconds: float
  arms: dict[str, tuple[str, ...]]
  exact: bool


WINGS = (
  Wing(
    "countdown",
    lr=1e-3,
    saturate_s=24,
    seconds=60,
    arms={
      "saturated": ARMS,
      "start": (
        "n16",
        "n512_equal_prompts",
        "n16_distinct",
        "n512_distinct",
      ),
    },
    exact=True,
  ),
  Wing(
    "paths",
    lr=1e-3,
    saturate_s=24,
    seconds=60,
    # 16 prompts of 16 rollouts are half a group of 512
    arms={"saturated": ("n16", "n512_paper", "n512_equal_prompts")},
    exact=True,
  ),
  Wing(
    "puzzles",
    lr=3e-4,
    saturate_s=90,
    seconds=60,
    arms={"saturated": ARMS},
    exact=False,
  ),
)
# Steps between what is read of a run, by arm: some ten times in each.
EVERY = {
  "countdown": {
    "n16": 20,
    "n16_distinct": 20,
    "n512_equal_samples": 30,
    "n512_paper": 8,
  },
  "paths": {"n16": 15, "n512_paper": 5},
  "puzzles": {"n16": 10, "n512_equal_samples": 25, "n512_paper": 6},
}


@dataclasses.dataclass(frozen=True)
class Job:
  """One run of one arm."""

  wing: Wing
  branch: str
  arm: str
  lr: float
  seed: int
  seconds: float
  scale: int = 1

  def folder(self, root: pathlib.Path) -> pathlib.Path:
    name = f"lr{self.lr:.3g}-seed{self.seed}"
    return root / self.wing.name / self.branch / self.arm / name


class Machine:
  """Cores that jobs share, and how far they are."""

  def __init__(self, root: pathlib.Path, lanes: int, seconds: float):
    cores = sorted(os.sched_getaffinity(0))
    self._root, self._lanes = root, queue.SimpleQueue[set[int]]()
    pin = 1 < lanes <= len(cores)
    for lane in range(lanes):
      self._lanes.put({cores[lane]} if pin else set(cores))
    self._pool = concurrent.futures.ThreadPoolExecutor(lanes)
    self._start = time.monotonic()
    self._done, self._all = 0.0, seconds

  def run(self, jobs: Sequence[Job]) -> None:
    """All of them; raises what the first failure raises."""
    self.each(self._one, jobs)

  def each(self, do: Callable[[Any, set[int]], None], some: Sequence) -> None:
    """`do` with each of them and the cores of a lane that is free."""

    def one(what) -> None:
      cores = self._lanes.get()
      try:
        do(what, cores)
      finally:
        self._lanes.put(cores)

    list(self._pool.map(one, some))

  def _one(self, job: Job, cores: set[int]) -> None:
    train(job, self._root, cores)
    self._done += job.seconds
    spent = time.monotonic() - self._start
    left = spent * max(self._all - self._done, 0.0) / self._done
    say(
      f"{job.folder(self._root).relative_to(self._root)}: {self._done:.0f} of "
      f"about {self._all:.0f} s of arms, {spent / 60:.0f} min, about "
      f"{left / 60:.0f} min left"
    )


def train(job: Job, root: pathlib.Path, cores: Iterable[int]) -> None:
  """Runs it, or what is left of it."""
  folder = job.folder(root)
  if (folder / "done").exists():
    if float((folder / "done").read_text()) >= job.seconds:
      return
  data, every = root / job.wing.name, EVERY[job.wing.name].get(job.arm, 2)
  config = dict(
    seed=job.seed,
    lr=job.lr,
    max_busy_s=job.seconds,
    checkpoint=policy_of(job, root),
    save_every=every,
    eval_every=100_000 if job.wing.exact else every,
    keep_checkpoints=100_000 if job.wing.exact else 2,
  )
  config["data.files"] = f"('{data}/train.jsonl',)"
  config["data.heldout_files"] = f"('{data}/heldout.jsonl',)"
  call(
    folder,
    cores,
    *("-m", "brorl_jax.main", f"--workdir={folder}"),
    f"--config={config_of(job)}",
    *(f"--config.{field}={value}" for field, value in config.items()),
  )
  if job.wing.exact:
    call(folder, cores, HERE / "exact.py", data, folder)
  part = folder / "done.part"
  part.write_text(f"{job.seconds}\n")
  part.replace(folder / "done")


def config_of(job: Job) -> str:
  return f"configs/revival.py:{job.wing.name}/{job.arm}/{job.scale}"


def policy_of(job: Job, root: pathlib.Path) -> pathlib.Path | str:
  """What an arm begins with; "" is the embedded policy."""
  if job.branch == "saturated":
    return root / job.wing.name / "saturated" / "policy"
  own = job.wing.exact or job.scale > 1
  return root / job.wing.name / "policy" if own else ""


def call(folder: pathlib.Path, cores: Iterable[int], *args: object) -> None:
  """A Python process on these cores; what it says goes to FOLDER.log."""
  folder.mkdir(parents=True, exist_ok=True)
  # Beside the folder: a run takes an empty one only.
  log = folder.with_name(f"{folder.name}.log")
  environment = os.environ | {
    "PYTHONPATH": str(ROOT),
    "JAX_COMPILATION_CACHE_DIR": os.environ.get(
      "JAX_COMPILATION_CACHE_DIR", str(ROOT / "runs" / "compiled")
    ),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }
  with log.open("a") as out:
    process = subprocess.Popen(
      [sys.executable, "-c", _WITH_ME, *map(str, args)],
      cwd=ROOT,
      env=environment,
      stdout=out,
      stderr=subprocess.STDOUT,
    )
    os.sched_setaffinity(process.pid, set(cores))
    if process.wait():
      tail = log.read_text().splitlines()[-3:]
      raise SystemExit(f"{folder} failed; {log} ends with:\n" + "\n".join(tail))


def prepare(wing: Wing, root: pathlib.Path, scale: int) -> None:
  """Prompts, and a policy that knows a little of them."""
  folder = root / wing.name
  if (folder / "prepared").exists():
    return
  say(f"{wing.name}: prompts" + (" and warm-up" if wing.exact else ""))
  script = HERE / ("countdown.py" if wing.exact else "puzzles.py")
  flags = ["--paths"] if wing.name == "paths" else []
  cores = os.sched_getaffinity(0)
  call(folder, cores, script, folder, f"--scale={scale}", *flags)
  if scale > 1 and not wing.exact:
    say(f"{wing.name}: warm-up of a larger policy")
    larger = {"width": 96, "mlp": 384, "layers": 3}
    policy = folder / "policy"
    shutil.rmtree(policy, ignore_errors=True)  # of a start that was stopped
    call(
      policy,
      cores,
      *("-m", "brorl_jax.main", "--mode=warmup", f"--workdir={policy}"),
      "--config=configs/warmup.py",
      *(f"--config.{field}={scale * one}" for field, one in larger.items()),
    )
  (folder / "prepared").touch()


def rates(folder: pathlib.Path, wing: Wing) -> tuple[list[int], np.ndarray]:
  """Steps, and what is to grow [steps, prompts]: exact, or held out."""
  if wing.exact:
    lines = metrics.read_lines(folder / "exact.jsonl")
    return [x["step"] for x in lines], np.array(
      [x["train"]["pass_at_1"] for x in lines]
    )
  lines = metrics.read_lines(folder / "eval" / "curve.jsonl")
  return [x["step"] for x in lines], np.array([x["rates"] for x in lines])


def stands_still(steps: Sequence[int], rate: np.ndarray) -> bool:
  """Whether the last third of the steps gained nothing significant."""
  if len(steps) < 4:
    return False
  two_thirds = min(
    range(len(steps)), key=lambda i: abs(steps[i] - steps[-1] * 2 / 3)
  )
  before, after = (jnp.asarray(rate[i]) for i in (two_thirds, -1))
  gain = stats.paired_t(after, before)
  return float(gain.p_one_sided) >= SATURATED_P


def saturate(
  wing: Wing, machine: Machine, root: pathlib.Path, seconds: float, scale: int
) -> None:
  """N = 16 until it stands still; its policy goes to saturated/policy."""
  policy = root / wing.name / "saturated" / "policy"
  if policy.exists():
    return
  for _ in range(MOST_TRIES):
    where = ("until_saturated", "n16", wing.lr, TUNING_SEED, seconds, scale)
    job = Job(wing, *where)
    machine.run([job])
    steps, rate = rates(job.folder(root), wing)
    if stands_still(steps, rate):
      break
    seconds *= LONGER
  else:
    say(f"{wing.name}: N = 16 still gains after {seconds:.0f} s; going on")
  say(f"{wing.name}: N = 16 stands at {rate[-1].mean():.3f} after {steps[-1]}")
  policy.parent.mkdir(parents=True, exist_ok=True)
  part = policy.with_name("exporting")
  shutil.rmtree(part, ignore_errors=True)
  call(
    part,
    os.sched_getaffinity(0),
    *("-m", "brorl_jax.main", "--mode=export", f"--workdir={part}"),
    f"--config={config_of(job)}",
    f"--config.checkpoint={job.folder(root)}",
  )
  part.rename(policy)


def best_rates(
  wing: Wing,
  machine: Machine,
  root: pathlib.Path,
  arms: Sequence[tuple[str, str]],
  seconds: float,
  scale: int,
) -> dict[tuple[str, str], float]:
  """The learning rate of each (branch, arm), tuned with its own seed."""

  def job(which: tuple[str, str], power: int) -> Job:
    lr = float(f"{wing.lr * 3.0**power:.3g}")
    return Job(wing, *which, lr, TUNING_SEED, seconds, scale)

  def score(which: tuple[str, str], power: int) -> float:
    """The last two, because one evaluation is noisy."""
    _, rate = rates(job(which, power).folder(root), wing)
    return float(rate[-2:].mean())

  tried = {which: list(GRID) for which in arms}
  wanted = [(which, power) for which in arms for power in GRID]
  best: dict[tuple[str, str], int] = {}
  while wanted:
    machine.run([job(which, power) for which, power in wanted])
    wanted = []
    for which, powers in tried.items():
      best[which] = max(powers, key=lambda power: score(which, power))
      beyond = {min(powers): min(powers) - 1, max(powers): max(powers) + 1}
      if best[which] in beyond and len(powers) < MOST_RATES:
        powers.append(beyond[best[which]])
        wanted.append((which, powers[-1]))
  return {which: job(which, power).lr for which, power in best.items()}


def sweep(machine: Machine, root: pathlib.Path, seconds: float) -> None:
  """N at a constant N P, from the embedded policy on fresh puzzles."""

  def one(n: int, cores: set[int]) -> None:
    folder = root / "sweep" / f"n{n}"
    call(
      folder,
      cores,
      *("-m", "brorl_jax.main", f"--workdir={folder}"),
      f"--config=configs/sweep.py:{n}",
      f"--config.max_busy_s={seconds}",
      "--config.eval_temperature=1.0",
      "--config.eval_top_p=1.0",
    )
    say(f"sweep: N = {n} done")

  def start(_, cores: set[int]) -> None:
    """512 samples of prompts like those of training: all N are foretold."""
    folder, data = root / "sweep" / "start", root / "puzzles"
    call(
      folder,
      cores,
      *("-m", "brorl_jax.main", "--mode=evaluate", f"--workdir={folder}"),
      "--config=configs/sweep.py:512",
      # Nothing is trained here: the sides change places.
      f"--config.data.files=('{data}/heldout.jsonl',)",
      f"--config.data.heldout_files=('{data}/train.jsonl',)",
      "--config.eval_n=512",
      "--config.eval_temperature=1.0",
      "--config.eval_top_p=1.0",
    )

  machine.each(start, [None])
  machine.each(one, SWEEP)


def say(text: str) -> None:
  print(text, flush=True)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("root", type=pathlib.Path)
  parser.add_argument("--scale", type=int, default=1)
  parser.add_argument("--lanes", type=int, default=os.cpu_count() or 1)
  parser.add_argument(
    "--share", type=float, default=1.0, help="of the processor seconds"
  )
  parser.add_argument("--only", choices=[w.name for w in WINGS] + ["sweep"])
  a = parser.parse_args()
  root = a.root.absolute()
  wings = [w for w in WINGS if a.only in (None, w.name)]
  refuse_another(root, {"scale": a.scale, "share": a.share})
  longer = a.scale * a.share
  machine = Machine(root, a.lanes, sum(map(planned, wings)) * longer)
  for wing in wings:
    prepare(wing, root, a.scale)
    saturate(wing, machine, root, wing.saturate_s * longer, a.scale)
    arms = [(b, arm) for b, some in wing.arms.items() for arm in some]
    seconds = wing.seconds * longer
    lr = best_rates(wing, machine, root, arms, seconds, a.scale)
    chosen = {"/".join(which): rate for which, rate in lr.items()}
    (root / wing.name / "rates.json").write_text(json.dumps(chosen, indent=1))
    machine.run(
      [
        Job(wing, *which, lr[which], seed, seconds, a.scale)
        for seed in SEEDS
        for which in arms
      ]
    )
  if a.only in (None, "sweep"):
    prepare(WINGS[-1], root, a.scale)  # its prompts
    sweep(machine, root, 40.0 * longer)


def refuse_another(root: pathlib.Path, size: dict[str, float]) -> None:
  """A short trial in the folder of the whole would be taken for part of it."""
  path = root / "size.json"
  if path.exists() and (before := json.loads(path.read_text())) != size:
    raise SystemExit(
      f"{root} is of a run with {before}, not {size}; choose another folder"
    )
  root.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(size))


def planned(wing: Wing) -> float:
  """Processor seconds of a wing's arms, if no rate is tried beyond the grid."""
  arms = sum(map(len, wing.arms.values()))
  return wing.saturate_s + arms * wing.seconds * (len(GRID) + len(SEEDS))


if __name__ == "__main__":
  main()
