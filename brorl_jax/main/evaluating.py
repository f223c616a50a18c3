"""Samples held-out prompts and says what came of them, killed or not."""

import contextlib
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh
from jaxtyping import PyTree

from brorl_jax import (
  architectures,
  checkpoints,
  collect,
  evaluate,
  metrics,
  plan,
  sharding,
  tokenizer,
)
from brorl_jax.lines import replace
from brorl_jax.main import (
  folder,
  leaks,
  lock,
  planning,
  programs,
  sampling,
  settings,
  trained,
)
from brorl_jax.main.examples import Examples
from brorl_jax.main.scoring import Judge
from brorl_jax.main.settings import Config
from brorl_jax.policy import Policy
from brorl_jax.tasks.base import Example

_FIELDS = (
  "seed eval_n eval_temperature eval_top_p eval_prompts prompt_tokens "
  "max_new_tokens dtype int8_cache"
).split()


def measure(
  c: Config,
  policy: Policy,
  examples: Examples,
  judge: Judge,
  mesh: Mesh,
  fits: plan.RolloutPlan,
  chunk: int,
) -> Callable[..., evaluate.Chunks]:
  """(params, held-out examples, first=0) -> records, a chunk after the other.

  The same draws each time: rollout n of example p draws from (seed, 0, p, n).
  """
  # Step 0 trains nothing, so its key is free.
  key = jax.random.fold_in(jax.random.key(c.seed), 0)
  sample = sampling.heldout(c, policy, examples.stop_ids, mesh, fits)

  def rollouts(params: PyTree, some: Sequence[Example], start: int):
    index = np.arange(start, start + len(some), dtype=np.int32)
    return sample(params, examples.pad(some, index), key)

  def of(params: PyTree, some: Sequence[Example], *, first: int = 0):
    return evaluate.evaluate(
      params,
      some,
      rollouts=rollouts,
      judged=judge.judged,
      chunk=chunk,
      first=first,
    )

  return of


def run(c: Config, workdir: pathlib.Path) -> None:
  """Writes eval/records.jsonl, chunk by chunk, and eval/summary.json."""
  settings.check_evaluation(c)
  folder.check(c, workdir, allow_change=False, mode="evaluate")
  lines, path = (
    workdir / "eval" / name for name in ("records.jsonl", "summary.json")
  )
  for file in (lines, path):
    if file.is_dir():
      raise settings.UserError(f"{file} is a folder; remove it")
  logging.set_verbosity(logging.ERROR)  # orbax tells of every file it opens
  try:
    parts = _parts(c, workdir)
  except ValueError as e:
    raise settings.UserError(str(e)) from None
  with contextlib.closing(parts.judge), lock.hold(workdir):
    folder.write_config(c, workdir, mode="evaluate", **parts.found)
    print(*parts.says, programs.says(), sep="\n")
    try:
      records = _sampled(c, lines, parts)
      evaluate.check_judged(records)
    except (metrics.Damaged, collect.Unjudged) as e:
      raise settings.UserError(
        f"{e}; another workdir, or this one without eval/, begins again"
      ) from None
    said = parts.found["evaluated"] | {
      "sampling": {field: c[field] for field in _FIELDS},
      **evaluate.summary(records),
    }
    replace(path, json.dumps(said, indent=2) + "\n")
  print(table(said), f"  {path}", sep="\n")


class _Parts(NamedTuple):
  """What an evaluation is made of, once nothing of it can be refused."""

  params: PyTree
  heldout: list[Example]
  measure: Callable[..., evaluate.Chunks]
  chunk: int
  judge: Judge
  found: dict[str, Any]  # for config.json
  says: list[str]


def _parts(c: Config, workdir: pathlib.Path) -> _Parts:
  """Raises ValueError if something does not fit or cannot be read."""
  before = folder.said(workdir, "evaluated")
  which = _same_step(trained.locate(c.checkpoint), before)
  mesh = sharding.make_mesh(c.mesh_data, c.mesh_model)
  policy = architectures.read_policy(which.source, dtype=c.dtype)
  text = tokenizer.Tokenizer(which.source)
  trained.check_vocabulary(which.source, text, policy)
  settings.check_lengths(c, policy.max_positions)
  chunk, fits = planning.evaluation(
    c, policy, **mesh.shape, on_cpu=jax.default_backend() == "cpu"
  )
  examples = Examples(c, text)
  examples.refuse_changes(folder.said(workdir, "data"))
  heldout, says = examples.heldout(), examples.says
  leaked = leaks.refuse(trained.starts(which), examples.placed(heldout))
  # Last, because it takes longest.
  policy, params, step = trained.load(which, mesh, dtype=c.dtype)
  evaluated = {
    "source": str(which.source),
    "run": which.run and str(which.run),
    "step": step,
    "weights": _digest(params),
  }
  if before not in (None, evaluated):
    raise ValueError(
      f"workdir {workdir} belongs to an evaluation of {_told(before)}, this is "
      f"one of {_told(evaluated)}; choose another"
    )
  judge = Judge(c, examples)
  says = [
    *says,
    *leaked,
    *judge.says,
    f"{_told(evaluated)}: {len(heldout)} prompts x {c.eval_n}",
  ]
  return _Parts(
    params,
    heldout,
    measure(c, policy, examples, judge, mesh, fits, chunk),
    chunk,
    judge,
    {
      "evaluated": evaluated,
      "data": examples.fingerprint,
      "left_out": examples.left_out,
      "sandbox": judge.walls,
    },
    says,
  )


