"""How long a step of a run takes on a machine at best, by arithmetic.

    seconds = max(operations / peak operations per second,
                  bytes / peak bytes per second) + links

is what no program on this chip can beat if nothing overlaps the links: the
roofline. XLA does not count what its kernels do, so this is counted from the
policy: products are 2 operations for each weight of a token, attention is
4 K for each query head and key.

References:
  Williams et al. 2009, "Roofline", CACM 52(4).
"""

import dataclasses
from collections.abc import Mapping

import jax

from brorl_jax.model.policy import Policy
from brorl_jax.plan.programs import CompileJob, training_spec
from brorl_jax.plan.topology import CHIPS, Topology
from launch.bench.roofline.hlo import Collective

Number = int | float  # a mean, or a count that may be one


@dataclasses.dataclass(frozen=True)
class Speed:
  """Of one device, by the vendors' data sheets, dense and without sparsity."""

  bandwidth: float  # of its memory, bytes/s
  flops: float  # bfloat16 products, 1/s
  link: float  # to the other devices of its host or slice, one way, bytes/s
  joined: int  # devices that such links join
  between: float  # to others, bytes/s


def _tpu(kind: str, flops: float, link: float) -> Speed:
  return Speed(CHIPS[kind].bandwidth, flops, link, 4096, link)


# NVIDIA H100 SXM and H200 data sheets: NVLink 900 GB/s both ways; hosts are
# joined by 400 Gb/s for each GPU. Google Cloud's pages of each TPU; links are
# of a chip, all directions.
SPEEDS = {
  "h100": Speed(CHIPS["h100"].bandwidth, 989e12, 450e9, 8, 50e9),
  "h200": Speed(CHIPS["h200"].bandwidth, 989e12, 450e9, 8, 50e9),
  "v5p": _tpu("v5p", 459e12, 600e9),
  "v5e": _tpu("v5e", 197e12, 200e9),
  "v6e": _tpu("v6e", 918e12, 448e9),
}


def speed_of(where: Topology) -> Speed | None:
  """The speed of a topology's devices; None if it is not known."""
  kind = where.name.kind
  if kind == "here":
    kind = jax.devices()[0].device_kind.lower()
  return next((s for name, s in SPEEDS.items() if name in kind), None)


@dataclasses.dataclass(frozen=True)
class Work:
  """Of all devices together."""

  flops: Number
  bytes: Number

  def __add__(self, other: "Work") -> "Work":
    return Work(self.flops + other.flops, self.bytes + other.bytes)

  def times(self, n: Number) -> "Work":
    return Work(n * self.flops, n * self.bytes)


@dataclasses.dataclass(frozen=True)
class Counts:
  """What tokens cost a policy; `devices` hold a copy of its weights each.

  Args:
    copies: Rows of devices, each of which reads all weights.
  """

  policy: Policy
  copies: int

  @property
  def _layer(self) -> int:
    """Weights of a layer that a token meets."""
    p = self.policy
    attention = p.width * p.head_size * (2 * p.heads + 2 * p.kv_heads)
    fed = 3 * p.width * p.mlp * max(p.experts_per_token, 1)
    return attention + fed + p.width * p.experts

  @property
  def _head(self) -> int:
    return self.policy.width * self.policy.vocab

  @property
  def weights(self) -> int:
    """Numbers that a pass over many tokens reads: all experts."""
    p = self.policy
    more = 3 * p.width * p.mlp * (p.experts - max(p.experts_per_token, 1))
    return p.layers * (self._layer + max(more, 0)) + self._head

  @property
  def key_bytes(self) -> int:
    """Of the keys and values of a token, in all layers."""
    p = self.policy
    each = 2 * p.layers * p.kv_heads
    if p.int8_cache:
      return each * (p.head_size + 4)
    return each * p.head_size * self._half

  @property
  def _half(self) -> int:
    return 2 if self.policy.dtype != "float32" else 4

  def forward(self, tokens: Number, seen: Number, logits: Number) -> Work:
    """A pass over tokens that see `seen` keys each, with logits of some.

    Activations are read and written, some ten times their width in a layer.
    """
    p = self.policy
    attention = 4 * p.heads * p.head_size * seen * p.layers
    flops = tokens * (2 * p.layers * self._layer + attention)
    moved = tokens * p.layers * self._half * (10 * p.width + 3 * p.mlp)
    read = self.copies * self.weights * self._half
    return Work(flops + 2 * logits * self._head, moved + read)

  def gradient(self, tokens: Number, seen: Number, logits: Number) -> Work:
    """Forward, forward again where nothing was kept, and twice that back."""
    once = self.forward(tokens, seen, logits)
    again = self.forward(tokens, seen, 0)
    # Logits are computed once more in the backward pass, by tiles.
    back = once.times(2) + Work(2 * logits * self._head, 0)
    return once + again + back

  def step(
    self, rows: Number, lanes: Number, prompt: Number, own: Number
  ) -> Work:
    """A decode step: weights, each lane's prompt once, each row's own keys."""
    work = self.forward(rows, prompt + own, rows)
    keys = self.key_bytes * (lanes * prompt + rows * own)
    return work + Work(0, keys + 4 * rows * self.policy.vocab)

  def apply(self, parameters: int) -> Work:
    """AdamW: parameters, moments and gradients, read and written."""
    return Work(20 * parameters, 28 * parameters)


