r"""BroRL: 128 kept prompts x 512 rollouts.

  python -m brorl_jax.main --config=configs/n512.py --workdir=runs/n512

trains the embedded policy on a laptop. `configs/n512.py:1p5b` is the paper's
run and `configs/n512.py:8b` a larger one. `configs/n512.py:steps` trains the
embedded policy that answers step by step, on 8 prompts x 512. See `presets.py`.

Cost: 30 steps, 2.0 million rollouts, 96 CPU-seconds (2 cores of an AMD EPYC,
jax 0.10.2, 2026-11-25, one seed), 1.3 GB.
Result: held-out pass@1 .333 -> .594 +- .040; 96.8 % of prompts kept. The
paper's model size has not been run.
"""

from brorl_jax.configs import base, presets


def get_config(preset: str = "steps"):
  c = base.get_config()
  c.sampling.n = 512  # stated
  c.sampling.samples = 128 * 512  # stated
  c.run.steps = 20  # ten minutes on two cores
  presets.apply(c, preset)
  return c
