"""Science questions: `verify` and `check_reference`."""

from brorl_jax.verdicts.stem.questions import DOMAIN, check_reference, verify

__all__ = ["DOMAIN", "check_reference", "verify"]
