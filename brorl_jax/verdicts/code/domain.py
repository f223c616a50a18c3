"""The domain of programming."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from brorl_jax.verdicts import fields
from brorl_jax.verdicts.base import Verdict
from brorl_jax.verdicts.code import cases, verifier
from brorl_jax.verdicts.domain import Domain, Field
from brorl_jax.verdicts.sandbox.jail import Jail
from brorl_jax.verdicts.sandbox.usage import MAX_TEST_S
from brorl_jax.verdicts.strict_json import Refused, show


def _verify(response: str, entry: Mapping[str, Any], jail: Jail) -> Verdict:
  return verifier.verify_entry(response, entry, limits=jail.limits, jail=jail)


def _tests(value: Any, asked: str) -> dict[str, Any]:
  """The tests in the verifier's form; converts a list of pairs."""
  del asked
  if not isinstance(value, list):
    return fields.mapping(value, "tests")
  for i, pair in enumerate(value):
    if not isinstance(pair, dict) or pair.keys() != {"input", "output"}:
      raise Refused(
        f"tests[{i}]",
        f"{show(pair)}; use an object with input and output only",
      )
  return {
    "inputs": [pair["input"] for pair in value],
    "outputs": [pair["output"] for pair in value],
  }


def _time_limit(value: Any, asked: str) -> float:
  del asked
  number = isinstance(value, (int, float)) and not isinstance(value, bool)
  if not number or not 0.01 <= value <= MAX_TEST_S:
    raise Refused(
      "time_limit",
      f"{show(value)}; use CPU seconds per test, .01 to {MAX_TEST_S:g}",
    )
  return float(value)


def _check_reference(record: Mapping[str, Any]) -> Mapping[str, Any]:
  cases.parse(record["tests"])
  return dict(record)


DOMAIN = Domain(
  name="code",
  verify=_verify,
  fields={
    "tests": Field(_tests),
    "time_limit": Field(_time_limit, optional=True),
  },
  check_reference=_check_reference,
  needs_jail="programs",
)
