"""The table of domains. Each is one value that its folder declares.

To add a domain, add a folder with a `Domain`, a line here and its defaults in
names.py.
"""

from collections.abc import Mapping

from brorl_jax.verdicts.code import domain as code
from brorl_jax.verdicts.domain import Domain, Draw
from brorl_jax.verdicts.gym import domain as gym
from brorl_jax.verdicts.instructions import domain as instructions
from brorl_jax.verdicts.math import domain as math
from brorl_jax.verdicts.own import rewards as own
from brorl_jax.verdicts.stem import domain as stem

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

# How examples of the domain `names.MADE` are generated.
DRAW: Draw = gym.DRAW
# The domain `names.OWN`.
OWN: Domain = own.DOMAIN
