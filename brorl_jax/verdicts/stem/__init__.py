"""Science questions: `verify` and `check_reference`."""

from brorl_jax.verdicts.stem.domain import (
  DOMAIN,
  MAX_ANSWER,
  MAX_GOLD,
  check_reference,
  find,
  verify,
  verify_entry,
)

__all__ = [
  "DOMAIN",
  "MAX_ANSWER",
  "MAX_GOLD",
  "check_reference",
  "find",
  "verify",
  "verify_entry",
]
