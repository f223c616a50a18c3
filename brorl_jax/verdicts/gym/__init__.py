"""Procedural puzzles and their verifiers, from reasoning-gym.

    families = [Family("gcd", {"max_value": 40}), Family("leg_counting")]
    check(families)
    p = puzzle(families[0], "train", 123, seed=0)
    verify("<answer>4</answer>", p.entry).reward

Only audited tasks can be used, of all of reasoning-gym 0.1.25, because many
scorers of the library execute model text or reward garbage; a task that is in
no table is refused as unknown. `CHECKS` score some tasks. Scorers of
`JAILED` evaluate the answer: a grammar filters it and they run in a jail. All
others are the library's and run in this process; they neither execute text nor
read settings (the tests check their source).
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import re
import reprlib
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from brorl_jax.verdicts import base, strict_json
from brorl_jax.verdicts.base import Domain, Example, Family, Verdict
from brorl_jax.verdicts.gym import checks
from brorl_jax.verdicts.math import expressions
from brorl_jax.verdicts.sandbox.jail import Failed, Jail, mine
from brorl_jax.verdicts.strict_json import Refused, did_you_mean, show

SPLITS = ("train", "heldout", "warmup")

# Bits of a generator seed, from the low end. 2**44 indexes are 16 million steps
# of base.candidate_index. The stride is the number of seeds that an index may
# try until a question is on its side of the split.
_STRIDE_BITS, _INDEX_BITS, _SPLIT_BITS = 10, 44, 2
_HELDOUT_ONE_IN = 10
_FAILURES = 8  # of a generator at one index, at most
# Where the metadata of a puzzle without an answer have one.
_ANSWERED = {
  "graph_color": "possible_answer",
  "propositional_logic": "example_answer",
}

# sympy.parse_expr evaluates Python, and even short expressions can take it
# unbounded time to differentiate and simplify.
JAILED = frozenset({"intermediate_integration"})
_SECONDS = 3.0


MAX_ANSWER = 1_000  # characters, for tasks that are not in LONGEST
# The longest right answers of 2,000 puzzles each had 1,799, 11,400, 511 and
# 4,063 characters. Their checks take linear time.
LONGEST: Mapping[str, int] = {
  "arc_agi": 2_000,
  "palindrome_partitioning": 20_000,
  "propositional_logic": 200,  # parsed in quadratic time
  "rearc": 2_000,
  "tower_of_hanoi": 8_000,
}

_TASKS = expressions.table("gym.txt").split("\n\n")
_reasons = lambda lines: dict(x.split(": ", 1) for x in lines.splitlines())
# Tasks that can be generated and scored.
ALLOWED = frozenset(_TASKS[0].split())
# Tasks that are scored but not generated, with the reason; and neither.
STORED: Mapping[str, str] = _reasons(_TASKS[1])
REFUSED: Mapping[str, str] = _reasons(_TASKS[2])

# Of 2,000 number sequences with complexity 3, the library's default, two took
# over 10 s. With complexity 2 the slowest took 50 ms.
MAX_COMPLEXITY = {"number_sequence": 2, "propositional_logic": 3}


@functools.cache
def library() -> Any:
  # Imported here: it takes 2 s, and the package is optional.
  try:
    import reasoning_gym
  except ImportError as error:
    why = f"procedural puzzles need reasoning-gym ({error})"
    raise ImportError(f"{why}; pip install 'brorl_jax[gym]'") from error
  return reasoning_gym


@functools.cache
def scorer(name: str) -> Callable[[str, Mapping[str, Any]], float]:
  """The library's scorer of a task."""
  # Cached by task: some data sets read a book when they are built.
  return library().get_score_answer_fn(name)


# Generation. Two rules keep held-out puzzles out of training. Splits use
# disjoint ranges of generator seeds. And because a small family repeats its
# questions under different seeds, a hash of the question assigns one in ten to
# the held-out side.


