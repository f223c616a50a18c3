"""A reward function: the answers to hard prompts are known, all of them."""

from collections.abc import Mapping
from typing import Any


def score(response: str, example: Mapping[str, Any]) -> float:
  """1 for one of the right answers of a data line, else 0."""
  return float(response in example["right"])
