r"""A control that the paper lacks: N = 512 with as many samples as n16.py.

  python -m brorl_jax.main --config=configs/n512_equal_samples.py \
      --workdir=runs/n512_equal_samples

1 kept prompt x 512 rollouts per step, and 16 with the other presets. Samples
are those of `n16.py`, so only the spread over prompts differs, and with answers
in steps the learning rate, which each of the two has at its best. One update
per step, from all of its prompts: an update from four of 16 would follow only
those four.

Cost: 60 steps, 31,000 rollouts, 3 minutes, 130 CPU-seconds without compiling
and evaluations (an AMD EPYC, jax 0.10.2, 2026-11-27). Result of seeds 0 to 2:
held-out pass@1 .256 -> .442, .262 -> .380 and .242 -> .376, +- .05 each; 99 %
of prompts kept.

`n512_equal_samples.py:tiny`: 60 steps, .51 million rollouts, 54 CPU-seconds (2
cores of an AMD EPYC, jax 0.10.2, 2026-11-22, one seed), 1.8 GB. Held-out pass@1
.333 -> .581 +- .040; 96.8 % of prompts kept.
"""

from brorl_jax.configs import base, presets


def get_config(preset: str = "steps"):
  c = base.get_config()
  c.sampling.n = 512
  c.sampling.samples = 16 * 512
  presets.apply(c, preset)
  if preset != "tiny":
    c.optim.minibatches = 1
  if preset == "steps":
    # One prompt decides an update. Seed 7: 3e-5 .343, 1e-4 .418, 3e-4 .186.
    c.optim.lr = 1e-4
  return c