def check(families: Sequence[Family]) -> None:
  """Refuses families that would fail later in a run, by ValueError."""
  if not families:
    raise ValueError("families is empty; list at least one")
  names = [family.name for family in families]
  for family in families:
    if (count := names.count(family.name)) > 1:
      must = "list it once, with one weight and one range of settings"
      twice = f"family {family.name!r} is listed {count} times"
      raise ValueError(f"{twice}; {must}")
    _dataset(family)
  base.check_weights([family.weight for family in families])
  for family in families:
    for split in SPLITS:
      entry = puzzle(family, split, 0, seed=0).entry
      verdict = verify(entry["answer"], entry)
      if verdict.status != "pass":
        why = f"whose own answer does not pass: {verdict.reason}"
        raise _wrong(family, f"generates puzzles {why}; change its settings")


def puzzle(family: Family, split: str, index: int, *, seed: int) -> Example:
  """Generates one puzzle, a pure function of the arguments.

  Index i of a split has the 1,024 generator seeds

    g = seed * 2**56 + split * 2**54 + i * 2**10 + [0, 2**10)

  with split 0, 1, 2 for train, heldout, warmup. It takes the first seed whose
  question is on its side: held-out if a hash of task name and question is 0 mod
  10, else train and warmup. So the other splits never generate a held-out
  question, under any seed and settings. Two indexes may give the same question.
  """
  if split not in SPLITS:
    raise ValueError(f"split = {split!r}; use one of {', '.join(SPLITS)}")
  if not 0 <= index < 2**_INDEX_BITS:
    raise ValueError(f"index = {index}; use 0 to 2**{_INDEX_BITS} - 1")
  if seed < 0:
    # The generators ignore a seed's sign.
    raise ValueError(f"seed = {seed}; use a number >= 0")
  dataset = _dataset(family)
  start = (seed << _SPLIT_BITS) + SPLITS.index(split)
  start = ((start << _INDEX_BITS) + index) << _STRIDE_BITS
  failed = 0
  for generator_seed in range(start, start + 2**_STRIDE_BITS):
    try:
      # Item i of a dataset depends on seed + i alone, and this one's seed is 0.
      entry = dataset[generator_seed]
    except Exception as error:
      failed += 1  # a maze fails at one seed in thousands
      if failed < _FAILURES:
        continue
      why = f"cannot generate a puzzle: {_one_line(error)}"
      raise _wrong(family, f"{why}; change its settings") from error
    if name := _ANSWERED.get(family.name):  # the library leaves it open
      given = entry["metadata"][name]
      given = given if isinstance(given, str) else json.dumps(given)
      entry = {**entry, "answer": given}
      if verify(given, entry).status != "pass":  # of conclusions: some
        continue
    if is_heldout(family.name, entry["question"]) == (split == "heldout"):
      name = f"{family.name}/{split}/{index}"
      asked = ({"role": "user", "content": entry["question"]},)
      return Example(name, base.MADE, family.name, asked, entry)
  why = f"has no {split} question in {2**_STRIDE_BITS} tries"
  raise _wrong(family, f"{why}; widen its settings")


def is_heldout(task: str, question: str) -> bool:
  text = f"{task}\n{question}".encode("utf-8", "surrogatepass")
  digest = hashlib.blake2b(text, digest_size=8).digest()
  return int.from_bytes(digest, "little") % _HELDOUT_ONE_IN == 0


def heldout(
  families: Iterable[Family], *, per_family: int, seed: int, fewer: bool = False
) -> list[Example]:
  """Held-out puzzles with distinct questions, ordered by family.

  Raises ValueError for a family that has not as many, unless `fewer` may be.
  """
  if per_family < 1:
    raise ValueError(f"per_family = {per_family}; use a number >= 1")
  puzzles = []
  for family in families:
    distinct: dict[str, Example] = {}
    index = repeats = 0
    while len(distinct) < per_family:
      candidate = puzzle(family, "heldout", index, seed=seed)
      index += 1
      if candidate.question not in distinct:
        distinct[candidate.question] = candidate
        repeats = 0
        continue
      repeats += 1
      # With one of len + 1 questions missing, a draw misses it with
      # probability len / (len + 1); 10 (len + 1) in a row with exp(-10).
      if repeats >= 10 * (len(distinct) + 1):
        if fewer:
          break
        has = f"has only {len(distinct)} distinct held-out questions"
        must = "widen its settings or ask for fewer"
        raise _wrong(family, f"{has}, not {per_family}; {must}")
    puzzles.extend(distinct.values())
  return puzzles


