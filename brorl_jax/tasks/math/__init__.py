"""Math questions: `verify` and `check_reference`."""

from brorl_jax.tasks.math.domain import DOMAIN
from brorl_jax.tasks.math.references import check_reference
from brorl_jax.tasks.math.verifier import verify

__all__ = ["DOMAIN", "check_reference", "verify"]
