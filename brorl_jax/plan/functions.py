"""The functions that a config names: from the tables of rl/, or your own."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from brorl_jax.config import Config, PhaseConfig
from brorl_jax.config.learning import Advantage, Loss
from brorl_jax.config.sampling import Filter
from brorl_jax.learner.objective import Correction, Objective
from brorl_jax.learner.state import Optimizer, Schedule, adamw
from brorl_jax.rl import advantages, filtering, losses, lr_scaling
from brorl_jax.verdicts.own import find

# Fields that name a function, with the table of the built-in ones.
_TABLES: Mapping[str, Mapping[str, Any]] = {
  "loss.kind": losses.LOSSES,
  "advantage.kind": advantages.ADVANTAGES,
  "filter.keep": filtering.KEEP,
}
# Of loss.correction_range, where it is empty.
_USUAL_RANGE = {
  "truncated": (0.0, 2.0),
  "banded": (0.5, 5.0),
  "sequence": (0.999, 1.002),
}
# Nats: what a token counts at most in the KL term. ProRL v2 states it.
_KL_CLAMP = 10.0


def optimizer(c: Config) -> tuple[Optimizer, Schedule]:
  """AdamW with a warm-up, and the rate of each update."""
  names = ("warmup", "b1", "b2", "eps", "weight_decay", "max_grad_norm")
  how = {name: getattr(c.optim, name) for name in names}
  return adamw(lr=scaled_lr(c), **how)


def scaled_lr(c: Config) -> float:
  """The learning rate of a step, for its number of samples."""
  lr, base = c.optim.lr, c.optim.lr_samples
  if not base:
    return lr
  return lr_scaling.sqrt_scaled(
    lr, samples=c.sampling.samples, base_samples=base
  )


def objective(c: Config) -> Objective:
  """The loss with its constants; raises ValueError if there is no such loss."""
  of, correction = c.loss, None
  if of.correction != "none":
    low, high = map(float, of.correction_range or _USUAL_RANGE[of.correction])
    correction = Correction(of.correction, low, high)
  return Objective(
    clip_low=of.clip_low,
    clip_high=of.clip_high,
    loss=loss(of),
    kl_weight=c.reference.kl_weight,
    kl_clamp=_KL_CLAMP,
    entropy_weight=of.entropy_weight,
    correction=correction,
    temperature=c.sampling.temperature,
  )


def loss(c: Loss) -> losses.PolicyLoss:
  """The policy loss; raises ValueError if there is none."""
  wrap = functools.partial(
    losses.from_user, clip_low=c.clip_low, clip_high=c.clip_high
  )
  value = _named("loss.kind", c.kind, wrap)
  if c.mean == "constant" and value.unit == "sequence":
    raise ValueError(
      "config.loss.mean = 'constant' needs a loss per token; loss.kind = "
      f"{c.kind!r} has one value per sequence; choose another mean"
    )
  return value


def advantage(c: Advantage, *, rounds: bool) -> advantages.Advantage:
  """From rewards to advantages; raises ValueError if there is none.

  With `rounds`, in which prompts get different numbers of rollouts, each prompt
  counts once, see `advantages.each_prompt_once`.
  """
  function = _named("advantage.kind", c.kind, advantages.from_user)
  if c.kind == "pass_at_k":
    function = functools.partial(function, k=c.k)
  if not rounds:
    return function
  whitened = c.kind in advantages.WHITENED
  return functools.partial(
    advantages.each_prompt_once, function, whitened=whitened
  )


def keep(c: Filter) -> filtering.Rule:
  """The rule of dynamic sampling; raises ValueError if there is none."""
  return _named("filter.keep", c.keep, filtering.from_user)


def _named(field: str, name: str, wrap: Callable[[Any], Any]) -> Any:
  """The function that a field names; `wrap` checks a user's function."""
  what = f"config.{field}"
  value = find(name, _TABLES[field], what=what).value
  if name in _TABLES[field]:
    return value
  try:
    return wrap(value)
  except ValueError as e:
    raise ValueError(f"{what} = {name!r}: {e}") from None


class Functions(NamedTuple):
  """The functions of a phase."""

  objective: Objective
  advantage: advantages.Advantage
  keep: filtering.Rule
  digests: dict[str, dict[str, str]]  # of the user's, by field, with names


def phase_functions(phases: Sequence[PhaseConfig]) -> list[Functions]:
  """The functions of each phase; a phase has digests of what it changes.

  Raises ValueError if a phase names a function that does not exist.
  """
  out = []
  for number, phase in enumerate(phases):
    c, digests = phase.config, {}
    try:
      goal, kept = objective(c), keep(c.filter)
      credit = advantage(c.advantage, rounds=bool(c.sampling.rounds))
    except ValueError as e:
      raise ValueError(f"{phase.where}{e}") from None
    names = (c.loss.kind, c.advantage.kind, c.filter.keep)
    for field, name in zip(_TABLES, names, strict=True):
      if phase.changed is not None and field not in phase.changed:
        continue
      where = field if not number else f"run.phases[{number - 1}]['{field}']"
      digest = find(name, _TABLES[field], what=where).digest
      if digest:
        digests[where] = {"name": name, "digest": digest}
    out.append(Functions(goal, credit, kept, digests))
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
