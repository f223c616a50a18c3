"""The test of BroRL's claim: that N lifts a plateau, not samples or rate.

N = 16 trains with the paper's advantages and a strong KL term until it has
stopped gaining while prompts remain within reach, p in [1/512, 1/16]. From that
policy, which is the reference from then on, six arms go on:

  same       as before
  paper      N = 512, 8 times the samples
  wide       N = 16, 8 times the prompts: the samples of `paper`
  decayed    as `same`, with a rate that falls to 0
  equal      N = 512, the samples of `same`
  adaptive   16 to 512 rollouts per prompt, until four are right and four wrong

Each has its own rate, tuned by factors of 2 with another seed. The grid of
`paper` and `wide` has the square-root rule in its middle.

  Supported: on held-out prompts `paper` is ahead of `wide` and of `decayed` by
  more than .005, both with a 95 % interval above 0, at equal samples and at
  equal time, and it is farther ahead of `wide` on the prompts that began in
  [1/512, 1/16] than on the others.
  Falsified: `wide` or `decayed` is within .005 of `paper`, or ahead of it.
  Otherwise it is undecided.

For equal time, arms that take less go on until they have taken as long.
"""

import dataclasses
import json
import math
import os
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from brorl_jax.report import stats
from brorl_jax.runs import lines
from launch.frontier import analysis, arms, machine
from launch.frontier.analysis import Cell
from launch.frontier.arms import Arm
from launch.frontier.cells import Number, Table
from launch.frontier.tuning import Experiment, tune

START = Arm("own", "large", 16, 1024, "tokens", "anchored", seed=200)
STOPPED_GAIN, REACH = 0.01, (1 / 512, 1 / 16)  # of pass@1; of p
MARGIN = 0.005  # of pass@1
BUDGET = 2**19  # rollouts of an arm
# The verdict is that of all seeds; that of each set is given beside it.
SETS = {"first": (0, 1, 2), "second": (3, 4, 5)}
SEEDS = tuple(seed for some in SETS.values() for seed in some)
GRID = (-12.0, -11.0, -10.0)  # powers of 2
LONGEST = 8  # budgets that N = 16 may take to stop
SQRT = math.log2(8) / 2  # the rate of 8 times the samples, as a power of 2
LABELS = {
  "same": "N = 16",
  "paper": "N = 512, 8 x samples",
  "wide": "N = 16, 8 x prompts",
  "decayed": "N = 16, rate to 0",
  "equal": "N = 512, equal samples",
  "adaptive": "16 to 512 by need",
}


def cells() -> dict[str, Arm]:
  """The arms, without rate and seed."""
  same = dataclasses.replace(
    START, power=0, seed=0, budget=0, start="plateau/policy"
  )
  other = lambda **changed: dataclasses.replace(same, **changed)
  return {
    "same": same,
    "paper": other(n=512, samples=8 * same.samples),
    "wide": other(samples=8 * same.samples),
    "decayed": other(decayed=True, budget=BUDGET),
    "equal": other(n=512),
    # 64 prompts a step, as `same` has.
    "adaptive": other(n="adaptive", samples=4 * same.samples),
  }


def middle(name: str, power: float) -> float:
  """The middle of the grid of an arm, from the rate of `same`."""
  return power + {"paper": SQRT, "wide": SQRT, "adaptive": 1.0}.get(name, 0.0)


def go(e: Experiment) -> None:
  """Runs all of it, or what is left of it."""
  power = tune(e, [_bare(START)], lambda _: [BUDGET], lambda _: GRID)
  rate = power[_bare(START)][BUDGET]
  if arms.read(e.results / "plateau.json") is None:
    _stop(e, rate)
  every = cells()
  names = {arm: name for name, arm in every.items()}
  best = tune(
    e,
    [*names],
    lambda _: [BUDGET],
    lambda arm: [middle(names[arm], rate) + d for d in (-1, 0, 1)],
  )
  runs = [
    dataclasses.replace(arm, power=best[arm][BUDGET], seed=seed, budget=BUDGET)
    for seed in SEEDS
    for arm in names
    if BUDGET in best[arm]
  ]
  e.each(runs)
  # For equal time those that took less go on.
  seconds = np.mean([_seconds(e.run(r)) for r in runs if _is_same(r)])
  e.each(
    dataclasses.replace(r, budget=longer(_seconds(e.run(r)), float(seconds)))
    for r in runs
    if not (r.decayed or _is_same(r)) and _seconds(e.run(r)) < seconds
  )


def longer(took: float, seconds: float) -> int:
  """Rollouts that take somewhat more than `seconds`, if BUDGET took `took`."""
  least = arms.LEAST[START.task]
  return math.ceil(1.05 * seconds / took * BUDGET / least) * least


def _seconds(result: dict[str, Any]) -> float:
  return analysis.at(result, BUDGET, "busy_s")


def _is_same(arm: Arm) -> bool:
  return (arm.n, arm.samples, arm.decayed) == (START.n, START.samples, False)


