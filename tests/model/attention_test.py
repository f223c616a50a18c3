"""Attention: rotations, masks, pieces and tiles."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from small_policies import GEMMA2, TINY

from brorl_jax.model import attention
from brorl_jax.model.spec import Rope, Target

CPU, TPU = Target("cpu", 1, 0), Target("tpu", 1, 0)


def at(position):
  return jnp.full((1, 1, 1), position, jnp.int32)


def turned(x, position, rope):
  cos, sin = rope.turn(at(position), x.shape[-1])
  return attention.rotate(x, cos, sin, CPU)


def test_rotation_by_hand():
  # Two pairs, (1, 0) and (2, 0); at position 3 they turn by 3 and by 3 / 10.
  x = jnp.asarray([1.0, 2.0, 0.0, 0.0]).reshape(1, 1, 1, 1, 4)
  want = [np.cos(3), 2 * np.cos(0.3), np.sin(3), 2 * np.sin(0.3)]
  np.testing.assert_allclose(turned(x, 3, Rope(100.0)).ravel(), want, atol=1e-6)
  np.testing.assert_array_equal(turned(x, 0, Rope(100.0)), x)


def test_every_query_turns_by_its_own_position_and_every_head_alike():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2, 3, 4, 5, 6)).astype(np.float32)
  position = rng.integers(0, 50, (2, 3, 4))
  turn = Rope(20.0).turn(jnp.asarray(position), 6)
  got = attention.rotate(jnp.asarray(x), *turn, CPU)
  pairs = x[..., :3] + 1j * x[..., 3:]
  for p, r, t, h, i in np.ndindex(pairs.shape):
    angle = position[p, r, t] * 20.0 ** (-i / 3)
    pairs[p, r, t, h, i] *= np.exp(1j * angle)
  want = np.concatenate([pairs.real, pairs.imag], axis=-1)
  np.testing.assert_allclose(got, want, atol=2e-5)


def test_bfloat16_is_rotated_in_float32_and_stays_bfloat16():
  x = jnp.asarray([1.0, 2.0, 0.0, 0.0], jnp.bfloat16).reshape(1, 1, 1, 1, 4)
  got = turned(x, 1001, Rope(100.0))  # not a bfloat16: it would be 1000
  want = [np.cos(1001), 2 * np.cos(100.1), np.sin(1001), 2 * np.sin(100.1)]
  assert got.dtype == jnp.bfloat16
  np.testing.assert_allclose(got.ravel().astype(np.float32), want, atol=1e-2)
  cos, sin = Rope(100.0).turn(at(1001), 4)
  assert cos.dtype == sin.dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tpu_turns_by_a_product_to_the_same_numbers(dtype):
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(2, 3, 5, 3, 6)), dtype)
  cos, sin = Rope(100.0).turn(jnp.asarray(rng.integers(0, 99, (2, 1, 5))), 6)
  forms = [lambda x, target=target: attention.rotate(x, cos, sin, target)
    for target in (TPU, CPU)]  # fmt: skip
  (got, pull), (want, reference) = (jax.vjp(form, x) for form in forms)
  slope = jnp.asarray(rng.normal(size=x.shape), dtype)
  # Where slopes are bfloat16, either form rounds them.
  atol = 1e-6 if dtype == "float32" else 0.04
  np.testing.assert_allclose(got, want, atol=atol / 10, rtol=0)
  np.testing.assert_allclose(
    *(np.asarray(f(slope)[0], np.float32) for f in (pull, reference)),
    atol=atol, rtol=0)  # fmt: skip


def test_the_scale_of_a_rope_lengthens_what_it_turns():
  x = jnp.asarray([3.0, 0.0, 4.0, 1.0]).reshape(1, 1, 1, 1, 4)
  rope = Rope(100.0, "yarn", 4.0, 64, scale=1.5)
  plain = Rope(100.0, "yarn", 4.0, 64)
  got, want = turned(x, 7, rope), 1.5 * turned(x, 7, plain)
  np.testing.assert_allclose(got, want, atol=1e-6)
  assert float(jnp.linalg.norm(got)) == pytest.approx(1.5 * 26**0.5, rel=1e-6)


# theta^(-2i/8) = 2^-i.
PLAIN = [1.0, 0.5, 0.25, 0.125]


@pytest.mark.parametrize("rope, want", [
  (Rope(16.0), PLAIN),
  # Up to the trained positions, which a policy does not pass.
  (Rope(16.0, "dynamic", 4.0), PLAIN),
  (Rope(16.0, "linear", 4.0), [0.25, 0.125, 0.0625, 0.03125]),
  (Rope(16.0, "linear", 1.0), PLAIN),
], ids=lambda x: getattr(x, "kind", ""))  # fmt: skip
def test_frequencies_that_ignore_lengths(rope, want):
  got = rope.frequency(8)
  assert got.dtype == np.float32 and isinstance(got, np.ndarray)
  np.testing.assert_allclose(got, want, rtol=1e-7)


def test_llama3_frequencies_in_their_three_regimes():
  """As in Meta's apply_scaling: by wavelength, pair by pair."""
  rope = Rope(16.0, "llama3", 8.0, 50, low=1.0, high=4.0)
  want = []
  for plain in PLAIN:
    wavelength = 2 * math.pi / plain
    if wavelength < 50 / 4.0:
      want.append(plain)
    elif wavelength > 50 / 1.0:
      want.append(plain / 8.0)
    else:
      smooth = (50 / wavelength - 1.0) / (4.0 - 1.0)
      want.append((1 - smooth) * plain / 8.0 + smooth * plain)
  # Turns in 50 positions: 7.96, 3.98, 1.99 and 0.995.
  by_hand = [1.0, 0.496919, 0.103396, 0.015625]
  np.testing.assert_allclose(want, by_hand, atol=1e-6)
  np.testing.assert_allclose(rope.frequency(8), want, rtol=1e-6)


