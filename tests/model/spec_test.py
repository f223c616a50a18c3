"""What an architecture is."""

import dataclasses

from brorl_jax.model.policy import Policy
from brorl_jax.model.spec import Rope

TINY = Policy(
  vocab=37, width=16, layers=2, heads=6, kv_heads=2, head_size=4, mlp=20,
  rope=Rope(100.0), norm_eps=1e-2, tied=False,
)  # fmt: skip


def test_scores_are_divided_by_the_root_of_the_head_size_or_scaled_as_said():
  assert TINY.attention_scale == 0.5
  assert dataclasses.replace(TINY, query_scale=0.7).attention_scale == 0.7


def test_equal_architectures_share_their_programs_wherever_they_were_read():
  same = dataclasses.replace(TINY, origin="{}")
  assert same == TINY and hash(same) == hash(TINY)
  assert dataclasses.replace(TINY, window=3) != TINY
