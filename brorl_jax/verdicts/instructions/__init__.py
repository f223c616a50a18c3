"""Instruction following, in the format of IFEval: `verify` and `check`."""

from brorl_jax.verdicts.instructions.domain import DOMAIN
from brorl_jax.verdicts.instructions.verifier import MAX_SHOWN, check, verify

__all__ = ["DOMAIN", "MAX_SHOWN", "check", "verify"]
