"""Workloads of the benchmarks: model shapes, lengths, ends of rollouts.

Standard library only, because environments without this project import it.
"""

import dataclasses
import math
import pathlib
import random
import re
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Model:
  """A Qwen2: biases on queries, keys and values, none elsewhere."""

  vocab: int
  width: int
  mlp: int
  layers: int
  heads: int
  kv_heads: int
  head_size: int
  tied: bool = True  # the embedding is also the output matrix
  rope_theta: float = 1e6
  norm_eps: float = 1e-6

  @property
  def layer_weights(self) -> int:
    """Numbers of a layer's matrices."""
    heads = 2 * self.heads + 2 * self.kv_heads
    return self.width * (heads * self.head_size + 3 * self.mlp)


SMALL = Model(
  vocab=2048,
  width=256,
  mlp=704,
  layers=6,
  heads=8,
  kv_heads=2,
  head_size=32,
)
QWEN2_5_1_5B = Model(
  vocab=151936,
  width=1536,
  mlp=8960,
  layers=28,
  heads=12,
  kv_heads=2,
  head_size=128,
)


@dataclasses.dataclass(frozen=True)
class Workload:
  """Lengths and model; always temperature 1, without top-k or top-p."""

  model: Model
  prompt: int  # tokens
  new: int  # tokens of a response at most
  prompts: int = 1  # each with n responses
  n: int = 512
  dtype: str = "float32"
  one_in: int | None = (
    None  # one token in this many ends a response; None: never
  )
  slots: int | None = None  # responses in progress at a time; None: all
  # Lengths that responses are drawn to have, in place of `one_in`.
  lengths: tuple[int, ...] = ()
  accelerator: bool = False  # too large for a CPU

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """Tokens that end a response.

    Random weights say every token about equally often, so that this share of
    the vocabulary ends one token in `one_in`.
    """
    if self.lengths:
      return (0,)
    if self.one_in is None:
      return ()
    return tuple(range(self.model.vocab // self.one_in))

  def drawn(self, count: int, seed: int) -> list[int]:
    """Lengths of so many responses, as this policy would end them."""
    source = random.Random(seed)
    if self.lengths:
      return [min(source.choice(self.lengths), self.new) for _ in range(count)]
    if self.one_in is None:
      return [self.new] * count
    goes_on = math.log1p(-1 / self.one_in)
    # 1 - random() is above 0.
    length = lambda: 1 + int(math.log(1 - source.random()) / goes_on)
    return [min(length(), self.new) for _ in range(count)]


WORKLOADS = {
  "w1": Workload(SMALL, prompt=128, new=128),
  "w2": Workload(SMALL, prompt=512, new=64),
  "w3": Workload(SMALL, prompt=128, new=128, one_in=32, slots=128),
  "w4": Workload(
    QWEN2_5_1_5B,
    prompt=512,
    new=2048,
    prompts=4,
    dtype="bfloat16",
    accelerator=True,
  ),
}
# What is trained on: one optimizer update with all responses.
WORKLOADS |= {
  "l1": WORKLOADS["w1"],
  "l2": WORKLOADS["w2"],
  "l3": dataclasses.replace(WORKLOADS["w4"], n=128),
}


def model_of(text: str, vocab: int) -> Model:
  """`WIDTHxLAYERS`, the rest in the proportions of a small Qwen2.

  Heads of 64, four to a key/value head; a feed-forward of 2.75 widths.

  Raises:
    ValueError: It is not of this form.
  """
  found = re.fullmatch(r"(\d+)x(\d+)", text)
  width, layers = map(int, found.groups()) if found else (0, 0)
  if not layers or not width or width % 64:
    raise ValueError(f"{text!r} is not WIDTHxLAYERS, with a width in 64s")
  heads = width // 64
  return Model(
    vocab=vocab,
    width=width,
    mlp=-(-11 * width // 256) * 64,
    layers=layers,
    heads=heads,
    kv_heads=heads // 4 if heads % 4 == 0 else 1,
    head_size=64,
  )


def read_lengths(path: str) -> tuple[int, ...]:
  """Of a file with a length of a response in every line, as runs have them.

  Raises:
    ValueError: A line is no positive number.
  """
  out = []
  for i, line in enumerate(pathlib.Path(path).read_text().split(), 1):
    if not line.isdecimal() or int(line) < 1:
      raise ValueError(f"{path}: line {i} is {line!r}, not a length")
    out.append(int(line))
  if not out:
    raise ValueError(f"{path} has no lengths")
  return tuple(out)


def end_logits(
  lengths: Sequence[int], new: int, vocab: int
) -> tuple[float, ...]:
  """What the logit of the end token must be, by the tokens so far.

  Of a policy that says all others about equally often: then a response ends
  with token t with the probability h_t = P(length = t | length >= t), and has
  the lengths that are given. Index t - 1 is of token t; longer ones are cut.
  """
  out = []
  for t in range(1, new + 1):
    alive = sum(length >= t for length in lengths)
    h = sum(length == t for length in lengths) / alive if alive else 1.0
    odds = math.log(h) - math.log1p(-h) if 0 < h < 1 else 60 * (2 * h - 1)
    out.append(odds + math.log(vocab - 1))
  return tuple(out)


def prompt_ids(workload: Workload, index: int = 0) -> list[int]:
  """Token ids of one of its prompts, the same everywhere."""
  source = random.Random(index)
  vocab = workload.model.vocab
  return [source.randrange(10, vocab) for _ in range(workload.prompt)]
