"""--mode=evaluate: samples held-out prompts and scores them; resumable."""

import contextlib
import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from brorl_jax import config, evaluate
from brorl_jax.data import dataset
from brorl_jax.data.dataset import Data
from brorl_jax.errors import AGAIN, StorageError, UserError, as_user_error
from brorl_jax.main import recorder
from brorl_jax.plan import checkpoint_source, resolve
from brorl_jax.plan.checkpoint_source import Start
from brorl_jax.plan.resolve import Evaluation
from brorl_jax.rollout import dynamic_sampling
from brorl_jax.runs import folder, intact, metrics
from brorl_jax.runs.lines import write_whole
from brorl_jax.stages.examples import Examples, file_form
from brorl_jax.stages.scoring import Scorer
from brorl_jax.verdicts.base import MADE, Example
from brorl_jax.verdicts.domains import DOMAINS

# Only prompts are compared with the training: reference answers need no check.
_untried = lambda domain: dataclasses.replace(domain, check_reference=dict)
_UNTRIED = {name: _untried(domain) for name, domain in DOMAINS.items()}


def run(this: Evaluation, workdir: pathlib.Path) -> None:
  """Writes eval/records.jsonl, chunk by chunk, then eval/summary.json."""
  values = config.as_dict(this.config)
  folder.check(values, workdir, allow_change=False, mode="evaluate")
  records = workdir / "eval" / "records.jsonl"
  summary = workdir / "eval" / "summary.json"
  parts = _parts(this, workdir)
  used = {k for k, about in config.every_field().items() if about.evaluated}
  flat = config.flat(values).items()
  sampling = {name: value for name, value in flat if name in used}
  said = parts.entries["evaluated"] | {"sampling": sampling}
  with contextlib.closing(parts.scorer), folder.hold(workdir):
    try:
      folder.write_config(values, workdir, mode="evaluate", **parts.entries)
      print(*parts.log_lines, sep="\n")
      said |= evaluate.summary(_sampled(this, records, parts))
      write_whole(summary, json.dumps(said, indent=2) + "\n")
    except OSError as e:
      why = "what was scored before is not sampled again"
      raise StorageError(f"{intact.one_line(e)}; {AGAIN}: {why}") from None
    except (metrics.Damaged, dynamic_sampling.TooManyInvalid) as e:
      again = "to start again, choose another workdir or remove eval/"
      raise UserError(f"{e}; {again}") from None
  print(table(said), f"  {summary}", sep="\n")


class _Parts(NamedTuple):
  heldout: list[Example]
  scorer: Scorer
  sample: Callable[..., evaluate.Chunks]  # from prompt number `first` on
  entries: dict[str, Any]  # more entries of config.json
  log_lines: list[str]


@as_user_error(ValueError)
def _parts(this: Evaluation, workdir: pathlib.Path) -> _Parts:
  """Reads the data and loads the weights, which must fit to the folder."""
  c, which = this.config, this.source
  examples = Examples(c, this.text)
  examples.refuse_changes(folder.stored(workdir, "data"))
  held = examples.heldout()
  starts = checkpoint_source.starts(which)
  leaked = refuse_trained_on(starts, examples.placed(held))
  # Last, because loading takes longest.
  mesh, dtype = this.mesh, c.policy.dtype
  _, params, step = checkpoint_source.load(which, mesh, dtype=dtype)
  evaluated = {
    "source": str(which.source),
    "run": which.run and str(which.run),
    "step": step,
    "weights": intact.seal(intact.digest(params))[:32],
  }
  before = folder.stored(workdir, "evaluated")
  if before not in (None, evaluated):
    raise ValueError(
      f"workdir {workdir} belongs to an evaluation of {_name(before)}, but "
      f"this is one of {_name(evaluated)}; choose another workdir"
    )
  scorer = Scorer(c.reward, examples)
  resolve.refuse_changes(folder.stored(workdir, "functions"), scorer.functions)
  entries = {
    "evaluated": evaluated,
    "data": examples.fingerprint,
    "functions": scorer.functions,
    "left_out": examples.left_out,
    "sandbox": scorer.sandbox,
    "memory_bytes": this.policy.target.memory_bytes,
  }
  of = this, c, this.heldout, examples, scorer, params, held
  sample = functools.partial(recorder.records, *of)
  log_lines = [*examples.log_lines, *leaked, *scorer.log_lines]
  log_lines.append(f"{_name(evaluated)}: {len(held)} prompts x {c.eval.n}")
  return _Parts(held, scorer, sample, entries, log_lines)


def _name(evaluated: Mapping[str, Any]) -> str:
  where = evaluated["run"] or evaluated["source"]
  step = "" if evaluated["step"] is None else f", step {evaluated['step']}"
  return f"{where}{step} (weights {evaluated['weights'][:8]})"


