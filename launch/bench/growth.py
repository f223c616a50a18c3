r"""How CPU time and memory grow with N, T, S and V.

  python -m launch.bench.growth                              # half an hour
  python -m launch.bench.growth --part=rollout --axis=n --axis=t

  n   responses of a prompt
  t   tokens of a response
  s   tokens of the prompt
  v   the vocabulary

Part rollout measures `launch.bench.rollout`, part update
`launch.bench.update`: w1, its model and lengths, of which one size changes.
Every point is its own process, so that its peak of memory is its own, and
has a line of JSON. --sizes replaces the sizes of one axis; all other flags go
to what is measured:

  python -m launch.bench.growth --part=update --axis=n --sizes=8,16,32 \
    --model=512x8 --prompt=64

The last line has the exponents, standard error a table. An exponent is the
least-squares slope of log y on log x over the upper half of the sizes, where
what does not grow matters least; `steps` are the slopes from each size to the
next. Both stand beside those of the operations and of the bytes that the work
cannot do without. In T and S operations grow faster than sizes because of
attention alone, whose share of them at the largest size is given; there `apart`
says which rates of attention and of the others explain the time, and how well.

  cpu_s          the least of the runs after the first, which compiles: other
                 work on the machine only adds to it
  memory_bytes   most during any run, above the process with its weights; that
                 of the compiler is in it, which small sizes show
"""

import argparse
import dataclasses
import json
import math
import operator
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from launch.bench import protocol, rollout, update
from launch.bench.interleave import Failed, Process

# The flag of the axis, and its sizes.
AXES = {
  "n": ("n", (16, 64, 256, 512, 1024, 2048)),
  "t": ("new", (64, 256, 1024, 2048, 4096)),
  "s": ("prompt", (128, 512, 1024, 2048, 4096)),
  "v": ("vocab", (2048, 8192, 32768, 65536, 151936)),
}
# So few responses that the largest size takes a minute. Those of an update fill
# their block, or it would compute padding.
FIXED = {
  "rollout": {"n": [], "t": ["--n=16"], "s": ["--n=64"], "v": ["--n=16"]},
  "update": {
    "n": ["--rows=16"],
    "t": ["--n=4", "--rows=4"],
    "s": ["--n=16", "--rows=16"],
    "v": ["--n=16", "--rows=16"],
  },
}
WORKLOADS = {"rollout": "w1", "update": "l1"}
# Operations; more are run once after the first run, fewer three times. 4 to 8
# CPU-seconds of what rollouts do here.
_LONG = 4e11
# Of a point, in the order of the table.
MEASURED = "cpu_s", "memory_bytes", "operations", "least_bytes"


@dataclasses.dataclass(frozen=True)
class Point:
  """One size of one axis, with all flags of its process."""

  part: str
  axis: str
  size: int
  flags: list[str]

  def line(self) -> dict[str, Any]:
    """Measures it.

    Raises:
      Failed: Its process did.
    """
    task, _ = protocol.parse(
      default=WORKLOADS[self.part],
      more=update.add_flags if self.part == "update" else lambda parser: None,
      argv=self.flags,
    )
    counted = _counted(self.part, task)
    repeats = 1 if counted["operations"] > _LONG else 3
    run = _rollout if self.part == "rollout" else _update
    w = task.workload
    return {
      "part": self.part,
      "axis": self.axis,
      "size": self.size,
      **{"n": task.n, "t": w.new, "s": w.prompt, "v": w.model.vocab},
      **run(self, repeats),
      **counted,
    }


def _counted(part: str, task: protocol.Task) -> dict[str, float]:
  """What the work cannot do without."""
  w = task.workload
  lengths = w.drawn(task.n * len(task.prompts), 0)
  # Without width only products of queries, keys and values are left.
  alone = dataclasses.replace(w.model, width=0)
  only = dataclasses.replace(w, model=alone)
  if part == "update":
    count = lambda w: update.work(w, len(task.prompts), lengths)
    return {"operations": count(w), "of_attention": count(only)}
  size = 2 if task.dtype == "bfloat16" else 4
  count = lambda w: rollout.work(w, lengths, size, task.slots)
  flops, least_bytes = count(w)
  return {
    "operations": flops,
    "of_attention": count(only)[0],
    "least_bytes": least_bytes,
  }


def _rollout(point: Point, repeats: int) -> dict[str, Any]:
  command = [sys.executable, "-m", "launch.bench.rollout", *point.flags]
  process = Process(f"{point.axis} = {point.size}", [*command, "--serve"])
  done = False
  try:
    process.warm_up()
    for _ in range(repeats):
      process.take_turn()
    done = True
  finally:
    process.close(kill=not done)
  runs = process.runs
  return {
    "cpu_s": min(run["cpu_s"] for run in runs),
    "wall_s": min(run["wall_s"] for run in runs),
    "every_cpu_s": [run["cpu_s"] for run in runs],
    "memory_bytes": max(run["memory_above_idle_bytes"] for run in runs),
    "idle_bytes": process.ready["idle_bytes"],
    "first_run_s": process.ready["first_run_s"],
  }


def _update(point: Point, repeats: int) -> dict[str, Any]:
  command = [sys.executable, "-m", "launch.bench.update", *point.flags]
  done = subprocess.run(
    [*command, f"--repeats={repeats}"], stdout=subprocess.PIPE, text=True
  )
  if done.returncode:
    raise Failed(
      f"{point.axis} = {point.size} ended with status {done.returncode}, see "
      "above"
    )
  line = json.loads(done.stdout)
  return {
    "cpu_s": min(line["every_update_cpu_s"]),
    "wall_s": line["update_s"],
    "every_cpu_s": line["every_update_cpu_s"],
    "memory_bytes": line["peak_bytes"] - line["idle_bytes"],
    "idle_bytes": line["idle_bytes"],
    "first_run_s": line["first_update_s"],
    "programs": line["programs"],
    "padding_fraction": line["padding_fraction"],
  }


