"""The domain of mathematics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from brorl_jax.tasks.base import Verdict
from brorl_jax.tasks.data import fields
from brorl_jax.tasks.domain import Domain, Field
from brorl_jax.tasks.math.references import check_reference
from brorl_jax.tasks.math.verifier import verify
from brorl_jax.tasks.sandbox.jail import Jail


def _verify(response: str, entry: Mapping[str, Any], jail: Jail) -> Verdict:
  return verify(response, entry["answer"], jail=jail)


def _check_reference(record: Mapping[str, Any]) -> Mapping[str, Any]:
  return {"answer": check_reference(record["answer"])}


DOMAIN = Domain(
  name="math",
  verify=_verify,
  fields={"answer": Field(fields.answer)},
  check_reference=_check_reference,
  needs_jail="libraries",
  one_answer=True,
)
