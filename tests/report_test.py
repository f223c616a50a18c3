"""Tests of brorl_jax/report.py."""

import matplotlib.pyplot as plt
import numpy as np
import pytest

from brorl_jax import report

FAMILIES = {
  "letter_counting": 0.41,
  "count_primes": 0.2,
  "leg_counting": 0.35,
  "gcd": 0.5,
  "basic_arithmetic": 0.3,
  "number_sequence": 0.1,
  "spell_backward": 0.25,
  "simple_equations": 0.15,
}


def run(steps=30):
  """Lines of eval/curve.jsonl and metrics.jsonl as a run writes them."""
  evaluations = [
    {
      "step": step,
      "pass_at_1": 0.25 + 0.008 * step,
      "half_width": 0.03,
      "by_family": {k: v + 0.01 * step for k, v in FAMILIES.items()},
      "rates": [0.25 + 0.008 * step] * 4,
    }
    for step in range(0, steps + 1, 10)
  ]
  metrics = [
    {
      "step": step,
      "reward/mean": 0.3 + 0.01 * step,
      "sampling/pass_rate": 0.8 - 0.002 * step,
      "policy/entropy": 1.2 - 0.02 * step,
      "rollout/tokens_per_s": 500.0 if step > 1 else 3.0,  # it compiles
      "data/tokens_total": 1000 * step,
      "data/samples_total": 512 * step,
    }
    for step in range(1, steps + 1)
  ]
  return evaluations, metrics


def test_gain_by_hand():
  """Gains 0, 0.5 and 0.25: mean 0.25, variance 2 * 0.0625 / 2."""
  gain, half = report.gain_interval([0.5, 0.0, 0.25], [0.5, 0.5, 0.5])
  assert gain == pytest.approx(0.25)
  assert half == pytest.approx(1.959964 * (0.0625 / 3) ** 0.5, rel=1e-6)


def test_gain_is_over_the_same_prompts():
  """What differs between prompts, but not between times, has no part in it."""
  before = [0.0, 0.25, 0.5, 0.75]
  gain, half = report.gain_interval(before, [x + 0.125 for x in before])
  assert gain == pytest.approx(0.125)
  assert half == pytest.approx(0.0, abs=1e-6)


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
    "held-out pass@1 before",
    "held-out pass@1 after 30 steps",
    "gain, same prompts",
    "rollouts",
    "sampled tokens per second",
    "dynamic sampling, prompts kept",
  ]
  assert [line.split("  ")[-1].strip() for line in lines] == [
    "0.250 +- 0.030",
    "0.500 +- 0.012",
    f"+0.250 +- {half:.3f}",
    "15,360",
    "500",
    f"{rate:.1%}",
    "(+-: 95 % interval over prompts)",
  ]
  # the values stand below each other
  assert len({len(line) - len(line[36:]) for line in lines[:-1]}) == 1


def test_table_tells_a_loss_from_a_gain():
  evaluations, steps = run()
  text = report.table(evaluations[-1], evaluations[0], steps)
  assert "-0.240 +- 0.000" in text


@pytest.fixture
def drawn(tmp_path, monkeypatch):
  """The figure that is saved, its texts and lines to look at."""
  figures = []
  monkeypatch.setattr(plt, "close", figures.append)
  path = tmp_path / "report" / "learning_curve.png"

  def draw(evaluations, steps):
    report.learning_curve(path, evaluations, steps, title="N = 512")
    return figures[-1]

  yield draw, path
  monkeypatch.undo()
  for figure in figures:
    plt.close(figure)


def test_the_figure_is_a_png_of_useful_size(drawn):
  draw, path = drawn
  draw(*run())
  image = plt.imread(path)
  assert image.shape[0] >= 400 and image.shape[1] >= 1000
  assert image[..., :3].std() > 0.05  # not blank


def test_the_figure_shows_the_run(drawn):
  draw, _ = drawn
  evaluations, steps = run()
  figure = draw(evaluations, steps)
  left, right = figure.axes
  lines = {line.get_label(): line for line in left.lines}
  assert set(lines) == {*FAMILIES, "mean, 95 % interval"}
  np.testing.assert_allclose(
    lines["mean, 95 % interval"].get_ydata(), [0.25, 0.33, 0.41, 0.49]
  )
  np.testing.assert_allclose(lines["gcd"].get_ydata(), [0.5, 0.6, 0.7, 0.8])
  np.testing.assert_array_equal(lines["gcd"].get_xdata(), [0, 10, 20, 30])
  band = left.collections[0].get_datalim(left.transData)
  assert (band.y0, band.y1) == pytest.approx((0.22, 0.52))
  shown = {line.get_label(): line.get_ydata() for line in right.lines}
  for label, name in (
    ("mean reward", "reward/mean"),
    ("prompts with a gradient", "sampling/pass_rate"),
    ("entropy, nats per token", "policy/entropy"),
  ):
    np.testing.assert_allclose(shown[label], [s[name] for s in steps])
  assert figure.get_suptitle() == "N = 512"


def test_the_legends_hide_no_line(drawn):
  draw, _ = drawn
  evaluations, steps = run()
  evaluations[-1]["by_family"]["gcd"] = 0.99
  figure = draw(evaluations, steps)
  figure.canvas.draw()
  for axis in figure.axes:
    box = axis.get_legend().get_window_extent()
    for line in axis.lines:
      points = axis.transData.transform(np.column_stack(line.get_data()))
      inside = [box.contains(x, y) for x, y in points]
      assert not any(inside), line.get_label()


def test_the_figure_of_a_run_of_one_step(drawn):
  draw, path = drawn
  evaluations, steps = run()
  draw(evaluations[:1], steps[:1])
  assert path.stat().st_size > 1000


def test_no_figure_stays_in_memory(tmp_path):
  before = plt.get_fignums()
  report.learning_curve(tmp_path / "a.png", *run(), title="x")
  assert plt.get_fignums() == before
