"""What runs show: figures, tables, and one page that compares them.

one_run.py     the learning curve of a run, and its result in a few lines
simulation.py  Figure 3 and the sweep of the token simulator
compare.py     runs -> every number of the comparison, as plain JSON
tables.py      those numbers -> the paper's tables, as text or HTML
figures.py     those numbers -> Figures 1 and 4, and pass@k, as PNG
page.py        all of it -> one HTML file
"""

from brorl_jax.report.one_run import gain_interval, learning_curve, table
from brorl_jax.report.simulation import figure3, simulation_table, sweep

__all__ = [
  "figure3",
  "gain_interval",
  "learning_curve",
  "simulation_table",
  "sweep",
  "table",
]
