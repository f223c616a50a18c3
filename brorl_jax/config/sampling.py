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
    "Rollouts per step in training, a multiple of n; with `rounds` an upper "
    "bound. BroRL: 128 x 512.",
    unit="rollouts",
    phased=True,
  )
  rounds: tuple[int, ...] = setting(
    (),
    "Rollouts of a prompt after each round, such as (16, 64, 256, 512): "
    "multiples of the first, up to n. A prompt stops when it has enough right "
    "and wrong ones. Every prompt has the same weight. (): all get n.",
    unit="rollouts",
    phased=True,
  )
  stop_right: int = setting(
    4,
    "Right rollouts after which a prompt of rounds stops. With fewer its "
    "weight depends more on its pass rate: at a rate of 1 % it is 2.1 times "
    "too large with 1, and 1.2 times with 4 (rounds of 16, 64, 256, 1,024).",
    unit="rollouts",
    phased=True,
  )
  stop_wrong: int = setting(
    4,
    "Wrong rollouts after which a prompt of rounds stops. 0: a prompt that is "
    "always right ends with its first round.",
    unit="rollouts",
    phased=True,
  )
  in_flight: int = setting(
    4096,
    "Rollouts whose prompts are on the devices at one time, a multiple of n, "
    "or of rounds[0]. 0: 2,048 for each row of the mesh, or all of a step.",
    unit="rollouts",
    phased=True,
  )
  slots: int = setting(
    128,
    "Rollouts of a prompt that decode together, at most n; 0: as many as fit "
    "in memory. Short responses are 1.36 times as fast with 128 as with 512.",
    phased=True,
  )
  lanes: int = setting(
    0,
    "Prompts that decode together; 0: as many as fit in memory.",
    phased=True,
  )
  int8_cache: bool = setting(
    False,
    "Store keys and values of responses as int8. Twice as many slots fit as "
    "with bfloat16. It is not exact: policy/logp_gap_max grows.",
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
    "Expected mean response, for which accelerators reserve memory. If "
    "responses are longer, some rollouts wait or begin again, with the same "
    "result. 0: max_new_tokens.",
    unit="tokens",
    phased=True,
  )
  temperature: float = setting(
    1.0,
    "Sampling temperature. At 1 the sampler's distribution is the trainer's.",
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
    "'differ': groups whose rewards are not all equal; 'solved': groups with "
    "some rewards of 1 and others; 'all': no dynamic sampling. For rewards of "
    "0 and 1 the first two are the same. Your own function, "
    "'file.py:function', maps (reward [P,N], valid [P,N]) to a mask [P].",
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
