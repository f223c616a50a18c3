"""Dynamic sampling; read by main/stages/advantages.py."""

import dataclasses
from collections.abc import Iterator

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
  max_oversampling: int = setting(
    10,
    "A step draws at most this many times its target number of prompts. "
    "BroRL's pass rate of 62 % needs 1.6.",
    source="unknown",
    phased=True,
  )

  def rules(self) -> Iterator[Rule]:
    yield from self.at_least(1, "max_oversampling")
