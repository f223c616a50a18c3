"""Reads the files of a config as training and held-out examples."""

import collections
import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping

from brorl_jax.config.data import Data
from brorl_jax.data import columns, dataset, heldout, schema
from brorl_jax.data.columns import Form
from brorl_jax.verdicts import strict_json
from brorl_jax.verdicts.base import Example
from brorl_jax.verdicts.domains import DOMAINS, OWN
from brorl_jax.verdicts.strict_json import show

_SHOWN = 5  # skipped lines that are shown
_NAMED = 12  # unused columns that are named


def form(fields: str, domain: str, *, own: bool) -> Form:
  """How the files of a config are read.

  Args:
    fields: `data.fields`.
    domain: `data.domain`.
    own: Whether the user's own functions give the rewards; then all lines are
      of one domain.

  Raises:
    ValueError: The fields cannot be parsed, or the domain is unknown.
  """
  try:
    names = columns.parse(fields, schema.known(DOMAINS))
  except ValueError as e:
    raise ValueError(f"config.data.fields: {e}") from None
  if domain and domain not in DOMAINS:
    close = difflib.get_close_matches(domain, DOMAINS, n=1)
    one_of = f"use one of {', '.join(DOMAINS)}"
    raise ValueError(
      f"config.data.domain = {domain!r} is unknown; "
      + (f"did you mean {close[0]}?" if close else one_of)
    )
  return Form(names, domain, OWN if own else None)


def check(c: Data, *, own: bool) -> None:
  """Checks a config before any file is opened.

  Raises:
    ValueError: The system message is not valid text, or there are own reward
      functions without files.
  """
  if c.system:
    strict_json.text(c.system, "config.data.system")
  if own and not (c.files or c.heldout_files):
    raise ValueError(
      "config.reward.verifier scores lines of files, but config.data.files is "
      "empty; name files"
    )
  if own and c.puzzles:
    raise ValueError(
      "config.data.puzzles = True adds puzzles, but config.reward.verifier "
      "scores only lines of files; remove one of them"
    )


def by_domain(examples: Iterable[Example]) -> dict[str, list[Example]]:
  """The examples of each domain, in order."""
  out = collections.defaultdict[str, list[Example]](list)
  for example in examples:
    out[example.domain].append(example)
  return dict(out)


def read(c: Data, *, own: bool) -> tuple[dataset.Data, dataset.Data]:
  """Training and held-out examples; there must be a file.

  Raises:
    ValueError: A file is invalid, or a prompt is on both sides.
  """
  of = functools.partial(
    dataset.read,
    form=form(c.fields, c.domain, own=own),
    domains=DOMAINS,
    skip_bad=c.skip_bad,
  )
  return heldout.sides(of, c.files, c.heldout_files, one_in=c.heldout_one_in)


def log_lines(
  train: dataset.Data,
  held: dataset.Data,
  counts: Mapping[str, int],
  kept: int,
  *,
  own: bool,
) -> Iterator[str]:
  """Lines for the log: what was read from the files and what was skipped.

  Args:
    counts: Number of training examples per domain that are short enough.
    kept: Number of held-out examples that are short enough.
    own: Whether the user's own functions give the rewards; they receive every
      column.
  """
  left_out = [*train.skipped, *held.skipped]
  of = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
  yield (
    f"files: {of or 'none to train on'}; held out {kept}; left out "
    f"{len(left_out)} bad lines; {train.repeats} prompts occur more than once"
  )
  yield from (f"  left out: {one}" for one in left_out[:_SHOWN])
  passed = sorted({*train.columns, *held.columns})
  if passed and not own:
    more = ", ..." if len(passed) > _NAMED else ""
    names = ", ".join(map(show, passed[:_NAMED]))
    yield f"unused columns: {names}{more}"


def shares(weights: Mapping[str, float], *, made: bool) -> str:
  """A line for the log: the share of each domain in a run with files.

  Args:
    weights: Weights of the domains that have prompts.
    made: Whether the prompts of one domain are generated.
  """
  total = sum(weights.values())
  parts = ", ".join(
    f"{name} {weight / total:.0%}"
    for name, weight in sorted(weights.items())
    if weight
  )
  how_many = "some are" if made else "none are"
  return f"prompts: {parts}; {how_many} generated (config.data.puzzles)"
