"""The class of a domain; the folder of each domain declares one value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from brorl_jax.verdicts.base import Example, Verdict

# What a verifier runs in the sandbox: programs, or library calls.
Jailed = Literal["", "programs", "libraries"]


class Field(NamedTuple):
  """A field of the records of one domain.

  Attributes:
    read: Checks the value, given the text of all messages, and returns the
      value to use. Raises Refused.
    optional: Whether a record may leave it out.
  """

  read: Callable[[Any, str], Any]
  optional: bool = False


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
    one: The example of (family, split, index) for a seed. Splits are "train",
      "heldout" and "warmup".
    heldout: Distinct held-out examples of each family, a given number of each.
    may_draw: Whether training on these tasks may generate this question.
    category: Category of a task for statistics, or None.
    version: Version of the generator, for config.json.
  """

  check: Callable[[Sequence[Family]], None]
  one: Callable[..., Example]
  heldout: Callable[..., list[Example]]
  may_draw: Callable[[Example, Iterable[str]], str]
  category: Callable[[str], str | None]
  version: Callable[[], str]


def _unnamed(_: Mapping[str, Any]) -> str:
  return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Domain:
  """One kind of question: its data fields, verifier and defaults.

  Attributes:
    name: Name in records and configs.
    verify: Scores a response by its entry in a jail; see pool.Verifier.
    fields: Fields of a record in addition to those of every domain. The first
      holds the reference answer; errors of `check_reference` name it.
    check_reference: From these fields to the verifier's entry. Raises
      ValueError if no response could pass, or if every response would. Imports
      slow libraries when it is called.
    needs_jail: The sandbox that must work before the first response.
    one_answer: Whether a prompt has one right "answer". Then two records with
      the same prompt and different answers are an error.
    task: Name for statistics if a record has none; "" uses its file's name.
    draw: Functions that generate examples; None if there are only files.
  """

  name: str
  verify: Callable[[str, Mapping[str, Any], Any], Verdict]
  fields: Mapping[str, Field]
  check_reference: Callable[[Mapping[str, Any]], Mapping[str, Any]]
  needs_jail: Jailed = ""
  one_answer: bool = False
  task: Callable[[Mapping[str, Any]], str] = _unnamed
  draw: Draw | None = None
