"""Which verifier judges the responses of which domain."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from brorl_jax.tasks import code, gym, instructions, math, stem
from brorl_jax.tasks.base import Verdict
from brorl_jax.tasks.pool import Verifier
from brorl_jax.tasks.sandbox.jail import Jail
from brorl_jax.tasks.sandbox.walls import Limits


def _math(response: str, entry: Mapping[str, Any], jail: Jail) -> Verdict:
  return math.verify(response, entry["answer"], jail=jail)


def _code(
  limits: Limits, response: str, entry: Mapping[str, Any], jail: Jail
) -> Verdict:
  return code.judge(response, entry, limits=limits, jail=jail)


def _gym(response: str, entry: Mapping[str, Any], jail: Jail) -> Verdict:
  return gym.verify(response, entry, jail=jail)


def _instructions(
  response: str, entry: Mapping[str, Any], jail: Jail
) -> Verdict:
  return instructions.verify(response, entry["instructions"], jail=jail)


def table(limits: Limits) -> Mapping[str, Verifier]:
  """The verifier of each domain.

  Args:
    limits: Of programs, where an example does not say.
  """
  return {
    "math": _math,
    "code": functools.partial(_code, limits),
    "stem": stem.judge,
    "gym": _gym,
    "instructions": _instructions,
  }


VERIFIERS: Mapping[str, Verifier] = table(Limits())
