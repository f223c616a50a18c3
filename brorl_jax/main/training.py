"""The boxes of the figure, wired from left to right."""

import contextlib
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from absl import logging
from jax.sharding import Mesh

from brorl_jax import (
  architectures,
  checkpoints,
  collect,
  evaluate,
  hf,
  intact,
  lines,
  metrics,
  report,
  sharding,
  tokenizer,
  train,
)
from brorl_jax.ledger import Ledger, Newer
from brorl_jax.main import (
  crediting,
  evaluating,
  folder,
  learning,
  lock,
  planning,
  programs,
  record,
  sampling,
  settings,
  trained,
)
from brorl_jax.main.examples import Examples
from brorl_jax.main.scoring import Judge
from brorl_jax.main.settings import ASSETS, Config
from brorl_jax.policy import Policy
from brorl_jax.tasks.base import Example
from brorl_jax.types import State

# Files of the run that it cannot go on from.
_UNUSABLE = (checkpoints.Unusable, metrics.Damaged, Newer)
_STOPS = (FloatingPointError, collect.Starved, collect.Unjudged)


def run(
  c: Config,
  workdir: pathlib.Path,
  *,
  allow_change: bool,
  begin_again: bool = False,
) -> None:
  """Checks what can be checked, trains, reports."""
  settings.check_training(c)
  changed = {}
  if begin_again:
    folder.check_again(workdir)
  else:
    changed = folder.check(c, workdir, allow_change=allow_change)
  logging.set_verbosity(logging.ERROR)  # orbax tells of every file it opens
  try:
    parts = _parts(c, workdir, allow_change=allow_change or begin_again)
  except ValueError as e:
    raise settings.UserError(str(e)) from None
  with contextlib.closing(parts.judge), lock.hold(workdir) as held:
    if begin_again and (aside := folder.set_aside(workdir)) is not None:
      print(f"what was in {workdir} is in {aside}")
    says = [*parts.judge.says, *(one.says for one in parts.phases)]
    print(*parts.examples.says, *says, programs.says(), sep="\n")
    if c.save_every > c.steps:
      print(
        f"warning: save_every = {c.save_every} is above steps = {c.steps}: a "
        "run that is stopped before its end begins with step 1 again"
      )
    _train(c, workdir, parts, changed, held)
  finish(workdir, title=f"N = {c.n}, {c.samples:,} rollouts per step")


def _train(
  c: Config,
  workdir: pathlib.Path,
  parts: "_Parts",
  changed: Mapping[str, Any],
  held: lock.Lock,
) -> None:
  """Trains; whatever ends it too early is a UserError of one line."""
  there = workdir / "checkpoints"
  at = lambda step: next(
    p for p in reversed(parts.phases) if p.since <= max(step, 1)
  )
  which = folder.said(workdir, "run") or folder.identity(c, parts.found["data"])
  book = record.Record(
    c,
    workdir,
    parts.examples,
    parts.heldout,
    lambda step: at(step).measure,
    changed,
    parts.found | {"run": which},
    parts.judge.told,
  )
  store = checkpoints.Store(
    there, keep=c.keep_checkpoints, run=which, warn=book.warn
  )
  try:
    with contextlib.closing(book), contextlib.closing(store):
      try:
        train.train(
          parts.state,
          lambda step: at(step).stages(step),
          store,
          book,
          seed=c.seed,
          steps=c.steps,
          save_every=c.save_every,
          eval_every=c.eval_every,
          pipeline=c.pipeline,
          max_busy_s=c.max_busy_s or math.inf,
        )
      except _STOPS as e:
        book.event(store.good or 0, {"event": "stop", "why": str(e)})
        raise
  except (*_UNUSABLE, *_STOPS, checkpoints.Unsaved, OSError) as e:
    if not book.started:
      held.undo()
    raise _ended(e, changed, store.good, started=book.started) from None


def _ended(
  error: Exception,
  changed: Mapping[str, Any],
  good: int | None,
  *,
  started: bool,
) -> settings.UserError:
  """What the user is told of a run that ended too early."""
  if isinstance(error, OSError):
    left = f"the last good step is {good}" if started else "nothing was begun"
    return settings.UserError(
      f"{intact.told(error)}; {left}: mend that, and start again"
    )
  if started or isinstance(error, Newer | checkpoints.Unreachable):
    return settings.UserError(str(error))
  why = f"; this start changes {', '.join(changed)}" if changed else ""
  return folder.lost(f"{error}{why}")


