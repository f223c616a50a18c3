"""Writes the lists of config fields into configs/README.md.

  python -m launch.fields

The sections of the config declare each field with its default, unit, source
and meaning. This script copies them into the text between the two marks of the
README; tests/documents_test.py compares both.
"""

import dataclasses
import pathlib
import typing
from collections.abc import Iterator
from typing import Any

from brorl_jax import config
from brorl_jax.config import sampling, section

README = pathlib.Path(__file__).parents[1] / "configs" / "README.md"
BEGIN = "<!-- fields: written by launch.fields -->\n"
END = "<!-- end of fields -->\n"


def tables() -> str:
  """Every field of a run, a list per section."""
  parts = ["\n"]
  runs = {
    f.name: typing.cast(Any, f.type) for f in dataclasses.fields(config.Config)
  }
  for name, kind in runs.items():
    parts += _section("###", name, kind)
    if name == "data":
      parts += _section("####", "data.domains.NAME", sampling.DomainConfig)
      parts += _section("####", "data.families.NAME", sampling.FamilyConfig)
  return "".join(parts)


def _section(heading: str, name: str, kind: Any) -> Iterator[str]:
  """A line per field."""
  yield f"{heading} `{name}`\n\n{_paragraph(kind)}\n\n"
  for field in dataclasses.fields(kind):
    about = section.about(kind)[field.name]
    notes = {
      about.unit: True,
      about.source: about.source != "ours",
      "phase": about.phased,
      "resume": about.free,
    }
    said = ", ".join(note for note, holds in notes.items() if note and holds)
    value = f"`{field.name}={_default(field)}`" + (f" ({said})" if said else "")
    yield f"- {value}: {about.why}\n"
  yield "\n"


def _paragraph(kind: Any) -> str:
  """The first sentence of the section's docstring."""
  return (kind.__doc__ or "").strip().split("\n\n")[0].replace("\n  ", " ")


def _default(field: dataclasses.Field) -> str:
  if field.default is not dataclasses.MISSING:
    return repr(field.default)
  assert field.default_factory is not dataclasses.MISSING
  value = field.default_factory()
  return f"{{{', '.join(value)}}}" if value else repr(value)


def written(text: str) -> str:
  """The README with the lists as they are now."""
  before, rest = text.split(BEGIN)
  _, after = rest.split(END)
  return before + BEGIN + tables() + END + after


if __name__ == "__main__":
  README.write_text(written(README.read_text()))
