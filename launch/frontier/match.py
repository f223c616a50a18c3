"""The verifier: a response is right if it is one of the known answers."""

from collections.abc import Mapping
from typing import Any


def score(response: str, example: Mapping[str, Any]) -> float:
  """1 for a right answer, else 0."""
  return float(response in example["right"])
