"""Every hyperparameter with its default, from brorl_jax/config/.

README.md in this folder lists them. This config is not an experiment: run
`n512.py` or `n16.py`. `launch/switches.py` changes one field at a time.
"""

from typing import Any

import ml_collections

from brorl_jax import config
from brorl_jax.verdicts.base import DEFAULTS


def get_config() -> Any:
  values = config.as_dict(config.Config())
  values["data"]["domains"] = {
    name: default._asdict() for name, default in DEFAULTS.items()
  }
  c = ml_collections.ConfigDict(values)
  return c.lock()  # a misspelt field in a config is an error
