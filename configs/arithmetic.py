"""Arithmetic for a small language model, and its reward; not a run.

  python -m brorl_jax.configs.arithmetic brorl_jax/assets/arithmetic

writes train.jsonl and heldout.jsonl, which the preset `smollm2` reads, and
harder.jsonl to evaluate on, whose answers take up to 20 tokens. `problems`
makes more, with numbers as large as wanted: a dial. Of the answers of
SmolLM2-135M-Instruct at temperature 0.6 right are (8 pairs of numbers, 64
answers to each, 2026-11-30):

  products of 2 to 12       .32 as "times", .17 as boxes of pens
  sums of 11 to 99          .06
  differences of 11 to 99   .02
  stories of apples         .00
  products of 11 to 99, two steps, three numbers   none of 512
"""

import itertools
import json
import pathlib
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from brorl_jax.verdicts import gym

# What is done with the numbers, and the ways to say it. The first two of each
# are what a run trains on, the last one is for the harder side.
_TASKS: Mapping[str, tuple[Callable[..., int], tuple[str, ...]]] = {
  "sums": (
    lambda a, b: a + b,
    (
      "What is {0} + {1}?",
      "What is {0} plus {1}?",
      "Tom has {0} apples and buys {1} more. How many apples has he now?",
    ),
  ),
  "differences": (
    lambda a, b: a - b,
    (
      "What is {0} - {1}?",
      "What is {0} minus {1}?",
      "A shop has {0} books and sells {1} of them. How many books are left?",
    ),
  ),
  "products": (
    lambda a, b: a * b,
    (
      "What is {0} times {1}?",
      "There are {0} boxes with {1} pens in each. How many pens are there?",
      "A hall has {0} rows of {1} chairs. How many chairs has it?",
    ),
  ),
  "two_steps": (
    lambda a, b, c: a * b + c,
    (
      "What is {0} times {1} plus {2}?",
      "Multiply {0} by {1}, then add {2}. What do you get?",
      "Anna buys {0} boxes of {1} pens and finds {2} more pens. How many pens "
      "has she?",
    ),
  ),
}
_ASK = "Answer with the number alone."
_NUMBER = re.compile(r"-?\d+")
# Task, smallest and largest number, and problems: to train on, held out, and a
# harder side to look at only.
_TRAIN = (
  ("sums", 11, 99, 340),
  ("differences", 11, 99, 50),
  ("products", 2, 12, 110),
)
_HELDOUT = (
  ("sums", 11, 99, 44),
  ("differences", 11, 99, 8),
  ("products", 2, 12, 12),
)
_HARDER = (
  ("sums", 100, 999, 16),
  ("differences", 100, 999, 16),
  ("products", 11, 49, 16),
  ("two_steps", 2, 12, 16),
)


def score(response: str, example: Mapping[str, Any]) -> float:
  """1 if the last number of a response is the answer, else 0. What comes before
  is not judged: "79 books sold = 79 x 10" is right where the answer is 10.
  """
  numbers = _NUMBER.findall(response.replace(",", ""))
  return float(bool(numbers) and numbers[-1] == example["answer"])


def problems(
  task: str, low: int, high: int, *, heldout: bool, story: bool = False
) -> Iterator[dict[str, str]]:
  """Different problems of a task with numbers from `low` to `high`, as data
  lines, until a thousand numbers in a row gave none that is new.

  One set of numbers in ten is held out, by a hash, in every task and wording.
  """
  result, ways = _TASKS[task]
  ways = ways[2:] if story else ways[:2]
  side = "heldout" if heldout else "train"
  draw = random.Random(f"{task} {low} {high} {side}")
  seen: set[str] = set()
  repeats = 0
  while repeats < 1000:
    numbers = [
      draw.randint(low, high) for _ in range(2 + (task == "two_steps"))
    ]
    numbers.sort(reverse=True)  # differences are not negative
    question = draw.choice(ways).format(*numbers)
    own = gym.is_heldout("numbers", str(numbers)) == heldout
    if not own or question in seen:
      repeats += 1
      continue
    yield {
      "id": f"{task}-{low}-{high}/{side}/{len(seen)}",
      "source": task,
      "prompt": f"{question} {_ASK}",
      "answer": str(result(*numbers)),
    }
    seen.add(question)
    repeats = 0


def main(folder: pathlib.Path) -> None:
  folder.mkdir(parents=True, exist_ok=True)
  for name, tasks in (
    ("train", _TRAIN),
    ("heldout", _HELDOUT),
    ("harder", _HARDER),
  ):
    with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
      for task, low, high, count in tasks:
        heldout, story = name != "train", name == "harder"
        made = problems(task, low, high, heldout=heldout, story=story)
        for line in itertools.islice(made, count):
          file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
  if len(sys.argv) != 2:
    sys.exit("one argument: the folder that gets the files")
  main(pathlib.Path(sys.argv[1]))
