"""Steps of path_star: the edges from the goal back to the start."""

from __future__ import annotations

import re

from launch.embedded.steps.pen import Entry, Pen, Task


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


def _merge(first: str, second: str) -> str | None:
  """`5 7` and `2 5` give `2 5 7`."""
  before, _, node = second.rpartition(" ")
  return f"{before} {first}" if first.split()[0] == node else None


TASKS = {"path_star": Task(_path_star, _merge, drop=False)}
