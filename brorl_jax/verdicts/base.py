"""What a verifier is given and returns, what a domain declares, and defaults.

Imports nothing of ours: who reads only a config loads no verifier.
"""

import bisect
import dataclasses
import hashlib
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

Status = Literal["pass", "fail", "invalid"]
Values = Mapping[str, Any]  # by name: of a record, a config, or metrics
# What a verifier runs in the sandbox: programs, or library calls.
Jailed = Literal["", "programs", "libraries"]
MAX_REASON = 1000  # characters


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
  """The result of checking one response."""

  # "invalid": the verifier failed; the loss leaves the response out.
  status: Status
  # 1.0 for a right answer; of one with parts, such as tests, the right share.
  score: float
  # A code of a few words and, after a colon, details, in one line; or "".
  reason: str = ""
  answer: str = ""  # the part of the response that was checked

  def __post_init__(self):
    if isinstance(self.reason, str) and len(self.reason) > MAX_REASON:
      object.__setattr__(self, "reason", self.reason[: MAX_REASON - 1] + "…")

  @property
  def reward(self) -> float:
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


def require_text(value: object, name: str = "response") -> None:
  """Raises ValueError if a value is no text."""
  if not isinstance(value, str):
    raise ValueError(f"{name} is a {type(value).__name__}; use a text")


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
  """One question with everything its verifier needs."""

  id: str  # unique within a run, such as "gcd/train/123"
  domain: str  # name of the domain whose verifier scores the responses
  task: str  # for statistics: the gym task, or the source of the data
  # Each with "role" and "content"; the last is the user's.
  messages: Sequence[Mapping[str, str]]
  entry: Values  # second argument of the verifier, a JSON object
  # Other fields of the record; only own reward functions read them.
  columns: Values = dataclasses.field(default_factory=dict)

  @property
  def question(self) -> str:
    return self.messages[-1]["content"]


def posed(
  example: Example, *, system: str = "", instruction: str = ""
) -> list[dict[str, str]]:
  """The conversation that the policy sees.

  `system` becomes a first message, unless the example has a system message;
  `instruction` follows the last question. An empty text adds nothing.
  """
  messages = [dict(message) for message in example.messages]
  parts = (example.question, instruction)
  messages[-1]["content"] = "\n".join(part for part in parts if part)
  if system and all(message["role"] != "system" for message in messages):
    messages.insert(0, {"role": "system", "content": system})
  return messages


# What opens the thinking of one family of models or another, and closes it.
_NAMES = "think thinking thought reasoning seed:think".split()
_THINKING = {f"<{name}>": f"</{name}>" for name in _NAMES} | {
  "<|begin_of_thought|>": "<|end_of_thought|>",  # Sky-T1
  "<|START_THINKING|>": "<|END_THINKING|>",  # Cohere
  "<|channel|>analysis<|message|>": "<|channel|>final<|message|>",  # gpt-oss
  "[THINK]": "[/THINK]",  # Magistral
  "◁think▷": "◁/think▷",  # Kimi
}
_PAIRS = {tag: pair for pair in _THINKING.items() for tag in pair}
# An expression takes 60 times as long if not all that it finds begin alike.
_TAG = re.compile("|".join(re.escape(tag) for tag in _PAIRS if "<" in tag))
_OTHER_TAGS = [tag for tag in _PAIRS if "<" not in tag]


def after_thinking(response: str) -> str:
  """What follows the last closed thinking; "" if one is still open."""
  # The kind of tag that comes first counts: a thought may mention others.
  found = _TAG.search(response)
  first, start = (found[0], found.start()) if found else ("", len(response))
  for tag in _OTHER_TAGS:
    if (at := response.find(tag, 0, start)) >= 0:
      first, start = tag, at
  opens, closes = _PAIRS.get(first, ("", ""))
  answer = response.rpartition(closes)[2] if first else response
  return "" if first and opens in answer else answer


def opened_thinking(prompt: str) -> str:
  """The tag and blanks at the end of a prompt that open thinking, or ""."""
  bare = prompt.rstrip()
  tag = next(filter(bare.endswith, _THINKING), "")
  return tag and tag + prompt[len(bare) :]


def tagged(text: str) -> str | None:
  """What stands in the last complete `<answer>...</answer>`, stripped."""
  # Not a regular expression, which takes quadratic time on unclosed tags.
  start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
  if start < 0:
    return None
  start += len("<answer>")
  return text[start : text.find("</answer>", start)].strip()


