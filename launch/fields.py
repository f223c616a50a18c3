"""Writes the tables of config fields into configs/README.md.

  python -m launch.fields

The sections of the config declare each field with its default, unit, source
and meaning. This script copies them into the text between the two marks of the
README; tests/documents_test.py compares both.
"""

import dataclasses
import pathlib
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from brorl_jax import config
from brorl_jax.config import data, section

README = pathlib.Path(__file__).parents[1] / "configs" / "README.md"
BEGIN = "<!-- fields: written by launch.fields -->\n"
END = "<!-- end of fields -->\n"
_HEAD = (
  "| field | default | unit | source | may change | meaning |\n"
  "|---|---|---|---|---|---|\n"
)


def tables() -> str:
  """Every field of a run and of a supervised start, a table per section."""
  parts = ["\n"]
  for field in dataclasses.fields(config.Config):
    parts += _table("###", field.name, typing.cast(Any, field.type))
    if field.name == "data":
      parts += _table("####", "data.domains.NAME", data.DomainConfig)
      parts += _table("####", "data.families.NAME", data.FamilyConfig)
  parts.append(
    "### Supervised start\n\n"
    "These sections replace those of the same name with `--mode=warmup "
    "--config=sft`.\nSection `policy` is the one above.\n\n"
  )
  for field in dataclasses.fields(config.Warmup):
    if field.name != "policy":
      parts += _table("####", field.name, typing.cast(Any, field.type))
  return "".join(parts)


def _table(heading: str, name: str, kind: Any) -> Iterator[str]:
  yield f"{heading} `{name}`\n\n{_paragraph(kind)}\n\n{_HEAD}"
  about = section.about(kind)
  for field in dataclasses.fields(kind):
    known = about[field.name]
    cells = (
      f"`{field.name}`",
      _default(field),
      known.unit,
      known.source,
      _changes(known),
      known.why,
    )
    yield "| " + " | ".join(x.replace("|", "\\|") for x in cells) + " |\n"
  yield "\n"


def _paragraph(kind: Any) -> str:
  """The first sentence of the section's docstring."""
  return (kind.__doc__ or "").strip().split("\n\n")[0].replace("\n  ", " ")


def _default(field: dataclasses.Field) -> str:
  if field.default is not dataclasses.MISSING:
    return f"`{field.default!r}`"
  assert field.default_factory is not dataclasses.MISSING
  value = field.default_factory()
  if isinstance(value, Mapping) and value:
    return ", ".join(f"`{name}`" for name in value)
  return f"`{value!r}`"


def _changes(about: section.About) -> str:
  """Where a run may have another value later on."""
  where = {"phase": about.phased, "resume": about.free}
  return ", ".join(name for name, may in where.items() if may)


def written(text: str) -> str:
  """The README with the tables as they are now."""
  before, rest = text.split(BEGIN)
  _, after = rest.split(END)
  return before + BEGIN + tables() + END + after


if __name__ == "__main__":
  README.write_text(written(README.read_text()))
