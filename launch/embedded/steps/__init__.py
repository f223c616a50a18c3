"""Puzzles solved step by step.

    write(entry, "careful", random.Random(0))  # 84-72=12, ..., <answer>12</...

A line is a step. One that ends with " no" is taken back. The last line is the
answer between its tags.

  writing.py    responses of four qualities
  pen.py        writes lines, and slips where it is told to
  merging.py    two lines in one
  sums.py, divisors.py, digits.py, letters.py, paths.py, countdown.py: the tasks
"""

from launch.embedded.steps.writing import QUALITIES, TASKS, write

__all__ = ["QUALITIES", "TASKS", "write"]
