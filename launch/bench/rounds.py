r"""What it costs to draw the same rollouts in rounds; one line of JSON.

  python -m launch.bench.rounds
  python -m launch.bench.rounds --config=n512:tiny --prompts=32 --n=256

A step's prompts of a config with its embedded policy, N rollouts each: all at
once in one place per prompt, and in rounds of 16, 64, 256, .. N in chunks of
16, where every prompt runs to the end. Both draw N rollouts of each prompt;
the rewards are 0 and cost nothing. The two take turns, and what is measured is
the second time that a step is drawn: the first compiles, for other sizes in
each step.
"""

import argparse
import importlib
import json
import statistics
import time

import jax
import numpy as np

from brorl_jax import config as sections
from brorl_jax import types
from brorl_jax.main import settings
from brorl_jax.model import huggingface
from brorl_jax.plan import resolve
from brorl_jax.rollout.dynamic_sampling import collect
from brorl_jax.stages import sampling
from brorl_jax.stages.examples import Examples
from brorl_jax.types import ScoredResponse
from brorl_jax.verdicts.base import Verdict

_RIGHT = ScoredResponse("none", Verdict("fail", 0.0), 0.0)


def score(prompts: types.Prompts, rollouts: types.Rollouts) -> types.Scores:
  """Zeros, at once."""
  shape = rollouts.truncated.shape
  responses = np.full(shape, _RIGHT)
  zeros = np.zeros(shape, np.float32)
  return types.Scores(zeros, zeros.astype(int), zeros == 0.0, responses)


def config(name: str, **changes) -> sections.Config:
  """The config of that name, with other values."""
  file, _, preset = name.partition(":")
  of = importlib.import_module(f"brorl_jax.configs.{file}").get_config
  c = of(preset) if preset else of()
  with c.unlocked():
    c.update_from_flattened_dict(changes)
  return settings.typed(c)


def drawer(c: sections.Config, params):
  """A function that draws one step; returns its seconds and its tokens."""
  run = resolve.resolve(c, resolve.here(c.devices))
  examples, phase = Examples(c, run.text), run.phases[0]

  def draw(step: int) -> dict[str, float]:
    key = jax.random.fold_in(jax.random.key(0), step)
    cpu, begin = time.process_time(), time.perf_counter()
    out = collect(
      lambda feed: sampling.stream_rollouts(run, phase, params, feed, key),
      score,
      lambda groups: np.ones(len(groups.prompts.index), bool),
      lambda candidates: examples.prompts(step, candidates),
      range(c.sampling.prompts),
      target=c.sampling.prompts,
      plan=sampling.round_plan(phase),
    )
    return {
      "s": time.perf_counter() - begin,
      "cpu_s": time.process_time() - cpu,
      "rollouts": float(out.groups.rollouts.drawn.sum()),
      "tokens": float(out.groups.rollouts.mask.sum()),
    }

  return draw


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--config", default="n512")
  parser.add_argument("--prompts", type=int, default=8)
  parser.add_argument("--n", type=int, default=512)
  parser.add_argument("--repeats", type=int, default=5)
  asked = parser.parse_args()
  total = {
    "sampling.n": asked.n,
    "sampling.samples": asked.n * asked.prompts,
    "sampling.in_flight": 0,
  }
  after = [n for n in (16, 64, 256) if n < asked.n]
  stop = {"sampling.rounds": (*after, asked.n)}
  both = {
    "fixed": config(asked.config, **total),
    "rounds": config(asked.config, **total, **stop),
  }
  directory = huggingface.locate(both["fixed"].policy.checkpoint)
  _, params = huggingface.load(directory)
  draws = {name: drawer(c, params) for name, c in both.items()}
  found: dict[str, list] = {name: [] for name in draws}
  for measured in (False, True):
    for step in range(asked.repeats):
      for name, draw in draws.items():
        one = draw(step)
        if measured:
          found[name].append(one)
  median = lambda name, what: statistics.median(x[what] for x in found[name])
  print(
    json.dumps(
      {
        "config": asked.config,
        "prompts": asked.prompts,
        "n": asked.n,
        **{
          f"{name}_{what}": median(name, what)
          for name in draws
          for what in ("s", "cpu_s", "rollouts", "tokens")
        },
        **{
          f"ratio_{what}": statistics.median(
            b[what] / a[what]
            for a, b in zip(found["fixed"], found["rounds"], strict=True)
          )
          for what in ("s", "cpu_s")
        },
      }
    )
  )


if __name__ == "__main__":
  main()
