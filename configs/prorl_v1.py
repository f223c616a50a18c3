r"""ProRL (arXiv 2505.24864): GRPO, a wide clip, and changes on the way.

  python -m brorl_jax.main --config=configs/prorl_v1.py --workdir=runs/prorl_v1

Its eight runs as phases of one. What made the authors end a run, and when, is
not stated but for the last, about 200 steps. That instructions joined the other
domains with the third run is left out: a run has one set of tasks.

Cost: 60 steps, .71 million rollouts, 518 CPU-seconds with blocks of 32 rows (2
cores of an AMD EPYC, jax 0.10.2, 2026-11-22, one seed); see `n16.py`.
Result: held-out pass@1 at T = 1.2 .199 -> .623 +- .038; 50.7 % of prompts kept.
The score never stalled for two evaluations, so the reference was not reset. The
paper's size is not run.
"""

from configs import base, presets


def get_config(preset: str = "tiny"):
  c = base.get_config()
  c.n = 16  # stated
  presets.apply(c, preset)
  c.samples = 256 * 16  # stated
  c.minibatches = 4  # stated: mini-batches of 64 prompts
  c.temperature = 1.2  # stated
  c.advantage = "grpo"
  c.clip_high = 0.4  # stated
  c.correction = "none"
  # Stated: when validation stalls or falls, with the optimizer. How long it may
  # stall is unknown.
  c.reset_every = 0
  c.reset_stalled = 2
  c.reset_optimizer = True
  c.truncated_factor = 1.0  # until run 4, see below
  if preset == "tiny":
    c.steps = 60
    c.phases = _phases(20, 30, 50, longer=8)
  else:
    c.lr = 2e-6  # stated
    c.lr_scaling = "none"
    c.steps = 2000  # stated
    c.max_new_tokens = 7168  # stated: a context of 8k at first
    c.phases = _phases(750, 1250, 1800, longer=15360)
  return c


def _phases(penalty: int, wider: int, longer_from: int, *, longer: int):
  """After how many steps each begins is unknown."""
  return (
    # Runs 4 and 5 penalise responses that do not end. How is unknown.
    {"from_step": penalty + 1, "truncated_factor": 0.0},
    # Runs 6 and 7: 32 rollouts.
    {"from_step": wider + 1, "n": 32, "samples": 256 * 32},
    # Run 8: 16k of context, 16 rollouts again.
    {
      "from_step": longer_from + 1,
      "n": 16,
      "samples": 256 * 16,
      "max_new_tokens": longer,
    },
  )
