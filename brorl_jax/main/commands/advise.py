"""--mode=advise: what every smaller N would have given, from one step of N.

Rollouts are nested: those of N' are the first N' of N. So one step has the
groups, advantages and gradients of every smaller N.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, PyTree

from brorl_jax import meshes
from brorl_jax.errors import UserError
from brorl_jax.learner import packing, signal, update
from brorl_jax.learner import step as steps
from brorl_jax.main import checkpoint_source, programs, settings, sizes
from brorl_jax.main.commands import train as train_command
from brorl_jax.main.stages import advantages, learning
from brorl_jax.main.stages.examples import Examples
from brorl_jax.main.stages.scoring import Scorer
from brorl_jax.model.policy import Policy
from brorl_jax.report import advice
from brorl_jax.rollout import dynamic_sampling
from brorl_jax.runs import clock, folder, lock, sections
from brorl_jax.runs.lines import write_whole
from brorl_jax.runs.run_state import RunState
from brorl_jax.train import Credit, Stages
from brorl_jax.types import Batch, Groups, Scores

_BLOCKS = 16  # of prompts, for the noise


def run(c: sections.Config, workdir: pathlib.Path) -> None:
  """Writes advice.json, advice.png, and prints the table and the advice."""
  c = settings.phases(c)[0].config
  if c.sampling.allocation != "fixed":
    raise UserError(
      f"config.sampling.allocation = {c.sampling.allocation!r}: --mode=advise "
      "compares fixed numbers; add --config.sampling.allocation=fixed"
    )
  if (count := c.sampling.prompts) < 2:
    raise UserError(
      f"config.sampling.samples = {c.sampling.samples} is {count} prompt of "
      f"{c.sampling.n}; --mode=advise needs at least 2 prompts"
    )
  values = sections.as_dict(c)
  folder.check(values, workdir, allow_change=False, mode="advise")
  logging.set_verbosity(logging.ERROR)  # orbax logs every file
  try:
    parts = _parts(c)
  except ValueError as e:
    raise UserError(str(e)) from None
  with contextlib.closing(parts.scorer), lock.hold(workdir), clock.counting():
    folder.write_config(values, workdir, mode="advise")
    print(*parts.scorer.log_lines, programs.log_line(), sep="\n")
    try:
      data = numbers(parts)
    except dynamic_sampling.TooManyInvalid as e:
      raise UserError(str(e)) from None
    text = json.dumps(data, indent=1, allow_nan=False) + "\n"
    write_whole(workdir / advice.FILE, text)
  advice.show(workdir)


class _Parts(NamedTuple):
  """Everything that advice needs."""

  config: sections.Config  # settled
  stages: Stages
  policy: Policy
  params: PyTree
  mesh: Mesh
  scorer: Scorer
  step: int  # whose prompts and random numbers these are: the next one


def _parts(c: sections.Config) -> _Parts:
  """Builds the parts; raises ValueError if they do not fit together."""
  which = checkpoint_source.locate(c.policy.checkpoint)
  mesh = meshes.make_mesh(**c.devices.mesh)
  text = checkpoint_source.read_tokenizer(which, c.policy.chat_template)
  policy, params, done = checkpoint_source.load(
    which, mesh, dtype=c.policy.dtype
  )
  checkpoint_source.check_vocabulary(which.source, text, policy)
  examples = Examples.of(c, text)
  scorer = Scorer(c.reward, examples)
  first = settings.phases(c)[0]
  phase = train_command.phase(
    first, examples, scorer, policy, mesh, keep_reference=False
  )
  c = sizes.settled(c, policy, axes=meshes.of(mesh), keep_reference=False)
  step = (done or 0) + 1
  return _Parts(c, phase.stages(step), policy, params, mesh, scorer, step)


def numbers(parts: _Parts) -> dict[str, Any]:
  """All that advice.json has: a row for each N', the largest first."""
  c = parts.config
  begin = clock.now()
  drawn = _drawn(parts)
  if len(drawn.prompts.index) < 2:
    raise UserError("--mode=advise needs at least 2 prompts; the data has one")
  rollout_s, tokens = clock.since(begin).busy_s, int(drawn.rollouts.mask.sum())
  rows, whole = [], None
  for n in smaller(c):
    row, gradient = _row(parts, _first(drawn, n), n)
    whole = gradient if whole is None else whole
    row["cosine"] = signal.cosine(gradient, whole)
    # Rollouts take as long as they have tokens.
    row["rollout_s"] = rollout_s * row["tokens"] / max(tokens, 1)
    rows.append(row)
  return {
    "n": c.sampling.n,
    "advantage": c.advantage.kind,
    "checkpoint": c.policy.checkpoint,
    "seed": c.run.seed,
    "step": parts.step,
    "blocks": _blocks(drawn),
    "right": drawn.right.sum(axis=1).tolist(),
    "rows": rows,
  }


def smaller(c: sections.Config) -> Iterator[int]:
  """N and the powers of two below it with which the config could train."""
  n = c.sampling.n
  yield n
  for power in reversed(range(1, (n - 1).bit_length())):
    try:
      settings.check_training(_with(c, 2**power))
    except UserError:  # such as a k that is too large
      return
    yield 2**power


def _with(c: sections.Config, n: int) -> sections.Config:
  """The config with another N, and as many prompts."""
  of = dataclasses.replace(
    c.sampling, n=n, samples=n * c.sampling.prompts, slots=0, in_flight=0
  )
  return dataclasses.replace(c, sampling=of)


