"""Files that a config names, and their records.

    find("data/*.jsonl")
    find("gsm8k:main/train")       # a folder, one split of it
    find("hub:openai/gsm8k:main/train@refs/convert/parquet")
    read("data/math.jsonl")        # (line number, record or error), ...

A folder may have the layout of a Hugging Face data set, of `hf download`, or of
`datasets.save_to_disk`. An error in one line is yielded in its place. An error
of the whole file (missing, unreadable, a git-lfs pointer) is raised.
"""

import collections
import contextlib
import csv
import dataclasses
import functools
import glob
import itertools
import json
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from brorl_jax.verdicts import strict_json
from brorl_jax.verdicts.strict_json import MAX_LINE, Refused, show

_COLUMNAR = (".parquet", ".arrow")
_Row = tuple[bytes, dict[str, Refused]]
ENDINGS = (".jsonl", *_COLUMNAR)  # of readable files
# Read where there is nothing else: also the endings of descriptions.
_ANY = (*ENDINGS, ".json", ".csv")
_DESCRIPTIONS = ("dataset_dict", "dataset_info", "dataset_infos", "state")
_MAX_HELD = 1 << 28  # bytes of a line
_BATCH = 64  # rows of parquet in memory at a time

_LFS = b"version https://git-lfs"
_SPLIT = r"[\w.-]+(?:/[\w.-]+)*"
_HUB = re.compile(
  rf"hub:([\w.-]+(?:/[\w.-]+)?)(?::({_SPLIT}))?(?:@([\w.-]+(?:/[\w.-]+)*))?"
)
# Characters after the name of a split in a file name: train.jsonl,
# train/0000.parquet, train-00000-of-00002.parquet. train_sft is another split.
_AFTER = "[-./]"
# Splits of one data set that are not used for training together.
_SPLITS = re.compile(
  rf"(?:^|/)(train|test|validation|valid|val|dev|eval)(?={_AFTER})"
)


class DataError(ValueError):
  """Unusable data; one line with file, line, field, error and remedy."""


@dataclasses.dataclass(frozen=True)
class Place:
  """The place of a record; lines and rows count from 1."""

  file: str
  line: int

  def __str__(self) -> str:
    unit = "line" if self.file.endswith(".jsonl") else "row"
    return f"{self.file}, {unit} {self.line}"


@dataclasses.dataclass(frozen=True)
class File:
  """A file of records."""

  path: str
  # Default "source" of its examples: its name, or that of its folder or set.
  source: str
  entry: str = ""  # as which `find` was given it


def find(paths: str | Sequence[str]) -> list[File]:
  """The named files in order, each once.

  They are files; patterns such as "data/*.jsonl" (matches are sorted); folders,
  or one split of a folder, "folder:train"; or data sets of the Hugging Face
  hub, which are downloaded, "hub:organisation/name:split@revision" (split and
  revision are optional).
  """
  paths = [paths] if isinstance(paths, str) else list(paths)
  if not paths:
    raise DataError("no data files given; name at least one")
  by_path: dict[str, File] = {}
  for path in map(os.fspath, paths):
    for file in _meant(path):
      same = os.path.realpath(file.path)
      if same in by_path:
        raise DataError(f"{file.path}: the file is named twice; name it once")
      by_path[same] = dataclasses.replace(file, entry=path)
  return list(by_path.values())


def names(files: Iterable[File]) -> dict[str, str]:
  """A short unique name for each path: the file's name without its ending, or
  if several share it with its ending and as many folders as distinguish them.
  """
  paths = sorted({os.path.abspath(file.path) for file in files})
  short = {path: _name(pathlib.Path(path).stem) for path in paths}
  deepest = max((path.count(os.sep) for path in paths), default=0)
  for depth in range(1, deepest + 2):
    taken = collections.Counter(short.values())
    end = lambda path: "/".join(map(_name, path.split(os.sep)[-depth:]))
    short |= {p: end(p) for p, name in short.items() if taken[name] > 1}
  return short


def _name(text: str) -> str:
  return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:128]


def _meant(path: str) -> Iterator[File]:
  if path.startswith("hub:"):
    return _of_hub(path)
  if os.path.isdir(path):
    return _of_folder(path, path, "")
  folder, colon, split = path.rpartition(":")
  if colon and os.path.isdir(folder) and not os.path.exists(path):
    return _of_folder(path, folder, split)
  matches = [path]
  if glob.has_magic(path) and not os.path.exists(path):
    matches = sorted(glob.glob(path, recursive=True))
    if not matches:
      raise DataError(f"{path}: no file matches this pattern; correct it")
  for match in matches:
    _refuse_file(match)
  return (File(match, _name(pathlib.Path(match).stem)) for match in matches)


