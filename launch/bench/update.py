r"""Speed of the learner on the workloads of workloads.py; one line of JSON.

  python -m launch.bench.update --workload=l1 --n=64 --dtype=float32

l1: 128 tokens of prompt, 128 of each response. l2: 512 and 64. l3, for an
accelerator: a Qwen2 of 1.5 billion parameters, 4 prompts of 512 tokens, 128
responses of 2,048 to each. Weights and responses are random, so that no two
responses are alike. An update is forward, backward and AdamW; no reference.

Rates are medians over the updates; tokens are those of responses. On a machine
that does other things too read tokens_per_cpu_s. Memory is that of the process,
idle_bytes what it had with the weights and the optimizer's state.

  --form=plain     the prompt is read once for every response, and there is an
                   array of all logits: how others train
  model_flops_share   of the measured rate of a large matrix product. Counted is
                   what training cannot do without, with the prompt read once;
                   what is computed twice to save memory is not
  programs         that were compiled until the first update was made, weights
                   and optimizer included, and in later ones

With --serve a run is a whole step: rollouts, rewards, advantages, update.
"""

import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

from launch.bench import protocol
from launch.bench.rollout import accelerator
from launch.bench.workloads import Workload

# Of a CPU device: more rows are slower, their numbers lie far from a core.
_ROWS = 16


def start(task: protocol.Task, form: str, **layout):
  """Ours, for protocol.main."""
  from launch.bench import ours

  speed = ours.speed(task.dtype)
  learner = Learner(task, form, **layout)
  return "brorl_jax", {**learner.versions, **speed}, learner.step


class Learner:
  """A policy of random weights and its optimizer."""

  def __init__(
    self,
    task: protocol.Task,
    form: str,
    *,
    rows: int,
    blocks: int,
    remat: str,
  ):
    import jax
    import numpy as np

    from brorl_jax import types
    from brorl_jax.learner import state as states
    from brorl_jax.learner import update
    from brorl_jax.learner.objective import Objective
    from brorl_jax.learner.packing import Layout
    from launch.bench import ours

    self.versions, self.machine = ours.versions(), ours.machine
    self.programs = ours.Programs()
    m = task.workload.model
    policy = ours.policy(m, task.dtype, remat=remat)
    ids = np.asarray(task.prompts, np.int32)
    self.prompts = types.Prompts(
      ids, np.ones(ids.shape, bool), np.arange(len(ids), dtype=np.int32)
    )
    tx, _ = states.adamw(
      lr=1e-5,
      warmup=1,
      total=None,
      b1=0.9,
      b2=0.95,
      eps=1e-8,
      weight_decay=0.0,
      max_grad_norm=1.0,
    )
    init = lambda key: states.init_state(
      policy.init(key), tx, keep_reference=False
    )
    self.state = jax.block_until_ready(jax.jit(init)(jax.random.key(0)))
    self._layout = Layout(rows, blocks, task.workload.new, task.workload.prompt)
    self._minibatch = functools.partial(
      update.minibatch_step,
      tx=tx,
      response_logp=policy.response_logp if form == "shared" else plain(policy),
      objective=Objective(
        clip_low=0.2,
        clip_high=0.28,
        kl_weight=0.0,
        kl_clamp=10.0,
        temperature=1.0,
      ),
    )
    self._jax, self._np, self._task = jax, np, task
    self._decoder = ours.ending(policy, task.workload)
    task.idle()

  def update(self, rollouts) -> float:
    """One optimizer update; the share of padding."""
    from brorl_jax.learner import packing
    from brorl_jax.rl import advantages

    np = self._np
    # Trivial, and not the same for all: parity of the first token.
    reward = self._jax.numpy.asarray(rollouts.tokens[:, :, 0] % 2.0)
    advantage = np.asarray(advantages.center_by_group(reward))
    source = packing.Source(self.prompts, rollouts, advantage)
    plan = packing.pack(source, self._layout)
    self.state, stats = self._minibatch(self.state, plan.batches())
    self._jax.block_until_ready((self.state, stats))
    return packing.padding_fraction([plan])

  def step(self, seed: int):
    """A whole one; token ids of every response."""
    rollouts, update = protocol.Clock(), protocol.Clock()
    with rollouts:
      out = self.sample(seed)
    with update:
      self.update(out)
    self._task.parts = {
      "update_wall_s": update.wall_s,
      "update_cpu_s": update.cpu_s,
    }
    lengths = out.mask.sum(axis=2).ravel()
    flat = out.tokens.reshape(-1, out.tokens.shape[2])
    return [row[:t] for row, t in zip(flat, lengths, strict=True)]

  def sample(self, seed: int):
    from brorl_jax.rollout import sampler
    from brorl_jax.rollout.draw import SamplingParams
    from brorl_jax.rollout.slots import RolloutSpec

    jax, w = self._jax, self._task.workload
    spec = RolloutSpec(
      policy=self._decoder,
      sampling=SamplingParams(),
      stop_ids=w.stop_ids,
      n=self._task.n,
      max_new_tokens=w.new,
      slots=self._task.slots,
    )
    out = sampler.rollouts(
      spec, self.state.params, self.prompts, jax.random.key(seed)
    )
    return jax.device_get(out)

  def device_peak_bytes(self) -> int | None:
    """Of an accelerator; a CPU does not say."""
    stats = self._jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")

  def invented(self, seed: int):
    """Random responses, as far from the policy as the first rollouts are."""
    from brorl_jax import types

    np, w = self._np, self._task.workload
    shape = (len(self.prompts.index), self._task.n, w.new)
    tokens = np.random.default_rng(seed).integers(10, w.model.vocab, shape)
    lengths = np.reshape(w.drawn(shape[0] * shape[1], seed), (*shape[:2], 1))
    return types.Rollouts(
      tokens=tokens.astype(np.int32),
      logp=np.full(shape, -np.log(w.model.vocab), np.float32),
      mask=np.arange(w.new) < lengths,
      truncated=np.zeros(shape[:2], bool),
      slot_steps=np.ones(1, np.float32),
    )


