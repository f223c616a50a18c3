"""Tests of --mode=simulate: curves, figures, the table, and what is refused."""

import json
import math

import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.figure import Figure
from messages import refuses

from brorl_jax.configs import simulate
from brorl_jax.errors import UserError
from brorl_jax.main import settings
from brorl_jax.main import simulate as simulate_command
from brorl_jax.rl import simulator
from brorl_jax.runs import folder


def small(**change):
  c = simulate.get_config()
  with c.ignore_type():
    c.update(n=(4, 16), steps=6, vocab=600, correct=50, seeds=3, **change)
  return c


def reference(c, optimizer, n):
  keys = jax.random.split(jax.random.key(c.seed), c.seeds)
  how = {k: c[k] for k in ("steps", "vocab", "correct", "seeding", "anchor")}
  how |= {"surrogate": simulator.weighted_by_probability, "n": n}
  one = lambda key: simulator.simulate(
    key, optimizer=optimizer, centred=c.centred, **how
  )
  return jax.tree.map(lambda *x: np.stack(x), *map(one, keys))


@pytest.mark.ci
def test_the_report_of_the_simulator_is_that_of_its_runs(tmp_path, monkeypatch):
  """And a report of other steps is not overwritten."""
  drawn = {}
  note = lambda path, runs: drawn.update({path.name: runs})
  monkeypatch.setattr(simulate_command, "figure3", note)
  c = small()
  simulate_command.run(c, tmp_path, allow_change=False)
  out = tmp_path / "report"
  runs = json.loads((out / "simulate.json").read_text())["runs"]
  every = [("adamw", 4), ("adamw", 16), ("sgd", 4), ("sgd", 16)]
  kinds = lambda runs: [(r["optimizer"], r["n"]) for r in runs]
  assert kinds(runs) == every
  assert kinds(drawn["figure3.png"]) == [("adamw", 4), ("adamw", 16)]
  adamw = simulator.AdamW(c.lr, c.b1, c.b2, c.eps, c.weight_decay)
  for run in (runs[0], runs[-1]):
    sgd = run["optimizer"] == "sgd"
    with jax.enable_x64(sgd):
      optimizer = simulator.Sgd(c.sgd_lr) if sgd else adamw
      want = reference(c, optimizer, run["n"])
    # float32 would be off by 1e-8; the file keeps 12 digits
    same = dict(rtol=0, atol=2e-12 if sgd else 2e-7)
    for name in ("correct_mass", "improved_fraction"):
      mean = getattr(want, name).mean(axis=0, dtype=np.float64)
      np.testing.assert_allclose(run[name], mean, **same)
    worst = want.worst_drop.min(axis=0)
    np.testing.assert_allclose(run["worst_drop"], worst, **same)
    assert np.ptp(want.worst_drop[:, -1]) > 3 * same["atol"]
    last = want.correct_mass[:, -1]
    np.testing.assert_allclose(run["correct_mass_by_seed"], last, **same)
  table = (out / "table.txt").read_text()
  assert [line.split()[:2] for line in table.splitlines()[1:-1]] == [
    [optimizer, str(n)] for optimizer, n in every
  ]
  other = small()
  other.steps = 7
  with pytest.raises(UserError, match=r"steps = 6 \(now 7\)"):
    simulate_command.run(other, tmp_path, allow_change=False)
  assert json.loads((out / "simulate.json").read_text())["runs"] == runs


def test_what_is_not_finite_is_no_report(tmp_path):
  with refuses(UserError, "config.lr = 1e+38 ... N = 4"):
    simulate_command.run(small(lr=1e38), tmp_path, allow_change=False)
  assert [path.name for path in tmp_path.iterdir()] == [".lock"]
  # The folder is still free for the same command with another rate.
  folder.check(json.loads(small().to_json()), tmp_path, allow_change=False)
  bad = simulator.AdamW(1e38, 0.9, 0.999, 1e-8, 0.01)
  with pytest.raises(UserError, match=r"config\.sgd_lr = 300\.0"):
    simulate_command.sweep(small(), "sgd", bad, 4)


