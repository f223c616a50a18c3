"""What a verifier says about an answer, and what a task hands to a prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

Status = Literal["pass", "fail", "invalid"]


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
  """A verifier's judgement of one response.

  Attributes:
    status: "pass", "fail", or "invalid" when the verifier itself failed; an
      invalid response is no evidence about the policy and leaves the loss.
    score: The verifier's own number, 1.0 for a right answer. Diagnostics only:
      partial credit is easy to exploit, so train on `reward`.
    reason: Why the response did not pass, in one line; "" for a pass.
    answer: The text that was judged.
  """

  status: Status
  score: float
  reason: str
  answer: str

  @property
  def reward(self) -> float:
    """1.0 for a pass, else 0.0."""
    return 1.0 if self.status == "pass" else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Puzzle:
  """One question with everything its verifier needs.

  Attributes:
    id: "family/split/index", unique within a run, such as "gcd/train/123".
    family: The task it was drawn from.
    question: The text for the prompt.
    entry: The second argument of the task's `verify`.
  """

  id: str
  family: str
  question: str
  entry: Mapping[str, Any]
