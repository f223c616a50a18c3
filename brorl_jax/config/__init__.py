"""The config of a run: typed sections, each with what its fields mean.

`Config` in config.py holds all sections, in the order in which data flows
through a run. They import only the standard library; section.py says why.
"""

from brorl_jax.config.config import (
  Config,
  PhaseConfig,
  as_dict,
  every_field,
  flat,
  of,
)
from brorl_jax.config.section import Section, Wrong, setting

__all__ = [
  "Config", "PhaseConfig", "Section", "Wrong", "as_dict", "every_field", "flat",
  "of", "setting",
]  # fmt: skip
