"""The boxes of the figure, wired from left to right."""

import pathlib

import jax.numpy as jnp
import numpy as np
from absl import logging
from jaxtyping import Float

from brorl_jax import (
  architectures,
  checkpoints,
  hf,
  metrics,
  report,
  sharding,
  tokenizer,
  train,
)
from brorl_jax.main import (
  folder,
  learning,
  planning,
  record,
  sampling,
  settings,
)
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

  tx, schedule = learning.optimizer(c)
  stages = train.Stages(
    prompts=puzzles.prompts,
    rollouts=sampling.rollouts(
      c, policy, text.stop_ids, mesh, plans.rollouts, n=c.n
    ),
    rewards=puzzles.rewards,
    advantages=advantages_stage,
    update=learning.update_stage(c, policy, tx, schedule, mesh),
  )
  keep = c.kl_weight > 0.0
  state = learning.initial_state(
    params, tx, mesh, keep_reference=keep, offload=c.offload
  )
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