class Field(NamedTuple):
  """A field of the records of one domain."""

  read: Callable[[Any], Any]  # returns the value to use, or raises Refused
  optional: bool = False
  # A list of texts that must be in the prompt: only the verifier reads it.
  in_prompt: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Domain:
  """One kind of question: its data fields, verifier and defaults."""

  name: str
  # Scores a response by its entry in a jail; see pool.Verifier.
  verify: Callable[[str, Values, Any], Verdict]
  # What of a response decides its verdict, and is judged once; None: all.
  part: Callable[[str, Values], Any] | None = None
  # Those of a record that other domains lack. The first holds the reference
  # answer; errors of `check_reference` name it.
  fields: Mapping[str, Field]
  # From these fields to the verifier's entry. ValueError if no response could
  # pass, or if every response would. Imports slow libraries when called.
  check_reference: Callable[[Values], Values]
  needs_jail: Jailed = ""  # must work before the first response
  # Two records with the same prompt and different answers are an error.
  one_answer: bool = False
  # Name for statistics if a record has none; "" uses its file's name.
  task: Callable[[Values], str] = lambda fields: ""


# The domain whose examples can be generated (config.data.families).
MADE = "gym"
# The domain of every line if the user brings the reward; no record names it.
OWN = "own"


class Default(NamedTuple):
  """Defaults of a domain in config.data.domains."""

  weight: float = 1.0  # relative share of the training prompts
  instruction: str = ""  # text after every question
  reward: Literal["pass", "score"] = "pass"  # 1 for a pass, or the score


DEFAULTS: Mapping[str, Default] = {
  # The last complete \boxed{} is the answer.
  "math": Default(
    instruction="Think step by step and put the answer into \\boxed{}."
  ),
  # A fenced block is run. As in ProRL, the score is the share of tests.
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


# Which family a training prompt is generated from.


@dataclasses.dataclass(frozen=True)
class Family:
  """A task of a generator and its settings, which set the difficulty."""

  name: str  # name of the task in the generator
  # Settings of the generator; others keep their default.
  settings: Values = dataclasses.field(default_factory=dict)
  weight: float = 1.0  # relative share of the training prompts

  def __hash__(self) -> int:
    # repr, because settings hold lists and dicts. Equality compares fields.
    return hash((self.name, repr(sorted(self.settings.items()))))


POSITIONS = 2**20  # candidates in one step; dynamic sampling stays far below
# 2**64 times the golden ratio's fraction: of all numbers the one of which the
# multiples lie most evenly in [0, 1), however many (Knuth, TAOCP 3, 6.4).
_GOLDEN = 0x9E3779B97F4A7C15


def check_weights(weights: Sequence[float]) -> None:
  """Raises ValueError unless weights are finite, >= 0 and of positive sum."""
  for i, weight in enumerate(weights):
    if not (math.isfinite(weight) and weight >= 0):
      raise ValueError(f"weights[{i}] = {weight!r}; use a finite number >= 0")
  total = sum(weights)  # fsum overflows with an exception, not to inf
  if not (total > 0 and math.isfinite(total)):
    must = "make at least one positive and the sum finite"
    raise ValueError(f"weights = {list(weights)} add up to {total}; {must}")


def pick_family(
  seed: int, step: int, position: int, weights: Sequence[float]
) -> int:
  """The family of one candidate prompt, drawn by weight.

    P(pick = i) = weights[i] / sum(weights), independent over steps

  A pure function, so a resumed run sees the same prompts on any platform.
  Within a step the draws are as even as a lattice makes them: at the first n
  positions they differ from n weights[i] / sum(weights) by about 1, where
  independent draws of 8 prompts from 12 families would leave one family with
  half as many prompts as another after 20 steps. `position` is the place among
  the step's candidates, in [0, 2**20). A zero weight is never picked.
  """
  # A hash, not a random generator: numpy and the standard library may change
  # their streams between versions; BLAKE2 (RFC 7693) cannot.
  at = f"{seed}/{step}".encode()
  digest = hashlib.blake2b(at, digest_size=8, person=b"mixture").digest()
  shift = int.from_bytes(digest, "little")
  # In integers: a product of 2**20 positions would lose digits of the fraction.
  uniform = ((shift + position * _GOLDEN) % 2**64 >> 11) * 2.0**-53
  ends = [*itertools.accumulate(weights)]
  # If rounding puts the threshold at the total, take the last with a weight.
  threshold = min(uniform * sum(weights), math.nextafter(ends[-1], 0.0))
  return bisect.bisect_right(ends, threshold)


def candidate_index(step: int, position: int) -> int:
  """The puzzle index of a candidate, distinct for each (step, position)."""
  if not 0 <= position < POSITIONS:
    raise ValueError(f"position = {position}; use 0 to {POSITIONS - 1}")
  return step * POSITIONS + position
