"""Which keys queries see, and their positions."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from small_policies import GEMMA2, TINY

from brorl_jax.model import views


def _position(policy, view, pair=0):
  """The position whose angle a view has, from the fastest pair."""
  angle = np.arctan2(view.sin[..., pair], view.cos[..., pair])
  fastest = policy.rope.frequency(policy.head_size)[pair]
  return np.round(np.mod(angle, 2 * np.pi) / fastest).astype(int)


def test_texts_of_a_row_begin_at_their_first_token():
  segment = jnp.array([[[1, 1, 2, 2, 2, 0]]])
  start = views.segment_start(segment)
  np.testing.assert_array_equal(start, [[[0, 0, 2, 2, 2, 5]]])


def test_slots_see_their_own_prompt_and_stand_behind_it():
  # A lane with prompts of 3 and of 2 tokens, padded on the left.
  mask = jnp.array([[[True, True, True], [False, True, True]]])
  length, which = jnp.array([[1, 2]]), jnp.array([[0, 1]])
  (view,) = views.of_slots(TINY, mask, length, which)
  want = [[[1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1]]]
  np.testing.assert_array_equal(view.shared, np.array(want, bool))
  np.testing.assert_array_equal(_position(TINY, view)[0, :, 0], [3, 3])
  np.testing.assert_array_equal(view.own, length)


def test_a_sliding_layer_sees_its_window_and_the_other_all():
  policy = dataclasses.replace(GEMMA2, window=2, sliding=(True, False))
  Q = 4
  position = jnp.arange(Q)[None, None]
  own = jnp.tril(jnp.ones((Q, Q), bool))[None, None]
  both = views.of_rows(policy, position, own, position, None)
  of = lambda layer: views.of_layer(policy, both, jnp.int32(layer)).own[0, 0]
  near = np.tril(np.ones((Q, Q), bool)) & ~np.tril(np.ones((Q, Q), bool), -2)
  np.testing.assert_array_equal(of(0), near)
  np.testing.assert_array_equal(of(1), own[0, 0])


def test_a_token_of_a_tree_sees_what_leads_to_it_and_padding_itself():
  # A prompt of two tokens, its answers a b and c, a second tree, padding.
  #            0  1  a  b  c  0  .
  end = jnp.array([[[5, 5, 4, 4, 5, 6, 0]]])
  visible, depth = views.of_trees(end)
  want = [
    [1, 0, 0, 0, 0, 0, 0],
    [1, 1, 0, 0, 0, 0, 0],
    [1, 1, 1, 0, 0, 0, 0],
    [1, 1, 1, 1, 0, 0, 0],
    [1, 1, 0, 0, 1, 0, 0],
    [0, 0, 0, 0, 0, 1, 0],
    [0, 0, 0, 0, 0, 0, 1],
  ]
  np.testing.assert_array_equal(visible[0, 0], np.array(want, bool))
  np.testing.assert_array_equal(depth[0, 0], [0, 1, 2, 3, 2, 0, 0])
