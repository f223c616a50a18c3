r"""Instructions from a file: the share that is followed is the reward.

  python -m brorl_jax.main --config=configs/instructions.py \
      --workdir=runs/instructions

A few steps on a laptop, that show the whole way of this domain.
What the embedded policy says is short and has few commas, so that it follows
some by chance.
For a language model: --config.checkpoint=DIRECTORY, and files of your own,
which `python -m brorl_jax.tasks.prepare` makes of public sets.

Cost: 3 steps, about a minute, most of it compilation (2 cores of an AMD EPYC,
jax 0.10.2, 2026-11-22).
"""

from configs import base, domain


def get_config():
  c = base.get_config()
  domain.apply(c, "instructions")
  return c
