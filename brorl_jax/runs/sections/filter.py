"""Dynamic sampling; read by main/stages/advantages.py."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from brorl_jax.runs.sections.section import Rule, Section, setting


@dataclasses.dataclass(frozen=True)
class Filter(Section):
  """The groups that a step trains on, chosen by their raw rewards."""

  keep: str = setting(
    "differ",
    "'differ' keeps groups whose rewards are not all equal. 'solved' keeps "
    "groups in which some rewards are 1 and some are not. 'all' keeps every "
    "group: no dynamic sampling. For rewards of 0 and 1 the first two agree; "
    "for others the papers do not say which they use. Your own function is "
    "'file.py:function' or 'package.module:function', from (reward [P,N], "
    "valid [P,N]) to a mask [P] in jax.numpy.",
    source="unknown",
    phased=True,
  )
  keep_above: float = setting(
    0.0,
    "Keep only groups with a mean reward above this; 0: off. With N = 512 "
    "'differ' also keeps prompts that are solved 99 times in 100; with N = 16 "
    "it keeps only a few of those.",
    phased=True,
  )
  keep_below: float = setting(
    1.0, "Keep only groups with a mean reward below this; 1: off.", phased=True
  )
  max_oversampling: int = setting(
    10,
    "A step draws at most this many times its target number of prompts. "
    "BroRL's pass rate of 62 % needs 1.6.",
    source="unknown",
    phased=True,
  )
  starved: Literal["train", "skip"] = setting(
    "train",
    "What a step does that found fewer groups than its target: 'train' on "
    "them, or 'skip' the update. Five such steps in a row end the run.",
    phased=True,
  )
  rest_after: int = setting(
    0,
    "A prompt that was rejected this many times in a row is not drawn for "
    "rest_steps; 0: never. Needs data.distinct_prompts. Not in BroRL.",
    phased=True,
  )
  rest_steps: int = setting(
    20,
    "Steps for which a prompt is not drawn after rest_after rejections.",
    unit="steps",
    phased=True,
  )

  def rules(self) -> Iterator[Rule]:
    good = 0.0 <= self.keep_above < self.keep_below
    must = f"at least 0 and below keep_below = {self.keep_below}"
    yield "keep_above", good, must
    yield "keep_below", self.keep_below <= 1.0, "at most 1"
    yield from self.at_least(1, "max_oversampling", "rest_steps")
    yield from self.at_least(0, "rest_after")