def _bare(arm: Arm) -> Arm:
  return dataclasses.replace(arm, power=0, seed=0, budget=0)


def _stop(e: Experiment, rate: float) -> None:
  """Trains N = 16 until it has stopped; writes its policy and plateau.json."""
  arm = dataclasses.replace(START, power=rate, budget=BUDGET)
  while not stopped(result := e.run(arm)):
    if arm.budget >= LONGEST * BUDGET:
      break
    arm = dataclasses.replace(arm, budget=arm.budget + BUDGET)
  policy = e.root / "plateau" / "policy"
  folder = e.root / "runs" / arm.name
  shutil.rmtree(policy.parent, ignore_errors=True)
  machine.call(
    policy,
    os.sched_getaffinity(0),
    *("-m", "brorl_jax.main", "--mode=export", f"--workdir={policy}"),
    f"--config={arms.config(arm, scale=e.scale)}",
    f"--config.policy.checkpoint={folder}",
  )
  points, prompts = result["points"], result["prompts"]
  train = prompts["train"][-1]
  begun = {
    "stopped": stopped(result),
    "pass_at_1": points["pass_at_1"][-1],
    "samples": points["samples"][-1],
    "rate": 2.0**rate,
    "prompts": len(train),
    "in_reach": int(in_reach(np.array(train) / arms.UNITS).sum()),
    "train": train,
  }
  lines.write_whole(e.results / "plateau.json", json.dumps(begun) + "\n")


def stopped(result: dict[str, Any]) -> bool:
  """Whether the last third of a run has gained less than .01."""
  points = result["points"]
  end = points["samples"][-1]
  before = analysis.at(result, end * 2 / 3, "pass_at_1")
  return points["pass_at_1"][-1] - before < STOPPED_GAIN


def in_reach(p: np.ndarray) -> np.ndarray:
  return (p >= REACH[0]) & (p <= REACH[1])


def numbers(results: pathlib.Path) -> dict[str, Any]:
  """Everything of the test that has been run so far."""
  begun = arms.read(results / "plateau.json")
  out: dict[str, Any] = {"start": begun, "arms": [], "against": []}
  if begun is None:
    return out
  named = {name: Cell(results, arm, SEEDS) for name, arm in cells().items()}
  done = {name: c for name, c in named.items() if c.at(BUDGET)}
  if "same" not in done:
    return out
  first = np.array(begun["train"]) / arms.UNITS
  time = _time(done)
  foretold = arms.read(results / "predictions" / "plateau.json") or {}
  expected = foretold.get("heldout_minus_start", {})
  out["arms"] = [
    _arm(n, c, time, first) | {"expected": expected.get(n)}
    for n, c in done.items()
  ]
  if "paper" in done:
    out["against"] = _all_against(done, first)
    out["verdict"] = verdict(out["against"])
    out["sets"] = []
    for seeds in SETS.values():
      part = {name: c.only(seeds) for name, c in done.items()}
      if all(c.at(BUDGET) for c in part.values()):
        against = _all_against(part, first)
        told = {"verdict": verdict(against), "against": against}
        out["sets"].append({"seeds": len(part["paper"].at(BUDGET)), **told})
  return out


def _time(done: Mapping[str, Cell]) -> float:
  """CPU-seconds in which `same` has generated the budget."""
  return float(np.mean(done["same"].values(BUDGET, "busy_s")))


def _all_against(
  done: Mapping[str, Cell], first: np.ndarray
) -> list[dict[str, Any]]:
  """`paper` minus each other arm; `first` is each prompt's p at the start."""
  time = _time(done)
  return [
    _against(done["paper"], name, c, time, first)
    for name, c in done.items()
    if name != "paper"
  ]


def at_time(cell: Cell, seconds: float, metric: str) -> list[float]:
  """Of each seed when its steps have taken this many CPU-seconds.

  They are those in which `same` has generated the budget: that is its point.
  """
  if _is_same(cell.arm):
    return cell.values(BUDGET, metric)
  return [
    float(np.interp(seconds, r["points"]["busy_s"], r["points"][metric]))
    for r in cell.at(BUDGET)
  ]


def _arm(
  name: str, cell: Cell, seconds: float, first: np.ndarray
) -> dict[str, Any]:
  power = cell.power(BUDGET)
  assert power is not None
  train, heldout = (cell.prompts(BUDGET, s) for s in ("train", "heldout"))
  near = in_reach(first)
  return {
    "arm": name,
    "rate": 2.0**power,
    "power": power,
    "seeds": len(train),
    "busy_s": float(np.mean(cell.values(BUDGET, "busy_s"))),
    "train": float(train.mean()),
    "heldout": float(heldout.mean()),
    "heldout_by_seed": heldout.mean(axis=1).tolist(),
    "heldout_gain": float(
      heldout.mean()
      - np.mean([r["points"]["heldout"][0] for r in cell.at(BUDGET)])
    ),
    "in_reach": float(train[:, near].mean()),
    "others": float(train[:, ~near].mean()),
    "lost": float(np.mean(cell.values(BUDGET, "lost"))),
    "heldout_at_time": float(np.mean(at_time(cell, seconds, "heldout"))),
  }


