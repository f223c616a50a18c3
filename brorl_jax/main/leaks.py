"""Held-out prompts of an evaluation that the evaluated run trained on."""

import pathlib
from collections.abc import Mapping
from typing import Any

from brorl_jax.main import trained
from brorl_jax.tasks import dataset, golds, heldout
from brorl_jax.tasks.base import DOMAINS

# Prompts are compared, not answers: nothing is tried on a verifier.
_UNTRIED: Mapping[str, golds.Check] = dict.fromkeys(DOMAINS, dict)


def refuse(run: pathlib.Path, evaluated: dataset.Data) -> list[str]:
  """Refuses prompts that the training of a run has seen or could have drawn.

  A run that was resumed with other files was trained on all of them.

  Args:
    run: Its folder.
    evaluated: Held-out prompts.

  Returns:
    A line for each file that cannot be compared because it is gone.

  Raises:
    ValueError: Naming both places, if an id or a prompt is on both sides.
  """
  says: dict[str, None] = {}
  for config in trained.configs(run):
    train, gone = _trained_on(config["data"])
    says |= dict.fromkeys(gone)
    try:
      heldout.refuse_overlap(train, evaluated)
      heldout.refuse_drawn(evaluated, _generated(config, train))
    except dataset.DataError as e:
      raise ValueError(f"the training of {run} had this prompt: {e}") from None
  return [f"not compared with the training of {run}: {why}" for why in says]


def _trained_on(data: Mapping[str, Any]) -> tuple[dataset.Data, list[str]]:
  """Training examples of the files that are there; what became of others."""
  examples, places, gone = [], [], []
  for path in data["files"]:
    try:
      read = dataset.read(path, check=_UNTRIED, skip_bad=True)
    except dataset.DataError as e:
      gone.append(str(e))
      continue
    if not data["heldout_files"]:
      read = heldout.trained_on(read, one_in=data["heldout_one_in"])
    examples += read.examples
    places += read.places
  return dataset.Data(examples, places), gone


def _generated(config: Mapping[str, Any], train: dataset.Data) -> list[str]:
  """Tasks of which a run made puzzles: none if its files held puzzles."""
  stored = any(example.domain == "gym" for example in train.examples)
  if stored or config["domains"]["gym"]["weight"] <= 0.0:
    return []
  return [name for name, f in config["families"].items() if f["weight"] > 0.0]
