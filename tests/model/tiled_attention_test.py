"""Tests of brorl_jax/model/tiled_attention.py, as `attend` uses it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers

from brorl_jax.model import attention
from brorl_jax.model.target import Target

GPU = Target("gpu", 1, 0)
# Axes M and Q of the mask of a prefix.
MASKS = {
  "all": (2, 3, 4),
  "rows": (2, 3, 1),
  "queries": (2, 1, 4),
  "": (2, 1, 1),
}
BLIND = (0, 0, 3)  # a query that sees nothing


def draws(masks, *, P=2, R=3, Q=10, H=6, G=2, K=5, S=7, seed=0):
  """Queries, a prefix and own keys."""
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


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("masks", tiers.some([None, *MASKS], 2, 3))
@pytest.mark.parametrize("pieces", tiers.some([2, 3, 10], 1, 1))
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


@pytest.mark.ci
def test_slopes_are_those_of_float64(tiled):
  arrays = draws(MASKS["queries"])
  slope = jnp.asarray(np.random.default_rng(1).normal(size=arrays[0].shape))
  slope = slope.at[BLIND].set(0.0)
  tiled(3)
  got = slopes(arrays, slope, softcap=1.5)
  _, prefix, own = arrays
  P, M, Q, H, K = arrays[0].shape

  def plain(q, k_shared, v_shared, k, v):
    """One softmax over joined keys."""
    G = k.shape[2]
    q = q.reshape(P, M, Q, G, H // G, K)
    score = jnp.concatenate(
      [
        jnp.einsum("pmqgjk,pgsk->pmgjqs", q, k_shared),
        jnp.einsum("pmqgjk,pmgtk->pmgjqt", q, k),
      ],
      axis=-1,
    )
    seen = (
      jnp.broadcast_to(x[2], (P, M, Q, x[2].shape[3])) for x in (prefix, own)
    )
    see = jnp.concatenate([*seen], axis=-1)[:, :, None, None]
    score = jnp.where(see, 1.5 * jnp.tanh(0.3 * score / 1.5), -1e30)
    weight = jax.nn.softmax(score, axis=-1)
    S = k_shared.shape[2]
    out = jnp.einsum("pmgjqs,pgsk->pmqgjk", weight[..., :S], v_shared)
    out += jnp.einsum("pmgjqt,pmgtk->pmqgjk", weight[..., S:], v)
    return out.reshape(P, M, Q, H, K)

  with jax.enable_x64():
    wide = [
      np.asarray(x, np.float64) for x in (arrays[0], *prefix[:2], *own[:2])
    ]
    value, pull = jax.vjp(plain, *wide)
    want = [value, *pull(np.asarray(slope, np.float64))]
  want = [np.array(x) for x in want]
  want[0][BLIND] = 0.0
  for a, b in zip(jax.tree.leaves(got), want, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


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
