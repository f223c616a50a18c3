"""What a verifier says of a response, and what a domain hands to a prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Status = Literal["pass", "fail", "invalid"]
Domain = Literal["math", "code", "stem", "gym", "instructions"]
DOMAINS: tuple[Domain, ...] = ("math", "code", "stem", "gym", "instructions")


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
  """A verifier's judgement of one response.

  Attributes:
    status: "pass", "fail", or "invalid" when the verifier itself failed; an
      invalid response is no evidence about the policy and leaves the loss.
    score: The verifier's own number, 1.0 for a right answer; where there are
      parts, such as the tests of a program, the share that is right.
    reason: Why the response did not pass: a code of a few words, and after a
      colon what more there is to say, in one line; "" for a pass.
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

  @property
  def code(self) -> str:
    """The reason without its details, for counting."""
    return self.reason.partition(":")[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
  """One question with everything its verifier needs.

  Attributes:
    id: Unique within a run, such as "gcd/train/123".
    domain: Which verifier judges the responses.
    task: What it is counted under: the gym's task, or the source of the data.
    messages: The conversation so far, each with "role" and "content"; the last
      one is the user's.
    entry: The verifier's second argument, as JSON would hold it.
  """

  id: str
  domain: Domain
  task: str
  messages: Sequence[Mapping[str, str]]
  entry: Mapping[str, Any]

  @property
  def question(self) -> str:
    """What the user asked last."""
    return self.messages[-1]["content"]
