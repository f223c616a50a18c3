"""Reports: figures and tables of a run, and a page that compares runs.

one_run.py     the learning curve of a run and a short table
simulation.py  Figure 3 and the sweep of the token simulator
compare.py     runs -> all numbers of a comparison, as plain JSON
tables.py      those numbers -> the paper's tables, as text or HTML
answers.py     how a policy answers: lengths, before and after
figures.py     those numbers -> Figures 1 and 4, and pass@k, as PNG
page.py        numbers, tables and figures -> one HTML file
"""

from brorl_jax.report.one_run import (
  check_evaluation,
  check_step,
  gain_interval,
  learning_curve,
  table,
)
from brorl_jax.report.simulation import figure3, simulation_table, sweep

__all__ = [
  "check_evaluation",
  "check_step",
  "figure3",
  "gain_interval",
  "learning_curve",
  "simulation_table",
  "sweep",
  "table",
]