class _Parts(NamedTuple):
  """What a run is made of, once nothing of it can be refused any more."""

  examples: Examples
  judge: Judge
  phases: "list[Phase]"
  heldout: list[Example]
  state: State
  found: dict[str, Any]  # for config.json


def _parts(c: Config, workdir: pathlib.Path, *, allow_change: bool) -> _Parts:
  """Raises ValueError if something does not fit or cannot be read."""
  source = hf.locate(c.checkpoint) if c.checkpoint else ASSETS
  mesh = sharding.make_mesh(c.mesh_data, c.mesh_model)
  policy = architectures.read_policy(source, dtype=c.dtype)
  text = tokenizer.Tokenizer(source)
  trained.check_vocabulary(source, text, policy)
  examples, keep = Examples(c, text), learning.keeps_reference(c)
  if not allow_change:
    examples.refuse_changes(folder.said(workdir, "data"))
  judge = Judge(c, examples)
  phases = [
    phase(which, since, examples, judge, policy, mesh, keep_reference=keep)
    for since, which in settings.phases(c)
  ]
  heldout = examples.heldout()
  # Last, because it takes longest.
  _, params = hf.load(source, dtype=c.dtype, mesh=mesh)
  tx, _ = learning.optimizer(c)
  state = learning.initial_state(
    params, tx, mesh, keep_reference=keep, offload=c.offload
  )
  found = {
    "data": examples.fingerprint,
    "files": examples.files,
    "left_out": examples.left_out,
    "sandbox": judge.walls,
  }
  return _Parts(examples, judge, phases, heldout, state, found)


class Phase(NamedTuple):
  """The steps from `since` on, wired."""

  since: int
  stages: Callable[[int], train.Stages]
  measure: Callable[..., evaluate.Chunks]
  says: str


def phase(
  c: Config,
  since: int,
  examples: Examples,
  judge: Judge,
  policy: Policy,
  mesh: Mesh,
  *,
  keep_reference: bool,
) -> Phase:
  """Checks what can be checked without parameters.

  Raises:
    ValueError: It does not fit the policy, the devices or their memory.
  """
  settings.check_mesh(c, mesh.shape["data"])
  settings.check_lengths(c, policy.max_positions)
  plans = planning.make(
    c, policy, **mesh.shape, on_cpu=None, keep_reference=keep_reference
  )
  tx, schedule = learning.optimizer(c)
  target = c.samples // c.n

  def candidates(step: int, ledger: Ledger):
    return examples.candidates(step, ledger, most=c.max_oversampling * target)

  stages = train.Stages(
    target=target,
    candidates=candidates,
    prompts=examples.prompts,
    rollouts=sampling.streamed(
      c, policy, examples.stop_ids, mesh, plans.rollouts
    ),
    scores=judge.scores,
    informative=crediting.filter_stage(c),
    visited=crediting.visit_stage(c),
    advantages=crediting.advantages_stage(c),
    update=learning.update_stage(c, policy, tx, schedule, mesh),
    reference=learning.reference_stage(c, tx),
  )
  change = next((p for p in c.phases if p["from_step"] == since), None)
  if change is not None:
    change = {k: v for k, v in change.items() if k != "from_step"}
  first = stages._replace(changed=change)
  lr = learning.scaled_lr(c)
  return Phase(
    since,
    lambda step: first if step == since else stages,
    evaluating.measure(
      c, policy, examples, judge, mesh, plans.evaluations, plans.chunk
    ),
    f"from step {since}: {target} prompts x {c.n} rollouts; "
    f"{plans.rollouts.line()}\n"
    f"lr {lr:.3g} = {c.lr:g} x {lr / c.lr:.3g} (lr_scaling {c.lr_scaling!r})",
  )


def finish(workdir: pathlib.Path, *, title: str) -> None:
  """The figure and the table of a run that has ended."""
  try:
    curve = [*lines.each_line(workdir / "eval" / "curve.jsonl", _is_evaluation)]
  except metrics.Damaged as e:
    raise settings.UserError(
      f"{e}; the run is whole but for that line: mend or remove it"
    ) from None
  steps = metrics.read_lines(workdir / "metrics.jsonl")
  figure = workdir / "report" / "learning_curve.png"
  report.learning_curve(figure, curve, steps, title=title)
  print(report.table(curve[0], curve[-1], steps))
  print(f"  {figure}")


def _is_evaluation(line: Any) -> None:
  """Raises ValueError if a line of curve.jsonl is none."""
  if not isinstance(line, dict) or not {"step", "pass_at_1"} <= line.keys():
    raise ValueError("is no evaluation, it has no pass_at_1")
