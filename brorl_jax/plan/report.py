"""Compiles what a run needs and prints it: tables, then a line of JSON."""

import math
from collections.abc import Iterable

import jax

from brorl_jax.many import meshes
from brorl_jax.plan import measured, schedule, table
from brorl_jax.plan.hlo import Measured
from brorl_jax.plan.plan import TooLarge, size
from brorl_jax.plan.run import FEW, Job
from brorl_jax.plan.topology import Topology


def show(run: Job, where: Topology) -> None:
  """Prints the plan of a topology.

  Raises:
    TooLarge: A program does not fit into the pool.
  """
  of = measured.run(run, where)
  how = f"{run.policy.layers} layers"
  if run.fast:
    how += f", decode with {' and '.join(map(str, FEW))}, no evaluation"
  print(
    f"programs of {where.name}: mesh ({meshes.of(run.mesh)}), {how}",
    *table.memory(of, where),
    sep="\n",
  )
  _lines("messages of 1 MiB and more, per call or token", table.messages(of))
  plan = None
  if where.chip is not None:
    plan = schedule.of(run, of, where.chip)
    _lines("time", table.time(plan, of, where.chip))
  counts = schedule.programs(run)
  kinds = ", ".join(f"{n} of {name}" for name, n in counts.items())
  print(f"programs to compile: at most {sum(counts.values())} ({kinds})")
  saved, c = _saved_bytes(run), run.config.run
  multiples = c.keep_every and c.steps // c.keep_every + 1
  kept = c.keep_checkpoints + 1 + multiples  # 1: the best
  print(
    f"checkpoint: {size(saved)}, written from the shards of "
    f"{run.mesh.size} devices; at most {kept} kept: {size(kept * saved)}"
  )
  more = {"program_counts": counts, "checkpoint_bytes": saved}
  print(table.as_json(where, of, plan, more))
  _refuse(of, where, run)


def _saved_bytes(run: Job) -> int:
  """Of the training state, over all devices."""
  leaves = jax.tree.leaves(run.state())
  return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)


def _lines(title: str, lines: Iterable[str]) -> None:
  if lines := [*lines]:
    print(title, *lines, sep="\n")


def _refuse(of: list[Measured], where: Topology, run: Job) -> None:
  worst, limit = max(of, key=lambda m: m.peak_bytes), where.target.memory_bytes
  if worst.peak_bytes <= limit:
    return
  c = run.config
  # What a field multiplies; the rest is there with one row as well.
  plans, kept = run.phase.memory, run.sampling_bytes
  field, count = "sampling.slots", plans.rollouts.slots
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
