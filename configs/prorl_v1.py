r"""ProRL (arXiv 2505.24864): GRPO, a wide clip, and phases within one run.

  python -m brorl_jax.main --config=configs/prorl_v1.py --workdir=runs/prorl_v1

The paper's eight runs become phases of one run. The paper does not state when
or why a run ended, except that the last one took about 200 steps. In the paper
instructions joined the other domains with the third run; this config leaves
that out, because a run has one set of tasks.

Cost: 60 steps, .71 million rollouts, 518 CPU-seconds with blocks of 32 rows (2
cores of an AMD EPYC, jax 0.10.2, 2026-11-22, one seed); see `n16.py`.
Result: held-out pass@1 at T = 1.2 .199 -> .623 +- .038; 50.7 % of prompts kept.
The score never stalled for two evaluations, so the reference was not reset. The
paper's model size has not been run.
"""

from brorl_jax.configs import base, presets


def get_config(preset: str = "tiny"):
  c = base.get_config()
  c.sampling.n = 16  # stated
  presets.apply(c, preset)
  c.sampling.samples = 256 * 16  # stated
  c.optim.minibatches = 4  # stated: mini-batches of 64 prompts
  c.sampling.temperature = 1.2  # stated
  c.advantage.kind = "grpo"
  c.loss.clip_high = 0.4  # stated
  c.loss.correction = "none"
  # Stated: reset when validation stalls or falls, together with the optimizer.
  # How many evaluations may stall is unknown.
  c.reference.reset_every = 0
  c.reference.reset_stalled = 2
  c.reference.reset_to = "anew"
  c.reward.truncated_factor = 1.0  # until run 4, see below
  # What the presets have of ProRL v2. The weight of its KL term is unknown.
  c.reference.kl_weight = 1e-4
  c.loss.dual_clip = c.advantage.boost = 0.0
  if preset == "tiny":
    c.run.steps = 60
    c.run.phases = _phases(20, 30, 50, longer=8)
  else:
    if preset == "1p5b":
      c.policy.checkpoint = presets.PRORL_STARTS_FROM
    c.optim.lr = 2e-6  # stated
    c.optim.lr_samples = 0
    c.run.steps = 2000  # stated
    c.sampling.max_new_tokens = 7168  # stated: a context of 8k at first
    c.run.phases = _phases(750, 1250, 1800, longer=15360)
  return c


def _phases(penalty: int, wider: int, longer_from: int, *, longer: int):
  """The later phases; the paper does not state their first steps."""
  return (
    # Runs 4 and 5 penalise responses that do not end; the form is unknown.
    {"from_step": penalty + 1, "reward.truncated_factor": 0.0},
    # Runs 6 and 7: 32 rollouts.
    {"from_step": wider + 1, "sampling.n": 32, "sampling.samples": 256 * 32},
    # Run 8: a context of 16k and 16 rollouts again.
    {
      "from_step": longer_from + 1,
      "sampling.n": 16,
      "sampling.samples": 256 * 16,
      "sampling.max_new_tokens": longer,
    },
  )
