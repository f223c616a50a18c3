"""The verdict of a verifier, and the example that it checks against."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Status = Literal["pass", "fail", "invalid"]


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
  """The result of checking one response.

  Attributes:
    status: "pass", "fail", or "invalid" if the verifier itself failed. Invalid
      responses say nothing about the policy and are left out of the loss.
    score: 1.0 for a right answer. An answer with parts, such as a program with
      several tests, scores the share that is right.
    reason: Why the response did not pass: a code of a few words and, after a
      colon, details, in one line; "" for a pass.
    answer: The part of the response that was checked.
  """

  status: Status
  score: float
  reason: str = ""
  answer: str = ""

  @property
  def reward(self) -> float:
    """1.0 for a pass, else 0.0."""
    return 1.0 if self.status == "pass" else 0.0

  @property
  def code(self) -> str:
    """The reason without its details, for counts."""
    return self.reason.partition(":")[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
  """One question with everything its verifier needs.

  Attributes:
    id: Unique within a run, such as "gcd/train/123".
    domain: Name of the domain whose verifier scores the responses.
    task: Name for statistics: the gym task, or the source of the data.
    messages: The conversation, each message with "role" and "content". The last
      message is the user's.
    entry: Second argument of the verifier, a JSON object.
    columns: Other fields of the record; only own reward functions read them.
  """

  id: str
  domain: str
  task: str
  messages: Sequence[Mapping[str, str]]
  entry: Mapping[str, Any]
  columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def question(self) -> str:
    """The last message of the user."""
    return self.messages[-1]["content"]
