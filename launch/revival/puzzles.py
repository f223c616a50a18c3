"""The negative control: puzzles with one short answer each, in files.

  python -m launch.revival.puzzles runs/revival/puzzles

480 training prompts, 60 of each family that the embedded policy knows: so few
that N = 16 stops improving on them. 960 are held out: half of them to choose
learning rates, half for the results.
"""

import argparse
import itertools
import json
import pathlib
from collections.abc import Collection

from brorl_jax.runs.sections import Config
from brorl_jax.tasks import gym
from brorl_jax.tasks.base import Example

PROMPTS = 60  # of each family


def train(
  family: gym.Family, count: int, *, held_out: Collection[str]
) -> list[Example]:
  """Different questions, none of which is held out but for its case.

  To the puzzles' generator "Tass" is another word to spell backwards than
  "tass"; to files of prompts it is not.
  """
  found: dict[str, Example] = {}
  for index in range(100 * count):
    example = gym.puzzle(family, "train", index, seed=0)
    if example.question.casefold() not in held_out:
      found.setdefault(example.question, example)
    if len(found) == count:
      return list(found.values())
  raise ValueError(f"{family.name} has fewer than {count} different questions")


def line(example: Example) -> str:
  """Of a data file."""
  return json.dumps(
    {
      "id": example.id.replace("/", "-"),
      "domain": "gym",
      "prompt": example.question,
      "entry": example.entry,
    }
  )


def write(directory: pathlib.Path, *, scale: int) -> None:
  count = PROMPTS * scale
  families = [
    gym.Family(name, dict(of.settings))
    for name, of in Config().data.families.items()
  ]
  heldout = gym.heldout(families, per_family=2 * PROMPTS, seed=0)
  asked = {example.question.casefold() for example in heldout}
  some = [train(family, count, held_out=asked) for family in families]
  sides = {"train": [*itertools.chain(*some)], "heldout": heldout}
  directory.mkdir(parents=True, exist_ok=True)
  for name, side in sides.items():
    text = "".join(line(example) + "\n" for example in side)
    (directory / f"{name}.jsonl").write_text(text)


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("directory", type=pathlib.Path)
  parser.add_argument("--scale", type=int, default=1)
  a = parser.parse_args()
  write(a.directory, scale=a.scale)


if __name__ == "__main__":
  main()
