"""The boxes of the figure, wired from left to right."""

import functools
import pathlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Float, PyTree

from brorl_jax import (
  architectures,
  checkpoints,
  hf,
  metrics,
  report,
  sharding,
  theory,
  tokenizer,
  train,
  types,
  update,
)
from brorl_jax.main import folder, planning, record, sampling, settings
from brorl_jax.main.puzzles import Puzzles
from brorl_jax.main.settings import ASSETS, Config
from brorl_jax.policy import Policy
from brorl_jax.rl import advantages

# Files of the run that it cannot go on from.
_UNUSABLE = (checkpoints.Unusable, metrics.Damaged)


def run(c: Config, workdir: pathlib.Path, *, allow_change: bool) -> None:
  """Checks what can be checked, trains, reports."""
  settings.check_training(c)
  folder.check(c, workdir, allow_change=allow_change)
  logging.set_verbosity(logging.ERROR)  # orbax tells of every file it opens
  try:
    source = hf.locate(c.checkpoint) if c.checkpoint else ASSETS
    mesh = sharding.make_mesh(c.mesh_data, c.mesh_model)
    settings.check_mesh(c, mesh.shape["data"])
    policy = architectures.read_policy(source, dtype=c.dtype)
    text = tokenizer.Tokenizer(source)
    check_vocabulary(source, text, policy)
    settings.check_lengths(c, policy.max_positions)
    plans = planning.make(c, policy, **mesh.shape, on_cpu=None)
    puzzles = Puzzles(c, text)
    heldout = puzzles.heldout()
    # Last, because it takes longest.
    _, params = hf.load(source, dtype=c.dtype, mesh=mesh)
  except ValueError as e:
    raise settings.UserError(str(e)) from None
  lock = folder.hold(workdir)
  folder.write_config(c, workdir)
  print(f"rollouts: {plans.rollouts.line()}")

  tx, schedule = optimizer(c)
  stages = train.Stages(
    prompts=puzzles.prompts,
    rollouts=sampling.rollouts(
      c, policy, text.stop_ids, mesh, plans.rollouts, n=c.n
    ),
    rewards=puzzles.rewards,
    advantages=advantages_stage,
    update=update_stage(c, policy, tx, schedule, mesh),
  )
  state = initial_state(params, tx, mesh, keep_reference=c.kl_weight > 0.0)
  store = checkpoints.Store(workdir / "checkpoints", keep=c.keep_checkpoints)
  measure = record.evaluation(c, policy, puzzles, mesh, plans)
  book = record.Record(c, workdir, puzzles, heldout, measure)
  try:
    train.train(
      state,
      stages,
      store,
      book,
      informative=informative,
      seed=c.seed,
      steps=c.steps,
      target=c.samples // c.n,
      max_rounds=c.max_rounds,
      save_every=c.save_every,
      eval_every=c.eval_every,
    )
  except (FloatingPointError, train.Starved, *_UNUSABLE) as e:
    raise settings.UserError(str(e)) from None
  finally:
    store.close()
    book.close()
    lock.close()
  finish(workdir, title=f"N = {c.n}, {c.samples:,} rollouts per step")


def check_vocabulary(
  source: str | pathlib.Path, text: tokenizer.Tokenizer, policy: Policy
) -> None:
  """Raises ValueError if the policy does not know all of the text's tokens."""
  largest = max(text.size - 1, *text.stop_ids)
  if largest >= policy.vocab:
    raise ValueError(
      f"{source}: the tokenizer has an id {largest}, the embedding only "
      f"{policy.vocab} rows"
    )


def finish(workdir: pathlib.Path, *, title: str) -> None:
  """The figure and the table of a run that has ended."""
  curve = metrics.read_lines(workdir / "eval" / "curve.jsonl")
  steps = metrics.read_lines(workdir / "metrics.jsonl")
  figure = workdir / "report" / "learning_curve.png"
  report.learning_curve(figure, curve, steps, title=title)
  print(report.table(curve[0], curve[-1], steps))
  print(f"  {figure}")


def optimizer(c: Config):
  """AdamW at a constant rate after its warm-up, and that rate by update."""
  return update.optimizer(
    lr=c.lr,
    warmup=c.warmup,
    total=None,
    b1=c.b1,
    b2=c.b2,
    eps=c.eps,
    weight_decay=c.weight_decay,
    max_grad_norm=c.max_grad_norm,
  )


