"""Programs and the tests that they must pass: `verify` and `verify_entry`."""

from brorl_jax.verdicts.code.domain import DOMAIN
from brorl_jax.verdicts.code.verifier import (
  MAX_PROGRAM,
  extract,
  verify,
  verify_entry,
)

__all__ = [
  "DOMAIN",
  "MAX_PROGRAM",
  "extract",
  "verify",
  "verify_entry",
]
