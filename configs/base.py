"""Every hyperparameter with its default, from brorl_jax/config/.

README.md in this folder lists them. This config is not an experiment: run
`n512.py` or `n16.py`. `launch/switches.py` changes one field at a time.
"""

from typing import Any

import ml_collections

from brorl_jax import config
from brorl_jax.verdicts import names


def get_config() -> Any:
  values = config.as_dict(config.Config())
  values["data"]["domains"] = names.defaults()
  c = ml_collections.ConfigDict(values)
  return c.lock()  # a misspelt field in a config is an error
