"""--mode=warmup: supervised training on pairs -> a Hugging Face directory."""

import dataclasses
import functools
import json
import pathlib
import sys
import time

from jaxtyping import PyTree

from brorl_jax import config
from brorl_jax.config import Warmup
from brorl_jax.config.warmup import Pairs
from brorl_jax.data import dataset, heldout, schema
from brorl_jax.errors import UserError
from brorl_jax.learner import state as states
from brorl_jax.learner import supervised
from brorl_jax.learner.supervised import Look, Pair, PairLayout
from brorl_jax.main import export, programs
from brorl_jax.model import huggingface, tokenizer
from brorl_jax.plan import checkpoint_source
from brorl_jax.plan.resolve import WithPolicy
from brorl_jax.runs import folder
from brorl_jax.verdicts.base import posed

_RECORD = "warmup.json"  # config, files and losses, next to the weights
_ADAM = ("lr", "warmup", "b1", "b2", "eps", "weight_decay", "max_grad_norm")


def run(this: WithPolicy[Warmup], workdir: pathlib.Path) -> None:
  """Trains, then writes a Hugging Face directory to `workdir`.

  It cannot resume: if it is stopped, the same command starts again.
  """
  folder.check_empty(workdir)
  c, source = this.config, this.source.source
  try:
    learned, measured, summaries = _read(this)
    print(*summaries, programs.log_line(), sep="\n", file=sys.stderr)
    dtype, mesh = c.policy.dtype, this.mesh
    _, params = huggingface.load(source, dtype=dtype, mesh=mesh)
    params, looks = _trained(this, learned, measured, params)
    files = [*c.data.files, *c.data.heldout_files]
    record = {
      "config": config.as_dict(c),
      "files": dataset.file_digests(files),
      "losses": [look._asdict() for look in looks],
    }
    export.write(
      workdir,
      this.policy,
      params,
      source=source,
      text=this.text,
      also={
        _RECORD: json.dumps(record, indent=2) + "\n",
        **checkpoint_source.inherited(source),
      },
    )
  except (ValueError, FloatingPointError) as e:
    raise UserError(str(e)) from None
  print(f"wrote {workdir}", file=sys.stderr)


def _read(
  this: WithPolicy[Warmup],
) -> tuple[list[Pair], list[Pair], list[str]]:
  """Pairs to train on, held out, and lines for the log; raises ValueError."""
  c, sides, summaries = this.config, [], []
  for name, side in zip(("to train on", "held out"), read(c.data), strict=True):
    kept, dropped = fitting(side, c.data, this.text, layout(c))
    skipped = len(side.skipped)
    left_out = [f"{skipped:,} wrong lines left out"] * (skipped > 0)
    left_out += [f"{dropped:,} too long ones left out"] * (dropped > 0)
    summaries.append(", ".join([f"{len(kept):,} pairs {name}", *left_out]))
    if not kept:
      raise ValueError(
        f"config.data.files: no pair {name} is left: {summaries[-1]}"
      )
    sides.append(kept)
  return *sides, summaries


def layout(c: Warmup) -> PairLayout:
  """The shape of an update's batches."""
  return PairLayout(c.optim.row_tokens, c.optim.rows, c.optim.microbatches)


def read(c: Pairs) -> tuple[dataset.Data, dataset.Data]:
  """Training and held-out pairs; raises DataError."""
  try:
    names = schema.parse(c.fields, dataset.PAIR_FIELDS)
  except ValueError as e:
    raise ValueError(f"config.data.fields: {e}") from None
  of = functools.partial(dataset.read_pairs, names=names, skip_bad=c.skip_bad)
  return heldout.sides(of, c.files, c.heldout_files, one_in=c.heldout_one_in)


def fitting(
  data: dataset.Data, c: Pairs, text: tokenizer.Tokenizer, layout: PairLayout
) -> tuple[list[Pair], int]:
  """Token ids of pairs, as in RL, and the number of pairs that were too long.

  Raises ValueError if there is one and data.skip_bad is not set.
  """
  kept, names = [], []
  for example, place in zip(data.examples, data.places, strict=True):
    asked = posed(example, system=c.system)
    response = text.encode(dataset.pair_response(example))
    pair = Pair(text.render(asked), [*response, text.stop_ids[0]])
    if not c.skip_bad or sum(map(len, pair)) <= layout.tokens:
      kept.append(pair)
      names.append(str(place))
  supervised.check(kept, layout, names)
  return kept, len(data.examples) - len(kept)


def _trained(
  this: WithPolicy[Warmup],
  learned: list[Pair],
  measured: list[Pair],
  params: PyTree,
) -> tuple[PyTree, list[Look]]:
  """Trains, prints the progress, and returns it with the parameters.

  `measured` are the pairs held out; `params` are donated.
  """
  c, shape, mesh = this.config, layout(this.config), this.mesh
  count = supervised.updates_in(
    learned, shape, epochs=c.optim.epochs, seed=c.optim.seed
  )
  adam = {name: getattr(c.optim, name) for name in _ADAM}
  tx, _ = states.adamw(total=count, **adam)
  policy = dataclasses.replace(this.policy, remat=c.devices.remat, mesh=mesh)
  looks: list[Look] = []
  begin = time.monotonic()

  def look(now: Look) -> None:
    looks.append(now)
    parts = [
      f"{what} {x:.3f}"
      for what, x in (("loss", now.loss), ("held-out loss", now.heldout))
      if x is not None
    ]
    line = ", ".join([*parts, f"{now.tokens:,} tokens learned"])
    spent = time.monotonic() - begin
    print(
      f"update {now.update}/{count}: {line}, {spent:.0f} s", file=sys.stderr
    )

  params = supervised.train(
    params,
    learned,
    packed_logp=policy.packed_logp,
    tx=tx,
    layout=shape,
    count=count,
    seed=c.optim.seed,
    look=look,
    heldout=measured,
    mesh=mesh,
  )
  return params, looks
