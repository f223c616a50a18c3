"""A user's reward function: its signature, and its results as verdicts."""

from __future__ import annotations

import inspect
import json
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any, NamedTuple, get_args

from brorl_jax.verdicts.base import Status, Verdict
from brorl_jax.verdicts.own import named
from brorl_jax.verdicts.strict_json import show

MAX_ANSWER = 1_000  # characters of a response that serve as its answer
_EITHER = "(response, example, step) or (responses, example, step)"
_NUMBER = "a number or a Verdict"


class Function(NamedTuple):
  """A reward function."""

  name: str  # the name as given, such as "mine.py:score"
  call: Callable[..., Any]
  whole: bool  # whether it takes all responses to a prompt at once
  takes: frozenset[str]  # which of "example" and "step" it takes
  digest: str  # hash of the file that defines it; see named.Named


def load(name: str, *, what: str) -> Function:
  """Imports a function and checks its signature.

  Raises:
    ValueError: It cannot be imported or has another signature; one line.
  """
  if ":" not in name:
    raise ValueError(
      f"{what} = {name!r}: no function named; write 'file.py:function' or "
      "'package.module:function'"
    )
  imported = named.find(name, {}, what=what)
  where = f"{what} = {name!r}"
  if inspect.iscoroutinefunction(imported.value):
    raise ValueError(f"{where} is async; use a function with asyncio.run in it")
  try:
    parameters = inspect.signature(imported.value).parameters
  except (TypeError, ValueError):
    raise ValueError(
      f"{where} has no readable signature; use {_EITHER}"
    ) from None
  first = next(iter(parameters), "")
  if first not in ("response", "responses"):
    raise ValueError(f"{where} takes ({', '.join(parameters)}); use {_EITHER}")
  for other in [*parameters.values()][1:]:
    optional = other.default is not other.empty
    if other.name not in ("example", "step") and not optional:
      raise ValueError(f"{where} has parameter {other}; use {_EITHER}")
  takes = frozenset(parameters) & {"example", "step"}
  return Function(
    name, imported.value, first == "responses", takes, imported.digest
  )


def verdicts(
  function: Function,
  responses: Sequence[str],
  example: str,
  step: int | None,
) -> Iterator[Verdict]:
  """Yields one verdict per response; never raises.

  `example`, a JSON text, is parsed for each call, so that a call cannot change
  the argument of the next.
  """
  # Passed by name, so that the order of parameters is free.
  first = "responses" if function.whole else "response"
  calls = [[*responses]] if function.whole else responses
  for given in calls:
    extra = {"example": json.loads(example), "step": step}
    extra = {k: v for k, v in extra.items() if k in function.takes}
    count = len(responses) if function.whole else 1
    texts = responses if function.whole else (given,)
    try:
      value = function.call(**{first: given}, **extra)
      values = _values(value, count) if function.whole else [value]
    except BaseException as error:  # user code may raise SystemExit too
      yield from [
        invalid(f"{_where(function, error)}: {_message(error)}")
      ] * count
      continue
    for result, text in zip(values, texts, strict=True):
      yield _verdict(function, result, str(text))


def invalid(why: str) -> Verdict:
  """The verdict if the function failed."""
  line = " ".join(why.split())[:400]
  return Verdict("invalid", 0.0, f"reward failed: {line}", "")


class _Returned(Exception):
  """A function returned an unusable value."""


def _values(value: Any, count: int) -> list[Any]:
  """The values that a function returned for a group."""
  text = isinstance(value, str | bytes | dict | Verdict)
  try:
    values = None if text else [*value]
  except TypeError:
    values = None
  if values is None:
    raise _Returned(f"returned {show(value)}; return a list of {count}")
  if len(values) != count:
    raise _Returned(
      f"returned {len(values)} values for {count} responses; return one each"
    )
  return values


def _verdict(function: Function, value: Any, response: str) -> Verdict:
  try:
    if isinstance(value, Verdict):
      return _checked(value, response)
    score = _number(value)
  except BaseException as error:  # float() of a user's object may raise
    return invalid(f"{_where(function, error)}: {_message(error)}")
  status, reason = ("pass", "") if score >= 1.0 else ("fail", "below 1")
  return Verdict(status, score, reason, response[:MAX_ANSWER])


def _number(value: Any) -> float:
  """A float from a bool, int, float, or a scalar of numpy or torch."""
  try:
    if isinstance(value, str | bytes | bytearray) or getattr(value, "ndim", 0):
      raise TypeError  # float() accepts these
    number = float(value)
  except Exception:
    raise _Returned(f"returned {show(value)}; return {_NUMBER}") from None
  if not math.isfinite(number):
    raise _Returned(f"returned {number}; return a finite number")
  return number


def _checked(verdict: Verdict, response: str) -> Verdict:
  statuses = get_args(Status)
  if verdict.status not in statuses:
    raise _Returned(
      f"returned a Verdict with status {show(verdict.status)}; use one of "
      f"{', '.join(statuses)}"
    )
  for field in ("reason", "answer"):
    if not isinstance(value := getattr(verdict, field), str):
      raise _Returned(
        f"returned a Verdict with {field} {show(value)}; use a text"
      )
  return Verdict(
    verdict.status,
    _number(verdict.score),
    " ".join(verdict.reason.split()),
    (verdict.answer or response)[:MAX_ANSWER],
  )


def _where(function: Function, error: BaseException) -> str:
  """Its name, and the last line of its file that ran, or its first."""
  code = _code(function.call)
  if code is None:
    return function.name
  lines = [
    frame.lineno
    for frame in traceback.extract_tb(error.__traceback__)
    if frame.filename == code.co_filename
  ]
  return f"{function.name}, line {(lines or [code.co_firstlineno])[-1]}"


def _code(call: Callable[..., Any]) -> CodeType | None:
  inner = inspect.unwrap(call)
  code = getattr(inner, "__code__", None)
  return code or getattr(type(inner).__call__, "__code__", None)


def _message(error: BaseException) -> str:
  text = " ".join(str(error).split())
  if isinstance(error, _Returned):
    return text
  return f"{type(error).__name__}: {text}" if text else type(error).__name__