def may_draw(example: Example, tasks: Iterable[str]) -> str:
  """The task that may generate an example's question or prompt, or ""."""
  # Not the prompt where it only adds text around the question.
  # Words with single spaces; case counts, as it does in generators.
  words = lambda text: f" {' '.join(text.split())} "
  # Not example.task: statistics may use another name.
  task = example.entry["metadata"]["source_dataset"]
  shown = example.question
  question = str(example.entry.get("question") or shown)
  asked = {question} if words(question) in words(shown) else {question, shown}
  held = all(is_heldout(task, q) for q in asked)
  return task if task in tasks and not held else ""


def version() -> str:
  """The generator and its version, for config.json."""
  return f"reasoning-gym {importlib.metadata.version('reasoning-gym')}"


def _refuse(name: str, *, drawn: bool) -> None:
  if name in ALLOWED or (name in STORED and not drawn):
    return
  remedy = "use one of gym.ALLOWED"
  if name in STORED:
    remedy = f"read its puzzles from a data file or {remedy}"
  if why := STORED.get(name) or REFUSED.get(name):
    raise ValueError(f"task {name!r} is refused: {why}; {remedy}")
  remedy = did_you_mean(name, sorted(ALLOWED), remedy, repr)
  raise ValueError(f"task {name!r} is unknown; {remedy}")


@functools.lru_cache(maxsize=256)
def _dataset(family: Family) -> Any:
  _refuse(family.name, drawn=True)
  config = library().factory.DATASETS[family.name][1]
  defaults = {x.name: _default(x) for x in dataclasses.fields(config)}
  del defaults["seed"], defaults["size"]
  for key, value in family.settings.items():
    where = f"family {family.name!r}: setting {key} = {reprlib.repr(value)}"
    if key not in defaults:
      remedy = did_you_mean(key, defaults, f"use {', '.join(defaults)}")
      raise ValueError(f"{where} is unknown; {remedy}")
    if wanted := _wanted_type(defaults[key], value):
      must = f"use {wanted}, such as {defaults[key]!r}"
      raise ValueError(f"{where} is a {type(value).__name__}; {must}")
  try:
    settings = {**family.settings, "seed": 0, "size": 1}
    dataset = library().create_dataset(family.name, **settings)
  except Exception as error:
    raise _wrong(family, f"is not valid: {_one_line(error)}") from error
  complexity = getattr(dataset.config, "max_complexity", 0)
  if complexity > (most := MAX_COMPLEXITY.get(family.name, 0)):
    where = f"family {family.name!r}: setting max_complexity = {complexity}"
    why = "is too large (one puzzle may take over 10 s)"
    raise ValueError(f"{where} {why}; set it to at most {most}")
  return dataset


def _default(field: dataclasses.Field[Any]) -> Any:
  if field.default_factory is not dataclasses.MISSING:
    return field.default_factory()
  return None if field.default is dataclasses.MISSING else field.default


def _wanted_type(default: Any, value: Any) -> str:
  number = isinstance(value, int | float) and not isinstance(value, bool)
  for kind, fits, name in (
    (bool, isinstance(value, bool), "true or false"),
    (int, number and isinstance(value, int), "a whole number"),
    (float, number and math.isfinite(value), "a finite number"),
    (str, isinstance(value, str), "a text"),
    (tuple | list, isinstance(value, tuple | list), "a list"),
  ):
    if isinstance(default, kind):
      return "" if fits else name
  return ""


def _wrong(family: Family, why: str) -> ValueError:
  settings = ", ".join(f"{k}={v!r}" for k, v in family.settings.items())
  with_ = f"with {settings or 'default settings'}"
  return ValueError(f"family {family.name!r} {with_} {why}")


def _one_line(error: Exception) -> str:
  """The message of an error; for a bare assert, the failed condition."""
  text = " ".join(str(error).split())
  if text or error.__traceback__ is None:
    return text or type(error).__name__
  line = traceback.extract_tb(error.__traceback__)[-1].line or ""
  return line.removeprefix("assert ").replace("self.", "") + " is required"


