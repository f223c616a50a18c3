"""Hugging Face tokenizers: text <-> token ids, prompts by chat template."""

import collections
import hashlib
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from brorl_jax.errors import first_line


class Template(NamedTuple):
  """A chat template in place of a checkpoint's own.

  Attributes:
    where: A file, or a run that has it, for messages.
    text: In jinja.
  """

  where: str
  text: str

  @property
  def digest(self) -> str:
    """32 hexadecimal digits that change with any character."""
    return hashlib.sha256(self.text.encode()).hexdigest()[:32]


def read_template(path: str | pathlib.Path) -> Template:
  """The chat template of a file.

  Raises:
    ValueError: There is none, in one line.
  """
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
  the one of their model type; the class used here does not.

  Attributes:
    stop_ids: Every id that ends a response.
    pad_id: Of padding; the first of the stop ids where there is none.
    size: Number of ids.
    template: In place of the directory's own; None: its own.
  """

  def __init__(
    self, directory: str | pathlib.Path, template: Template | None = None
  ):
    """Reads a Hugging Face directory.

    Args:
      directory: Holds tokenizer.json.
      template: In place of the directory's own chat template.

    Raises:
      ValueError: It holds no tokenizer.json that can be read, or the template
        does not pose a question.
    """
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
    self._check_template(template.where if template else str(directory))
    self.stop_ids = _stop_ids(
      directory, self._tokenizer.eos_token_id, self.size
    )
    pad = self._tokenizer.pad_token_id
    self.pad_id = self.stop_ids[0] if pad is None else pad

  def _check_template(self, where: str) -> None:
    if not self._tokenizer.chat_template:
      if self.template is not None:
        raise ValueError(f"{where}: its chat template is empty")
      raise ValueError(
        f"{where} has no chat template; add one as chat_template.jinja, or give"
        " one with --config.policy.chat_template=FILE"
      )
    try:
      one, other = (
        self.render([{"role": "user", "content": text}]) for text in "12"
      )
    except Exception as e:  # a template is code and may raise anything
      raise ValueError(
        f"{where}: its chat template fails: {first_line(e)}"
      ) from e
    if one == other:
      raise ValueError(f"{where}: its chat template leaves out the question")

  def render(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The ids of a conversation as the model's own template poses it."""
    return self._tokenizer.apply_chat_template(
      [dict(message) for message in messages],
      add_generation_prompt=True,
      return_dict=False,
    )

  def encode(self, text: str) -> list[int]:
    """Ids of plain text, nothing added."""
    return self._tokenizer.encode(text, add_special_tokens=False)

  def decode(self, responses: Iterable[Sequence[int]]) -> list[str]:
    """Texts of responses, without what ends them."""
    batch = list(responses)
    if not batch:  # which batch_decode takes for one empty response
      return []
    return self._tokenizer.batch_decode(batch, skip_special_tokens=True)


def _stop_ids(
  directory: pathlib.Path, eos: int | None, size: int
) -> tuple[int, ...]:
  """Ids that `generation_config.json` names, else the config's, else eos."""
  ids = None
  for name in ("generation_config.json", "config.json"):
    path = directory / name
    if ids is None and path.is_file():
      try:
        ids = json.loads(path.read_text()).get("eos_token_id")
      except (OSError, ValueError, AttributeError) as e:
        raise ValueError(f"{path} is damaged: {e}") from None
  ids = eos if ids is None else ids
  ids = ids if isinstance(ids, list) else [ids]
  if not ids or ids == [None]:
    raise ValueError(
      f"{directory} names no token that ends a response; set eos_token_id in "
      "its generation_config.json"
    )
  good = [i for i in ids if type(i) is int and 0 <= i < size]
  if wrong := [i for i in ids if i not in good]:
    raise ValueError(
      f"{directory}: eos_token_id {wrong[0]!r} is not an id from 0 to "
      f"{size - 1}"
    )
  return tuple(good)


def left_pad(
  prompts: Sequence[Sequence[int]], width: int
) -> tuple[np.ndarray, np.ndarray]:
  """Tokens and mask [P,S], every prompt's last token in the last place.

  Raises:
    ValueError: A prompt is empty, or longer than `width`.
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


# How Qwen2 splits text before byte-pair merges. transformers uses it for every
# directory whose config.json says qwen2, so a tokenizer of such a directory
# must be trained with it.
_QWEN2_SPLIT = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PAD, _ASK, _END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_TEMPLATE = (
  "{% for m in messages %}{{ m['content'] }}{% endfor %}"
  "{% if add_generation_prompt %}" + _ASK + "{% endif %}"
)


def build(
  directory: str | pathlib.Path,
  texts: Sequence[str],
  *,
  size: int,
  whole: Sequence[str] = (),
  merges: int = 700,
) -> Tokenizer:
  """Trains a byte-level BPE on `texts` and writes it in Hugging Face's form.

  Sentences that the texts share word for word become one token each: puzzles
  are posed in the same few words, and a prompt is then a dozen tokens, not a
  hundred.

  Args:
    directory: Where tokenizer.json and the template go.
    texts: Questions. Same texts, same tokenizer.
    size: Number of ids, the special ones included.
    whole: Texts that are one token each.
    merges: How many sentences, and pieces of them, are looked for.
  """
  import tokenizers
  from transformers import PreTrainedTokenizerFast

  phrases = [*whole, *_phrases(texts, merges)]
  split = tokenizers.Regex(_QWEN2_SPLIT)
  bpe = _train_bpe(texts, split, size - len(phrases), [_PAD, _ASK, _END])
  bpe.add_tokens([tokenizers.AddedToken(p, normalized=False) for p in phrases])
  PreTrainedTokenizerFast(
    tokenizer_object=bpe,
    eos_token=_END,
    pad_token=_PAD,
    padding_side="left",
    chat_template=_TEMPLATE,
  ).save_pretrained(directory)
  return Tokenizer(directory)


def _train_bpe(texts, split, size, special):
  from tokenizers import Tokenizer as Rust
  from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

  bpe = Rust(models.BPE())
  bpe.normalizer = normalizers.NFC()
  bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  bpe.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.Split(split, "isolated"), bytes_only]
  )
  bpe.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=size,
    special_tokens=special,
    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    show_progress=False,
  )
  bpe.train_from_iterator(texts, trainer)
  return bpe


def _phrases(texts: Sequence[str], merges: int) -> list[str]:
  """Stretches of several words that at least 1 % of the texts share.

  Found by a BPE whose merges may cross blanks; only digits stay apart.
  """
  import tokenizers

  bpe = _train_bpe(texts, tokenizers.Regex("[0-9]"), merges, [])
  used = collections.Counter()
  for encoding in bpe.encode_batch(list(texts)):
    used.update(set(encoding.ids))
  common = [bpe.decode([i]) for i, n in used.items() if n >= len(texts) / 100]
  phrases = [text for text in common if len(text.split()) > 1]
  # "the letter "e" appear" is "the letter " and "appear" with an accident.
  inside = lambda text: any(p != text and p in text for p in phrases)
  return sorted(text for text in phrases if not inside(text))
