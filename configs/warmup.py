r"""Makes the embedded policy: 465k parameters, Qwen2 architecture.

  python -m brorl_jax.main --mode=warmup --config=configs/warmup.py \
      --workdir=assets

Deterministic: the same seed gives the same files on the same kind of machine.
"""

from typing import Any

import ml_collections

from brorl_jax.configs import base


def get_config() -> ml_collections.ConfigDict:
  c: Any = ml_collections.ConfigDict()
  c.seed = 0
  c.families = base.get_config().data.families
  c.puzzles = 20000  # per family, from seeds that training never uses
  c.prompt_tokens = 40
  c.max_new_tokens = 6
  c.vocab = 512  # ids of the tokenizer

  # Policy.
  c.width = 96
  c.layers = 3
  c.heads = 4
  c.kv_heads = 2
  c.mlp = 384
  c.rope_theta = 100.0  # sequences are short

  # Right demonstrations first, then demonstrations of mixed quality.
  c.row_tokens = 128  # several demonstrations share a row
  c.rows = 14  # per update: about 128 demonstrations
  c.microbatches = 1
  c.lr = 3e-3  # falls to 0 as a cosine
  c.steps = 3000
  c.mixed_lr = 1e-3
  c.mixed_steps = 420
  # Share of right answers in the second stage. Without wrong ones RL would have
  # nothing to improve.
  c.right = ml_collections.ConfigDict()
  c.right.letter_counting = 0.5
  c.right.count_primes = 0.5
  c.right.leg_counting = 0.5
  c.right.gcd = 0.5
  c.right.basic_arithmetic = 0.5
  c.right.number_sequence = 0.5
  c.right.spell_backward = 0.12
  c.right.simple_equations = 0.2
  c.b2 = 0.95
  c.max_grad_norm = 1.0
  return c.lock()  # a misspelt field in a config is an error
