"""The arms, their command lines, and what is kept of a run."""

import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from brorl_jax.model.tokenizer import ASSETS
from brorl_jax.runs import lines, metrics
from launch.wall import exact

DEAD = 1e-4  # p of a prompt, from which hardly any came back
UNITS = 1e5  # in which p of a prompt is kept
POINTS = 20  # of a curve, at most
_LONG = 100_000  # steps; the rollouts end a run


class Arm(NamedTuple):
  """One line of the experiment; all else is that of `n512.py`."""

  n: int | str  # rollouts per prompt, or "need": 16 to 512
  power: float  # the learning rate is 2^power
  rollouts: int  # that a run generates: until its curve is flat, or 100 s
  kind: str = "maxrl"  # advantage.kind
  samples: int = 2048  # of a step; by need at most
  task: str = "own"
  widen: int = 0  # steps with N = 16, after which it is n


ARMS: dict[str, Arm] = {
  "n16": Arm(16, -11.5, 720_000),
  "n16-8x-prompts": Arm(16, -9.5, 720_000, samples=16_384),
  "n512": Arm(512, -11, 2_400_000),
  "need": Arm("need", -10, 1_050_000, samples=8192),
  "n512-twice-the-rate": Arm(512, -10, 2_500_000),
  "n512-16-prompts": Arm(512, -10, 2_300_000, samples=8192),
  "n8": Arm(8, -12, 500_000),
  "n32": Arm(32, -11, 1_000_000),
  "n128": Arm(128, -11, 1_500_000),
  "n16-16x-prompts": Arm(16, -9, 850_000, samples=32_768),
  "n16-whitened": Arm(16, -11.5, 720_000, "tokens"),
  "n512-whitened": Arm(512, -11, 2_400_000, "tokens"),
  "need-whitened": Arm("need", -10, 900_000, "tokens", samples=8192),
  "n16-leave-one-out": Arm(16, -11.5, 720_000, "leave_one_out"),
  "n512-leave-one-out": Arm(512, -11, 2_400_000, "leave_one_out"),
  "n16-grpo": Arm(16, -11.5, 720_000, "grpo"),
  "n512-grpo": Arm(512, -11, 2_400_000, "grpo"),
  "widen-at-40": Arm(512, -11, 2_300_000, widen=40),
  "widen-at-120": Arm(512, -11, 2_000_000, widen=120),
  "widen-at-300": Arm(512, -11, 2_000_000, widen=300),
  "countdown-n16": Arm(16, -11, 700_000, task="countdown"),
  "countdown-n512": Arm(512, -11, 3_600_000, task="countdown"),
  "countdown-need": Arm("need", -10, 2_400_000, samples=8192, task="countdown"),
  "steps-n16": Arm(16, -11.5, 400_000, task="steps"),
  "steps-n512": Arm(512, -11, 1_200_000, task="steps"),
  "steps-need": Arm("need", -10, 500_000, samples=8192, task="steps"),
}


def folder_of(task: str, root: pathlib.Path) -> pathlib.Path:
  """The policy and the prompts of a task."""
  return ASSETS / "hard" if task == "own" else root / task


def flags(arm: Arm, root: pathlib.Path, *, seed: int) -> list[str]:
  """The command line of a run, without --workdir."""
  config = "need" if arm.n == "need" else "n512"
  each = 1000 if arm.n == "need" else arm.samples  # rollouts of a step, about
  fields: dict[str, object] = {
    "sampling.samples": arm.samples,
    "advantage.kind": arm.kind,
    "optim.lr": 2.0**arm.power,
    "run.seed": seed,
    "run.steps": _LONG,
    "run.max_samples": arm.rollouts,
    "run.save_every": max(arm.rollouts // each // POINTS, 1),
    "run.keep_checkpoints": _LONG,
    "eval.every": _LONG,
  }
  if arm.n != "need":
    fields["sampling.n"] = 16 if arm.widen else arm.n
  if arm.widen:
    later = {"from_step": arm.widen + 1, "sampling.n": arm.n}
    fields["optim.lr"] = 2.0 ** ARMS["n16"].power
    fields["run.phases"] = f"({later | {'optim.lr': 2.0**arm.power}},)"
  if arm.task != "own":
    data = folder_of(arm.task, root)
    fields |= {
      "policy.checkpoint": data,
      "data.files": f"('{data}/hard.jsonl',)",
      "data.heldout_files": f"('{data}/heldout.jsonl',)",
      "data.prompt_tokens": 20,
      "sampling.max_new_tokens": {"countdown": 8, "steps": 21}[arm.task],
    }
  given = [f"--config.{field}={value}" for field, value in fields.items()]
  return [f"--config=configs/{config}.py", *given]


def summary(answers: np.ndarray) -> dict[str, float]:
  """Of prompts by the probability of each right answer, [P, A]."""
  p = answers.sum(axis=1)
  return {
    "pass_at_1": p.mean(),
    "best_at_256": (1.0 - (1.0 - p) ** 256).mean(),
    "dead": (p < DEAD).mean(),
    "won": (p > 0.5).mean(),
  }


def measured(
  folder: pathlib.Path, curve: Iterable[Sequence[Any]] | None = None
) -> dict[str, Any]:
  """What is kept of a run, by checkpoint from its start on.

  "points" has a value of each, "p" the probabilities of all prompts in units of
  1e-5: of those that are trained, and of their twins. A `curve` has steps, each
  with the probabilities of right answers on both sides; None: `exact.of_run`.
  """
  about = json.loads((folder / "config.json").read_text())
  log = metrics.read_lines(folder / "metrics.jsonl")
  busy = np.cumsum([0.0, *(line["time/busy_s"] for line in log)])
  samples = [0, *(line["data/samples_total"] for line in log)]
  points: dict[str, list[float]] = {}
  p: dict[str, list[list[int]]] = {"trained": [], "heldout": []}
  for step, *sides in curve or exact.of_run(folder, POINTS):
    spent = {"step": step, "samples": samples[step], "busy_s": busy[step]}
    means = summary(sides[0]) | {"heldout": sides[1].sum(axis=1).mean()}
    for name, value in (spent | means).items():
      points.setdefault(name, []).append(float(f"{value:.7g}"))
    for name, side in zip(p, sides, strict=True):
      units = np.round(UNITS * side.sum(axis=1))
      p[name].append(units.astype(int).tolist())
  return {"machine": machine_of(about), "points": points, "p": p}


def machine_of(about: Mapping[str, Any]) -> str:
  """What its seconds are of: "AMD EPYC, jax 0.10.2"; from config.json."""
  (device,) = about["machine"]["devices"]
  what = about["machine"]["processor"] if device == "cpu" else device
  return f"{what}, jax {about['versions']['jax']}"


def write(path: pathlib.Path, result: Mapping[str, Any]) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  lines.write_whole(path, json.dumps(result, separators=(",", ":")) + "\n")


def read(path: pathlib.Path) -> dict[str, Any]:
  """The results by arm and seed: of results.json, or of a folder of them.

  Raises SystemExit with one line if there are none.
  """
  try:
    if path.is_file():
      return json.loads(path.read_text())
    found: dict[str, Any] = {}
    for file in sorted(path.glob("*/*.json")):
      found.setdefault(file.parent.name, {})[file.stem] = json.loads(
        file.read_text()
      )
  except ValueError as e:
    raise SystemExit(f"error: {path} is damaged ({e}); delete it") from None
  if not found:
    raise SystemExit(f"error: {path} has no results; run bash launch/wall.sh")
  return found
