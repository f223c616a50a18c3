"""Answers to questions of mathematics: `verify` and `check_gold`."""

from brorl_jax.tasks.math.golds import check_gold
from brorl_jax.tasks.math.judging import verify

__all__ = ["check_gold", "verify"]
