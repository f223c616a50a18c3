"""The boxes of the figure, wired from left to right."""

import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Float, PyTree
from ml_collections import ConfigDict

from brorl_jax import (
  checkpoints,
  evaluate,
  hf,
  metrics,
  report,
  sampler,
  sharding,
  tokenizer,
  train,
  types,
  update,
)
from brorl_jax.main import settings
from brorl_jax.policy import Policy
from brorl_jax.rl import advantages
from brorl_jax.tasks import gym, mixture
from brorl_jax.tasks.base import Puzzle, Verdict

ASSETS = pathlib.Path(__file__).parents[1] / "assets"
_PROBES = 64  # prompts per family that are measured before anything starts


def run(c: ConfigDict, workdir: pathlib.Path, *, allow_change: bool) -> None:
  """Checks what can be checked, trains, reports."""
  settings.check_training(c)
  resume = settings.check_workdir(c, workdir, allow_change=allow_change)
  logging.set_verbosity(logging.ERROR)  # orbax tells of every file it opens
  try:
    mesh = sharding.make_mesh(c.mesh_data, c.mesh_model)
    settings.check_mesh(c, mesh.shape["data"])
    source = pathlib.Path(c.checkpoint) if c.checkpoint else ASSETS
    text = tokenizer.Tokenizer(source)
    policy, params = hf.load(source, dtype=c.dtype, mesh=mesh)
    if text.size > policy.vocab:
      raise ValueError(
        f"{source}: the tokenizer has {text.size} ids, the embedding only "
        f"{policy.vocab} rows"
      )
    tasks = Tasks(c, text)
    heldout = tasks.heldout()
  except ValueError as e:
    raise settings.UserError(str(e)) from None
  if not resume:
    settings.write_config(c, workdir)

  tx, schedule = update.optimizer(
    lr=c.lr,
    warmup=c.warmup,
    total=None,
    b1=c.b1,
    b2=c.b2,
    eps=c.eps,
    weight_decay=c.weight_decay,
    max_grad_norm=c.max_grad_norm,
  )
  state = initial_state(params, tx, mesh, keep_reference=c.kl_weight > 0.0)
  stages = train.Stages(
    prompts=tasks.prompts,
    rollouts=rollouts_stage(c, policy, text, mesh),
    rewards=tasks.rewards,
    advantages=advantages_stage,
    update=update_stage(c, policy, tx, schedule, mesh),
  )
  store = checkpoints.Store(workdir / "checkpoints", keep=c.keep_checkpoints)
  record = Record(
    c, workdir, tasks, heldout, evaluation(c, policy, tasks, mesh)
  )
  try:
    train.train(
      state,
      stages,
      store,
      record,
      informative=informative,
      seed=c.seed,
      steps=c.steps,
      target=c.samples // c.n,
      max_rounds=c.max_rounds,
      save_every=c.save_every,
      eval_every=c.eval_every,
    )
  except (FloatingPointError, train.Starved, ValueError) as e:
    raise settings.UserError(str(e)) from None
  finally:
    store.close()
    record.close()
  finish(workdir, title=f"N = {c.n}, {c.samples:,} rollouts per step")


def finish(workdir: pathlib.Path, *, title: str) -> None:
  """The figure and the table of a run that has ended."""
  curve = metrics.read_lines(workdir / "eval" / "curve.jsonl")
  steps = metrics.read_lines(workdir / "metrics.jsonl")
  figure = workdir / "report" / "learning_curve.png"
  report.learning_curve(figure, curve, steps, title=title)
  print(report.table(curve[0], curve[-1], steps))
  print(f"  {figure}")


# --------------------------------------------------------------------- tasks


