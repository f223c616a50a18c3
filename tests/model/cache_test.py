"""Tests of brorl_jax/model/cache.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers

from brorl_jax.model import attention, cache, target
from brorl_jax.model.cache import Page, Shared


def test_ages_by_hand():
  # Two pages of three columns; the second is being written, at column 1.
  # Its column 2 is left from a turn before: the oldest.
  older, last = cache.ages(jnp.int32(1), 2, 3, 1)
  np.testing.assert_array_equal(older, [[4, 3, 2]])
  np.testing.assert_array_equal(last, [[1, 0, 5]])
  (only,) = cache.ages(jnp.int32(2), 1, 4, 0)
  np.testing.assert_array_equal(only, [[2, 1, 0, 3]])
  # Of three pages the first holds nothing: a row has at most 3 + 2 columns.
  unused, older, last = cache.ages(jnp.int32(1), 3, 3, jnp.int32(1))
  np.testing.assert_array_equal(unused, [[7, 6, 5]])
  np.testing.assert_array_equal(older, [[4, 3, 2]])
  np.testing.assert_array_equal(last, [[1, 0, 5]])


def draw(rng, A=2, R=3, H=6, G=2, K=4, S=5, C=3, pages=2):
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  mask = jnp.asarray(rng.random((A, R, S)) < 0.6)
  shared = Shared(normal(A, G, S, K), normal(A, G, S, K), mask)
  own = [
    Page(normal(A * R, G, K, C), normal(A * R, G, C, K)) for _ in range(pages)
  ]
  return normal(A, R, H, K), shared, own


def plain(q, shared, pages, column, limit, softcap):
  """By `attention.attend`: the token as the last of as many as there are."""
  A, R, _, K = q.shape
  k = jnp.concatenate([jnp.swapaxes(p.k, 2, 3) for p in pages], axis=2)
  v = jnp.concatenate([p.v for p in pages], axis=2)
  apart = lambda x: x.reshape(A, R, *x.shape[1:])
  age = jnp.concatenate(
    cache.ages(column, len(pages), 3, len(pages) - 1), axis=1
  )
  T = age.shape[1]
  seen = (
    jnp.zeros((A, R, T, T), bool).at[:, :, -1].set(age[None] < limit[..., None])
  )
  out = attention.attend(
    jnp.repeat(q[:, :, None], T, axis=2),
    (shared.k, shared.v, shared.mask[:, :, None]),
    (apart(k), apart(v), seen),
    scale=K**-0.5,
    softcap=softcap,
    target=target.here(),
  )
  return out[:, :, -1]


@pytest.mark.parametrize("softcap", tiers.some([0.7, 0.0], 1, 1))
@pytest.mark.parametrize("column, most", [(0, 1), (1, 4), (2, 6)])
def test_equals_the_attention_of_training(column, most, softcap):
  rng = np.random.default_rng(most)
  q, shared, pages = draw(rng)
  limit = jnp.asarray(rng.integers(1, most + 1, (2, 3)), jnp.int32)
  at = jnp.int32(column), limit
  run = functools.partial(
    cache.decode, q, shared, column=at[0], limit=limit, scale=0.5,
    softcap=softcap,
  )  # fmt: skip
  got = run(pages, used=1)
  want = plain(q, shared, pages, *at, softcap)
  np.testing.assert_allclose(got, want, atol=1e-6)
  # What is in front is not read, whatever it is.
  spoilt = jax.tree.map(lambda x: x * np.nan, pages[0])
  more = jax.jit(run)([spoilt, spoilt, *pages], used=jnp.int32(1))
  np.testing.assert_allclose(more, got, atol=1e-6)


@pytest.mark.parametrize("width, prompts", [(2, 2), (5, 1), (1, 5)])
def test_prompts_in_pieces_are_the_prompts(monkeypatch, width, prompts):
  """And a piece that no row sees is not read, whatever it is."""
  monkeypatch.setattr(cache, "_LEAST_PIECE", 2)
  rng = np.random.default_rng(width)
  q, shared, pages = draw(rng, S=width * prompts)
  run = functools.partial(
    cache.decode, q, pages=pages, column=jnp.int32(1), used=1,
    limit=jnp.full((2, 3), 5, jnp.int32), scale=0.5, softcap=0.7,
  )  # fmt: skip
  pieces = cache.prompt_pieces(prompts, width)
  got = run(shared=shared, pieces=pieces)
  np.testing.assert_allclose(got, run(shared=shared), atol=1e-6)
  # One row of the last lane alone sees the first piece.
  rare = shared.mask.at[:, :, pieces[0]].set(False)
  rare = rare.at[-1, -1, pieces[0]].set(True)
  some = shared._replace(mask=rare)
  got = run(shared=some, pieces=pieces)
  np.testing.assert_allclose(got, run(shared=some), atol=1e-6)
  # Nobody sees the first piece; the others are seen as before.
  unseen = shared._replace(mask=shared.mask.at[..., pieces[0]].set(False))
  spoilt = unseen._replace(v=unseen.v.at[:, :, pieces[0]].set(jnp.nan))
  want = run(shared=unseen)
  np.testing.assert_allclose(run(shared=spoilt, pieces=pieces), want, atol=1e-6)
  assert np.isnan(run(shared=spoilt)).any()


def test_pieces_of_prompts_cover_each_column_once():
  """From the right, where the tokens are; at most four for each prompt."""
  assert cache.prompt_pieces(1, 40) == [slice(0, 40)]
  assert cache.prompt_pieces(2, 80) == [
    slice(16, 80), slice(0, 16), slice(96, 160), slice(80, 96)
  ]  # fmt: skip
  for width in (1, 63, 64, 65, 257, 1000):
    pieces = cache.prompt_pieces(3, width)
    assert len(pieces) <= 3 * 4
    every = np.concatenate([np.arange(3 * width)[at] for at in pieces])
    assert sorted(every.tolist()) == [*range(3 * width)]


def test_a_page_is_written_in_one_column():
  rng = np.random.default_rng(0)
  _, _, (page, _) = draw(rng)
  k, v = jnp.asarray(rng.normal(size=(2, 6, 2, 4)), jnp.float32)
  new = page.write(k, v, 1)
  np.testing.assert_array_equal(new.k[..., 1], k)
  np.testing.assert_array_equal(new.v[:, :, 1], v)
  for at in (0, 2):
    np.testing.assert_array_equal(new.k[..., at], page.k[..., at])
    np.testing.assert_array_equal(new.v[:, :, at], page.v[:, :, at])


def test_int8_columns_keep_their_own_scale():
  zeros = jnp.zeros((1, 1, 2, 3), jnp.int8)
  page = Page(
    zeros, jnp.swapaxes(zeros, 2, 3), jnp.zeros((1, 1, 3)), jnp.ones((1, 1, 3))
  )
  k, v = jnp.asarray([[[2.54, -1.005]]]), jnp.asarray([[[0.0, 0.0]]])
  new = page.write(k, v, 2)
  # Of 127 steps of 0.02: -1.005 is 50.25.
  np.testing.assert_array_equal(new.k[0, 0, :, 2], [127, -50])
  np.testing.assert_allclose(new.k_scale[0, 0, 2], 0.02, rtol=1e-6)
  np.testing.assert_array_equal(new.k_scale[0, 0, :2], 0.0)
  np.testing.assert_array_equal(new.v, 0)
  assert new.v_scale[0, 0, 2] > 0.0  # of zeros too: they are divided by it


def test_int8_scores_and_values_are_those_of_what_was_stored():
  rng = np.random.default_rng(0)
  q, shared, pages = draw(rng, C=3)
  normal = lambda: jnp.asarray(rng.normal(size=(6, 2, 4)), jnp.float32)
  small, large = [], []
  for page in pages:
    size = jnp.zeros((6, 2, 3))
    coded = Page(
      jnp.zeros_like(page.k, jnp.int8), jnp.zeros_like(page.v, jnp.int8),
      size, size,
    )  # fmt: skip
    for at in range(3):
      coded = coded.write(normal(), normal(), at)
    small.append(coded)
    large.append(
      Page(
        coded.k * coded.k_scale[:, :, None], coded.v * coded.v_scale[..., None]
      )
    )
  run = functools.partial(
    cache.decode, q, shared, column=jnp.int32(1), used=1,
    limit=jnp.full((2, 3), 5, jnp.int32), scale=0.5,
  )  # fmt: skip
  np.testing.assert_allclose(run(pages=small), run(pages=large), atol=1e-6)
