r"""BroRL: N = 512 rollouts per prompt.

  python -m brorl_jax.main --config=configs/n512.py --workdir=runs/n512

trains the embedded policy that answers step by step on a laptop, 8 kept prompts
per step. `configs/n512.py:1p5b` is the paper's run, 128 kept prompts per step,
and `configs/n512.py:8b` a larger one. `configs/n512.py:tiny` answers at once.
See `presets.py`.

Cost: 22 steps, 95,000 rollouts, nine minutes, 740 CPU-seconds (2 cores of an
AMD EPYC, jax 0.10.2, 2026-11-26, one seed), 2.4 GB. Result: held-out pass@1
.256 -> .465 +- .055; 96 % of prompts kept. The paper's model size has not been
run.
"""

from brorl_jax.configs import base, presets


def get_config(preset: str = "steps"):
  c = base.get_config()
  c.sampling.n = 512  # stated
  c.sampling.samples = 128 * 512  # stated
  c.run.steps = 22  # nine minutes on two cores
  presets.apply(c, preset)
  return c
