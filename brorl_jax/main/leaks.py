"""Held-out prompts of an evaluation that the evaluated policy trained on."""

from collections.abc import Mapping, Sequence

from brorl_jax.main.trained import Start
from brorl_jax.tasks import dataset, golds, heldout
from brorl_jax.tasks.base import DOMAINS

# Prompts are compared, not answers: nothing is tried on a verifier.
_UNTRIED: Mapping[str, golds.Check] = dict.fromkeys(DOMAINS, dict)


def refuse(starts: Sequence[Start], evaluated: dataset.Data) -> list[str]:
  """Refuses prompts that training has seen or could have drawn.

  A run that was resumed with other files was trained on all of them. Compared
  are ids and texts of files as they are written there, without what the config
  has each domain add, and puzzles with what was generated; a generated puzzle
  that comes in a file of another domain is not found.

  Args:
    starts: What led to the policy.
    evaluated: Held-out prompts.

  Returns:
    A line for each file that cannot be compared because it is gone.

  Raises:
    ValueError: Naming both places, if an id or a prompt is on both sides; or
      the file, if it is not the one that was trained on.
  """
  says: dict[str, None] = {}
  for start in starts:
    train, gone = _trained_on(start)
    told = f"not compared with the training of {start.run}: "
    says |= dict.fromkeys(told + why for why in gone)
    # Files that held puzzles took the place of those that would be made.
    stored = any(example.domain == "gym" for example in train.examples)
    had = "may have had" if _unknown(start) else "had"
    try:
      heldout.refuse_overlap(train, evaluated)
      had = "may have drawn"
      heldout.refuse_drawn(evaluated, [] if stored else start.made)
    except dataset.DataError as e:
      raise ValueError(
        f"the training of {start.run} {had} this prompt: {e}"
      ) from None
  return [*says]


def _unknown(start: Start) -> bool:
  """Whether files are named, but not what they were."""
  return bool(start.files) and start.digests is None


def _trained_on(start: Start) -> tuple[dataset.Data, list[str]]:
  """Training examples of the files that are there; what became of others."""
  examples, places, gone = [], [], []
  if _unknown(start):
    gone.append("its files as they were, of which it kept no digests")
  for path in start.digests or start.files:
    try:
      if start.digests is not None:
        _refuse_changed(start, path, start.digests[path])
      read = dataset.read(path, check=_UNTRIED, skip_bad=True)
    except dataset.DataError as e:
      gone.append(str(e))
      continue
    # Which part older runs held out is not known: all of it counts.
    if start.heldout_one_in and not _unknown(start):
      read = heldout.trained_on(read, one_in=start.heldout_one_in)
    examples += read.examples
    places += read.places
  return dataset.Data(examples, places), gone


def _refuse_changed(start: Start, path: str, digest: str) -> None:
  """Raises ValueError if a file is there and is not what it was."""
  if digest not in dataset.file_digests(path).values():
    raise ValueError(
      f"{path} is not what {start.run} was trained on: it was changed since; "
      "bring it back as it was, so that held-out prompts can be compared"
    )
