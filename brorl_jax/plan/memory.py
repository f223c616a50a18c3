"""Memory of a device before anything is compiled: slots and lanes that fit.

Rollouts hold, in bytes, while a device is

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
  cache     2 L G K A R C (pages + 1): a page that is needed no more is
            there until the next one is written. On accelerators 2 L G K C
            blocks, see `Load.blocks`, of which compacting copies none

and while an update is applied, of which it measures the theorem's forecast,

  measuring    state + gradients + weights + work

Work is what programs need for themselves. Its terms were found by comparing
with what XLA says of compiled programs, as `tests/plan/memory_test.py` does.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from brorl_jax.many.meshes import ONE, Axes
from brorl_jax.model import attention, layers, sharding
from brorl_jax.model.policy import PREFILL_CHUNK, Policy
from brorl_jax.rollout import program_spec, programs, sampler
from brorl_jax.rollout.draw import SamplingParams, block_of
from brorl_jax.rollout.program_spec import RolloutSpec

_MORE = 1.1  # work that is not worth a term
_WORTH = 1.1  # this many times the work per step is worth fewer slots
_EIGHT = 8  # slots are multiples of it: what matrix units like
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


@dataclasses.dataclass(frozen=True)
class Load:
  """Rollouts of a mesh; its methods say what they need of a device."""

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
    """Of a device's pool: for mean rollouts, and for one longest; 0: pages.

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
    # With a separate head each of the two is read once, not twice.
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
    """In keys and values of tokens, in all layers."""
    p = self.policy
    return tokens * 2 * p.layers * (p.kv_heads // self.row.tensor) * p.head_size

  def heads(self, tokens: int) -> int:
    """Keys and values of tokens of prompts."""
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


@dataclasses.dataclass(frozen=True)
class RolloutPlan:
  """How rollouts are decoded, and what a device holds then."""

  load: Load
  slots: int  # rollouts of a prompt that decode together
  lanes: int  # prompts that are decoded together, over all devices
  memory_bytes: int  # of a device

  @property
  def blocks(self) -> int:
    """Of a device's pool; 0: pages."""
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
    )

  @functools.cached_property
  def stages(self) -> dict[str, dict[str, int]]:
    """What a device is doing -> part -> bytes."""
    return self.load.stages(self.lanes, self.slots)

  @property
  def stage(self) -> str:
    """When most is needed."""
    return max(self.stages, key=lambda name: sum(self.stages[name].values()))

  @property
  def parts(self) -> dict[str, int]:
    """What is needed then: part -> bytes."""
    return self.stages[self.stage]

  @property
  def total_bytes(self) -> int:
    return sum(self.parts.values())

  def line(self) -> str:
    """The plan in a few words."""
    cache = _count(self.load.pages, "page")
    if self.blocks:
      cache = _count(self.blocks, "block")
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

  Args:
    load: The rollouts, and what is on a device anyway.
    memory_bytes: Of a device.
    slots: Rollouts of a prompt that decode together; as many as fit if None.
    lanes: Prompts that are decoded together; as many as fit if None.

  Raises:
    TooLarge: They do not fit; with the nearest that do.
    ValueError: The policy cannot be spread like this.
  """
  limit = limit_of(memory_bytes)
  chosen = _choose(
    load,
    limit,
    slots and min(slots, load.n),
    lanes and min(lanes, load.prompts),
  )
  if chosen is None:
    raise TooLarge(_refusal(load, limit, slots, lanes))
  lanes, slots = chosen
  return RolloutPlan(load, slots, lanes, memory_bytes)


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


def check_probe(probe: Gradient, memory_bytes: int) -> None:
  """Raises TooLarge if an update does not fit while the theorem is measured."""
  limit = limit_of(memory_bytes)
  if probe.need <= limit:
    return
  fits = lambda P: dataclasses.replace(probe, prompts=P).need <= limit
  nearest = _largest(fits, probe.prompts)
  raise TooLarge(
    f"measuring the theorem on theory.prompts = {probe.prompts} needs "
    f"{_of_limit(probe.need, limit)} in an update; "
    + (f"nearest that fits: {nearest}; " if nearest else "")
    + "theory.prompts = 0 leaves it out"
  )


def check_update(update: Gradient, memory_bytes: int) -> None:
  """Raises TooLarge if the gradient of the longest responses does not fit."""
  limit = limit_of(memory_bytes)
  if update.need <= limit:
    return
  D = update.axes.rows
  within = lambda **sizes: dataclasses.replace(update, **sizes).need <= limit
  nearest = []
  if rows := _largest(lambda M: within(responses=M), update.responses):
    nearest.append(f"optim.rows = {rows}")
  if blocks := _largest(lambda k: within(prompts=k * D), update.prompts // D):
    nearest.append(f"optim.blocks = {blocks * D}")
  if T := _largest(lambda T: within(tokens=T), update.tokens):
    nearest.append(f"max_new_tokens = {T}")
  if not nearest:
    few = lambda T: within(responses=1, prompts=D, tokens=T)
    if T := _largest(few, update.tokens):
      all_three = f"optim.rows = 1, optim.blocks = {D}, max_new_tokens = {T}"
      nearest.append(all_three)
  raise TooLarge(
    f"the gradient of optim.blocks = {update.prompts} with optim.rows = "
    f"{update.responses} responses of {update.tokens} tokens needs "
    f"{_of_limit(update.need, limit)}; "
    + (_listed(nearest) if nearest else "use more devices, or larger ones")
  )


def update_rows(update: Gradient, memory_bytes: int) -> int:
  """Responses of a prompt that are read side by side: 8, or as few as fit."""
  limit = limit_of(memory_bytes)
  fits = lambda M: dataclasses.replace(update, responses=M).need <= limit
  return next((M for M in (8, 4, 2) if fits(M)), 1)


def size(n: int) -> str:
  """Bytes in GiB, MiB or KiB."""
  units = (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")
  unit, name = next((u for u in units if n >= u[0] / 10), units[-1])
  return f"{n / unit:.2f} {name}"


def _count(n: int, what: str) -> str:
  return f"{n} {what}{'' if n == 1 else 's'}"


def _of_limit(need: int, limit: int) -> str:
  return f"{size(need)} of {size(limit)} ({_USABLE:.0%} of a device)"


def _largest(fits: Callable[[int], bool], most: int) -> int:
  """Of 1 to `most` the largest that fits, if a smaller one does too; or 0."""
  low, high = 0, most
  while low < high:
    middle = (low + high + 1) // 2
    low, high = (middle, high) if fits(middle) else (low, middle - 1)
  return low


def _choose(
  load: Load, limit: int, slots: int | None, lanes: int | None
) -> tuple[int, int] | None:
  """Lanes and slots; None if what is given does not fit."""
  rows, best = [slots or load.n], (0, 0)
  if slots is None:
    rows += [*range(-(-load.n // _EIGHT) * _EIGHT - _EIGHT, 0, -_EIGHT)]
    rows += [R for R in (4, 2, 1) if R < rows[-1]]
  for R in rows:
    fits = lambda A, R=R: load.need(A, R) <= limit
    if lanes is not None:
      A = lanes if fits(lanes) else 0
    elif fits(load.prompts):  # may need less than one lane fewer, see W
      A = load.prompts
    else:
      A = _largest(fits, load.prompts - 1)
    if A * R > _WORTH * best[0] * best[1]:
      best = A, R
  return best if best[0] else None


def _refusal(
  load: Load, limit: int, slots: int | None, lanes: int | None
) -> str:
  """What is needed, what there is, and the nearest that fits, in one line."""
  what = f"rollouts of {load.n} x {load.max_new_tokens} tokens need"
  if load.need(1, 1) > limit:
    need = f"{_of_limit(load.need(1, 1), limit)} even one slot at a time"
    if nearest := _nearest(load, limit):
      return f"{what} {need}; {_listed(nearest)}"
    alone = size(load.resident_bytes + load.weights)
    return (
      f"{what} {need}, not even 1 token of a prompt fits: training state and "
      f"weights alone are {alone}; use more devices, or larger ones"
    )
  fits = lambda A, R: load.need(A, R) <= limit
  A, R = min(lanes or 1, load.prompts), min(slots or 1, load.n)
  given = [f"slots = {slots}"] * bool(slots) + [f"lanes = {lanes}"] * bool(
    lanes
  )
  nearest = []
  if slots and (most := _largest(lambda r: fits(A, r), R)):
    nearest.append(f"slots = {most}" + f" with lanes = {A}" * bool(lanes))
  if lanes and (most := _largest(lambda a: fits(a, R), A)):
    nearest.append(f"lanes = {most}" + f" with slots = {R}" * bool(slots))
  if not nearest:  # neither alone: as many slots as one lane can have
    most = _largest(lambda r: fits(1, r), R)
    nearest = [f"slots = {most} with lanes = 1"]
  need = _of_limit(load.need(A, R), limit)
  return f"{what} {need} with {' and '.join(given)}; {_listed(nearest)}"


def _listed(nearest: list[str]) -> str:
  return f"nearest that fits: {', or '.join(nearest)}"


def _nearest(load: Load, limit: int) -> list[str]:
  """Changes of one size, each of which would do, the least of its kind.

  If there is none, the longest rollouts of as few prompts as there can be.
  """
  within = lambda **sizes: (
    dataclasses.replace(load, **sizes).need(1, 1) <= limit
  )
  longest = lambda **sizes: _largest(
    lambda T: within(max_new_tokens=T, **sizes), load.max_new_tokens
  )
  few = lambda P: f"{_count(P, 'prompt')} ({P * load.n} rollouts) at a time"
  changes, D = [], load.axes.rows
  if T := longest():
    changes.append(f"max_new_tokens = {T}")
  if load.prompts % D == 0:
    if P := D * _largest(lambda k: within(prompts=k * D), load.prompts // D):
      changes.append(few(P))
  axes, before = load.axes, load.axes.devices
  while load.policy.kv_heads % (tensor := 2 * axes.tensor) == 0:
    axes = dataclasses.replace(axes, fsdp=-1, tensor=tensor).filled(before)
    state = load.resident_bytes * before // axes.devices
    try:
      fits = within(axes=axes, resident_bytes=state)
    except ValueError:  # of this policy
      fits = False
    if fits:
      more = "" if axes.devices == before else f" on {axes.devices} devices"
      return [*changes, f"mesh_tensor = {tensor}{more}"]
  least = min(D, load.prompts)
  if not changes and (T := longest(prompts=least)):
    return [f"{few(least)} and max_new_tokens = {T}"]
  return changes
