"""Queens on a board, two of them placed: constraints that many boards meet.

  python -m launch.revival.queens runs/revival/queens

The prompt is the side of the board and where two queens stand, row and column
from 0, such as "10: 39 47"; the answer is the column of each row's queen, such
as 0639714258 (no two in a column or on a diagonal). The check of
reasoning-gym's `n_queens` accepts the valid answers that an entry lists, here
in that form: all 18 to 25 of each prompt. The wrong answers that are taught are
right ones with two free queens exchanged. taught.py describes the folder.
"""

import argparse
import itertools
import pathlib
import random
from collections import defaultdict
from collections.abc import Iterator

from launch.revival import taught
from launch.revival.taught import Puzzle

FEWEST = 18  # answers; of 10 x 10, 184 prompts have as many
_DIGITS = "0123456789a"

Board = tuple[int, ...]  # the column of each row


def boards(side: int, placed: Board = ()) -> Iterator[Board]:
  """Every one that goes on from the first rows, with no queen attacked."""
  row = len(placed)
  if row == side:
    yield placed
    return
  for column in range(side):
    if all(
      column != other and abs(column - other) != row - r
      for r, other in enumerate(placed)
    ):
      yield from boards(side, (*placed, column))


def puzzles(*, prompts: int, side: int, seed: int) -> list[Puzzle]:
  """Distinct puzzles with at least FEWEST right answers."""
  found = defaultdict[tuple[int, ...], list[Board]](list)
  for board in boards(side):
    for one, other in itertools.combinations(range(side), 2):
      found[one, board[one], other, board[other]].append(board)
  enough = [given for given, right in found.items() if len(right) >= FEWEST]
  chosen = random.Random(seed).sample(sorted(enough), prompts)
  return [_puzzle(side, given, found[given]) for given in chosen]


def _puzzle(side: int, given: tuple[int, ...], right: list[Board]) -> Puzzle:
  one, _, other, _ = given
  at = "".join(_DIGITS[place] for place in given)
  wrong = {
    _exchanged(board, i, j)
    for board in right
    for i, j in itertools.combinations(set(range(side)) - {one, other}, 2)
  }
  text = lambda some: ["".join(_DIGITS[c] for c in b) for b in sorted(some)]
  answers = text(right)
  return Puzzle(
    f"queens-{side}-{at}",
    f"{side}: {at[:2]} {at[2:]}",
    {"source_dataset": "n_queens", "valid_answers": answers},
    answers,
    text(wrong - set(right)),
  )


def _exchanged(board: Board, i: int, j: int) -> Board:
  changed = [*board]
  changed[i], changed[j] = changed[j], changed[i]
  return tuple(changed)


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("directory", type=pathlib.Path)
  parser.add_argument("--scale", type=int, default=1)
  parser.add_argument("--seed", type=int, default=0)
  a = parser.parse_args()
  # 64 prompts a side, as countdown has; one queen more above scale 1.
  side = 10 + (a.scale > 1)
  some = puzzles(prompts=128 * a.scale, side=side, seed=a.seed)
  taught.make(a.directory, some, scale=a.scale, seed=a.seed)


if __name__ == "__main__":
  main()
