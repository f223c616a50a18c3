"""What programs are compiled for."""

import jax.numpy as jnp
import pytest
from messages import refuses
from small_decoders import Table, devices, spec

from brorl_jax.rollout.program_spec import page_columns


@pytest.mark.parametrize(
  "limit, columns, pages",
  [
    (6, 6, 1),  # shorter than a page
    (65, 64, 2),
    (512, 64, 8),
    (513, 128, 5),  # never more than 8 pages
    (8192, 1024, 8),
  ],
)
def test_pages_by_hand(limit, columns, pages):
  assert page_columns(limit) == columns
  assert spec(Table(), max_new_tokens=limit).program(1).pages == pages


def test_a_rollout_ends_with_any_of_its_stop_ids():
  ends = spec(Table(), stop_ids=(0, 4)).program(1)
  token = jnp.array([[0, 1], [3, 4]])
  assert ends.ended(token).tolist() == [[True, False], [False, True]]
  never = spec(Table(), stop_ids=()).program(1)
  assert not never.ended(token).any()


def cached(blocks=None, **policy):
  """20 tokens in 2 lanes of 3 slots."""
  how = dict(n=3, max_new_tokens=20, blocks=blocks)
  return spec(Table(**policy), **how).program(2)


def test_the_policy_says_whether_there_is_a_pool():
  pages = cached()
  assert cached(99) == pages
  assert (pages.blocks, pages.unchecked, pages.turns) == (0, 1, False)
  pool = cached(pool_columns=6)
  # 20 tokens are 4 blocks of 6.
  assert (pool.columns, pool.pages, pool.blocks) == (6, 4, 24)
  assert pool.unchecked > 1 and not pool.turns
  assert cached(7, pool_columns=6).blocks == 7


def test_a_pool_has_room_for_one_longest_rollout():
  assert cached(4, pool_columns=6).blocks == 4
  with refuses(ValueError, "blocks = 3 ... at least 4 ... 20 tokens"):
    cached(3, pool_columns=6)


def test_several_pages_turn_and_a_single_one_does_not():
  turns = lambda T: spec(Table(), max_new_tokens=T).program(1).turns
  assert turns(65) and not turns(64)


@pytest.mark.parametrize(
  "places, lanes, count, each",
  [(5, None, 1, 5), (5, 3, 1, 3), (6, 3, 2, 2), (6, 9, 2, 3)],
)
def test_prompts_decode_on_as_many_lanes_as_are_asked_for(
  places, lanes, count, each
):
  """Of one device; at most one for each of its places."""
  one = spec(Table(), lanes=lanes, mesh=devices(count))
  assert one.program(places).lanes == each
  halves = one.program(2 * places, parts=2)
  assert (halves.chunk, halves.slots) == (8, 8)
