"""Workloads of the benchmarks: model shapes, lengths, ends of rollouts.

Standard library only, because environments without this project import it.
"""

import dataclasses
import math
import pathlib
import random
import re
from collections.abc import Sequence

# Of what a prompt may have. Where responses end, it is with tokens from 0 on.
FIRST_ID = 10


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
  # One token in this many, up to the vocabulary, ends a response; None: never.
  one_in: int | None = None
  slots: int | None = None  # responses in progress at a time; None: all
  # Lengths that responses are drawn to have, in place of `one_in`.
  lengths: tuple[int, ...] = ()
  accelerator: bool = False  # too large for a CPU

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """Tokens that end a response.

    Random weights say every token about equally often, so that one in `one_in`
    ends a response, as nearly as whole tokens allow.
    """
    if self.lengths:
      return (0,)
    if self.one_in is None:
      return ()
    return tuple(range(round(self.model.vocab / self.one_in)))

  def drawn(self, count: int, seed: int) -> list[int]:
    """Lengths of this many responses, as this policy would end them."""
    source = random.Random(seed)
    if self.lengths:
      return [min(source.choice(self.lengths), self.new) for _ in range(count)]
    share = len(self.stop_ids) / self.model.vocab
    if share in (0, 1):
      return [1 if share else self.new] * count
    goes_on = math.log1p(-share)
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


_MORE = "heads", "kv_heads", "head_size", "mlp"


def model_of(text: str, vocab: int) -> Model:
  """`WIDTHxLAYERS`, or `WIDTHxLAYERS:heads=8,kv_heads=2,head_size=32,mlp=704`.

  What is not given is in the proportions of a small Qwen2: heads of 64, or of
  the width divided by their number; four to a key/value head; a feed-forward of
  2.75 widths.

  Raises:
    ValueError: It is not of this form, or heads do not fit.
  """
  found = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})(?::(.*))?", text)
  width, layers = map(int, found.groups()[:2]) if found else (0, 0)
  more = _sizes(text, found[3]) if found and found[3] is not None else {}
  of = more.get("head_size", 64)
  if not layers or not width or ("heads" not in more and width % of):
    raise ValueError(
      f"--model={text} is not WIDTHxLAYERS, with a width in {of}s"
    )
  heads = more.get("heads", width // of)
  kv_heads = more.get("kv_heads", heads // 4 if heads % 4 == 0 else 1)
  if heads % kv_heads:
    raise ValueError(
      f"--model={text}: heads={heads} must be a multiple of kv_heads={kv_heads}"
    )
  if "head_size" not in more and width % heads:
    raise ValueError(
      f"--model={text}: heads={heads} must divide {width}; or give head_size"
    )
  head_size = more.get("head_size", width // heads)
  if head_size % 2:
    raise ValueError(f"--model={text}: head_size={head_size} must be even")
  return Model(
    vocab=vocab,
    width=width,
    mlp=more.get("mlp", -(-11 * width // 256) * 64),
    layers=layers,
    heads=heads,
    kv_heads=kv_heads,
    head_size=head_size,
  )


def _sizes(text: str, parts: str) -> dict[str, int]:
  """Of `heads=8,mlp=704`, which is a part of --model=text."""
  out = {}
  for part in parts.split(","):
    name, _, value = part.partition("=")
    if name not in _MORE or name in out:
      raise ValueError(
        f"--model={text}: {name!r} must be one of {', '.join(_MORE)}, once"
      )
    out[name] = _count(value)
    if not out[name]:
      raise ValueError(
        f"--model={text}: {name}={value} must be a number from 1 to 999999999"
      )
  return out


def _count(text: str) -> int:
  """A number of at most 9 digits; 0 if it is none."""
  return int(text) if re.fullmatch("[0-9]{1,9}", text) else 0


def read_lengths(path: str) -> tuple[int, ...]:
  """Of a file with a length of a response in every line, as runs have them.

  Blank lines are skipped.

  Raises:
    ValueError: It cannot be read, or a line is not one positive number.
  """
  file = f"--lengths={path}"
  if not path:
    raise ValueError(f"{file} names no file")
  try:
    lines = pathlib.Path(path).read_text("utf-8").split("\n")
  except OSError as e:
    raise ValueError(f"{file}: {e.strerror}") from None
  except UnicodeDecodeError as e:
    raise ValueError(f"{file} is not text: {e.reason}") from None
  out = []
  for i, line in enumerate(map(str.strip, lines), 1):
    if not line:
      continue
    if not _count(line):
      raise ValueError(
        f"{file}: line {i} is {line[:20]!r}, not one length from 1 to 999999999"
      )
    out.append(_count(line))
  if not out:
    raise ValueError(f"{file} has no lengths")
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
  return [source.randrange(FIRST_ID, vocab) for _ in range(workload.prompt)]
