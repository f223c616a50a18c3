"""Scores a response to a puzzle, and declares the domain.

The task decides on one of three ways. `CHECKS` are our own. The scorers of
`JAILED` evaluate the answer, so a grammar filters it first and they run in a
jail. All other scorers are the library's and run in this process; they neither
execute text nor read settings (the tests check their source).
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from brorl_jax.verdicts import strict_json
from brorl_jax.verdicts.base import (
  Domain,
  Draw,
  Example,
  Family,
  Field,
  Verdict,
  judged,
  overlong,
  require_text,
  tagged,
)
from brorl_jax.verdicts.gym import expressions, families
from brorl_jax.verdicts.gym.checks import CHECKS, FORMS
from brorl_jax.verdicts.gym.tables import (
  CATEGORIES,
  LONGEST,
  MAX_ANSWER,
  library,
  refuse,
)
from brorl_jax.verdicts.sandbox.jail import Failed, Jail, mine
from brorl_jax.verdicts.strict_json import Refused, show

# sympy.parse_expr evaluates Python, and even short expressions can take it
# unbounded time to differentiate and simplify.
JAILED = frozenset({"intermediate_integration"})
_SECONDS = 3.0
_LIBRARY = "reasoning-gym"


def verify(
  response: str, entry: Mapping[str, Any], jail: Jail | None = None
) -> Verdict:
  """Scores a response to a puzzle.

  The answer is the text of the last complete `<answer>...</answer>`, or else
  the whole response, stripped. It passes if the check of the task accepts it or
  the scorer of the task returns 1.0. For scorers that ignore extra text, there
  must be none.

  Args:
    entry: A reasoning-gym item: question, answer, metadata.
    jail: Where scorers that evaluate text run; None: this thread's jail.

  Returns:
    "pass" or "fail". "invalid" only if the verifier failed: the jail did, or
    the scorer raises on the entry's own answer too.

  Raises:
    ValueError: The entry names no task, or one that cannot be scored.
  """
  require_text(response)
  name, oracle = _task_and_oracle(entry)
  answer = tagged(response)
  answer = response.strip() if answer is None else answer
  if not answer:
    return judged("empty answer", answer)
  if fail := overlong(answer, LONGEST.get(name, MAX_ANSWER)):
    return fail
  try:
    return _scored(name, answer, entry, jail)
  except Exception as error:
    reason = f"scorer raised {type(error).__name__}"
    try:
      _scored(name, oracle, entry, jail)
    except Exception:
      return Verdict("invalid", 0.0, f"{reason} on its own answer", answer)
    return judged(reason, answer)


def _scored(
  name: str, answer: str, entry: Mapping[str, Any], jail: Jail | None
) -> Verdict:
  if name in FORMS and not FORMS[name][0].fullmatch(answer):
    return judged(f"refused: not {FORMS[name][1]}", answer)
  if name in CHECKS:
    return judged(CHECKS[name](answer, entry), answer)
  if name in JAILED:
    return _in_jail(answer, entry, jail)
  score = float(_scorer(name)(answer, entry))
  if score >= 1.0 and name in _NOTHING_ELSE:
    if not _NOTHING_ELSE[name](answer, entry["answer"]):
      return judged("text next to the answer", answer)
  return _verdict(score, answer)


def _verdict(score: float, answer: str) -> Verdict:
  if not math.isfinite(score):
    return judged(f"scorer returned {score}", answer)
  if score < 1.0:
    return Verdict("fail", score, "wrong answer", answer)
  return Verdict("pass", score, "", answer)


def _in_jail(
  answer: str, entry: Mapping[str, Any], jail: Jail | None
) -> Verdict:
  metadata = entry["metadata"]
  reason = expressions.refuse_integral(answer, metadata["variable"])
  if reason:
    return judged(f"refused: {reason}", answer)
  asked = {"answer": entry["answer"], "metadata": dict(metadata)}
  try:
    got = (jail or mine()).ask("gym", answer, asked, timeout=_SECONDS)
  except Failed as error:
    return Verdict("invalid", 0.0, f"verifier failed: {error}", answer)
  if isinstance(got, Mapping):
    return judged(f"scorer raised {got['raised']}", answer)
  return _verdict(float(got), answer)


def _task_and_oracle(entry: Mapping[str, Any]) -> tuple[str, str]:
  metadata = entry.get("metadata")
  name = (
    metadata.get("source_dataset") if isinstance(metadata, Mapping) else None
  )
  if not isinstance(name, str):
    raise ValueError(
      "entry.metadata.source_dataset is missing; it must name the task"
    )
  refuse(name, drawn=False)
  oracle = entry.get("answer")
  if not isinstance(oracle, str):
    raise ValueError(f"entry.answer = {oracle!r} of task {name!r}; use a text")
  return name, oracle


@functools.cache
def _scorer(name: str) -> Callable[[str, Mapping[str, Any]], float]:
  # Cached by task: some data sets read a book when they are built.
  return library().get_score_answer_fn(name)


def _same_text(answer: str, oracle: str) -> bool:
  return "".join(answer.lower().split()) == "".join(oracle.lower().split())


def _same_words(answer: str, oracle: str) -> bool:
  def words(text: str) -> list[str]:
    parts = re.sub("[.,()]", " ", text.lower()).split()
    return sorted(w for w in parts if w not in ("is", "a", "an", "and"))

  return words(answer) == words(oracle)


def _one_fraction(answer: str, oracle: str) -> bool:
  number = r"\s*[0-9]+\s*"
  plain = rf"{number}/{number}"
  latex = rf"\s*\\d?frac\s*{{{number}}}\s*{{{number}}}\s*"
  return re.fullmatch(rf"\$?({plain}|{latex})\$?", answer) is not None


# Tasks whose scorer returns 1.0 for a right answer with extra text, and the
# test that there is none. spell_backward adds 1/n per right letter; the sum is
# meant to stay below 1.0, but a rounded sum reaches it.
_NOTHING_ELSE: Mapping[str, Callable[[str, str], bool]] = {
  "fraction_simplification": _one_fraction,
  "knights_knaves": _same_words,
  "letter_jumble": _same_text,
  "spell_backward": _same_text,
  "word_sorting": _same_text,
}


def _check_reference(record: Mapping[str, Any]) -> Mapping[str, Any]:
  entry = record["entry"]
  answer = entry.get("answer")
  if not isinstance(answer, str):
    raise Refused("entry.answer", f"{show(answer)}; write a text")
  verdict = verify(answer, entry)
  if verdict.status != "pass":
    raise Refused("entry", f"entry.answer does not pass: {verdict.reason}")
  return entry


def _task(record: Mapping[str, Any]) -> str:
  metadata = record["entry"].get("metadata")
  name = metadata.get("source_dataset") if isinstance(metadata, dict) else None
  return name if isinstance(name, str) else ""


def check(families_: Sequence[Family]) -> None:
  """Refuses families that would fail later in a run.

  Raises:
    ValueError: As of `families.check`, or a family generates no puzzles, or
      such whose own answer does not pass. The message is one line.
  """
  families.check(families_)
  for family in families_:
    for split in families.SPLITS:
      entry = families.puzzle(family, split, 0, seed=0).entry
      verdict = verify(entry["answer"], entry)
      if verdict.status != "pass":
        raise ValueError(
          f"{families.describe(family)} generates puzzles whose own answer does"
          f" not pass: {verdict.reason}; change its settings"
        )


def _may_draw(example: Example, tasks: Iterable[str]) -> str:
  """The task that may generate an example's question, or "".

  Checks the question of the entry and the prompt, unless the prompt only adds
  text around the question.
  """
  # Not example.task: statistics may use another name.
  task = example.entry["metadata"]["source_dataset"]
  shown = example.question
  question = str(example.entry.get("question") or shown)
  same = _words(question) in _words(shown)
  asked = (question,) if same else (question, shown)
  held = all(families.is_heldout(task, q) for q in asked)
  return task if task in tasks and not held else ""


def _words(text: str) -> str:
  """The words with single spaces; case counts, as it does in generators."""
  return f" {' '.join(text.split())} "


DRAW = Draw(
  check=check,
  example=families.puzzle,
  heldout=families.heldout,
  may_draw=_may_draw,
  category=CATEGORIES.get,
  version=lambda: f"{_LIBRARY} {importlib.metadata.version(_LIBRARY)}",
)

DOMAIN = Domain(
  name="gym",
  verify=verify,
  fields={"entry": Field(lambda value: strict_json.mapping(value, "entry"))},
  check_reference=_check_reference,
  task=_task,
)