def upper_half(count: int) -> slice:
  """Of sizes in ascending order the ones that are fitted, two or more."""
  return slice(max(min(count // 2, count - 2), 0), None)


def exponents(
  sizes: Sequence[float], values: Sequence[float]
) -> dict[str, Any]:
  """Of values that grow as a power of the size, if they do.

  Args:
    sizes: Two or more, ascending.
    values: Of each; positive.

  Returns:
    The slope of log value on log size over the upper half of the sizes, and
    from every size to the next.
  """
  # Where the system does not tell memory it is 0.
  x, y = ([math.log(max(v, 1e-9)) for v in of] for of in (sizes, values))
  half = upper_half(len(x))
  pairs = zip(x, x[1:], y, y[1:], strict=False)
  return {
    "exponent": round(statistics.linear_regression(x[half], y[half]).slope, 3),
    "steps": [round((d - c) / (b - a), 3) for a, b, c, d in pairs],
  }


def apart(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
  """Seconds as operations of attention and others, each at its own rate.

  By least squares of the relative errors over the upper half of the sizes. If
  something else grew faster than both, the error would be large.

  Returns:
    CPU-seconds of 1e9 operations of both, and the largest relative error.
  """
  lines = lines[upper_half(len(lines))]
  v = [line["of_attention"] / line["cpu_s"] for line in lines]
  both = [line["operations"] / line["cpu_s"] for line in lines]
  u = list(map(operator.sub, both, v))
  dot = lambda x, y: sum(map(operator.mul, x, y))
  uu, uv, vv = dot(u, u), dot(u, v), dot(v, v)
  # a u + b v = 1 for every size.
  a = (sum(u) * vv - sum(v) * uv) / (uu * vv - uv**2)
  b = (sum(v) * uu - sum(u) * uv) / (uu * vv - uv**2)
  if a < 0:
    a, b = 0.0, sum(v) / vv
  elif b < 0:
    a, b = sum(u) / uu, 0.0
  errors = [abs(a * x + b * y - 1) for x, y in zip(u, v, strict=True)]
  return {
    "others_s": round(a * 1e9, 4),
    "attention_s": round(b * 1e9, 4),
    "largest_error": round(max(errors), 3),
  }


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """Exponents of one axis of one part, from its lines in ascending order."""
  sizes, last = [line["size"] for line in lines], lines[-1]
  return {
    "sizes": sizes,
    **{
      name: exponents(sizes, [line[name] for line in lines])
      for name in MEASURED
      if name in last
    },
    "attention_share": round(last["of_attention"] / last["operations"], 3),
    # In the others both grow alike, or attention not at all.
    **({"apart": apart(lines)} if last["axis"] in "ts" else {}),
  }


def table(found: dict[str, dict[str, Any]]) -> list[str]:
  """Exponents over the upper half, and in brackets those of the last step."""
  rows = [["", "sizes fitted", *MEASURED, "attention", "error"]]
  for part, axes in found.items():
    for axis, of in axes.items():
      fitted = of["sizes"][upper_half(len(of["sizes"]))]
      cells = [
        f"{of[m]['exponent']:.2f} ({of[m]['steps'][-1]:.2f})" if m in of else ""
        for m in MEASURED
      ]
      share = f"{of['attention_share']:.0%}"
      sizes = f"{fitted[0]:,} to {fitted[-1]:,}"
      error = f"{of['apart']['largest_error']:.0%}" if "apart" in of else ""
      rows.append([f"{part} {axis}", sizes, *cells, share, error])
  wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
  padded = lambda row: zip(row, wide, strict=True)
  return ["  ".join(f"{c:{w}}" for c, w in padded(row)) for row in rows]


def points(part: str, axis: str, sizes: Sequence[int], more: list[str]):
  """Every size of an axis; `more` are flags that replace the usual ones."""
  flag, usual = AXES[axis]
  given = [f"--workload={WORKLOADS[part]}", *FIXED[part][axis], *more]
  for size in sizes or usual:
    yield Point(part, axis, size, [*given, f"--{flag}={size}"])


def _sizes(text: str) -> list[int]:
  try:
    sizes = [int(x) for x in text.split(",")]
  except ValueError:
    sizes = []
  if len(sizes) < 2 or sizes != sorted(set(sizes)) or sizes[0] < 1:
    raise argparse.ArgumentTypeError(f"{text!r} is not two or more, ascending")
  return sizes


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument("--part", choices=list(FIXED), action="append")
  parser.add_argument("--axis", choices=list(AXES), action="append")
  parser.add_argument("--sizes", type=_sizes, help="ascending, as 16,64,256")
  flags, more = parser.parse_known_args()
  axes = flags.axis or list(AXES)
  if flags.sizes and len(axes) > 1:
    parser.error("--sizes are of one --axis")
  start, found = os.getloadavg(), {}
  try:
    for part in flags.part or FIXED:
      found[part] = {}
      for axis in axes:
        lines = []
        for point in points(part, axis, flags.sizes, more):
          lines.append(point.line())
          print(json.dumps(lines[-1]), flush=True)
        found[part][axis] = summary(lines)
  except Failed as e:
    sys.exit(f"error: {e}")
  print("\n".join(table(found)), file=sys.stderr)
  load = {"start": start, "end": os.getloadavg()}
  result = {
    "exponents": found,
    "flags": more,
    "load_average": {k: [round(x, 2) for x in v] for k, v in load.items()},
    "cpus": os.cpu_count(),
    "processor": protocol.processor(),
  }
  print(json.dumps(result))


if __name__ == "__main__":
  main()