def initial_state(
  params: PyTree, tx, mesh: Mesh, *, keep_reference: bool
) -> types.State:
  """Made in one program, so that every leaf is a global array."""
  make = functools.partial(
    update.init_state, tx=tx, keep_reference=keep_reference
  )
  abstract = jax.eval_shape(make, params)
  places = sharding.state_shardings(abstract, abstract.params, mesh)
  return jax.jit(make, out_shardings=places)(params)


def informative(reward: Float[np.ndarray, "P N"]) -> np.ndarray:
  """Dynamic sampling's rule, on the host."""
  return np.asarray(advantages.informative(jnp.asarray(reward)))


def advantages_stage(kept: train.Groups) -> Float[np.ndarray, "P N"]:
  """Stage 4: REINFORCE++-baseline."""
  reward = jnp.asarray(kept.reward)
  length = jnp.sum(jnp.asarray(kept.rollouts.mask), axis=2, dtype=jnp.float32)
  centered = advantages.center_by_group(reward)
  where = advantages.informative(reward)
  return np.asarray(advantages.whiten_by_batch(centered, length, where))


def update_stage(
  c: Config, policy: Policy, tx, schedule, mesh: Mesh
) -> Callable[..., tuple[types.State, dict[str, float | None]]]:
  """Stage 5: `minibatches` optimizer updates over whole groups."""
  prompts = c.samples // c.n // c.minibatches
  layout = update.Layout.of(prompts, c.n, rows=c.rows, blocks=c.blocks)
  objective = update.Objective(
    clip_low=c.clip_low,
    clip_high=c.clip_high,
    kl_weight=c.kl_weight,
    kl_clamp=c.kl_clamp,
    temperature=c.temperature,
  )
  spread = PartitionSpec(None, "data")
  place = lambda x: sharding.to_mesh(
    mesh, spread if x.ndim else PartitionSpec(), x
  )

  mass_of = functools.partial(
    theory.correct_mass,
    response_logits=policy.response_logits,
    temperature=c.temperature,
  )
  mass = jax.jit(mass_of)
  mean_mass = lambda found, params: jnp.mean(mass_of(found, params))

  def apply(state: types.State, kept: train.Groups, advantage):
    found = theory.probe(*kept, count=c.theory_prompts, rows=c.theory_responses)
    watch = found and jax.tree_util.Partial(mean_mass, found)
    step = int(state.step) + 1
    parts = update.split(len(advantage), c.minibatches, (c.seed, step))
    stats, rows = [], 0
    for part in parts:
      take = functools.partial(jax.tree.map, lambda x, at=part: x[at])
      batch = update.pack(
        take(kept.prompts), take(kept.rollouts), advantage[part], layout
      )
      rows += np.count_nonzero(batch.weight)
      state, more = update.minibatch_step(
        state,
        jax.tree.map(place, batch),
        tx=tx,
        response_logits=policy.response_logits,
        objective=objective,
        watch=watch,
      )
      stats.append(more)
    after = found and mass(found, state.params)
    state = types.State(
      state.step + 1, state.params, state.opt, state.reference
    )
    jax.block_until_ready((state, stats, after))
    refuse_not_finite(stats, state.params, step)
    promise = theory.unmeasured()
    if found is not None:
      first_order = sum(float(one.watched) for one in stats)
      promise = theory.measure(found, np.asarray(after), first_order, n=c.n)
    return state, {
      **learned(stats, schedule, step, c.minibatches, kl_weight=c.kl_weight),
      "update/distinct_fraction": rows / advantage.size,
      **promise,
    }

  return apply


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
  stats: Sequence[update.Stats],
  schedule,
  step: int,
  minibatches: int,
  *,
  kl_weight: float,
) -> dict[str, float | None]:
  """Metrics of a step's updates, one `Stats` each."""
  mean = lambda name: float(np.mean([getattr(s, name).value for s in stats]))
  kl = mean("kl_ref") if kl_weight else None
  return {
    "policy/entropy": mean("entropy"),
    "policy/kl_ref": kl,
    "policy/kl_old": mean("kl_old"),
    "policy/clip_fraction": mean("clip_fraction"),
    # Before the first update trainer and sampler hold the same parameters.
    "policy/logp_gap_max": float(stats[0].logp_gap_max),
    "policy/logp_gap_mean": float(stats[0].logp_gap.value),
    "loss/total": mean("loss") + kl_weight * (kl or 0.0),
    "optim/lr": float(schedule(step * minibatches - 1)),
    "optim/grad_norm": float(np.mean([s.grad_norm for s in stats])),
  }
