"""The paper as functions: jax.numpy only, no I/O, no state."""

from brorl_jax.rl import (
  advantages,
  corrections,
  length_penalty,
  losses,
  lr_scaling,
  mass_balance,
  pass_at_k,
  simulator,
  vocabulary,
)

__all__ = [
  "advantages", "corrections", "length_penalty", "losses",
  "lr_scaling", "mass_balance", "pass_at_k", "simulator", "vocabulary",
]  # fmt: skip
