"""Math questions: `verify` and `check_reference`."""

from brorl_jax.verdicts.math.answers import DOMAIN, check_reference, verify

__all__ = ["DOMAIN", "check_reference", "verify"]
