"""Verifiers' libraries on a model's text: what a jailed worker can be asked.

Each judge is a function of plain data with a plain result. It runs in a process
that ends when it takes too long, so nothing here measures time; it may raise,
and the host then knows that the verifier failed. Only workers call judges:
jail.ask("symbolic", answer, gold).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Judge:
  """A function and what it needs around it.

  Attributes:
    function: From values that JSON can hold to one that it can.
    walls: It may execute its text, so that it refuses where walls cannot be
      raised.
    fresh: Text that is executed could leave something behind for the next: the
      worker that ran it never runs another.
  """

  function: Callable[..., Any]
  walls: bool = False
  fresh: bool = False


def symbolic(answer: str, gold: str) -> bool:
  """Whether two LaTeX expressions are equal; see tasks/math/symbolic.py."""
  from brorl_jax.tasks.math import symbolic

  return symbolic.symbolic(answer, gold)


def gym(answer: str, entry: Mapping[str, Any]) -> float | dict[str, str]:
  """A reasoning-gym scorer's number.

  Args:
    answer: The model's.
    entry: The puzzle, with metadata.source_dataset.

  Returns:
    The score, or {"raised": name of the exception's type}: most scorers that
    raise do so on an answer that is no answer.
  """
  scorer = _scorer(entry["metadata"]["source_dataset"])
  try:
    return float(scorer(answer, entry))
  except MemoryError:
    raise  # the verifier's failure, not the answer's
  except Exception as error:
    return {"raised": type(error).__name__}


def instruction(kind: str, kwargs: Mapping[str, Any], response: str) -> bool:
  """Whether a response follows an instruction; see tasks/if_library.py."""
  from brorl_jax.tasks import if_library

  return if_library.checked(kind, kwargs, response)


JUDGES: Mapping[str, Judge] = {
  "symbolic": Judge(symbolic, walls=True),
  # The scorers that are asked here execute the answer, see tasks/gym.
  "gym": Judge(gym, walls=True, fresh=True),
  "instruction": Judge(instruction),
}


def preload() -> None:
  """Imports what is installed and runs it once.

  Both take seconds, and a worker could not do it as well: it cannot read
  everything, and pays again.
  """
  logging.disable(logging.CRITICAL)  # a warning for every answer
  for warm in (_warm_symbolic, _warm_gym, _warm_instructions):
    try:
      warm()
    except (ImportError, LookupError):
      pass  # an extra; a judge that is asked all the same says which


def _warm_symbolic() -> None:
  for answer, gold in ((r"\sqrt{2}+1", r"1+\sqrt{2}"), ("x<2", r"(-\infty,2)")):
    symbolic(answer, gold)


def _warm_gym() -> None:
  from brorl_jax.tasks.gym import JAILED

  for name in sorted(JAILED):
    _scorer(name)


def _warm_instructions() -> None:
  instruction("count:numbers", {"N": 1}, "one 1")


@functools.cache
def _scorer(name: str) -> Callable[[str, Mapping[str, Any]], float]:
  # Once per task: some datasets read a book when they are built.
  return _library("reasoning_gym", "reasoning-gym").get_score_answer_fn(name)


def _library(module: str, package: str) -> Any:
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise ImportError(
      f"it needs {package} ({error}); pip install {package}"
    ) from error
