r"""The control that the paper lacks: N = 512 with as many samples as n16.py.

  python -m brorl_jax.main --config=configs/n512_equal_samples.py \
      --workdir=runs/n512_equal_samples

16 kept prompts x 512 rollouts: samples and learning rate are those of `n16.py`,
so that what differs is how they are spread over prompts. So is the number of
updates on a laptop; the presets make one per step, of all its prompts, because
one of four prompts would follow these four.

Cost: 60 steps, .51 million rollouts, 54 CPU-seconds (2 cores of an AMD EPYC,
jax 0.10.2, 2026-11-22, one seed), 1.8 GB.
Result: held-out pass@1 .333 -> .581 +- .040; 96.8 % of prompts kept.
"""

from configs import base, presets


def get_config(preset: str = "tiny"):
  c = base.get_config()
  c.n = 512
  c.samples = 16 * 512
  presets.apply(c, preset)
  if preset != "tiny":
    c.minibatches = 1
  return c
