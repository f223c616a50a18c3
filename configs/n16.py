r"""ProRL v2, with which BroRL is compared: 512 kept prompts x 16 rollouts.

  python -m brorl_jax.main --config=configs/n16.py --workdir=runs/n16

`n512.py` has 8 times the samples per step, a quarter of the prompts, and with a
preset 2.83 times the learning rate. `n512_equal_samples.py` differs in N alone.

Cost:
Result:
"""

from configs import base, presets


def get_config(preset: str = "tiny"):
  c = base.get_config()
  c.n = 16
  c.samples = 512 * 16  # stated
  presets.apply(c, preset)
  return c
