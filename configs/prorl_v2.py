r"""ProRL v2 from its start: what BroRL continues. N = 16, a context of 8k.

  python -m brorl_jax.main --mode=plan --config=configs/prorl_v2.py
  python -m brorl_jax.main --config=configs/prorl_v2.py --workdir=runs/prorl_v2

Values from two public sources beside the texts: a launch script whose paths
name authors of ProRL v2 ("authors' script": inferred, not published as theirs),
and others' port of it to NeMo-RL ("port"). What both leave open is "unknown".
Values without a comment here are those of `presets.py`, with their sources. It
has not been run at this size.
"""

from brorl_jax.configs import n16, presets

NAMES = ("1p5b",)


def get_config(preset: str = "1p5b"):
  if preset not in NAMES:
    raise ValueError(f"preset {preset!r} does not exist; choose 1p5b")
  c = n16.get_config(preset)  # 512 x 16: authors' script and port
  c.policy.checkpoint = presets.PRORL_STARTS_FROM  # stated
  c.run.steps = 3000  # stated
  c.sampling.max_new_tokens = 8192  # authors' script, after prompts of 1,024
  c.sampling.temperature = 1.0  # authors' script and port
  c.loss.clip_low = 0.2  # stated; authors' script and port too
  c.loss.clip_high = 0.3  # authors' script; stated and port: .28
  c.loss.entropy_weight = 0.0  # authors' script
  # Port: TIS, at most 2. The authors' script names no correction.
  c.loss.correction, c.loss.correction_range = "truncated", (0.0, 2.0)
  # Authors' script: right answers get at least .5, wrong ones at most 0, and a
  # repeated n-gram costs .001. Unknown: the two other ends, here -.5 and 1, the
  # length of an n-gram, and which sources get it, here all. A partial score is
  # wrong then.
  c.reward.length = "replace"
  c.reward.length_range = (-0.5, 1.0)
  c.reward.length_steps = (100, 500)  # stated
  c.reward.repeat_penalty = (0.001, 40)
  # Stated: every 200 to 500 steps, when the KL jumps or validation stalls, and
  # the optimizer continues. Which period is unknown. ProRL goes back to the
  # best checkpoint.
  c.reference.reset_every = 300
  c.reference.reset_to = "best"
  # Authors' script: saved and validated every 5 steps, 4 samples, T = .6, of
  # AIME, Codeforces, GPQA, a puzzle and IFEval.
  c.run.save_every = c.eval.every = 5
  c.eval.n = 4
  # Authors' script of evaluation, which has 16 samples. Of validation: unknown.
  c.eval.max_new_tokens = 32_768
  return c
