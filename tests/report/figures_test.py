"""Tests of the figures and the table of the simulator."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from brorl_jax.report import figures


def simulated():
  """Runs of simulate.json: three N of AdamW, two of gradient descent."""
  return [
    {
      "optimizer": optimizer,
      "n": n,
      "correct_mass": [0.63, 0.6, 0.63 + change],
      "improved_fraction": [0.0, 0.2, improved],
      "worst_drop": [0.0, -4.5e-5, -1.2e-6],
    }
    for optimizer, n, change, improved in (
      ("adamw", 4, -0.028, 0.115),
      ("adamw", 512, 0.0041, 0.627),
      ("adamw", 51200, 0.017, 1.0),
      ("sgd", 4, 7.5e-5, 0.17),
      ("sgd", 51200, 9.7e-5, 1.0),
    )
  ]


def test_the_table_of_the_simulator():
  head, *rows, foot = figures.simulation_table(simulated()).splitlines()
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
  figures.figure3(tmp_path / "a.png", runs[:3])
  figures.sweep(tmp_path / "b.png", runs)
  parts = (("correct_mass", 1), ("improved_fraction", 100), ("worst_drop", 1))
  for axis, (name, scale) in zip(drawn[0].axes, parts, strict=True):
    labels = [line.get_label() for line in axis.lines]
    assert labels == ["N = 4", "N = 512", "N = 51,200"]
    for line, run in zip(axis.lines, runs, strict=False):
      np.testing.assert_array_equal(line.get_xdata(), [0, 1, 2])
      np.testing.assert_allclose(line.get_ydata() / scale, run[name])
  adamw, sgd, improved = (
    [x.get_ydata() for x in a.lines] for a in drawn[1].axes
  )
  np.testing.assert_allclose(adamw[0], [-0.028, 0.0041, 0.017])
  np.testing.assert_allclose(sgd[0], [7.5e-5, 9.7e-5])
  np.testing.assert_allclose(improved[0], [11.5, 62.7, 100])
  assert plt.imread(tmp_path / "a.png")[..., :3].std() > 0.05
  assert plt.get_fignums() == before
