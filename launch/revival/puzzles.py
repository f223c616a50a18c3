"""The negative control: puzzles with one short answer each, in files.

  python launch/revival/puzzles.py runs/revival/puzzles

480 prompts to train on, 60 of each family that the embedded policy knows: so
few that N = 16 comes to a stop on them. 960 are held out, half of them to
choose learning rates by, half for what is told.
"""

import argparse
import json
import pathlib

from brorl_jax.tasks import gym
from brorl_jax.tasks.base import Example
from configs import base

PROMPTS = 60  # of each family


def train(family: gym.Family, count: int) -> list[Example]:
  """Different questions."""
  found: dict[str, Example] = {}
  for index in range(100 * count):
    example = gym.puzzle(family, "train", index, seed=0)
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
    gym.Family(name, settings.settings.to_dict())
    for name, settings in base.families().items()
  ]
  sides = {
    "train": [e for family in families for e in train(family, count)],
    "heldout": gym.heldout(families, per_family=2 * PROMPTS, seed=0),
  }
  directory.mkdir(parents=True, exist_ok=True)
  for name, side in sides.items():
    text = "".join(line(example) + "\n" for example in side)
    (directory / f"{name}.jsonl").write_text(text)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("directory", type=pathlib.Path)
  parser.add_argument("--scale", type=int, default=1)
  a = parser.parse_args()
  write(a.directory, scale=a.scale)


if __name__ == "__main__":
  main()
