"""Memory of a device before anything is compiled: slots and lanes that fit.

An estimate, made before anything is compiled and in a fraction of a second;
`--mode=plan --topology=` compiles, and says what programs really need.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from brorl_jax.learner.packing import MICROBATCHES
from brorl_jax.many.meshes import ONE, Axes
from brorl_jax.model import attention, layers, sharding
from brorl_jax.model.policy import PREFILL_CHUNK, Policy
from brorl_jax.rollout import programs, sampler
from brorl_jax.rollout.draw import SamplingParams, block_of
from brorl_jax.rollout.slots import RolloutSpec, page_columns

_MORE = 1.1  # work that is not worth a term
_WORTH = 1.1  # this many times the work per step is worth fewer slots
_EIGHT = 8  # slots are multiples of it: what matrix units like
# Programs of a CPU beside each other, on any number of cores. With more bytes
# of weights than these the operations of one are long enough for two cores.
_GROUPS, _SMALL = 2, 2**26
# Of the mean length: what slots that are always full hold at most at one time,
# on average (lengths log-normal, cut at 2.2 times the mean: .83, simulated).
_HELD = 0.85
_USABLE = 0.9  # of memory; the rest is for what is not counted, and for gaps


class TooLarge(ValueError):
  """What does not fit, by how much, and the nearest that does."""


@functools.cache
def _weights(policy: Policy, row: Axes) -> int:
  """Bytes of the sampler's copy on a device of a row."""
  make = lambda key: policy.cast(policy.init(key))
  tree = jax.eval_shape(make, jax.random.key(0))
  places = sharding.param_shardings(tree, row.abstract)
  return sharding.shard_bytes(tree, places)


def _feed_forward(policy: Policy, row: Axes, tokens: int) -> int:
  """Bytes in a layer. On CPUs each expert masks a copy of all tokens."""
  p, number = policy, 4 if policy.target.on_cpu else _number(policy)
  if p.experts and not p.target.on_cpu:
    if tokens > layers.EVERY:
      return tokens * (2 * 4 * p.width + 5 * 4 * p.experts_per_token)
    return number * tokens * p.experts // row.within * (3 * p.mlp + p.width)
  rows, F = tokens * max(p.experts_per_token, 1), p.mlp // row.within
  masked = rows * p.experts // row.within * max(p.width, p.mlp)
  return number * rows * (3 * F + 2 * p.width) + masked * (number + 1)


