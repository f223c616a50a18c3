"""Hugging Face tokenizers: text <-> token ids, prompts by chat template."""

import contextlib
import datetime
import functools
import hashlib
import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from brorl_jax.errors import first_line
from brorl_jax.verdicts.base import opened_thinking

DATE = "date of the chat template"  # its name among what a run records
# A call that prints the date in a form that can be read off.
_TODAY = re.compile(
  r"strftime_now\(\s*(?:format\s*=\s*)?([\"'])([^\"']*)\1\s*\)"
)

# What belongs to a model beside config and weights, copied as it is.
GENERATION = "generation_config.json"
FILES = (
  *"tokenizer.json tokenizer_config.json special_tokens_map.json".split(),
  *"added_tokens.json vocab.json merges.txt tokenizer.model".split(),
  *("chat_template.jinja", "chat_template.json", GENERATION),
)
ASSETS = pathlib.Path(__file__).parents[1] / "assets"  # the embedded policies
MAX_BYTES = 1 << 28  # of a text; the largest tokenizer.json in use has 34 MB
# How a template poses what is said so far: as text, up to the policy's turn.
_POSED: Any = {"add_generation_prompt": True, "tokenize": False}
# CPU seconds and MB of a trial; ten times as many seconds may pass.
_TRIAL_S, _TRIAL_MB = 60, 4096
_ASKED = (
  "x" * 20_000 + "for a in range(10): print('1,000.5')\n" * 500,
  "Сколько будет 2 + ٣? 数学は楽しい。 हिन्दी e\u0301 🧮\u200b\r\n\t- a_b\0\n",
  "1",
)


def model_file(path: pathlib.Path, most: int = MAX_BYTES) -> pathlib.Path:
  """The path of a file of a model, which may be missing.

  Raises ValueError if it has more than `most` bytes, is a link out of its
  folder, or a pipe or device, whose content may never end.
  """
  real, folder = map(os.path.realpath, (path, path.parent))
  within = [folder]
  # In the hub's cache a file of a snapshot is a link to ../../blobs, and that
  # one to the blobs that all its models share.
  if cached := re.match("(.*)(/models--[^/]+)/snapshots/[^/]+", folder):
    within += [cached[1] + cached[2] + "/blobs", cached[1] + "/blobs"]
  if not any(pathlib.Path(real).is_relative_to(each) for each in within):
    raise ValueError(f"{path} is a link out of its folder; copy {real} there")
  if os.path.exists(real) and not os.path.isfile(real):
    raise ValueError(f"{path} is not a regular file; no other kind is read")
  if os.path.isfile(real) and (size := os.path.getsize(real)) > most:
    raise ValueError(f"{path} has {size:,} bytes; at most {most:,} are read")
  return path


class Template(NamedTuple):
  """A chat template in place of a checkpoint's own."""

  where: str  # a file, or a run that has it, for messages
  text: str  # in jinja

  @property
  def digest(self) -> str:
    return hashlib.sha256(self.text.encode()).hexdigest()[:32]


def read_template(path: str | pathlib.Path) -> Template:
  """The chat template of a file."""
  try:
    given = os.path.realpath(pathlib.Path(path).expanduser())
    # With line ends as transformers reads them, which become tokens.
    text = model_file(pathlib.Path(given)).read_text(encoding="utf-8")
  except UnicodeDecodeError as e:
    raise ValueError(f"chat template {path} is not UTF-8: {e.reason}") from None
  except (OSError, RuntimeError) as e:
    why = getattr(e, "strerror", None) or e
    raise ValueError(f"chat template {path} cannot be read: {why}") from None
  return Template(str(path), text)


