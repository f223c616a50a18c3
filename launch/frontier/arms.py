"""What is run: an arm, its command line, and what is kept of a run.

A result is a small JSON file. An arm whose result exists is not run again, so
that the experiment resumes, on another machine too.
"""

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from brorl_jax.runs import lines, metrics
from launch.frontier import exact
from launch.frontier.machine import call

# Rollouts of the smallest budget; the others are its doubles.
LEAST = {
  "shared": 2**13,
  "own": 2**16,
  "countdown": 2**16,
  "reasoning": 5 * 2**11,
}
TUNING_SEED = 100
UNITS = 1e4  # in which p of a prompt is kept
LOST, WON = 1e-4, 0.5  # p of a prompt
_LONG = 100_000  # steps; the budget ends a run


@dataclasses.dataclass(frozen=True)
class Arm:
  """One run.

  Attributes:
    task: Of configs/frontier.py.
    pool: Of problems.POOLS.
    n: Rollouts per prompt, or "adaptive".
    samples: Of a step.
    advantage: Of configs/frontier.py.
    recipe: Of configs/frontier.py.
    power: The rate is 2^power.
    seed: Of the run.
    budget: Rollouts that it generates.
    decayed: Whether the rate falls to 0 with the last of them. Runs have a
      constant rate, so that of these arms only results are read.
    start: Folder of the policy below the root, if not that of the task.
  """

  task: str
  pool: str
  n: int | str
  samples: int
  advantage: str
  recipe: str = "plain"
  power: float = -11
  seed: int = TUNING_SEED
  budget: int = 0
  decayed: bool = False
  start: str = ""

  @property
  def name(self) -> str:
    """Of its folder. Budgets at a constant rate share a run."""
    what = (
      self.start.replace("/", "."),
      f"{self.task}-{self.pool}-n{self.n}-b{self.samples}-{self.advantage}",
      self.recipe,
      f"decayed{self.budget}" if self.decayed else "",
      f"lr{self.power:g}-seed{self.seed}",
    )
    return "-".join(filter(None, what))


def run(
  arm: Arm,
  cores: Iterable[int],
  *,
  root: pathlib.Path,
  path: pathlib.Path,
  scale: int,
) -> dict[str, Any]:
  """Runs an arm, or resumes it, and writes its result.

  Args:
    arm: What to run.
    cores: Of this machine.
    root: Folder of the experiment.
    path: Of the result.
    scale: Multiplies the samples of a step.
  """
  folder = root / "runs" / arm.name
  call(
    folder,
    cores,
    *("-m", "brorl_jax.main", f"--workdir={folder}"),
    f"--config={config(arm, scale=scale)}",
    *(
      f"--config.{field}={value}"
      for field, value in flags(arm, root, scale=scale).items()
    ),
  )
  data = root / arm.task
  call(folder, cores, "-m", "launch.frontier.arms", folder, data, path)
  return json.loads(path.read_text())


def config(arm: Arm, *, scale: int) -> str:
  which = (arm.task, arm.n, arm.samples * scale, arm.advantage, arm.recipe)
  return f"configs/frontier.py:{'/'.join(map(str, which))}"


def reaches(result: Mapping[str, Any], budget: float) -> bool:
  """Whether a run has generated it.

  A run with a decaying rate ends with a step, somewhat before or after it if
  prompts are rejected.
  """
  return result["points"]["samples"][-1] >= 0.9 * budget


