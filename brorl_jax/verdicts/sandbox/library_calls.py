"""Library calls on model text that a sandboxed worker answers.

A call takes and returns JSON values. A process that takes too long is killed,
so nothing here measures time. If a call raises, the verifier has failed. Only
workers run calls: jail.ask("symbolic", answer, reference).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class LibraryCall:
  """A function and the process that it needs."""

  function: Callable[..., Any]  # from JSON values to a JSON value
  # The function may execute model text. Without isolation the call is refused.
  isolated: bool = False
  # Executed text could affect the next call, so the process that ran it answers
  # no other.
  fresh: bool = False


def symbolic(answer: str, gold: str) -> bool:
  """Whether two LaTeX expressions are equal; see math/symbolic.py."""
  from brorl_jax.verdicts.math import symbolic

  return symbolic.symbolic(answer, gold)


def gym(answer: str, entry: Mapping[str, Any]) -> float | dict[str, str]:
  """The score of a reasoning-gym scorer.

  Returns:
    The score, or {"raised": type of the exception}. Most scorers raise only on
    malformed answers.
  """
  scorer = _scorer(entry["metadata"]["source_dataset"])
  try:
    return float(scorer(answer, entry))
  except MemoryError:
    raise  # the verifier failed, not the answer
  except Exception as error:
    return {"raised": type(error).__name__}


def instruction(kind: str, kwargs: Mapping[str, Any], response: str) -> bool:
  """Whether a response follows an instruction; see if_library.py."""
  from brorl_jax.verdicts.instructions import if_library

  return if_library.checked(kind, kwargs, response)


LIBRARY_CALLS: Mapping[str, LibraryCall] = {
  "symbolic": LibraryCall(symbolic, isolated=True),
  # The scorers of these tasks execute the answer; see verdicts/gym.
  "gym": LibraryCall(gym, isolated=True, fresh=True),
  "instruction": LibraryCall(instruction),
}


def preload() -> None:
  """Imports the installed libraries and runs each once, which takes seconds.

  A worker could not: it may not read every file, and would pay each time.
  """
  logging.disable(logging.CRITICAL)  # else one warning per answer
  for warm in (_warm_symbolic, _warm_gym, _warm_instructions):
    try:
      warm()
    except (ImportError, LookupError):
      pass  # an optional extra; a call that needs it names it


def _warm_symbolic() -> None:
  for answer, gold in ((r"\sqrt{2}+1", r"1+\sqrt{2}"), ("x<2", r"(-\infty,2)")):
    symbolic(answer, gold)


def _warm_gym() -> None:
  from brorl_jax.verdicts.gym import JAILED

  for name in sorted(JAILED):
    _scorer(name)


def _warm_instructions() -> None:
  instruction("count:numbers", {"N": 1}, "one 1")


@functools.cache
def _scorer(name: str) -> Callable[[str, Mapping[str, Any]], float]:
  # Cached by task: some data sets read a book when they are built.
  from brorl_jax.verdicts.gym.tables import library

  return library().get_score_answer_fn(name)
