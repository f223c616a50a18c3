"""All sections together, and the conversion from and to plain dicts."""

import contextlib
import dataclasses
import difflib
import functools
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from brorl_jax.config.learning import Advantage, Loss, Optim, Reference, Reward
from brorl_jax.config.run import (
  Devices,
  Eval,
  Guard,
  PolicyConfig,
  RunConfig,
  Theory,
)
from brorl_jax.config.sampling import DataConfig, Filter, Sampling
from brorl_jax.config.section import About, Wrong, about


class PhaseConfig(typing.NamedTuple):
  """Consecutive steps of a run with the same config."""

  since: int  # first step
  config: "Config"
  changed: Mapping[str, Any] | None  # dotted names; None for the first phase

  @property
  def where(self) -> str:
    return "" if self.changed is None else f"phase from step {self.since}: "


@dataclasses.dataclass(frozen=True)
class Config:
  """Every hyperparameter of a run, in the order in which data flows."""

  run: RunConfig = dataclasses.field(default_factory=RunConfig)
  policy: PolicyConfig = dataclasses.field(default_factory=PolicyConfig)
  data: DataConfig = dataclasses.field(default_factory=DataConfig)
  sampling: Sampling = dataclasses.field(default_factory=Sampling)
  filter: Filter = dataclasses.field(default_factory=Filter)
  reward: Reward = dataclasses.field(default_factory=Reward)
  advantage: Advantage = dataclasses.field(default_factory=Advantage)
  loss: Loss = dataclasses.field(default_factory=Loss)
  reference: Reference = dataclasses.field(default_factory=Reference)
  optim: Optim = dataclasses.field(default_factory=Optim)
  devices: Devices = dataclasses.field(default_factory=Devices)
  eval: Eval = dataclasses.field(default_factory=Eval)
  guard: Guard = dataclasses.field(default_factory=Guard)
  theory: Theory = dataclasses.field(default_factory=Theory)

  @property
  def heldout_tokens(self) -> int:
    """Longest response to a held-out prompt."""
    return self.eval.max_new_tokens or self.sampling.max_new_tokens

  @functools.cached_property
  def phases(self) -> list[PhaseConfig]:
    """The phases of a run; the first begins with step 1. Raises Wrong for one
    that is out of order, or changes what may not change.
    """
    out = [PhaseConfig(1, self, None)]
    for number, given in enumerate(self.run.phases):
      label = f"run.phases[{number}]"
      if not isinstance(given, Mapping):
        must = "a dict of fields such as {'from_step': 31, 'sampling.n': 512}"
        raise Wrong(label, given, must)
      changed = dict(given)
      since = changed.pop("from_step", None)
      if not isinstance(since, int) or since <= out[-1].since:
        must = f"a step after {out[-1].since}, the start of the previous phase"
        raise Wrong(f"{label}['from_step']", since, must)
      now = _changed(out[-1].config, changed, label)
      out.append(PhaseConfig(since, now, changed))
    return out


Made = typing.TypeVar("Made")


def of(values: Mapping[str, Any], kind: type[Made] = Config) -> Made:
  """The config of nested dicts: section -> field -> value. Raises Wrong if a
  value cannot work, KeyError if one is missing.
  """
  if not isinstance(values, Mapping):
    raise Wrong("", values, "a section: a dict of its fields")
  made = {}
  for field in dataclasses.fields(kind):  # pyright: ignore
    value = values[field.name]
    with _below(field.name):
      made[field.name] = _made(field.type, value)
  return kind(**made)


def _made(kind: Any, value: Any) -> Any:
  """A section, sections by name, or a value."""
  if dataclasses.is_dataclass(kind):
    return of(value, typing.cast(Any, kind))
  if isinstance(value, list):  # as JSON has a tuple
    return tuple(value)
  if not isinstance(value, Mapping):
    return value
  each = (*typing.get_args(kind), None, None)[1]
  if not dataclasses.is_dataclass(each):
    return dict(value)
  made = {}
  for name, values in value.items():
    with _below(name):
      made[name] = of(values, typing.cast(Any, each))
  return made


@contextlib.contextmanager
def _below(name: str) -> Iterator[None]:
  try:
    yield
  except Wrong as e:
    raise e.below(name) from None
  except KeyError as e:
    raise KeyError(f"{name}.{e.args[0]}") from None


# The config as nested dicts; `of` turns them back into the same config.
as_dict = dataclasses.asdict


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Nested dicts as one dict with dotted names: {"optim.lr": 1e-4}."""
  out = {}
  for key, value in values.items():
    if isinstance(value, Mapping):
      out |= flat(value, f"{prefix}{key}.")
    else:
      out[prefix + key] = value
  return out


def every_field() -> dict[str, About]:
  """The description of each field, by its dotted name."""
  return {
    f"{section.name}.{name}": known
    for section in dataclasses.fields(Config)
    for name, known in about(section.type).items()
  }


def _changed(config: Config, changes: Mapping[str, Any], label: str) -> Config:
  known = every_field()
  for name, value in changes.items():
    where = f"{label}[{name!r}]"
    if name not in known or not known[name].phased:
      raise Wrong(where, value, _may_change(str(name), known))
    section, _, field = name.partition(".")
    before = getattr(config, section)
    kind = type(getattr(before, field))
    if kind is float and type(value) is int:
      with contextlib.suppress(OverflowError):
        value = float(value)
    if type(value) is not kind:
      raise Wrong(where, value, f"of type {kind.__name__}")
    try:
      after = dataclasses.replace(before, **{field: value})
    except Wrong as e:
      raise Wrong(where, e.value, e.must) from None
    config = dataclasses.replace(config, **{section: after})
  return config


def _may_change(name: str, known: Mapping[str, About]) -> str:
  if name in known:
    return "removed: this field cannot change during a run"
  names = [k for k, v in known.items() if v.phased]
  close = difflib.get_close_matches(name, names, 1, cutoff=0.8)
  hint = f"; did you mean {close[0]!r}?" if close else ""
  return f"removed: there is no such field{hint}"
