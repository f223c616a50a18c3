"""The functions that a config names: from the tables of rl/, or your own."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from brorl_jax.config import Phase
from brorl_jax.config.learning import Advantage, Loss
from brorl_jax.config.sampling import Filter
from brorl_jax.rl import advantages, filtering, losses, policy_loss
from brorl_jax.tasks.own import named

# Fields that name a function, with the table of the built-in ones.
_TABLES: Mapping[str, Mapping[str, Any]] = {
  "loss.kind": losses.LOSSES,
  "advantage.kind": advantages.ADVANTAGES,
  "filter.keep": filtering.KEEP,
}


def loss(c: Loss) -> policy_loss.Loss:
  """The policy loss; raises ValueError, in one line, if there is none."""
  options = {"clip_low": c.clip_low, "clip_high": c.clip_high}
  value = _of("loss.kind", c.kind, lambda f: policy_loss.own(f, **options))
  if c.mean == "constant" and value.unit == "sequence":
    raise ValueError(
      "config.loss.mean = 'constant' needs a loss per token; loss.kind = "
      f"{c.kind!r} has one value per sequence; choose another mean"
    )
  return value


def advantage(c: Advantage) -> advantages.Advantage:
  """From rewards to advantages; raises ValueError if there is none."""
  function = _of("advantage.kind", c.kind, advantages.own)
  if c.kind == "pass_at_k":
    return functools.partial(function, k=c.k)
  return function


def keep(c: Filter) -> filtering.Rule:
  """The rule of dynamic sampling; raises ValueError if there is none."""
  return _of("filter.keep", c.keep, filtering.own)


def _of(field: str, name: str, own: Callable[[Any], Any]) -> Any:
  """The function that a field names; `own` wraps a user's function."""
  what = f"config.{field}"
  value = named.find(name, _TABLES[field], what=what).value
  if name in _TABLES[field]:
    return value
  try:
    return own(value)
  except ValueError as e:
    raise ValueError(f"{what} = {name!r}: {e}") from None


def digests(phases: Sequence[Phase]) -> dict[str, dict[str, str]]:
  """The user's own functions of a run: field -> name and digest.

  Raises:
    ValueError: In one line, if a phase names a function that does not exist.
  """
  out = {}
  for number, phase in enumerate(phases):
    c = phase.config
    try:
      loss(c.loss)
      advantage(c.advantage)
      keep(c.filter)
    except ValueError as e:
      prefix = f"phase from step {phase.since}: " if number else ""
      raise ValueError(f"{prefix}{e}") from None
    names = (c.loss.kind, c.advantage.kind, c.filter.keep)
    for field, name in zip(_TABLES, names, strict=True):
      if phase.changed is not None and field not in phase.changed:
        continue
      where = field if not number else f"run.phases[{number - 1}]['{field}']"
      digest = named.find(name, _TABLES[field], what=where).digest
      if digest:
        out[where] = {"name": name, "digest": digest}
  return out


def refuse_changes(
  before: Mapping[str, Any] | None, now: Mapping[str, Mapping[str, str]]
) -> None:
  """Raises ValueError if the file of a function changed since the run began.

  Another name is a change of the config, which is refused elsewhere.
  """
  for field, function in now.items():
    was = (before or {}).get(field, function)
    if was["name"] == function["name"] and was["digest"] != function["digest"]:
      file = function["name"].rpartition(":")[0]
      raise ValueError(
        f"config.{field} = {function['name']!r}: {file} was changed since this "
        f"run began (digest {was['digest']}, now {function['digest']}); "
        "restore it, choose another workdir, or pass --allow_config_change"
      )
