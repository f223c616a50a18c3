"""What a response to a puzzle is worth.

Three ways, by task. `CHECKS` are ours. The scorers of `JAILED` evaluate what
they are given, so they see only what a grammar lets through, and run in a jail.
All others are the library's, in this process; they neither execute text nor
look at settings (the tests read their source).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from brorl_jax.tasks.base import Verdict
from brorl_jax.tasks.gym import expressions
from brorl_jax.tasks.gym.checks import CHECKS, FORMS
from brorl_jax.tasks.gym.tables import LONGEST, MAX_ANSWER, refuse
from brorl_jax.tasks.sandbox.jail import Failed, Jail, mine

# sympy.parse_expr evaluates; and what it may be asked to differentiate and
# simplify, though short, has no bound in time.
JAILED = frozenset({"intermediate_integration"})
_SECONDS = 3.0


def verify(
  response: str, entry: Mapping[str, Any], *, jail: Jail | None = None
) -> Verdict:
  """Judges a response to a puzzle.

  The answer is the last complete `<answer>...</answer>`, or the whole response
  where there is none, stripped. It passes if the check of the puzzle's task
  finds it right, or the task's scorer gives it 1.0 (and, for the tasks whose
  scorer overlooks text beside the right answer, if there is no such text).

  Args:
    response: What the policy wrote. Never executed here.
    entry: A reasoning-gym item: question, answer, metadata. It may have been
      stored as JSON.
    jail: Where scorers that evaluate text run; this thread's own if None.

  Returns:
    A pass or a fail. Invalid only if the verifier failed: the jail did, or the
    entry is damaged, so that it raises on the entry's own answer too.

  Raises:
    ValueError: If the entry names no task, or one that cannot be judged.
  """
  if not isinstance(response, str):
    raise ValueError(
      f"response is a {type(response).__name__}; it must be text"
    )
  name, oracle = _task_and_oracle(entry)
  answer = _extract(response)
  if not answer:
    return Verdict("fail", 0.0, "empty answer", answer)
  longest = LONGEST.get(name, MAX_ANSWER)
  if len(answer) > longest:
    reason = f"too long: {len(answer)} characters, at most {longest}"
    return Verdict("fail", 0.0, reason, answer[:longest])
  try:
    return _judge(name, answer, entry, jail)
  except Exception as error:
    reason = f"scorer raised {type(error).__name__}"
    try:
      _judge(name, oracle, entry, jail)
    except Exception:
      return Verdict("invalid", 0.0, f"{reason} on its own answer", answer)
    return Verdict("fail", 0.0, reason, answer)


def _judge(
  name: str, answer: str, entry: Mapping[str, Any], jail: Jail | None
) -> Verdict:
  if name in CHECKS:
    reason = CHECKS[name](answer, entry)
    score = 0.0 if reason else 1.0
    return Verdict("fail" if reason else "pass", score, reason, answer)
  if name in JAILED:
    return _in_jail(answer, entry, jail)
  if name in FORMS and not FORMS[name][0].fullmatch(answer):
    return Verdict("fail", 0.0, f"refused: not {FORMS[name][1]}", answer)
  score = float(_scorer(name)(answer, entry))
  if score >= 1.0 and name in _NOTHING_ELSE:
    if not _NOTHING_ELSE[name](answer, entry["answer"]):
      return Verdict("fail", 0.0, "text beside the answer", answer)
  return _of(score, answer)


def _of(score: float, answer: str) -> Verdict:
  if not math.isfinite(score):
    return Verdict("fail", 0.0, f"scorer gave {score}", answer)
  if score < 1.0:
    return Verdict("fail", score, "wrong answer", answer)
  return Verdict("pass", score, "", answer)


def _in_jail(
  answer: str, entry: Mapping[str, Any], jail: Jail | None
) -> Verdict:
  metadata = entry["metadata"]
  reason = expressions.refuse_integral(answer, metadata["variable"])
  if reason:
    return Verdict("fail", 0.0, f"refused: {reason}", answer)
  asked = {"answer": entry["answer"], "metadata": dict(metadata)}
  try:
    got = (jail or mine()).ask("gym", answer, asked, timeout=_SECONDS)
  except Failed as error:
    return Verdict("invalid", 0.0, f"verifier failed: {error}", answer)
  if isinstance(got, Mapping):
    return Verdict("fail", 0.0, f"scorer raised {got['raised']}", answer)
  return _of(float(got), answer)


def _task_and_oracle(entry: Mapping[str, Any]) -> tuple[str, str]:
  metadata = entry.get("metadata")
  name = (
    metadata.get("source_dataset") if isinstance(metadata, Mapping) else None
  )
  if not isinstance(name, str):
    raise ValueError(
      "entry has no metadata.source_dataset; it must name the task"
    )
  refuse(name, drawn=False)
  oracle = entry.get("answer")
  if not isinstance(oracle, str):
    raise ValueError(
      f"entry of task {name!r} has answer {oracle!r}, not a text"
    )
  return name, oracle


def _extract(response: str) -> str:
  # Not a regular expression: a response of unclosed tags takes it quadratic
  # time.
  close = response.rfind("</answer>")
  start = response.rfind("<answer>", 0, max(close, 0))
  if start < 0:
    return response.strip()
  start += len("<answer>")
  return response[start : response.find("</answer>", start)].strip()


@functools.cache
def _scorer(name: str) -> Callable[[str, Mapping[str, Any]], float]:
  # Once per task: some datasets read a book when they are built.
  return library().get_score_answer_fn(name)


@functools.cache
def library() -> Any:
  # Here because the import takes 2 s and the package is optional.
  try:
    import reasoning_gym
  except ImportError as error:
    raise ImportError(
      f"procedural puzzles need reasoning-gym ({error}); pip install"
      " reasoning-gym"
    ) from error
  return reasoning_gym


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


# Tasks whose scorer gives 1.0 to the right answer with other text beside it,
# and the test that there is none. spell_backward adds 1/n for each of n right
# letters and meant to stop short of 1.0, but compares a rounded sum with it.
_NOTHING_ELSE: Mapping[str, Callable[[str, str], bool]] = {
  "fraction_simplification": _one_fraction,
  "knights_knaves": _same_words,
  "letter_jumble": _same_text,
  "spell_backward": _same_text,
  "word_sorting": _same_text,
}
