"""Each domain's golds, tried on its own verifier when the data is read.

A gold that its verifier cannot read would make a prompt that no response can
pass; one that anything passes would pay for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from brorl_jax.tasks.strict import Refused, show

# From the fields that only this domain has, their types known to be right, to
# the entry that its verifier takes; ValueError says what is wrong.
Check = Callable[[Mapping[str, Any]], Mapping[str, Any]]


# The verifiers are imported when the first example of their domain is met:
# behind some of them are libraries that take seconds to load.


def _check_math(record: Mapping[str, Any]) -> Mapping[str, Any]:
  from brorl_jax.tasks import math

  return {"answer": math.check_gold(record["answer"])}


def _check_stem(record: Mapping[str, Any]) -> Mapping[str, Any]:
  from brorl_jax.tasks import stem

  choices: Sequence[str] | None = record.get("choices")
  entry: dict[str, Any] = {"answer": stem.check_gold(record["answer"], choices)}
  if choices is not None:
    entry["choices"] = choices
  return entry


def _check_code(record: Mapping[str, Any]) -> Mapping[str, Any]:
  from brorl_jax.tasks import cases

  cases.parse(record["tests"])
  return {key: record[key] for key in ("tests", "time_limit") if key in record}


def _check_instructions(record: Mapping[str, Any]) -> Mapping[str, Any]:
  from brorl_jax.tasks import instructions

  instructions.check(record["instructions"])
  return {"instructions": record["instructions"]}


def _check_gym(record: Mapping[str, Any]) -> Mapping[str, Any]:
  from brorl_jax.tasks import gym

  entry = record["entry"]
  answer = entry.get("answer")
  if not isinstance(answer, str):
    raise Refused("entry.answer", f"{show(answer)}; it must be a text")
  verdict = gym.verify(answer, entry)
  if verdict.status != "pass":
    raise Refused("entry", f"its own answer does not pass: {verdict.reason}")
  return entry


CHECKS: Mapping[str, Check] = {
  "math": _check_math,
  "code": _check_code,
  "stem": _check_stem,
  "gym": _check_gym,
  "instructions": _check_instructions,
}