def _against(
  paper: Cell, name: str, other: Cell, seconds: float, first: np.ndarray
) -> dict[str, Any]:
  """`paper` minus another arm."""
  near = in_reach(first)
  a, b = (
    {s: c.prompts(BUDGET, s) for s in ("train", "heldout")}
    for c in (paper, other)
  )
  rows = min(len(a["train"]), len(b["train"]))
  gain = a["train"][:rows] - b["train"][:rows]
  return {
    "arm": name,
    "heldout": difference(a["heldout"][:rows], b["heldout"][:rows]),
    "train": difference(a["train"][:rows], b["train"][:rows]),
    "heldout_at_time": float(
      np.mean(at_time(paper, seconds, "heldout"))
      - np.mean(at_time(other, seconds, "heldout"))
    ),
    "in_reach": float(gain[:, near].mean()),
    "others": float(gain[:, ~near].mean()),
  }


def difference(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
  """Mean of a - b of [seeds, prompts] with a 95 % interval by prompt."""
  prompts = np.broadcast_to(np.arange(a.shape[1]), a.shape)
  test = stats.paired_t(a.ravel(), b.ravel(), cluster=prompts.ravel())
  mean, half = test.difference, 1.96 * test.standard_error
  return {
    "mean": mean,
    "low": mean - half,
    "high": mean + half,
    "p": test.p_two_sided,
  }


def verdict(every: Sequence[Mapping[str, Any]]) -> str:
  """supported, falsified or undecided, as the head of this file says."""
  against = {one["arm"]: one for one in every}
  if not {"wide", "decayed"} <= set(against):
    return "undecided"
  both = [against["wide"], against["decayed"]]
  if any(one["heldout"]["mean"] <= MARGIN for one in both):
    return "falsified"
  ahead = all(
    one["heldout"]["low"] > 0.0 and one["heldout_at_time"] > MARGIN
    for one in both
  )
  wide = against["wide"]
  return (
    "supported" if ahead and wide["in_reach"] > wide["others"] else "undecided"
  )


def tables(data: dict[str, Any]) -> list[Table]:
  """Arms, and `paper` against the others."""
  test = data["plateau"]
  path = ("plateau",)
  start = Number((*path, "start", "pass_at_1"), "decimal")
  near = Number((*path, "start", "in_reach"), "count")
  count = Number((*path, "start", "prompts"), "count")
  columns = (
    ("rate", "rate", "rate"), ("seeds", "seeds", "count"),
    ("held-out", "heldout", "decimal"), ("gain", "heldout_gain", "signed"),
    ("gain expected", "expected", "signed"), ("trained", "train", "decimal"),
    ("began in reach", "in_reach", "decimal"), ("others", "others", "decimal"),
    ("lost, %", "lost", "percent1"), ("CPU-s", "busy_s", "mean"),
    ("held-out at equal time", "heldout_at_time", "decimal"),
  )  # fmt: skip
  ends = Table(
    "From where N = 16 had stopped",
    ["N = 16 stopped at pass@1 ", start, ", with ", near, " of ", count,
     " prompts in [1/512, 1/16]. After equal rollouts; means over seeds. What "
     "was expected was written down before any arm ran."],
    ["", *(head for head, _, _ in columns)],
    [
      [LABELS[one["arm"]]]
      + [Number((*path, "arms", i, key), kind) for _, key, kind in columns]
      for i, one in enumerate(test["arms"])
    ],
    1,
  )  # fmt: skip
  if not test["against"]:
    return [ends]
  return [ends, _differences(test)]


def _differences(test: Mapping[str, Any]) -> Table:
  against = test["against"]
  rows: list[list[Any]] = []
  for i, one in enumerate(against):
    at = lambda *key, i=i: Number(("plateau", "against", i, *key), "signed")
    interval = lambda side, at=at: [
      at(side, "mean"), " (", at(side, "low"), " to ", at(side, "high"), ")"
    ]  # fmt: skip
    rows.append(
      [
        LABELS[one["arm"]], interval("heldout"), interval("train"),
        at("heldout_at_time"), at("in_reach"), at("others"),
      ]
    )  # fmt: skip
  head = [
    "minus", "held-out", "trained", "held-out at equal time", "began in reach",
    "others",
  ]  # fmt: skip
  caption: list[Any] = [
    "Differences of pass@1, paired and clustered by prompt. The claim is ",
    Number(("plateau", "verdict"), "value"),
  ]
  for i, name in enumerate(SETS if len(test["sets"]) == len(SETS) else ()):
    told = Number(("plateau", "sets", i, "verdict"), "value")
    caption += [f"; with the {name} half of the seeds: ", told]
  caption.append(".")
  return Table("N = 512 with 8 x samples, minus", caption, head, rows, 1)
