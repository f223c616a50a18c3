r"""Measures the speed of scoring programs in the jail; prints one line.

  python -m launch.bench.code_scoring --programs=512 --tests=20 --threads=2

Each of the programs is another text, of twenty lines, and right. call: one
process per program. stdio: one for a few tests. Seconds are of the wall, the
jails are warm before, and what the jail uses is not in the CPU time of anyone
who could be asked: compare on an idle machine.
"""

import argparse
import concurrent.futures
import json
import os
import threading
import time

from brorl_jax.verdicts import code
from brorl_jax.verdicts.sandbox.jail import require

SOLUTION = """
import sys
from collections import Counter, defaultdict

# Program number {number}.

def most(numbers):
  counts = Counter(numbers)
  places = defaultdict(list)
  for i, n in enumerate(numbers):
    places[n].append(i)
  best = None
  for n, count in counts.items():
    key = (-count, places[n][0])
    if best is None or key < best[0]:
      best = key, n
  return best[1] if best else {number}

if __name__ == "__main__":
  count, *numbers = map(int, sys.stdin.read().split())
  print(most(numbers))
"""


def tests(kind: str, count: int) -> dict:
  rows = [[(i * k * k) % 17 for k in range(1, 50)] for i in range(1, count + 1)]
  most = [max(r, key=lambda n, r=r: (r.count(n), -r.index(n))) for r in rows]
  if kind == "call":
    return {"inputs": [[r] for r in rows], "outputs": most, "fn_name": "most"}
  lines = [f"{len(r)}\n{' '.join(map(str, r))}\n" for r in rows]
  return {"inputs": lines, "outputs": [f"{m}\n" for m in most]}


def measure(kind: str, args: argparse.Namespace) -> dict[str, float]:
  level = require(allow_inner=True)
  local = threading.local()
  jails = []
  wanted = tests(kind, args.tests)

  def start() -> None:
    local.jail = level.zygote()
    jails.append(local.jail)
    judge(-1)

  def judge(number: int) -> str:
    program = SOLUTION.format(number=number)
    return code.verify(program, wanted, jail=local.jail).status

  with concurrent.futures.ThreadPoolExecutor(
    args.threads, initializer=start
  ) as pool:
    list(pool.map(lambda _: time.sleep(0.2), range(args.threads)))  # all warm
    begin = time.perf_counter()
    statuses = list(pool.map(judge, range(args.programs)))
    seconds = time.perf_counter() - begin
  for jail in jails:
    jail.close()
  assert set(statuses) == {"pass"}, set(statuses)
  return {
    f"{kind}_s": round(seconds, 2),
    f"{kind}_programs_per_s": round(args.programs / seconds, 1),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--programs", type=int, default=512)
  parser.add_argument("--tests", type=int, default=20)
  parser.add_argument("--threads", type=int, default=2)
  args = parser.parse_args()
  level = require(allow_inner=True)
  line = {
    "bench": "code_scoring",
    **vars(args),
    "level": level.name,
    "python": level.version,
    "cpus": len(os.sched_getaffinity(0)),
    "load": round(os.getloadavg()[0], 1),
    **measure("call", args),
    **measure("stdio", args),
  }
  print(json.dumps(line))


if __name__ == "__main__":
  main()
