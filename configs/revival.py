r"""Arms of the revival experiment, which `launch/reproduce.sh` runs.

  bash launch/reproduce.sh

The argument is WING/ARM/SCALE. A wing is a set of prompts (`launch/revival/`),
an arm spreads samples over prompts, and SCALE multiplies the prompts:

  n16                 the arm whose checkpoint the others continue
  n512_equal_samples  N = 512, as many samples per step
  n512_paper          N = 512, 8 times the samples, a quarter of the prompts
  n512_equal_prompts  N = 512, as many prompts, 32 times the samples
  n16_distinct        as n16 and n512_paper, but each *different* right response
  n512_distinct       of a group gets the same credit
  n16_maxrl           as n16 and n512_paper, with MaxRL's advantages
  n512_maxrl
  n16_maxrl_wide      the samples of n512_maxrl, on 8 times the prompts of n16
  adaptive            as many prompts as n16, each with 16 to 512 rollouts,
  adaptive_maxrl      until four are right and four are wrong

The last five are those of `launch/revival/objectives.py`.
All arms make one update per step, so prompts per step are prompts per update.
The command line gives files, policy, learning rate, seed and the CPU seconds of
an arm.
"""

from typing import Any

from brorl_jax.configs import base

ARMS = {  # N, prompts per step as a share of those of n16
  "n16": (16, 1.0),
  "n512_equal_samples": (512, 1 / 32),
  "n512_paper": (512, 1 / 4),
  "n512_equal_prompts": (512, 1.0),
  "n16_distinct": (16, 1.0),
  "n512_distinct": (512, 1 / 4),
  "n16_maxrl": (16, 1.0),
  "n512_maxrl": (512, 1 / 4),
  "n16_maxrl_wide": (16, 8.0),
  "adaptive": (512, 1.0),
  "adaptive_maxrl": (512, 1.0),
}
# Prompts per step of n16, longest prompt and response in tokens. Above scale 1
# questions have one more number, and responses may be half as long again.
WINGS = {
  "puzzles": (64, 40, 6),
  "countdown": (32, 16, 12),
  "queens": (32, 16, 12),
  "paths": (32, 16, 32),
}


def get_config(which: str = "countdown/n16/1"):
  wing, arm, scale = [*which.split("/"), "1"][:3]
  if wing not in WINGS or arm not in ARMS or not scale.isdigit():
    raise ValueError(
      f"{which!r} is not WING/ARM/SCALE, such as countdown/n16/1; wings: "
      f"{', '.join(WINGS)}; arms: {', '.join(ARMS)}"
    )
  c: Any = base.get_config()
  prompts, c.data.prompt_tokens, c.sampling.max_new_tokens = WINGS[wing]
  if int(scale) > 1 and wing != "puzzles":
    c.sampling.max_new_tokens += c.sampling.max_new_tokens // 2
  c.sampling.n, share = ARMS[arm]
  c.sampling.samples = c.sampling.n * max(int(prompts * int(scale) * share), 1)
  c.sampling.in_flight = min(c.sampling.samples, 8192)
  if "adaptive" in arm:
    c.sampling.allocation, c.sampling.in_flight = "stop", 0
    c.sampling.groups = c.sampling.samples // c.sampling.n
  if "maxrl" in arm:
    c.advantage.kind = "maxrl"
  c.run.steps = 100_000  # run.max_busy_s ends the run
  c.optim.minibatches = 1
  c.optim.warmup = 2  # updates; the shortest arms make about 20
  c.reference.kl_weight = 0.0  # so that only reward and N matter
  c.advantage.credit = "distinct" if "distinct" in arm else "equal"
  if wing == "puzzles":
    c.filter.max_oversampling = 100  # few prompts have a gradient at the end
  else:
    # There are few prompts, and each one is trained in turn.
    c.filter.keep = "all"
  c.eval.prompts = 960
  # Measures what is trained: pass@1 at temperature 1, from 16 samples.
  c.eval.temperature, c.eval.top_p = 1.0, 1.0
  c.theory.prompts = 1
  c.run.keep_checkpoints = 100_000  # the report reads every checkpoint
  return c
