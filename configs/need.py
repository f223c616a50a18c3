r"""Rollouts by need: 16 to 512 per prompt, until four are right.

  python -m brorl_jax.main --config=configs/need.py --workdir=runs/need

The config that we recommend where some prompts are hard: a prompt that is
solved takes 16 rollouts, and one that is nearly hopeless 512. Advantages weigh
by counts (MaxRL), without which N protects few prompts.

16 prompts per step of hard prompts, 12 of `smollm2` (.131 -> .578 in 28,000
rollouts), 128 with other presets of `n512.py`, whose other fields these are.
"""

from brorl_jax.configs import base, presets


def get_config(preset: str = "hard"):
  c = base.get_config()
  c.sampling.n = 512
  c.sampling.samples = 128 * 512  # at most
  c.sampling.rounds = (16, 64, 256, 512)
  presets.apply(c, preset)
  c.advantage.kind = "maxrl"
  c.advantage.boost = 0.0  # of whitened advantages
  return c
