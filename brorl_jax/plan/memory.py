"""What rollouts hold on a device, in bytes, while it is

  prefilling   state + weights + prompts + records + work
  decoding     state + weights + prompts + records + lanes + cache + work
  compacting   state + weights + prompts + records + cache, and a smaller one
  finishing    state + weights + prompts + records + cache + results

With A lanes of R slots, P prompts of S tokens, N rollouts of T tokens, and L
layers of G heads of K for keys and values, which are cut over axis `tensor`:

  state     what training keeps: parameters, moments, the reference
  weights   a copy in the dtype of activations, whole on every row of devices
  prompts   2 L G K P S, keys and values; in a stream the logits of first tokens
            too, 4 P V
  records   8 P N T, tokens and log-probabilities
  lanes     2 L G K A W S, a copy of the prompts that are decoded; W = 1 if
            these are all, otherwise 2
  cache     2 L G K A R C (pages + 1): a page that nobody needs any more is
            there until the next one is written. On accelerators 2 L G K C
            blocks, see `Load.blocks`, of which compacting copies none

and while an update is applied, of which it measures the theorem's forecast,

  measuring    state + gradients + weights + work

Work is what programs need for themselves. Its terms were found by comparing
with what XLA says of compiled programs, as `tests/rollout/memory_test.py` does.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from brorl_jax.many.meshes import Axes
from brorl_jax.model import attention, layers, sharding
from brorl_jax.model.policy import Policy
from brorl_jax.model.reading import PREFILL_CHUNK
from brorl_jax.rollout import program_spec, programs, sampler
from brorl_jax.rollout.draw import block_of

_MORE = 1.1  # work that is not worth a term of its own


@functools.cache
def _weights(policy: Policy, row: Axes) -> int:
  """Bytes of the sampler's copy on a device of a row."""
  make = lambda key: policy.cast(policy.init(key))
  tree = jax.eval_shape(make, jax.random.key(0))
  places = sharding.param_shardings(tree, row.abstract)
  return sharding.shard_bytes(tree, places)