def verify(
  response: str, entry: Mapping[str, Any], jail: Jail | None = None
) -> Verdict:
  """Scores a response to a puzzle.

  The answer is the text of the last complete `<answer>...</answer>` after the
  thinking, or else all of it, stripped. It passes if the check of the task
  accepts it or its scorer returns 1.0. For scorers that ignore extra text,
  there must be none. "invalid" only if the verifier failed: the jail (default:
  this thread's) did, or the scorer raises on the entry's own answer too.

  `entry` is a reasoning-gym item: question, answer, metadata. Raises ValueError
  if it names no task, or one that cannot be scored.
  """
  base.require_text(response)
  if not (name := _task(entry)):
    field = "entry.metadata.source_dataset"
    raise ValueError(f"{field} is missing; it must name the task")
  _refuse(name, drawn=False)
  oracle = entry.get("answer")
  if not isinstance(oracle, str):
    raise ValueError(f"entry.answer = {oracle!r} of task {name!r}; use a text")
  said = base.after_thinking(response)
  answer = base.tagged(said)
  answer = said.strip() if answer is None else answer
  if not answer:
    return base.judged("empty answer", answer)
  if fail := base.overlong(answer, LONGEST.get(name, MAX_ANSWER)):
    return fail
  try:
    return _scored(name, answer, entry, jail)
  except Exception as error:
    reason = f"scorer raised {type(error).__name__}"
    try:
      _scored(name, oracle, entry, jail)
    except Exception:
      return Verdict("invalid", 0.0, f"{reason} on its own answer", answer)
    return base.judged(reason, answer)


def _task(entry: Mapping[str, Any]) -> str:
  metadata = entry.get("metadata")
  named = isinstance(metadata, Mapping) and metadata.get("source_dataset")
  return named if isinstance(named, str) else ""


def _scored(
  name: str, answer: str, entry: Mapping[str, Any], jail: Jail | None
) -> Verdict:
  if name in checks.FORMS:
    pattern, form = checks.FORMS[name]
    if not re.fullmatch(pattern, answer):
      return base.judged(f"refused: not {form}", answer)
  if name in checks.CHECKS:
    found = checks.CHECKS[name](answer, entry)
    fault = found if isinstance(found, str) else "" if found else "wrong answer"
    return base.judged(fault, answer)
  if name in JAILED:
    metadata = entry["metadata"]
    reason = checks.refuse_integral(answer, metadata["variable"])
    if reason:
      return base.judged(f"refused: {reason}", answer)
    asked = {"answer": entry["answer"], "metadata": dict(metadata)}
    try:
      score = (jail or mine()).ask("gym", answer, asked, timeout=_SECONDS)
    except Failed as error:
      return Verdict("invalid", 0.0, f"verifier failed: {error}", answer)
    if isinstance(score, Mapping):
      return base.judged(f"scorer raised {score['raised']}", answer)
  else:
    score = scorer(name)(answer, entry)
  score = float(score)
  if not math.isfinite(score):
    return base.judged(f"scorer returned {score}", answer)
  if score < 1.0:
    return Verdict("fail", score, "wrong answer", answer)
  if name in _NOTHING_ELSE and not _NOTHING_ELSE[name](answer, entry["answer"]):
    return base.judged("text next to the answer", answer)
  return Verdict("pass", score, "", answer)


def _same_text(answer: str, oracle: str) -> bool:
  return "".join(answer.lower().split()) == "".join(oracle.lower().split())


def _same_words(answer: str, oracle: str) -> bool:
  def words(text: str) -> list[str]:
    parts = re.sub("[.,()]", " ", text.lower()).split()
    return sorted(w for w in parts if w not in ("is", "a", "an", "and"))

  return words(answer) == words(oracle)


def _one_fraction(answer: str, oracle: str) -> bool:
  number = r"\s*[0-9]+\s*"
  latex = rf"\s*\\d?frac\s*{{{number}}}\s*{{{number}}}\s*"
  return bool(re.fullmatch(rf"\$?({number}/{number}|{latex})\$?", answer))


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
  if not isinstance(answer := entry.get("answer"), str):
    raise Refused("entry.answer", f"{show(answer)}; write a text")
  verdict = verify(answer, entry)
  if verdict.status != "pass":
    raise Refused("entry", f"entry.answer does not pass: {verdict.reason}")
  return entry


DOMAIN = Domain(
  name=base.MADE,
  verify=verify,
  fields={"entry": base.Field(lambda x: strict_json.mapping(x, "entry"))},
  check_reference=_check_reference,
  task=lambda record: _task(record["entry"]),
)
