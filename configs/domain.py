"""One domain alone, on the small file of the repository.

Not an experiment: math.py, code.py, stem.py and instructions.py are made of it.
"""

from typing import Any


def apply(c: Any, name: str) -> None:
  """Changes what a run on the file of a domain needs."""
  c.steps = 3
  c.n = 32
  c.samples = c.in_flight = 8 * 32
  c.slots = 32
  for other in c.domains:
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
