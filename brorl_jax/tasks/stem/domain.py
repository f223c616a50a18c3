"""The domain of science: multiple choice and short answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from brorl_jax.tasks.data import fields
from brorl_jax.tasks.data.strict_json import Refused, kind, show
from brorl_jax.tasks.domain import Domain, Field
from brorl_jax.tasks.stem.verifier import check_reference, verify_entry


def _choices(value: Any, asked: str) -> list[str]:
  if not isinstance(value, list):
    raise Refused("choices", f"{kind(value)}; write a list of texts")
  # Only the verifier reads the choices; the policy reads the messages.
  words = " ".join(asked.split())
  for i, choice in enumerate(value):
    if " ".join(fields.text(choice, f"choices[{i}]").split()) not in words:
      raise Refused(
        f"choices[{i}]", f"{show(choice)} is not in the prompt; add it there"
      )
  return value


def _check_reference(record: Mapping[str, Any]) -> Mapping[str, Any]:
  choices: Sequence[str] | None = record.get("choices")
  entry: dict[str, Any] = {"answer": check_reference(record["answer"], choices)}
  if choices is not None:
    entry["choices"] = choices
  return entry


DOMAIN = Domain(
  name="stem",
  verify=verify_entry,
  fields={
    "answer": Field(fields.answer),
    "choices": Field(_choices, optional=True),
  },
  check_reference=_check_reference,
  needs_jail="libraries",
  one_answer=True,
)
