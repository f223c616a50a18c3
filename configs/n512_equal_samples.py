r"""The control that the paper lacks: N = 512 with as many samples as n16.py.

  python -m brorl_jax.main --config=configs/n512_equal_samples.py \
      --workdir=runs/n512_equal_samples

16 kept prompts x 512 rollouts: samples, learning rate and number of updates are
those of `n16.py`, so that what differs is how they are spread over prompts.

Cost:
Result:
"""

from configs import base, presets


def get_config(preset: str = "tiny"):
  c = base.get_config()
  c.n = 512
  c.samples = 16 * 512
  presets.apply(c, preset)
  return c
