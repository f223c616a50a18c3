"""Puzzles solved step by step, for a policy that learns to answer with steps.

    write(entry, "careful", random.Random(0))  # 84-72=12, ..., <answer>12</...
    look(response, entry)  # Steps(count=4, wrong=1, taken_back=0)

A line is a step. One that ends with " no" is taken back. The last line is the
answer between its tags.

  writing.py    responses of four qualities
  looking.py    counts the steps of any response, and those that are wrong
  pen.py        writes lines, and slips where it is told to
  task.py       what a task gives
  equation.py   lines such as 84-72=12, judged by arithmetic
  sums.py, divisors.py, digits.py, letters.py, paths.py, countdown.py: the tasks
"""

from brorl_jax.tasks.base import Steps
from brorl_jax.tasks.gym.steps.looking import look
from brorl_jax.tasks.gym.steps.writing import QUALITIES, TASKS, write

__all__ = ["QUALITIES", "TASKS", "Steps", "look", "write"]
