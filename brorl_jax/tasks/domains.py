"""The table of domains. Each is one value that its folder declares.

To add a domain, add a folder with a `Domain` and a line here.
"""

from collections.abc import Mapping
from typing import Any

from brorl_jax.tasks import code, gym, instructions, math, own, stem
from brorl_jax.tasks.domain import Domain, Draw
from brorl_jax.tasks.gym.domain import DRAW as _DRAW

DOMAINS: Mapping[str, Domain] = {
  domain.name: domain
  for domain in (
    math.DOMAIN,
    code.DOMAIN,
    stem.DOMAIN,
    gym.DOMAIN,
    instructions.DOMAIN,
  )
}

# The domain whose examples can be generated (config.data.families), and how.
MADE: Domain = gym.DOMAIN
DRAW: Draw = _DRAW
# The domain of every line if the user brings the reward; no record names it.
OWN: Domain = own.DOMAIN


def defaults() -> dict[str, dict[str, Any]]:
  """The defaults of config.data.domains."""
  return {
    domain.name: {
      "weight": 1.0,
      "instruction": domain.instruction,
      "reward": domain.reward,
    }
    for domain in (*DOMAINS.values(), OWN)
  }
