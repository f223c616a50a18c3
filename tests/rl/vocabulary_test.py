"""Tests of brorl_jax/rl/vocabulary.py."""

import functools

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
import pytest
import tiers

from brorl_jax.rl import losses, vocabulary

P, M, D, V = 2, 10, 5, 11


def draw():
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  return (normal(P, M, D), normal(D, V),
    jnp.asarray(rng.integers(0, V, (P, M))), normal(P, M))  # fmt: skip


def tiled(hidden, kernel, tokens, rows, block=V):
  logits = lambda x, head: jnp.tanh(x @ head.T) * 4.0
  return vocabulary.token_logp(
    logits, kernel.T, hidden, tokens, rows=rows, block=block
  )


def with_gradient(form):
  """Outputs, and the gradient in both arguments for slopes of the outputs."""

  @jax.jit
  def run(hidden, kernel, slopes):
    found, pull = jax.vjp(form, hidden, kernel)
    return found, pull(slopes)

  return run


@pytest.mark.parametrize("rows", tiers.some([3, 10], 1))
def test_equals_the_plain_form_and_its_gradient(rows):
  hidden, kernel, tokens, weight = draw()

  def plain(hidden, kernel):
    return losses.token_logp(jnp.tanh(hidden @ kernel) * 4.0, tokens)

  by_tiles = with_gradient(lambda *args: tiled(*args, tokens, rows))
  at_once = with_gradient(plain)
  still, other = jnp.zeros_like(weight), weight[::-1] - 0.3
  for slopes in ((weight, other), (weight, still), (still, other)):
    got, grads = by_tiles(hidden, kernel, slopes)
    want, want_grads = at_once(hidden, kernel, slopes)
    for a, b in zip(got, want, strict=True):
      np.testing.assert_allclose(a, b, atol=1e-5)
    for a, b in zip(grads, want_grads, strict=True):
      np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize(
  "rows, block, scale", tiers.some([(4, V, 40.0), (3, 1, 4.0)], 1)
)
def test_gradient_of_a_weighted_sum_of_both(rows, block, scale):
  """Tiles that do not divide, and distributions that are nearly certain."""
  hidden, kernel, tokens, weight = draw()
  other = 1.0 - weight[::-1]
  form = lambda x, head: jnp.tanh(x @ head.T) * scale

  def total(found):
    logp, entropy = found
    return jnp.sum(weight * logp + other * entropy)

  plain = lambda h, k: total(losses.token_logp(form(h, k.T), tokens))
  run = lambda h, k: total(
    vocabulary.token_logp(form, k.T, h, tokens, rows=rows, block=block)
  )
  want = jax.grad(plain, argnums=(0, 1))(hidden, kernel)
  got = jax.jit(jax.grad(run, argnums=(0, 1)))(hidden, kernel)
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5 * jnp.abs(b).max())


@pytest.mark.parametrize("block", [1, V])
def test_a_logit_of_minus_infinity_adds_nothing(block):
  """The first tokens, which fill blocks, and one between others."""
  hidden, kernel, tokens, _ = draw()
  alive = np.isin(np.arange(V), [0, 1, 2, 7], invert=True)
  kernel = kernel.at[0].set(jnp.where(alive, 1.0, -1.0))
  chosen, few = jnp.flatnonzero(alive)[tokens % 7], kernel[:, alive]
  form = lambda x, head: jnp.where(head[:, 0] > 0.0, x @ head.T, -jnp.inf)
  by_tiles = functools.partial(vocabulary.token_logp, form, kernel.T)
  found = [jax.vjp(lambda h, way=way: jnp.stack(way(h)), hidden)
    for way in (lambda h: losses.token_logp(h @ few, tokens % 7),
      lambda h: losses.token_logp(form(h, kernel.T), chosen),
      lambda h: by_tiles(h, chosen, rows=3, block=block))]  # fmt: skip
  (want, pull), *others = found
  for got, back in others:
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_allclose(*back(want), *pull(want), atol=1e-4)


@pytest.mark.ci
def test_the_gradient_of_the_entropy_by_hand():
  """Logits 0 and log 3: p = 1/4 and 3/4, and H = log 4 - 3/4 log 3.

  d H / d l_0 = -1/4 (-log 4 + H) = 3/16 log 3, and the other is minus that.
  """
  logits = lambda x, head: x @ head.T
  hidden = jnp.array([[[0.0, np.log(3.0)]]])
  entropy = lambda h: vocabulary.token_logp(
    logits, jnp.eye(2), h, jnp.array([[1]]), rows=1, block=2
  )[1].sum()
  value, grad = jax.value_and_grad(entropy)(hidden)
  assert float(value) == pytest.approx(np.log(4) - 0.75 * np.log(3))
  slope = 3 / 16 * np.log(3)
  np.testing.assert_allclose(grad, [[[slope, -slope]]], rtol=1e-5)


