"""--mode=simulate: the simulator for several N, with AdamW and with SGD."""

import functools
import json
import math
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from brorl_jax.config.section import Rule
from brorl_jax.errors import UserError
from brorl_jax.main import settings
from brorl_jax.report import figures
from brorl_jax.rl import simulator
from brorl_jax.runs import folder, metrics

_SURROGATES = {
  "probability": simulator.weighted_by_probability,
  "ratio": simulator.ratio,
  "log_probability": simulator.log_probability,
}


def run(c: Any, workdir: pathlib.Path, *, allow_change: bool) -> None:
  """Writes report/: figure3.png, sweep.png, simulate.json and table.txt."""
  settings.check(c, rules)
  # A simulation always starts again, so that no field may change.
  values = json.loads(c.to_json())
  folder.check(values, workdir, allow_change=allow_change, mode="simulate")
  adamw = simulator.AdamW(c.lr, c.b1, c.b2, c.eps, c.weight_decay)
  plan = [("adamw", adamw, n) for n in sorted({*c.n, *c.dense_n})]
  plan += [("sgd", simulator.Sgd(c.sgd_lr), n) for n in sorted(c.n)]
  results, out = [], workdir / "report"
  with folder.hold(workdir):
    progress = metrics.Progress(after=0, steps=len(plan), unit="run")
    for i, (name, optimizer, n) in enumerate(plan, 1):
      # In float32, a step of gradient descent would be a few roundings of a
      # logit of 3.
      with jax.enable_x64(name == "sgd"):
        results.append(one := sweep(c, name, optimizer, n))
      first, *_, last = one["correct_mass"]
      change = f"Q_pos {first:.4f} -> {last:.4f}, {last - first:+.2e}"
      progress.step(i, f"{name} N = {n}: {change}")
    folder.write_config(values, workdir, mode="simulate")
    out.mkdir(exist_ok=True)
    text = json.dumps({"config": values, "runs": results}) + "\n"
    (out / "simulate.json").write_text(text)
    main = [r for r in results if r["optimizer"] == "adamw" and r["n"] in c.n]
    figures.figure3(out / "figure3.png", main)
    figures.sweep(out / "sweep.png", results)
    table = figures.simulation_table(results)
    (out / "table.txt").write_text(table + "\n")
  print(f"{table}\n  {out / 'figure3.png'}\n  {out / 'sweep.png'}")


def rules(c: Any) -> Iterator[Rule]:
  """What the fields must be."""
  for field in ("seeds", "steps", "vocab"):
    yield field, c[field] >= 1, "at least 1"
  for field in ("n", "dense_n"):
    whole = all(isinstance(n, int) and n >= 1 for n in c[field])
    yield field, whole, "integers of at least 1"
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
  holds = c.anchor is None or math.isfinite(c.anchor)
  yield "anchor", holds, "finite, or None"


def sweep(c: Any, name: str, optimizer: Any, n: int) -> dict[str, Any]:
  """Curves for one N: means over seeds; for the drop, the worst seed.

  Raises:
    UserError: A value is not finite.
  """
  start = time.monotonic()
  simulate_key = functools.partial(
    simulator.simulate,
    n=n,
    steps=c.steps,
    vocab=c.vocab,
    correct=c.correct,
    seeding=c.seeding,
    anchor=c.anchor,
    surrogate=_SURROGATES[c.surrogate],
    optimizer=optimizer,
    centred=c.centred,
  )
  keys = jax.random.split(jax.random.key(c.seed), c.seeds)
  many = jax.device_get(jax.vmap(simulate_key)(keys))
  if not all(np.isfinite(x).all() for x in many):
    lr = "lr" if name == "adamw" else "sgd_lr"
    raise UserError(
      f"config.{lr} = {c[lr]}: {name} with N = {n} becomes infinite or NaN; "
      "lower it"
    )
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
