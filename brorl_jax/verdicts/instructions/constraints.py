"""Instruction following, in the format of IFEval.

A question's entry lists what its text asks for:

    {"instructions": [
      {"id": "length_constraints:number_words",
       "kwargs": {"relation": "at least", "num_words": 300}},
      {"id": "punctuation:no_comma", "kwargs": {}}]}

24 kinds are built in (`checkers` lists the differences from IFEval). The others
come from a library (`if_library`) and run in the jail.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from brorl_jax.verdicts import strict_json
from brorl_jax.verdicts.base import Domain, Field, Verdict, judged, require_text
from brorl_jax.verdicts.instructions import if_library
from brorl_jax.verdicts.instructions.checkers import BUILT_IN
from brorl_jax.verdicts.sandbox import jail as jails
from brorl_jax.verdicts.strict_json import Refused, show
from brorl_jax.verdicts.strict_json import kind as type_of

MAX_SHOWN = 1_000  # characters of the response that a verdict keeps


def verify(
  response: str,
  instructions: Sequence[Mapping[str, Any]],
  *,
  jail: Any = None,
) -> Verdict:
  """Scores a response by the share of instructions that it follows.

  Only the text after the last "</think>" counts, stripped. If it is empty or
  has an unclosed "<think>", the response follows no instruction, not even "no
  comma".

  Args:
    jail: Where the library's checkers run; None: this thread's jail. Built-in
      kinds need none.

  Returns:
    A pass if all instructions are followed. Invalid if the library's checker
    was late or died.

  Raises:
    ValueError: The response is not a text, or an instruction is wrong.
  """
  require_text(response)
  wanted = _read_all(instructions)
  text = response.rpartition("</think>")[2].strip()
  if not text or "<think>" in text:
    reason = "unfinished thinking" if text else "empty response"
    return judged(reason, text[:MAX_SHOWN])
  shown = text[:MAX_SHOWN]
  missed = []
  for kind, kwargs in wanted:
    if kind in BUILT_IN:
      followed = BUILT_IN[kind].followed(text, **kwargs)
    else:
      try:
        followed = (jail or jails.mine()).ask("instruction", kind, kwargs, text)
      except jails.Failed as error:
        return Verdict("invalid", 0.0, f"verifier failed: {error}", shown)
    if not followed:
      missed.append(kind)
  if missed:
    score = 1.0 - len(missed) / len(wanted)
    return Verdict("fail", score, f"not followed: {', '.join(missed)}", shown)
  return judged("", shown)


def check(instructions: Sequence[Mapping[str, Any]]) -> None:
  """Refuses instructions that could not be checked later.

  Args:
    instructions: Each with "id" and, if its kind has arguments, "kwargs".
      Arguments that are None are ignored.

  Raises:
    ValueError: With instruction, argument, value and remedy, in one line.
  """
  for kind, kwargs in _read_all(instructions):
    if kind not in BUILT_IN:
      if_library.check(kind, kwargs)


def _read_all(instructions: Any) -> list[tuple[str, dict[str, Any]]]:
  if not isinstance(instructions, Sequence) or isinstance(instructions, str):
    raise ValueError(
      f"instructions is a {type(instructions).__name__}; use a list"
    )
  if not instructions:
    raise ValueError("instructions is empty; give at least one")
  return [_read(i, item) for i, item in enumerate(instructions)]


def _read(i: int, item: Any) -> tuple[str, dict[str, Any]]:
  if not isinstance(item, Mapping) or not isinstance(item.get("id"), str):
    raise ValueError(
      f'instructions[{i}] = {item!r}; use an object with an "id"'
    )
  kind, kwargs = item["id"], item.get("kwargs") or {}
  if not isinstance(kwargs, Mapping):
    raise ValueError(
      f"instruction {kind!r}: kwargs = {kwargs!r}; use an object"
    )
  for field in item.keys() - {"id", "kwargs"}:
    raise ValueError(
      f"instruction {kind!r}: unknown field {field!r}; use id and kwargs"
    )
  given = {name: value for name, value in kwargs.items() if value is not None}
  if kind in BUILT_IN:
    return kind, _arguments(kind, given)
  _refuse_unknown(kind)
  return kind, given


def _arguments(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
  wanted = BUILT_IN[kind].arguments
  where = f"instruction {kind!r}"
  for name, value in given.items():
    if name not in wanted:
      close = difflib.get_close_matches(str(name), list(wanted), n=1)
      remedy = (
        f"did you mean {close[0]}?"
        if close
        else f"use {', '.join(wanted) or 'none'}"
      )
      raise ValueError(
        f"{where}: kwarg {name} = {value!r} is unknown; {remedy}"
      )
  arguments = {}
  for name, read in wanted.items():
    if name not in given:
      raise ValueError(f"{where}: kwarg {name} is missing; add it")
    try:
      arguments[name] = read(given[name])
    except ValueError as error:
      raise ValueError(
        f"{where}: kwarg {name} = {given[name]!r}; use {error}"
      ) from None
  if arguments.get("nth_paragraph", 0) > arguments.get("num_paragraphs", 0):
    raise ValueError(
      f"{where}: nth_paragraph = {arguments['nth_paragraph']} exceeds"
      f" num_paragraphs = {arguments['num_paragraphs']}; lower it"
    )
  return arguments


def _refuse_unknown(kind: str) -> None:
  if kind in if_library.KINDS:
    return
  known = [*BUILT_IN, *if_library.KINDS]
  close = difflib.get_close_matches(kind, known, n=1)
  remedy = (
    f"did you mean {close[0]!r}?"
    if close
    else "use one of checkers.BUILT_IN or if_library.KINDS"
  )
  raise ValueError(f"instruction {kind!r} is unknown; {remedy}")


def _instructions(value: Any) -> list[dict[str, Any]]:
  if not isinstance(value, list) or not value:
    raise Refused(
      "instructions", f"{show(value)}; use a list with at least one"
    )
  for i, item in enumerate(value):
    field = f"instructions[{i}]"
    if not isinstance(item, dict) or item.keys() != {"id", "kwargs"}:
      raise Refused(
        field, f"{show(item)}; use an object with id and kwargs only"
      )
    if not isinstance(item["id"], str):
      raise Refused(f"{field}.id", f"{type_of(item['id'])}; write it as text")
    strict_json.mapping(item["kwargs"], f"{field}.kwargs")
  return value


def _entry(record: Mapping[str, Any]) -> Mapping[str, Any]:
  check(record["instructions"])
  return record


DOMAIN = Domain(
  name="instructions",
  verify=lambda response, entry, jail: verify(response, **entry, jail=jail),
  fields={"instructions": Field(_instructions)},
  check_reference=_entry,
  needs_jail="libraries",
)
