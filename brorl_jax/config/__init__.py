"""The config of a run: typed sections, each with what its fields mean.

One file per section, with the section's name. `Config` in config.py holds all
of them, in the order in which data flows through a run. Sections import only
the standard library; section.py says why.
"""

from brorl_jax.config.config import (
  Config,
  Made,
  PhaseConfig,
  as_dict,
  every_field,
  flat,
  of,
)
from brorl_jax.config.section import Section, Wrong, setting
from brorl_jax.config.warmup import Warmup

__all__ = [
  "Config",
  "Made",
  "PhaseConfig",
  "Section",
  "Warmup",
  "Wrong",
  "as_dict",
  "every_field",
  "flat",
  "of",
  "setting",
]
