r"""Control arm of `n512.py`: N = 16, equal samples per step, all else equal.

  python -m brorl_jax.main --config=configs/n16.py --workdir=runs/n16

The paper's own arm is 512 prompts of 16 rollouts: --config.samples=8192.
"""

from configs import base


def get_config():
  c = base.get_config()
  c.n = 16
  return c
