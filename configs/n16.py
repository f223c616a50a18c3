r"""N = 16 rollouts per prompt; with a language model ProRL v2, continued.

  python -m brorl_jax.main --config=configs/n16.py --workdir=runs/n16

128 hard prompts per step, 32 kept ones with `n16.py:steps`, and 512 with the
other presets. `n512.py` has as many samples per step of hard prompts, and 8
times as many with the others; with a language model 2.83 times the rate.
`n16.py:1p5b` is the paper's baseline, from the checkpoint that `n512.py:1p5b`
has too; `prorl_v2.py` is how that was trained.
`n512_equal_samples.py:steps` differs from `n16.py:steps` in N, and in the rate
that is best for it.

`n16.py:steps`: 60 steps, 41,000 rollouts, 5 minutes, 207 to 212 CPU-seconds and
those of compilation and evaluations (2 cores of an AMD EPYC, jax 0.10.2,
2026-11-27), 1.9 GB. Result of seeds 0 to 2: held-out pass@1 .256 -> .571,
.262 -> .526 and .242 -> .513, +- .06 each; 75 % of prompts kept. A learning
rate of 1e-4 reached .535 where 3e-4 reached .587, and 1e-3 ended at .189 (seed
7).

`n16.py:tiny`: 60 steps, 1.2 million rollouts, 366 CPU-seconds (2 cores of an
AMD EPYC, jax 0.10.2, 2026-11-22, one seed), 2.0 GB. Held-out pass@1 .333 ->
.657 +- .040; 46.5 % of prompts kept, 28 % at the end. The paper's model size
has not been run.
"""

from brorl_jax.configs import base, presets


def get_config(preset: str = "hard"):
  c = base.get_config()
  c.sampling.n = 16  # stated
  c.sampling.samples = 512 * 16  # stated
  presets.apply(c, preset)
  return c