def _same_step(
  which: trained.Trained, before: Mapping[str, Any] | None
) -> trained.Trained:
  """The step that an evaluation began with: a run may have gone on."""
  if before is None or which.step is not None:
    return which
  if which.run is None or before["run"] != str(which.run):
    return which
  return which._replace(step=before["step"])


def _told(evaluated: Mapping[str, Any]) -> str:
  where = evaluated["run"] or evaluated["source"]
  step = "" if evaluated["step"] is None else f", step {evaluated['step']}"
  return f"{where}{step} (weights {evaluated['weights'][:8]})"


def _digest(params: PyTree) -> str:
  """Changes with any bit of them."""
  text = json.dumps(checkpoints.digest(params), sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:32]


def _sampled(
  c: Config, path: pathlib.Path, parts: _Parts
) -> list[dict[str, Any]]:
  """All records: those that are there, and then those that are not."""
  path.parent.mkdir(exist_ok=True)
  total, step = len(parts.heldout), parts.found["evaluated"]["step"] or 0
  records = _whole(path, parts.heldout, step, n=c.eval_n, chunk=parts.chunk)
  replace(path, "".join(json.dumps(record) + "\n" for record in records))
  lines = metrics.JsonLines(path, after=step)
  first = len(records) // c.eval_n
  progress = metrics.Progress(after=first, steps=total, unit="prompts")
  with contextlib.closing(lines), contextlib.closing(progress):
    for chunk in parts.measure(parts.params, parts.heldout, first=first):
      new = [{"step": step, **record} for record in chunk]
      lines.write(*new)
      records += new
      passed = sum(record["pass"] for record in records) / len(records)
      progress.step(len(records) // c.eval_n, f"pass@1 {passed:.3f}")
  return records


def _whole(
  path: pathlib.Path,
  heldout: Sequence[Example],
  step: int,
  *,
  n: int,
  chunk: int,
) -> list[dict[str, Any]]:
  """Records of the chunks that were written to their end.

  Raises:
    Damaged: They are not those that this evaluation writes.
  """
  records = []
  if path.exists():
    records = [*metrics.each_line(path, evaluate.check_record)]
  wanted = [(example.id, i) for example in heldout for i in range(n)]
  for number, (record, key) in enumerate(zip(records, wanted, strict=False), 1):
    if (record["id"], record["sample"]) != key or record["step"] != step:
      raise metrics.Damaged(
        f"{path}, line {number}: is not sample {key[1]} of {key[0]!r} at step "
        f"{step}"
      )
  if len(records) > len(wanted):
    raise metrics.Damaged(
      f"{path}, line {len(wanted) + 1}: this evaluation ends before it"
    )
  if len(records) == len(wanted):
    return records
  return records[: len(records) // (n * chunk) * n * chunk]


def table(summary: Mapping[str, Any]) -> str:
  """The summary as lines: everything, then each domain with its tasks."""
  sides = [("all", summary["all"])]
  for domain, numbers in summary["by_domain"].items():
    sides.append((domain, numbers))
    sides += [(f"  {task}", s) for task, s in numbers["by_task"].items()]
  k = max(summary["all"]["pass_at_k"], key=int)
  # One sample is all that there is to it: pass@1 = mean@1 = majority@1.
  more = ("pass_at_k", "majority_at_k") if k != "1" else ()
  named = "pass@1" if k == "1" else f"pass@1=mean@{k}"
  head = ("", "prompts", named, "95 %")
  head += tuple(f"{name.removesuffix('_at_k')}@{k}" for name in more)
  rows = [(*head, "score", "tokens", "cut", "invalid")]
  rows += [
    (
      name,
      f"{s['prompts']}",
      f"{s['pass_at_k']['1']:.3f}",
      "" if s["low"] is None else f"{s['low']:.3f}-{s['high']:.3f}",
      *(f"{s[which][k]:.3f}" for which in more),
      f"{s['mean_score']:.3f}",
      f"{s['tokens_mean']:,.1f}",
      f"{s['truncated_fraction']:.1%}",
      f"{s['invalid']}",
    )
    for name, s in sides
  ]
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return "\n".join(_line(row, widths) for row in rows)


def _line(row: Iterable[str], widths: Sequence[int]) -> str:
  name, *cells = (
    f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}"
    for i, (cell, w) in enumerate(zip(row, widths, strict=True))
  )
  return "  ".join((f"  {name}", *cells))
