"""The base of config sections: typed fields with a unit and a meaning.

    @dataclasses.dataclass(frozen=True)
    class Optim(Section):
      lr: float = setting(3e-4, "Constant after warm-up.", source="unknown")

A section checks its values when it is created. This file and the sections
import only the standard library: a misspelt field is then an error before jax
is imported, which takes seconds.
"""

import dataclasses
import math
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

# Where a default comes from. "stated": a paper states it. "unknown": the papers
# leave it open and this is a common value. "ours": the papers lack the field.
Source = Literal["stated", "unknown", "ours"]
Rule = tuple[
  str, bool, str
]  # field, whether its value is valid, what it must be


class Wrong(ValueError):
  """An invalid value: the field, its value, and what it must be."""

  def __init__(self, field: str, value: Any, must: str):
    super().__init__(f"{field} = {value!r} must be {must}")
    self.field, self.value, self.must = field, value, must

  def below(self, section: str) -> "Wrong":
    """The same error, with the section's name before the field's."""
    return Wrong(f"{section}.{self.field}", self.value, self.must)


@dataclasses.dataclass(frozen=True)
class About:
  """The description of a field.

  Attributes:
    why: The meaning of the field and the reason for its default.
    unit: Unit of the value; "" without one.
    source: See `Source`.
    phased: Whether a phase of a run may change it.
    free: Whether a run may resume with another value of it.
    evaluated: Whether it affects how held-out prompts are sampled.
  """

  why: str
  unit: str
  source: Source
  phased: bool
  free: bool
  evaluated: bool


def setting(
  default: Any,
  why: str,
  *,
  unit: str = "",
  source: Source = "ours",
  phased: bool = False,
  free: bool = False,
  evaluated: bool = False,
) -> Any:
  """Declares a field, see `About`; a default that is a mapping is copied."""
  about = About(why, unit, source, phased, free, evaluated)
  metadata = {"about": about}
  if isinstance(default, Mapping):
    return dataclasses.field(
      default_factory=lambda: dict(default), metadata=metadata
    )
  return dataclasses.field(default=default, metadata=metadata)


class Section:
  """Base class of sections; checks choices, numbers and the rules below."""

  def __post_init__(self):
    """Raises Wrong for the first invalid value."""
    for field in dataclasses.fields(self):  # pyright: ignore
      value = getattr(self, field.name)
      if typing.get_origin(field.type) is Literal:
        known = typing.get_args(field.type)
        if value not in known:
          names = ", ".join(map(str, known))
          raise Wrong(field.name, value, f"one of {names}")
      if isinstance(value, float) and not math.isfinite(value):
        raise Wrong(field.name, value, "finite")
    for name, good, must in self.rules():
      if not good:
        value = self
        for part in name.split("."):
          value = (
            value[part] if isinstance(value, Mapping) else getattr(value, part)
          )
        raise Wrong(name, value, must)

  def rules(self) -> Iterator[Rule]:
    """The conditions that the values of this section must meet."""
    yield from ()

  def at_least(self, least: int, *names: str) -> Iterator[Rule]:
    """The rule that each of these fields is at least `least`."""
    for name in names:
      must = "0 or positive" if least == 0 else f"at least {least}"
      yield name, getattr(self, name) >= least, must


def about(section: Any) -> dict[str, About]:
  """The description of each field of a section, by name."""
  return {f.name: f.metadata["about"] for f in dataclasses.fields(section)}
