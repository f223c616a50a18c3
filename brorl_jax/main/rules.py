"""Conditions that a config must meet as a whole, each with its remedy.

What a single field of a training config allows is in config/.
"""

import math
from collections.abc import Iterator
from typing import Any

from brorl_jax import config
from brorl_jax.config.sampling import Sampling
from brorl_jax.config.section import Rule


def simulation(c: Any, surrogates: tuple[str, ...]) -> Iterator[Rule]:
  """Of the token simulator."""
  for field in ("seeds", "steps", "vocab"):
    yield field, c[field] >= 1, "at least 1"
  for field in ("n", "dense_n"):
    good = all(isinstance(n, int) and n >= 1 for n in c[field])
    yield field, good, "integers of at least 1"
  yield "n", len(c.n) >= 1, "at least one number"
  yield "seed", 0 <= c.seed < 2**31, "0 to 2**31 - 1"
  good = 1 <= c.correct < c.vocab
  yield "correct", good, f"1 to vocab - 1 = {c.vocab - 1}"
  good = c.surrogate in surrogates
  yield "surrogate", good, f"one of {', '.join(surrogates)}"
  for field in ("lr", "eps", "sgd_lr"):
    yield field, 0.0 < c[field] < math.inf, "positive"
  for field in ("b1", "b2"):
    yield field, 0.0 <= c[field] < 1.0, "at least 0 and below 1"
  yield "weight_decay", 0.0 <= c.weight_decay < math.inf, "0 or positive"
  yield "seeding", math.isfinite(c.seeding), "finite"
  good = c.anchor is None or math.isfinite(c.anchor)
  yield "anchor", good, "finite, or None"


def training(c: config.Config) -> Iterator[Rule]:
  """Conditions between fields of different sections."""
  n = c.sampling.n
  for field in ("heldout_files", "fields", "domain"):
    good = not getattr(c.data, field) or bool(c.data.files)
    yield f"data.{field}", good, "empty without data.files"
  yield (
    "sampling.n",
    n >= 2,
    "at least 2: a rollout is compared with the mean of its group",
  )
  yield from _rounds(c.sampling)
  good = not c.sampling.rounds or c.loss.mean != "prompt"
  must = "another mean with sampling.rounds: advantages do that"
  yield "loss.mean", good, must
  prompts, pool = c.sampling.prompts, c.data.distinct_prompts
  good = prompts % c.optim.minibatches == 0
  must = f"a divisor of samples / n = {prompts} prompts"
  yield "optim.minibatches", good, must
  good = pool == 0 or pool > prompts
  good = good or (pool == prompts and c.filter.keep == "all")
  must = f"0, or more than the {prompts} prompts of a step: some are rejected"
  yield "data.distinct_prompts", good, must
  most, buffer = c.sampling.max_new_tokens, c.reward.overlong_buffer
  good = 1 <= buffer <= most or not c.reward.overlong_weight
  yield "reward.overlong_buffer", good, f"1 to max_new_tokens = {most}"
  yield from _counts(c)
  good = not c.run.pipeline or c.loss.correction != "none"
  must = (
    "other than 'none' with run.pipeline: rollouts then come from the policy "
    "before the last update"
  )
  yield "loss.correction", good, must


def _counts(c: config.Config) -> Iterator[Rule]:
  """Advantages of (right, wrong) counts."""
  shaped = c.reward.length_weight and c.reward.length_min < 0.0
  counts = c.advantage.kind in ("maxrl", "pass_at_k")
  good = not counts or not (shaped or c.reward.overlong_weight)
  must = (
    "another kind if the reward depends on the length: it takes the mean "
    "reward for the share of right rollouts"
  )
  yield "advantage.kind", good, must
  name, least = _least(c.sampling)
  good = c.advantage.kind != "pass_at_k" or c.advantage.k <= least // 4
  must = (
    f"at most {name} / 4 = {least // 4}: other groups hold too few wrong ones"
  )
  yield "advantage.k", good, must


def _least(c: Sampling) -> tuple[str, int]:
  """The fewest rollouts of a prompt: the field, and its value."""
  return ("rounds[0]" if c.rounds else "n"), c.chunk


def _rounds(c: Sampling) -> Iterator[Rule]:
  """How many rollouts a prompt may get."""
  n, chunk = c.n, c.chunk
  yield "sampling.samples", c.samples % n == 0, f"a multiple of n = {n}"
  if c.rounds:
    yield "sampling.rounds", chunk >= 2, "at least 2 in the first round"
    good = c.rounds[-1] == n and all(m % chunk == 0 for m in c.rounds)
    must = f"multiples of the first, {chunk}, the last of them n = {n}"
    yield "sampling.rounds", good, must
    good = c.stop_right + c.stop_wrong <= n
    must = f"at most n - stop_wrong = {n - c.stop_wrong}: else no prompt stops"
    yield "sampling.stop_right", good, must
  name, _ = _least(c)
  good = c.in_flight % chunk == 0
  yield "sampling.in_flight", good, f"a multiple of {name} = {chunk}"
