"""How long a step of a run takes: its decisions on fake clocks.

Rollouts get lengths from a log-normal distribution, and prompts pass or not.
What decides in a run decides here too: `Candidates`, `Places`, `shrunk`, the
packing of rows. With a max_age the last of some steps are told, on average:
rollouts that crossed into it are decoded again from their first token. What the
devices do is written again, `_Device`: when slots take rollouts and lanes
prompts, and how many seconds a decode step takes,

  launches + max(weights / bandwidth, operations / rate) + keys / bandwidth

Rates are those of an H100 with jax 0.11.2, 2026-11-26; of other chips the same
shares of their data sheets are assumed. No run on several GPUs was measured.
"""

import collections
import concurrent.futures as futures
import dataclasses
import functools
import heapq
import itertools
import types
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from brorl_jax.learner import packing
from brorl_jax.plan.resolve import Phase, Run
from brorl_jax.plan.topology import Chip
from brorl_jax.rollout import dynamic_sampling, sampler, slots, stream
from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.types import Chunk, Prompts, Rollouts, Scores

# Of a GPU, a layer: 549 kernels of 3.4 us in 28. Other chips launch none.
_LAUNCH_S = 3.4e-6 * 549 / 28
# Of the data sheet: 2.61 of 3.35 TB/s are copied, 650 of 989 TFLOP/s computed
# by a product and, in an update, .46 of these.
_COPIED, _COMPUTED, _UPDATED = 0.78, 0.66, 0.46
_KEYS = 1.1  # what the kernel over a pool reads, of the bytes of keys
_SENT = 87e6  # bytes/s of groups that a process packs and sends to the others
# Spread of log lengths over prompts, and over the rollouts of one.
_PROMPTS, _ROLLOUTS = 0.4, 0.55
_SCORED_S = 2.0  # from the last rollout of a round to its verdict
_FILLED = 0.6  # of the longest prompt, on average
_STEPS = 8  # that are simulated if rollouts cross them, the first two not told


class Case(NamedTuple):
  """What is assumed of a step."""

  mean_tokens: float
  pass_rate: float
  seed: int = 0


class StepTime(NamedTuple):
  """A step, in seconds."""

  rollouts: float
  exchange: float  # of kept groups between processes
  scores: float
  update: float
  drawn: int  # rollouts, up to the last that is needed
  surplus: int  # rollouts of other prompts that were begun
  busy: float  # share of slot-steps in which a slot had a rollout
  padding: float  # share of the update's positions without a token


class _Rates(NamedTuple):
  """Of a row of devices with a policy."""

  launch_s: float  # of a decode step
  bandwidth: float  # bytes/s, of one of its devices as all below
  operations: float  # 1/s, of a product
  weights: float  # bytes that a decode step reads
  token: float  # operations of a forward pass, without attention
  attention: float  # operations of a token for each that it sees
  key: float  # bytes of the keys and values of a token


@dataclasses.dataclass(frozen=True)
class _Load:
  """The rollouts of a step."""

  lengths: Int[np.ndarray, "candidates N"]
  passes: np.ndarray  # [candidates]
  target: int
  plan: dynamic_sampling.RoundPlan
  spec: slots.ProgramSpec  # of one row of devices
  prompt: int  # tokens
  rows: int  # of a process
  processes: int
  each: int  # places of a row
  rates: _Rates
  max_age: int = 0

  def score(self, prompts: Prompts, rollouts: Rollouts) -> Scores:
    """A prompt that passes is right always, another never."""
    ones = rollouts.mask[..., 0]
    reward = (ones * self.passes[prompts.index, None]).astype(np.float32)
    return Scores(reward, ones.astype(int), ones, ones.astype(object))


class _Chunk:
  """Rollouts of a prompt in a place: those that wait, and those in a slot."""

  def __init__(self, place: int, lengths: Iterable[int], which: Chunk):
    self.place, self.running = place, 0  # place -1: no prompt
    self.which = which  # p, and n of the first rollout
    self.left = collections.deque(n - 1 for n in lengths if n > 1)

  @property
  def done(self) -> bool:
    return not self.left and not self.running


