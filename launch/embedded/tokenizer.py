"""Trains the tokenizer of a small policy on the questions of its puzzles."""

import collections
import pathlib
from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from brorl_jax.model.tokenizer import Tokenizer

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
  merges: int,
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
  bpe = tokenizers.Tokenizer(models.BPE())
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
  bpe = _train_bpe(texts, tokenizers.Regex("[0-9]"), merges, [])
  used = collections.Counter()
  for encoding in bpe.encode_batch(list(texts)):
    used.update(set(encoding.ids))
  common = [bpe.decode([i]) for i, n in used.items() if n >= len(texts) / 100]
  phrases = [text for text in common if len(text.split()) > 1]
  # "the letter "e" appear" is "the letter " and "appear" with an accident.
  inside = lambda text: any(p != text and p in text for p in phrases)
  return sorted(text for text in phrases if not inside(text))
