r"""Supervised start: trains a checkpoint on responses before RL.

  python -m brorl_jax.main --mode=warmup --config=configs/sft.py \
      --workdir=warm --config.policy.checkpoint=DIR \
      --config.data.files=pairs.jsonl

Lines of pairs.jsonl: {"prompt": "...", "response": "..."}. The result is a
Hugging Face directory; start RL from it with --config.policy.checkpoint=warm.
README.md in this folder lists the fields.
"""

from typing import Any

import ml_collections

from brorl_jax import config


def get_config() -> Any:
  c = ml_collections.ConfigDict(config.as_dict(config.Warmup()))
  return c.lock()  # a misspelt field in a config is an error
