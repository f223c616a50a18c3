r"""Speed of the sampler on the workloads of workloads.py; one line of JSON.

  python -m launch.bench.rollout --workload=w1 --n=512 --dtype=float32

w1: 128 tokens of prompt, 128 new, none ends. w2: 512 and 64. w3: w1, but one
token in 32 ends its rollout, on 128 slots. w4, for an accelerator: a Qwen2 of
1.5 billion parameters, 4 prompts of 512 tokens, 2,048 new. Weights are random.
Flags take any other shape and lengths: --model=512x8 --vocab=32000
--prompt=1024 --new=512 --ends=205, or --lengths=FILE, a run's lengths, one in
every line. Slots and lanes are planned where not all responses fit into memory.

Rates are medians over the runs; tokens are those that count, up to and
including the end. On a machine that does other things too read
tokens_per_cpu_s. Memory is that above a process that holds the weights.

  prefill_s        one run with a single new token
  tail_s           after 95 % of the rollouts have ended, to a page of columns
  programs         that were compiled until the first run was over, weights
                   included, and in later runs
  roofline_share   of the time that the floating-point operations take at the
                   rate of a large matrix product here, or the bytes at the
                   bandwidth of a large copy, whichever is longer
"""

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from launch.bench import protocol
from launch.bench.workloads import Workload


def start(task: protocol.Task):
  """Ours, for protocol.main."""
  from launch.bench import ours

  speed = ours.speed(task.dtype)
  sampler = Sampler(task)
  versions = {**sampler.versions, **speed}
  return "brorl_jax", versions, lambda seed: sampler.rows(seed)


class Sampler:
  """Samples rollouts with random weights and keeps statistics of the last."""

  def __init__(self, task: protocol.Task):
    import jax
    import numpy as np

    from brorl_jax.plan import memory
    from brorl_jax.rollout import sampler
    from brorl_jax.rollout.draw import SamplingParams
    from brorl_jax.types import Prompts
    from launch.bench import ours

    self.programs = ours.Programs()
    w = task.workload
    policy: Any = ours.policy(w.model, task.dtype)
    init = jax.jit(policy.init)
    size = lambda x: x.size * x.dtype.itemsize
    abstract = jax.eval_shape(init, jax.random.key(0))
    load = memory.Load(
      policy,
      sum(map(size, jax.tree.leaves(abstract))),
      n=task.n,
      prompts=len(task.prompts),
      prompt_tokens=w.prompt,
      max_new_tokens=w.new,
    )
    memory_bytes = policy.target.memory_bytes
    fits = memory.rollouts(load, memory_bytes, slots=w.slots)
    self.slots, self.lanes = fits.slots, fits.lanes
    spec = dataclasses.replace(
      fits.spec(SamplingParams(), w.stop_ids), policy=ours.ending(policy, w)
    )
    params = jax.block_until_ready(init(jax.random.key(0)))
    self.versions, self.machine = ours.versions(), ours.machine
    self.tail: float | None = None  # when 95 % of the rollouts had ended

    def sample(seed: int, new: int):
      total = task.n * len(task.prompts)
      self.tail = None

      def watch(progress) -> None:
        left = progress.busy + progress.waiting
        if self.tail is None and in_tail(total, left):
          self.tail = time.perf_counter()

      ids = np.asarray(task.prompts, np.int32)
      return sampler.rollouts(
        dataclasses.replace(spec, max_new_tokens=new),
        params,
        Prompts(ids, np.ones(ids.shape, bool), np.arange(len(ids))),
        jax.random.key(seed),
        watch=watch,
      )

    self._np, self._task, self._sample = np, task, sample
    task.idle()

  def rows(self, seed: int, new: int | None = None):
    """Token ids of every response, up to its end."""
    np = self._np
    out = self._sample(seed, new or self._task.workload.new)
    tokens, mask = np.asarray(out.tokens), np.asarray(out.mask)
    assert self.tail is not None
    self.tail_s = time.perf_counter() - self.tail
    self.occupancy = out.slot_occupancy()
    self.lengths = mask.sum(axis=2).ravel().tolist()
    flat = tokens.reshape(-1, tokens.shape[2])
    return [row[:t] for row, t in zip(flat, self.lengths, strict=True)]

  def prefill_s(self) -> float:
    """Of a second run with one new token."""
    for seed in (0, 1):
      begin = time.perf_counter()
      self.rows(seed, new=1)
    return time.perf_counter() - begin


def in_tail(total: int, left: int) -> bool:
  """Whether 95 % of the rollouts have ended, with this many left."""
  return total - left >= 0.95 * total


