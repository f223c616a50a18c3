"""Tests of brorl_jax/model/attention.py."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers

from brorl_jax.model import attention, views
from brorl_jax.model.spec import Rope
from brorl_jax.model.target import Target

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
  got = turned(x, 3, Rope(100.0))
  np.testing.assert_allclose(got.ravel(), want, atol=1e-6)
  np.testing.assert_array_equal(turned(x, 0, Rope(100.0)), x)
  # And the other members, (0, 1) and (0, 2).
  x = jnp.asarray([0.0, 0.0, 1.0, 2.0]).reshape(1, 1, 1, 1, 4)
  want = [-np.sin(3), -2 * np.sin(0.3), np.cos(3), 2 * np.cos(0.3)]
  got = turned(x, 3, Rope(100.0))
  np.testing.assert_allclose(got.ravel(), want, atol=1e-6)


def test_every_query_turns_by_its_own_position_and_every_head_alike():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2, 3, 4, 5, 6)).astype(np.float32)
  position = rng.integers(0, 50, (2, 3, 4))
  rope = Rope(20.0)
  got = attention.rotate(
    jnp.asarray(x), *rope.turn(jnp.asarray(position), 6), CPU
  )
  pairs = x[..., :3] + 1j * x[..., 3:]
  for p, r, t, h, i in np.ndindex(pairs.shape):
    angle = position[p, r, t] * 20.0 ** (-i / 3)
    pairs[p, r, t, h, i] *= np.exp(1j * angle)
  want = np.concatenate([pairs.real, pairs.imag], axis=-1)
  np.testing.assert_allclose(got, want, atol=2e-5)


def test_rotated_products_depend_on_the_distance_alone():
  rng = np.random.default_rng(0)
  q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 1, 8))) for _ in range(2))
  rope = Rope(1e4)
  product = lambda at, to: float(
    jnp.sum(turned(q, at, rope) * turned(k, to, rope))
  )
  for distance in (0, 1, 17):
    base = product(distance, 0)
    for start in (1, 40, 500):
      assert product(start + distance, start) == pytest.approx(base, abs=2e-4)
  assert abs(product(0, 0) - product(3, 0)) > 0.01
  assert abs(product(3, 0) - product(0, 3)) > 0.01


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
  forms = [
    lambda x, target=target: attention.rotate(x, cos, sin, target)
    for target in (TPU, CPU)
  ]
  (got, pull), (want, reference) = (jax.vjp(form, x) for form in forms)
  slope = jnp.asarray(rng.normal(size=x.shape), dtype)
  # Where slopes are bfloat16, either form rounds them.
  atol = 1e-6 if dtype == "float32" else 0.04
  np.testing.assert_allclose(got, want, atol=atol / 10, rtol=0)
  np.testing.assert_allclose(
    *(np.asarray(f(slope)[0], np.float32) for f in (pull, reference)),
    atol=atol,
    rtol=0,
  )


def test_the_scale_of_a_rope_lengthens_what_it_turns():
  x = jnp.asarray([3.0, 0.0, 4.0, 1.0]).reshape(1, 1, 1, 1, 4)
  rope = Rope(100.0, "yarn", 4.0, 64, scale=1.5)
  plain = Rope(100.0, "yarn", 4.0, 64)
  got, want = turned(x, 7, rope), 1.5 * turned(x, 7, plain)
  np.testing.assert_allclose(got, want, atol=1e-6)
  assert float(jnp.linalg.norm(got)) == pytest.approx(1.5 * 26**0.5, rel=1e-6)


# theta^(-2i/8) = 2^-i.
PLAIN = [1.0, 0.5, 0.25, 0.125]


@pytest.mark.parametrize(
  "rope, want",
  [
    (Rope(16.0), PLAIN),
    # Up to the trained positions, which a policy does not pass.
    (Rope(16.0, "dynamic", 4.0), PLAIN),
    (Rope(16.0, "linear", 4.0), [0.25, 0.125, 0.0625, 0.03125]),
    (Rope(16.0, "linear", 1.0), PLAIN),
  ],
  ids=lambda x: getattr(x, "kind", ""),
)
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


@pytest.mark.parametrize(
  "trained, truncate, left",
  [
    # theta^(-2i/16) = 2^-i, so that pair i makes trained / (2 pi 2^i) turns:
    # 32 of them, the upper limit, at pair 1.577, one at pair 6.577.
    (600, True, [1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0]),
    (600, False, [1, 1, 0.915463, 0.715463, 0.515463, 0.315463, 0.115463, 0]),
    # 32 turns before the first pair, one at pair 2.67: the ramp begins at 0.
    (40, True, [1, 2 / 3, 1 / 3, 0, 0, 0, 0, 0]),
    (40, False, [1, 0.625528, 0.251056, 0, 0, 0, 0, 0]),
    # All pairs turn more than 32 times.
    (2_000_000, True, [1] * 8),
  ],
)
def test_yarn_leaves_fast_pairs_stretches_slow_ones_and_mixes_between(
  trained, truncate, left
):
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


def test_yarns_ramp_may_be_a_step():
  # Both limits at pair 3, where there are 8 turns.
  trained = 402  # 63.98 turns of pair 0
  rope = Rope(
    256.0, "yarn", 4.0, trained, low=trained / 16 / math.pi,
    high=trained / 16 / math.pi, truncate=False,
  )  # fmt: skip
  plain = 2.0 ** -np.arange(8)
  want = np.where(np.arange(8) <= 3, plain, plain / 4.0)
  np.testing.assert_allclose(rope.frequency(16), want, rtol=1e-6)


CPU = Target("cpu", 1, 0)
MASKS = {
  "all": (2, 3, 4),
  "rows": (2, 3, 1),
  "queries": (2, 1, 4),
  "": (2, 1, 1),
}


def test_pieces_by_hand():
  of = attention.pieces
  assert of(2**10, 2**10, on_cpu=True) == 1
  assert of(2**10 + 1, 2**10, on_cpu=True) == 2
  assert of(2**20, 2**10, on_cpu=True) == 16  # no more
  assert of(2**20, 100, on_cpu=True) == 7  # of 16 queries at least
  assert of(2**20, 2**10, on_cpu=False) == 4
  assert of(2**28, 2**14, on_cpu=False) == 64
  assert of(1, 1, on_cpu=True) == 1


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("shared", tiers.some([None, *MASKS], 5))
@pytest.mark.parametrize("pieces", tiers.some([1, 2, 3], 2))
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
    jnp.asarray(q),
    None if shared is None else tuple(map(jnp.asarray, prefix)),
    tuple(map(jnp.asarray, own)),
    scale=0.3,
    softcap=softcap,
    target=CPU,
  )
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


@pytest.mark.parametrize("softcap", [0.0, 50.0])
def test_a_query_that_sees_nothing_stays_finite(softcap):
  one = jnp.ones((1, 1, 1, 1, 2))
  shared = jnp.ones((1, 1, 3, 2)), jnp.ones((1, 1, 3, 2))
  blind = jnp.zeros((1, 1, 1, 3), bool), jnp.zeros((1, 1, 1, 1), bool)
  got = attention.attend(
    one,
    (*shared, blind[0]),
    (one, one, blind[1]),
    scale=1.0,
    softcap=softcap,
    target=CPU,
  )
  assert np.isfinite(got).all()


def test_the_softcap_bounds_scores_however_large():
  # Scores of 2 and of -2 with any larger input: weights e^2 and e^-2.
  q = jnp.full((1, 1, 2, 1, 1), 1e6)
  k = jnp.asarray([1.0, -1.0]).reshape(1, 1, 1, 2, 1)
  v = jnp.asarray([1.0, 0.0]).reshape(1, 1, 1, 2, 1)
  see = jnp.tril(jnp.ones((1, 1, 2, 2), bool))
  got = attention.attend(
    q, None, (k, v, see), scale=1.0, softcap=2.0, target=CPU
  )
  assert float(got.ravel()[1]) == pytest.approx(
    1 / (1 + math.exp(-4)), rel=1e-6
  )


@pytest.mark.ci
@pytest.mark.parametrize("rows", [1, 3])
def test_a_window_ends_at_its_own_size(rows):
  """Of the keys that a full layer sees, those nearer than `window`."""
  rng = np.random.default_rng(0)
  mask = rng.random((2, rows, 4, 9)) < 0.7
  query = rng.integers(0, 12, (2, 3, 4))
  key = rng.integers(0, 12, (2, rows, 9))
  for window in (1, 2, 5, 100):
    got = views.within(
      jnp.asarray(np.broadcast_to(mask, (2, 3, 4, 9))),
      jnp.asarray(query),
      jnp.asarray(key),
      window,
    )
    assert got.shape == (2, 3, 4, 9) and got.dtype == bool
    for p, r, q, t in np.ndindex(got.shape):
      row = r if rows > 1 else 0
      near = query[p, r, q] - key[p, row, t] < window
      assert got[p, r, q, t] == (mask[p, row, q, t] and near)


def test_a_window_by_hand():
  key = jnp.arange(6).reshape(1, 1, 6)
  see = views.within(jnp.ones((1, 1, 1, 6), bool), at(5), key, 3)
  np.testing.assert_array_equal(np.flatnonzero(see), [3, 4, 5])
