"""--mode=evaluate: samples held-out prompts and scores them; resumable."""

import contextlib
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from absl import logging
from jaxtyping import PyTree

from brorl_jax import config, evaluate
from brorl_jax.errors import StorageError, UserError
from brorl_jax.main import heldout, programs
from brorl_jax.plan import checkpoint_source, functions
from brorl_jax.plan.resolve import Evaluation
from brorl_jax.rollout import dynamic_sampling
from brorl_jax.runs import folder, intact, metrics
from brorl_jax.runs.lines import write_whole
from brorl_jax.stages.examples import Examples
from brorl_jax.stages.scoring import Scorer
from brorl_jax.verdicts.base import Example


def run(this: Evaluation, workdir: pathlib.Path) -> None:
  """Writes eval/records.jsonl, chunk by chunk, then eval/summary.json."""
  values = config.as_dict(this.config)
  folder.check(values, workdir, allow_change=False, mode="evaluate")
  lines, path = (
    workdir / "eval" / name for name in ("records.jsonl", "summary.json")
  )
  for file in (lines, path):
    if file.is_dir():
      raise UserError(
        f"{file} is a folder; remove it or choose another workdir"
      )
  logging.set_verbosity(logging.ERROR)  # orbax logs every file
  try:
    parts = _parts(this, workdir)
  except ValueError as e:
    raise UserError(str(e)) from None
  with contextlib.closing(parts.scorer), folder.hold(workdir), _storage():
    folder.write_config(values, workdir, mode="evaluate", **parts.entries)
    print(*parts.log_lines, programs.log_line(), sep="\n")
    try:
      records = _sampled(this, lines, parts)
      evaluate.check_invalid(records)
    except (metrics.Damaged, dynamic_sampling.TooManyInvalid) as e:
      raise UserError(
        f"{e}; to start again, choose another workdir or remove eval/"
      ) from None
    result = parts.entries["evaluated"] | {
      "sampling": _sampling(values),
      **evaluate.summary(records),
    }
    write_whole(path, json.dumps(result, indent=2) + "\n")
  print(table(result), f"  {path}", sep="\n")


@contextlib.contextmanager
def _storage() -> Iterator[None]:
  """Says that the folder failed, not a name that the user wrote."""
  try:
    yield
  except OSError as e:
    raise StorageError(
      f"{intact.one_line(e)}; fix this and run the same command again: what "
      "was scored before is not sampled again"
    ) from None


def _sampling(values: Mapping[str, Any]) -> dict[str, Any]:
  """The fields that affect how held-out prompts are sampled."""
  known = config.every_field()
  return {
    name: value
    for name, value in config.flat(values).items()
    if name in known and known[name].evaluated
  }


class _Parts(NamedTuple):
  """What an evaluation works with, beside its `Evaluation`."""

  params: PyTree
  heldout: list[Example]
  examples: Examples
  scorer: Scorer
  entries: dict[str, Any]  # more entries of config.json
  log_lines: list[str]


def _parts(this: Evaluation, workdir: pathlib.Path) -> _Parts:
  """Reads the data and loads the weights.

  Raises ValueError if they do not fit together, or not to the folder.
  """
  which, before = this.source, folder.stored(workdir, "evaluated")
  examples = Examples.of(this.config, this.text)
  examples.refuse_changes(folder.stored(workdir, "data"))
  held = examples.heldout()
  leaked = heldout.refuse_trained_on(
    checkpoint_source.starts(which), examples.placed(held)
  )
  # Last, because loading takes longest.
  _, params, step = checkpoint_source.load(
    which, this.mesh, dtype=this.config.policy.dtype
  )
  evaluated = {
    "source": str(which.source),
    "run": which.run and str(which.run),
    "step": step,
    "weights": intact.seal(intact.digest(params))[:32],
  }
  if before not in (None, evaluated):
    raise ValueError(
      f"workdir {workdir} belongs to an evaluation of {_name(before)}, but "
      f"this is one of {_name(evaluated)}; choose another workdir"
    )
  scorer = Scorer(this.config.reward, examples)
  functions.refuse_changes(
    folder.stored(workdir, "functions"), scorer.functions
  )
  entries = {
    "evaluated": evaluated,
    "data": examples.fingerprint,
    "functions": scorer.functions,
    "left_out": examples.left_out,
    "sandbox": scorer.sandbox,
  }
  count = f"{len(held)} prompts x {this.config.eval.n}"
  log_lines = [*examples.log_lines, *leaked, *scorer.log_lines]
  log_lines.append(f"{_name(evaluated)}: {count}")
  return _Parts(params, held, examples, scorer, entries, log_lines)


def _name(evaluated: Mapping[str, Any]) -> str:
  """The evaluated policy, for messages."""
  where = evaluated["run"] or evaluated["source"]
  step = "" if evaluated["step"] is None else f", step {evaluated['step']}"
  return f"{where}{step} (weights {evaluated['weights'][:8]})"


def _sampled(
  this: Evaluation, path: pathlib.Path, parts: _Parts
) -> list[dict[str, Any]]:
  """All records: reads those that exist and samples the rest."""
  path.parent.mkdir(exist_ok=True)
  total, step = len(parts.heldout), parts.entries["evaluated"]["step"] or 0
  c, how = this.config, this.heldout
  records = _whole(path, parts.heldout, step, n=c.eval.n, chunk=how.prompts)
  write_whole(path, "".join(json.dumps(record) + "\n" for record in records))
  lines = metrics.JsonLines(path, after=step)
  first = len(records) // c.eval.n
  progress = metrics.Progress(after=first, steps=total, unit="prompts")
  with contextlib.closing(lines):
    chunks = heldout.records(
      this,
      c,
      how,
      parts.examples,
      parts.scorer,
      parts.params,
      parts.heldout,
      first=first,
    )
    for chunk in chunks:
      new = [{"step": step, **record} for record in chunk]
      lines.write(*new)
      records += new
      passed = sum(record["pass"] for record in records) / len(records)
      progress.step(len(records) // c.eval.n, f"pass@1 {passed:.3f}")
  return records


def _whole(
  path: pathlib.Path,
  heldout: Sequence[Example],
  step: int,
  *,
  n: int,
  chunk: int,
) -> list[dict[str, Any]]:
  """The records of complete chunks; Damaged if another evaluation has them."""
  records = []
  if path.exists():
    records = [*metrics.each_line(path, evaluate.check_record)]
  wanted = [(example.id, i) for example in heldout for i in range(n)]
  for number, (record, key) in enumerate(zip(records, wanted, strict=False), 1):
    if (record["id"], record["sample"]) != key or record["step"] != step:
      raise metrics.Damaged(
        f"{path}, line {number}: not sample {key[1]} of {key[0]!r} at step "
        f"{step}"
      )
  if len(records) > len(wanted):
    raise metrics.Damaged(
      f"{path}, line {len(wanted) + 1}: this evaluation has only "
      f"{len(wanted)} records"
    )
  if len(records) == len(wanted):
    return records
  return records[: len(records) // (n * chunk) * n * chunk]


def table(summary: Mapping[str, Any]) -> str:
  """The summary as a table: all, then each domain with its tasks."""
  sides = [("all", summary["all"])]
  for domain, numbers in summary["by_domain"].items():
    sides.append((domain, numbers))
    sides += [(f"  {task}", s) for task, s in numbers["by_task"].items()]
  k = max(summary["all"]["pass_at_k"], key=int)
  # With one sample pass@1 = mean@1 = majority@1.
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
