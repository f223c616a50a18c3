"""The plan of a topology as lines to read, and as one line of JSON."""

import json
from collections.abc import Iterator

from brorl_jax.plan import costs
from brorl_jax.plan.chips import Chip
from brorl_jax.plan.hlo import Collective, Measured
from brorl_jax.plan.plan import size
from brorl_jax.plan.schedule import Schedule
from brorl_jax.plan.topology import Topology

_MIB, _GIB = 2**20, 2**30


def memory(measured: list[Measured], where: Topology) -> Iterator[str]:
  """A line for every program: what is held, what is needed, what that is of
  the memory that XLA may use."""
  limit = where.target.memory_bytes
  yield (
    f"  {'per device':22} {'held':>11} {'itself':>11} {'peak':>11}  of pool  "
    "kernels"
  )
  for m in measured:
    own, peak = m.temp_bytes + m.new_bytes, m.peak_bytes
    kernels = m.kernels if m.token_kernels is None else m.token_kernels
    unit = "" if m.token_kernels is None else " per token"
    yield (
      f"  {m.name:22} {size(m.held_bytes):>11} {size(own):>11} "
      f"{size(peak):>11} {peak / limit:8.1%} {kernels:8}{unit}"
    )
  yield f"  {'pool':22} {'':23} {size(limit):>11}"


def messages(measured: list[Measured]) -> Iterator[str]:
  """A line for every message of a mebibyte or more."""
  for m in measured:
    large = sorted(m.sent.items(), key=lambda x: -x[0].size_bytes * x[1])
    for which, count in large:
      if which.size_bytes >= _MIB:
        yield f"  {m.name:22} {_message(which, count)}"


def _message(which: Collective, count: int) -> str:
  total = which.size_bytes * count / _GIB
  return (
    f"{which.kind:18} {which.size_bytes / _MIB:9.1f} MiB x {count:<5} over "
    f"{which.group:<3} = {total:.2f} GiB"
  )


def time(plan: Schedule, measured: list[Measured], chip: Chip) -> Iterator[str]:
  """A line for every part of a step, and the run."""
  sent = {m.name: m.sent for m in measured}
  yield (
    f"  {'roofline of a step':22}   calls  TFLOP each  GB each     links  "
    "seconds"
  )
  for part in plan.parts:
    links = costs.link_seconds(sent[part.name], chip) * part.calls
    yield (
      f"  {part.name:22} {part.calls:7.0f} {part.work.flops / 1e12:11.2f} "
      f"{part.work.bytes / 1e9:8.1f} {links:7.1f} s {part.seconds:8.1f}"
    )
  yield (
    f"  a step of {plan.rollouts:,} rollouts of {plan.tokens:,.0f} tokens: "
    f"{plan.seconds:,.0f} s at best, {plan.rollouts_per_hour:,.0f} rollouts "
    f"per hour; {plan.steps} steps: {plan.device_hours:,.0f} device-hours"
  )


def as_json(
  where: Topology, measured: list[Measured], plan: Schedule | None, more: dict
) -> str:
  """All of it in one line."""
  programs = [
    {
      "name": m.name,
      "held_bytes": m.held_bytes,
      "temp_bytes": m.temp_bytes,
      "new_bytes": m.new_bytes,
      "peak_bytes": m.peak_bytes,
      "kernels": m.kernels,
      "token_kernels": m.token_kernels,
      "messages": [{**x._asdict(), "count": n} for x, n in m.sent.items()],
    }
    for m in measured
  ]
  line = {
    "topology": str(where.name),
    "devices": len(where.devices),
    "pool_bytes": where.target.memory_bytes,
    "fits": all(m.peak_bytes <= where.target.memory_bytes for m in measured),
    "programs": programs,
    **more,
  }
  if plan is not None:
    line |= {
      "tokens": plan.tokens,
      "step_seconds": plan.seconds,
      "device_hours": plan.device_hours,
      "rollouts_per_hour": plan.rollouts_per_hour,
      "parts": [
        {
          "name": p.name,
          "calls": p.calls,
          "flops": p.work.flops,
          "bytes": p.work.bytes,
          "seconds": p.seconds,
        }
        for p in plan.parts
      ],
    }
  return json.dumps(line)
