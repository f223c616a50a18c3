r"""N from 16 to 1024 at a constant number of samples per step, 8,192.

  python -m brorl_jax.main --config=configs/sweep.py:64 --workdir=runs/sweep/64

and the same with 16, 32, 128, 256, 512 and 1024. The paper compares only 16
with 512. The policy is the one that answers at once. The runs with 16 and
512 are the first 30 steps of `n16.py:tiny` and `n512_equal_samples.py:tiny`.

Cost: 30 steps each: 181, 126, 115, 96, 82, 74, 75 CPU-seconds (2 cores of an
AMD EPYC, jax 0.10.2, 2026-11-22, one seed, other jobs running).
Result: held-out pass@1, at temperature 1, from .228 to .592, .579, .554, .511,
.492, .447, .420; kept .56, .70, .84, .93, .98, .99, .99. All share one learning
rate, tuned for none of them, and have 512 to 8 prompts per step, so the scores
are no evidence on N.
"""

from brorl_jax.configs import base, presets


def get_config(n: str = "64"):
  c = base.get_config()
  c.sampling.n = int(n)
  c.sampling.samples = 8192
  c.run.steps = 30
  presets.apply(c, "tiny")
  return c
