"""Tests of the figures and tables of one run and of the simulator."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.figure import Figure

from brorl_jax import report
from brorl_jax.report import figures as module

FAMILIES = {
  "letter_counting": 0.41, "count_primes": 0.2, "leg_counting": 0.35,
  "gcd": 0.5, "basic_arithmetic": 0.3, "number_sequence": 0.1,
  "spell_backward": 0.25, "simple_equations": 0.15,
}  # fmt: skip


def run(steps=30):
  """Lines of eval/curve.jsonl and metrics.jsonl as a run writes them."""
  evaluations = [
    {
      "step": step,
      "pass_at_1": 0.25 + 0.008 * step,
      "half_width": 0.03,
      "by_family": {k: v + 0.01 * step for k, v in FAMILIES.items()},
      "summary": {"by_domain": {"math": {}, "gym": {}}},
      "rates": [0.25 + 0.008 * step] * 4,
    }
    for step in range(0, steps + 1, 10)
  ]
  metrics = [
    {
      "step": step,
      "reward/mean": 0.3 + 0.01 * step,
      "sampling/pass_rate": 0.8 - 0.002 * step,
      "sampling/degenerate_fraction": 0.3 + 0.01 * step,
      "policy/entropy": 1.2 - 0.02 * step,
      "rollout/tokens_per_s": 500.0 if step > 1 else 3.0,  # it compiles
      "data/tokens_total": 1000 * step,
      "data/samples_total": 512 * step,
    }
    for step in range(1, steps + 1)
  ]
  return evaluations, metrics


def test_table_holds_the_numbers_of_the_run():
  evaluations, steps = run()
  evaluations[0] |= {"pass_at_1": 0.25, "rates": [0.5, 0.0, 0.25]}
  evaluations[-1] |= {"pass_at_1": 0.5, "rates": [0.5, 0.5, 0.5]}
  evaluations[-1]["half_width"] = 0.0123
  steps[0]["sampling/pass_rate"] += 0.3
  rate = sum(s["sampling/pass_rate"] for s in steps) / 30
  half = 1.959964 * (0.0625 / 3) ** 0.5
  lines = report.table(evaluations[0], evaluations[-1], steps).splitlines()
  assert [line.split("  ")[1] for line in lines[:-1]] == [
    "held-out pass@1 before", "held-out pass@1 after 30 steps",
    "gain, same prompts", "rollouts", "sampled tokens per second",
    "dynamic sampling, prompts kept",
  ]  # fmt: skip
  assert [line.split("  ")[-1].strip() for line in lines] == [
    "0.250 +- 0.030", "0.500 +- 0.012", f"+0.250 +- {half:.3f}", "15,360",
    "500", f"{rate:.1%}", "(+-: 95 % interval over prompts)",
  ]  # fmt: skip
  # the values stand below each other
  assert len({len(line) - len(line[36:]) for line in lines[:-1]}) == 1


def test_one_prompt_has_no_interval(drawn):
  evaluations, steps = run()
  for one in evaluations:
    one |= {"half_width": None, "rates": [one["pass_at_1"]]}
  drawn[0](evaluations, steps)
  lines = report.table(evaluations[0], evaluations[-1], steps).splitlines()
  said = [line.split("  ")[-1].strip() for line in lines]
  assert said[:3] == ["0.250", "0.490", "+0.240"]


def saved(monkeypatch):
  """The figures that are saved from here on."""
  figures = []
  save = Figure.savefig
  monkeypatch.setattr(
    Figure,
    "savefig",
    lambda self, *args, **how: (figures.append(self), save(self, *args, **how)),
  )
  return figures


@pytest.fixture
def drawn(tmp_path, monkeypatch):
  """The figure that is saved, its texts and lines to look at."""
  figures = saved(monkeypatch)
  path = tmp_path / "report" / "learning_curve.png"

  def draw(evaluations, steps):
    report.learning_curve(path, evaluations, steps, title="N = 512")
    return figures[-1]

  return draw, path


def test_the_figure_shows_the_run(drawn):
  draw, _ = drawn
  evaluations, steps = run()
  figure = draw(evaluations, steps)
  left, shares, entropy = figure.axes
  lines = {line.get_label(): line for line in left.lines}
  assert set(lines) == {*FAMILIES, "mean, 95 % interval"}
  np.testing.assert_allclose(
    lines["mean, 95 % interval"].get_ydata(), [0.25, 0.33, 0.41, 0.49]
  )
  np.testing.assert_allclose(lines["gcd"].get_ydata(), [0.5, 0.6, 0.7, 0.8])
  np.testing.assert_array_equal(lines["gcd"].get_xdata(), [0, 10, 20, 30])
  band = left.collections[0].get_datalim(left.transData)
  assert (band.y0, band.y1) == pytest.approx((0.22, 0.52))
  shown = {line.get_label(): line.get_ydata() for line in shares.lines}
  assert len(shown) == 2
  of = lambda name: np.array([s[name] for s in steps])
  np.testing.assert_allclose(shown["mean reward"], of("reward/mean"))
  # Whatever dynamic sampling kept.
  with_gradient = 1.0 - of("sampling/degenerate_fraction")
  np.testing.assert_allclose(shown["prompts with a gradient"], with_gradient)
  (line,) = entropy.lines
  np.testing.assert_allclose(line.get_ydata(), of("policy/entropy"))
  assert (entropy.get_title(), entropy.get_ylabel()) == (
    "entropy",
    "nats per token",
  )
  for axis in (shares, entropy):
    for line in axis.lines:
      np.testing.assert_array_equal(line.get_xdata(), of("step"))
  assert figure.get_suptitle() == "N = 512"


def test_rewards_beyond_0_and_1_are_seen(drawn):
  draw, _ = drawn
  evaluations, steps = run()
  steps[3]["reward/mean"], steps[4]["reward/mean"] = -0.25, 1.5
  assert draw(evaluations, steps).axes[1].get_ylim() == (-0.25, 1.5)


def test_the_legends_hide_no_line(drawn):
  draw, _ = drawn
  evaluations, steps = run()
  evaluations[-1]["by_family"]["gcd"] = 0.99
  figure = draw(evaluations, steps)
  figure.canvas.draw()
  _, shares, entropy = figure.axes
  legend = shares.get_legend().get_window_extent()
  assert legend.y0 > entropy.title.get_window_extent().y1
  for axis in figure.axes[:2]:
    box = axis.get_legend().get_window_extent()
    for line in axis.lines:
      points = axis.transData.transform(np.column_stack(line.get_data()))
      inside = [box.contains(x, y) for x, y in points]
      assert not any(inside), line.get_label()


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
  head, *rows, foot = report.simulation_table(simulated()).splitlines()
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


@pytest.mark.parametrize(
  "field, value",
  [
    ("pass_at_1", "1"),
    ("half_width", []),
    ("by_family", {"gcd": None}),
    ("by_family", 3),
    ("rates", []),
    ("rates", ["1"]),
    ("summary", {"by_domain": []}),
    ("step", 1.0),
  ],
)
def test_an_evaluation_that_cannot_be_drawn_is_named(field, value):
  line = run()[0][0]
  report.check_evaluation(line)
  report.check_evaluation(line | {"half_width": None})  # one prompt
  with pytest.raises(ValueError, match=field):
    report.check_evaluation(line | {field: value})
  with pytest.raises(ValueError, match="step"):
    report.check_evaluation([line])


def test_a_step_that_cannot_be_drawn_is_named():
  line = run()[1][0]
  report.check_step(line | {"more": None})
  for name in module.METRICS:
    with pytest.raises(ValueError, match=f"'{name}' is missing"):
      report.check_step(line | {name: None})
    with pytest.raises(ValueError, match=f"'{name}' is not a number"):
      report.check_step(line | {name: "1"})


def test_the_figures_of_the_simulator_show_every_run(tmp_path, monkeypatch):
  figures, before = saved(monkeypatch), plt.get_fignums()
  runs = simulated()
  report.figure3(tmp_path / "a.png", runs[:3])
  report.sweep(tmp_path / "b.png", runs)
  parts = (("correct_mass", 1), ("improved_fraction", 100), ("worst_drop", 1))
  for axis, (name, scale) in zip(figures[0].axes, parts, strict=True):
    labels = [line.get_label() for line in axis.lines]
    assert labels == ["N = 4", "N = 512", "N = 51,200"]
    for line, run in zip(axis.lines, runs, strict=False):
      np.testing.assert_array_equal(line.get_xdata(), [0, 1, 2])
      np.testing.assert_allclose(line.get_ydata() / scale, run[name])
  adamw, sgd, improved = (
    [x.get_ydata() for x in a.lines] for a in figures[1].axes
  )
  np.testing.assert_allclose(adamw[0], [-0.028, 0.0041, 0.017])
  np.testing.assert_allclose(sgd[0], [7.5e-5, 9.7e-5])
  np.testing.assert_allclose(improved[0], [11.5, 62.7, 100])
  assert plt.imread(tmp_path / "a.png")[..., :3].std() > 0.05
  assert plt.get_fignums() == before
