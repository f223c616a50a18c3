"""The domain of science: multiple choice and short answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from brorl_jax.verdicts import math, strict_json
from brorl_jax.verdicts.base import (
  Domain,
  Field,
  Verdict,
  judged,
  overlong,
  require_text,
  tagged,
)
from brorl_jax.verdicts.math.gate import boxed, unboxed
from brorl_jax.verdicts.stem import quantities, wording
from brorl_jax.verdicts.strict_json import Refused, kind

MAX_ANSWER = 1_000  # characters; the longest choice of GPQA-diamond has 400
MAX_GOLD = 80  # of a short answer; sentences cannot be compared by spelling
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

_SPOKEN = re.compile(
  r"\b(?:answer|(?:correct|right) (?:option|choice))[*_\s]*+(?:is\b|:)"
  r"[*_:\s]*+([^\n]*)",
  re.IGNORECASE,
)
# Searched in the few characters before what _SPOKEN found.
_DENIED = re.compile(
  r"(?:\b(?:can)?not|\bnever|\bnon|n['\u2019]t)[*_\s-]+"
  r"(?:(?:the|an?|my|our|your|be|final|best|only|correct|right)[*_\s]+){0,3}$",
  re.IGNORECASE,
)
_MAX_DENIAL = 40
_LETTER = re.compile(
  r"(?:(?:option|choice)\s+)?[(\[]?([A-Za-z])[)\].:]*", re.IGNORECASE
)
_LETTER_AND_TEXT = re.compile(
  r"[(\[]?([A-Za-z])(?:[)\].:]+|\s+-|(?=\s))\s*(.+)"
)
_HEDGES = re.compile(
  r"\b(?:or|either|maybe|perhaps|possibly|probably|depends|varies|e\.g|etc)\b",
  re.IGNORECASE,
)
_EXPRESSION = re.compile(r"\\[a-zA-Z]+|[=^*/+<>(\d]")
_LONG_WORD = re.compile(r"[^\W\d_]{4}")


def verify(
  response: str,
  answer: str,
  *,
  choices: Sequence[str] | None = None,
  jail: Any = None,
) -> Verdict:
  r"""Scores a response by the reference answer.

    verify(r"... so \boxed{B}", "B", choices=["ribosome", "nucleus"])
    verify("The answer is 3.0e8 m/s.", r"3.00 \times 10^8 m/s")

  The answer (see `find`) must be the answer and nothing else, apart from
  punctuation and formatting: "B or C", "B, because..." and "A B C D" fail.

  With choices, it must give the right letter, "B", "b", "(B)", "B)", "option B"
  or "\text{B}"; or the right letter and that choice's text, "B. nucleus"; or
  the text alone. Texts are compared by `wording`.

  Without, what is equal:
    words and formulae by spelling, as `wording.key` says
    a number with a unit, as `quantities.same` says: rounding is allowed for a
      measurement, another unit is not
    a letter, in its case, as with choices
    an expression by `math.verify`, if the right answer is one

  Args:
    answer: What is right, as `check_reference` returns it.
    choices: The texts of the choices A, B, ...
    jail: For `math.verify`; this thread's by default, and only if needed.

  Returns:
    A pass or a fail. Invalid if the jailed part failed.

  Raises:
    ValueError: If the response is no text, or the answer no letter of a choice.
  """
  require_text(response)
  given = find(response)
  if not given:
    return judged("no answer" if given is None else "empty answer", "")
  if fail := overlong(given, MAX_ANSWER):
    return fail
  if choices is not None:
    letters = LETTERS[: len(choices)]
    if len(answer) != 1 or answer not in letters:
      raise ValueError(
        f"answer = {answer!r}; with {len(choices)} choices use one of {letters}"
      )
    letter, fault = _read_choice(given, choices)
    wrong = "" if letter == answer else "wrong answer"
    return judged(fault or wrong, given)
  if len(answer) == 1 and answer in LETTERS:
    return judged(_letter_fault(given, answer), given)
  return _short(given, answer, jail)


def find(response: str) -> str | None:
  r"""The text of the answer, or None if there is none.

  It is the first of these that exists after the last "</think>":

  1. the last complete \boxed{...};
  2. the last <answer>...</answer>;
  3. the rest of the line after the last "answer:" or "answer is", or "correct
     option is", "right choice:" and the like, in any case; the next line that
     is not blank if the rest is. Not after a "not", as in "not the right
     choice:".
  """
  tail = response.rpartition("</think>")[2]
  if "<think>" in tail:
    return None  # still thinking
  for answer in (boxed(tail), tagged(tail)):
    if answer is not None:
      return answer
  line = None
  for spoken in _SPOKEN.finditer(tail):
    before = tail[max(0, spoken.start() - _MAX_DENIAL) : spoken.start()]
    if not _DENIED.search(before):
      line = spoken[1].strip("*_ ").removesuffix(".").strip("*_ ")
  return line


def check_reference(answer: str, choices: Sequence[str] | None = None) -> str:
  """The right answer as `verify` takes it.

  Args:
    answer: As a data set has it. With choices, a letter, a choice's text or
      both.
    choices: The texts of the choices A, B, ...

  Returns:
    With choices, the letter. Else the answer without a box and outer spaces.

  Raises:
    ValueError: One line, if it is empty, names no choice, hedges ("4 or 5") or
      is a sentence of more than 80 characters, or if the choices are fewer than
      2, more than 26, blank or the same.
  """
  if not isinstance(answer, str):
    raise ValueError(f"answer is a {type(answer).__name__}; use a text")
  bare = unboxed(answer)
  if not bare.strip():
    raise ValueError("answer is empty; write the reference answer")
  if choices is not None:
    _check_choices(choices)
    letter, fault = _read_choice(bare, choices)
    if letter is None:
      raise ValueError(
        f"answer = {answer[:MAX_GOLD]!r}: {fault}; use one of A to"
        f" {LETTERS[len(choices) - 1]} or the text of a choice"
      )
    return letter
  if len(bare) > MAX_GOLD:
    raise ValueError(
      f"answer has {len(bare)} characters, more than {MAX_GOLD}: a sentence"
      " cannot be compared by spelling; drop the line"
    )
  hedge = _HEDGES.search(wording.plain(bare))
  if hedge or not wording.key(bare):
    fault = f"is ambiguous ({hedge[0]!r})" if hedge else "has no content"
    raise ValueError(f"answer = {bare!r} {fault}; drop the line")
  return bare


def _short(given: str, answer: str, jail: Any) -> Verdict:
  if quantities.same(given, answer):
    return judged("", given)
  right = quantities.read(answer)
  if right is not None and right.known:
    # Not by spelling, which ignores case: MeV is not meV.
    if right.unit or quantities.read(given) is not None:
      return judged("wrong answer", given)
  elif wording.same(given, answer):
    return judged("", given)
  elif not _is_expression(answer):
    return judged("wrong answer", given)
  verdict = math.verify(f"\\boxed{{{given}}}", answer, jail=jail)
  return Verdict(verdict.status, verdict.score, verdict.reason, given)


def _letter_fault(given: str, answer: str) -> str:
  letter = _LETTER.fullmatch(wording.unwrapped(given))
  if letter:
    return "" if letter[1] == answer else "wrong answer"
  return "several letters" if _sprays(given) else "not a letter"


def _read_choice(given: str, choices: Sequence[str]) -> tuple[str | None, str]:
  """The letter of the chosen choice, or None and the reason."""
  letters = LETTERS[: len(choices)]
  bare = wording.unwrapped(given)
  if alone := _LETTER.fullmatch(bare):
    letter = alone[1].upper()
    if letter not in letters:
      return None, f"no such choice: {letter}"
    return letter, ""
  keys = [wording.key(choice) for choice in choices]
  wanted = wording.key(given)
  if wanted in keys:
    return letters[keys.index(wanted)], ""
  both = _LETTER_AND_TEXT.fullmatch(bare)
  if both and both[1].upper() in letters:
    letter = both[1].upper()
    if wording.key(both[2]) == keys[letters.index(letter)]:
      return letter, ""
  return None, "several letters" if _sprays(bare) else "not a choice"


def _sprays(text: str) -> bool:
  """Whether single capitals of more than one kind stand in a text."""
  return len(set(re.findall(r"(?<![^\W_])[A-Z](?![^\W_])", text))) > 1


def _check_choices(choices: Sequence[str]) -> None:
  if isinstance(choices, str) or not isinstance(choices, Sequence):
    raise ValueError(
      f"choices is a {type(choices).__name__}; use a list of texts"
    )
  if not 2 <= len(choices) <= len(LETTERS):
    raise ValueError(
      f"choices has {len(choices)} texts; use 2 to {len(LETTERS)}"
    )
  seen: dict[tuple[str, ...], str] = {}
  for letter, choice in zip(LETTERS, choices, strict=False):
    if not isinstance(choice, str) or not choice.strip():
      raise ValueError(f"choice {letter} = {choice!r}; write its text")
    same = seen.setdefault(wording.key(choice), letter)
    if same != letter:
      raise ValueError(
        f"choices {same} and {letter} are both {choice!r}; drop the question"
      )
    alone = _LETTER.fullmatch(wording.unwrapped(choice))
    others = LETTERS[: len(choices)].replace(letter, "")
    if alone and alone[1].upper() in others:
      raise ValueError(
        f"choice {letter} = {choice!r} is the letter of another choice; drop"
        " the question"
      )


def _is_expression(answer: str) -> bool:
  """Whether it may be a math formula, not chemistry or words."""
  text = wording.plain(answer)
  return (
    _EXPRESSION.search(text) is not None
    and _LONG_WORD.search(re.sub(r"\\[A-Za-z]+", " ", text)) is None
    and not any(map(wording.is_formula, text.split()))
  )


def _choices(value: Any) -> list[str]:
  if not isinstance(value, list):
    raise Refused("choices", f"{kind(value)}; write a list of texts")
  return [strict_json.text(c, f"choices[{i}]") for i, c in enumerate(value)]


DOMAIN = Domain(
  name="stem",
  verify=lambda response, entry, jail: verify(response, **entry, jail=jail),
  fields={
    "answer": Field(strict_json.answer),
    "choices": Field(_choices, optional=True, in_prompt=True),
  },
  check_reference=lambda record: {
    **record,
    "answer": check_reference(**record),
  },
  needs_jail="libraries",
  one_answer=True,
)
