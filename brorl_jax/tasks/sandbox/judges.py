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
  """Whether two LaTeX expressions are equal, as math-verify sees it.

  Args:
    answer: The model's, without \\boxed and dollars.
    gold: The right one, likewise.
  """
  parse, verify, config = _math_verify()
  parsed = [
    parse(
      f"${text}$",
      extraction_config=[config],
      fallback_mode="no_fallback",
      parsing_timeout=None,  # its clock does not stop C code; the kill does
    )
    for text in (gold, answer)
  ]
  return bool(
    all(parsed)
    and verify(
      *parsed,
      # Rounding at six places, the default, holds 1e-7 equal to 2e-7.
      float_rounding=30,
      numeric_precision=40,
      strict=True,
      timeout_seconds=None,
    )
  )


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
  """Whether a response follows an instruction of IFEval or IFBench.

  Args:
    kind: The checker's name in if-verifiable, such as
      "length_constraints:number_words".
    kwargs: What its description is built from.
    response: The model's.
  """
  for registry in _instructions():
    if kind in registry:
      checker = registry[kind](kind)
      checker.build_description(**kwargs)
      return bool(response.strip() and checker.check_following(response))
  raise LookupError(f"if-verifiable has no instruction {kind!r}")


JUDGES: Mapping[str, Judge] = {
  "symbolic": Judge(symbolic, walls=True),
  "gym": Judge(gym),
  # For the tasks whose scorer executes the answer.
  "gym_executing": Judge(gym, walls=True, fresh=True),
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
    except ImportError:
      pass  # an extra; a judge that is asked all the same says which


def _warm_symbolic() -> None:
  pairs = (
    (r"\frac{1}{2}", "0.5"),
    (r"\sqrt{2}+1", r"1+\sqrt{2}"),
    ("x^2+2x+1", "(x+1)^2"),
    ("(0,1]", "(0,1]"),
    (r"\{1,2\}", r"\{2,1\}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}"),
    (r"\sin(x)", r"\cos(x)"),
    ("x=3", "3"),
    ("x<2", r"(-\infty,2)"),
    (r"50\%", r"\frac{1}{2}"),
  )
  for answer, gold in pairs:
    symbolic(answer, gold)


def _warm_gym() -> None:
  from brorl_jax.tasks.gym import ALLOWED

  for name in sorted(ALLOWED):
    _scorer(name)


def _warm_instructions() -> None:
  instruction(
    "length_constraints:number_words",
    {"num_words": 1, "relation": "at least"},
    "one",
  )


@functools.cache
def _math_verify() -> tuple[Any, Any, Any]:
  library = _library("math_verify", "math-verify")
  # Not its reader of plain expressions, which is sympy's: that one evaluates.
  return library.parse, library.verify, library.LatexExtractionConfig()


@functools.cache
def _scorer(name: str) -> Callable[[str, Mapping[str, Any]], float]:
  # Once per task: some datasets read a book when they are built.
  return _library("reasoning_gym", "reasoning-gym").get_score_answer_fn(name)


@functools.cache
def _instructions() -> list[Mapping[str, Any]]:
  return [
    _library(
      f"if_verifiable.{family}.instructions_registry", "if-verifiable"
    ).INSTRUCTION_DICT
    for family in ("ifeval", "ifbench")
  ]


def _library(module: str, package: str) -> Any:
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise ImportError(
      f"it needs {package} ({error}); pip install {package}"
    ) from error
