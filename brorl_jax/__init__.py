"""BroRL in JAX: reinforcement learning with N = 512 rollouts per prompt.

Axis alphabet, used in every signature and suffix of this package:

  P  prompts in a step        T  response positions     D  model width
  N  rollouts per prompt      S  prompt positions       H  attention heads
  A  lanes that decode        V  vocabulary             G  key/value heads
  R  decode slots of a lane   L  layers                 K  head size
  B  rows, such as A * R      F  feed-forward width     Q  query positions
  M  rows of a training block, all of one prompt
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from brorl_jax import rl, verdicts
  from brorl_jax.main.sample import load
  from brorl_jax.main.train import train
  from brorl_jax.model.policy import Policy
  from brorl_jax.rollout.sampler import sample
  from brorl_jax.verdicts.domains import verify

__all__ = ["Policy", "load", "rl", "sample", "train", "verdicts", "verify"]
__version__ = "0.1.0"

# Loaded when used: jax takes seconds, and verifiers import this without it.
_WHERE = {
  "Policy": "model.policy",
  "load": "main.sample",
  "sample": "rollout.sampler",
  "train": "main.train",
  "verify": "verdicts.domains",
}


def __getattr__(name: str) -> Any:
  if name not in __all__:
    raise AttributeError(f"module 'brorl_jax' has no attribute {name!r}")
  found = importlib.import_module(f"{__name__}.{_WHERE.get(name, name)}")
  return getattr(found, name) if name in _WHERE else found


def __dir__() -> list[str]:
  return [*__all__, "__version__"]