def _refuse_file(path: str) -> None:
  if not os.path.exists(path):
    remedy = "; name an existing one"
    if "," in path:
      several = ",".join(f"'{part}'" for part in path.split(","))
      remedy = f"; write several files as {several}"
    elif re.fullmatch(r"[\w-]+/[\w-]+", path):
      remedy = f"; for a data set of the Hugging Face hub write hub:{path}"
    raise DataError(f"{path}: file does not exist{remedy}")
  if not os.path.isfile(path):
    raise DataError(f"{path}: not a file; name files, such as {path}/*.jsonl")
  if not path.endswith(_ANY):
    ending = os.path.splitext(path)[1]
    packed = "unpack it" if ending in (".gz", ".zst") else "convert it"
    remedy = f"{packed} to .parquet, or to .jsonl with one object per line"
    raise DataError(f"{path}: cannot read {ending or 'no ending'}; {remedy}")


def _of_hub(path: str) -> Iterator[File]:
  match = _HUB.fullmatch(path)
  if match is None:
    name = "hub:organisation/name"
    must = f"{name}, {name}:split or {name}:split@revision"
    raise DataError(f"{path}: malformed; write {must}")
  name, split, revision = match.groups()
  folder = _downloaded(name, split or "", revision)
  converted = f"if the hub has a copy, use {path}@refs/convert/parquet"
  remedy = f"; {converted}" if revision is None else ""
  return _of_folder(path, folder, split or "", name.rpartition("/")[2], remedy)


@functools.cache  # one revision per process, even if the branch moves
def _downloaded(name: str, split: str, revision: str | None) -> str:
  import huggingface_hub  # comes with transformers; loads in a second

  wanted = [f"*{ending}" for ending in ENDINGS]
  if split:
    ways = itertools.product(("", "*/"), _ANY)
    wanted = [f"{above}{split}{_AFTER}*{end[1:]}" for above, end in ways]
  try:
    return huggingface_hub.snapshot_download(
      name, repo_type="dataset", revision=revision, allow_patterns=wanted
    )
  except Exception as e:  # no network, no such name, no permission, ...
    why = (str(e).splitlines() or [type(e).__name__])[0]
    at = f" --revision {revision}" if revision else ""
    at += f' --include "*{split}{_AFTER}*"' if split else ""
    to = name.rpartition("/")[2]
    raise DataError(
      f"hub:{name}: the download failed ({why}); where there is a network run "
      f"'hf download {name} --repo-type dataset{at}', then this command again; "
      f"or add '--local-dir {to}' and name that folder"
    ) from None


def _of_folder(
  given: str, folder: str, split: str, source: str = "", remedy: str = ""
) -> Iterator[File]:
  """The files of a folder, sorted; "" stands for its only split.

  Messages name it as `given`; `remedy` is for a folder without files.
  """
  inside = sorted(_inside(pathlib.Path(folder)))
  if split:
    inside = _of_split(given, split, inside)
  inside = [path for path in inside if path.endswith(ENDINGS)] or inside
  splits = sorted({name for path in inside for name in _SPLITS.findall(path)})
  if len(splits) > 1 and not _SPLITS.search(f"/{split}/"):
    name, at, revision = given.partition("@")
    one = f"{name}{'/' if split else ':'}{splits[0]}{at}{revision}"
    has = f"has the splits {' and '.join(splits)}"
    raise DataError(f"{given}: {has}; name one, such as {one}")
  if not inside:
    what = f"no file of the split {split!r}" if split else "no file"
    ends = f"that ends in {', '.join(_ANY)}"
    raise DataError(f"{given}: contains {what} {ends}{remedy}")
  source = source or _name(pathlib.Path(folder).absolute().name)
  return (File(os.path.join(folder, path), source) for path in inside)


def _inside(folder: pathlib.Path) -> Iterator[str]:
  for path in folder.rglob("*"):
    inside = path.relative_to(folder)
    # Files of tools: .cache/huggingface, and caches of `datasets`.
    hidden = any(part.startswith(".") for part in inside.parts)
    if hidden or inside.name.startswith("cache-") or not path.is_file():
      continue
    if inside.name.endswith(_ANY) and inside.stem not in _DESCRIPTIONS:
      yield inside.as_posix()


def _of_split(given: str, split: str, inside: Sequence[str]) -> list[str]:
  pattern = re.compile(rf"(^|.*?/){re.escape(split)}{_AFTER}")
  matches = [(m[1], path) for path in inside if (m := pattern.match(path))]
  above = sorted({lead for lead, _ in matches})
  if len(above) > 1:
    folders = " and ".join(show(lead or "./") for lead in above)
    must = f"name it with its folder, such as {above[-1]}{split}"
    raise DataError(f"{given}: {split!r} is in {folders}; {must}")
  return [path for _, path in matches]