class Tasks:
  """Puzzles of a run as prompts, and responses as verdicts."""

  def __init__(self, c: ConfigDict, text: tokenizer.Tokenizer):
    """Raises ValueError if a family is wrong or its prompts are too long."""
    self._c, self._text = c, text
    self.stop_ids = text.stop_ids
    self.families = [
      gym.Family(name, f.settings.to_dict(), f.weight)
      for name, f in c.families.items()
    ]
    gym.check(self.families)
    self._weights = [f.weight for f in self.families]
    for family in self.families:
      for i in range(_PROBES):
        self._render(gym.puzzle(family, "train", i, seed=c.seed))

  def _render(self, puzzle: Puzzle) -> list[int]:
    ids = self._text.render(puzzle.question)
    if len(ids) > self._c.prompt_tokens:
      raise ValueError(
        f"{puzzle.id} has {len(ids)} prompt tokens, config.prompt_tokens = "
        f"{self._c.prompt_tokens}: raise it, or narrow the family's settings"
      )
    return ids

  def heldout(self) -> list[Puzzle]:
    puzzles = gym.heldout(
      self.families, per_family=self._c.eval_prompts, seed=self._c.seed
    )
    for puzzle in puzzles:
      self._render(puzzle)
    return puzzles

  @functools.lru_cache(maxsize=1 << 14)
  def puzzle(self, step: int, position: int) -> Puzzle:
    """Candidate `position` of a step: a function of (seed, step, position)."""
    which = mixture.pick(self._c.seed, step, position, self._weights)
    index = mixture.index(step, position)
    return gym.puzzle(self.families[which], "train", index, seed=self._c.seed)

  def prompts(self, step: int, round: int) -> types.Prompts:
    """Stage 1: candidates of a round."""
    count = self._c.round_samples // self._c.n
    index = np.arange(round * count, (round + 1) * count, dtype=np.int32)
    return self.pad([self.puzzle(step, int(i)) for i in index], index)

  def pad(self, puzzles: Sequence[Puzzle], index: np.ndarray) -> types.Prompts:
    ids = [self._render(puzzle) for puzzle in puzzles]
    return types.Prompts(*tokenizer.left_pad(ids, self._c.prompt_tokens), index)

  def decode(self, response: Sequence[int]) -> str:
    return self._text.decode([response])[0]

  def verdicts(
    self, puzzles: Sequence[Puzzle], rollouts: types.Rollouts
  ) -> list[list[Verdict]]:
    """One for each rollout; equal responses to a prompt are judged once."""
    out = []
    for puzzle, tokens, mask in zip(
      puzzles, rollouts.tokens, rollouts.mask, strict=True
    ):
      ids = [tuple(row[keep]) for row, keep in zip(tokens, mask, strict=True)]
      distinct = list(dict.fromkeys(ids))
      judged = {
        key: gym.verify(response, puzzle.entry)
        for key, response in zip(
          distinct, self._text.decode(distinct), strict=True
        )
      }
      out.append([judged[key] for key in ids])
    return out

  def rewards(
    self, step: int, prompts: types.Prompts, rollouts: types.Rollouts
  ) -> Float[np.ndarray, "P N"]:
    """Stage 3: 1 for a pass, 0 for a fail."""
    puzzles = [self.puzzle(step, int(i)) for i in prompts.index]
    verdicts = self.verdicts(puzzles, rollouts)
    for puzzle, row in zip(puzzles, verdicts, strict=True):
      for verdict in row:
        # Not 0: that would train the policy away from a puzzle whose verifier
        # is broken. These verifiers never fail on a sound entry.
        if verdict.status == "invalid":
          raise ValueError(f"step {step}: {puzzle.id}: {verdict.reason}")
    return np.array([[v.reward for v in row] for row in verdicts], np.float32)


# ------------------------------------------------------------- stages on device


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


def rollouts_stage(
  c: ConfigDict, policy: Policy, text: tokenizer.Tokenizer, mesh: Mesh
) -> Callable[..., types.Rollouts]:
  """Stage 2: prompts -> N rollouts each, copied to the host at once."""

  def rollouts(params, prompts: types.Prompts, key) -> types.Rollouts:
    out = sampler.rollouts(
      policy,
      params,
      prompts,
      key,
      n=c.n,
      max_new_tokens=c.max_new_tokens,
      behaviour=sampler.Behaviour(temperature=c.temperature),
      stop_ids=text.stop_ids,
      slots=c.slots or c.n,
      mesh=mesh,
    )
    return jax.device_get(out)

  return rollouts


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
  c: ConfigDict, policy: Policy, tx, schedule, mesh: Mesh
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

  def apply(state: types.State, kept: train.Groups, advantage):
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
      )
      stats.append(more)
    state = types.State(
      state.step + 1, state.params, state.opt, state.reference
    )
    stats = jax.device_get(stats)
    for one in stats:
      if (path := update.first_bad_path(state.params, one.finite)) is not None:
        raise FloatingPointError(f"step {step}: gradient of {path} not finite")
    mean = lambda name: float(np.mean([getattr(s, name).value for s in stats]))
    kl = mean("kl_ref") if c.kl_weight else None
    return state, {
      "policy/entropy": mean("entropy"),
      "policy/kl_ref": kl,
      "policy/clip_fraction": mean("clip_fraction"),
      # Before the first update trainer and sampler hold the same parameters.
      "policy/logp_gap_max": float(stats[0].logp_gap_max),
      "policy/logp_gap_mean": float(stats[0].logp_gap.value),
      "loss/total": mean("loss") + c.kl_weight * (kl or 0.0),
      "optim/lr": float(schedule(step * c.minibatches - 1)),
      "optim/grad_norm": float(np.mean([s.grad_norm for s in stats])),
      "update/distinct_fraction": rows / advantage.size,
    }

  return apply


