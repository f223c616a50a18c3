"""The table of domains. Each is one value that its file declares.

A new domain needs a file with a `Domain`, a line here and defaults in base.py.
"""

from collections.abc import Mapping
from typing import Any

from brorl_jax.verdicts import code, gym, instructions, math, own, stem
from brorl_jax.verdicts.base import Domain, Verdict
from brorl_jax.verdicts.sandbox import jail
from brorl_jax.verdicts.strict_json import did_you_mean

_OURS = [x.DOMAIN for x in (math, code, stem, gym, instructions)]
DOMAINS: Mapping[str, Domain] = {domain.name: domain for domain in _OURS}
# The domain `base.OWN`.
OWN: Domain = own.DOMAIN
# The functions that generate the examples of the domain `base.MADE`.
DRAW = gym


def verify(domain: str, response: str, **fields: Any) -> Verdict:
  """Scores one response by the name of its domain, for notebooks.

      verify("math", r"It is \\boxed{1/2}.", answer="0.5").status  # "pass"

  `fields` are those of a record of this domain (`data/dataset.py`): "math" has
  answer; "code" tests, optionally time_limit, prompt; "stem" answer, optionally
  choices; "gym" entry; "instructions" instructions. Raises ValueError if one is
  missing, unknown or unusable, or there is no such domain.
  """
  if domain not in DOMAINS:
    near = did_you_mean(domain, DOMAINS, f"use {', '.join(DOMAINS)}")
    raise ValueError(f"domain = {domain!r}: unknown domain; {near}")
  known = DOMAINS[domain].fields
  needed = {name for name, field in known.items() if not field.optional}
  for name in sorted(fields.keys() - known.keys() | needed - fields.keys()):
    wrong = "unknown" if name in fields else "missing"
    has = f"domain {domain} has {', '.join(known)}"
    raise ValueError(f"field {name!r} is {wrong}; {has}")
  read = {name: known[name].read(value) for name, value in fields.items()}
  entry = DOMAINS[domain].check_reference(read)
  return DOMAINS[domain].verify(response, entry, jail.mine())