@pytest.mark.parametrize("trained, truncate, left", [
  # theta^(-2i/16) = 2^-i, so that pair i makes trained / (2 pi 2^i) turns:
  # 32 of them, the upper limit, at pair 1.577, one at pair 6.577.
  (600, True, [1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0]),
  (600, False, [1, 1, 0.915463, 0.715463, 0.515463, 0.315463, 0.115463, 0]),
  # 32 turns before the first pair, one at pair 2.67: the ramp begins at 0.
  (40, True, [1, 2 / 3, 1 / 3, 0, 0, 0, 0, 0]),
  (40, False, [1, 0.625528, 0.251056, 0, 0, 0, 0, 0]),
  # All pairs turn more than 32 times.
  (2_000_000, True, [1] * 8),
])  # fmt: skip
def test_yarn_leaves_fast_pairs_and_stretches_slow(trained, truncate, left):
  rope = Rope(256.0, "yarn", 4.0, trained, truncate=truncate)
  plain = 2.0 ** -np.arange(8)
  left = np.asarray(left)
  want = left * plain + (1 - left) * plain / 4.0
  np.testing.assert_allclose(rope.frequency(16), want, rtol=2e-5)


def test_yarns_ramp_ends_with_the_head():
  # One turn in a thousand is made at pair 16.5; the ramp ends at 15, the last
  # component, which is what the authors' code does.
  rope = Rope(256.0, "yarn", 4.0, 600, low=1e-3)
  left = 1 - np.clip((np.arange(8) - 1) / 14, 0, 1)
  plain = 2.0 ** -np.arange(8)
  want = left * plain + (1 - left) * plain / 4.0
  np.testing.assert_allclose(rope.frequency(16), want, rtol=1e-6)


# Axes M and Q of the mask of a prefix.
MASKS = {
  "all": (2, 3, 4), "rows": (2, 3, 1), "queries": (2, 1, 4), "": (2, 1, 1),
}  # fmt: skip


def test_pieces_by_hand():
  of = attention.pieces
  assert of(2**10, 2**10, on_cpu=True) == 1
  assert of(2**10 + 1, 2**10, on_cpu=True) == 2
  assert of(2**20, 2**10, on_cpu=True) == 16  # no more
  assert of(2**20, 100, on_cpu=True) == 7  # of 16 queries at least
  assert of(2**20, 2**10, on_cpu=False) == 4
  assert of(2**28, 2**14, on_cpu=False) == 64
  assert of(1, 1, on_cpu=True) == 1


