"""The config of a run: typed sections, each with what its fields mean.

One file per section, with the section's name. `Config` in config.py holds all
of them, in the order in which data flows through a run. Sections import only
the standard library; section.py says why.
"""

from brorl_jax.runs.sections.config import (
  Config,
  Made,
  Phase,
  as_dict,
  every_field,
  flat,
  mistyped,
  of,
  phases,
)
from brorl_jax.runs.sections.section import Section, Wrong, setting
from brorl_jax.runs.sections.warmup import Warmup

__all__ = [
  "Config",
  "Made",
  "Phase",
  "Section",
  "Warmup",
  "Wrong",
  "as_dict",
  "every_field",
  "flat",
  "mistyped",
  "of",
  "phases",
  "setting",
]
