"""Hugging Face tokenizers: text <-> token ids, prompts by chat template."""

import datetime
import hashlib
import itertools
import json
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from brorl_jax.errors import first_line
from brorl_jax.verdicts.base import opened_thinking

DATE = "date of the chat template"  # its name among what a run records
# A call that prints the date in a form that can be read off.
_TODAY = re.compile(
  r"strftime_now\(\s*(?:format\s*=\s*)?([\"'])([^\"']*)\1\s*\)"
)


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
    # With line ends as transformers reads them, which become tokens.
    text = pathlib.Path(path).expanduser().read_text(encoding="utf-8")
  except UnicodeDecodeError as e:
    raise ValueError(f"chat template {path} is not UTF-8: {e.reason}") from None
  except (OSError, RuntimeError) as e:
    why = getattr(e, "strerror", None) or e
    raise ValueError(f"chat template {path} cannot be read: {why}") from None
  return Template(str(path), text)


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
  ):
    from transformers import PreTrainedTokenizerFast  # 1 s, not for --help

    directory = pathlib.Path(directory)
    path = directory / "tokenizer.json"
    if not path.is_file():
      raise ValueError(f"{path} is missing")
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
    if any(ids != one for ids in again):
      raise ValueError(f"{where}: its chat template writes at random")
    self.opened = opened_thinking(self._tokenizer.decode(one))

  def _freeze_date(self, today: str) -> str:
    """Writes the date into the template; returns it, or "" if it has none."""
    text = self._tokenizer.get_chat_template()
    day = datetime.date.fromisoformat(today or str(datetime.date.today()))
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
      return self._tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        add_generation_prompt=True,
        return_dict=False,
      )
    except Exception as e:  # a template is code and may raise anything
      raise ValueError(f"the chat template fails: {first_line(e)}") from e

  def encode(self, text: str) -> list[int]:
    """Ids of plain text, nothing added."""
    return self._tokenizer.encode(text, add_special_tokens=False)

  def decode(self, responses: Iterable[Sequence[int]]) -> list[str]:
    """Texts after the tag that the prompt opened, without what ends them."""
    more = lambda token: token not in self.stop_ids
    kept = ([*itertools.takewhile(more, ids)] for ids in responses)
    how = {"clean_up_tokenization_spaces": False}
    return [self.opened + self._tokenizer.decode(i, **how) for i in kept]


def _stops(folder: pathlib.Path, eos: int | None, size: int) -> tuple[int, ...]:
  """Ids that `generation_config.json` names, else the config's, else eos."""
  ids = None
  for name in ("generation_config.json", "config.json"):
    path = folder / name
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