@pytest.mark.parametrize("shared, softcap, pieces", [
  (None, 0.0, 2), ("all", 1.5, 1), ("rows", 0.0, 2), ("queries", 1.5, 3),
  ("", 0.0, 1),
])  # fmt: skip
def test_attention_is_the_softmax_over_both_kinds_of_keys(
  shared, softcap, pieces, monkeypatch
):
  monkeypatch.setattr(attention, "pieces", lambda each, Q, on_cpu: pieces)
  P, R, Q, H, G, K, S = 2, 3, 4, 6, 2, 5, 7
  rng = np.random.default_rng(0)
  normal = lambda *shape: 2 * rng.normal(size=shape).astype(np.float32)
  q = normal(P, R, Q, H, K)
  k_shared, v_shared = normal(P, G, S, K), normal(P, G, S, K)
  k_own, v_own = normal(P, R, G, Q, K), normal(P, R, G, Q, K)
  visible = np.tril(rng.random((P, R, Q, Q)) < 0.5)
  visible[..., 0] = True
  mask = rng.random((*MASKS.get(shared, (P, R, Q)), S)) < 0.6
  prefix, own = (k_shared, v_shared, mask), (k_own, v_own, visible)
  got = attention.attend(
    jnp.asarray(q), None if shared is None else tuple(map(jnp.asarray, prefix)),
    tuple(map(jnp.asarray, own)), scale=0.3, softcap=softcap, target=CPU,
  )  # fmt: skip
  mask = np.broadcast_to(mask, (P, R, Q, S))
  want = np.zeros(q.shape)
  for p, r, t, h in np.ndindex(P, R, Q, H):
    g = h // (H // G)
    see = visible[p, r, t]
    keys, values = k_own[p, r, g][see], v_own[p, r, g][see]
    if shared is not None:
      see = mask[p, r, t]
      keys = np.concatenate([k_shared[p, g][see], keys])
      values = np.concatenate([v_shared[p, g][see], values])
    score = 0.3 * (keys @ q[p, r, t, h]).astype(np.float64)
    if softcap:
      score = softcap * np.tanh(score / softcap)
    weight = np.exp(score)
    want[p, r, t, h] = weight / weight.sum() @ values
  np.testing.assert_allclose(got, want, atol=2e-5)


GPU = Target("gpu", 1, 0)
BLIND = (0, 0, 3)  # a query that sees nothing


def draws(masks, *, P=2, R=3, Q=10, H=6, G=2, K=5, S=7, seed=0):
  rng = np.random.default_rng(seed)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  see = np.tril(rng.random((P, R, Q, Q)) < 0.6)
  see[..., 0] = True
  see[BLIND] = False
  prefix = None
  if masks is not None:
    p, r, t = masks
    mask = rng.random((p, r if r == 1 else R, t if t == 1 else Q, S)) < 0.6
    mask[0, 0, 0 if t == 1 else 3] = False
    prefix = (normal(P, G, S, K), normal(P, G, S, K), jnp.asarray(mask))
  own = normal(P, R, G, Q, K), normal(P, R, G, Q, K), jnp.asarray(see)
  return normal(P, R, Q, H, K), prefix, own


@pytest.fixture
def tiled(monkeypatch):
  """Takes as many tiles as are asked for, as on an accelerator."""

  def tiled(count):
    monkeypatch.setattr(attention, "pieces", lambda each, Q, on_cpu: count)

  return tiled


def slopes(arrays, slope, dtype=jnp.float32, **options):
  """Output of attention, and the slopes of q, k and v on both sides."""
  q, prefix, own = arrays
  masks = [side and side[2] for side in (prefix, own)]

  def out(q, *sides):
    sides = [x and (*x, mask) for x, mask in zip(sides, masks, strict=True)]
    return attention.attend(q, *sides, scale=0.3, target=GPU, **options)

  cast = lambda x: jax.tree.map(lambda y: y.astype(dtype), x)
  value, pull = jax.vjp(
    out, cast(q), *(side and cast(side[:2]) for side in (prefix, own))
  )
  return value, pull(slope.astype(value.dtype))


