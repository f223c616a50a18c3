"""Rollouts, and the groups of them that a step trains on."""

import dataclasses
import itertools
from collections.abc import Iterator

from brorl_jax.config.section import Rule, Section, setting


@dataclasses.dataclass(frozen=True)
class Sampling(Section):
  """Number and length of rollouts, and how they are decoded.

  The number that this project is about is `n`. A step trains on samples / n
  prompts, which dynamic sampling chooses.
  """

  n: int = setting(
    512,
    "Rollouts per prompt. BroRL compares 512 with 16.",
    unit="rollouts",
    source="stated",
    phased=True,
  )
  samples: int = setting(
    8192,
    "Rollouts per step in training, a multiple of n; with `rounds` the most of "
    "its kept prompts. BroRL: 128 x 512.",
    unit="rollouts",
    phased=True,
  )
  rounds: tuple[int, ...] = setting(
    (),
    "A prompt gets rollouts in rounds until right and wrong ones suffice: its "
    "number after each round, such as (16, 64, 256, 512), ascending multiples "
    "of the first, which share a place on the devices, up to n. Every prompt "
    "weighs the same, and a stop biases that a little. Empty: all prompts get "
    "n.",
    unit="rollouts",
    phased=True,
  )
  stop_right: int = setting(
    4,
    "Of rounds: right rollouts that suffice. The fewer, the more a prompt's "
    "weight depends on its pass rate (2.1 times too large at p = .01 with 1, "
    "1.2 times with 4, for n = 1,024 in rounds of 16, 64, 256 and all).",
    unit="rollouts",
    phased=True,
  )
  stop_wrong: int = setting(
    4,
    "Of rounds: wrong rollouts that suffice. 0: a prompt that is always right "
    "ends with its first round.",
    unit="rollouts",
    phased=True,
  )
  in_flight: int = setting(
    4096,
    "Rollouts whose prompts are on the devices at one time, a multiple of n, "
    "or of rounds[0]. A finished prompt is replaced by the next. 0: 2,048 for "
    "each row of the mesh, in whole prompts, or fewer if a step has fewer.",
    unit="rollouts",
    phased=True,
  )
  slots: int = setting(
    128,
    "Rollouts of a prompt that decode together, at most n; 0: as many as fit "
    "in memory. With responses of a few tokens 128 slots make 1.36 times as "
    "many tokens per second as 512.",
    phased=True,
  )
  lanes: int = setting(
    0,
    "Prompts that decode together; 0: as many as fit in memory.",
    phased=True,
  )
  int8_cache: bool = setting(
    False,
    "Store keys and values of responses as int8 instead of policy.dtype. With "
    "bfloat16 twice as many slots fit. It is not exact: policy/logp_gap_max "
    "grows.",
    evaluated=True,
  )
  max_new_tokens: int = setting(
    6,
    "Longest response, including its end token.",
    unit="tokens",
    phased=True,
    evaluated=True,
  )
  mean_tokens: int = setting(
    0,
    "Mean response, for which accelerators plan their slots: a slot holds what "
    "its rollout has written. If responses are longer, some rollouts wait or "
    "begin again, which changes none of them. 0: max_new_tokens, for which all "
    "slots have room.",
    unit="tokens",
    phased=True,
  )
  temperature: float = setting(
    1.0,
    "Sampling temperature. At 1 the sampler draws from the distribution that "
    "the trainer has.",
    source="unknown",
    phased=True,
  )

  @property
  def prompts(self) -> int:
    """Prompts that a step trains on."""
    return self.samples // self.n

  @property
  def chunk(self) -> int:
    """Rollouts of a prompt that share a place on the devices."""
    return self.rounds[0] if self.rounds else self.n

  @property
  def per_prompt(self) -> str:
    """Rollouts of a prompt, in words."""
    return f"{self.n}" if self.chunk == self.n else f"{self.chunk} to {self.n}"

  @property
  def places(self) -> int:
    """Chunks that are on the devices at one time."""
    return self.in_flight // self.chunk

  @property
  def chunk_lanes(self) -> int:
    """Chunks that decode together: as many rows as `lanes` prompts have."""
    return self.lanes * max(self.slots // self.chunk, 1)

  def rules(self) -> Iterator[Rule]:
    yield from self.at_least(1, "n", "samples", "max_new_tokens")
    yield from self.at_least(0, "stop_wrong")
    yield from self.at_least(1, "stop_right")
    whole = all(type(m) is int for m in self.rounds)
    steps = (0, *self.rounds)
    good = whole and all(a < b for a, b in itertools.pairwise(steps))
    yield "rounds", good, "positive whole numbers, ascending"
    good = self.in_flight >= 0
    yield "in_flight", good, "positive, or 0: it follows from the devices"
    for field in ("slots", "lanes"):
      good = getattr(self, field) >= 0
      yield field, good, "positive, or 0: as many as fit in memory"
    yield (
      "mean_tokens",
      0 <= self.mean_tokens <= self.max_new_tokens,
      f"0 to max_new_tokens = {self.max_new_tokens}",
    )
    yield (
      "temperature",
      self.temperature > 0.0,
      "positive; greedy sampling does not explore",
    )


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
