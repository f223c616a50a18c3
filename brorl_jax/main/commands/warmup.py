"""--mode=warmup: supervised training on pairs -> a Hugging Face directory."""

import dataclasses
import functools
import json
import pathlib
import sys
import time
from typing import NamedTuple

from jax.sharding import Mesh
from jaxtyping import PyTree

from brorl_jax import config, meshes
from brorl_jax.config import Warmup
from brorl_jax.config.warmup import Pairs
from brorl_jax.errors import UserError
from brorl_jax.learner import optimizer, pair_packing, supervised
from brorl_jax.learner.pair_packing import Layout, Pair
from brorl_jax.learner.supervised import Look
from brorl_jax.main import checkpoint_source, programs, resolve
from brorl_jax.main.commands import export
from brorl_jax.model import architectures, huggingface, target, tokenizer
from brorl_jax.model.policy import Policy
from brorl_jax.runs import folder
from brorl_jax.tasks import posing
from brorl_jax.tasks.data import columns, dataset, heldout, pairs

_RECORD = "warmup.json"  # config, files and losses, next to the weights
_ADAM = ("lr", "warmup", "b1", "b2", "eps", "weight_decay", "max_grad_norm")


def run(c: Warmup, workdir: pathlib.Path) -> None:
  """Trains, then writes a Hugging Face directory to `workdir`.

  It cannot resume: if it is stopped, the same command starts again.
  """
  folder.check_empty(workdir)
  try:
    _run(c, workdir)
  except (ValueError, FloatingPointError) as e:
    raise UserError(str(e)) from None


class _Start(NamedTuple):
  """Everything that a validated start needs."""

  source: pathlib.Path
  text: tokenizer.Tokenizer
  policy: Policy
  layout: Layout
  train: list[Pair]
  heldout: list[Pair]
  files: dict[str, str]  # their digests
  log_lines: list[str]


def _run(c: Warmup, workdir: pathlib.Path) -> None:
  mesh = meshes.make_mesh(**c.devices.mesh)
  c = resolve.with_dtype(c, target.here())
  start = _start(c, meshes.of(mesh).rows)
  print(*start.log_lines, programs.log_line(), sep="\n", file=sys.stderr)
  _, params = huggingface.load(start.source, dtype=c.policy.dtype, mesh=mesh)
  params, looks = _trained(c, start, params, mesh)
  record = {
    "config": config.as_dict(c),
    "files": start.files,
    "losses": [look._asdict() for look in looks],
  }
  export.write(
    workdir,
    start.policy,
    params,
    source=start.source,
    text=start.text,
    also={
      _RECORD: json.dumps(record, indent=2) + "\n",
      **checkpoint_source.inherited(start.source),
    },
  )
  print(f"wrote {workdir}", file=sys.stderr)


def _start(c: Warmup, rows: int) -> _Start:
  """Builds the parts; raises ValueError if they do not fit together."""
  if not c.data.files:
    raise ValueError("config.data.files is empty; name files of pairs")
  if c.optim.rows % rows:
    raise ValueError(
      f"config.optim.rows = {c.optim.rows} does not divide over {rows} rows of "
      "devices (config.devices.mesh_data x mesh_fsdp); use a multiple"
    )
  source = huggingface.locate(c.policy.checkpoint)
  policy = architectures.read_policy(source, dtype=c.policy.dtype)
  if c.optim.row_tokens > policy.max_positions:
    raise ValueError(
      f"config.optim.row_tokens = {c.optim.row_tokens} must be at most "
      f"{policy.max_positions}, the longest input of this checkpoint"
    )
  text = checkpoint_source.read_tokenizer(
    checkpoint_source.CheckpointSource(source), c.policy.chat_template
  )
  checkpoint_source.check_vocabulary(source, text, policy)
  layout = Layout(c.optim.row_tokens, c.optim.rows, c.optim.microbatches)
  sides, summaries = [], []
  for name, side in zip(("to train on", "held out"), read(c.data), strict=True):
    kept, dropped = fitting(side, c.data, text, layout)
    skipped = len(side.skipped)
    left_out = [f"{skipped:,} wrong lines left out"] * (skipped > 0)
    left_out += [f"{dropped:,} too long ones left out"] * (dropped > 0)
    summaries.append(", ".join([f"{len(kept):,} pairs {name}", *left_out]))
    if not kept:
      raise ValueError(
        f"config.data.files: no pair {name} is left: {summaries[-1]}"
      )
    sides.append(kept)
  files = dataset.file_digests([*c.data.files, *c.data.heldout_files])
  learned, measured = sides
  return _Start(
    source, text, policy, layout, learned, measured, files, summaries
  )


def read(c: Pairs) -> tuple[dataset.Data, dataset.Data]:
  """Training and held-out pairs; raises DataError."""
  try:
    names = columns.parse(c.fields, pairs.FIELDS)
  except ValueError as e:
    raise ValueError(f"config.data.fields: {e}") from None
  of = functools.partial(pairs.read, names=names, skip_bad=c.skip_bad)
  return heldout.sides(of, c.files, c.heldout_files, one_in=c.heldout_one_in)


def fitting(
  data: dataset.Data, c: Pairs, text: tokenizer.Tokenizer, layout: Layout
) -> tuple[list[Pair], int]:
  """Token ids of pairs, with prompts and end tokens as in RL.

  Returns:
    The pairs, and the number of those that were too long.

  Raises:
    ValueError: A pair is too long, and data.skip_bad is not set.
  """
  kept, names = [], []
  for example, place in zip(data.examples, data.places, strict=True):
    asked = posing.posed(example, system=c.system)
    response = text.encode(pairs.response(example))
    pair = Pair(text.render(asked), [*response, text.stop_ids[0]])
    if not c.skip_bad or sum(map(len, pair)) <= layout.tokens:
      kept.append(pair)
      names.append(str(place))
  pair_packing.check(kept, layout, names)
  return kept, len(data.examples) - len(kept)


def _trained(
  c: Warmup, start: _Start, params: PyTree, mesh: Mesh
) -> tuple[PyTree, list[Look]]:
  """Trains, prints the progress, and returns it with the parameters.

  Args:
    c: The config.
    start: Its parts.
    params: Initial parameters; donated.
    mesh: Where they lie.
  """
  count = pair_packing.updates_in(
    start.train, start.layout, epochs=c.optim.epochs, seed=c.optim.seed
  )
  adam = {name: getattr(c.optim, name) for name in _ADAM}
  tx, _ = optimizer.adamw(total=count, **adam)
  policy = dataclasses.replace(start.policy, remat=c.devices.remat, mesh=mesh)
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
    start.train,
    packed_logp=policy.packed_logp,
    tx=tx,
    layout=start.layout,
    count=count,
    seed=c.optim.seed,
    look=look,
    heldout=start.heldout,
    mesh=mesh,
  )
  return params, looks
