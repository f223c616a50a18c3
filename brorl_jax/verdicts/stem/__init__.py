"""Science questions: `verify` and `check_reference`."""

from brorl_jax.verdicts.stem.questions import (
  DOMAIN,
  MAX_ANSWER,
  MAX_GOLD,
  check_reference,
  find,
  verify,
)

__all__ = [
  "DOMAIN",
  "MAX_ANSWER",
  "MAX_GOLD",
  "check_reference",
  "find",
  "verify",
]
