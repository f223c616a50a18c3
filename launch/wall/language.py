"""The wall of a language model: which prompts of arithmetic a run leaves.

  python -m launch.wall.language runs/language --policy=FOLDER --seed=0
  python -m launch.wall.language runs/language/results

The first runs every arm of `ARMS` with this seed, one after the other, and
writes what it found to runs/language/results; repeated, it resumes. FOLDER is
the model as third_party/models/smollm2.py writes it. A run ends when its steps
have taken `--cpu_s` CPU-seconds; with a core for each seed (`taskset -c 0`) the
seeds run side by side. The second prints the tables.
"""

import argparse
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import brorl_jax
from brorl_jax.configs import arithmetic, presets
from brorl_jax.model import tokenizer
from brorl_jax.rollout import prefixes
from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.rollout.slots import RolloutSpec
from brorl_jax.runs import checkpoints, metrics
from brorl_jax.types import Prompts
from launch.wall import arms, exact, report, study
from launch.wall import run as runs

# Their p lies in [1/512, 1/16] by `SAMPLES` responses. A prompt is dead if none
# of so many is right.
PROMPTS = pathlib.Path(__file__).with_name("language.jsonl")
SAMPLES = 2048
_TOGETHER = 8  # prompts
_LONG = 100_000  # steps; the time ends a run
LEVELS = (0.2, 0.3, 0.4)  # of pass@1, at which arms are compared


class Arm(NamedTuple):
  """One line of the experiment; all else is that of the preset `smollm2`."""

  n: int
  prompts: int  # of a step
  save_every: int  # steps: about half a run of 900 CPU-seconds
  config: str = "n512"
  kind: str = "maxrl"  # advantage.kind


ARMS = {
  "n16": Arm(16, 8, 60),
  "n512": Arm(512, 8, 5),
  "need": Arm(512, 8, 8, "need"),
  "n16-8x-prompts": Arm(16, 64, 10),
  "n512-whitened": Arm(512, 8, 5, kind="tokens"),
}


def flags(arm: Arm, policy: str, *, seed: int) -> list[str]:
  """The command line of a run, without --workdir."""
  fields: dict[str, object] = {
    "policy.checkpoint": policy,
    "data.files": f"('{PROMPTS}',)",
    "sampling.samples": arm.n * arm.prompts,
    "sampling.n": arm.n,
    "advantage.kind": arm.kind,
    "filter.keep": "all",
    "run.seed": seed,
    "run.steps": _LONG,
    "run.save_every": arm.save_every,
    "run.keep_checkpoints": _LONG,
    "eval.every": _LONG,
    "eval.prompts": 1,
    "eval.n": 1,
  }
  given = [f"--config.{field}={value}" for field, value in fields.items()]
  return [f"--config=configs/{arm.config}.py:smollm2", *given]


def sampled(
  policy: Any, prompts: Sequence[Mapping[str, Any]], n: int, seed: int = 0
) -> list[list[str]]:
  """n responses to each prompt."""
  found, text = [], policy.tokenizer
  # Rollouts that begin alike share rows: a policy that has learnt has few ways
  # to begin, and 512 responses to a prompt take seconds.
  spec = RolloutSpec(
    policy=policy.policy,
    sampling=SamplingParams(temperature=0.6),
    stop_ids=text.stop_ids,
    n=n,
    max_new_tokens=12,
    slots=n,
    lanes=_TOGETHER,
  )
  for i in range(0, len(prompts), _TOGETHER):
    some = prompts[i : i + _TOGETHER]
    # As many each time, for which programs are compiled.
    asked = [*some, *[some[0]] * (_TOGETHER - len(some))]
    read = [text.render(policy.posed(one["prompt"])) for one in asked]
    out = prefixes.rollouts(
      spec,
      policy.params,
      Prompts(*tokenizer.left_pad(read, 80), np.arange(_TOGETHER)),
      jax.random.fold_in(jax.random.key(seed), i),
    )
    for tokens, mask in zip(out.tokens, out.mask, strict=True):
      rows = zip(tokens, mask, strict=True)
      found.append(text.decode([ids[keep].tolist() for ids, keep in rows]))
  return found[: len(prompts)]


def shares(
  said: Sequence[Sequence[str]], prompts: Sequence[Mapping[str, Any]]
) -> np.ndarray:
  """[P]: the share of right responses."""
  each = zip(said, prompts, strict=True)
  return np.array(
    [np.mean([arithmetic.score(x, one) for x in row]) for row, one in each]
  )


