"""Math questions: `verify` and `check_reference`."""

from brorl_jax.verdicts.math.domain import DOMAIN, check_reference
from brorl_jax.verdicts.math.verifier import verify

__all__ = ["DOMAIN", "check_reference", "verify"]