@pytest.mark.parametrize("masks, softcap, pieces", [
  (None, 0.0, 2), ("queries", 1.5, 3), tiers.at_night(("rows", 0.0, 10)),
])  # fmt: skip
def test_tiles_change_neither_output_nor_slopes(masks, softcap, pieces, tiled):
  """10 queries are padded to 4 + 4 + 4. What padding says counts nowhere."""
  arrays = draws(None if masks is None else MASKS[masks])
  slope = jnp.asarray(np.random.default_rng(1).normal(size=arrays[0].shape))
  slope = slope.at[BLIND].set(0.0)
  found = []
  for count in (1, pieces):
    tiled(count)
    found.append(slopes(arrays, slope, softcap=softcap))
    found[-1] = found[-1][0].at[BLIND].set(0.0), found[-1][1]
  assert all(float(jnp.abs(x).max()) > 0.1 for x in jax.tree.leaves(found[0]))
  for a, b in zip(*map(jax.tree.leaves, found), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_query_that_sees_nothing_says_nothing(tiled):
  arrays = draws(MASKS["queries"])
  slope = jnp.zeros(arrays[0].shape).at[BLIND].set(1.0)
  tiled(3)
  out, found = slopes(arrays, slope)
  assert not out[BLIND].any() and np.isfinite(out).all()
  assert not any(np.asarray(x).any() for x in jax.tree.leaves(found))


@pytest.mark.perf
def test_half_the_tile_has_a_quarter_of_the_scores(tiled):
  """Compiled: what a gradient needs besides its arguments and results."""

  def work(pieces):
    tiled(pieces)
    shape = lambda *x: jax.ShapeDtypeStruct(x, jnp.float32)
    see = jax.ShapeDtypeStruct((1, 1, 4096, 4096), bool)

    def loss(q, k, v, see):
      return attention.attend(q, None, (k, v, see), scale=1.0, target=GPU).sum()

    side = shape(1, 2, 2, 4096, 16)
    program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(
      shape(1, 2, 4096, 8, 16), side, side, see
    )
    return program.compile().memory_analysis().temp_size_in_bytes

  few, some, many = work(4), work(8), work(16)
  # Rows, heads, queries and keys of a tile; float32 scores and their slopes.
  scores = 2 * 8 * 1024**2 * 4
  assert few - some > 1.5 * scores * (1 - 1 / 4)
  assert (some - many) / (few - some) == pytest.approx(1 / 4, abs=0.05)


def _position(policy, view, pair=0):
  """The position whose angle a view has, from the fastest pair."""
  angle = np.arctan2(view.sin[..., pair], view.cos[..., pair])
  fastest = policy.rope.frequency(policy.head_size)[pair]
  return np.round(np.mod(angle, 2 * np.pi) / fastest).astype(int)


def test_slots_see_their_own_prompt_and_stand_behind_it():
  # A lane with prompts of 3 and of 2 tokens, padded on the left.
  mask = jnp.array([[[True, True, True], [False, True, True]]])
  length, which = jnp.array([[1, 2]]), jnp.array([[0, 1]])
  (view,) = attention.slot_views(TINY, mask, length, which)
  want = [[[1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1]]]
  np.testing.assert_array_equal(view.shared, np.array(want, bool))
  np.testing.assert_array_equal(_position(TINY, view)[0, :, 0], [3, 3])
  np.testing.assert_array_equal(view.own, length)


def test_a_sliding_layer_sees_its_window_and_the_other_all():
  policy = dataclasses.replace(GEMMA2, window=2, sliding=(True, False))
  Q = 4
  position = jnp.arange(Q)[None, None]
  own = jnp.tril(jnp.ones((Q, Q), bool))[None, None]
  both = attention.row_views(policy, position, own, None)
  view = lambda layer: attention.layer_view(policy, both, jnp.int32(layer))
  of = lambda layer: view(layer).own[0, 0]
  near = np.tril(np.ones((Q, Q), bool)) & ~np.tril(np.ones((Q, Q), bool), -2)
  np.testing.assert_array_equal(of(0), near)
  np.testing.assert_array_equal(of(1), own[0, 0])


def test_a_token_of_a_tree_sees_what_leads_to_it_and_padding_itself():
  # A prompt of two tokens, its answers a b and c, a second tree, padding.
  #            0  1  a  b  c  0  .
  visible, depth = attention.tree_views(jnp.array([[[5, 5, 4, 4, 5, 6, 0]]]))
  want = [[1, 0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0],
    [1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 1, 0, 0],
    [0, 0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0, 1]]  # fmt: skip
  np.testing.assert_array_equal(visible[0, 0], np.array(want, bool))
  np.testing.assert_array_equal(depth[0, 0], [0, 1, 2, 3, 2, 0, 0])
