"""Scores one response by the name of its domain, for notebooks."""

from __future__ import annotations

import difflib
from typing import Any

from brorl_jax.verdicts.base import Verdict
from brorl_jax.verdicts.domains import DOMAINS
from brorl_jax.verdicts.sandbox import jail


def verify(domain: str, response: str, **fields: Any) -> Verdict:
  """Scores a response with the verifier of a domain.

      verify("math", r"It is \\boxed{1/2}.", answer="0.5").status  # "pass"

  Args:
    domain: "math", "code", "stem", "gym" or "instructions".
    response: The text of a response.
    **fields: The fields of a record of this domain: answer; tests, optionally
      time_limit; answer, optionally choices; entry; instructions. See
      `data/dataset.py`.

  Raises:
    ValueError: The domain does not exist, or a field is missing, unknown or
      unusable.
  """
  if domain not in DOMAINS:
    close = difflib.get_close_matches(domain, DOMAINS, n=1)
    near = f"did you mean {close[0]}?" if close else f"use {', '.join(DOMAINS)}"
    raise ValueError(f"domain = {domain!r}: unknown domain; {near}")
  known = DOMAINS[domain].fields
  needed = {name for name, how in known.items() if not how.optional}
  for name in sorted(fields.keys() - known.keys() | needed - fields.keys()):
    wrong = "unknown" if name in fields else "missing"
    raise ValueError(
      f"field {name!r} is {wrong}; domain {domain} has {', '.join(known)}"
    )
  # Choices must occur in the prompt. There is no prompt here.
  parts = [v if isinstance(v, list) else [v] for v in fields.values()]
  asked = "\n".join(str(one) for part in parts for one in part)
  read = {
    name: known[name].read(value, asked) for name, value in fields.items()
  }
  entry = DOMAINS[domain].check_reference(read)
  return DOMAINS[domain].verify(response, entry, jail.mine())
