"""Instruction following, in the format of IFEval: `verify` and `check`."""

from brorl_jax.verdicts.instructions.constraints import (
  DOMAIN,
  MAX_SHOWN,
  check,
  verify,
)

__all__ = ["DOMAIN", "MAX_SHOWN", "check", "verify"]