def plain(policy):
  """`response_logp` as others compute it: the prompt once for each response."""
  import jax.numpy as jnp

  from brorl_jax.rl import losses

  def response_logp(params, prompt, prompt_mask, response, temperature, trees):
    del trees
    P, R, T = response.shape
    rows = lambda x: jnp.repeat(x[:, None], R, axis=1).reshape(P * R, -1)
    response = response.reshape(P * R, T)
    tokens = jnp.concatenate([rows(prompt), response], axis=1)
    everything = jnp.ones(response.shape, bool)
    mask = jnp.concatenate([rows(prompt_mask), everything], axis=1)
    logits = policy.logits(params, tokens, mask)[:, -T - 1 : -1]
    found = losses.token_logp(logits / temperature, response)
    logp, entropy = (x.reshape(P, R, T) for x in found)
    return logp, entropy

  return response_logp


def work(w: Workload, prompts: int, lengths: Sequence[int]) -> float:
  """Floating-point operations that an update cannot do without.

  Forward, and twice as many backward. The prompt is read once.
  """
  m = w.model
  # The last token of a response is only predicted.
  tokens = prompts * w.prompt + sum(lengths) - len(lengths)
  pairs = prompts * w.prompt * (w.prompt + 1) / 2
  pairs += sum((t - 1) * (w.prompt + t / 2) for t in lengths)
  forward = 2 * m.layers * m.layer_weights * tokens
  forward += 2 * m.vocab * m.width * sum(lengths)
  forward += 4 * m.layers * m.heads * m.head_size * pairs
  return 3 * forward


def rates(tokens: int, runs: Sequence[protocol.Clock]) -> dict[str, Any]:
  """Medians over updates with this many tokens each."""
  wall_s = statistics.median(run.wall_s for run in runs)
  cpu_s = statistics.median(run.cpu_s for run in runs)
  return {
    "update_s": round(wall_s, 4),
    "update_cpu_s": round(cpu_s, 4),
    "every_update_cpu_s": [round(run.cpu_s, 3) for run in runs],
    "tokens_per_s": round(tokens / wall_s),
    "tokens_per_cpu_s": round(tokens / cpu_s),
  }


def report(
  task: protocol.Task, name: str, repeats: int, form: str, **layout
) -> dict:
  """The line of JSON."""
  learner = Learner(task, form, **layout)
  begin = time.perf_counter()
  padding = learner.update(learner.invented(0))
  first_s = time.perf_counter() - begin
  first = learner.programs.count
  runs = []
  for seed in range(1, repeats + 1):
    out, clock = learner.invented(seed), protocol.Clock()
    with clock:
      learner.update(out)
    runs.append(clock)
  programs = {"first": first, "later": learner.programs.count - first}
  peak, on_device = protocol.peak_bytes(), learner.device_peak_bytes()
  rate, _ = learner.machine(task.dtype)
  wall_s = statistics.median(run.wall_s for run in runs)
  prompts = len(task.prompts)
  # Every update has other lengths; their sums are nearly the same.
  lengths = task.workload.drawn(prompts * task.n, repeats)
  tokens = sum(lengths)
  return {
    "system": "brorl_jax",
    "workload": name,
    "form": form,
    "model": dataclasses.asdict(task.workload.model),
    "n": task.n,
    "prompts": prompts,
    "dtype": task.dtype,
    **layout,
    "tokens": tokens,
    **rates(tokens, runs),
    "model_flops_share": round(
      work(task.workload, prompts, lengths) / wall_s / rate, 4
    ),
    "matmul_flops_per_s": round(rate),
    "padding_fraction": round(padding, 4),
    "programs": programs,
    "first_update_s": round(first_s, 2),
    "idle_bytes": task.idle_bytes,
    "peak_bytes": peak,
    "device_peak_bytes": on_device,
    "versions": learner.versions,
    "processor": protocol.processor(),
  }


def main() -> None:
  of: dict[str, Any] = dict(
    accelerator=accelerator, more=add_flags, default="l1"
  )
  task, flags = protocol.parse(**of)
  how = {k: getattr(flags, k) for k in ("form", "rows", "blocks", "remat")}
  # What was faster on a CPU, where products are as cheap as memory in bfloat16.
  how["remat"] = flags.remat or (
    "layer" if task.dtype == "bfloat16" else "products"
  )
  if flags.serve:
    begin = functools.partial(start, **how)
    protocol.main(begin, any_heads=True, **of)
  else:
    print(json.dumps(report(task, flags.workload, flags.repeats, **how)))


def add_flags(parser) -> None:
  """Those of an update alone."""
  parser.add_argument("--form", choices=["shared", "plain"], default="shared")
  parser.add_argument("--rows", type=int, default=_ROWS, help="of a block")
  parser.add_argument("--blocks", type=int, default=1, help="of a microbatch")
  parser.add_argument("--remat", choices=["layer", "products", "nothing"])


if __name__ == "__main__":
  main()
