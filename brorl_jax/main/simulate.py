"""--mode=simulate: the simulator for several N, with AdamW and with SGD."""

import contextlib
import functools
import json
import pathlib
import time
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from brorl_jax.errors import UserError
from brorl_jax.main import programs, settings
from brorl_jax.report import figures
from brorl_jax.rl import simulator
from brorl_jax.runs import folder, lock, metrics

_SURROGATES = {
  "probability": simulator.weighted_by_probability,
  "ratio": simulator.ratio,
  "log_probability": simulator.log_probability,
}


def run(c: ConfigDict, workdir: pathlib.Path, *, allow_change: bool) -> None:
  """Writes report/: figure3.png, sweep.png, simulate.json and table.txt."""
  settings.check_simulation(c, tuple(_SURROGATES))
  # A simulation always starts again, so that no field may change.
  values = json.loads(c.to_json())
  folder.check(
    values,
    workdir,
    allow_change=allow_change,
    free=frozenset(),
    mode="simulate",
  )
  adamw = simulator.AdamW(c.lr, c.b1, c.b2, c.eps, c.weight_decay)
  sgd = simulator.Sgd(c.sgd_lr)
  plan = [("adamw", adamw, n) for n in sorted({*c.n, *c.dense_n})]
  plan += [("sgd", sgd, n) for n in sorted(c.n)]
  progress = lambda: metrics.Progress(after=0, steps=len(plan), unit="run")
  results = []
  with lock.hold(workdir):
    print(programs.log_line())
    with contextlib.closing(progress()) as bar:
      for i, (name, optimizer, n) in enumerate(plan, 1):
        # In float32, a step of gradient descent would be a few roundings of a
        # logit of 3.
        with jax.enable_x64(name == "sgd"):
          results.append(sweep(c, name, optimizer, n))
        bar.step(i, describe(results[-1]))
    folder.write_config(values, workdir, mode="simulate")
    write(c, workdir / "report", results)


def write(
  c: ConfigDict, out: pathlib.Path, results: list[dict[str, Any]]
) -> None:
  """Writes the report, and prints its table and the names of its figures."""
  out.mkdir(exist_ok=True)
  (out / "simulate.json").write_text(
    json.dumps({"config": json.loads(c.to_json()), "runs": results}) + "\n"
  )
  main = [r for r in results if r["optimizer"] == "adamw" and r["n"] in c.n]
  figures.figure3(out / "figure3.png", main)
  figures.sweep(out / "sweep.png", results)
  table = figures.simulation_table(results)
  (out / "table.txt").write_text(table + "\n")
  print(table)
  print(f"  {out / 'figure3.png'}\n  {out / 'sweep.png'}")


def sweep(c: ConfigDict, name: str, optimizer: Any, n: int) -> dict[str, Any]:
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


def describe(r: dict[str, Any]) -> str:
  """A line about one result."""
  first, *_, last = r["correct_mass"]
  return (
    f"{r['optimizer']} N = {r['n']}: Q_pos {first:.4f} -> {last:.4f}, "
    f"{last - first:+.2e}"
  )