@contextlib.contextmanager
def _trial(
  folder: pathlib.Path, template: Template | None, today: str
) -> Iterator[list[list[int]]]:
  """Tries a foreign tokenizer in a process of bounded time and memory.

  A template can loop for ever or take all memory, and the tokenizer, in Rust,
  can end its process. The body runs meanwhile; then the list holds the ids of a
  question, unless the tokenizer is ours. Raises ValueError with the reason.
  """
  ids, ours = list[list[int]](), map(_contents, (ASSETS, ASSETS / "steps"))
  if template is None and _contents(folder) in ours:
    yield ids
    return
  path = [os.path.abspath(entry) for entry in sys.path]
  code = f"import sys\nsys.path[:], sys.modules['torch'] = {path!r}, None\n"
  code += "from brorl_jax.model import tokenizer\ntokenizer.try_out()"
  limits = f"ulimit -c 0; ulimit -v {_TRIAL_MB << 10}; ulimit -S -t {_TRIAL_S}"
  command = ["sh", "-c", f'{limits}; exec "$@"', "", sys.executable, "-c", code]
  # Each thread would reserve 72 MB of addresses, and 128 cores have as many.
  threads = "RAYON_NUM_THREADS OPENBLAS_NUM_THREADS OMP_NUM_THREADS".split()
  how: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
  how["env"] = os.environ | dict.fromkeys([*threads, "MALLOC_ARENA_MAX"], "1")
  with subprocess.Popen(command, text=True, errors="replace", **how) as child:
    try:
      yield ids
      asked = json.dumps([str(folder), template, today])
      said, noise = child.communicate(asked)
    finally:
      child.kill()
  status, end = -child.returncode, noise.strip().rpartition("\n")[2]
  where = template.where if template else str(folder)
  if end.startswith(own := "ValueError: "):
    end = end.removeprefix(own).removeprefix(f"{where}: ")
    raise ValueError(end if str(folder) in end else f"{where}: {end}")
  if status in (signal.SIGXCPU, signal.SIGALRM):
    end = f"takes more than {_TRIAL_S} s"
  elif "memory allocation of" in noise or end == "MemoryError":  # so says Rust
    end = f"takes more than {_TRIAL_MB:,} MB"
  elif status > 0:
    end = f"ends its process with {signal.Signals(status).name}"
  if status:
    which = f" with {where}" if template else ""
    raise ValueError(f"{folder}/tokenizer.json{which}: {end}")
  ids.append(json.loads(said))


def try_out() -> None:
  """What the process of a trial does: writes the ids of the last question."""
  signal.alarm(10 * _TRIAL_S)
  folder, template, today = json.load(sys.stdin)
  text = Tokenizer(folder, template and Template(*template), today, trial=False)
  for asked in _ASKED:
    user = {"role": "user", "content": asked}
    ids = text.render([user])
    with contextlib.suppress(ValueError):  # some refuse a system's message
      text.render([user | {"role": "system"}, user])
  print(ids)


def _contents(folder: pathlib.Path) -> list[bytes]:
  """Of the files that transformers reads of a tokenizer."""
  paths = [folder / name for name in FILES if name != GENERATION]
  paths += sorted(folder.glob("additional_chat_templates/*"))
  return [x.read_bytes() if model_file(x).is_file() else b"" for x in paths]


