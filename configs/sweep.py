r"""N from 16 to 1024 at a constant number of samples per step, 8,192.

  for n in 16 32 64 128 256 512 1024; do
    python -m brorl_jax.main --config=configs/sweep.py:$n \
        --workdir=runs/sweep/$n
  done

Not in the paper, which compares 16 with 512 alone. 16 and 512 are the first
steps of `n16.py` and `n512_equal_samples.py`.

Cost:
Result:
"""

from configs import base, presets


def get_config(n: str = "64"):
  c = base.get_config()
  c.n = int(n)
  c.samples = 8192
  c.steps = 30
  presets.apply(c, "tiny")
  return c
