"""The table of domains. Each is one value that its folder declares.

To add a domain, add a folder with a `Domain`, a line here and its defaults in
names.py.
"""

from collections.abc import Mapping

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

# How examples of the domain `names.MADE` are generated.
DRAW: Draw = _DRAW
# The domain `names.OWN`.
OWN: Domain = own.DOMAIN