@pytest.mark.parametrize("change, line", [
  (dict(n=(0,)), "config.n = (0,) ... of at least 1"),
  (dict(n=()), "config.n = () ... one number"),
  (dict(n=(4.5,)), "config.n = (4.5,) ... integers"),
  (dict(steps=0), "config.steps = 0 ... at least 1"),
  (dict(correct=0), "config.correct = 0 ... 1 to vocab - 1"),
  (dict(correct=128_000), "config.correct = 128000 ... 1 to vocab - 1"),
  (dict(b1=1.0), "config.b1 = 1.0 ... at least 0 ... below 1"),
  (dict(b2=-0.1), "config.b2 = -0.1 ... at least 0 ... below 1"),
  *(
    ({name: 0.0}, f"config.{name} = 0.0 must be positive")
    for name in ("lr", "eps", "sgd_lr")
  ),
  (dict(weight_decay=math.inf), "config.weight_decay = inf ... positive"),
  (dict(seeding=math.nan), "config.seeding = nan ... finite"),
  (dict(anchor=math.nan), "config.anchor = nan ... finite ... None"),
])  # fmt: skip
def test_settings_of_the_simulator_are_refused(change, line):
  c = simulate.get_config()
  with c.ignore_type():
    c.update(**change)
  with refuses(UserError, line):
    settings.check(c, simulate_command.rules)


def simulated():
  """Runs of simulate.json: three N of AdamW, two of gradient descent."""
  return [
    {
      "optimizer": optimizer, "n": n,
      "correct_mass": [0.63, 0.6, 0.63 + change],
      "improved_fraction": [0.0, 0.2, improved],
      "worst_drop": [0.0, -4.5e-5, -1.2e-6],
    }
    for optimizer, n, change, improved in (
      ("adamw", 4, -0.028, 0.115), ("adamw", 512, 0.0041, 0.627),
      ("adamw", 51200, 0.017, 1.0), ("sgd", 4, 7.5e-5, 0.17),
      ("sgd", 51200, 9.7e-5, 1.0),
    )
  ]  # fmt: skip


def test_the_table_of_the_simulator():
  head, *rows, foot = simulate_command.table(simulated()).splitlines()
  names = "optimizer N Q_pos change improved worst now worst ever"
  assert " ".join(head.split()) == names
  assert [row.split() for row in rows] == [
    ["adamw", "4", "0.6020", "-2.80e-02", "11.5%", "-1.2e-06", "-4.5e-05"],
    ["adamw", "512", "0.6341", "+4.10e-03", "62.7%", "-1.2e-06", "-4.5e-05"],
    [
      "adamw", "51,200", "0.6470", "+1.70e-02", "100.0%", "-1.2e-06",
      "-4.5e-05",
    ],
    ["sgd", "4", "0.6301", "+7.50e-05", "17.0%", "-1.2e-06", "-4.5e-05"],
    ["sgd", "51,200", "0.6301", "+9.70e-05", "100.0%", "-1.2e-06", "-4.5e-05"],
  ]  # fmt: skip
  assert foot == "  (Q_pos starts at 0.6300)"
  assert len({len(line) for line in (head, *rows)}) == 1


def test_the_figures_of_the_simulator_show_every_run(tmp_path, monkeypatch):
  drawn, before = [], plt.get_fignums()
  save = Figure.savefig
  monkeypatch.setattr(
    Figure, "savefig", lambda f, path, **how: (drawn.append(f), save(f, path))
  )
  runs = simulated()
  simulate_command.figure3(tmp_path / "a.png", runs[:3])
  parts = (("correct_mass", 1), ("improved_fraction", 100), ("worst_drop", 1))
  for axis, (name, scale) in zip(drawn[0].axes, parts, strict=True):
    labels = [line.get_label() for line in axis.lines]
    assert labels == ["N = 4", "N = 512", "N = 51,200"]
    for line, run in zip(axis.lines, runs, strict=False):
      np.testing.assert_array_equal(line.get_xdata(), [0, 1, 2])
      np.testing.assert_allclose(line.get_ydata() / scale, run[name])
  assert plt.imread(tmp_path / "a.png")[..., :3].std() > 0.05
  assert plt.get_fignums() == before
