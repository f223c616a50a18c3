"""Compares two systems that take turns on one machine.

  python -m launch.bench.interleave --rounds=5 --workload=w1 --n=512 \
    --dtype=float32 PYTHON launch.bench.rollout PYTHON PEER.py

Ours and a peer, each an interpreter and a module or a file that uses
protocol.py, whose flags (--model, --prompt, --new, --ends, --lengths) both get.
Both are warm before the first round, and one waits while the other runs, so
that other load affects both alike. Prints one line of JSON with rates in
tokens, those of every round and their medians; a ratio above 1 means that ours
is faster.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys

from launch.bench.protocol import processor

_RATES = {
  "tokens_per_cpu_s": "cpu_s",
  "tokens_per_s": "wall_s",
  # Of a step, for those that train.
  "update_tokens_per_cpu_s": "update_cpu_s",
  "update_tokens_per_s": "update_wall_s",
}


class Failed(Exception):
  """One of the two systems failed."""


class Process:
  """A benchmarked process that waits for its turns.

  Attributes:
    ready: Its first line.
    runs: Its line of each run.
  """

  def __init__(self, name: str, command: list[str]):
    self._name = name
    try:
      self._process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
      )
    except OSError as e:
      raise Failed(f"{name}: {command[0]} does not run: {e.strerror}") from None
    assert self._process.stdin and self._process.stdout
    self._input, self._output = self._process.stdin, self._process.stdout
    self.runs: list[dict] = []

  def warm_up(self) -> None:
    self.ready = self._line()

  def take_turn(self) -> None:
    try:
      self._input.write("\n")
      self._input.flush()
    except BrokenPipeError:
      pass  # the missing line reports it better
    self.runs.append(self._line())

  def _line(self) -> dict:
    line = self._output.readline()
    if not line:
      status = self._process.wait()
      raise Failed(f"{self._name} ended with status {status}, see above")
    try:
      return json.loads(line)
    except ValueError:
      raise Failed(
        f"{self._name} printed {line!r}, which is not JSON"
      ) from None

  def close(self, *, kill: bool) -> None:
    """Ends it; it ends by itself once its input does."""
    if kill:
      self._process.kill()
    try:
      self._input.close()
    except BrokenPipeError:
      pass
    self._process.wait()

  def summary(self) -> dict:
    """Medians of the rates; the most memory."""
    middle = {
      rate: round(statistics.median(self.rates(rate)), 1)
      for rate, seconds in _RATES.items()
      if seconds in self.runs[0]
    }
    return {
      "system": self.ready["system"],
      "versions": self.ready.get("versions", {}),
      **middle,
      **{
        f"every_{rate}": [round(x, 1) for x in self.rates(rate)]
        for rate in ("tokens_per_cpu_s", "tokens_per_s")
      },
      "tokens": [run["tokens"] for run in self.runs],
      "unique": [run["unique"] for run in self.runs],
      **{name: self.ready[name] for name in ("first_run_s", "ready_s")},
      **{
        name: max(run[name] for run in self.runs)
        for name in ("peak_bytes", "memory_above_idle_bytes")
      },
    }

  def rates(self, name: str) -> list[float]:
    """Of each run."""
    return [run["tokens"] / run[_RATES[name]] for run in self.runs]


def command(name: str, python: str, script: str) -> list[str]:
  """Of a system, without its flags.

  Raises:
    Failed: There is no such interpreter or file.
  """
  if not shutil.which(python):
    raise Failed(f"{name}: no interpreter {python}; give the path of one")
  if not script.endswith(".py"):
    return [python, "-m", script]
  if not os.path.isfile(script):
    raise Failed(f"{name}: no file {script}; give a module or a file")
  return [python, script]


def compare(ours: Process, peer: Process) -> dict:
  """Summaries and ratios of the rates."""
  both = {"ours": ours.summary(), "peer": peer.summary()}
  ratios = {}
  for name in sorted(set(both["ours"]) & set(both["peer"]) & set(_RATES)):
    each = [
      round(a / b, 3)
      for a, b in zip(ours.rates(name), peer.rates(name), strict=True)
    ]
    ratio = round(both["ours"][name] / both["peer"][name], 3)
    ratios[name] = {"of_medians": ratio, "min": min(each), "max": max(each)}
    ratios[name]["rounds"] = each
  return {**both, "ratio": ratios}


def main() -> None:
  parser = argparse.ArgumentParser(allow_abbrev=False)
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--workload", default="w1")
  parser.add_argument("--prompts", type=int, help="the workload's if not given")
  parser.add_argument("--n", type=int, default=512)
  parser.add_argument("--dtype", default="float32")
  parser.add_argument("commands", nargs=4, metavar="PYTHON SCRIPT")
  flags, more = parser.parse_known_args()
  if flags.rounds < 1:
    parser.error(f"--rounds={flags.rounds} must be at least 1")
  task = {k: getattr(flags, k) for k in ("workload", "n", "dtype")}
  if flags.prompts is not None:
    task["prompts"] = flags.prompts
  asked = ["--serve", *(f"--{k}={v}" for k, v in task.items()), *more]
  start = os.getloadavg()
  processes: list[Process] = []
  done = False
  try:
    # Both before ours takes minutes to be warm.
    commands = {
      "ours": command("ours", *flags.commands[:2]),
      "the peer": command("the peer", *flags.commands[2:]),
    }
    for name, words in commands.items():
      processes.append(Process(name, [*words, *asked]))
      processes[-1].warm_up()
      system = processes[-1].ready["system"]
      print(f"* {system} is ready", file=sys.stderr, flush=True)
    for number in range(1, flags.rounds + 1):
      # Whoever follows may find the machine warmer: first by turns too.
      for process in processes[:: 1 if number % 2 else -1]:
        process.take_turn()
      rates = [round(p.rates("tokens_per_cpu_s")[-1]) for p in processes]
      print(
        f"* round {number}/{flags.rounds}: {rates[0]} and {rates[1]} tokens "
        "per CPU-second",
        file=sys.stderr,
        flush=True,
      )
    done = True
  except Failed as e:
    sys.exit(f"error: {e}")
  finally:
    for process in processes:
      process.close(kill=not done)
  load = {"start": start, "end": os.getloadavg()}
  result = {
    **task,
    "flags": more,
    "rounds": flags.rounds,
    **compare(*processes),
    "load_average": {k: [round(x, 2) for x in v] for k, v in load.items()},
    "cpus": os.cpu_count(),
    "processor": processor(),
  }
  print(json.dumps(result))


if __name__ == "__main__":
  main()
