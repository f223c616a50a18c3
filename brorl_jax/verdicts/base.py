"""What a verifier is given and returns, and what a domain declares."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

Status = Literal["pass", "fail", "invalid"]
# What a verifier runs in the sandbox: programs, or library calls.
Jailed = Literal["", "programs", "libraries"]


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


def judged(fault: str, answer: str) -> Verdict:
  """A pass if there is no fault, else a fail that scores 0."""
  return Verdict("fail" if fault else "pass", float(not fault), fault, answer)


def overlong(answer: str, most: int) -> Verdict | None:
  """A fail if an answer has more characters than allowed."""
  if len(answer) <= most:
    return None
  fault = f"too long: {len(answer)} characters, at most {most}"
  return judged(fault, answer[:most])


def require_text(response: object) -> None:
  """Raises ValueError if a response is no text."""
  if not isinstance(response, str):
    raise ValueError(f"response is a {type(response).__name__}; use a text")


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


def posed(
  example: Example, *, system: str = "", instruction: str = ""
) -> list[dict[str, str]]:
  """The conversation that the policy sees; "" adds nothing.

  Args:
    system: A first message, unless the example has a system message.
    instruction: Lines after the last question.
  """
  messages = [dict(message) for message in example.messages]
  parts = (example.question, instruction)
  messages[-1]["content"] = "\n".join(part for part in parts if part)
  if system and all(message["role"] != "system" for message in messages):
    messages.insert(0, {"role": "system", "content": system})
  return messages


def tagged(text: str) -> str | None:
  """What stands in the last complete `<answer>...</answer>`, stripped."""
  # Not a regular expression, which takes quadratic time on unclosed tags.
  close = text.rfind("</answer>")
  start = text.rfind("<answer>", 0, max(close, 0))
  if start < 0:
    return None
  start += len("<answer>")
  return text[start : text.find("</answer>", start)].strip()


class Field(NamedTuple):
  """A field of the records of one domain.

  Attributes:
    read: Checks the value and returns the value to use. Raises Refused.
    optional: Whether a record may leave it out.
    in_prompt: Whether it is a list of texts that must occur in the prompt,
      because only the verifier reads the field.
  """

  read: Callable[[Any], Any]
  optional: bool = False
  in_prompt: bool = False


@dataclasses.dataclass(frozen=True)
class Family:
  """A task of a generator and its settings, which set the difficulty."""

  name: str  # name of the task in the generator
  # Settings of the generator; others keep their default.
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  weight: float = 1.0  # relative share of the training prompts

  def __hash__(self) -> int:
    # repr, because settings hold lists and dicts. Equality compares fields.
    return hash((self.name, repr(sorted(self.settings.items()))))


class Draw(NamedTuple):
  """Functions that generate the examples of a domain without files.

  Attributes:
    check: Raises ValueError, in one line, if a family cannot be generated.
    example: The example of (family, split, index) for a seed. Splits are
      "train", "heldout" and "warmup".
    heldout: Distinct held-out examples of each family, a given number of each.
    may_draw: Whether training on these tasks may generate this question.
    category: Category of a task for statistics, or None.
    version: Version of the generator, for config.json.
  """

  check: Callable[[Sequence[Family]], None]
  example: Callable[..., Example]
  heldout: Callable[..., list[Example]]
  may_draw: Callable[[Example, Iterable[str]], str]
  category: Callable[[str], str | None]
  version: Callable[[], str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Domain:
  """One kind of question: its data fields, verifier and defaults.

  Attributes:
    name: Name in records and configs.
    verify: Scores a response by its entry in a jail; see pool.Verifier.
    fields: Fields of a record that other domains lack. The first
      holds the reference answer; errors of `check_reference` name it.
    check_reference: From these fields to the verifier's entry. Raises
      ValueError if no response could pass, or if every response would. Imports
      slow libraries when it is called.
    needs_jail: The sandbox that must work before the first response.
    one_answer: Whether a prompt has one right "answer". Then two records with
      the same prompt and different answers are an error.
    task: Name for statistics if a record has none; "" uses its file's name.
  """

  name: str
  verify: Callable[[str, Mapping[str, Any], Any], Verdict]
  fields: Mapping[str, Field]
  check_reference: Callable[[Mapping[str, Any]], Mapping[str, Any]]
  needs_jail: Jailed = ""
  one_answer: bool = False
  task: Callable[[Mapping[str, Any]], str] = lambda fields: ""
