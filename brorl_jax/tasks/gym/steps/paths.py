"""Steps of path_star: the edges from the goal back to the start."""

from __future__ import annotations

import itertools
import re

from brorl_jax.tasks.gym.steps.equation import LONGEST_LINE
from brorl_jax.tasks.gym.steps.pen import Pen
from brorl_jax.tasks.gym.steps.task import Entry, Task

_NODES = re.compile(r"[0-9]{1,9}(?: [0-9]{1,9})+")


def _edges(entry: Entry) -> list[tuple[int, int]]:
  # The text before the last blank line has an example.
  graph = entry["question"].strip().rpartition("\n")[2].partition("/")[0]
  found = re.findall(r"(\d+) (\d+)", graph)
  return [(int(start), int(end)) for start, end in found]


def _path_star(entry: Entry, pen: Pen) -> str:
  start, node = entry["metadata"]["center"], entry["metadata"]["goal"]
  edges = _edges(entry)
  before = {end: start for start, end in edges}
  path = [node]
  while node != start:
    # Another node that has an edge, but none to a node of the path.
    slips = [a for a, b in edges if a not in path]
    line = lambda a, b=node: f"{a} {b}"
    node = pen.step(before[node], line, slips)
    path.append(node)
  if entry["answer"].split()[0] == str(start):
    path.reverse()
  return " ".join(map(str, path))


class _Path:
  """Judges edges: each must lie on the one way from start to goal.

  Off that way only the first step is wrong; edges that lead on from there are
  right.
  """

  def __init__(self, entry: Entry, lines: list[str]):
    del lines
    nodes = [str(node) for node in entry["metadata"]["goal_path"]]
    self._way, self._nodes = {*itertools.pairwise(nodes)}, {*nodes}
    self._edges = {(str(a), str(b)) for a, b in _edges(entry)}
    self._stray: set[str] = set()

  def read(self, text: str, stands: bool) -> bool | None:
    if len(text) > LONGEST_LINE or not _NODES.fullmatch(text):
      return None
    nodes = text.split()
    right = all(map(self._follows, itertools.pairwise(nodes)))
    if stands:
      self._stray.update({*nodes} - self._nodes)
    return right

  def _follows(self, edge: tuple[str, str]) -> bool:
    off = edge in self._edges and not self._stray.isdisjoint(edge)
    return edge in self._way or off


def _merge(first: str, second: str) -> str | None:
  """`5 7` and `2 5` give `2 5 7`."""
  before, _, node = second.rpartition(" ")
  return f"{before} {first}" if first.split()[0] == node else None


TASKS = {"path_star": Task(_path_star, _Path, _merge, drop=False)}
