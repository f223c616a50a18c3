"""Reads, checks and filters examples of any domain from files.

    data = read(["data/math.jsonl", "code-*.parquet"], domains=DOMAINS)
    kept, dropped = fit(data.examples, count_tokens, 2_048)

A .jsonl file has one JSON object per line: UTF-8, at most 1 MB and 16 levels
deep. A .parquet file, or an .arrow file as `datasets` saves it, has the same
fields as columns; null means that the field is missing. The fields:

  id            1 to 128 of the characters A-Za-z0-9._-, unique over all files
                of a run. Default: file and line, "train/12", with as many
                folders of the path as distinguish the files of the run.
  domain        "math", "code", "stem", "instructions" or "gym". Required,
                unless `Form.domain` sets it for all lines.
  prompt        The user's question, 1 to 100,000 characters, or
  messages      the conversation up to it: a list of {"role": "system", "user"
                or "assistant", "content": text}; the last message is the
                user's. Exactly one of the two; the policy sees it unchanged.
  source        Name for statistics. Default: the name of the file without its
                ending, or of the folder or data set; for a puzzle its task.
  answer        math, stem: the reference answer, a text. 4 is read as "4". A
                float, boolean, list or null is refused as ambiguous.
  choices       stem, optional: the texts of choices A, B, C...; then the
                answer is a letter. They must occur in the prompt.
  tests         code: {"inputs": [...], "outputs": [...]} for programs that
                read stdin, with "fn_name" for a function to call; or
                {"check": source of check(candidate), "fn_name": ...}; or a
                list of {"input": ..., "output": ...}.
  time_limit    code, optional: CPU seconds of one test, at most 60. Default:
                the config's code_test_s.
  instructions  instructions: a list of {"id": "keywords:existence",
                "kwargs": {...}}, ids and arguments as in IFEval.
  entry         gym: the puzzle with its question, answer and metadata.

`Form.names` maps fields to other column names. Other columns become
`Example.columns`, which built-in verifiers do not see. A column that looks like
a misspelt optional field is refused, and so is an optional field of another
domain. Prompts must not contain control tokens of chat templates or invisible
characters.

Every reference answer is run through its verifier when the file is read. A math
answer must equal itself and nothing trivial. Choices and short answers must be
readable. Tests must expect some output and not contradict each other.
Instructions must be known, with their arguments. A puzzle's answer must pass.
Not detected: instructions that contradict each other, and checks that accept
every program.

The entry of an `Example` is, for math {"answer"}; stem {"answer"} and optional
"choices"; code {"tests"} and optional "time_limit"; instructions
{"instructions"}; gym the record's entry.

A line of `read_pairs`, for supervised training, has "prompt" or "messages" and
"response", the text to learn. Other columns are ignored. No verifier runs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from brorl_jax.data import files, schema
from brorl_jax.data.files import DataError, Place
from brorl_jax.data.schema import PLAIN, Form
from brorl_jax.verdicts import strict_json
from brorl_jax.verdicts.base import Domain, Example, Field, Verdict
from brorl_jax.verdicts.strict_json import Refused, show


@dataclasses.dataclass(frozen=True)
class Skipped:
  """A record that was left out, and the reason."""

  place: Place  # file and line
  field: str  # the wrong field, "" for the whole record
  why: str

  def __str__(self) -> str:
    field = f", field {self.field!r}" if self.field else ""
    return f"{self.place}{field}: {self.why}"


@dataclasses.dataclass(frozen=True)
class Data:
  """The examples of some files."""

  examples: Sequence[Example]  # in the order of the files
  places: Sequence[Place | str]  # file and line of each example, for messages
  # Records that were left out; empty unless `skip_bad`.
  skipped: Sequence[Skipped] = ()

  @property
  def repeats(self) -> int:
    """Number of examples whose prompt repeats an earlier one."""
    return len(self.examples) - len({_asked(e) for e in self.examples})

  @property
  def columns(self) -> tuple[str, ...]:
    """The columns that are not fields, sorted."""
    return tuple(sorted({c for e in self.examples for c in e.columns}))


def read(
  paths: str | Sequence[str],
  *,
  form: Form = PLAIN,
  beside: Sequence[str] = (),
  domains: Mapping[str, Domain],
  skip_bad: bool = False,
) -> Data:
  """Reads all examples of some files.

  Args:
    paths: Files, patterns, folders or hub names; see `files.find`.
    form: Column names of fields, and the default domain.
    beside: Other files of the run; default ids differ from theirs.
    domains: The domains that records may name.
    skip_bad: Leave bad records out and list them in `skipped`, instead of
      raising at the first.

  Raises:
    DataError: A record is bad and `skip_bad` is not set, a file cannot be read,
      or no example is left. The message is one line with file, line, field,
      error and remedy.
  """
  reader = Reader(domains, form)
  skipped = []
  inputs = files.find(paths)
  names = files.names([*inputs, *(files.find(beside) if beside else ())])
  for file in inputs:
    name = names[os.path.abspath(file.path)]
    for line, record in files.read(file.path, nulls=form.sole is not None):
      place = Place(file.path, line)
      try:
        if isinstance(record, Refused):
          raise record
        reader.add(record, place, file.source, f"{name}/{line}")
      except Refused as refused:
        bad = Skipped(place, refused.field, refused.why)
        if not skip_bad:
          raise DataError(str(bad)) from refused
        skipped.append(bad)
  if not reader.examples:
    raise DataError(
      f"all {len(skipped)} records are unusable; the first: {skipped[0]}"
    )
  return Data(reader.examples, reader.places, skipped)


class Reader:
  """Collects examples and refuses repeated ids and contradicting answers.

  Attributes:
    examples: The examples so far.
    places: File and line of each.
  """

  def __init__(self, domains: Mapping[str, Domain], form: Form = PLAIN):
    self._domains, self._form = domains, form
    self.examples: list[Example] = []
    self.places: list[Place] = []
    self._ids: dict[str, Place] = {}
    self._asked: dict[bytes, int] = {}

  def add(
    self, record: Mapping, place: Place, source: str, name: str = ""
  ) -> None:
    """Adds the example of a record, see `schema.example`.

    Raises:
      Refused: The record is bad, its id is taken, or an earlier example has
        the same prompt and another answer. Nothing is added.
      DataError: Its verifier is not installed.
    """
    fixed = {"domains": self._domains, "form": self._form}
    try:
      example = schema.example(record, source=source, name=name, **fixed)
    except ImportError as error:
      # Not an error of the record, so never skipped.
      raise DataError(f"{place}: cannot be checked: {error}") from error
    if example.id in self._ids:
      other = self._ids[example.id]
      raise Refused(
        "id", f"{example.id!r} is also the id of {other}; make ids unique"
      )
    first = self._asked.setdefault(_asked(example), len(self.examples))
    domain = self._domains.get(example.domain)
    if first < len(self.examples) and domain is not None and domain.one_answer:
      other = self.examples[first]
      a, b = example.entry["answer"], other.entry.get("answer")
      if other.domain == example.domain and a != b:
        raise Refused(
          "answer",
          f"{show(a)}, but {self.places[first]} has the same prompt and"
          f" {show(b)}; keep one",
        )
    self._ids[example.id] = place
    self.examples.append(example)
    self.places.append(place)


def fit(
  examples: Iterable[Example],
  count_tokens: Callable[[Example], int],
  limit: int,
) -> tuple[list[Example], list[Example]]:
  """Splits examples, in order, by whether their prompts fit into the limit."""
  kept, dropped = [], []
  for example in examples:
    (kept if count_tokens(example) <= limit else dropped).append(example)
  return kept, dropped


def digest(examples: Iterable[Example]) -> str:
  """A hash of the examples in order: 32 hexadecimal digits."""
  total = hashlib.blake2b(digest_size=16)
  for example in examples:
    record = dataclasses.asdict(example)
    if not example.columns:  # keeps the hash of runs from before columns
      del record["columns"]
    text = json.dumps(record, sort_keys=True)
    total.update(f"{len(text)}:{text}".encode())
  return total.hexdigest()


def file_digests(paths: str | Sequence[str]) -> dict[str, str]:
  """A hash of each file, by absolute path.

  Raises:
    DataError: A file is missing or cannot be read.
  """
  out = {}
  for path in (file.path for file in files.find(paths)):
    try:
      with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
      raise DataError(f"{path}: {error.strerror}") from error
    out[os.path.abspath(path)] = digest[:32]
  return out


def _asked(example: Example) -> bytes:
  """A hash of the conversation that ignores white space."""
  text = "\n".join(
    f"{m['role']}: {' '.join(m['content'].split())}" for m in example.messages
  )
  return hashlib.blake2b(text.encode(), digest_size=16).digest()


PAIR_FIELDS = ("prompt", "messages", "response", "id")


def read_pairs(
  paths: str | Sequence[str],
  *,
  names: Mapping[str, str],
  beside: Sequence[str] = (),
  skip_bad: bool = False,
) -> Data:
  """Reads prompts with responses, as `read` reads examples.

  `names` maps fields to columns that are named otherwise; `pair_response`
  returns the response of each.
  """
  form = Form(names=names, sole=_PAIR)
  return read(paths, form=form, beside=beside, domains={}, skip_bad=skip_bad)


def pair_response(example: Example) -> str:
  """The response that the policy learns."""
  return example.entry["response"]


def _entry(own: Mapping[str, Any]) -> Mapping[str, Any]:
  if "response" not in own:
    remedy = "add it, or name its column: --config.data.fields=response:COLUMN"
    raise Refused("response", f"missing; {remedy}")
  return own


def _never(response: str, entry: Mapping[str, Any], jail: Any) -> Verdict:
  del response, entry, jail
  raise RuntimeError("pairs have no verifier")


_PAIR = Domain(
  name="pairs",
  verify=_never,
  fields={"response": Field(lambda value: strict_json.text(value, "response"))},
  check_reference=_entry,
)