def work(jaxpr, shape):
  """How many results of this shape are computed, in loops too."""
  return sum(found == shape for found in shapes(jaxpr))


@pytest.mark.perf
def test_an_output_that_is_not_differentiated_costs_nothing():
  hidden, kernel, tokens, _ = draw()
  tile = P, 3, V

  def cost(total):
    run = lambda h, k: total(*tiled(h, k, tokens, 3))
    grad = jax.jit(jax.grad(run, argnums=(0, 1), has_aux=True))
    return work(jax.make_jaxpr(grad)(hidden, kernel).jaxpr, tile)

  alone = cost(lambda logp, entropy: (logp.sum(), None))
  still = jax.lax.stop_gradient
  assert cost(lambda logp, entropy: (logp.sum(), still(entropy.sum()))) == alone
  assert cost(lambda logp, entropy: (logp.sum(), entropy.sum())) == alone
  total = lambda logp, entropy: (logp.sum() + still(entropy).sum(), None)
  assert cost(total) == alone
  assert cost(lambda logp, entropy: (logp.sum() + entropy.sum(), None)) > alone


def shapes(jaxpr):
  """Of everything that is computed, in loops too."""
  for eqn in jaxpr.eqns:
    yield from (v.aval.shape for v in eqn.outvars)
    for sub in jex.core.jaxprs_in_params(eqn.params):
      yield from shapes(sub)


@pytest.mark.perf
def test_no_array_has_the_logits_of_all_tokens():
  hidden, kernel, tokens, _ = draw()
  loss = lambda h, k, **tile: jnp.sum(tiled(h, k, tokens, **tile)[0])

  def largest(**tile):
    grad = jax.grad(lambda *a: loss(*a, **tile), argnums=(0, 1))
    found = jax.make_jaxpr(grad)(hidden, kernel)
    return max(np.prod(s) for s in shapes(found.jaxpr))

  assert largest(rows=M) == P * M * V
  assert largest(rows=2) == P * M * D == 100  # hidden states
  assert largest(rows=M, block=1) == 100


@pytest.mark.parametrize(
  "blocked, rows, devices", tiers.some([(2, 4, 1), (6, 4, 8)], 1)
)
def test_blocks_of_the_vocabulary_change_nothing(blocked, rows, devices):
  rng = np.random.default_rng(1)
  hidden, _, _, weight = draw()
  kernel = jnp.asarray(rng.normal(size=(D, 12)), jnp.float32)
  tokens = jnp.asarray(rng.integers(0, 12, (P, M)))
  # Logits that overflow unless the largest one so far is taken off.
  for scale in (1.0, 300.0):
    logits = lambda x, head, scale=scale: jnp.tanh(x @ head.T) * scale
    run = lambda h, k, block, logits=logits: vocabulary.token_logp(
      logits, k.T, h, tokens, rows=rows, block=block, spread=devices > 1
    )
    whole, blocks = (with_gradient(lambda *a, run=run,
        block=block: run(*a, block))(hidden, kernel, (weight, weight[::-1]))
      for block in (12, 12 // blocked))  # fmt: skip
    for a, b in zip(blocks[0], whole[0], strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)
    for a, b in zip(blocks[1], whole[1], strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * scale)


def test_tiles():
  shape = functools.partial(vocabulary.tile_shape, devices=1, on_cpu=True)
  assert shape(10**6, 2048, 1) == (1024, 2048)
  assert shape(10**6, 2048, 4) == (256, 2048)
  assert shape(100, 2048, 4) == (100, 2048)
  # 151,936 = 2^7 x 1,187.
  assert shape(10**6, 151936, 1) == (1024, 1187)
  assert shape(10**6, 151936, 4) == (256, 1187)
  # A prime has no blocks.
  assert shape(10**6, 150001, 2) == (2**20 // 150001, 150001)
  assert shape(10**6, 10**9 + 7, 4) == (1, 10**9 + 7)
  # Every device of eight has a part of a block.
  shape = functools.partial(vocabulary.tile_shape, devices=8, on_cpu=False)
  rows, block = shape(10**6, 151936, 8)
  assert (rows, block) == (4096, 8 * 1187) and rows * 8 * block <= 8 * 2**26
  # 16,424 = 8 x 2,053: half of it would fit, but not in eight parts.
  assert shape(10**6, 16424, 8) == (2**29 // (16424 * 8), 16424)