def seconds(
  work: Work, sent: Mapping[Collective, int], speed: Speed, devices: int
) -> float:
  """By the roofline; messages between hosts at the speed of those links.

  Args:
    work: Of all devices.
    sent: Messages of a device -> how often.
    devices: That share the work.
  """
  busy = max(work.flops / speed.flops, work.bytes / speed.bandwidth) / devices
  return busy + link_seconds(sent, speed)


def link_seconds(sent: Mapping[Collective, int], speed: Speed) -> float:
  """Of messages, one after the other, around a ring."""
  total = 0.0
  for message, count in sent.items():
    n = max(message.group, 2)
    # A reduction sends its numbers twice around; the result of reduce-scatter
    # is one of n parts; a permutation is one hop.
    share = {
      "all-reduce": 2 * (n - 1) / n,
      "reduce-scatter": n - 1.0,
      "collective-permute": 1.0,
    }
    moved = message.size_bytes * share.get(message.kind, (n - 1) / n)
    link = speed.link if n <= speed.joined else speed.between
    total += count * moved / link
  return total


@dataclasses.dataclass(frozen=True)
class Part:
  """What a step spends on a program."""

  name: str
  calls: Number  # of the program, or turns of its open loop
  work: Work  # of one call, of the devices that share it
  seconds: float  # of all calls, at best


@dataclasses.dataclass(frozen=True)
class Schedule:
  """A step of a run."""

  parts: list[Part]
  tokens: Number  # mean length of a response
  rollouts: int  # of a step
  steps: int  # of the run
  devices: int

  @property
  def seconds(self) -> float:
    """Of a step, at best."""
    return sum(part.seconds for part in self.parts)

  @property
  def device_hours(self) -> float:
    """Of the run."""
    return self.steps * self.seconds * self.devices / 3600

  @property
  def rollouts_per_hour(self) -> float:
    return self.rollouts / self.seconds * 3600


def step_of(
  run: CompileJob,
  sent: Mapping[str, Mapping[Collective, int]],
  speed: Speed,
) -> Schedule:
  """A step in which every prompt is informative.

  Responses have `sampling.mean_tokens` tokens each, or the most there can be.
  Verifiers, checkpoints and the work of the host are not in it.

  Args:
    run: The run.
    sent: Messages of each program that there is.
    speed: Of a device.
  """
  c, alone = run.config, run.alone
  sampled, S = c.sampling, c.data.prompt_tokens
  T = sampled.mean_tokens or sampled.max_new_tokens
  cost = Counts(run.policy, copies=run.rows)
  P = sampled.prompts
  N = sampled.samples / P  # on average
  parts: list[Part] = []

  def add(name: str, calls: Number, work: Work, job: CompileJob = run) -> None:
    if name not in sent or not calls:
      return
    each = seconds(work, sent[name], speed, job.mesh.size)
    parts.append(Part(name, calls, work, calls * each))

  # Each process samples its share on its own devices, all at the same time.
  own, share = (
    Counts(run.policy, copies=alone.rows),
    P / run.run.machine.processes,
  )
  group = alone.read_together
  read = own.forward(group * S, S / 2, group)
  add("copy", 1, Work(0, 0))
  add("prefill", 1, read, alone)
  add("read", max(share / group - 1, 0), read, alone)

  spec = training_spec(run)
  lanes = spec.lanes * alone.rows
  rows = lanes * spec.slots
  step = own.step(rows, lanes, S, T / 2)
  add("decode", share * N * T / rows, step, alone)

  # Microbatches of every length have about the same number of tokens.
  blocks, M = c.optim.blocks, c.optim.rows
  tokens = blocks * M * sampled.max_new_tokens
  calls = P * N * T / tokens
  both = lambda of: of(blocks * S, S / 2, 0) + of(tokens, S + T / 2, tokens)
  old, ref = c.optim.minibatches > 1, bool(c.reference.kl_weight)
  add("score", calls * (old + ref), both(cost.forward))
  add("gradient", calls, both(cost.gradient))
  add("apply", c.optim.minibatches, cost.apply(run.parameters))
  return Schedule(parts, T, sampled.samples, c.run.steps, run.mesh.size)
