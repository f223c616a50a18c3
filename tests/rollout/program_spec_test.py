"""What programs are compiled for."""

import jax.numpy as jnp
import pytest
from small_decoders import Table

from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.rollout.program_spec import ProgramSpec, page_columns


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
