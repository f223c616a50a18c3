"""Compiles every program of a run and prints the memory that each needs.

Tables first, and all of it in a line of JSON, the last one.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import jax

from brorl_jax.many import meshes
from brorl_jax.plan import programs
from brorl_jax.plan.memory import TooLarge, size
from brorl_jax.plan.programs import FEW, CompileJob, Program
from brorl_jax.plan.topology import Topology


@dataclasses.dataclass(frozen=True)
class Needs:
  """Bytes of a program on a device."""

  name: str
  held_bytes: int  # before it starts: its arguments and all else that is kept
  temp_bytes: int  # for itself
  new_bytes: int  # results that are not written over arguments

  @property
  def peak_bytes(self) -> int:
    return self.held_bytes + self.temp_bytes + self.new_bytes


def compile_all(job: CompileJob, where: Topology) -> list[tuple[Program, Any]]:
  """Compiles every program, two at a time.

  With `job.fast` two programs have the name of each decode loop, of FEW layers.

  Raises:
    ValueError: `job.fast`, and the policy has layers of two kinds or too few.
  """
  policy = job.policy
  if job.fast and (policy.layers <= FEW[1] or policy.sliding):
    raise ValueError(
      f"--fast needs more than {FEW[1]} layers of one kind; the "
      f"policy has {policy.layers}"
      + (", some of which slide" if policy.sliding else "")
      + "; leave --fast out"
    )
  compile = functools.cache(
    lambda lowered: lowered.compile(compiler_options=where.options)
  )
  with futures.ThreadPoolExecutor(2) as pool:
    found = [
      (program, pool.submit(compile, program.lowered))
      for program in programs.every_program(job, compile)
    ]
  return [(program, future.result()) for program, future in found]


def needs(job: CompileJob, every: list[tuple[Program, Any]]) -> list[Needs]:
  """The memory of programs; of a decode loop of FEW layers that of all."""
  out: dict[str, Needs] = {}
  for program, compiled in every:
    memory: Any = compiled.memory_analysis()
    found = Needs(
      program.name,
      program.held_bytes,
      memory.temp_size_in_bytes,
      max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0),
    )
    if program.name in out:
      two = dataclasses.asdict(out[program.name])
      three = dataclasses.asdict(found)
      del two["name"], three["name"]
      sums = {k: of_all_layers(job, two[k], three[k]) for k in two}
      found = Needs(program.name, **sums)
    out[program.name] = found
  return [*out.values()]


def of_all_layers(job: CompileJob, two: int, three: int) -> int:
  """On the line through a number of two and of three layers; never fewer."""
  return two + max(three - two, 0) * (job.policy.layers - FEW[0])


def show(job: CompileJob, where: Topology) -> None:
  """Prints the memory of a run's programs on a topology.

  Raises:
    TooLarge: A program does not fit into the pool.
  """
  found = needs(job, compile_all(job, where))
  print(title(job, where), *table(found, where), sep="\n")
  counts = programs.counts(job)
  kinds = ", ".join(f"{n} of {name}" for name, n in counts.items())
  print(f"programs to compile: at most {sum(counts.values())} ({kinds})")
  # Of the training state, over all devices.
  leaves = jax.tree.leaves(job.state())
  saved = sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
  c = job.config.run
  multiples = c.keep_every and c.steps // c.keep_every + 1
  kept = c.keep_checkpoints + 1 + multiples  # 1: the best
  print(
    f"checkpoint: {size(saved)}, written from the shards of "
    f"{job.mesh.size} devices; at most {kept} kept: {size(kept * saved)}"
  )
  line = {
    "topology": str(where.name),
    "devices": len(where.devices),
    "pool_bytes": (limit := where.target.memory_bytes),
    "fits": all(m.peak_bytes <= limit for m in found),
    "programs": [
      {**dataclasses.asdict(m), "peak_bytes": m.peak_bytes} for m in found
    ],
    "program_counts": counts,
    "checkpoint_bytes": saved,
  }
  print(json.dumps(line))
  _refuse(found, where, job)


def title(job: CompileJob, where: Topology) -> str:
  """What was compiled."""
  layers = f"{job.policy.layers} layers"
  if job.fast:
    layers += f", decode with {' and '.join(map(str, FEW))}, no evaluation"
  return f"programs of {where.name}: mesh ({meshes.of(job.mesh)}), {layers}"


def table(found: list[Needs], where: Topology) -> Iterator[str]:
  """A line for every program: what is held, what it needs itself, and what the
  sum is of the memory that XLA may use."""
  limit = where.target.memory_bytes
  yield f"  {'per device':22} {'held':>11} {'itself':>11} {'peak':>11}  of pool"
  for m in found:
    yield (
      f"  {m.name:22} {size(m.held_bytes):>11} "
      f"{size(m.temp_bytes + m.new_bytes):>11} {size(m.peak_bytes):>11} "
      f"{m.peak_bytes / limit:8.1%}"
    )
  yield f"  {'pool':22} {'':23} {size(limit):>11}"


def _refuse(found: list[Needs], where: Topology, job: CompileJob) -> None:
  """Raises TooLarge for the largest program if it does not fit."""
  worst = max(found, key=lambda m: m.peak_bytes)
  limit = where.target.memory_bytes
  if worst.peak_bytes <= limit:
    return
  c, plans = job.config, job.phase.memory
  # What a field multiplies; the rest is there with one row as well.
  field, count, kept = (
    "sampling.slots", plans.rollouts.slots, job.sampling_bytes
  )  # fmt: skip
  if worst.name in ("score", "gradient"):
    field, count, kept = "optim.rows", c.optim.rows, worst.held_bytes
  if worst.name == "apply":
    field, count = "theory.prompts", c.theory.prompts
    kept = plans.applying_bytes
  most = max(count * (limit - kept) // (worst.peak_bytes - kept), 0)
  raise TooLarge(
    f"{worst.name} needs {size(worst.peak_bytes)} of the {size(limit)} that "
    f"XLA may use of a device of {where.name} with {field} = {count}; "
    + (f"nearest that fits, by its size: {field} = {most}, or " if most else "")
    + "choose more or larger devices"
  )
