"""What programs are compiled for."""

import jax.numpy as jnp
import pytest
from messages import refuses
from small_decoders import Table

from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.rollout.program_spec import ProgramSpec, page_columns, with_cache


@pytest.mark.parametrize(
  "limit, columns, pages",
  [
    (6, 6, 1),  # shorter than a page
    (64, 64, 1),
    (65, 64, 2),
    (512, 64, 8),
    (513, 128, 5),  # never more than 8 pages
    (8192, 1024, 8),
  ],
)
def test_pages_by_hand(limit, columns, pages):
  assert page_columns(limit) == columns
  spec = ProgramSpec(
    Table(), SamplingParams(), (0,), 4, limit, 1, 4, columns, None
  )
  assert spec.pages == pages


def test_a_rollout_ends_with_any_of_its_stop_ids():
  spec = ProgramSpec(Table(), SamplingParams(), (0, 4), 4, 6, 1, 4, 6, None)
  token = jnp.array([[0, 1], [3, 4]])
  assert spec.ended(token).tolist() == [[True, False], [False, True]]
  never = ProgramSpec(Table(), SamplingParams(), (), 4, 6, 1, 4, 6, None)
  assert not never.ended(token).any()


def spec(policy, limit=20):
  return ProgramSpec(
    policy, SamplingParams(), (0,), 4, limit, 2, 3, limit, None
  )


def test_the_policy_says_whether_there_is_a_pool():
  pages = spec(Table())
  assert with_cache(pages) == with_cache(pages, 99) == pages
  assert (pages.blocks, pages.unchecked, pages.turns) == (0, 1, False)
  pool = with_cache(spec(Table(pool_columns=6)))
  # 20 tokens are 4 blocks of 6; 2 lanes of 3 slots.
  assert (pool.columns, pool.pages, pool.blocks) == (6, 4, 24)
  assert pool.unchecked > 1 and not pool.turns
  assert with_cache(spec(Table(pool_columns=6)), 7).blocks == 7


def test_a_pool_has_room_for_one_longest_rollout():
  assert with_cache(spec(Table(pool_columns=6)), 4).blocks == 4
  with refuses(ValueError, "blocks = 3 ... at least 4 ... 20 tokens"):
    with_cache(spec(Table(pool_columns=6)), 3)


def test_several_pages_turn_and_a_single_one_does_not():
  turns = lambda columns: (
    ProgramSpec(
      Table(), SamplingParams(), (0,), 4, 20, 2, 3, columns, None
    ).turns
  )
  assert turns(19) and not turns(20)
