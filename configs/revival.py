r"""Arms of the revival experiment, which `launch/reproduce.sh` runs.

  bash launch/reproduce.sh

WING/ARM/SCALE. A wing is a set of prompts (`launch/revival/`), an arm says how
samples are spread over them, and there are SCALE times as many:

  n16                 from which the others go on
  n512_equal_samples  N = 512, as many samples per step
  n512_paper          N = 512, 8 times the samples, a quarter of the prompts
  n512_equal_prompts  N = 512, as many prompts, 32 times the samples
  n16_distinct        as n16 and n512_paper, but each *different* right response
  n512_distinct       of a group gets the same credit

All arms make one update per step, so that prompts per step are prompts per
update. Files, policy, learning rate, seed and the processor seconds of an arm
are given on the command line.
"""

from typing import Any

from configs import base

ARMS = {  # N, prompts per step as a share of those of n16
  "n16": (16, 1.0),
  "n512_equal_samples": (512, 1 / 32),
  "n512_paper": (512, 1 / 4),
  "n512_equal_prompts": (512, 1.0),
  "n16_distinct": (16, 1.0),
  "n512_distinct": (512, 1 / 4),
}
# Prompts per step of n16, longest prompt and response in tokens; above scale 1
# there is one number more, and responses may be half as long again.
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
      f"there is no {which!r}; there are {', '.join(WINGS)} with "
      f"{', '.join(ARMS)}, as in countdown/n16/1"
    )
  c: Any = base.get_config()
  prompts, c.prompt_tokens, c.max_new_tokens = WINGS[wing]
  if int(scale) > 1 and wing != "puzzles":
    c.max_new_tokens += c.max_new_tokens // 2
  c.n, share = ARMS[arm]
  c.samples = c.n * max(int(prompts * int(scale) * share), 1)
  c.in_flight = min(c.samples, 8192)
  c.steps = 100_000  # processor seconds end it
  c.minibatches = 1
  c.warmup = 2  # updates; the arms with the fewest make some 20
  c.kl_weight = 0.0  # nothing but reward and N
  c.credit = "distinct" if "distinct" in arm else "equal"
  c.rows, c.blocks = (8, 64) if c.n == 16 else (32, 16)
  if wing == "puzzles":
    c.max_oversampling = 100  # few of the prompts have a gradient in the end
  else:
    # Each prompt in turn: there are few of them, and that is the point.
    c.keep = "all"
  c.eval_prompts = 960
  # What is trained: the gain of pass@1 at temperature 1, by 16 samples.
  c.eval_temperature, c.eval_top_p = 1.0, 1.0
  c.theory_prompts = 1
  c.keep_checkpoints = 100_000  # each of them is read
  return c
