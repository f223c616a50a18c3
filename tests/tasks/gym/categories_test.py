"""Tests of brorl_jax/tasks/gym/categories.py."""

from brorl_jax.tasks import gym
from brorl_jax.tasks.gym import families
from brorl_jax.tasks.gym.categories import CATEGORIES


def test_every_task_has_the_librarys_category():
  """Which is the folder that its module lies in."""
  known = families.library().factory.DATASETS
  named = {
    task: known[task][0].__module__.split(".")[1]
    for task in {*gym.ALLOWED, *gym.STORED}
  }
  assert named == CATEGORIES