@dataclasses.dataclass(frozen=True)
class Load:
  """Rollouts of a mesh; its methods say what they need of a device."""

  policy: Policy
  resident_bytes: int
  n: int  # N
  prompts: int  # of all devices
  prompt_tokens: int  # S
  max_new_tokens: int  # T
  axes: Axes
  cut: bool = False  # top-p or top-k
  mean_tokens: int = 0  # of a rollout, over a pool; 0: max_new_tokens
  streams: bool = False  # prompts follow others, see stream.py

  @property
  def columns(self) -> int:
    """C, of a page or of a block."""
    pages = program_spec.page_columns(self.max_new_tokens)
    return self.policy.pool_columns or pages

  @property
  def pages(self) -> int:
    """Pages, or blocks, that hold the longest rollout."""
    return -(-self.max_new_tokens // self.columns)

  @property
  def parts(self) -> int:
    """Into how many a prompt's rollouts are cut."""
    return sampler.parts_of(self.prompts, self.n, self.axes.rows)

  @property
  def here(self) -> int:
    """P, prompts or parts of prompts of this device."""
    return -(-self.prompts * self.parts // self.axes.rows)

  def lanes(self, lanes: int) -> int:
    """A, of this device."""
    return min(-(-lanes * self.parts // self.axes.rows), self.here)

  def blocks(self, lanes: int, slots: int) -> int:
    """Of a device's pool: those of mean rollouts, and of one longest; 0: pages.

    Half of a row's last block is empty, on average. More than the longest
    rollouts of all slots need is never planned.
    """
    if not self.policy.pool_columns:
      return 0
    rows = self.lanes(lanes) * -(-slots // self.parts)
    longest = rows * self.pages
    if not self.mean_tokens:
      return longest
    each = max(self.mean_tokens / self.columns + 0.5, 1.0)
    return min(math.ceil(rows * each) + self.pages, longest)

  @property
  def weights(self) -> int:
    """Bytes of the sampler's copy."""
    return _weights(self.policy, self.axes.row)

  def stages(self, lanes: int, slots: int) -> dict[str, dict[str, int]]:
    """What a device is doing -> part -> bytes."""
    P, n, A = self.here, self.n // self.parts, self.lanes(lanes)
    R = -(-slots // self.parts)
    places, token = P * n * self.max_new_tokens, P * self.prompt_tokens
    work = _Work(self.policy, self.axes.row, self.cut)
    cache = self.pages * (page := work.page(A * R * self.columns))
    copied = self.pages > 1
    fewer = work.page(_fewer(A, R) * self.columns) if copied else 0
    if blocks := self.blocks(lanes, slots):
      cache, copied, fewer = work.page(blocks * self.columns), False, 0
    window = A * self.prompt_tokens * (1 if A == P else 2)
    first = 4 * P * self.policy.vocab // self.axes.within
    always = {
      "training state": self.resident_bytes,
      "weights": self.weights,
      "prompts": work.heads(token) + token + self.streams * first,
      "records": 8 * places + 12 * (P + 1) * n,
    }
    stacked = work.half or self.axes.rows > 1
    results = 23 if self.prompts % self.axes.rows else 14  # copied once more
    return {
      "prefilling": always
      | {"work": work.prefill(P, self.prompt_tokens, n, stacked)},
      "decoding": always
      | {
        "lanes": work.heads(window),
        "cache": cache + (page if copied else 0),
        # A kernel over the pool keeps no scores of a row's own tokens.
        "work": work.step(
          A, R, window, 0 if blocks else self.pages, self.columns
        ),
      },
      "compacting": always | {"cache": cache + self.pages * fewer},
      "finishing": always | {"cache": cache, "results": results * places},
    }

  def need(self, lanes: int, slots: int) -> int:
    """Bytes of a device, when most is needed."""
    return max(sum(p.values()) for p in self.stages(lanes, slots).values())


@dataclasses.dataclass(frozen=True)
class Gradient:
  """The gradient of some responses, of an update or of the theorem's probe.

  With its factors XLA's account of 46 programs that measure the theorem, on 1
  and on 8 CPU devices, is what is said here or less, at most a quarter less;
  with experts a third. Of 7 programs for H100s, of 1.5B and 8B policies, it is
  2 to 12 % less.
  """

  policy: Policy
  resident_bytes: int  # training state
  gradient_bytes: int  # of the update, as they are spread
  prompts: int
  responses: int  # of each prompt
  prompt_tokens: int
  tokens: int  # of the longest response
  axes: Axes
  applied: bool = True  # in the program that makes and applies the update
  microbatches: int = 0  # that lie on the devices

  @property
  def parts(self) -> dict[str, int]:
    """Part -> bytes."""
    return {
      "training state": self.resident_bytes,
      "batches": self._batches(),
      "gradients": self.gradient_bytes,
      "weights": self._weights(),
      "work": self._work(),
    }

  def _batches(self) -> int:
    """Five arrays of a number for each token, and a mask."""
    blocks = self.microbatches * self.prompts // self.axes.rows
    return 21 * blocks * self.responses * self.tokens

  @property
  def need(self) -> int:
    return sum(self.parts.values())

  def _weights(self) -> int:
    """Slope, update, and whole copies of what is cut over `fsdp`."""
    tree = self.policy.shapes
    places = sharding.param_shardings(tree, self.axes.row.abstract)
    of = lambda name: sharding.shard_bytes(tree[name], places[name])
    if not self.policy.target.on_cpu:
      # Of the prompt and of the response, each of all layers, before they are
      # added. The update has its own parts too.
      sums = 5 if self.applied else 2
      return int(_MORE * (sums * self.gradient_bytes + 1.4 * of("embed")))
    # With a head of its own each of the two is read once, not twice.
    inner, ends = (0.65, 4.2) if self.axes.rows > 1 else (5.0, 3.75)
    return int(inner * of("blocks") + ends * of("embed"))

  def _work(self) -> int:
    """Inputs of all layers, the arrays of one, and its scores."""
    p, S, T = self.policy, self.prompt_tokens, self.tokens
    within = self.axes.within
    _, rows, blocks = sharding.blocks(
      self.prompts, self.responses, self.axes.rows
    )
    work, on_device = _Work(p, self.axes.row, False), blocks // self.axes.rows
    read, written = on_device * S, on_device * rows * T
    if not p.target.on_cpu:  # attention, feed-forward keep no more than tiles
      kept = p.width * work.activation * (p.layers + 12.5) * (read + written)
      tile = 6 * min(read + written, layers.TILE) * p.mlp // within
      return int(_MORE * (kept + tile * work.activation))
    kept = work.activation * p.layers + 2.2 * 4
    scores = 4 * p.heads // within * (written * (S + T) + read * S)
    layer = 1.55 * work.feed_forward(written)
    if p.experts:  # tokens are sorted and masked
      layer = 4.0 * work.feed_forward(written)
    return int(2.4 * p.width * (read + written) * kept + layer + 1.1 * scores)


def _fewer(A: int, R: int) -> int:
  """Slots after one step of compaction, at most."""
  return max(
    (a * r for a, r in sampler.compact_sizes(A, R, pool=False)[1:]), default=0
  )


@dataclasses.dataclass(frozen=True)
class _Work:
  """Bytes of arrays of one device that depend on the policy alone.

  On a CPU XLA multiplies float32: what a loop does not change is converted
  before it, and kept.
  """

  policy: Policy
  row: Axes
  cut: bool

  @property
  def on_cpu(self) -> bool:
    return self.policy.target.on_cpu

  @property
  def logits(self) -> int:
    """Copies of them: to find what is cut takes their order and weights too."""
    return 4 if self.cut else 2

  @property
  def activation(self) -> int:
    """Bytes of a number."""
    return jnp.dtype(self.policy.dtype).itemsize

  @property
  def half(self) -> bool:
    return self.activation < 4

  @property
  def weights(self) -> int:
    return _weights(self.policy, self.row)

  def numbers(self, tokens: int) -> int:
    """In keys and values of so many tokens, in all layers."""
    p = self.policy
    return tokens * 2 * p.layers * (p.kv_heads // self.row.tensor) * p.head_size

  def heads(self, tokens: int) -> int:
    """Keys and values of so many tokens of prompts."""
    return self.numbers(tokens) * self.activation

  def page(self, tokens: int) -> int:
    """The same in the cache; see `Policy.cache_dtype`."""
    if self.policy.int8_cache:
      scales = self.numbers(tokens) // self.policy.head_size
      return self.numbers(tokens) + 4 * scales
    return self.numbers(tokens) * (4 if self.on_cpu else self.activation)

  def feed_forward(self, tokens: int) -> int:
    """Of a layer. Products with experts mask a copy of tokens for each."""
    p, value_bytes = self.policy, 4 if self.on_cpu else self.activation
    rows, F = tokens * max(p.experts_per_token, 1), p.mlp // self.row.within
    sent = rows * p.experts // self.row.within
    masked = sent * max(p.width, p.mlp) * (value_bytes + 1)
    return value_bytes * rows * (3 * F + 2 * p.width) + masked

  def experts(self) -> int:
    """Kernels of a layer's experts, as they are multiplied."""
    p = self.policy
    return 3 * p.experts // self.row.within * p.width * p.mlp * 4 * self.on_cpu

  def step(self, A: int, R: int, window: int, pages: int, C: int) -> int:
    """Logits or the largest arrays of a layer, and what is converted."""
    p, rows = self.policy, A * R
    keys = window // A + pages * C
    logits = self.logits * 4 * rows * p.vocab // self.row.within
    scores = 2 * 4 * rows * p.heads // self.row.within * keys
    # Keys and values in int8 are converted for each layer, page by page.
    wide = 4 * self.numbers(rows * C) // p.layers * p.int8_cache * (pages > 0)
    work = max(logits, scores, self.feed_forward(rows), wide)
    work += self.heads(window) // 2 + p.layers * self.experts()
    if self.half and self.on_cpu:
      work += 2 * self.weights + 2 * self.heads(window)
    if p.kv_heads == self.row.tensor:  # XLA copies a page of an only head
      work += self.page(rows * C)
    return int(_MORE * work)

  def prefill(self, P: int, S: int, n: int, stacked: bool) -> int:
    """Scores of a chunk, or its feed-forward, and what is copied."""
    p, chunk = self.policy, min(S, PREFILL_CHUNK)
    group = programs.read_together(P, S)
    whole = -(-S // chunk) * chunk
    earlier, copies = (0, 1) if S == chunk else (whole, 2)
    rows = group * p.heads // self.row.within
    pieces = attention.pieces(
      rows * (chunk + earlier), chunk, on_cpu=self.on_cpu
    )
    # Of own keys a piece sees those up to its last query. One piece has its
    # scores thrice; of several not all are there at once.
    keys = earlier + chunk * (pieces + 1) // (2 * pieces)
    scores = int((3 if pieces == 1 else 2.1) * 4 * rows * chunk * keys)
    scores += 4 * 4 * group * chunk * p.width
    work = max(scores, self.feed_forward(group * chunk)) + self.experts()
    work += copies * self.heads(group * whole)
    # First tokens: logits, and a block of probabilities for each.
    work += self.logits * 4 * P * p.vocab + 3 * 4 * P * n * block_of(p.vocab)
    work += self.weights * stacked  # before layers are taken apart
    work += 2 * self.weights * (self.half and self.on_cpu)
    return int(_MORE * work)