class _Device:
  """Lanes of slots as `slots.refill` and `slots.shift` give them work, until
  the loop of `programs.segment` ends.
  """

  def __init__(self, load: _Load):
    self._load, spec = load, load.spec
    wide = 1 if spec.lanes == load.each else 2
    none = _Chunk(-1, (), Chunk(0, 0))
    self._lanes = [[none] * wide for _ in range(spec.lanes)]
    self.busy = [0] * spec.lanes  # slots of each lane
    self.todo = collections.deque[_Chunk]()
    self.finished: list[int] = []  # places
    # (step of its end, number, lane, first step, chunk) of each busy slot
    self._ends: list[tuple[int, int, int, int, _Chunk]] = []
    self._step, self._starts, self._count = 0, 0, itertools.count()

  @property
  def waiting(self) -> int:
    return sum(len(x.left) for x in itertools.chain(*self._lanes, self.todo))

  def open(self) -> dict[Chunk, list[int]]:
    """Tokens of the rollouts that have not ended, by chunk."""
    found = collections.defaultdict[Chunk, list[int]](list)
    for end, _, _, start, chunk in self._ends:
      found[chunk.which].append(end - start + 1)
    for chunk in itertools.chain(*self._lanes, self.todo):
      found[chunk.which] += [n + 1 for n in chunk.left]
    return found

  def advance(self, rows: int, steps: int) -> tuple[float, int, int]:
    """Decodes until the host must act: seconds, tokens and steps of it."""
    seconds, tokens, begin = 0.0, 0, self._step
    again, end = True, begin + steps
    self._shift()
    while again:
      self._refill(range(len(self._lanes)))
      while self._ends and self._step < end and not self._wants():
        count = min(self._ends[0][0], end) - self._step
        seconds += self._seconds(rows, count)
        tokens += len(self._ends) * count
        self._step += count
        freed = set()
        while self._ends and self._ends[0][0] == self._step:
          _, _, lane, start, chunk = heapq.heappop(self._ends)
          chunk.running -= 1
          self.busy[lane] -= 1
          self._starts -= start
          freed.add(lane)
        self._refill(freed)
      again = len(self.todo) >= self._load.spec.lanes and self._step < end
      self._shift()
    return seconds, tokens, self._step - begin

  def _seconds(self, rows: int, steps: int) -> float:
    r, busy = self._load.rates, len(self._ends)
    seen = busy * (self._step + steps / 2) - self._starts
    seen += self._load.prompt * sum(map(bool, self.busy))
    fixed = max(r.weights / r.bandwidth, r.token * rows / r.operations)
    return steps * (r.launch_s + fixed + _KEYS * r.key * seen / r.bandwidth)

  def _refill(self, lanes: Iterable[int]) -> None:
    for lane, chunk in ((i, x) for i in lanes for x in self._lanes[i]):
      while chunk.left and self.busy[lane] < self._load.spec.slots:
        end, number = self._step + chunk.left.popleft(), next(self._count)
        heapq.heappush(self._ends, (end, number, lane, self._step, chunk))
        chunk.running += 1
        self.busy[lane] += 1
        self._starts += self._step

  def _wants(self) -> bool:
    """As `slots.wants_prompts`."""
    held = [lane[0].done for lane in self._lanes if lane[0].place >= 0]
    return 0 < sum(held) * slots.IDLE_SHARE >= len(held)

  def _shift(self) -> None:
    """As `slots.shift`."""
    moves = gains = self._lanes
    while moves or gains:
      held = lambda lane: bool(self.todo) or any(x.place >= 0 for x in lane)
      moves = [lane for lane in self._lanes if lane[0].done and held(lane)]
      gains = [lane for lane in self._lanes if lane[-1].place < 0 and self.todo]
      for lane in moves:
        if (first := lane.pop(0)).place >= 0:
          self.finished.append(first.place)
        lane.append(_Chunk(-1, (), Chunk(0, 0)))
      for lane in moves + [x for x in gains if x not in moves]:
        if self.todo:
          lane[-1] = self.todo.popleft()