def pass_rates(policy: Any, prompts: Sequence[Mapping[str, Any]]) -> np.ndarray:
  """[P, 1]: the share of right responses: of 64, and where none of these is
  right of as many times 512 as it takes to get a right one, `SAMPLES` at most.
  """
  p = shares(sampled(policy, prompts, 64), prompts)
  for part in range(1, SAMPLES // 512 + 1):
    left = [i for i, share in enumerate(p) if not share]
    some = [prompts[i] for i in left]
    p[left] = shares(sampled(policy, some, 512, part), some) / part
  return p[:, None]


def curve(
  folder: pathlib.Path, policy: str
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
  """The start and the checkpoints of a run: p of its prompts, and of those that
  are held out by 8 responses each.
  """
  prompts = exact.lines_of(PROMPTS)
  heldout = exact.lines_of(presets.ARITHMETIC / "heldout.jsonl")
  start = np.array([[one[f"right_of_{SAMPLES}"]] for one in prompts]) / SAMPLES
  for step in checkpoints.steps(folder / "checkpoints"):
    path = folder / "checkpoints" / str(step) if step else policy
    now = brorl_jax.load(path)
    p = pass_rates(now, prompts) if step else start
    yield step, p, shares(sampled(now, heldout, 8), heldout)[:, None]


def run(
  name: str, root: pathlib.Path, *, seed: int, policy: str, cpu_s: float
) -> None:
  """One run of an arm, with its result; SystemExit names the log."""
  folder = root / "runs" / f"{name}-{seed}"
  if spent(folder) < cpu_s:
    enough = lambda: spent(folder) >= cpu_s
    given = flags(ARMS[name], policy, seed=seed)
    runs.train(folder, given, os.sched_getaffinity(0), enough)
  found = arms.measured(folder, curve(folder, policy))
  arms.write(root / "results" / name / f"{seed}.json", found)
  shutil.rmtree(folder / "checkpoints")  # of 1.6 GB each
  ended = {k: values[-1] for k, values in found["points"].items()}
  print(f"{name}, seed {seed}: {ended}", flush=True)


def spent(folder: pathlib.Path) -> float:
  """CPU-seconds of the steps of a run."""
  path = folder / "metrics.jsonl"
  log = metrics.read_lines(path) if path.exists() else []
  return sum(line["time/busy_s"] for line in log)


def tables(results: study.Results) -> list[str]:
  """Arms at equal CPU-seconds, and their dead prompts where pass@1 first
  reaches a level; * of one of several seeds.
  """
  names = [name for name in report.FIRST if name in results]
  at = study.end(results, names, "busy_s")
  rows = []
  for name, x in study.at_equal(results, names, "busy_s", at).items():
    some = (report.number(x[k]) for k in ("pass_at_1", "dead", "heldout"))
    row = [report.FIRST[name], *some, f"{x['samples']:,.0f}", x["seeds"]]
    for level in LEVELS:
      found = study.at_progress(results[name], level)
      few = found and found["seeds"] < x["seeds"]
      dead = report.short(found["dead"]["mean"]) if found else ""
      row.append(dead + "*" * bool(few))
    rows.append(row)
  head = [f"at {at:,.0f} CPU-s", "pass@1", "dead", "held-out", "rollouts"]
  levels = [f"dead at {report.short(level, 1)}" for level in LEVELS]
  return report.table([*head, "seeds", *levels], rows)


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("where", type=pathlib.Path)
  add = parser.add_argument
  add("--policy", help="folder of the model; without it the tables are printed")
  add("--arms", default=",".join(ARMS), help="what to run")
  add("--seed", type=int, default=0)
  add("--cpu_s", type=float, default=900.0, help="CPU-seconds of a run")
  a = parser.parse_args()
  if unknown := {*a.arms.split(",")} - {*ARMS}:
    known = ", ".join(ARMS)
    raise SystemExit(f"error: --arms={min(unknown)} is not one of {known}")
  if a.cpu_s <= 0:
    raise SystemExit(f"error: --cpu_s={a.cpu_s:g}: give more than 0")
  if a.policy is None:
    print("\n".join(tables(arms.read(a.where))))
    return
  root, policy = a.where.absolute(), os.path.abspath(a.policy)
  for name in a.arms.split(","):
    if not (root / "results" / name / f"{a.seed}.json").exists():
      run(name, root, seed=a.seed, policy=policy, cpu_s=a.cpu_s)


if __name__ == "__main__":
  main()
