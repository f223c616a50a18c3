r"""A control that the paper lacks: N = 512 with as many samples as n16.py.

  python -m brorl_jax.main --config=configs/n512_equal_samples.py \
      --workdir=runs/n512_equal_samples

16 kept prompts x 512 rollouts. Samples and learning rate are those of `n16.py`,
so only the spread over prompts differs. On a laptop the number of updates is
the same too. The presets make one update per step, from all 16 prompts, because
an update from four prompts would follow only those four.

Cost: 60 steps, .51 million rollouts, 54 CPU-seconds (2 cores of an AMD EPYC,
jax 0.10.2, 2026-11-22, one seed), 1.8 GB.
Result: held-out pass@1 .333 -> .581 +- .040; 96.8 % of prompts kept.
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
