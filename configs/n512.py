r"""BroRL: N = 512 rollouts per prompt, on the embedded policy.

  python -m brorl_jax.main --config=configs/n512.py --workdir=runs/n512

Control arm with equal samples per step: `n16.py`.
"""

from configs import base


def get_config():
  c = base.get_config()
  c.n = 512
  return c
