r"""The smallest run: puzzles that are answered at once, in at most 6 tokens.

  python -m brorl_jax.main --config=configs/smoke.py --workdir=runs/smoke

shows that everything works here, and learns within a minute. It answers without
reasoning, and most of the 512 rollouts are copies; `n512.py:steps` reasons.

Cost: 22 steps, 51 s (2 cores of an AMD EPYC, jax 0.10.2, 2026-11-27). Result:
held-out pass@1 .333 -> .579 +- .040.
"""

from brorl_jax.configs import n512


def get_config():
  return n512.get_config("tiny")
