"""Tests of brorl_jax/verdicts/gym/categories.py."""

from brorl_jax.verdicts import gym
from brorl_jax.verdicts.gym import families
from brorl_jax.verdicts.gym.categories import CATEGORIES


def test_every_task_has_the_librarys_category():
  """Which is the folder that its module lies in."""
  known = families.library().factory.DATASETS
  named = {
    task: known[task][0].__module__.split(".")[1]
    for task in {*gym.ALLOWED, *gym.STORED}
  }
  assert named == CATEGORIES
