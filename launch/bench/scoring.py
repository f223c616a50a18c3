"""Speed of the scoring pool and of the workers behind it; a line of JSON.

  python -m launch.bench.scoring --workers=2 --answers=16384

question_us     one question to a worker that is hardly any work
fresh_ms        one to a new worker for each, as executed text needs
fraction_ms     two fractions, each pair another one
polynomial_ms   the same on two polynomials that are equal
group_s         512 responses to one prompt, 20 distinct answers, roots
gym_s           --answers responses, no two of them equal, to puzzles of all
                allowed tasks; half of them right. gym_cpu_s is of this
                process, which reads and writes; gym_by_task_ms the slowest
"""

import argparse
import collections
import json
import time
from typing import Any

from brorl_jax.verdicts import gym, pool
from brorl_jax.verdicts.domains import DOMAINS
from brorl_jax.verdicts.sandbox import jail
from brorl_jax.verdicts.sandbox.library_calls import LibraryWorker

PUZZLES = 8  # of each task


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("--workers", type=int, default=2)
  parser.add_argument("--answers", type=int, default=16384)
  flags = parser.parse_args()
  begin = time.perf_counter()
  why = jail.isolation_error()
  out: dict[str, Any] = {
    "workers": flags.workers,
    "walls": why or "up",
    "template_s": time.perf_counter() - begin,
    **questions(),
  }
  verifiers = {name: domain.verify for name, domain in DOMAINS.items()}
  with pool.Pool(verifiers, workers=flags.workers) as scoring:
    jobs = puzzles(flags.answers)
    scoring.score([job for job in jobs[: 4 * flags.workers]])
    root = {"answer": r"2\sqrt{3}"}
    answers = [
      rf"\boxed{{\frac{{{2 * i}\sqrt{{3}}}}{{{i}}}}}" for i in range(1, 21)
    ]
    group = [pool.Job("math", answers[i % 20], root) for i in range(512)]
    out["group_s"], _, judged = timed(scoring, group)
    assert all(one.verdict.reward == 1.0 for one in judged)
    out["gym_answers"] = len(jobs)
    out["gym_s"], out["gym_cpu_s"], judged = timed(scoring, jobs)
  slow: dict[str, float] = collections.defaultdict(float)
  for job, one in zip(jobs, judged, strict=True):
    slow[job.entry["metadata"]["source_dataset"]] += one.seconds
  share = len(slow) / len(jobs)
  out["gym_by_task_ms"] = {
    name: 1e3 * slow[name] * share
    for name in sorted(slow, key=lambda name: -slow[name])[:3]
  }
  out["gym_per_s"] = len(jobs) / out["gym_s"]
  print(json.dumps(out, default=str))


def questions() -> dict[str, float]:
  """Times of one worker's questions."""
  worker = LibraryWorker()
  entry = {"answer": "4", "metadata": {"source_dataset": "gcd"}}

  def mean(count, question) -> float:
    question(0)
    begin = time.perf_counter()
    for i in range(count):
      question(i)
    return (time.perf_counter() - begin) / count

  ask = lambda *args: worker.ask(*args, timeout=30.0)
  fraction = lambda k, i: rf"\frac{{{k * i}}}{{{7 * k}}}"
  out = {
    "question_us": 1e6 * mean(2000, lambda i: ask("symbolic", "4", "4")),
    "fresh_ms": 1e3 * mean(50, lambda i: ask("gym", "4", entry)),
    "fraction_ms": 1e3
    * mean(200, lambda i: ask("symbolic", fraction(1, i), fraction(2, i))),
    "polynomial_ms": 1e3
    * mean(
      50,
      lambda i: ask("symbolic", f"(x+{i})^2", f"x^2+{2 * i}x+{i * i}"),
    ),
  }
  worker.close()
  return out


def puzzles(count: int) -> list[pool.Job]:
  """Jobs with distinct texts, half of them with the right answer."""
  entries = []
  for name in sorted(gym.ALLOWED):
    # The library's default for number_sequence takes 10 s for some puzzles.
    settings = {"max_complexity": 2} if name == "number_sequence" else {}
    family = gym.Family(name, settings)
    entries += [
      gym.puzzle(family, "train", i, seed=0).entry for i in range(PUZZLES)
    ]
  jobs = []
  for i in range(count):
    entry, turn = entries[i % len(entries)], i // len(entries)
    answer = entry["answer"] if turn % 2 else f"{entry['answer']} {turn}"
    jobs.append(pool.Job("gym", f"{turn}<answer>{answer}</answer>", entry))
  return jobs


def timed(scoring: pool.Pool, jobs: list[pool.Job]):
  """Seconds of the wall, seconds of this process's CPU, and the verdicts."""
  cpu, begin = time.process_time(), time.perf_counter()
  judged = scoring.score(jobs)
  wall = time.perf_counter() - begin
  return wall, time.process_time() - cpu, judged


if __name__ == "__main__":
  main()
