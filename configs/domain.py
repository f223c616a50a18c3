r"""One domain, on a small file of the repository.

  python -m brorl_jax.main --config=configs/domain.py:math --workdir=runs/math
  python -m brorl_jax.main --config=configs/domain.py:code --workdir=runs/code
  python -m brorl_jax.main --config=configs/domain.py:stem --workdir=runs/stem
  python -m brorl_jax.main --config=configs/domain.py:instructions \
      --workdir=runs/instructions

A few steps on a laptop that take one domain from data to update. The embedded
policy has never seen a box or a program, so its reward is 0, except for
instructions, some of which its short answers follow by chance. For a language
model pass --config.policy.checkpoint=DIR and your own files;
`--mode=prepare` converts public sets.

Cost: 3 steps, about a minute, most of it compilation (2 cores of an AMD EPYC,
jax 0.10.2, 2026-11-22).
"""

import pathlib
from typing import Any

from brorl_jax.configs import base

_DATA = pathlib.Path(__file__).resolve().parent / "data"
NAMES = sorted(path.stem for path in _DATA.glob("*.jsonl"))


def get_config(name: str):
  if name not in NAMES:
    raise ValueError(
      f"domain {name!r} has no file in {_DATA}; choose {', '.join(NAMES)}"
    )
  c: Any = base.get_config()
  c.run.steps = 3
  c.sampling.n = 32
  c.sampling.samples = c.sampling.in_flight = 8 * 32
  c.sampling.slots = 32
  for other in c.data.domains:
    c.data.domains[other].weight = float(other == name)
  c.data.files = (str(_DATA / f"{name}.jsonl"),)
  c.data.heldout_one_in = 5  # of 30 to 50
  c.data.prompt_tokens = 256
  c.sampling.max_new_tokens = 16
  # The embedded policy solves none of these prompts, so dynamic sampling would
  # find no group to keep.
  c.filter.keep = "all"
  c.optim.rows, c.optim.blocks = 8, 8
  c.eval.n = 4
  c.eval.every = c.run.save_every = 3
  return c
