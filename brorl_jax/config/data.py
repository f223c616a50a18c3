"""Where prompts come from; read by stages/examples.py."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from brorl_jax.config.section import Rule, Section, setting


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

  def rules(self) -> Iterator[Rule]:
    yield from self.at_least(0, "weight")


@dataclasses.dataclass(frozen=True)
class FamilyConfig(Section):
  """Generated puzzles of one task."""

  weight: float = setting(1.0, "Relative share of the puzzles.")
  settings: Mapping[str, Any] = setting({}, "Arguments of the generator.")


# Prompts have at most 40 tokens and answers at most 5: a policy of half a
# million parameters learns these puzzles in minutes.
_FAMILIES: dict[str, FamilyConfig] = {
  name: FamilyConfig(settings=settings)
  for name, settings in {
    "letter_counting": dict(min_words=2, max_words=3),
    "count_primes": dict(min_n=1, max_n=50),
    "leg_counting": dict(
      min_animals=1, max_animals=2, min_instances=1, max_instances=3
    ),
    "gcd": dict(min_value=1, max_value=40),
    "basic_arithmetic": dict(
      min_terms=2,
      max_terms=3,
      min_digits=1,
      max_digits=1,
      operators=["+", "-", "*"],
      allow_parentheses=False,
      allow_negation=False,
    ),
    "number_sequence": dict(
      min_terms=4,
      max_terms=5,
      min_value=-10,
      max_value=10,
      max_complexity=1,
    ),
    "spell_backward": dict(min_word_len=3, max_word_len=4),
    "simple_equations": dict(
      min_terms=2,
      max_terms=2,
      min_value=1,
      max_value=10,
      operators=["+", "-"],
      operators_weights=[0.5, 0.5],
    ),
  }.items()
}


@dataclasses.dataclass(frozen=True)
class DataConfig(Section):
  """Files, generated puzzles, and the longest prompt."""

  files: tuple[str, ...] = setting(
    (),
    "Training data: .jsonl, .parquet or .arrow files, glob patterns, folders "
    "('folder:train' for one split), or datasets of the Hugging Face hub, "
    "'hub:organisation/name:split@revision'. The format is in "
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
    "reads the prompt from column `question` and the answer inside an object.",
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
    "Skip invalid lines and prompts above prompt_tokens, and count them, "
    "instead of stopping.",
  )
  prompt_tokens: int = setting(
    40,
    "Longest prompt. A longer one is an error, unless skip_bad is set.",
    unit="tokens",
    evaluated=True,
  )
  distinct_prompts: int = setting(
    0,
    "Number of prompts that a run draws from, each at most once per step. 0: "
    "every prompt is new.",
    unit="prompts",
  )
  domains: Mapping[str, DomainConfig] = setting(
    {},
    "Weight, instruction and reward of each domain. configs/base.py takes the "
    "defaults from brorl_jax/verdicts/.",
  )
  families: Mapping[str, FamilyConfig] = setting(
    _FAMILIES,
    "Relative share and generator settings of each puzzle task.",
  )

  def rules(self) -> Iterator[Rule]:
    yield from self.paths("files", "heldout_files")
    yield from self.at_least(2, "heldout_one_in")
    yield from self.at_least(1, "prompt_tokens")
