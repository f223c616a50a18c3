"""The base of config sections: typed fields with a unit and a meaning.

    @dataclasses.dataclass(frozen=True)
    class Optim(Section):
      lr: float = setting(3e-4, "Constant after warm-up.", source="unknown")

A section checks its values when it is created. This file and the sections
import only the standard library: a misspelt field is then an error before jax
is imported, which takes seconds.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

# Where a default comes from. "stated": a paper states it. "unknown": the papers
# leave it open and this is a common value. "ours": the papers lack the field.
Source = Literal["stated", "unknown", "ours"]
# A field, whether its value is valid, and what it must be.
Rule = tuple[str, bool, str]
Rules = Iterator[Rule]

# Integers below it are exact as a float and in any reader of JSON; beyond the
# range of a machine's integers they would only fail later.
_MOST = 2**53
_SHOWN = 200  # characters of a value in an error


class Wrong(ValueError):
  """An invalid value: the field, its value, and what it must be."""

  def __init__(self, field: str, value: Any, must: str):
    super().__init__(f"{field} = {_shown(value)} must be {must}")
    self.field, self.value, self.must = field, value, must

  def below(self, section: str) -> "Wrong":
    """The same error, with the section's name before the field's."""
    name = f"{section}.{self.field}" if self.field else section
    return Wrong(name, self.value, self.must)


@dataclasses.dataclass(frozen=True)
class About:
  """The description of a field."""

  why: str  # the meaning of the field and the reason for its default
  unit: str = ""  # unit of the value; "" without one
  source: Source = "ours"
  phased: bool = False  # whether a phase of a run may change it
  free: bool = False  # whether a run may resume with another value of it
  evaluated: bool = False  # whether it affects how held-out prompts are sampled


def setting(default: Any, why: str, **more: Any) -> Any:
  """Declares a field, see `About`; a default that is a mapping is copied."""
  given: dict[str, Any] = {"default": default}
  if isinstance(default, Mapping):
    given = {"default_factory": lambda: dict(default)}
  return dataclasses.field(**given, metadata={"about": About(why, **more)})


# Declare a field that a phase may change (and where its default comes from),
# that a run which resumes may have otherwise, or that affects how held-out
# prompts are sampled.
phased = functools.partial(setting, phased=True)
stated = functools.partial(phased, source="stated")
usual = functools.partial(phased, source="unknown")
free = functools.partial(setting, free=True)
evaluated = functools.partial(setting, evaluated=True)


class Section:
  """Base class of sections; checks choices, numbers and the rules below."""

  def __post_init__(self):
    """Raises Wrong for the first invalid value."""
    for field in dataclasses.fields(self):  # pyright: ignore
      value = getattr(self, field.name)
      if must := of_kind(value, field.type):
        raise Wrong(field.name, value, must)
    for name, good, must in self.rules():
      if not good:
        raise Wrong(name, getattr(self, name), must)

  def rules(self) -> Rules:
    """The conditions that the values of this section must meet."""
    yield from ()

  def at_least(self, least: int, *names: str, zero: str = "") -> Rules:
    """Rules that fields are at least `least`; `zero` says what 0 means."""
    must = f"at least {least}" if least else "0 or positive"
    for name in names:
      good = getattr(self, name) >= least
      yield name, good, f"positive, or 0: {zero}" if zero else must

  def positive(self, *names: str) -> Rules:
    """The rule that each of these fields is above 0."""
    for name in names:
      yield name, getattr(self, name) > 0.0, "positive"


def of_kind(value: Any, kind: Any) -> str:
  """What a value of a field of this type must be; "" if it is."""
  if typing.get_origin(kind) is Literal:
    known = typing.get_args(kind)
    return "" if value in known else f"one of {', '.join(map(str, known))}"
  if kind in (int, float):
    # True is an int for Python, and an int is a float for a person.
    if isinstance(value, bool) or not isinstance(value, int | kind):
      return "an integer" if kind is int else "a number"
    if isinstance(value, float) and not math.isfinite(value):
      return "finite"
    large = isinstance(value, int) and abs(value) >= _MOST
    return "below 2**53" if large else ""
  for type_, name in _NAMES.items():
    if kind is type_ or typing.get_origin(kind) is type_:
      # What a shell gives as a text need not be UTF-8.
      lost = isinstance(value, str) and not value.isascii()
      lost = lost and value != value.encode(errors="ignore").decode()
      return "" if isinstance(value, type_) and not lost else name
  return ""


_NAMES = {bool: "True or False", str: "text in UTF-8", tuple: "a tuple"}
_NAMES |= {Mapping: "a dict"}


def _shown(value: Any) -> str:
  try:
    text = repr(value)
  except ValueError:  # an integer of more than 4,300 digits
    text = "a number of thousands of digits"
  return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def about(section: Any) -> dict[str, About]:
  """The description of each field of a section, by name."""
  return {f.name: f.metadata["about"] for f in dataclasses.fields(section)}
