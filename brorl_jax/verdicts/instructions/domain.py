"""The domain of instruction following."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from brorl_jax.verdicts import fields
from brorl_jax.verdicts.base import Verdict
from brorl_jax.verdicts.domain import Domain, Field
from brorl_jax.verdicts.instructions.verifier import check, verify
from brorl_jax.verdicts.sandbox.jail import Jail
from brorl_jax.verdicts.strict_json import Refused, kind, show


def _verify(response: str, entry: Mapping[str, Any], jail: Jail) -> Verdict:
  return verify(response, entry["instructions"], jail=jail)


def _instructions(value: Any, asked: str) -> list[dict[str, Any]]:
  del asked
  if not isinstance(value, list) or not value:
    raise Refused(
      "instructions", f"{show(value)}; use a list with at least one"
    )
  for i, item in enumerate(value):
    field = f"instructions[{i}]"
    if not isinstance(item, dict) or item.keys() != {"id", "kwargs"}:
      raise Refused(
        field, f"{show(item)}; use an object with id and kwargs only"
      )
    if not isinstance(item["id"], str):
      raise Refused(f"{field}.id", f"{kind(item['id'])}; write it as text")
    fields.mapping(item["kwargs"], f"{field}.kwargs")
  return value


def _check_reference(record: Mapping[str, Any]) -> Mapping[str, Any]:
  check(record["instructions"])
  return dict(record)


DOMAIN = Domain(
  name="instructions",
  verify=_verify,
  fields={"instructions": Field(_instructions)},
  check_reference=_check_reference,
  needs_jail="libraries",
)
