"""Names and defaults of the domains, for who only reads a config.

This file imports nothing of ours: checking flags loads no verifier.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple


class Default(NamedTuple):
  """Defaults of a domain in config.data.domains."""

  weight: float = 1.0  # relative share of the training prompts
  instruction: str = ""  # text after every question
  reward: Literal["pass", "score"] = "pass"  # 1 for a pass, or the score


# The domain whose examples can be generated (config.data.families).
MADE = "gym"
# The domain of every line if the user brings the reward; no record names it.
OWN = "own"
DEFAULTS: Mapping[str, Default] = {
  # The last complete \boxed{} is the answer.
  "math": Default(
    instruction="Think step by step and put the answer into \\boxed{}."
  ),
  # The last fenced block is run. As in ProRL, the score is the share of tests.
  "code": Default(
    instruction="Write the program in one fenced code block.", reward="score"
  ),
  "stem": Default(instruction="Put the answer, or its letter, into \\boxed{}."),
  # The text between the last <answer> and </answer> is scored, or else the
  # whole response. Unlike in ProRL the reward is the pass: the partial credit
  # of the scorers is easy to exploit.
  MADE: Default(),
  "instructions": Default(reward="score"),  # as ProRL
  OWN: Default(reward="score"),
}


def defaults() -> dict[str, dict[str, Any]]:
  """The defaults of config.data.domains."""
  return {name: default._asdict() for name, default in DEFAULTS.items()}
