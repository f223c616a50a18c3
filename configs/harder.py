r"""Puzzles harder than those of n512.py:steps, to look at what was learned.

  python -m brorl_jax.main --mode=evaluate --config=configs/harder.py \
      --workdir=evals/harder

evaluates the embedded policy; --config.policy.checkpoint=RUN evaluates what a
run of n512.py:steps has made of it. The same tasks with more steps and longer
lists. No config trains on them.

Longer numbers instead of more steps were tried first: a run gained .043 there.

Cost: 40 s on 2 cores. Result of seeds 0 to 2: pass@1 .085, .069 and .092 before
a run of n512.py:steps, .160, .157 and .167 after it, +- .03 each (2026-11-27).
"""

from brorl_jax.configs import n512
from brorl_jax.configs.dials import DIALS


def get_config():
  c = n512.get_config("steps")
  for name in c.data.families:
    c.data.families[name].settings = dict(DIALS[name][1])
  c.data.prompt_tokens = 112  # lists of words are longer, up to 88 tokens
  c.sampling.max_new_tokens = 200  # right steps take at most 160
  return c
