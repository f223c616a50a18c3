"""What the runs of the revival experiment say, as numbers.

Everything is read from the folders that `run.py` made: metrics.jsonl, and
exact.jsonl or eval/curve.jsonl. Means are over prompts, then over seeds; where
a range is given it is that of the seeds.
"""

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from brorl_jax.rl import stats
from brorl_jax.runs import metrics

# Measures of the training prompts, if all right answers are known.
EXACT = ("pass_at_1", "distinct", "covered", "fell", "lost")
LEVELS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7)  # of pass@1, where arms are compared
# Which arms each is tested against, if not N = 16 alone.
AGAINST = {"n16": (), "n512_distinct": ("n16", "n16_distinct")}
DEAD, ALIVE = 0.05, 0.5  # pass@1 of a prompt
# Held-out prompts by which rates are chosen and N = 16 stands still, and those
# of the results.
DECIDING, TOLD, ALL = slice(0, None, 2), slice(1, None, 2), slice(None)


class Run(NamedTuple):
  """One run, at the steps where it was measured."""

  steps: np.ndarray
  busy_s: np.ndarray  # processor seconds of the steps before
  samples: np.ndarray  # generated before
  measures: dict[str, np.ndarray]  # means over prompts
  rates: np.ndarray  # [points, prompts], pass@1 of each
  kept_per_step: int  # samples
  prompts_per_step: int


