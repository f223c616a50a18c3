"""Reads and checks examples of any domain from files; holds some out.

    data = read(["data/math.jsonl", "code-*.parquet"], domains=DOMAINS)
    train, heldout = split(data, one_in=20)

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
  answer        math, stem: the reference answer, a text. 4 is read as "4", and
                4.0 in math. A float, boolean, list or null is refused.
  choices       stem, optional: the texts of choices A, B, C...; then the
                answer is a letter. They must occur in the prompt. Columns such
                as "Incorrect Answer 1" are shuffled with the answer and added.
  tests         code: {"inputs": [...], "outputs": [...]} for programs that
                read stdin, with "fn_name" for a function to call; or
                {"check": source of check(candidate), "fn_name": ...}; or a
                list of {"input": ..., "output": ...}.
  time_limit    code, optional: CPU seconds of one test, at most 60. Default:
                the config's code_s[0].
  instructions  instructions: a list of {"id": "keywords:existence",
                "kwargs": {...}}, ids and arguments as in IFEval.
  entry         gym: the puzzle with its question, answer and metadata.

`Form.names` maps fields to other column names. Other columns become
`Example.columns`, which built-in verifiers do not see. A column that looks like
a misspelt optional field is refused, and an optional field of another domain.
Prompts may not hold control tokens of templates or invisible characters.

Every reference answer is run through its verifier when the file is read. A math
answer must equal itself and nothing trivial. Choices and short answers must be
readable. Tests must expect some output and not contradict each other.
Instructions must be known, with their arguments. A puzzle's answer must pass.
Not detected: contradictory instructions, and checks that accept any program.
"""

import collections
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from brorl_jax.data import files, schema
from brorl_jax.data.files import DataError, Place
from brorl_jax.data.schema import PLAIN, Form
from brorl_jax.verdicts.base import MADE, Domain, Example
from brorl_jax.verdicts.domains import DRAW
from brorl_jax.verdicts.strict_json import MAX_LINE, Refused, show

# Bytes of a row that a function reads: LiveCodeBench has tests of many MB.
_MAX_ROW = 1 << 28
_Kept = dict[str, tuple[Example, Place]]  # by id
_ALSO = "also a held-out prompt"
# A space that separates no words: "81 - 35" is "81-35", but "3 4" is not "34".
_BLANK = re.compile(r"(?<!\w) | (?!\w)")


class Skipped(NamedTuple):
  """A record that was left out."""

  place: Place | str
  field: str
  why: str

  def __str__(self) -> str:
    field = f", field {self.field!r}" if self.field else ""
    return f"{self.place}{field}: {self.why}"

  @property
  def reason(self) -> str:
    """What many may share: `why` has details of the record."""
    field = re.sub(r"\[\d+\]", "[]", self.field)
    return f"{field} refused" if field else self.why


def by_reason(skipped: Sequence[Skipped]) -> list[str]:
  """A line for each reason, the most common first: how many, and the first."""
  first = {one.reason: one for one in reversed(skipped)}
  counts = collections.Counter(one.reason for one in skipped).most_common()
  return [f"{n:,}: {why}; the first: {first[why]}" for why, n in counts]


