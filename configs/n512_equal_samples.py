r"""A control that the paper lacks: N = 512 with as many samples as n16.py.

  python -m brorl_jax.main --config=configs/n512_equal_samples.py \
      --workdir=runs/n512_equal_samples

1 kept prompt x 512 rollouts per step, and 16 with the other presets. Samples
and learning rate are those of `n16.py`, so only the spread over prompts
differs. One update per step, from all of its prompts: an update from four of 16
would follow only those four.

`n512_equal_samples.py:tiny`: 60 steps, .51 million rollouts, 54 CPU-seconds (2
cores of an AMD EPYC, jax 0.10.2, 2026-11-22, one seed), 1.8 GB. Held-out pass@1
.333 -> .581 +- .040; 96.8 % of prompts kept. The run with answers in steps has
not been measured.
"""

from brorl_jax.configs import base, presets


def get_config(preset: str = "steps"):
  c = base.get_config()
  c.sampling.n = 512
  c.sampling.samples = 16 * 512
  presets.apply(c, preset)
  if preset != "tiny":
    c.optim.minibatches = 1
  return c