def _drawn(parts: _Parts) -> Groups:
  """The first prompts of the step with all of their rollouts, kept or not."""
  c, stages, progress = parts.config, parts.stages, RunState()
  key = jax.random.fold_in(jax.random.key(c.run.seed), parts.step)
  candidates = stages.candidates(parts.step, progress)
  return dynamic_sampling.collect(
    lambda feed: stages.rollouts(parts.params, feed, key),
    functools.partial(stages.scores, parts.step),
    lambda groups: np.ones(len(groups.prompts.index), bool),
    functools.partial(stages.prompts, parts.step),
    candidates,
    target=c.sampling.prompts,
    plan=stages.plan(progress, candidates),
  ).groups


def _first(groups: Groups, n: int) -> Groups:
  """The first n rollouts of each prompt."""
  prompts, rollouts, scores = groups
  fields = ("tokens", "logp", "mask", "truncated")
  rollouts = dataclasses.replace(
    rollouts, **{name: getattr(rollouts, name)[:, :n] for name in fields}
  )
  return Groups(prompts, rollouts, Scores(*(x[:, :n] for x in scores)))


def _blocks(groups: Groups) -> int:
  return min(_BLOCKS, len(groups.prompts.index))


def _row(
  parts: _Parts, groups: Groups, n: int
) -> tuple[dict[str, Any], PyTree]:
  """The numbers of one N', and its gradient."""
  c, P = _with(parts.config, n), len(groups.prompts.index)
  informative = advantages.filter_stage(c.filter, c.reward, places=P)
  kept = np.flatnonzero(informative(groups))
  some = jax.tree.map(lambda x: x[kept], groups)
  stage = advantages.advantages_stage(c.advantage, c.reward, c.sampling)
  credit = stage(some, RunState())
  trained = _Trained(parts, some, credit)
  block = kept % _blocks(groups)
  gradient, found = trained.gradient(
    [np.flatnonzero(block == b) for b in range(_blocks(groups))]
  )
  slopes = coefficient(
    *map(jnp.asarray, (credit.advantage, some.right, credit.counts))
  )
  share = len(kept) / P
  return {
    "n": n,
    "informative": share,
    "coefficient": float(np.sum(slopes)) / P,
    "samples_per_group": n / share if share else None,
    "norm": found.norm,
    "signal": found.signal,
    "signal_error": found.error,
    "noise": found.noise,
    "snr": found.ratio,
    "snr_error": found.ratio_error,
    "tokens": int(groups.rollouts.mask.sum()),
    "update_s": trained.seconds(),
  }, gradient


class _Trained:
  """What a step would train on, at the policy that sampled.

  All groups are one minibatch, and the term of the reference is left out.
  """

  def __init__(self, parts: _Parts, kept: Groups, credit: Credit):
    c = parts.config
    none = dataclasses.replace(c.reference, kl_weight=0.0)
    goal = learning.objective(c.loss, none, temperature=c.sampling.temperature)
    policy = dataclasses.replace(
      parts.policy, remat=c.devices.remat, mesh=parts.mesh
    )
    self._params, self._mesh = parts.params, parts.mesh
    self._prompts = kept.prompts
    self._how: dict[str, Any] = dict(
      response_logp=policy.response_logp, objective=goal
    )
    self._layout = learning.layout(c, meshes.of(parts.mesh).rows)
    self._rollouts = steps.trained(kept.rollouts, credit.counts)
    self._advantage = credit.advantage
    self._factors = learning.loss_scale(c, goal)(
      self._rollouts.mask.sum(axis=2)
    )

  def gradient(
    self, blocks: Sequence[np.ndarray]
  ) -> tuple[PyTree, signal.Signal]:
    """Of all groups, from blocks of them."""
    each = map(self._batches, blocks)
    return signal.of_blocks(self._params, each, **self._how)

  def seconds(self) -> float:
    """Of the gradient of all groups at once, as an update computes it."""
    while True:
      batches = self._batches(np.arange(len(self._advantage)))
      begin = clock.now()
      sums = update.summed(self._params, batches, **self._how)
      jax.block_until_ready(sums)
      spent = clock.since(begin)
      # A program of new shapes is traced too, which is not told apart.
      if not spent.metrics["time/compile_s"]:
        return spent.busy_s

  def _batches(self, at: np.ndarray) -> Iterator[Batch]:
    if not len(at):
      return
    take = functools.partial(jax.tree.map, lambda x: x[at])
    factors = None if self._factors is None else self._factors[at]
    for batch in packing.pack(
      take(self._prompts),
      take(self._rollouts),
      self._advantage[at],
      self._layout,
      factors,
    ):
      yield steps.placed(batch, self._mesh)


def coefficient(
  advantage: Float[Array, "P N"],
  right: Bool[Array, "P N"],
  valid: Bool[Array, "P N"],
) -> Float[Array, " P"]:
  """By what the advantages of a group multiply the slope of its pass rate p.

    c = mean of A over right rollouts - mean of A over wrong ones

  Of n rollouts with K right ones, mean(A grad log pi) is on average
  (K/n) a_right grad p / p - (1 - K/n) a_wrong grad p / (1 - p), which is
  c grad p at p = K/n. 0 for a group with rollouts of one kind.

  Args:
    advantage: One for each rollout.
    right: Whether it is.
    valid: Rollouts that count.
  """

  def mean(some):
    total = jnp.sum(jnp.where(some, advantage, 0.0), axis=1)
    return total / jnp.maximum(jnp.sum(some, axis=1), 1)

  a, b = right & valid, ~right & valid
  both = jnp.any(a, axis=1) & jnp.any(b, axis=1)
  return jnp.where(both, mean(a) - mean(b), 0.0)
