"""Rollouts; read by main/stages/sampling.py."""

import dataclasses
from collections.abc import Iterator

from brorl_jax.runs.sections.section import Rule, Section, setting


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
    "Rollouts per step in training, a multiple of n. BroRL: 128 x 512.",
    unit="rollouts",
    phased=True,
  )
  in_flight: int = setting(
    4096,
    "Rollouts whose prompts are on the devices at one time, a multiple of n. A "
    "finished prompt is replaced by the next. 0: 2,048 for each row of the "
    "mesh, in whole prompts, or fewer if a step has fewer.",
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
  def places(self) -> int:
    """Prompts that are on the devices at one time."""
    return self.in_flight // self.n

  def rules(self) -> Iterator[Rule]:
    yield from self.at_least(1, "n", "samples", "max_new_tokens")
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