def read(
  folder: pathlib.Path, *, seconds: float = math.inf, prompts: slice = TOLD
) -> Run:
  """A run.

  Args:
    folder: Of the run.
    seconds: Steps that began after this many processor seconds are left out.
    prompts: Which of those that are held out, where answers are not known.
  """
  lines = metrics.read_lines(folder / "metrics.jsonl")
  busy_s = np.cumsum([0.0, *(line["time/busy_s"] for line in lines)])
  samples = np.array([0, *(line["data/samples_total"] for line in lines)])
  exact = (folder / "exact.jsonl").exists()
  name = "exact.jsonl" if exact else "eval/curve.jsonl"
  last = np.searchsorted(busy_s, seconds)
  records = [x for x in metrics.read_lines(folder / name) if x["step"] <= last]
  if exact:
    rates = np.array([x["train"]["pass_at_1"] for x in records])
    mean = lambda side, name: np.array(
      [np.mean(x[side][name]) for x in records]
    )
    measures = {name: mean("train", name) for name in EXACT}
    if "drawn" in records[0]:
      measures["known"] = measures["pass_at_1"]
      rates = np.array([x["drawn"]["pass_at_1"] for x in records])
      measures |= {k: mean("drawn", k) for k in ("pass_at_1", "distinct")}
    else:
      measures["heldout"] = mean("heldout", "pass_at_1")
    measures["dead"] = (rates < DEAD).mean(axis=1)
  else:
    rates = np.array([x["rates"] for x in records])[:, prompts]
    measures = {"pass_at_1": rates.mean(axis=1)}
  at = np.array([x["step"] for x in records])
  config = json.loads((folder / "config.json").read_text())["config"]
  sampled = config["sampling"]
  kept, N = sampled["samples"], sampled["n"]
  return Run(at, busy_s[at], samples[at], measures, rates, kept, kept // N)


def at_level(run: Run, level: float) -> dict[str, float] | None:
  """Its measures when pass@1 first reaches a level, None if it never does."""
  rate = run.measures["pass_at_1"]
  (above,) = np.nonzero(rate >= level)
  if not len(above):
    return None
  i = int(above[0])
  if i == 0:
    return {k: float(v[0]) for k, v in run.measures.items()}
  share = (level - rate[i - 1]) / (rate[i] - rate[i - 1])
  between = lambda v: float(v[i - 1] + share * (v[i] - v[i - 1]))
  out = {name: between(v) for name, v in run.measures.items()}
  return out | {"busy_s": between(run.busy_s), "samples": between(run.samples)}


def at_samples(run: Run, samples: float) -> dict[str, float]:
  """Its measures at the given point."""
  return {
    name: float(np.interp(samples, run.samples, v))
    for name, v in run.measures.items()
  }


def at_end(run: Run) -> dict[str, float]:
  end = {name: float(v[-1]) for name, v in run.measures.items()}
  return end | {
    "busy_s": float(run.busy_s[-1]),
    "samples": float(run.samples[-1]),
  }


def over_seeds(ends: Sequence[Mapping[str, float]]) -> dict[str, Any]:
  """Mean, least and greatest of each number."""
  return {
    name: {
      "mean": float(np.mean([x[name] for x in ends])),
      "low": float(np.min([x[name] for x in ends])),
      "high": float(np.max([x[name] for x in ends])),
    }
    for name in ends[0]
  }


def against(arm: Sequence[Run], other: Sequence[Run]) -> dict[str, Any]:
  """The last pass@1 of each prompt and seed, arm less other."""
  a, b = (np.array([run.rates[-1] for run in runs]) for runs in (arm, other))
  prompts = np.broadcast_to(np.arange(a.shape[1]), a.shape)
  values = [jnp.asarray(x.ravel()) for x in (a, b, prompts)]
  plain = stats.paired_t(*values[:2])
  robust = stats.paired_t(*values[:2], cluster=values[2])
  ahead = (a.mean(axis=1) > b.mean(axis=1)).sum()
  return {
    "difference": float(plain.difference),
    "p_plain": _number(plain.p_two_sided),
    "p_by_prompt": _number(robust.p_two_sided),
    "effect_size": _number(plain.effect_size),
    "seeds_ahead": int(ahead),
    "seeds": len(a),
  }


def revived(run: Run) -> float | None:
  """Of the prompts that were dead, how many live at the end."""
  dead = run.rates[0] < DEAD
  if not dead.any():
    return None
  return float((run.rates[-1][dead] >= ALIVE).mean())


def branch(folder: pathlib.Path, chosen: Mapping[str, float]) -> dict[str, Any]:
  """All arms that went on from one policy."""
  runs: dict[str, list[Run]] = {}
  for name, lr in chosen.items():
    paths = sorted((folder / name).glob(f"lr{lr:.3g}-seed[0-9]"))
    runs[name] = [read(p) for p in paths if (p / "done").exists()]
  runs = {name: some for name, some in runs.items() if some}
  if not runs:
    return {"arms": {}}
  equal = min(run.samples[-1] for some in runs.values() for run in some)
  out: dict[str, Any] = {"samples_of_all": float(equal), "arms": {}}
  for name, some in runs.items():
    arm: dict[str, Any] = {
      "lr": chosen[name],
      "seeds": len(some),
      "start": over_seeds([at_end(_first(run)) for run in some]),
      "end": over_seeds([at_end(run) for run in some]),
      "equal_samples": over_seeds([at_samples(run, equal) for run in some]),
      "levels": {},
    }
    for level in LEVELS:
      measured = [at_level(run, level) for run in some]
      if level > arm["start"]["pass_at_1"]["high"]:
        found = [x for x in measured if x is not None]
        whole = len(found) == len(measured)
        arm["levels"][f"{level:g}"] = over_seeds(found) if whole else None
    back = [x for run in some if (x := revived(run)) is not None]
    arm["revived"] = float(np.mean(back)) if back else None
    for other in AGAINST.get(name, ("n16",)):
      if len(runs.get(other, ())) == len(some):
        arm[f"against_{other}"] = against(some, runs[other])
    arm["prompts_per_step"] = some[0].prompts_per_step
    more = some[0].kept_per_step / runs["n16"][0].kept_per_step
    arm["lr_sqrt_rule"] = chosen["n16"] * math.sqrt(more)
    arm["curves"] = [_curve(run) for run in some]
    out["arms"][name] = arm
  return out


def sweep(root: pathlib.Path) -> dict[str, Any] | None:
  """N at a constant N P: what prompts are kept, and what that brings."""
  folders = {
    int(p.name[1:]): p for p in root.glob("n*") if (p / "report").exists()
  }
  if not folders or not (root / "start" / "eval" / "summary.json").exists():
    return None
  right = _right(root / "start")
  n = len(next(iter(right.values())))
  counts = np.array([sum(some) for some in right.values()])
  runs = {N: read(p, prompts=ALL) for N, p in sorted(folders.items())}
  equal = min(run.samples[-1] for run in runs.values())
  points = []
  for N, run in runs.items():
    lines = metrics.read_lines(folders[N] / "metrics.jsonl")
    first, rest = lines[0], lines[1:] or lines  # the first one traces
    kept = kept_at(counts, n, N)
    gain = at_samples(run, equal)["pass_at_1"] - run.measures["pass_at_1"][0]
    points.append(
      {
        "n": N,
        "steps": len(lines),
        "prompts_seen": first["data/samples_total"] // N,
        "pass_rate": first["sampling/pass_rate"],
        "pass_rate_predicted": float(kept.mean()),
        "pass_rate_predicted_se": float(kept.std() / math.sqrt(len(kept))),
        "reward_variance": first["reward/variance_within_group"],
        "reward_variance_predicted": variance_at(counts, n, N),
        "samples_per_cpu_s": (
          lines[-1]["data/samples_total"] - first["data/samples_total"]
        )
        / sum(line["time/busy_s"] for line in rest),
        "gain_at_equal_samples": gain,
        "gain_per_million_samples": gain / equal * 1e6,
        "gain_at_end": float(np.subtract(*run.measures["pass_at_1"][[-1, 0]])),
        "curve": _curve(run),
      }
    )
  return {"samples_of_all": float(equal), "points": points}


def kept_at(counts: np.ndarray, n: int, N: int) -> np.ndarray:
  """Chance of each prompt to be kept with N rollouts, from c of n right.

    1 - C(c, N) / C(n, N) - C(n - c, N) / C(n, N)

  which is unbiased for 1 - p^N - (1 - p)^N.
  """
  ways = math.comb(n, N)
  return np.array(
    [
      1.0 - (math.comb(int(c), N) + math.comb(n - int(c), N)) / ways
      for c in counts
    ]
  )


def variance_at(counts: np.ndarray, n: int, N: int) -> float:
  """Expected variance of the rewards of a group of N: (1 - 1/N) p (1 - p)."""
  unbiased = counts * (n - counts) / (n * (n - 1))
  return float((1.0 - 1.0 / N) * unbiased.mean())


def _right(folder: pathlib.Path) -> dict[str, list[bool]]:
  out: dict[str, list[bool]] = {}
  for line in metrics.read_lines(folder / "eval" / "records.jsonl"):
    out.setdefault(line["id"], []).append(line["pass"])
  return out


def numbers(root: pathlib.Path) -> dict[str, Any]:
  """All that there is so far."""
  wings: dict[str, Any] = {}
  for path in sorted(root.glob("*/rates.json")):
    chosen: dict[str, dict[str, float]] = {}
    for which, lr in json.loads(path.read_text()).items():
      where, _, arm = which.partition("/")
      chosen.setdefault(where, {})[arm] = lr
    wings[path.parent.name] = {
      where: branch(path.parent / where, some) for where, some in chosen.items()
    }
  stood = {
    path.parents[1].name: json.loads(path.read_text())
    for path in sorted(root.glob("*/saturated/stood.json"))
  }
  return {"wings": wings, "stood": stood, "sweep": sweep(root / "sweep")}


def _first(run: Run) -> Run:
  return run._replace(
    steps=run.steps[:1],
    busy_s=run.busy_s[:1],
    samples=run.samples[:1],
    measures={k: v[:1] for k, v in run.measures.items()},
    rates=run.rates[:1],
  )


def _curve(run: Run) -> dict[str, list[float]]:
  values = run.measures | {"busy_s": run.busy_s, "samples": run.samples}
  return {k: np.round(v, 6).tolist() for k, v in values.items()}


def _number(x) -> float | None:
  return float(x) if math.isfinite(float(x)) else None
