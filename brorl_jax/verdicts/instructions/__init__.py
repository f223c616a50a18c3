"""Instruction following, in the format of IFEval: `verify` and `check`."""

from brorl_jax.verdicts.instructions.constraints import DOMAIN, check, verify

__all__ = ["DOMAIN", "check", "verify"]