# ---------------------------------------------------------------- what is kept


def evaluation(
  c: ConfigDict, policy: Policy, tasks: Tasks, mesh: Mesh
) -> Callable[[PyTree, Sequence[Puzzle]], evaluate.Evaluation]:
  """Samples held-out puzzles; the same draws at every step of a run."""
  # Step 0 trains nothing, so its key is free.
  key = jax.random.fold_in(jax.random.key(c.seed), 0)
  data = mesh.shape["data"]
  chunk = max(c.round_samples // c.eval_n // data, 1) * data

  def rollouts(params, puzzles: Sequence[Puzzle], start: int):
    index = np.arange(start, start + len(puzzles), dtype=np.int32)
    out = sampler.rollouts(
      policy,
      params,
      tasks.pad(puzzles, index),
      key,
      n=c.eval_n,
      max_new_tokens=c.max_new_tokens,
      behaviour=sampler.Behaviour(temperature=c.temperature),
      stop_ids=tasks.stop_ids,
      slots=c.eval_n,
      mesh=mesh,
    )
    return jax.device_get(out)

  return functools.partial(
    evaluate.evaluate, rollouts=rollouts, verdicts=tasks.verdicts, chunk=chunk
  )


class Record:
  """metrics.jsonl, samples.jsonl, eval/ and TensorBoard of one run."""

  def __init__(
    self,
    c: ConfigDict,
    workdir: pathlib.Path,
    tasks: Tasks,
    heldout: Sequence[Puzzle],
    measure: Callable[[PyTree, Sequence[Puzzle]], evaluate.Evaluation],
  ):
    self._c, self._workdir, self._tasks = c, workdir, tasks
    self._heldout, self._measure = heldout, measure
    self._files = []

  def start(self, done: int) -> None:
    if done >= 0:
      print(f"resumes after step {done}")
    lines = lambda *path: metrics.JsonLines(
      self._workdir.joinpath(*path), after=done
    )
    self._samples = lines("samples.jsonl")
    self._curve = lines("eval", "curve.jsonl")
    self._records = lines("eval", "records.jsonl")
    self._writer = metrics.Writer(
      self._workdir, after=done, steps=self._c.steps
    )
    self._files = [self._samples, self._curve, self._records, self._writer]

  def step(
    self, step: int, scalars: Mapping[str, Any], kept: train.Groups
  ) -> None:
    self._writer.write_scalars(step, scalars)
    self._samples.write(*self._shown(step, kept))

  def _shown(self, step: int, kept: train.Groups) -> Iterator[dict[str, Any]]:
    for p in range(min(self._c.samples_shown, len(kept.reward))):
      puzzle = self._tasks.puzzle(step, int(kept.prompts.index[p]))
      # Right and wrong ones in turn: a kept group has both.
      n = int((kept.reward[p] if p % 2 == 0 else -kept.reward[p]).argmax())
      ids = kept.rollouts.tokens[p, n][kept.rollouts.mask[p, n]]
      yield {
        "step": step,
        "id": puzzle.id,
        "prompt": puzzle.question,
        "response": self._tasks.decode(ids),
        "answer": puzzle.entry["answer"],
        "reward": float(kept.reward[p, n]),
        "tokens": len(ids),
        "truncated": bool(kept.rollouts.truncated[p, n]),
      }

  def evaluate(self, step: int, params: PyTree) -> None:
    e = self._measure(params, self._heldout)
    self._records.write(*({"step": step, **record} for record in e.records))
    self._curve.write(
      {
        "step": step,
        "pass_at_1": e.mean,
        "half_width": e.half_width,
        "by_family": e.by_family,
        "rates": e.pass_at_1.tolist(),
      }
    )
    by_family = {f"eval/pass_at_1/{k}": v for k, v in e.by_family.items()}
    self._writer.write_evaluation(step, {"eval/pass_at_1": e.mean} | by_family)

  def close(self) -> None:
    for file in self._files:
      file.close()