def read(
  path: str, *, nulls: bool = False, most: int = MAX_LINE
) -> Iterator[tuple[int, dict[str, Any] | Refused]]:
  """The records of a file with their line or row numbers.

  A bad line is its error, and so are a bad value and a line of more than `most`
  bytes. Of a file only a line is held in memory, but all of a list in a .json.
  Without `nulls`, null in a columnar file means that the field is missing.
  """
  empty = True
  if path.endswith(_COLUMNAR):
    lines = _rows(path, nulls)
  else:
    lines = _csv(path) if path.endswith(".csv") else _lines(path)
  for number, text in lines:
    empty = False
    try:
      record, bad = text if isinstance(text, tuple) else (text, {})
      if len(record.rstrip(b"\r\n")) > most:
        raise Refused("", f"longer than {most:,} bytes; shorten the example")
      yield number, strict_json.parse(record) | bad
    except Refused as refused:
      yield number, refused
  if empty:
    raise DataError(f"{path}: the file has no records")


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
  try:
    with open(path, "rb") as file:
      if path.endswith(".json") and file.peek().lstrip()[:1] == b"[":
        try:
          rows = [json.dumps(row).encode() for row in json.load(file)]
        except (ValueError, RecursionError) as error:
          raise DataError(f"{path}: not JSON: {show(str(error))}") from error
        yield from enumerate(rows, 1)
        return
      number = 0
      while line := file.readline(_MAX_HELD):
        number += 1
        if number == 1 and line.startswith(_LFS):
          why = "a git-lfs pointer, not data; run git lfs pull"
          raise DataError(f"{path}, line 1: {why}")
        yield number, line
        while len(line) == _MAX_HELD and not line.endswith(b"\n"):
          line = file.readline(_MAX_HELD)
  except OSError as error:
    raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _csv(path: str) -> Iterator[tuple[int, bytes]]:
  """The rows below the names of the columns, as lines of JSON: values are
  texts, and one that is empty is missing.
  """
  csv.field_size_limit(MAX_LINE)
  number = 1
  try:
    with open(path, newline="", encoding="utf-8-sig") as file:
      rows = csv.reader(file, strict=True)
      names = next(rows, [])
      if len({*names}) < len(names):
        raise DataError(f"{path}: two columns have one name; rename one")
      for row in filter(None, rows):
        number = rows.line_num
        if len(row) != len(names):
          why = f"{len(row)} values for {len(names)} columns; quote commas"
          raise DataError(f"{path}, line {number}: {why}")
        filled = {k: v for k, v in zip(names, row, strict=True) if v}
        yield number, json.dumps(filled, ensure_ascii=False).encode()
  except (OSError, UnicodeDecodeError, csv.Error) as error:
    why = f"cannot be read: {show(str(error))}"
    raise DataError(f"{path}, line {number}: {why}") from error


def _rows(path: str, nulls: bool) -> Iterator[tuple[int, _Row]]:
  ending = path.rpartition(".")[2]
  try:  # imported here because the library is large and optional
    import pyarrow
    from pyarrow import parquet
  except ImportError as error:
    why = f"{path}: {ending} needs pyarrow ({error})"
    raise DataError(f"{why}; pip install 'brorl_jax[parquet]'") from error
  broken = (OSError, ValueError, pyarrow.ArrowException)
  with contextlib.ExitStack() as stack:
    try:
      if path.endswith(".parquet"):
        file = stack.enter_context(parquet.ParquetFile(path))
        names = file.schema_arrow.names
        batches = file.iter_batches(batch_size=_BATCH)
      else:
        mapped = stack.enter_context(pyarrow.memory_map(path))
        batches = stack.enter_context(pyarrow.ipc.open_stream(mapped))
        names = batches.schema.names
    except broken as error:
      raise DataError(f"{path}: not {ending}: {show(str(error))}") from error
    for name in names:
      if names.count(name) > 1:
        raise DataError(f"{path}: column {show(name)} occurs twice; keep one")
    number = 0
    try:
      for batch in batches:
        columns = dict(zip(names, batch.columns, strict=True))
        for i in range(batch.num_rows):
          number += 1
          yield number, _row(columns, i, nulls)
    except broken as error:
      why = f"cannot be read: {show(str(error))}"
      raise DataError(f"{path}, row {number + 1}: {why}") from error


def _row(columns: dict[str, Any], i: int, nulls: bool) -> _Row:
  """A row as a line of JSON, and the errors of values that are not JSON."""
  values, bad = {}, {}
  for name, column in columns.items():
    try:
      value = column[i].as_py()
      value = value if nulls else _without_nulls(value)
      if nulls or value is not None:
        json.dumps(value)
        values[name] = value
    except Exception as e:  # of pyarrow too, for a date that Python lacks
      bad[name] = Refused(name, f"not JSON: {show(str(e))}; write it as text")
  return json.dumps(values, ensure_ascii=False).encode(), bad


def _without_nulls(value: Any) -> Any:
  """Removes null fields: a column exists in every row."""
  if isinstance(value, dict):
    return {k: _without_nulls(v) for k, v in value.items() if v is not None}
  if isinstance(value, list):
    return [_without_nulls(v) for v in value]
  return value
