r"""Multiple choice and short answers from a file.

  python -m brorl_jax.main --config=configs/stem.py \
      --workdir=runs/stem

A few steps on a laptop, that show the whole way of this domain.
The embedded policy has never seen a box: its reward is 0.
For a language model: --config.checkpoint=DIRECTORY, and files of your own,
which `python -m brorl_jax.tasks.prepare` makes of public sets.

Cost: 3 steps, about a minute, most of it compilation (2 cores of an AMD EPYC,
jax 0.10.2, 2026-11-22).
"""

from configs import base, domain


def get_config():
  c = base.get_config()
  domain.apply(c, "stem")
  return c
