"""How long a run takes on a machine at best, and how often it runs what."""

import dataclasses

from brorl_jax.plan import costs
from brorl_jax.plan.chips import Chip
from brorl_jax.plan.hlo import Measured
from brorl_jax.plan.run import Job, training_spec
from brorl_jax.rollout import sampler


@dataclasses.dataclass(frozen=True)
class Part:
  """What a step spends on a program."""

  name: str
  calls: costs.Number  # of the program, or turns of its open loop
  work: costs.Work  # of one call, of the devices that share it
  seconds: float  # of all calls, at best


@dataclasses.dataclass(frozen=True)
class Schedule:
  """A step of a run."""

  parts: list[Part]
  tokens: costs.Number  # mean length of a response
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


def of(run: Job, measured: list[Measured], chip: Chip) -> Schedule:
  """A step in which every prompt is informative.

  Responses have `sampling.mean_tokens` tokens each, or the most there can be.
  Verifiers, checkpoints and the host's own work are not in it.
  """
  c, alone = run.config, run.alone
  sampled, S = c.sampling, c.data.prompt_tokens
  T = sampled.mean_tokens or sampled.max_new_tokens
  cost = costs.Counts(run.policy, copies=run.rows)
  P = sampled.prompts
  N = sampled.samples / P  # on average
  by_name = {m.name: m for m in measured}
  parts: list[Part] = []

  def add(
    name: str, calls: costs.Number, work: costs.Work, of: Job = run
  ) -> None:
    if name not in by_name or not calls:
      return
    each = costs.seconds(work, by_name[name].sent, chip, of.mesh.size)
    parts.append(Part(name, calls, work, calls * each))

  # Each process samples its share on its own devices, all at the same time.
  own, share = costs.Counts(run.policy, copies=alone.rows), P / run.processes
  group = alone.read_together
  read = own.forward(group * S, S / 2, group)
  add("copy", 1, costs.Work(0, 0))
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


def programs(run: Job) -> dict[str, int]:
  """How many programs a run compiles: part -> number, at most."""
  c = run.config
  spec = training_spec(run)
  # Each size of lanes with each of slots: both may shrink alone.
  pool = bool(spec.blocks)
  sizes = len(sampler.compact_sizes(spec.lanes, spec.slots, pool=pool))
  sizes = 1 if spec.pages == 1 else sizes
  # And its compaction; over pages an empty page, and one for other slots.
  decoding = sizes + (sizes - 1) + (0 if spec.blocks else 2 * sizes - 1)
  scores = c.optim.minibatches > 1 or bool(c.reference.kl_weight)
  return {
    # Prefill, read, admit, take; with several processes the copy.
    "sampling": 4 + decoding + (run.processes > 1),
    "updating": run.phase.layout.shapes * (1 + scores) + 2,
    "evaluation": 2 + decoding,
  }
