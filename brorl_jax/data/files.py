"""Finds the files that a config names: files, patterns, folders, hub names.

    find("data/*.jsonl")
    find("gsm8k:main/train")       # a folder, one split of it
    find("hub:openai/gsm8k:main/train@refs/convert/parquet")

A folder may have the layout of a Hugging Face data set, of `hf download`, or of
`datasets.save_to_disk`.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence

from brorl_jax.data.records import ENDINGS, DataError
from brorl_jax.verdicts.strict_json import show

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


@dataclasses.dataclass(frozen=True)
class File:
  """A file of records."""

  path: str
  # Default "source" of its examples: its name without the ending, or the name
  # of its folder or data set.
  source: str


def find(paths: str | Sequence[str]) -> list[File]:
  """The named files in order, each once.

  Args:
    paths: Files; patterns such as "data/*.jsonl" (matches are sorted); folders,
      or one split of a folder, "folder:train"; or data sets of the Hugging Face
      hub, which are downloaded, "hub:organisation/name:split@revision" (split
      and revision are optional).

  Raises:
    DataError: A path does not exist, a pattern matches nothing, a folder has no
      such file or several splits, a file is named twice, or a name does not end
      in .jsonl, .parquet or .arrow.
  """
  paths = [paths] if isinstance(paths, str) else list(paths)
  if not paths:
    raise DataError("no data files given; name at least one")
  by_path: dict[str, File] = {}
  for file in (file for path in paths for file in _meant(os.fspath(path))):
    same = os.path.realpath(file.path)
    if same in by_path:
      raise DataError(f"{file.path}: the file is named twice; name it once")
    by_path[same] = file
  return list(by_path.values())


def names(files: Iterable[File]) -> dict[str, str]:
  """A short unique name for each path.

  The file's name without its ending. If several share it, the name with its
  ending and as many parent folders as distinguish them.
  """
  paths = sorted({os.path.abspath(file.path) for file in files})
  out: dict[str, str] = {}
  depth = 0
  while paths:
    short = {path: _short(path, depth) for path in paths}
    taken = list(short.values())
    last = depth > max(path.count(os.sep) for path in paths)
    good = [path for path in paths if last or taken.count(short[path]) == 1]
    out |= {path: short[path] for path in good}
    paths = [path for path in paths if path not in out]
    depth += 1
  return out


def _short(path: str, depth: int) -> str:
  if not depth:
    return _name(pathlib.Path(path).stem)
  return "/".join(map(_name, path.split(os.sep)[-depth:]))


def _name(text: str) -> str:
  """Makes a text a valid source name."""
  return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:128]


def _meant(path: str) -> Iterator[File]:
  """The files that one entry of the config names."""
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
  if path.endswith(ENDINGS):
    return
  ending = os.path.splitext(path)[1]
  remedy = {
    ".json": "write one object per line into a .jsonl",
    ".gz": "unpack it",
    ".zst": "unpack it",
  }.get(ending, "use .jsonl or .parquet")
  raise DataError(f"{path}: cannot read {ending or 'no ending'}; {remedy}")


def _of_hub(path: str) -> Iterator[File]:
  match = _HUB.fullmatch(path)
  if match is None:
    raise DataError(
      f"{path}: malformed; write hub:organisation/name,"
      " hub:organisation/name:split or hub:organisation/name:split@revision"
    )
  name, split, revision = match.groups()
  folder = _downloaded(name, split or "", revision)
  converted = ""
  if revision is None:
    converted = (
      "; if the hub has converted it to parquet, use"
      f" {path}@refs/convert/parquet"
    )
  source = name.rpartition("/")[2]
  return _of_folder(path, folder, split or "", source, converted)


@functools.cache  # one revision per process, even if the branch moves
def _downloaded(name: str, split: str, revision: str | None) -> str:
  """Downloads a split of a data set and returns its folder."""
  import huggingface_hub  # comes with transformers; loads in a second

  wanted = [f"*{ending}" for ending in ENDINGS]
  if split:
    wanted = [
      f"{above}{split}{_AFTER}*{ending[1:]}"
      for above in ("", "*/")
      for ending in ENDINGS
    ]
  try:
    return huggingface_hub.snapshot_download(
      name, repo_type="dataset", revision=revision, allow_patterns=wanted
    )
  except Exception as e:  # no network, no such name, no permission, ...
    why = (str(e).splitlines() or [type(e).__name__])[0]
    at = f" --revision {revision}" if revision else ""
    to = name.rpartition("/")[2]
    given = f"{to}:{split}" if split else to
    raise DataError(
      f"hub:{name}: the download failed ({why}); on a machine with a network "
      f"run 'hf download {name} --repo-type dataset{at} --local-dir {to}', "
      f"then use --config.data.files={given}"
    ) from None


def _of_folder(
  given: str, folder: str, split: str, source: str = "", remedy: str = ""
) -> Iterator[File]:
  """The files of a folder, sorted; "" stands for its only split.

  `given` is its name in messages, to which `remedy` is added if it has no
  files. The source of its examples is its name by default.
  """
  inside = sorted(_inside(pathlib.Path(folder)))
  if split:
    inside = _of_split(given, split, inside)
  splits = sorted({name for path in inside for name in _SPLITS.findall(path)})
  if len(splits) > 1 and not _SPLITS.search(f"/{split}/"):
    raise DataError(
      f"{given}: has the splits {' and '.join(splits)}; name one, such as"
      f" {_with_split(given, split, splits[0])}"
    )
  if not inside:
    what = f"no file of the split {split!r}" if split else "no file"
    raise DataError(
      f"{given}: contains {what} that ends in {', '.join(ENDINGS)}{remedy}"
    )
  source = source or _name(pathlib.Path(folder).absolute().name)
  return (File(os.path.join(folder, path), source) for path in inside)


def _with_split(given: str, above: str, split: str) -> str:
  name, at, revision = given.partition("@")
  return f"{name}{'/' if above else ':'}{split}{at}{revision}"


def _inside(folder: pathlib.Path) -> Iterator[str]:
  for path in folder.rglob("*"):
    inside = path.relative_to(folder)
    # Files of tools: .cache/huggingface, and caches of `datasets`.
    hidden = any(part.startswith(".") for part in inside.parts)
    if hidden or inside.name.startswith("cache-") or not path.is_file():
      continue
    if inside.name.endswith(ENDINGS):
      yield inside.as_posix()


def _of_split(given: str, split: str, inside: Sequence[str]) -> list[str]:
  pattern = re.compile(rf"(^|.*?/){re.escape(split)}{_AFTER}")
  matches = [(m[1], path) for path in inside if (m := pattern.match(path))]
  above = sorted({lead for lead, _ in matches})
  if len(above) > 1:
    folders = " and ".join(show(lead or "./") for lead in above)
    raise DataError(
      f"{given}: {split!r} is in {folders}; name it with its folder, such as"
      f" {above[-1]}{split}"
    )
  return [path for _, path in matches]