def least_s(flops: float, moved: float, rate: float, bandwidth: float) -> float:
  """Seconds that operations and bytes take, which overlap."""
  return max(flops / rate, moved / bandwidth)


def work(
  w: Workload, lengths: Sequence[int], size: int, slots: int
) -> tuple[float, float]:
  """A lower bound on floating-point operations and bytes of the rollouts.

  Args:
    w: The workload.
    lengths: Tokens of each response.
    size: Bytes of a number in the caches and of a weight.
    slots: Responses that share one reading of the weights.
  """
  m = w.model
  layer, head = m.layer_weights, m.vocab * m.width
  decoded = sum(lengths) - len(lengths)  # first tokens come from the prefill
  own = sum(t * (t - 1) / 2 for t in lengths)  # columns that are read
  seen = own + decoded * w.prompt + w.prompts * w.prompt**2 / 2
  heads = m.layers * m.heads * m.head_size
  flops = 2 * m.layers * layer * (decoded + w.prompts * w.prompt)
  flops += 2 * head * (decoded + w.prompts) + 4 * heads * seen
  steps = decoded / slots
  cache = 2 * m.layers * m.kv_heads * m.head_size * size
  read = steps * ((m.layers * layer + head) * size + w.prompt * cache)
  return flops, read + own * cache


def report(task: protocol.Task, name: str, repeats: int) -> dict:
  """The line of JSON."""
  sampler = Sampler(task)
  begin = time.perf_counter()
  sampler.rows(0)
  first_s = time.perf_counter() - begin
  first, runs, details = sampler.programs.count, [], []
  for seed in range(1, repeats + 1):
    runs.append(protocol.measure(task, sampler.rows, seed))
    details.append((sampler.tail_s, sampler.occupancy, sampler.lengths))
  tails, occupancies, lengths = zip(*details, strict=True)
  programs = {"first": first, "later": sampler.programs.count - first}
  prefill_s = sampler.prefill_s()
  rate, bandwidth = sampler.machine(task.dtype)
  size = 2 if task.dtype == "bfloat16" else 4
  slots = sampler.slots * sampler.lanes
  shares = []
  for run, of_run in zip(runs, lengths, strict=True):
    flops, moved = work(task.workload, of_run, size, slots)
    shares.append(least_s(flops, moved, rate, bandwidth) / run["wall_s"])
  middle = lambda f: statistics.median(map(f, runs))
  total, w = task.n * len(task.prompts), task.workload
  wall_s = middle(lambda r: r["wall_s"])
  return {
    "system": "brorl_jax",
    "workload": name,
    "model": dataclasses.asdict(w.model),
    "lengths": [w.prompt, w.new, w.one_in or list(w.lengths[:9]) or None],
    "n": task.n,
    "prompts": len(task.prompts),
    "slots": sampler.slots,
    "lanes": sampler.lanes,
    "dtype": task.dtype,
    "tokens": runs[-1]["tokens"],
    "every_wall_s": [r["wall_s"] for r in runs],
    "every_tokens_per_cpu_s": [round(r["tokens"] / r["cpu_s"]) for r in runs],
    "tokens_per_s": round(middle(lambda r: r["tokens"] / r["wall_s"])),
    "tokens_per_cpu_s": round(middle(lambda r: r["tokens"] / r["cpu_s"])),
    "samples_per_s": round(total / wall_s, 2),
    "slot_occupancy": round(statistics.median(occupancies), 4),
    "prefill_s": round(prefill_s, 4),
    "decode_s": round(wall_s - prefill_s, 4),
    "tail_s": round(statistics.median(tails), 4),
    "first_run_s": round(first_s, 2),
    "programs": programs,
    "memory_above_idle_bytes": runs[-1]["memory_above_idle_bytes"],
    "roofline_share": round(statistics.median(shares), 4),
    "matmul_flops_per_s": round(rate),
    "copy_bytes_per_s": round(bandwidth),
    "unique": runs[-1]["unique"],
    "versions": sampler.versions,
    "processor": protocol.processor(),
  }


def accelerator() -> bool:
  """Whether jax, which this loads, has one."""
  from launch.bench import ours

  return ours.accelerator()


def main() -> None:
  task, flags = protocol.parse(accelerator=accelerator)
  try:
    if flags.serve:
      protocol.main(start, any_heads=True, accelerator=accelerator)
    else:
      print(json.dumps(report(task, flags.workload, flags.repeats)))
  except ValueError as e:  # too large
    sys.exit(f"error: {e}")


if __name__ == "__main__":
  main()
