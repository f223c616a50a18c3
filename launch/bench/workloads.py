"""Workloads of the benchmarks: model shapes, lengths, ends of rollouts.

Standard library only, because environments without this project import it.
"""

import dataclasses
import random


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
  accelerator: bool = False  # too large for a CPU

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """Tokens that end a response.

    Random weights say every token about equally often, so that this share of
    the vocabulary ends one token in `one_in`.
    """
    if self.one_in is None:
      return ()
    return tuple(range(self.model.vocab // self.one_in))


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


def prompt_ids(workload: Workload, index: int = 0) -> list[int]:
  """Token ids of one of its prompts, the same everywhere."""
  source = random.Random(index)
  vocab = workload.model.vocab
  return [source.randrange(10, vocab) for _ in range(workload.prompt)]