def _number(policy: Policy) -> int:
  """Bytes of an activation."""
  return jnp.dtype(policy.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Load:
  """Rollouts of a mesh; its methods say what they need of a device.

  It always holds state + weights + prompts + records, and while it is

    prefilling   work
    decoding     lanes + cache + work
    compacting   cache, and a page of a smaller one
    finishing    cache + results

  With A lanes of R slots, P prompts of S tokens, N rollouts of T tokens, and L
  layers of G heads of K for keys and values, which are cut over axis `tensor`:

    state     what training keeps: parameters, moments, the reference
    weights   a copy in the dtype of activations, whole on every row of devices
    prompts   2 L G K P S, keys and values; in a stream the logits of first
              tokens too, 4 P V
    records   8 P N T, tokens and log-probabilities
    lanes     2 L G K A W S, a copy of the prompts that are decoded; W = 1 if
              these are all, otherwise 2
    cache     2 L G K A R C (pages + 1): a page that is needed no more is
              there until the next one is written. On accelerators 2 L G K C
              blocks, see `blocks`, of which compacting copies none

  Work is what programs need for themselves. Its terms were found by comparing
  with what XLA says of compiled programs, as `tests/plan/memory_test.py` does.
  """

  policy: Policy
  resident_bytes: int
  n: int  # N
  prompts: int  # of all devices
  prompt_tokens: int  # S
  max_new_tokens: int  # T
  axes: Axes = ONE
  cut: bool = False  # top-p or top-k
  mean_tokens: int = 0  # of a rollout, over a pool; 0: max_new_tokens
  streams: bool = False  # prompts follow others, see stream.py

  @property
  def columns(self) -> int:
    """C, of a page or of a block."""
    return self.policy.pool_columns or page_columns(self.max_new_tokens)

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

  @property
  def key_bytes(self) -> int:
    """Of a cached token on a device."""
    return self._cache(1)

  @property
  def weights(self) -> int:
    return _weights(self.policy, self.axes.row)

  def lanes(self, lanes: int) -> int:
    """A, of this device."""
    return min(-(-lanes * self.parts // self.axes.rows), self.here)

  def blocks(self, lanes: int, slots: int) -> int:
    """Of a device's pool: for rollouts in progress and one longest; 0: pages.

    Half of a row's last block is empty, on average. More than the longest
    rollouts of all slots need is never planned.
    """
    if not self.policy.pool_columns:
      return 0
    rows = self.lanes(lanes) * -(-slots // self.parts)
    longest = rows * self.pages
    if not self.mean_tokens:
      return longest
    each = max(_HELD * self.mean_tokens / self.columns + 0.5, 1.0)
    return min(math.ceil(rows * each) + self.pages, longest)

  def stages(self, lanes: int, slots: int) -> dict[str, dict[str, int]]:
    """What a device is doing -> part -> bytes."""
    P, n, A = self.here, self.n // self.parts, self.lanes(lanes)
    R, C = -(-slots // self.parts), self.columns
    places, token = P * n * self.max_new_tokens, P * self.prompt_tokens
    window = A * self.prompt_tokens * (1 if A == P else 2)
    first = 4 * P * self.policy.vocab // self.axes.within
    always = {
      "training state": self.resident_bytes,
      "weights": self.weights,
      "prompts": self._heads(token) + token + self.streams * first,
      "records": 8 * places + 12 * (P + 1) * n,
    }
    results = 23 if self.prompts % self.axes.rows else 14  # copied once more
    pages, blocks = self.pages, self.blocks(lanes, slots)
    if blocks:  # a kernel over the pool keeps no scores of a row's own tokens
      cache, fewer, extra, keys = self._cache(blocks * C), 0, 0, 0
    else:
      how = {"prompt": self.prompt_tokens, "new": self.max_new_tokens}
      second = sampler.compact_sizes(A, R, **how, pool=False)[1:2]
      fewer = self._cache(sum(map(math.prod, second)) * C) if pages > 1 else 0
      extra = self._cache(A * R * C) if pages > 1 else 0
      cache, keys = pages * self._cache(A * R * C), pages * C
    decoding = {
      "lanes": self._heads(window),
      "cache": cache + extra,
      "work": self._step(A, R, window, keys),
    }
    return {
      "prefilling": always | {"work": self._prefill(P, n)},
      "decoding": always | decoding,
      "compacting": always | {"cache": cache + fewer},
      "finishing": always | {"cache": cache, "results": results * places},
    }

  def need(self, lanes: int, slots: int) -> int:
    """Bytes of a device, when most is needed."""
    return max(sum(p.values()) for p in self.stages(lanes, slots).values())

  def _pairs(self, tokens: int) -> int:
    """Numbers in keys and values of tokens, in all layers."""
    p = self.policy
    heads = p.kv_heads // self.axes.tensor
    return tokens * 2 * p.layers * heads * p.head_size

  def _heads(self, tokens: int) -> int:
    """Bytes of keys and values of tokens of prompts."""
    return self._pairs(tokens) * _number(self.policy)

  def _cache(self, tokens: int) -> int:
    """The same in the cache; see `Policy.page`."""
    p, numbers = self.policy, self._pairs(tokens)
    if p.int8_cache:
      return numbers + 4 * (numbers // p.head_size)
    return numbers * (4 if p.target.on_cpu else _number(p))

  def _converted(self, heads: int) -> int:
    """What a CPU converts to float32 before a loop, and keeps."""
    half = self.policy.target.on_cpu and _number(self.policy) < 4
    return 2 * half * (self.weights + heads)

  def _step(self, A: int, R: int, window: int, keys: int) -> int:
    """Logits or the largest arrays of a layer, and what is converted."""
    p, rows, within = self.policy, A * R, self.axes.within
    # To find what is cut takes their order and weights too.
    logits = (4 if self.cut else 2) * 4 * rows * p.vocab // within
    scores = 2 * 4 * rows * p.heads // within * (window // A + keys)
    layer = _feed_forward(p, self.axes.row, rows)
    work = max(logits, scores, layer)
    work += self._heads(window) // 2
    return int(_MORE * (work + self._converted(self._heads(window))))

  def _prefill(self, P: int, n: int) -> int:
    """Scores of a chunk, or its feed-forward, and what is copied."""
    p, row, S = self.policy, self.axes.row, self.prompt_tokens
    chunk, group = min(S, PREFILL_CHUNK), programs.read_together(P, S)
    whole = -(-S // chunk) * chunk
    earlier, copies = (0, 1) if S == chunk else (whole, 2)
    rows = group * p.heads // row.within
    pieces = attention.pieces(
      rows * (chunk + earlier), chunk, on_cpu=p.target.on_cpu
    )
    # Of own keys a piece sees those up to its last query. One piece has its
    # scores thrice; of several not all are there at once.
    keys = earlier + chunk * (pieces + 1) // (2 * pieces)
    scores = int((3 if pieces == 1 else 2.1) * 4 * rows * chunk * keys)
    scores += 4 * 4 * group * chunk * p.width
    work = max(scores, _feed_forward(p, row, group * chunk))
    work += copies * self._heads(group * whole)
    # First tokens: logits, and a block of probabilities for each.
    work += (4 if self.cut else 2) * 4 * P * p.vocab
    work += 3 * 4 * P * n * block_of(p.vocab)
    # Before layers are taken apart: cast, gathered, or merged with an adapter.
    if _number(p) < 4 or self.axes.rows > 1 or p.lora_rank:
      work += self.weights
    return int(_MORE * (work + self._converted(0)))


@dataclasses.dataclass(frozen=True)
class Gradient:
  """The gradient of an update's longest responses, and what it needs.

  Of 7 programs of 1.5B and 8B on H100s, XLA's account is 2 to 12 % less.
  """

  policy: Policy
  resident_bytes: int  # training state
  gradient_bytes: int  # as gradients are spread
  prompts: int
  responses: int  # of each prompt
  prompt_tokens: int
  tokens: int  # of the longest response
  axes: Axes

  @property
  def parts(self) -> dict[str, int]:
    tree, row = self.policy.shapes["embed"], self.axes.row.abstract
    places = sharding.param_shardings(self.policy.shapes, row)["embed"]
    embed = sharding.shard_bytes(tree, places)
    # Two batches, of five arrays of a number for each token and a mask: one is
    # brought while the other is computed.
    blocks = 2 * MICROBATCHES * self.prompts // self.axes.rows
    return {
      "training state": self.resident_bytes,
      "batches": 21 * blocks * self.responses * self.tokens,
      "gradients": self.gradient_bytes,
      # Of the prompt and of the response, each of all layers, before they are
      # added; and a whole copy of what is cut over `fsdp`.
      "weights": int(_MORE * (2 * self.gradient_bytes + 1.4 * embed)),
      "work": self._work(),
    }

  @property
  def need(self) -> int:
    return sum(self.parts.values())

  def _work(self) -> int:
    """Inputs of all layers, and the arrays of one."""
    p, S, T = self.policy, self.prompt_tokens, self.tokens
    _, rows, blocks = sharding.blocks(
      self.prompts, self.responses, self.axes.rows
    )
    on_device, within = blocks // self.axes.rows, self.axes.within
    read, written = on_device * S, on_device * rows * T
    tokens, scores = read + written, 0
    tile = min(tokens, layers.TILE)
    if p.target.on_cpu:  # it keeps whole arrays, where others keep tiles
      scores = 4 * p.heads // within * (written * (S + T) + read * S)
      tile = tokens
    kept = p.width * (p.layers + 12.5) * tokens + 6 * tile * p.mlp // within
    if p.experts:  # gradients of a layer's experts and of tokens in float32
      scores += 4 * 3 * p.experts // within * p.width * p.mlp
      scores += _feed_forward(p, self.axes.row, tokens)
    return int(_MORE * (_number(p) * kept + scores))


@dataclasses.dataclass(frozen=True)
class RolloutPlan:
  """How rollouts are decoded, and what a device holds then."""

  load: Load
  slots: int  # rollouts of a prompt that decode together
  lanes: int  # prompts that are decoded together, over all devices
  memory_bytes: int  # of a device

  @property
  def blocks(self) -> int:
    return self.load.blocks(self.lanes, self.slots)

  def spec(
    self,
    sampling: SamplingParams,
    stop_ids: tuple[int, ...],
    mesh: Mesh | None = None,
  ) -> RolloutSpec:
    """What the sampler gets."""
    load = self.load
    return RolloutSpec(
      policy=load.policy,
      sampling=sampling,
      stop_ids=stop_ids,
      n=load.n,
      max_new_tokens=load.max_new_tokens,
      slots=self.slots,
      lanes=self.lanes,
      blocks=self.blocks,
      mesh=mesh,
      groups=self.groups,
    )

  @property
  def groups(self) -> int:
    """Programs that decode beside each other."""
    load = self.load
    alone = load.policy.target.on_cpu and load.axes == ONE
    small = load.weights <= _SMALL and self.lanes * self.slots > 1
    return _GROUPS if alone and small else 1

  def only(self, prompts: int) -> "RolloutPlan":
    """The same for no more prompts than there are, in whole rows of devices."""
    rows = self.load.axes.rows
    prompts = min(self.load.prompts, -(-prompts // rows) * rows)
    load = dataclasses.replace(self.load, prompts=prompts)
    lanes = min(self.lanes, prompts)
    return dataclasses.replace(self, load=load, lanes=lanes)

  @functools.cached_property
  def stages(self) -> dict[str, dict[str, int]]:
    return self.load.stages(self.lanes, self.slots)

  @property
  def stage(self) -> str:
    """When most is needed."""
    return max(self.stages, key=lambda name: sum(self.stages[name].values()))

  @property
  def parts(self) -> dict[str, int]:
    return self.stages[self.stage]

  @property
  def total_bytes(self) -> int:
    return sum(self.parts.values())

  def line(self) -> str:
    """The plan in a few words."""
    pages = _count(self.load.pages, "page")
    cache = _count(self.blocks, "block") if self.blocks else pages
    return (
      f"{_count(self.lanes, 'lane')} x {_count(self.slots, 'slot')}, "
      f"{cache} of {_count(self.load.columns, 'token')}, "
      f"{size(self.total_bytes)} of {size(self.memory_bytes)} per device"
    )

  def table(self) -> str:
    """Every part with its size and its share of memory."""
    head = f"{self.line()}, most while {self.stage}"
    return "\n".join([head, *shares(self.parts, self.memory_bytes)])


def rollouts(
  load: Load,
  memory_bytes: int,
  *,
  slots: int | None = None,
  lanes: int | None = None,
) -> RolloutPlan:
  """As many slots in all lanes as fit; of about as many the fewest lanes.

  `slots` and `lanes` are what the config gives. Raises TooLarge, with the
  nearest that fit, or ValueError if the policy cannot be spread like this.
  """
  limit = limit_of(memory_bytes)
  slots = slots and min(slots, load.n)
  lanes = lanes and min(lanes, load.prompts)
  rows, best = [slots or load.n], (0, 0)
  if not slots:
    rows += [*range(-(-load.n // _EIGHT) * _EIGHT - _EIGHT, 0, -_EIGHT)]
    rows += [R for R in (4, 2, 1) if R < rows[-1]]
  for R in rows:
    fits = lambda A, R=R: load.need(A, R) <= limit
    if lanes:
      A = lanes if fits(lanes) else 0
    elif fits(load.prompts):  # may need less than one lane fewer, see W
      A = load.prompts
    else:
      A = _largest(fits, load.prompts - 1)
    if A * R > _WORTH * best[0] * best[1]:
      best = A, R
  if not best[0]:
    raise TooLarge(_refusal(load, limit, slots, lanes))
  return RolloutPlan(load, best[1], best[0], memory_bytes)


def _refusal(
  load: Load, limit: int, slots: int | None, lanes: int | None
) -> str:
  A, R, D = lanes or 1, slots or 1, load.axes.rows
  fits = lambda A, R, **sizes: (
    dataclasses.replace(load, **sizes).need(A, R) <= limit
  )
  alone = load.prompts % D == 0  # whole prompts on each row of devices
  return (
    f"rollouts of {load.n} x {load.max_new_tokens} tokens need "
    f"{size(load.need(A, R))} with {_count(A, 'lane')} x {_count(R, 'slot')}, "
    f"and {_allowed(limit)}; "
  ) + _nearest(
    {
      "slots": slots and _largest(lambda R: fits(A, R), R),
      "lanes": lanes and _largest(lambda A: fits(A, R), A),
      "max_new_tokens": _largest(
        lambda T: fits(A, R, max_new_tokens=T), load.max_new_tokens
      ),
      "prompts at a time": alone
      and D * _largest(lambda k: fits(A, R, prompts=k * D), load.prompts // D),
    }
  )


def check_update(update: Gradient, memory_bytes: int) -> None:
  """Raises TooLarge if the gradient of the longest responses does not fit."""
  limit, D = limit_of(memory_bytes), update.axes.rows
  if update.need <= limit:
    return
  fits = lambda **sizes: dataclasses.replace(update, **sizes).need <= limit
  nearest = {
    "optim.rows": _largest(lambda M: fits(responses=M), update.responses),
    "optim.blocks": D
    * _largest(lambda k: fits(prompts=k * D), update.prompts // D),
    "max_new_tokens": _largest(lambda T: fits(tokens=T), update.tokens),
  }
  raise TooLarge(
    f"the gradient of optim.blocks = {update.prompts} with optim.rows = "
    f"{update.responses} responses of {update.tokens} tokens needs "
    f"{size(update.need)}, and {_allowed(limit)}; {_nearest(nearest)}"
  )


def update_rows(update: Gradient, memory_bytes: int) -> int:
  """Responses of a prompt that are read side by side: 8, or as few as fit."""
  limit = limit_of(memory_bytes)
  fits = lambda M: dataclasses.replace(update, responses=M).need <= limit
  return next((M for M in (8, 4, 2) if fits(M)), 1)


def limit_of(memory_bytes: int) -> int:
  """Bytes of a device that a plan uses."""
  return int(_USABLE * memory_bytes)


def shares(parts: dict[str, int], memory_bytes: int) -> list[str]:
  """A line for every part, with its size and its share of memory."""
  rows = [*parts.items(), ("together", sum(parts.values()))]
  rows += [("allowed", limit_of(memory_bytes)), ("memory", memory_bytes)]
  wide = max(len(name) for name, _ in rows)
  return [
    f"  {name:{wide}}  {size(n):>11}  {n / memory_bytes:7.2%}"
    for name, n in rows
  ]


def size(n: int) -> str:
  """Bytes in GiB, MiB or KiB."""
  units = (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")
  unit, name = next((u for u in units if n >= u[0] / 10), units[-1])
  return f"{n / unit:.2f} {name}"


def _count(n: int, what: str) -> str:
  return f"{n} {what}{'' if n == 1 else 's'}"


def _allowed(limit: int) -> str:
  return (
    f"{size(limit)} may be used ({_USABLE:.0%} of a device's memory, which "
    "config.devices.memory_bytes can set)"
  )


def _nearest(sizes: Mapping[str, int | None]) -> str:
  """Sizes of which each would do alone; 0 or None: it would not."""
  listed = ", or ".join(f"{name} = {n}" for name, n in sizes.items() if n)
  if not listed:
    return "raise config.devices.mesh_tensor, or use larger devices"
  return f"nearest that fits: {listed}"


def _largest(fits: Callable[[int], bool], most: int) -> int:
  """Of 1 to `most` the largest that fits, if a smaller one does too; or 0."""
  low, high = 0, most
  while low < high:
    middle = (low + high + 1) // 2
    low, high = (middle, high) if fits(middle) else (low, middle - 1)
  return low
