"""Refuses held-out prompts that the evaluated policy was trained on."""

import dataclasses
from collections.abc import Sequence

from brorl_jax.data import dataset, heldout
from brorl_jax.plan.checkpoint_source import Start
from brorl_jax.stages.examples import file_form
from brorl_jax.verdicts.domains import DOMAINS
from brorl_jax.verdicts.names import MADE

# Only prompts are compared: reference answers need no check.
_UNTRIED = {
  name: dataclasses.replace(domain, check_reference=dict)
  for name, domain in DOMAINS.items()
}


def refuse(starts: Sequence[Start], evaluated: dataset.Data) -> list[str]:
  """Refuses prompts that training used or could have drawn.

  A run that was resumed with other files was trained on all of them. Examples
  of files are compared by id and raw text, before the config adds instructions.
  Puzzles are compared with the generated ones. A generated puzzle that a file
  lists under another domain is not found.

  Args:
    starts: The runs that led to the policy.

  Returns:
    A line for each file that is missing and could not be compared.

  Raises:
    ValueError: An id or a prompt is on both sides (names both places), or a
      file changed since the training (names the file).
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
      heldout.refuse_overlap(train, evaluated)
      had = "may have drawn"
      heldout.refuse_drawn(evaluated, [] if stored else start.made)
    except dataset.DataError as e:
      raise ValueError(
        f"the training of {start.run} {had} this prompt: {e}"
      ) from None
  return [*log_lines]


def _trained_on(start: Start) -> tuple[dataset.Data, list[str]]:
  """Training examples of the files that exist, and why others are missing."""
  examples, places, missing = [], [], []
  for path, digest in start.files.items():
    try:
      _refuse_changed(start, path, digest)
      form = file_form(start.fields, start.domain, own=start.own)
      read = dataset.read(path, form=form, domains=_UNTRIED, skip_bad=True)
    except dataset.DataError as e:
      missing.append(str(e))
      continue
    if start.heldout_one_in:
      read = heldout.trained_on(read, one_in=start.heldout_one_in)
    examples += read.examples
    places += read.places
  return dataset.Data(examples, places), missing


def _refuse_changed(start: Start, path: str, digest: str) -> None:
  """Raises ValueError if a file exists and has changed."""
  if digest not in dataset.file_digests(path).values():
    raise ValueError(
      f"{path} has changed since {start.run} was trained on it; restore it, so "
      "that held-out prompts can be compared"
    )
