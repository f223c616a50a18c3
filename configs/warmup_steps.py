r"""Makes the policy that answers in steps: 510k parameters, Qwen2 architecture.

  python -m brorl_jax.main --mode=warmup --config=configs/warmup_steps.py \
      --workdir=steps

Deterministic: the same seed gives the same files on the same kind of machine.

Cost: 25 minutes, 2,570 CPU-seconds (2 cores of an AMD EPYC, jax 0.10.2,
2026-11-26). Result: after the right demonstrations held-out pass@1 is .573,
after those of mixed quality .236 (12 tasks, temperature .6). So a run of
n512.py can learn again what the policy did before, and learn it from verdicts.
"""

from typing import Any

import ml_collections

from brorl_jax.tasks.dials import DIALS


def get_config() -> ml_collections.ConfigDict:
  c: Any = ml_collections.ConfigDict()
  c.seed = 0
  c.families = ml_collections.ConfigDict()
  for name, (settings, _) in DIALS.items():
    c.families[name] = {"weight": 1.0, "settings": dict(settings)}
  c.puzzles = 10000  # per family, from seeds that training never uses
  c.prompt_tokens = 120
  c.max_new_tokens = 176
  c.vocab = 512  # ids of the tokenizer
  c.tags = ("<answer>", "</answer>")  # one token each
  # Of a first BPE, which finds the sentences that questions share; each becomes
  # one of the 512 ids.
  c.merges = 6000
  c.at_once = "Answer at once."  # prompts that are answered without steps

  # Policy.
  c.width = 128
  c.layers = 3
  c.heads = 4
  c.kv_heads = 2
  c.mlp = 256
  c.rope_theta = 1000.0  # sequences are short

  # Right demonstrations first, then demonstrations of mixed quality.
  c.row_tokens = 320  # several demonstrations share a row
  c.rows = 28  # per update: about 90 demonstrations
  c.microbatches = 14  # 1.7 times as fast as 1: activations stay in the caches
  c.lr = 3e-3  # falls to 0 as a cosine
  c.steps = 2400
  c.mixed_lr = 1e-3
  c.mixed_steps = 300
  # Shares of what is demonstrated. Without sloppy responses RL would have
  # nothing to improve.
  c.qualities = ml_collections.ConfigDict()
  c.qualities.careful = 0.6
  c.qualities.detour = 0.2
  c.qualities.direct = 0.2
  c.mixed_qualities = ml_collections.ConfigDict()
  c.mixed_qualities.careful = 0.1
  c.mixed_qualities.detour = 0.1
  c.mixed_qualities.sloppy = 0.7
  c.mixed_qualities.direct = 0.1
  c.b2 = 0.95
  c.max_grad_norm = 1.0
  return c.lock()  # a misspelt field in a config is an error