class _Process:
  """A process of a step: its candidates and its devices, as in `stream`."""

  def __init__(self, load: _Load, candidates: dynamic_sampling.Candidates):
    self._load, self._spec, self.candidates = load, load.spec, candidates
    self._places = stream.Places(load.rows, load.each)
    self._devices = [_Device(load) for _ in range(load.rows)]
    self.clock, self.over, self.idle = 0.0, False, False
    self.busy = self.slot_steps = 0
    # (when it is there, number, future, prompts) of each verdict
    self._verdicts: list[tuple[float, int, futures.Future, Prompts]] = []

  @property
  def next_verdict(self) -> float:
    return self._verdicts[0][0] if self._verdicts else np.inf

  def turn(self) -> None:
    """Gives prompts to free places and decodes."""
    end = self.candidates.ends()
    if self.candidates.behind:
      self.idle = True
      return
    try:
      if end is not None and self.clock >= end:
        raise dynamic_sampling.Enough
      self.candidates.feed(0, False)
      while (room := self._places.room) and (
        more := self.candidates.feed(room, False)
      ):
        self._admit(more)
    except dynamic_sampling.Enough:
      self.over = True
      return
    waiting = sum(x.waiting for x in self._devices)
    rows = np.array([n for x in self._devices for n in x.busy])
    # All rollouts of a chunk may have ended in the step before.
    self.idle = not any(self._places.chunks)
    if self.idle:
      return
    progress = types.SimpleNamespace(waiting=waiting, rows=rows)
    full = self._load.spec
    held: Any = full, self._spec, None, (), None, progress, 0
    self._spec = sampler.shrunk(sampler.OpenRollouts(*held))
    size = self._spec.lanes * self._spec.slots
    took = [x.advance(size, sampler.SPAN) for x in self._devices]
    self.clock += max(seconds for seconds, _, _ in took)
    self.busy += sum(tokens for _, tokens, _ in took)
    self.slot_steps += full.lanes * full.slots * sum(n for _, _, n in took)
    for own, device in zip(self._places.chunks, self._devices, strict=True):
      for place in device.finished:
        future, prompts = futures.Future(), own.pop(place)
        self.candidates.judged.append(future)
        self.candidates.times[prompts.chunk] = self.clock
        verdict = self.clock + _SCORED_S, id(future), future, prompts
        heapq.heappush(self._verdicts, verdict)
      device.finished.clear()

  def _admit(self, more: Prompts) -> None:
    load, self._spec = self._load, self._load.spec
    batch, at = self._places.put(more)
    for i in np.flatnonzero(batch.real):
      p, n = int(batch.prompts.index[i]), int(batch.offset[i])
      own = load.lengths[p, n : n + load.plan.chunk].tolist()
      device = self._devices[i // self._places.visited]
      device.todo.append(_Chunk(int(at[i]), own, Chunk(p, n)))
    most = batch.real.reshape(load.rows, -1).sum(axis=1).max()
    self.clock += most * load.prompt * load.rates.token / load.rates.operations

  def leave(self) -> None:
    """Of chunks that were begun what has not ended is left."""
    lengths, size = self._load.lengths, self._load.plan.chunk
    held = [x.chunk for own in self._places.chunks for x in own.values()]
    for p, n in (*self.candidates.times, *held):
      lengths[p, n : n + size] = 1
    for device in self._devices:
      for (p, n), left in device.open().items():
        lengths[p, n : n + len(left)] = left

  def judge(self, now: float) -> None:
    """The verdicts that are there by now."""
    good = lambda group: group.scores.reward.any(axis=1)
    while self._verdicts and self.next_verdict <= now:
      _, _, future, prompts = heapq.heappop(self._verdicts)
      x = np.ones((1, self._load.plan.chunk, 1), np.int32)
      made = Rollouts(x, x / 1, x > 0, x[..., 0] < 0, np.zeros(1))
      of = self.candidates, self._load.score, good, prompts, made
      future.set_result(dynamic_sampling.judge(*of))


def _sampled(
  load: _Load, usual: float, begin: int = 0
) -> tuple[float, int, int, float]:
  """Seconds, candidates that count and others, share of slots that are busy.
  What is left of rollouts that cross the step replaces their lengths.
  """
  claims, notes = set[int](), dict[int, str]()
  claim = lambda i: i not in claims and not claims.add(i)
  told = {"write": notes.__setitem__, "read": notes.copy}
  board = types.SimpleNamespace(claim=claim, **told)
  index = lambda p: np.array(p, np.int32)
  text = lambda p: index(p)[:, None]
  prompts = lambda p: Prompts(text(p), text(p) >= 0, index(p))
  make = functools.partial(dynamic_sampling.SharedCandidates, board=board)
  candidates = range(begin, len(load.passes))
  of = prompts, candidates, load.target, load.plan, usual, None, lambda: False
  each = [(i, load.processes) for i in range(load.processes)]
  every = [_Process(load, make(*of, load.max_age, share=x)) for x in each]
  while going := [x for x in every if not x.over]:
    one = min(going, key=lambda x: np.inf if x.idle else x.clock)
    now = min(x.next_verdict for x in every)
    # Verdicts come, and all look again.
    if now < np.inf and (one.idle or now <= one.clock):
      for x in every:
        x.judge(now)
        x.clock, x.idle = max(x.clock, now) if x.idle else x.clock, False
    else:
      one.turn()
  count = every[0].candidates.suffices() or 0
  for x in every if load.max_age else ():
    x.leave()
  given = count if load.max_age else max(x.candidates.given for x in every)
  busy = sum(x.busy for x in every) / sum(x.slot_steps for x in every)
  return max(x.clock for x in every), count, given - count, busy


def _lengths(case: Case, shape: tuple[int, int], most: int) -> np.ndarray:
  """Of all rollouts, cut at `most`; their mean is that of the case."""
  rng = np.random.default_rng(case.seed)
  spread = _PROMPTS * rng.normal(size=(shape[0], 1))
  spread = np.exp(spread + _ROLLOUTS * rng.normal(size=shape))
  for _ in range(100):  # it converges
    spread *= case.mean_tokens / np.minimum(spread, most).mean()
  return np.clip(spread, 1, most).astype(int)


def _rates(run: Run, phase: Phase, chip: Chip) -> _Rates:
  p, within = run.policy, run.machine.axes.within
  total = sum(x.size for x in jax.tree.leaves(p.shapes))
  total -= (not p.tied) * p.vocab * p.width  # the embedding: a row of a token
  unread = 3 * p.layers * p.width * p.mlp * (p.experts - p.experts_per_token)
  return _Rates(
    _LAUNCH_S * p.layers * (chip.platform == "gpu"),
    _COPIED * chip.bandwidth,
    _COMPUTED * chip.flops,
    2 * total / within,
    2 * (total - unread) / within,
    4 * p.layers * p.heads * p.head_size / within,
    phase.memory.rollouts.load.key_bytes,
  )


def step_time(run: Run, phase: Phase, chip: Chip, case: Case) -> StepTime:
  """A step of the phase on the machine of the run, of these chips.

  Raises ValueError if the case is impossible.
  """
  c, plan, machine = phase.config, phase.memory.rollouts, run.machine
  most, target, n = c.sampling.max_new_tokens, c.sampling.prompts, c.sampling.n
  if not 1 <= case.mean_tokens < most or not 0 < case.pass_rate <= 1:
    raise ValueError(
      f"--mean_tokens={case.mean_tokens:g} must be 1 or more, and below "
      f"{most}, --pass_rate={case.pass_rate:g} above 0, and at most 1"
    )
  steps = _STEPS if c.run.max_age else 1
  count = 64 + int((steps + 1 + c.run.max_age) * target / case.pass_rate)
  lengths = _lengths(case, (count, n), most)
  passes = np.random.default_rng([case.seed, 1]).random(count) < case.pass_rate
  rows = machine.axes.rows // machine.processes
  each, prompt = plan.load.prompts // rows, int(_FILLED * c.data.prompt_tokens)
  spec = plan.spec(SamplingParams(), ())
  spec = dataclasses.replace(spec, lanes=-(-plan.lanes // rows), groups=1)
  load = _Load(
    lengths,
    passes,
    target,
    dynamic_sampling.RoundPlan((n,), 0, plan.load.n),
    spec.program(each, streams=True),
    prompt,
    rows,
    machine.processes,
    each,
    _rates(run, phase, chip),
    c.run.max_age,
  )
  every, end, whole = [], 0, lengths.copy()
  for _ in range(steps):
    every.append(_sampled(load, case.pass_rate, end))
    end += every[-1][1]
  told = np.mean(every[2:] or every, axis=0).tolist()
  last = slice(end - every[-1][1], end)
  kept = whole[last][passes[last]]
  scores, update, padding = _updated(phase, kept, load)
  sent = 8 * kept.sum() / _SENT if machine.processes > 1 else 0.0
  made = round(told[1] * n), round(told[2] * n)
  return StepTime(told[0], sent, scores, update, *made, told[3], padding)


def _updated(
  phase: Phase, lengths: Int[np.ndarray, "P N"], load: _Load
) -> tuple[float, float, float]:
  """Seconds of the passes that score, of the updates, and share of padding."""
  c, r, n, positions, tokens = phase.config, load.rates, lengths.shape[1], 0, 0
  for at in packing.split(len(lengths), c.optim.minibatches, (0, 0)):
    distinct = [(p, (np.arange(n), np.ones(n, int))) for p in range(len(at))]
    every = [*packing.blocks(distinct, lengths[at], phase.layout.rows)]
    _, more = packing.assigned(every, c.data.prompt_tokens, phase.layout)
    positions += more
    tokens += sum(load.prompt + block.tokens for block in every)
  seen = load.prompt + (lengths**2).sum() / (2 * lengths.sum())
  each = (r.token + r.attention * seen) / (r.operations * _UPDATED)
  forward = positions * each / (load.rows * load.processes)
  scores = (c.optim.minibatches > 1) + bool(c.reference.kl_weight)
  again = c.devices.remat != "nothing"
  return scores * forward, (3 + again) * forward, 1 - tokens / positions
