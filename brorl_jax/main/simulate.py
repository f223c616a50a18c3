"""--mode=simulate: the simulator for several N, with AdamW and with SGD."""

import functools
import json
import math
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import matplotlib
import numpy as np
from matplotlib.figure import Figure

from brorl_jax.config.section import Rule
from brorl_jax.errors import UserError
from brorl_jax.main import settings
from brorl_jax.rl import simulator
from brorl_jax.runs import folder, metrics

_SURROGATES = {
  "probability": simulator.weighted_by_probability,
  "ratio": simulator.ratio,
  "log_probability": simulator.log_probability,
}


def run(c: Any, workdir: pathlib.Path, *, allow_change: bool) -> None:
  """Writes report/: figure3.png, simulate.json and table.txt."""
  settings.check(c, rules)
  # A simulation always starts again, so that no field may change.
  values = json.loads(c.to_json())
  folder.check(values, workdir, allow_change=allow_change, mode="simulate")
  adamw = simulator.AdamW(c.lr, c.b1, c.b2, c.eps, c.weight_decay)
  sgd = simulator.Sgd(c.sgd_lr)
  both = (("adamw", adamw), ("sgd", sgd))
  plan = [(name, by, n) for name, by in both for n in sorted(c.n)]
  results, out = [], workdir / "report"
  with folder.hold(workdir):
    progress = metrics.Progress(after=0, steps=len(plan), unit="run")
    for i, (name, optimizer, n) in enumerate(plan, 1):
      # In float32, a gradient step would be a few roundings of a logit of 3.
      with jax.enable_x64(name == "sgd"):
        results.append(one := sweep(c, name, optimizer, n))
      first, *_, last = one["correct_mass"]
      change = f"Q_pos {first:.4f} -> {last:.4f}, {last - first:+.2e}"
      progress.step(i, f"{name} N = {n}: {change}")
    folder.write_config(values, workdir, mode="simulate")
    out.mkdir(exist_ok=True)
    text = json.dumps({"config": values, "runs": results}) + "\n"
    (out / "simulate.json").write_text(text)
    main = [r for r in results if r["optimizer"] == "adamw"]
    figure3(out / "figure3.png", main)
    said = table(results)
    (out / "table.txt").write_text(said + "\n")
  print(f"{said}\n  {out / 'figure3.png'}")


def rules(c: Any) -> Iterator[Rule]:
  """What the fields must be."""
  for field in ("seeds", "steps", "vocab"):
    yield field, c[field] >= 1, "at least 1"
  whole = all(isinstance(n, int) and n >= 1 for n in c.n)
  yield "n", whole, "integers of at least 1"
  yield "n", len(c.n) >= 1, "at least one number"
  yield "seed", 0 <= c.seed < 2**31, "0 to 2**31 - 1"
  must = f"1 to vocab - 1 = {c.vocab - 1}"
  yield "correct", 1 <= c.correct < c.vocab, must
  must = f"one of {', '.join(_SURROGATES)}"
  yield "surrogate", c.surrogate in _SURROGATES, must
  for field in ("lr", "eps", "sgd_lr"):
    yield field, 0.0 < c[field] < math.inf, "positive"
  for field in ("b1", "b2"):
    yield field, 0.0 <= c[field] < 1.0, "at least 0 and below 1"
  yield "weight_decay", 0.0 <= c.weight_decay < math.inf, "0 or positive"
  yield "seeding", math.isfinite(c.seeding), "finite"
  yield "anchor", c.anchor is None or math.isfinite(c.anchor), "finite, or None"


def sweep(c: Any, name: str, optimizer: Any, n: int) -> dict[str, Any]:
  """Curves of one N: means over seeds, the worst drop; all must be finite."""
  start = time.monotonic()
  names = "steps", "vocab", "correct", "seeding", "anchor", "centred"
  same = {name: c[name] for name in names}
  same |= {"surrogate": _SURROGATES[c.surrogate], "optimizer": optimizer}
  simulate_key = functools.partial(simulator.simulate, n=n, **same)
  keys = jax.random.split(jax.random.key(c.seed), c.seeds)
  many = jax.device_get(jax.vmap(simulate_key)(keys))
  if not all(np.isfinite(x).all() for x in many):
    lr = "lr" if name == "adamw" else "sgd_lr"
    why = f"{name} with N = {n} becomes infinite or NaN"
    raise UserError(f"config.{lr} = {c[lr]}: {why}; lower it")
  curve = lambda x: np.round(x.mean(axis=0, dtype=np.float64), 12).tolist()
  return {
    "optimizer": name,
    "n": n,
    "correct_mass": curve(many.correct_mass),
    "improved_fraction": curve(many.improved_fraction),
    "worst_drop": many.worst_drop.min(axis=0).tolist(),
    "correct_mass_by_seed": many.correct_mass[:, -1].tolist(),
    "seconds": time.monotonic() - start,
  }


def figure3(path: pathlib.Path, runs: Sequence[dict[str, Any]]) -> None:
  """The paper's Figure 3: correct mass, improved share, worst drop, by step."""
  figure = Figure((13, 4), layout="constrained")
  axes = figure.subplots(1, 3)
  colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(runs)))
  parts = (
    ("correct_mass", 1, "correct mass", "Q_pos"),
    ("improved_fraction", 100, "correct tokens above their start", "%"),
    ("worst_drop", 1, "worst change of a correct token", "probability"),
  )
  for axis, (name, scale, title, unit) in zip(axes, parts, strict=True):
    for run, colour in zip(runs, colours, strict=True):
      y = scale * np.array(run[name])
      axis.plot(range(len(y)), y, color=colour, label=f"N = {run['n']:,}")
    axis.set(title=title, ylabel=unit, xlabel="step")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
  figure.supxlabel("means over seeds; right: the worst token of any", size=8)
  axes[0].legend(fontsize=8)
  figure.savefig(path, dpi=130)


def table(runs: Sequence[dict[str, Any]]) -> str:
  """A table of the last values of every run."""
  out = [
    f"  {'optimizer':<10}{'N':>8}{'Q_pos':>9}{'change':>11}{'improved':>10}"
    f"{'worst now':>12}{'worst ever':>12}"
  ]
  out += [
    f"  {run['optimizer']:<10}{run['n']:>8,}{run['correct_mass'][-1]:>9.4f}"
    f"{run['correct_mass'][-1] - run['correct_mass'][0]:>+11.2e}"
    f"{run['improved_fraction'][-1]:>10.1%}{run['worst_drop'][-1]:>12.1e}"
    f"{min(run['worst_drop']):>12.1e}"
    for run in runs
  ]
  start = runs[0]["correct_mass"][0]
  return "\n".join([*out, f"  (Q_pos starts at {start:.4f})"])
