r"""One domain alone, on a small file of the repository.

  python -m brorl_jax.main --config=configs/domain.py:math --workdir=runs/math
  python -m brorl_jax.main --config=configs/domain.py:code --workdir=runs/code
  python -m brorl_jax.main --config=configs/domain.py:stem --workdir=runs/stem
  python -m brorl_jax.main --config=configs/domain.py:instructions \
      --workdir=runs/instructions

A few steps on a laptop, that show the whole way of a domain. The embedded
policy has never seen a box or a program: its reward is 0 but for instructions,
some of which its short answers follow by chance. For a language model:
--config.checkpoint=DIRECTORY, and files of your own, which
`python launch/data/prepare.py` makes of public sets.

Cost: 3 steps, about a minute, most of it compilation (2 cores of an AMD EPYC,
jax 0.10.2, 2026-11-22).
"""

from typing import Any

from configs import base

NAMES = ("math", "code", "stem", "instructions")


def get_config(name: str):
  if name not in NAMES:
    raise ValueError(
      f"there is no domain {name!r} here; there are {', '.join(NAMES)}"
    )
  c: Any = base.get_config()
  c.steps = 3
  c.n = 32
  c.samples = c.in_flight = 8 * 32
  c.slots = 32
  for other in base.domains():
    c.domains[other].weight = float(other == name)
  c.data.files = (f"configs/data/{name}.jsonl",)
  c.data.heldout_one_in = 5  # of 30 to 50
  c.prompt_tokens = 256
  c.max_new_tokens = 16
  # The embedded policy gets no prompt of these right; dynamic sampling would
  # look for one in vain.
  c.keep = "all"
  c.rows, c.blocks = 8, 8
  c.eval_n = 4
  c.eval_every = c.save_every = 3
  return c