def _sampled(this: Evaluation, path: pathlib.Path, parts: _Parts) -> list:
  """All records: reads those that exist and samples the rest."""
  path.parent.mkdir(exist_ok=True)
  n, how = this.config.eval.n, this.heldout.only(len(parts.heldout))
  step = parts.entries["evaluated"]["step"] or 0
  wanted = [(one.id, i, step) for one in parts.heldout for i in range(n)]
  records = _whole(path, wanted, n * how.load.prompts)
  write_whole(path, "".join(json.dumps(record) + "\n" for record in records))
  lines, first = metrics.JsonLines(path, after=step), len(records) // n
  total = len(parts.heldout)
  progress = metrics.Progress(after=first, steps=total, unit="prompts")
  with contextlib.closing(lines):
    for found in parts.sample(first=first):
      new = [{"step": step, **record} for record in found]
      lines.write(*new)
      records += new
      passed = sum(record["pass"] for record in records) / len(records)
      progress.step(len(records) // n, f"pass@1 {passed:.3f}")
  evaluate.check_invalid(records)
  return records


def _whole(
  path: pathlib.Path, wanted: Sequence[tuple[str, int, int]], chunk: int
) -> list[dict[str, Any]]:
  """The records of complete chunks of `chunk` records each.

  `wanted` has the example, the number of the sample and the step of all
  records. Raises Damaged for other ones, which are of another evaluation.
  """
  records: list[dict[str, Any]] = []
  if path.exists():
    records = [*metrics.each_line(path, evaluate.check_record)]
  for number, one in enumerate(records):
    key = wanted[number] if number < len(wanted) else None
    if (one["id"], one["sample"], one["step"]) != key:
      here = "no record"
      if key is not None:
        here = f"sample {key[1]} of {key[0]!r} at step {key[2]}"
      has = f"this evaluation has {here} here"
      raise metrics.Damaged(f"{path}, line {number + 1}: {has}")
  whole = len(records) == len(wanted)
  return records if whole else records[: len(records) // chunk * chunk]


def refuse_trained_on(starts: Sequence[Start], evaluated: Data) -> list[str]:
  """Refuses prompts that training used or could have drawn.

  A run that was resumed with other files was trained on all of them. Examples
  of files are compared by id and raw text, before the config adds instructions,
  puzzles with the generated ones. A generated puzzle that a file lists under
  another domain is not found.

  Returns a line for each file that is missing and could not be compared. Raises
  ValueError for an id or a prompt on both sides (names both places), or a file
  that changed since the training.
  """
  log_lines: dict[str, None] = {}
  for start in starts:
    train, missing = _trained_on(start)
    prefix = f"not compared with the training of {start.run}: "
    log_lines |= dict.fromkeys(prefix + why for why in missing)
    # Puzzles from files replaced generated ones.
    stored = any(example.domain == MADE for example in train.examples)
    had = "had"
    try:
      dataset.refuse_overlap(train, evaluated)
      had = "may have drawn"
      dataset.refuse_drawn(evaluated, [] if stored else start.made)
    except dataset.DataError as e:
      what = f"the training of {start.run} {had} this prompt"
      raise ValueError(f"{what}: {e}") from None
  return [*log_lines]


def _trained_on(start: Start) -> tuple[Data, list[str]]:
  examples, places, missing = [], [], []
  for path, digest in start.files.items():
    how, of_function = start.forms[path]
    try:
      now = [*dataset.file_digests(path).values()]
      form = file_form(f"=={how}", start.domain, own=start.own, entries=["="])
      same = {path: digest in now, how: form.entries["="].digest == of_function}
      if changed := [what for what in same if not same[what]]:
        what = f"{changed[0]} has changed since {start.run} was trained on it"
        must = "restore it, so that held-out prompts can be compared"
        raise ValueError(f"{what}; {must}")
      form = form.entries["="]
      read = dataset.read(path, form=form, domains=_UNTRIED, skip_bad=True)
      read = dataset.without(read, {*map(bytes.fromhex, start.dropped)})
    except dataset.DataError as e:
      missing.append(str(e))
      continue
    read = dataset.trained_on(read, one_in=start.heldout_one_in)
    examples += read.examples
    places += read.places
  return Data(examples, places), missing


def table(summary: Mapping[str, Any]) -> str:
  """The summary as a table: all, then each domain with its tasks."""
  sides = {"all": summary["all"]}
  for domain, numbers in summary["by_domain"].items():
    tasks = numbers["by_task"].items()
    sides |= {domain: numbers, **{f"  {task}": s for task, s in tasks}}
  k = max(summary["all"]["pass_at_k"], key=int)
  # With one sample pass@1 = mean@1 = majority@1.
  more = ("pass_at_k", "majority_at_k") if k != "1" else ()
  named = "pass@1" if k == "1" else f"pass@1=mean@{k}"
  ends = (f"{name.removesuffix('_at_k')}@{k}" for name in more)
  rows = [["", "prompts", named, "95 %", *ends]]
  rows[0] += ["score", "tokens", "cut", "invalid"]
  for name, s in sides.items():
    interval = "" if s["low"] is None else f"{s['low']:.3f}-{s['high']:.3f}"
    cells = [name, f"{s['prompts']}", f"{s['pass_at_k']['1']:.3f}", interval]
    cells += [f"{s[which][k]:.3f}" for which in more]
    cells += [f"{s['mean_score']:.3f}", f"{s['tokens_mean']:,.1f}"]
    rows.append([*cells, f"{s['truncated_fraction']:.1%}", f"{s['invalid']}"])
  return evaluate.aligned(rows)
