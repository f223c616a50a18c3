"""Reports: the figure and table of a run, and the page that compares runs."""

from brorl_jax.report.figures import (
  check_evaluation,
  check_step,
  figure3,
  learning_curve,
  simulation_table,
  sweep,
  table,
)

__all__ = [
  "check_evaluation",
  "check_step",
  "figure3",
  "learning_curve",
  "simulation_table",
  "sweep",
  "table",
]