def flags(arm: Arm, root: pathlib.Path, *, scale: int) -> dict[str, object]:
  """What the config leaves to the command line."""
  if arm.decayed:
    raise SystemExit(
      f"error: {arm.name} has no result, and runs have a constant rate; copy "
      "its result from launch/frontier/results"
    )
  samples = arm.samples * scale
  every = max(LEAST[arm.task] // samples, 1)
  # Dynamic sampling generates more rollouts in a step than it trains on.
  save = max(every // 4, 1) if arm.recipe == "whole" else every
  out: dict[str, object] = {
    "run.seed": arm.seed,
    "run.steps": _LONG,
    "run.max_samples": arm.budget,
    "run.save_every": save,
    "optim.lr": 2.0**arm.power,
  }
  if arm.task == "reasoning":
    return out | {"eval.every": every}
  data = root / arm.task
  return out | {
    "policy.checkpoint": root / arm.start if arm.start else data / "policy",
    "data.files": f"('{data}/{arm.pool}.jsonl',)",
    "data.heldout_files": f"('{data}/{arm.pool}-heldout.jsonl',)",
  }


def read(path: pathlib.Path) -> dict[str, Any] | None:
  """A result; None if there is none."""
  if not path.exists():
    return None
  try:
    return json.loads(path.read_text())
  except ValueError as e:
    raise SystemExit(
      f"error: {path} is damaged ({e}); delete it, and its run starts again"
    ) from None


def summary(p: np.ndarray, answers: np.ndarray) -> dict[str, float]:
  """Of all training prompts.

  Args:
    p: [P], of a right answer.
    answers: [P, A], of each of them.
  """
  never = np.log1p(-np.minimum(answers, 1.0 - 1e-12))
  return {
    "pass_at_1": p.mean(),
    "log10_p": np.log10(np.maximum(p, 1e-6)).mean(),
    "worst_at_4": (p**4).mean(),
    "best_at_4": (1.0 - (1.0 - p) ** 4).mean(),
    "best_at_256": (1.0 - (1.0 - p) ** 256).mean(),
    "distinct": -np.expm1(256 * never).sum(axis=1).mean(),
    "lost": (p < LOST).mean(),
    "won": (p > WON).mean(),
  }


Rates = Iterator[tuple[int, dict[str, np.ndarray]]]


def exact_rates(folder: pathlib.Path, data: pathlib.Path) -> Rates:
  """By checkpoint and side: p of each answer [P, A]."""
  config = json.loads((folder / "config.json").read_text())["config"]
  pool = pathlib.Path(config["data"]["files"][0]).stem
  sides = {
    "train": exact.lines_of(data / f"{pool}.jsonl"),
    "heldout": exact.lines_of(data / f"{pool}-heldout.jsonl"),
  }
  steps = exact.steps_of(folder)
  chosen_steps = chosen(steps, generated(folder)[steps], LEAST[data.name])
  return exact.of_run(folder, sides, chosen_steps)


def sampled_rates(folder: pathlib.Path) -> Rates:
  """By evaluation: pass@1 of each held-out prompt, for both sides."""
  for line in metrics.read_lines(folder / "eval" / "curve.jsonl"):
    p = np.array(line["rates"])[:, None]
    yield line["step"], {"train": p, "heldout": p}


def generated(folder: pathlib.Path) -> np.ndarray:
  """Rollouts up to each step, 0 included."""
  log = metrics.read_lines(folder / "metrics.jsonl")
  return np.array([0, *(line["data/samples_total"] for line in log)])


def measured(folder: pathlib.Path, data: pathlib.Path) -> dict[str, Any]:
  """What is kept of a run: rates by checkpoint, and what it cost.

  "points" has one value per checkpoint, the first of the start; "prompts" has
  p of each prompt in ten-thousandths: at the start and at each budget.
  """
  run = json.loads((folder / "config.json").read_text())
  config = run["config"]
  log = metrics.read_lines(folder / "metrics.jsonl")
  busy = np.cumsum([0.0, *(line["time/busy_s"] for line in log)])
  samples, least = generated(folder), LEAST[data.name]
  found = (
    sampled_rates(folder)
    if data.name == "reasoning"
    else exact_rates(folder, data)
  )
  points: dict[str, list] = {"step": [], "samples": [], "busy_s": []}
  p: dict[str, list[np.ndarray]] = {"train": [], "heldout": []}
  for step, answers in found:
    points["step"].append(step)
    points["samples"].append(int(samples[step]))
    points["busy_s"].append(round(float(busy[step]), 2))
    for side in p:
      p[side].append(answers[side].sum(axis=1))
    means = summary(p["train"][-1], answers["train"])
    means["heldout"] = float(p["heldout"][-1].mean())
    for name, value in means.items():
      points.setdefault(name, []).append(float(f"{value:.4g}"))
  kept: list[int] = []
  if config["run"]["seed"] != TUNING_SEED:
    kept = budgets(np.array(points["samples"]), least)
  in_ten_thousandths = lambda x: np.round(UNITS * x).astype(int).tolist()
  prompts = {
    "samples": [points["samples"][i] for i in kept],
    **{side: [in_ten_thousandths(p[side][i]) for i in kept] for side in p},
  }
  return {
    "config": _kept(config),
    "machine": machine_of(run),
    "points": points,
    "prompts": prompts,
  }


def machine_of(run: Mapping[str, Any]) -> str:
  """What its seconds are of: "AMD EPYC, jax 0.10.2"; from config.json."""
  (device,) = run["machine"]["devices"]
  what = run["machine"]["processor"] if device == "cpu" else device
  return f"{what}, jax {run['versions']['jax']}"


def chosen(steps: Sequence[int], at: np.ndarray, least: int) -> list[int]:
  """Checkpoints to read: the start, and one for each smallest budget.

  Args:
    steps: There are.
    at: Rollouts up to each of them.
    least: The smallest budget.
  """
  wanted = np.arange(0, at[-1] + least, least)
  return sorted({steps[int(np.argmin(abs(at - w)))] for w in wanted})


def budgets(at: np.ndarray, least: int) -> list[int]:
  """The points nearest to the start and to each budget."""
  doubles = [0] + [least * 2**k for k in range(20)]
  return sorted(
    {int(np.argmin(abs(at - b))) for b in doubles if b <= 1.1 * at[-1]}
  )


def _kept(config: Mapping[str, Any]) -> dict[str, Any]:
  """The fields in which arms differ."""
  fields = """
    sampling.n sampling.rounds sampling.samples advantage.kind filter.keep
    optim.minibatches optim.lr reference.kl_weight
    reference.reset_every run.seed
  """
  out = {}
  for field in fields.split():
    section, name = field.split(".")
    out[field] = config[section][name]
  return out


def main() -> None:
  parser = argparse.ArgumentParser(description="Writes the result of a run.")
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("data", type=pathlib.Path)
  parser.add_argument("result", type=pathlib.Path)
  a = parser.parse_args()
  a.result.parent.mkdir(parents=True, exist_ok=True)
  found = json.dumps(measured(a.folder, a.data), separators=(",", ":"))
  lines.write_whole(a.result, found + "\n")


if __name__ == "__main__":
  main()
