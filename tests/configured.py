"""Configs for tests, with fields by their short names."""

from typing import Any

from brorl_jax import config as sections
from brorl_jax.configs import base
from brorl_jax.main import settings
from brorl_jax.stages.examples import Examples


def _short() -> dict[str, str]:
  """The last part of each name, after its section where two have the same.

  A `kind` goes by its section: config(loss="gspo", eval_n=4, n=16).
  """
  out = {}
  for name in sections.every_field():
    section, _, field = name.partition(".")
    if section in ("eval", "theory"):
      field = f"{section}_{field}"
    out[section if field == "kind" else field] = name
  return out


SHORT = _short()


def changed(c: Any, **fields: Any) -> Any:
  names = {SHORT.get(k, k): v for k, v in fields.items()}
  with c.unlocked():
    for name in [k for k in names if k in ("data.domains", "data.families")]:
      c.data[name.partition(".")[2]] = names.pop(name)
    c.update_from_flattened_dict(names)
  return c


def config(**fields: Any) -> sections.Config:
  return settings.typed(changed(base.get_config(), **fields))


def examples(c: sections.Config, text: Any) -> Examples:
  return Examples(c, text)
