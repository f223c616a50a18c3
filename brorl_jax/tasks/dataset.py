"""Examples of any domain from files: read, checked, filtered.

    data = read(["data/math.jsonl", "data/code-*.parquet"])
    kept, dropped = fit(data.examples, count_tokens, 2_048)

A .jsonl file holds one JSON object a line, UTF-8, at most 1 MB and 16 levels
deep; a .parquet file the same fields as columns, where null means that the
field is not there. The fields:

  id            Text of 1 to 128 of A-Za-z0-9._-, unique over all files of a
                run. Needed.
  domain        "math", "code", "stem", "instructions" or "gym". Needed.
  prompt        What the user asks, 1 to 100,000 characters, or
  messages      the conversation up to there: a list of {"role": "system",
                "user" or "assistant", "content": text}, the last one the
                user's. One of the two, shown to the policy as it is.
  source        What the example is counted under. If left out: the name of
                the file without its ending, of a puzzle its task.
  answer        math, stem: what is right, as text. 4 is read as "4"; a float,
                boolean, list or null is refused: which text is meant?
  choices       stem, optional: the texts of choices A, B, C...; the answer is
                a letter then. They must be in the prompt too.
  tests         code: {"inputs": [...], "outputs": [...]} for programs that
                read stdin, with "fn_name" for a function that is called; or
                {"check": source of check(candidate), "fn_name": ...}; or a
                list of {"input": ..., "output": ...}.
  time_limit    code, optional: CPU-seconds of one test, at most 60, instead of
                the config's code_test_s.
  instructions  instructions: a list of {"id": "keywords:existence",
                "kwargs": {...}}, ids and arguments as in IFEval.
  entry         gym: the puzzle with its question, answer and metadata.

No other field is allowed, and none that another domain needs. Prompts must
not hold control tokens of chat templates, nor characters that are not seen.

Golds are tried on their own verifiers: mathematics must verify against itself
and against nothing trivial, choices and short answers must be readable, tests
must expect something and not contradict each other, instructions must be known
with their arguments, a puzzle's own answer must pass. Instructions that
contradict each other, and checks that everything passes, are not found out.

What an `Example` carries as its entry: math {"answer"}, stem {"answer"} and
"choices" if given, code {"tests"} and "time_limit" if given,
instructions {"instructions"}, gym the entry itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from brorl_jax.tasks import golds, records, schema
from brorl_jax.tasks.base import Example
from brorl_jax.tasks.records import DataError, Place
from brorl_jax.tasks.strict import Refused, show

# Domains in which one prompt has one right answer.
_ONE_ANSWER = ("math", "stem")


@dataclasses.dataclass(frozen=True)
class Skipped:
  """A record that was left out, and why.

  Attributes:
    place: Its file and line.
    field: The field that is wrong, "" for the record as a whole.
    why: What is wrong with it.
  """

  place: Place
  field: str
  why: str

  def __str__(self) -> str:
    field = f", field {self.field!r}" if self.field else ""
    return f"{self.place}{field}: {self.why}"


@dataclasses.dataclass(frozen=True)
class Data:
  """What was read.

  Attributes:
    examples: In the order of the files.
    places: Where each of them comes from, for a person.
    skipped: What was left out; empty unless that was allowed.
  """

  examples: Sequence[Example]
  places: Sequence[Place | str]
  skipped: Sequence[Skipped] = ()

  @property
  def repeats(self) -> int:
    """How many examples ask what an earlier one asks, word for word."""
    return len(self.examples) - len({_asked(e) for e in self.examples})


def read(
  paths: str | Sequence[str],
  *,
  check: Mapping[str, golds.Check] = golds.CHECKS,
  skip_bad: bool = False,
  progress: Callable[[int], None] | None = None,
) -> Data:
  """Every example of the files.

  Args:
    paths: Files, or patterns such as "data/*.jsonl".
    check: For each domain, from a record to what its verifier takes;
      ValueError if no response could pass. The default asks the verifiers.
    skip_bad: Leave out what is wrong, and say so in `skipped`, instead of
      stopping at it.
    progress: Called after each example with their number so far.

  Raises:
    DataError: One line with file, line, field, what is wrong and the remedy,
      if a record is wrong and `skip_bad` is not set, a file cannot be read at
      all, or no example is left.
  """
  reader = Reader(check)
  skipped = []
  for path in records.files(paths):
    source = re.sub(r"[^A-Za-z0-9._-]", "-", pathlib.Path(path).stem)[:128]
    for line, record in records.read(path):
      place = Place(path, line)
      try:
        if isinstance(record, Refused):
          raise record
        reader.add(record, place, source)
      except Refused as refused:
        bad = Skipped(place, refused.field, refused.why)
        if not skip_bad:
          raise DataError(str(bad)) from refused
        skipped.append(bad)
        continue
      if progress:
        progress(len(reader.examples))
  if not reader.examples:
    raise DataError(
      f"none of the {len(skipped)} records can be used; the first: {skipped[0]}"
    )
  return Data(reader.examples, reader.places, skipped)


class Reader:
  """Examples so far, and what the next ones must not repeat.

  Attributes:
    examples: What was added.
    places: Where each of them comes from.
  """

  def __init__(self, check: Mapping[str, golds.Check]):
    self._check = check
    self.examples: list[Example] = []
    self.places: list[Place] = []
    self._ids: dict[str, Place] = {}
    self._asked: dict[bytes, int] = {}

  def add(self, record: Mapping, place: Place, source: str) -> None:
    """Adds the example of a record.

    Args:
      record: As `records.read` gives it.
      place: Where it comes from.
      source: What it is counted under unless it says so itself.

    Raises:
      Refused: If the record is wrong, its id is taken, or its prompt has
        another answer in an earlier example; nothing is added then.
      DataError: If its verifier is not installed.
    """
    try:
      example = schema.example(record, source=source, check=self._check)
    except ImportError as error:
      # Not the record's fault, so not for skipping.
      raise DataError(f"{place}: cannot be checked: {error}") from error
    if example.id in self._ids:
      raise Refused(
        "id",
        f"{example.id!r} is also in {self._ids[example.id]}; ids must be"
        " unique",
      )
    first = self._asked.setdefault(_asked(example), len(self.examples))
    if first < len(self.examples):
      self._refuse_other_answer(example, first)
    self._ids[example.id] = place
    self.examples.append(example)
    self.places.append(place)

  def _refuse_other_answer(self, example: Example, first: int) -> None:
    other = self.examples[first]
    if example.domain not in _ONE_ANSWER or other.domain != example.domain:
      return
    a, b = example.entry["answer"], other.entry["answer"]
    if a != b:
      raise Refused(
        "answer",
        f"{show(a)}, but {self.places[first]} has the same prompt and"
        f" {show(b)}; keep one",
      )


def fit(
  examples: Iterable[Example],
  count_tokens: Callable[[Example], int],
  limit: int,
) -> tuple[list[Example], list[Example]]:
  """Examples whose prompts fit, and those whose prompts do not.

  Args:
    examples: In any order, which is kept.
    count_tokens: How many tokens the prompt of an example has.
    limit: How many it may have, at least 1.

  Raises:
    ValueError: If the limit is less than 1.
  """
  if limit < 1:
    raise ValueError(f"limit is {limit} tokens; use a number >= 1")
  kept, dropped = [], []
  for example in examples:
    (kept if count_tokens(example) <= limit else dropped).append(example)
  return kept, dropped


def digest(examples: Iterable[Example]) -> str:
  """32 hexadecimal digits that change with any example or their order."""
  total = hashlib.blake2b(digest_size=16)
  for example in examples:
    text = json.dumps(dataclasses.asdict(example), sort_keys=True)
    total.update(f"{len(text)}:{text}".encode())
  return total.hexdigest()


def file_digests(paths: str | Sequence[str]) -> dict[str, str]:
  """For each file, by its absolute path, digits that change with any byte.

  Args:
    paths: Files or patterns, as `read` takes them.

  Raises:
    DataError: If a file is not there or cannot be read.
  """
  out = {}
  for path in records.files(paths):
    try:
      with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
      raise DataError(f"{path}: {error.strerror}") from error
    out[os.path.abspath(path)] = digest[:32]
  return out


def _asked(example: Example) -> bytes:
  """A hash of the whole conversation, white space apart."""
  text = "\n".join(
    f"{m['role']}: {' '.join(m['content'].split())}" for m in example.messages
  )
  return hashlib.blake2b(text.encode(), digest_size=16).digest()
