"""Every hyperparameter with its default, from brorl_jax/runs/sections/.

README.md in this folder lists them. This config is not an experiment: run
`n512.py` or `n16.py`. `launch/switches.py` changes one field at a time.
"""

from typing import Any

import ml_collections

from brorl_jax.runs import sections
from brorl_jax.tasks import names


def get_config() -> Any:
  values = sections.as_dict(sections.Config())
  values["data"]["domains"] = names.defaults()
  c = ml_collections.ConfigDict(values)
  return c.lock()  # a misspelt field in a config is an error
