r"""Control arm of `n512.py`: N = 16, equal samples per step, all else equal.

  python -m brorl_jax.main --config=configs/n16.py --workdir=runs/n16

The paper's own arm is 512 prompts of 16 rollouts: --config.samples=8192, and
with `configs/n16.py:1p5b` --config.lr=1e-6 too.
"""

from configs import base, presets


def get_config(preset: str = "tiny"):
  c = base.get_config()
  c.n = 16
  presets.apply(c, preset)
  return c
