"""Stage 5: groups of rollouts -> optimizer updates, and what they show."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import PyTree

from brorl_jax import ledger as ledgers
from brorl_jax import memory, packing, sharding, theory, train, types, update
from brorl_jax.ledger import Ledger
from brorl_jax.main import settings
from brorl_jax.main.settings import Config
from brorl_jax.policy import Policy
from brorl_jax.rl import lr_scaling

Parts = list[list[types.Batch]]  # batches of each minibatch


def scaled_lr(c: Config) -> float:
  """The learning rate of a step of so many samples, or prompts per update."""
  prompts = c.samples // c.n
  count = {
    "none": c.lr_base,
    "samples": c.samples,
    "prompts": prompts // c.minibatches,
  }[c.lr_scaling]
  return lr_scaling.sqrt_scaled(c.lr, samples=count, base_samples=c.lr_base)


def optimizer(c: Config):
  """AdamW at a constant rate after its warm-up, and that rate by update."""
  return update.optimizer(
    lr=scaled_lr(c),
    warmup=c.warmup,
    total=None,
    b1=c.b1,
    b2=c.b2,
    eps=c.eps,
    weight_decay=c.weight_decay,
    max_grad_norm=c.max_grad_norm,
    second_moment=c.second_moment,
  )


def initial_state(params: PyTree, tx, mesh: Mesh, **where) -> types.State:
  """Made in one program, so that every leaf is a global array.

  Args:
    params: To begin with.
    tx: The optimizer.
    mesh: Devices.
    **where: See `state_places`.
  """
  make, _, places = state_places(params, tx, mesh, **where)
  return jax.jit(make, out_shardings=places)(params)


def state_places(
  params: PyTree,
  tx,
  mesh: Mesh | AbstractMesh,
  *,
  keep_reference: bool,
  offload: str,
) -> tuple[Callable[[PyTree], types.State], types.State, types.State]:
  """How a state is made of parameters, its shapes and its shardings.

  Args:
    params: Arrays or shapes.
    tx: The optimizer.
    mesh: Devices.
    keep_reference: Whether there is a KL term.
    offload: What lies in host memory: "nothing", "reference", or "moments",
      which is both.
  """
  make = functools.partial(
    update.init_state, tx=tx, keep_reference=keep_reference
  )
  abstract = jax.eval_shape(make, params)
  places = sharding.state_shardings(abstract, abstract.params, mesh)
  away = {
    "nothing": (),
    "reference": ("reference",),
    "moments": ("reference", "opt"),
  }
  for name in away[offload]:
    moved = sharding.in_host_memory(getattr(places, name))
    places = dataclasses.replace(places, **{name: moved})
  return make, abstract, places


def state_bytes(
  c: Config,
  policy: Policy,
  *,
  data: int,
  model: int,
  on_cpu: bool,
  keep_reference: bool,
  applying: bool = False,
) -> int:
  """What training keeps on a device while it samples, or applies an update.

  Raises:
    ValueError: The policy cannot be spread like this.
  """
  away = "nothing" if on_cpu else c.offload  # a CPU's is the host's
  if applying and away == "moments":
    away = "reference"
  _, abstract, places = state_places(
    jax.eval_shape(policy.init, jax.random.key(0)),
    optimizer(c)[0],
    AbstractMesh((data, model), ("data", "model")),
    keep_reference=keep_reference,
    offload=away,
  )
  leaves = zip(jax.tree.leaves(abstract), jax.tree.leaves(places), strict=True)
  here = [(x, s) for x, s in leaves if s.memory_kind != sharding.HOST]
  held = memory.shard_bytes([x for x, _ in here], [s for _, s in here])
  if c.pipeline:  # the parameters that the next step is sampled with
    held += memory.shard_bytes(
      jax.tree.leaves(abstract.params), jax.tree.leaves(places.params)
    )
  return held


def keeps_reference(c: Config) -> bool:
  """Whether any phase of the run has a KL term."""
  return any(phase.kl_weight > 0.0 for _, phase in settings.phases(c))


def objective(c: Config) -> update.Objective:
  """Constants of the loss."""
  bounds = {
    "none": None,
    "truncated": (0.0, c.correction_cap),
    "banded": (c.correction_low, c.correction_high),
    "sequence": (c.sequence_low, c.sequence_high),
  }[c.correction]
  return update.Objective(
    clip_low=c.clip_low,
    clip_high=c.clip_high,
    dual_clip=c.dual_clip or None,
    by_sequence=c.loss == "gspo",
    kl_weight=c.kl_weight,
    kl_clamp=c.kl_clamp,
    entropy_weight=c.entropy_weight,
    correction=bounds and update.Correction(c.correction, *bounds),
    temperature=c.temperature,
  )


def update_stage(
  c: Config, policy: Policy, tx, schedule, mesh: Mesh
) -> Callable[..., tuple[types.State, dict[str, float | None]]]:
  """Stage 5: `minibatches` optimizer updates over whole groups."""
  policy = dataclasses.replace(policy, remat=c.remat, mesh=mesh)
  layout = packing.Layout(c.rows, c.blocks, c.max_new_tokens)
  goal = objective(c)
  scored = scores(c, policy, mesh)
  # Its tokens are few: as little as can be is kept of them.
  lean = dataclasses.replace(policy, remat="layer")
  mass_of = functools.partial(
    theory.correct_mass,
    response_logp=lean.response_logp,
    temperature=c.temperature,
  )
  mass = jax.jit(mass_of)
  mean_mass = lambda found, params: jnp.mean(mass_of(found, params))

  def apply(state: types.State, kept: types.Groups, credit: train.Credit):
    found = probed(c, kept)
    watch = found and jax.tree_util.Partial(mean_mass, found)
    step = int(state.step) + 1
    parts = minibatches(kept, credit, layout, c.minibatches, (c.seed, step))
    shares = packed_shares(parts, int(credit.counts.sum()))
    parts = scored(parts, state)  # all before the first update
    stats = []
    for part in parts:
      state, more = update.minibatch_step(
        state,
        part,
        tx=tx,
        response_logp=policy.response_logp,
        objective=goal,
        watch=watch,
      )
      stats.append(more)
    after = found and mass(found, state.params)
    state = dataclasses.replace(state, step=state.step + 1)
    jax.block_until_ready((state, stats, after))
    refuse_not_finite(stats, state.params, step)
    promise = theory.unmeasured()
    if found is not None:
      first_order = sum(float(one.watched) for one in stats)
      promise = theory.measure(found, np.asarray(after), first_order, n=c.n)
    return state, {
      **learned(stats, goal),
      "optim/lr": float(schedule(update.updates_done(state.opt) - 1)),
      **shares,
      **promise,
    }

  return apply


def probed(c: Config, kept: types.Groups) -> theory.Probe | None:
  """What the theorem is measured on in this step; None if it is not."""
  if not c.theory_prompts:
    return None
  return theory.probe(
    kept.prompts,
    kept.rollouts,
    kept.scores.reward,
    count=c.theory_prompts,
    rows=c.theory_responses,
    tokens=c.theory_tokens,
  )


def scores(
  c: Config, policy: Policy, mesh: Mesh
) -> Callable[[Parts, types.State], Parts]:
  """Batches on the mesh, with the log-probabilities that the loss asks for."""
  spread = lambda x: PartitionSpec(*(None, "data")[: x.ndim])
  place = lambda x: sharding.to_mesh(mesh, spread(x), x)
  logp_of = functools.partial(
    update.logp_of,
    temperature=c.temperature,
    response_logp=policy.response_logp,
  )

  def scored(parts: Parts, state: types.State) -> Parts:
    parts = [[jax.tree.map(place, batch) for batch in part] for part in parts]
    if c.minibatches > 1:  # later ones differ from the policy that sampled
      parts = each(lambda b: {"logp_old": logp_of(state.params, b)}, parts)
    if c.kl_weight and state.reference is not None:
      reference = sharding.on_device(state.reference)
      parts = each(lambda b: {"logp_ref": logp_of(reference, b)}, parts)
    return parts

  return scored


def each(
  found: Callable[[types.Batch], dict[str, jax.Array]], parts: Parts
) -> Parts:
  """Batches with what was found of each."""
  return [
    [dataclasses.replace(batch, **found(batch)) for batch in part]
    for part in parts
  ]


def minibatches(
  kept: types.Groups,
  credit: train.Credit,
  layout: packing.Layout,
  count: int,
  seed: tuple[int, int],
) -> Parts:
  """Kept groups as so many minibatches of batches, on the host.

  Rollouts that do not count become empty ones, of which one is packed.
  """
  counts, rollouts = credit.counts[..., None], kept.rollouts
  if not counts.all():  # or it would copy gigabytes of long rollouts
    rollouts = dataclasses.replace(
      rollouts,
      tokens=np.where(counts, rollouts.tokens, 0),
      mask=rollouts.mask & counts,
    )
  parts = []
  for at in packing.split(len(counts), count, seed):
    take = functools.partial(jax.tree.map, lambda x, at=at: x[at])
    some = take(kept.prompts), take(rollouts), credit.advantage[at]
    parts.append(packing.pack(*some, layout))
  return parts


def packed_shares(
  parts: Sequence[Sequence[types.Batch]], rollouts: int
) -> dict[str, float]:
  """What packing saved, and what it wastes."""
  batches = [batch for part in parts for batch in part]
  some = [batch.weight * batch.mask.any(axis=-1) for batch in batches]
  rows = sum(map(np.count_nonzero, some))  # but those that do not count
  return {
    "update/distinct_fraction": rows / max(rollouts, 1),
    "update/padding_fraction": packing.padding_fraction(batches),
  }


def refuse_not_finite(
  stats: Sequence[update.Stats], params: PyTree, step: int
) -> None:
  """Stops the run before a broken state can be saved."""
  for one in stats:
    path = update.first_bad_path(params, np.asarray(one.finite))
    if path is not None:
      raise FloatingPointError(
        f"step {step}: gradient or value of {path} is not finite; lower lr"
      )


def learned(
  stats: Sequence[update.Stats], goal: update.Objective
) -> dict[str, float | None]:
  """Metrics of a step's updates, one `Stats` each."""
  mean = lambda name: float(np.mean([getattr(s, name).value for s in stats]))
  kl = mean("kl_ref") if goal.kl_weight else None
  total = mean("loss") + goal.kl_weight * (kl or 0.0)
  # What is between sampler and trainer, with the parameters that sampled.
  corrected = {
    f"correction/{name}": mean(field) if goal.correction else None
    for name, field in (
      ("weight_mean", "correction"),
      ("changed_fraction", "corrected"),
      ("kl_sampler", "kl_sampler"),
    )
  }
  return {
    "policy/entropy": mean("entropy"),
    "policy/kl_ref": kl,
    "policy/kl_old": mean("kl_old"),
    "policy/clip_fraction": mean("clip_fraction"),
    # Before the first update trainer and sampler hold the same parameters, but
    # with config.pipeline, where this is how far they are apart.
    "policy/logp_gap_max": float(stats[0].logp_gap_max),
    "policy/logp_gap_mean": float(stats[0].logp_gap.value),
    **corrected,
    "loss/total": total - goal.entropy_weight * mean("entropy"),
    "optim/grad_norm": float(np.mean([s.grad_norm for s in stats])),
  }


def reference_stage(c: Config, tx) -> Callable[..., tuple]:
  """After a step: the policy becomes the reference where the config says so.

  The optimizer goes on as it was (ProRL v2), or starts anew (ProRL).
  """
  copy = functools.partial(jax.tree.map, jnp.copy)

  def place(make, like: PyTree, params: PyTree) -> PyTree:
    """Where it was: on the devices, or in host memory."""
    home = jax.tree.map(lambda x: x.sharding, like)
    return jax.jit(make, out_shardings=home)(params)

  def after(state: types.State, ledger: Ledger, scalars):
    if state.reference is None:
      return state, ledger, None
    ledger = dataclasses.replace(ledger, since_reset=ledger.since_reset + 1)
    why = ledgers.reset_reason(
      ledger,
      scalars["policy/kl_ref"],
      every=c.reset_every,
      above_kl=c.reset_above_kl,
      stalled=c.reset_stalled,
    )
    if why is None:
      return state, ledger, None
    reference = place(copy, state.reference, state.params)
    state = dataclasses.replace(state, reference=reference)
    if c.reset_optimizer:
      opt = place(tx.init, state.opt, state.params)
      state = dataclasses.replace(state, opt=opt)
    return state, ledgers.was_reset(ledger), why

  return after
