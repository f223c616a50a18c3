"""Tests of brorl_jax/rl/length_penalty.py."""

import jax.numpy as jnp
import numpy as np
import pytest

from brorl_jax.rl import length_penalty


def test_cosine_by_hand():
  """cos is 1, 1/sqrt(2), 0, -1/sqrt(2), -1 at quarters of the limit."""
  length = jnp.array([-5, 0, 25, 50, 75, 100, 200])
  got = length_penalty.cosine(length, limit=100, eta_min=-0.6, eta_max=0.4)
  root = 0.5**0.5
  cos = np.array([1.0, 1.0, root, 0.0, -root, -1.0, -1.0])
  np.testing.assert_allclose(got, -0.1 + 0.5 * cos, atol=1e-6)


def repeated(tokens, size):
  """In a plain loop, the n-grams that occurred before."""
  seen, count = set(), 0
  for end in range(size, len(tokens) + 1):
    ngram = tuple(tokens[end - size : end])
    count += ngram in seen
    seen.add(ngram)
  return count


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 40])
def test_repeats_are_those_of_a_plain_loop(size):
  """Of few tokens, in rows of every length, the last with 20 said twice."""
  rng, length = np.random.default_rng(size), np.array([[0, 1, 5], [30, 59, 60]])
  tokens = rng.integers(0, 3, (2, 3, 60), np.int32)
  tokens[..., 20:40] = tokens[..., :20]
  mask = np.arange(60) < length[..., None]
  got = length_penalty.repeats(jnp.array(tokens), jnp.array(mask), size=size)
  rows = zip(tokens.reshape(-1, 60), length.flat, strict=True)
  want = [repeated(row[:n].tolist(), size) for row, n in rows]
  assert np.ravel(got).tolist() == want and (max(want) > 0 or size > 20)


def test_overlapping_repeats_count_and_padding_does_not():
  """a a a a has aa three times, and what follows the end never counts."""
  tokens = jnp.array([[7, 7, 7, 7, 0, 0, 0, 0], [0, 0, 1, 0, 0, 1, 9, 9]])
  mask = jnp.array([[True] * 4 + [False] * 4, [True] * 6 + [False] * 2])
  assert length_penalty.repeats(tokens, mask, size=2).tolist() == [2, 2]
  assert length_penalty.repeats(tokens, mask, size=9).tolist() == [0, 0]
  with pytest.raises(ValueError, match="size = 0 must be"):
    length_penalty.repeats(tokens, mask, size=0)


def test_is_on_first_and_again_after_each_period():
  """On for 0, 1, 2, off for 3, 4, and so on."""
  got = [length_penalty.is_active(u, on=3, off=2) for u in range(11)]
  assert got == ([True] * 3 + [False] * 2) * 2 + [True]
  np.testing.assert_array_equal(
    length_penalty.is_active(jnp.arange(11), on=3, off=2), got
  )
  # Without off it is always on.
  assert all(length_penalty.is_active(u, on=1, off=0) for u in range(5))


@pytest.mark.parametrize(
  "on, off, name", [(0, 5, "on = 0"), (5, -1, "off = -1")]
)
def test_says_which_count_is_wrong(on, off, name):
  with pytest.raises(ValueError, match=f"{name} "):
    length_penalty.is_active(0, on=on, off=off)


def test_overlong_by_hand():
  """Free up to 80; then a twentieth for each token; -1 from 100."""
  length = jnp.array([0, 79, 80, 81, 90, 95, 99, 100, 101, 1000])
  got = length_penalty.overlong(length, limit=100, buffer=20)
  want = [0, 0, 0, -0.05, -0.5, -0.75, -0.95, -1, -1, -1]
  np.testing.assert_allclose(got, want, rtol=1e-6)
  # And it may begin at once.
  got = length_penalty.overlong(jnp.array([0, 5, 10]), limit=10, buffer=10)
  np.testing.assert_allclose(got, [0.0, -0.5, -1.0])


@pytest.mark.parametrize("buffer", [0, 11])
def test_says_which_buffer_is_wrong(buffer):
  with pytest.raises(ValueError, match=f"buffer = {buffer} "):
    length_penalty.overlong(jnp.array([1]), limit=10, buffer=buffer)
