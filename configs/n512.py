r"""BroRL: N = 512 rollouts per prompt.

  python -m brorl_jax.main --config=configs/n512.py --workdir=runs/n512

trains the embedded policy on a laptop. `configs/n512.py:1p5b` is the paper's
run, `configs/n512.py:8b` a larger one: see `presets.py`. Control arm with equal
samples per step: `n16.py`.
"""

from configs import base, presets


def get_config(preset: str = "tiny"):
  c = base.get_config()
  c.n = 512
  presets.apply(c, preset)
  return c
