"""Prompts, rollouts, and the groups of them that a step trains on."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, Literal

from brorl_jax.config import section
from brorl_jax.config.section import Section, evaluated, phased, setting, usual


@dataclasses.dataclass(frozen=True)
class DomainConfig(Section):
  """One domain: its weight, its instruction and its reward."""

  weight: float = setting(
    1.0,
    "Relative share of the prompts, among the domains that have prompts. The "
    "weights need not sum to 1.",
  )
  instruction: str = setting(
    "", "Text added on a new line after every question."
  )
  reward: Literal["pass", "score"] = setting(
    "pass",
    "'pass': 1 if all parts of a response are right, otherwise 0. 'score': the "
    "fraction of parts that are right.",
  )

  def rules(self) -> section.Rules:
    yield from self.at_least(0, "weight")


@dataclasses.dataclass(frozen=True)
class FamilyConfig(Section):
  """Generated puzzles of one task."""

  weight: float = setting(1.0, "Relative share of the puzzles.")
  settings: Mapping[str, Any] = setting({}, "Arguments of the generator.")


@dataclasses.dataclass(frozen=True)
class DataConfig(Section):
  """Files, generated puzzles, and the longest prompt."""

  files: tuple[str, ...] = setting(
    (),
    "Training data: .jsonl, .csv, .parquet or .arrow files, glob patterns, "
    "folders ('folder:train' for one split), or datasets of the Hugging Face "
    "hub, 'hub:organisation/name:split@revision'. The format is in "
    "brorl_jax/data/dataset.py.",
  )
  heldout_files: tuple[str, ...] = setting(
    (),
    "Held-out data, in the same formats. (): one example in heldout_one_in of "
    "`files`, chosen by a hash of its text. --mode=evaluate needs only these.",
  )
  fields: str = setting(
    "",
    "Columns with other names: 'prompt:question,answer:reward_model.truth' "
    "reads the prompt from column `question` and the answer inside an object. "
    "Or your function, 'file.py:function': row -> record, or ValueError. "
    "'ENTRY=HOW;...': of that entry of the files.",
  )
  domain: str = setting("", "Domain of lines without a `domain` field.")
  puzzles: bool = setting(
    False,
    "Mix generated puzzles with the files. Without files all are puzzles.",
  )
  system: str = setting("", "System message of every prompt that has none.")
  heldout_one_in: int = setting(
    10, "One example in this many is held out, without heldout_files."
  )
  skip_bad: bool = setting(
    False,
    "Skip, and count, invalid lines, prompts above prompt_tokens and training "
    "prompts that heldout_files have, instead of stopping.",
  )
  prompt_tokens: int = evaluated(
    40,
    "Longest prompt. A longer one is an error, unless skip_bad is set.",
    unit="tokens",
  )
  domains: Mapping[str, DomainConfig] = setting(
    {},
    "Weight, instruction and reward of each domain. configs/base.py takes the "
    "defaults from brorl_jax/verdicts/.",
  )
  families: Mapping[str, FamilyConfig] = setting(
    {},
    "Share and generator settings of each puzzle task; configs/base.py has "
    "those of an embedded policy.",
  )

  def rules(self) -> section.Rules:
    for name in ("files", "heldout_files"):
      good = all(isinstance(p, str) and p for p in getattr(self, name))
      yield name, good, "paths such as ('a.jsonl', 'b.parquet')"
    yield from self.at_least(2, "heldout_one_in")
    yield from self.at_least(1, "prompt_tokens")


@dataclasses.dataclass(frozen=True)
class Sampling(Section):
  """Number and length of rollouts, and how they are decoded.

  The number that this project is about is `n`. A step trains on samples / n
  prompts, which dynamic sampling chooses.
  """

  n: int = phased(
    512,
    "Rollouts per prompt. BroRL compares 512 with 16.",
    unit="rollouts",
    source="stated",
  )
  samples: int = phased(
    8192,
    "Rollouts per step in training, a multiple of n; with `rounds` an upper "
    "bound. BroRL: 128 x 512.",
    unit="rollouts",
  )
  rounds: tuple[int, ...] = phased(
    (),
    "Rollouts of a prompt after each round, such as (16, 64, 256, 512): "
    "multiples of the first, up to n. A prompt stops when it has enough right "
    "ones. Every prompt has the same weight. (): all get n.",
    unit="rollouts",
  )
  stop_right: int = phased(
    4,
    "Right rollouts after which a prompt of rounds stops. With fewer its "
    "weight depends more on its pass rate: at a rate of 1 % it is 2.1 times "
    "too large with 1, and 1.2 times with 4 (rounds of 16, 64, 256, 1,024).",
    unit="rollouts",
  )
  in_flight: int = phased(
    4096,
    "Rollouts whose prompts are on the devices at one time, a multiple of n, "
    "or of rounds[0]. 0: 2,048 for each row of the mesh, or all of a step.",
    unit="rollouts",
  )
  slots: int = phased(
    128,
    "Rollouts of a prompt that decode together, at most n; 0: as many as fit "
    "in memory. Short responses are 1.36 times as fast with 128 as with 512.",
  )
  lanes: int = phased(
    0, "Prompts that decode together; 0: as many as fit in memory."
  )
  int8_cache: bool = evaluated(
    False,
    "Store keys and values of responses as int8. Twice as many slots fit as "
    "with bfloat16. It is not exact: policy/logp_gap_max grows.",
  )
  max_new_tokens: int = phased(
    6,
    "Longest response, including its end token; an episode, with its replies.",
    unit="tokens",
    evaluated=True,
  )
  mean_tokens: int = phased(
    0,
    "Expected mean response, for which accelerators reserve memory. If "
    "responses are longer, some rollouts wait or begin again, with the same "
    "result. 0: max_new_tokens.",
    unit="tokens",
  )
  temperature: float = usual(
    1.0,
    "Sampling temperature. At 1 the sampler's distribution is the trainer's.",
  )

  @property
  def prompts(self) -> int:
    """Prompts that a step trains on."""
    return self.samples // self.n

  @property
  def chunk(self) -> int:
    """Rollouts of a prompt that are asked for at first."""
    return self.rounds[0] if self.rounds else self.n

  @property
  def per_prompt(self) -> str:
    return f"{self.n}" if self.chunk == self.n else f"{self.chunk} to {self.n}"

  def rules(self) -> section.Rules:
    yield from self.at_least(1, "n", "samples", "max_new_tokens")
    yield from self.at_least(1, "stop_right")
    whole = all(type(m) is int for m in self.rounds)
    steps = (0, *self.rounds)
    good = whole and all(a < b for a, b in itertools.pairwise(steps))
    yield "rounds", good, "positive whole numbers, ascending"
    follows, fit = "it follows from the devices", "as many as fit in memory"
    yield from self.at_least(0, "in_flight", zero=follows)
    yield from self.at_least(0, "slots", "lanes", zero=fit)
    good = 0 <= self.mean_tokens <= self.max_new_tokens
    yield "mean_tokens", good, f"0 to max_new_tokens = {self.max_new_tokens}"
    must = "positive; greedy sampling does not explore"
    yield "temperature", self.temperature > 0.0, must


@dataclasses.dataclass(frozen=True)
class Filter(Section):
  """The groups that a step trains on, chosen by their raw rewards."""

  keep: str = usual(
    "differ",
    "'differ': groups whose rewards are not all equal; 'solved': groups with "
    "some rewards of 1 and others; 'all': no dynamic sampling. For rewards of "
    "0 and 1 the first two are the same. Your own function, "
    "'file.py:function', maps (reward [P,N], valid [P,N]) to a mask [P].",
  )
  max_oversampling: int = usual(
    10,
    "A step draws at most this many times its target number of prompts. "
    "BroRL's pass rate of 62 % needs 1.6.",
  )

  def rules(self) -> section.Rules:
    yield from self.at_least(1, "max_oversampling")
