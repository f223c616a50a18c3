r"""N = 512 rollouts per prompt; with a language model BroRL.

  python -m brorl_jax.main --config=configs/n512.py --workdir=runs/n512

trains an embedded policy on 128 hard prompts, 4 per step, with advantages that
weigh by counts (MaxRL), which the paper's do not. `python -m launch.wall.report
launch/wall/results.json --run=runs/n512` then shows it beside N = 16 and
rollouts by need; `need.py` is what we recommend.

`configs/n512.py:1p5b` is the paper's run, 128 kept prompts per step, from the
checkpoint that the paper continues, and `configs/n512.py:8b` a larger one. What
the paper does not state is as in the authors' script of ProRL v2, or unknown:
`presets.py` says which. `configs/n512.py:tiny` answers at once.

`configs/n512.py:steps` trains the embedded policy that answers step by step, 8
kept prompts per step. Its puzzles share rules, and N = 16 reaches more in less
time: 22 steps, 94,000 rollouts, 6 minutes, 325 to 357 CPU-seconds and those of
compilation and evaluations (2 cores of an AMD EPYC, jax 0.10.2, 2026-11-27),
2.7 GB. Held-out pass@1 of seeds 0 to 2: .256 -> .466, .262 -> .482 and .242 ->
.453, +- .056 each; 96 % of prompts kept.

`configs/n512.py:smollm2` trains SmolLM2-135M-Instruct on arithmetic, 8 kept
prompts per step: 51,000 rollouts, 11 minutes of two cores or 17 of one, 4.9 to
5.8 GB. Pass@1 of seeds 0 to 2: .131 -> .590, .119 -> .590, .113 -> .602, +-
.10. With `lora_rank=16` and 10 times the rate: .588, 1.2 times as long, 4 GB.
"""

from brorl_jax.configs import base, presets


def get_config(preset: str = "hard"):
  c = base.get_config()
  c.sampling.n = 512  # stated
  c.sampling.samples = 128 * 512  # stated
  c.run.steps = 22  # of `steps`: six minutes on two cores
  presets.apply(c, preset)
  return c