class Tokenizer:
  """A `tokenizer.json`, read as it stands.

  transformers' AutoTokenizer replaces the pre-tokenizer of some directories by
  the one of their model type; the class used here does not. Each of `stop_ids`
  ends a response; `pad_id` is the first of them where there is no padding.
  `opened` is the tag at the end of every prompt that opens thinking, or "";
  `date` the one that every prompt shows, `today` if given, or "".
  """

  def __init__(
    self,
    directory: str | pathlib.Path,
    template: Template | None = None,
    today: str = "",
    trial: bool = True,
  ):
    today = today or str(datetime.date.today())
    directory = pathlib.Path(directory)
    path = directory / "tokenizer.json"
    if not model_file(path).is_file():
      raise ValueError(f"{path} is missing")
    tried = contextlib.nullcontext([])
    with _trial(directory, template, today) if trial else tried as self._asked:
      from transformers import PreTrainedTokenizerFast  # 1 s, not for --help
    try:
      self._tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    except Exception as e:  # the Rust parser raises bare Exception
      raise ValueError(f"{path} is damaged: {first_line(e)}") from None
    self.size = len(self._tokenizer)
    self.template = template
    if template is not None:
      self._tokenizer.chat_template = template.text
    self._check_template(template.where if template else str(directory), today)
    self.stop_ids = _stops(directory, self._tokenizer.eos_token_id, self.size)
    pad = self._tokenizer.pad_token_id
    self.pad_id = self.stop_ids[0] if pad is None else pad

  def _check_template(self, where: str, today: str) -> None:
    if not self._tokenizer.chat_template:
      if self.template is not None:
        raise ValueError(f"{where}: its chat template is empty")
      raise ValueError(
        f"{where} has no chat template; add one as chat_template.jinja, or give"
        " one with --config.policy.chat_template=FILE"
      )
    try:
      self.date = self._freeze_date(today)
      ask = lambda text: self.render([{"role": "user", "content": text}])
      one, other, *again = map(ask, "1211111")
    except ValueError as e:
      raise ValueError(f"{where}: {e}") from e
    if one == other:
      raise ValueError(f"{where}: its chat template leaves out the question")
    if any(ids != one for ids in again) or self._asked not in ([], [one]):
      raise ValueError(f"{where}: its chat template writes at random")
    self.opened = opened_thinking(self._tokenizer.decode(one))

  def _freeze_date(self, today: str) -> str:
    """Writes the date into the template; returns it, or "" if it has none."""
    text = self._tokenizer.get_chat_template()
    day = datetime.date.fromisoformat(today)
    dated = _TODAY.sub(lambda c: c[1] + day.strftime(c[2]) + c[1], text)
    if re.search(r"strftime_now(?!\s+is\b)", dated):
      raise ValueError(
        "its chat template prints the time; give a copy without strftime_now:"
        " --config.policy.chat_template=FILE"
      )
    self._tokenizer.chat_template = dated
    return "" if dated == text else str(day)

  def render(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The ids of a conversation as the model's own template poses it."""
    try:
      asked = [dict(message) for message in messages]
      text = self._tokenizer.apply_chat_template(asked, **_POSED)
      size = sum(len(message["content"]) for message in messages)
      if len(text) > 100_000 + 20 * size:  # templates write some 2,000
        raise ValueError(f"it makes {len(text):,} characters of {size:,}")
      for said in [m["content"] for m in messages if m["role"] == "system"]:
        shown = text.count(said.strip())  # the question may say the same
        if shown <= messages[-1]["content"].count(said.strip()):
          raise ValueError("it leaves out the system message")
      return self.encode(text)
    except (KeyboardInterrupt, MemoryError, SystemExit):
      raise
    # A template is code and may raise anything, and a panic in Rust may follow.
    except BaseException as e:
      raise ValueError(f"the chat template fails: {first_line(e)}") from e

  @functools.cached_property
  def _around(self) -> tuple[str, str]:
    """What the template writes between a turn of the policy, without what ends
    it, and a user's next message, and behind that. Raises ValueError.
    """
    said = [("user", "?"), ("assistant", "\ue000"), ("user", "\ue001")]
    text = ""
    with contextlib.suppress(Exception):  # a template is code
      turns = [{"role": role, "content": text} for role, text in said]
      text = self._tokenizer.apply_chat_template(turns, **_POSED)
    before, between, after = text.rpartition("\ue000")[2].partition("\ue001")
    if not between or not after:
      must = "give one that does with --config.policy.chat_template=FILE"
      raise ValueError(f"its chat template poses no second turn; {must}")
    tokens = self._tokenizer.convert_ids_to_tokens([*self.stop_ids])
    ends = [before.find(x) + len(x) for x in tokens if x in before]
    return before[min(ends, default=0) :], after

  def reply(self, text: str) -> list[int]:
    """The ids of a user's message behind a turn of the policy."""
    return self.encode(text.join(self._around))

  def replied(self, ids: Sequence[int]) -> str:
    """The text of which `reply` made these ids."""
    before, after = self._around
    text = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return text.removeprefix(before).removesuffix(after)

  def encode(self, text: str) -> list[int]:
    """Ids of plain text, nothing added."""
    return self._tokenizer.encode(text, add_special_tokens=False)

  def decode(self, responses: Iterable[Sequence[int]]) -> list[str]:
    """Texts after the tag that the prompt opened, without what ends them."""
    more = lambda token: token not in self.stop_ids
    kept = ([*itertools.takewhile(more, ids)] for ids in responses)
    how = {"clean_up_tokenization_spaces": False}
    return [self.opened + self._tokenizer.decode(i, **how) for i in kept]

  def pieces(self, ids: Iterable[int]) -> list[str]:
    """The text of each token by itself; of a part of a character U+FFFD."""
    return [self._tokenizer.decode([i]) for i in ids]


def _stops(folder: pathlib.Path, eos: int | None, size: int) -> tuple[int, ...]:
  """Ids that `generation_config.json` names, else the config's, else eos."""
  ids = None
  for name in (GENERATION, "config.json"):
    path = model_file(folder / name)
    if ids is None and path.is_file():
      try:
        ids = json.loads(path.read_text()).get("eos_token_id")
      except (OSError, ValueError, AttributeError) as e:
        raise ValueError(f"{path} is damaged: {e}") from None
  ids = eos if ids is None else ids
  ids = ids if isinstance(ids, list) else [ids]
  if not ids or ids == [None]:
    raise ValueError(
      f"{folder} names no token that ends a response; set eos_token_id in "
      "its generation_config.json"
    )
  good = [i for i in ids if type(i) is int and 0 <= i < size]
  if wrong := [i for i in ids if i not in good]:
    raise ValueError(
      f"{folder}: eos_token_id {wrong[0]!r} is not an id from 0 to {size - 1}"
    )
  return tuple(good)


def left_pad(
  prompts: Sequence[Sequence[int]], width: int
) -> tuple[np.ndarray, np.ndarray]:
  """Tokens and mask [P,S], every prompt's last token in the last place. Raises
  ValueError if a prompt is empty, or longer than `width`.
  """
  tokens = np.zeros((len(prompts), width), np.int32)
  mask = np.zeros((len(prompts), width), bool)
  for row, ids in enumerate(prompts):
    if not 0 < len(ids) <= width:
      raise ValueError(
        f"prompt {row} has {len(ids)} tokens; the budget is 1 to {width}"
      )
    tokens[row, width - len(ids) :] = ids
    mask[row, width - len(ids) :] = True
  return tokens, mask