@dataclasses.dataclass(frozen=True)
class Data:
  """The examples of some files."""

  examples: Sequence[Example]  # in the order of the files
  places: Sequence[Place | str]  # file and line of each example, for messages
  # Bad records, if they are left out, and prompts that `without` left out.
  skipped: Sequence[Skipped] = ()
  # `Form.how` and `Form.digest` of each file, by absolute path.
  forms: Mapping = dataclasses.field(default_factory=dict, compare=False)

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

  For `paths` see `files.find`. Default ids differ from those of `beside`, other
  files of the run. Records may name only these domains. `skip_bad` lists bad
  records in `skipped`, instead of raising DataError at the first.
  """
  kept: _Kept = {}
  asked: dict[bytes, str] = {}  # id of the first example that asks this
  skipped, forms = list[Skipped](), {}
  inputs = files.find(paths)
  names = files.names([*inputs, *(files.find(beside) if beside else ())])
  for file in inputs:
    name = names[path := os.path.abspath(file.path)]
    its = form.entries.get(file.entry, form)
    forms[path] = [its.how, its.digest]
    most = MAX_LINE if its.function is None else _MAX_ROW
    rows = files.read(file.path, nulls=its.sole is not None, most=most)
    for line, row in rows:
      place = Place(file.path, line)
      try:
        made = schema.record(row, its), file.source, f"{name}/{line}"
        example = schema.example(*made, domains, its)
        first = asked.get(_asked(example), example.id)
        _refuse_repeat(example, kept, first, domains)
      except (ImportError, RuntimeError) as error:
        # Not an error of the record, so never skipped.
        raise DataError(f"{place}: cannot be checked: {error}") from error
      except Refused as refused:
        refused = schema.with_column(refused, its)
        skipped.append(Skipped(place, refused.field, refused.why))
        if not skip_bad:
          raise DataError(str(skipped[-1])) from refused
      else:
        asked[_asked(example)] = first
        kept[example.id] = example, place
  if not kept:
    none = f"all {len(skipped)} records are unusable"
    raise DataError(f"{none}; the first: {skipped[0]}")
  examples, places = zip(*kept.values(), strict=True)
  return Data([*examples], [*places], skipped, forms)


def _refuse_repeat(example: Example, kept: _Kept, first: str, domains) -> None:
  """Refuses a taken id, and another answer than that to the same prompt."""
  if (id := example.id) in kept:
    place = kept[id][1]
    raise Refused("id", f"{id!r} is also the id of {place}; make ids unique")
  domain = domains.get(example.domain)
  if first in kept and domain is not None and domain.one_answer:
    other, place = kept[first]
    a, b = example.entry["answer"], other.entry.get("answer")
    if other.domain == example.domain and a != b:
      same = f"{place} has the same prompt and {show(b)}"
      raise Refused("answer", f"{show(a)}, but {same}; keep one")


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
  """A hash of each file, by absolute path."""
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
  said = ((m["role"], m["content"].split()) for m in example.messages)
  return _hash(f"{role}: {' '.join(words)}" for role, words in said)


def worded(example: Example) -> bytes:
  """The hash of a conversation that `split` uses."""
  bare = lambda text: _BLANK.sub("", " ".join(text.casefold().split()))
  said = (m for m in example.messages if m["role"] != "system")
  return _hash(f"{m['role']}: {bare(m['content'])}" for m in said)


def _hash(lines: Iterable[str]) -> bytes:
  return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).digest()


def sides(
  read: Callable[..., Data],
  files: Sequence[str],
  heldout_files: Sequence[str],
  one_in: int,
  skip_bad: bool,
) -> tuple[Data, Data]:
  """Training and held-out data of a config's files.

  `read`: (files, beside=other files) -> their data. `files` may be empty if
  there are `heldout_files`; without them a part of `files`, one in `one_in`, is
  held out as by `split`. `skip_bad`: prompts of both sides are held out.
  """
  train = read(files, beside=heldout_files) if files else Data([], [])
  if not heldout_files:
    return split(train, one_in=one_in)
  held = read(heldout_files, beside=files)
  if skip_bad:
    train = without(train, {worded(e) for e in held.examples})
  if files and not train.examples:
    raise DataError("every prompt of data.files is held out; name other files")
  flag = "set --config.data.skip_bad=True"
  refuse_overlap(train, held, f"remove one, or {flag}")
  return train, held


def without(data: Data, prompts: Collection[bytes]) -> Data:
  """The data without prompts whose `worded` is given; they become `skipped`."""
  out = [worded(example) in prompts for example in data.examples]
  gone = [Skipped(place, "", _ALSO) for place in _side(data, out, True).places]
  kept = _side(data, out, False)
  return dataclasses.replace(kept, skipped=[*data.skipped, *gone])


def split(data: Data, *, one_in: int) -> tuple[Data, Data]:
  """Training and held-out examples.

  A hash of the conversation selects about one prompt in `one_in` as held out.
  It ignores the system message, case, and white space that separates no words.
  So a prompt is always on the same side, whichever file it comes from. Neither
  side may be empty; skipped records are listed in the first.
  """
  if one_in < 2:
    raise DataError(f"data.heldout_one_in = {one_in}: use at least 2")
  held = [_is_held(example, one_in) for example in data.examples]
  if all(held) or not any(held):
    what = "left for training" if all(held) else "held out"
    none = f"none of {len(held)} examples is {what}"
    must = "use another number, or give data.heldout_files"
    raise DataError(f"data.heldout_one_in = {one_in}: {none}; {must}")
  train, heldout = _side(data, held, False), _side(data, held, True)
  return train, dataclasses.replace(heldout, skipped=())


def trained_on(data: Data, *, one_in: int) -> Data:
  """The training side of `split` alone, which may be empty; 0: all."""
  return _side(data, [_is_held(e, one_in) for e in data.examples], False)


def _is_held(example: Example, one_in: int) -> bool:
  number = int.from_bytes(worded(example), "little")
  return one_in > 0 and number % one_in == 0


def _side(data: Data, held: Sequence[bool], which: bool) -> Data:
  some = lambda a: [x for x, side in zip(a, held, strict=True) if side == which]
  kept = {"examples": some(data.examples), "places": some(data.places)}
  return dataclasses.replace(data, **kept)


def refuse_overlap(train: Data, heldout: Data, remedy="remove one") -> None:
  """Refuses held-out examples that are also training examples.

  Prompts are compared as in `split`. Default ids (file and line) are not
  compared, because files elsewhere may have the same name.
  """
  ids: dict[str, Place | str] = {}
  asked: dict[bytes, Place | str] = {}
  for example, place in zip(train.examples, train.places, strict=True):
    ids.setdefault(example.id, place)
    asked.setdefault(worded(example), place)
  for example, place in zip(heldout.examples, heldout.places, strict=True):
    other = asked.get(worded(example))
    if example.id in ids and "/" not in example.id:
      both = f"held-out id {example.id!r} is also the training example"
      must = "remove one" if other is None else remedy
      raise DataError(f"{place}: {both} {ids[example.id]}; {must}")
    if other is not None:
      both = f"held-out prompt is also the training prompt {other}"
      raise DataError(f"{place}: {both}; {remedy}")


def refuse_drawn(heldout: Data, tasks: Collection[str]) -> None:
  """Refuses held-out puzzles that training may generate.

  A hash of the question decides which split may generate it, whatever the
  settings and the seed (see `gym.puzzle`). Puzzles on the training side are
  refused if their task is one of `tasks`, which training generates. Examples of
  other domains are not checked: the hash cannot tell whether a generator could
  make a text, and nine texts in ten are on that side.
  """
  for example, place in zip(heldout.examples, heldout.places, strict=True):
    if example.domain == MADE and (task := DRAW.may_draw(example, tasks)):
      why = f"training may generate this held-out puzzle of {task}"
      raise DataError(f"{place}: {why}; remove it from the held-out file")
