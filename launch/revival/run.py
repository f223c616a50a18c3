"""The revival experiment: saturate with N = 16, continue in arms, compare.

  python -m launch.revival.run runs/revival

Wings (`countdown.py`, `queens.py`, `puzzles.py`) hold the prompts,
`configs/revival.py` the arms. In each wing

1. N = 16 trains at its best rate until it has saturated: over the last third of
   its steps, a paired test over prompts finds no significant gain (one-sided p
   of 5 %), and the gain lies within +- .03 (two one-sided tests, 5 %). If not,
   it trains half as long again, up to four times the time. If it still has not
   saturated, the arms continue anyway, and the report says so.
2. From its last checkpoint, with a new optimizer, each arm trains for the same
   processor seconds (time/busy_s). Its learning rate is tuned first, with a
   separate seed, among rates a factor 3 apart. While the best rate is the least
   or the greatest, one more is tried, up to five.
3. Three seeds of each arm. On countdown and queens this is repeated from the
   policy that N = 16 started with.

On puzzles, 1 and 2 use every other held-out prompt, and the results of 3 use
the rest.

`sweep` is separate: N from 4 to 512 at a constant number of samples.

Every run is `python -m brorl_jax.main` in its own folder. Repeating the command
resumes it. Independent runs share the cores, one core each.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
import numpy as np

from brorl_jax.rl import stats
from brorl_jax.runs import lines
from launch.revival import machine, study
from launch.revival.machine import call, say

SEEDS, TUNING_SEED = (0, 1, 2), 100
GRID, MOST_RATES = (-1, 0, 1), 5  # powers of 3 of the wing's rate
SIGNIFICANT_P, STILL, LONGER, LONGEST = 0.05, 0.03, 1.5, 4
ARMS = ("n16", "n512_equal_samples", "n512_paper", "n512_equal_prompts")
WAY = ("n16", "n512_paper", "n16_distinct", "n512_distinct")
SWEEP, SWEEP_S = (4, 8, 16, 32, 64, 128, 256, 512), 40.0


@dataclasses.dataclass(frozen=True)
class Wing:
  """Prompts, and how long each run on them takes.

  Attributes:
    name: Of configs/revival.py.
    script: Module that makes its prompts, with its flags.
    lr: The middle of the rates that are tried.
    arms: By branch: from where the arms go on.
    seconds: Processor seconds of an arm, by branch; of N = 16 before it may
      stand still.
    exact: Whether right responses are known, and read from checkpoints.
  """

  name: str
  script: str
  lr: float
  arms: dict[str, tuple[str, ...]]
  seconds: dict[str, float]
  exact: bool


WINGS = (
  Wing(
    "countdown",
    "countdown",
    lr=1e-3,
    arms={"saturated": ARMS, "start": WAY},
    seconds={"until_saturated": 60, "saturated": 60, "start": 120},
    exact=True,
  ),
  Wing(
    "queens",
    "queens",
    lr=1e-3,
    arms={"saturated": ARMS, "start": WAY},
    seconds={"until_saturated": 60, "saturated": 45, "start": 45},
    exact=True,
  ),
  Wing(
    "paths",
    "countdown --paths",
    lr=1e-3,
    arms={"saturated": ARMS},
    seconds={"until_saturated": 60, "saturated": 45},
    exact=True,
  ),
  Wing(
    "puzzles",
    "puzzles",
    lr=3e-4,
    arms={"saturated": ARMS},
    seconds={"until_saturated": 90, "saturated": 45},
    exact=False,
  ),
)
# Steps between what is read of a run, by arm: some ten times in each.
_SHORT = {
  "n16": 20,
  "n16_distinct": 20,
  "n512_equal_samples": 30,
  "n512_paper": 8,
  "n512_distinct": 8,
}
EVERY = {
  "countdown": _SHORT,
  "queens": _SHORT,
  "paths": {"n16": 15, "n512_equal_samples": 20, "n512_paper": 5},
  "puzzles": {"n16": 10, "n512_equal_samples": 25, "n512_paper": 6},
}
SATURATING = ("until_saturated", "n16")


@dataclasses.dataclass(frozen=True)
class Job:
  """One run of one arm."""

  wing: Wing
  branch: str
  arm: str
  lr: float
  seed: int
  seconds: float


@dataclasses.dataclass(frozen=True)
class Experiment:
  """Where it runs, and how large.

  Attributes:
    root: Its folder.
    scale: Of policy, prompts and lengths.
    share: Of the processor seconds that a scale asks for.
  """

  root: pathlib.Path
  scale: int
  share: float
  lanes: machine.Machine
  progress: machine.Progress

  @property
  def longer(self) -> float:
    return self.scale * self.share

  def seconds(self, wing: Wing, branch: str) -> float:
    return wing.seconds[branch] * self.longer

  def folder(self, job: Job) -> pathlib.Path:
    name = f"lr{job.lr:.3g}-seed{job.seed}"
    return self.root / job.wing.name / job.branch / job.arm / name

  def config(self, job: Job) -> str:
    return f"configs/revival.py:{job.wing.name}/{job.arm}/{self.scale}"

  def policy(self, job: Job) -> pathlib.Path | str:
    """What it begins with; "" is the embedded policy."""
    if job.branch == "saturated":
      return self.root / job.wing.name / "saturated" / "policy"
    own = job.wing.exact or self.scale > 1
    return self.root / job.wing.name / "policy" if own else ""


def each(e: Experiment, jobs: Sequence[Job]) -> None:
  """All of them, or what is left of each."""

  def one(job: Job, cores: set[int]) -> None:
    done = e.folder(job) / "done"
    before = float(done.read_text()) if done.exists() else 0.0
    if before >= job.seconds:
      e.progress.plan(-job.seconds)
      return
    e.progress.plan(-before)
    what = str(done.parent.relative_to(e.root))
    with e.progress.run(what, job.seconds - before):
      train(e, job, cores)
      write(done, job.seconds)

  e.lanes.each(one, jobs)


def train(e: Experiment, job: Job, cores: Iterable[int]) -> None:
  """Goes on until its seconds are spent, then reads its checkpoints."""
  folder, data = e.folder(job), e.root / job.wing.name
  every = EVERY[job.wing.name].get(job.arm, 2)
  config = {
    "run.seed": job.seed,
    "optim.lr": job.lr,
    "run.max_busy_s": job.seconds,
    "policy.checkpoint": e.policy(job),
    "run.save_every": every,
    "eval.every": 100_000 if job.wing.exact else every,
    "run.keep_checkpoints": 100_000 if job.wing.exact else 2,
  }
  config["data.files"] = f"('{data}/train.jsonl',)"
  config["data.heldout_files"] = f"('{data}/heldout.jsonl',)"
  call(
    folder,
    cores,
    *("-m", "brorl_jax.main", f"--workdir={folder}"),
    f"--config={e.config(job)}",
    *(f"--config.{field}={value}" for field, value in config.items()),
  )
  if job.wing.exact:
    call(folder, cores, "-m", "launch.revival.exact", data, folder)


def prepare(e: Experiment, wing: Wing) -> None:
  """Prompts, and a policy that knows a little of them."""
  folder = e.root / wing.name
  if (folder / "prepared").exists():
    return
  say(f"{wing.name}: prompts" + (" and warm-up" if wing.exact else ""))
  script, *flags = wing.script.split()
  cores = os.sched_getaffinity(0)
  module = f"launch.revival.{script}"
  call(folder, cores, "-m", module, folder, f"--scale={e.scale}", *flags)
  if e.scale > 1 and not wing.exact:
    say(f"{wing.name}: warm-up of a larger policy")
    larger = {"width": 96, "mlp": 384, "layers": 3}
    policy = folder / "policy"
    shutil.rmtree(policy, ignore_errors=True)  # of a start that was stopped
    call(
      policy,
      cores,
      *("-m", "brorl_jax.main", "--mode=warmup", f"--workdir={policy}"),
      "--config=configs/warmup.py",
      *(f"--config.{field}={e.scale * one}" for field, one in larger.items()),
    )
  (folder / "prepared").touch()


def rates(e: Experiment, job: Job) -> tuple[np.ndarray, np.ndarray]:
  """Steps, and pass@1 [steps, prompts] of the deciding prompts.

  Steps past the job's seconds are left out: they come from a longer job and may
  be incomplete.
  """
  run = study.read(e.folder(job), seconds=job.seconds, prompts=study.DECIDING)
  return run.steps, run.rates


def stands_still(steps: Sequence[int] | np.ndarray, rate: np.ndarray) -> bool:
  """Whether the last third of the steps brought no gain, with certainty."""
  if len(steps) < 4:
    return False
  two_thirds = min(
    range(len(steps)), key=lambda i: abs(steps[i] - steps[-1] * 2 / 3)
  )
  before, after = (jnp.asarray(rate[i]) for i in (two_thirds, -1))
  p = lambda a, b: float(stats.paired_t(a, b).p_one_sided)
  gained = p(after, before) < SIGNIFICANT_P
  within = max(p(before + STILL, after), p(after + STILL, before))
  return not gained and within < SIGNIFICANT_P


def saturate(e: Experiment, wing: Wing) -> None:
  """N = 16 until it stands still; its policy goes to saturated/policy."""
  policy = e.root / wing.name / "saturated" / "policy"
  seconds = e.seconds(wing, SATURATING[0])
  if policy.exists():
    e.progress.plan(-seconds * len(GRID))
    return
  lr = best_rates(e, wing, [SATURATING])[SATURATING]
  job = Job(wing, *SATURATING, lr, TUNING_SEED, seconds)
  while not (still := stands_still(*rates(e, job))):
    if LONGER * job.seconds > LONGEST * seconds:
      break
    job = dataclasses.replace(job, seconds=LONGER * job.seconds)
    e.progress.plan(job.seconds)
    each(e, [job])
  steps, rate = rates(e, job)
  stood = {
    "still": still,
    "pass_at_1": float(rate[-1].mean()),
    "steps": int(steps[-1]),
    "busy_s": job.seconds,
    "lr": lr,
  }
  say(f"{wing.name}: N = 16 after the last of its steps: {stood}")
  policy.parent.mkdir(parents=True, exist_ok=True)
  write(policy.parent / "stood.json", stood)
  part = policy.with_name("exporting")
  shutil.rmtree(part, ignore_errors=True)
  call(
    part,
    os.sched_getaffinity(0),
    *("-m", "brorl_jax.main", "--mode=export", f"--workdir={part}"),
    f"--config={e.config(job)}",
    f"--config.policy.checkpoint={e.folder(job)}",
  )
  part.rename(policy)


def best_rates(
  e: Experiment, wing: Wing, arms: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], float]:
  """The learning rate of each (branch, arm), tuned with its own seed."""

  def job(which: tuple[str, str], power: int) -> Job:
    lr = float(f"{wing.lr * 3.0**power:.3g}")
    return Job(wing, *which, lr, TUNING_SEED, e.seconds(wing, which[0]))

  def score(which: tuple[str, str], power: int) -> float:
    """The last two, because one evaluation is noisy."""
    _, rate = rates(e, job(which, power))
    return float(rate[-2:].mean())

  tried = {which: list(GRID) for which in arms}
  wanted = [(which, power) for which in arms for power in GRID]
  best: dict[tuple[str, str], int] = {}
  while wanted:
    each(e, [job(which, power) for which, power in wanted])
    wanted = []
    for which, powers in tried.items():
      best[which] = max(powers, key=lambda power: score(which, power))
      beyond = {min(powers): min(powers) - 1, max(powers): max(powers) + 1}
      if best[which] in beyond and len(powers) < MOST_RATES:
        powers.append(beyond[best[which]])
        wanted.append((which, powers[-1]))
    e.progress.plan(sum(e.seconds(wing, which[0]) for which, _ in wanted))
  return {which: job(which, power).lr for which, power in best.items()}


def compare(e: Experiment, wing: Wing) -> None:
  """Every arm of a wing."""
  prepare(e, wing)
  saturate(e, wing)
  arms = [(b, arm) for b, some in wing.arms.items() for arm in some]
  lr = best_rates(e, wing, arms)
  chosen = {"/".join(which): rate for which, rate in lr.items()}
  write(e.root / wing.name / "rates.json", chosen)
  jobs = [
    Job(wing, *which, lr[which], seed, e.seconds(wing, which[0]))
    for seed in SEEDS
    for which in arms
  ]
  each(e, jobs)


def sweep(e: Experiment) -> None:
  """N at a constant N P, from the embedded policy on fresh puzzles."""
  prepare(e, WINGS[-1])  # its prompts
  seconds = SWEEP_S * e.longer

  def one(n: int, cores: set[int]) -> None:
    folder = e.root / "sweep" / f"n{n}"
    if (folder / "report").exists():
      e.progress.plan(-seconds)
      return
    with e.progress.run(f"sweep/n{n}", seconds):
      call(
        folder,
        cores,
        *("-m", "brorl_jax.main", f"--workdir={folder}"),
        f"--config=configs/sweep.py:{n}",
        f"--config.run.max_busy_s={seconds}",
        "--config.eval.temperature=1.0",
        "--config.eval.top_p=1.0",
      )

  def start(_, cores: set[int]) -> None:
    """512 samples of each prompt before training, to predict all N."""
    folder, data = e.root / "sweep" / "start", e.root / "puzzles"
    call(
      folder,
      cores,
      *("-m", "brorl_jax.main", "--mode=evaluate", f"--workdir={folder}"),
      "--config=configs/sweep.py:512",
      # Nothing is trained here: the sides change places.
      f"--config.data.files=('{data}/heldout.jsonl',)",
      f"--config.data.heldout_files=('{data}/train.jsonl',)",
      "--config.eval.n=512",
      "--config.eval.temperature=1.0",
      "--config.eval.top_p=1.0",
    )

  e.lanes.each(start, [None])
  e.lanes.each(one, SWEEP)


def refuse_another(root: pathlib.Path, size: dict[str, float]) -> None:
  """Refuses a folder that belongs to a run of another size."""
  path = root / "size.json"
  if path.exists() and (before := json.loads(path.read_text())) != size:
    raise SystemExit(
      f"{root} belongs to a run with {before}, not {size}; use another folder"
    )
  root.mkdir(parents=True, exist_ok=True)
  write(path, size)


def write(path: pathlib.Path, value: object) -> None:
  """JSON that is whole whenever this process is killed."""
  lines.write_whole(path, json.dumps(value, indent=1) + "\n")


def planned(wing: Wing) -> float:
  """Processor seconds, if no rate is tried beyond the grid."""
  until = wing.seconds[SATURATING[0]] * len(GRID)
  arms = sum(wing.seconds[b] * len(some) for b, some in wing.arms.items())
  return until + arms * (len(GRID) + len(SEEDS))


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("root", type=pathlib.Path)
  parser.add_argument("--scale", type=int, default=1)
  parser.add_argument("--lanes", type=int, default=os.cpu_count() or 1)
  parser.add_argument(
    "--share", type=float, default=1.0, help="of the processor seconds"
  )
  parser.add_argument("--only", choices=[w.name for w in WINGS] + ["sweep"])
  a = parser.parse_args()
  if a.scale < 1 or a.lanes < 1 or a.share <= 0:
    parser.error("--scale and --lanes are at least 1, --share is above 0")
  root = a.root.absolute()
  refuse_another(root, {"scale": a.scale, "share": a.share})
  lanes, progress = machine.Machine(a.lanes), machine.Progress(a.lanes)
  e = Experiment(root, a.scale, a.share, lanes, progress)
  wings = [w for w in WINGS if a.only in (None, w.name)]
  sweeps = a.only in (None, "sweep")
  seconds = sum(map(planned, wings)) + sweeps * SWEEP_S * len(SWEEP)
  progress.plan(seconds * e.longer)
  for wing in wings:
    compare(e, wing)
  if sweeps:
    sweep(e)


if __name__ == "__main__":
  main()
