"""Tests of brorl_jax/model/experts.py."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from brorl_jax.many import meshes
from brorl_jax.model import experts

# Sizes that are all different, so that no two axes can be swapped unnoticed.
n, D, E, F = 22, 16, 8, 12


def some(seed=0, tokens=n):
  """Tokens, router, gate, up, down."""
  rng = np.random.default_rng(seed)
  shapes = (tokens, D), (D, E), (E, D, F), (E, D, F), (E, F, D)
  return tuple(
    jnp.asarray(rng.normal(size=shape) / shape[-2] ** 0.5, jnp.float32)
    for shape in shapes
  )


def reference(x, router, gate, up, down, *, per_token, normalize):
  """One token and one expert at a time, in float64."""
  x, router, gate, up, down = (
    np.asarray(a, np.float64) for a in (x, router, gate, up, down)
  )
  out = np.zeros_like(x)
  for token, h in enumerate(x):
    share = np.exp(h @ router)
    share /= share.sum()
    chosen = np.argsort(-share, kind="stable")[:per_token]
    total = share[chosen].sum() if normalize else 1.0
    for e in chosen:
      g = h @ gate[e]
      y = (g / (1 + np.exp(-g)) * (h @ up[e])) @ down[e]
      out[token] += share[e] / total * y
  return out


def dense(x, router, gate, up, down, *, per_token, normalize):
  """Every expert for every token, and zeros where it was not chosen."""
  share = jax.nn.softmax(x @ router)
  least = jnp.sort(share, axis=-1)[:, -per_token][:, None]
  share = jnp.where(share >= least, share, 0.0)
  if normalize:
    share = share / jnp.sum(share, axis=-1, keepdims=True)
  h = jax.nn.silu(jnp.einsum("nd,edf->nef", x, gate))
  h = h * jnp.einsum("nd,edf->nef", x, up)
  return jnp.einsum("ne,nef,efd->nd", share, h, down)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("per_token", [1, 3, E])
def test_routing_is_a_loop_over_tokens_and_their_experts(per_token, normalize):
  args = some()
  options = {"per_token": per_token, "normalize": normalize}
  got = jax.jit(functools.partial(experts.routed, **options))(*args)
  want = reference(*args, **options)
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * abs(want).max())
  assert got.dtype == jnp.float32


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("per_token", tiers.some([1, 3, E], 1))
def test_gradients_are_those_of_all_experts_with_zero_shares(
  per_token, normalize
):
  args = some(1)
  weight = np.random.default_rng(2).normal(size=(n, D)).astype(np.float32)
  options = {"per_token": per_token, "normalize": normalize}

  def grads(f):
    loss = lambda *args: jnp.sum(weight * f(*args, **options))
    return jax.jit(jax.grad(loss, argnums=range(5)))(*args)

  for got, want in zip(grads(experts.routed), grads(dense), strict=True):
    np.testing.assert_allclose(got, want, atol=2e-6 + 1e-5 * abs(want).max())


def test_shares_of_a_single_normalized_expert_do_not_depend_on_the_router():
  """And without it they do: the largest share is below 1."""
  x, router, *weights = some()
  run = lambda router, normalize: experts.routed(
    x, router, *weights, per_token=1, normalize=normalize
  )
  np.testing.assert_allclose(
    run(router, True), run(3 * router, True), atol=1e-6
  )
  assert jnp.max(jnp.abs(run(router, False) - run(3 * router, False))) > 0.01


@pytest.mark.ci
def test_an_expert_that_nobody_chose_has_no_part_and_no_gradient():
  x, router, *weights = some()
  x, router = jnp.abs(x), router.at[:, 5].set(-9.0)
  poisoned = [w.at[5].set(1e30) for w in weights]
  run = functools.partial(experts.routed, per_token=2, normalize=True)
  got, want = run(x, router, *poisoned), run(x, router, *weights)
  np.testing.assert_array_equal(got, want)
  loss = lambda *args: jnp.sum(run(*args) ** 2)
  for grad in jax.grad(loss, argnums=(2, 3, 4))(x, router, *weights):
    moved = np.asarray(jnp.any(grad != 0.0, axis=(1, 2)))
    assert not moved[5] and moved[np.arange(E) != 5].sum() >= 3


def test_all_tokens_may_choose_the_same_experts():
  """Nothing is dropped, however uneven the load."""
  x, router, *weights = some()
  x, router = jnp.abs(x), router.at[:, 6].add(9.0).at[:, 2].add(5.0)
  options = {"per_token": 2, "normalize": True}
  got = experts.routed(x, router, *weights, **options)
  want = reference(x, router, *weights, **options)
  np.testing.assert_allclose(got, want, atol=1e-5)
  others = [w.at[jnp.asarray([0, 1, 3, 4, 5, 7])].set(0.0) for w in weights]
  alone = experts.routed(x, router, *others, **options)
  np.testing.assert_array_equal(got, alone)


def test_of_equal_shares_the_first_experts_are_chosen():
  x, _, *weights = some()
  options = {"per_token": 3, "normalize": False}
  got = experts.routed(x, jnp.zeros((D, E)), *weights, **options)
  first = [w.at[3:].set(0.0) for w in weights]
  want = reference(x, np.zeros((D, E)), *first, **options)
  np.testing.assert_allclose(got, want, atol=1e-5)
  # A tie between the chosen and the others: 1 and 4, of which 1 counts.
  x = jnp.abs(x)
  router = jnp.zeros((D, E)).at[:, 1].set(1.0).at[:, 4].set(1.0)
  got = experts.routed(x, router, *weights, per_token=1, normalize=True)
  only = [w.at[jnp.arange(E) != 1].set(0.0) for w in weights]
  want = reference(x, router, *only, per_token=1, normalize=True)
  np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_token_does_not_depend_on_the_others():
  x, *rest = some()
  run = functools.partial(experts.routed, per_token=2, normalize=True)
  whole = run(x, *rest)
  for token in (0, 7, n - 1):
    alone = run(x[token : token + 1], *rest)[0]
    np.testing.assert_allclose(whole[token], alone, atol=1e-5)


def test_shares_are_float32_and_the_result_is_that_of_the_weights():
  args = [a.astype(jnp.bfloat16) for a in some()]
  run = functools.partial(experts.routed, per_token=2, normalize=True)
  got = run(*args)
  assert got.dtype == jnp.bfloat16
  want = reference(*args, per_token=2, normalize=True)
  np.testing.assert_allclose(
    got.astype(np.float32), want, atol=0.02 * abs(want).max()
  )


@pytest.mark.perf
def test_the_router_is_multiplied_in_float32():
  args = [a.astype(jnp.bfloat16) for a in some()]
  run = functools.partial(experts.routed, per_token=2, normalize=True)
  router = jax.make_jaxpr(run)(*args).jaxpr.eqns
  (product,) = [e for e in router if e.primitive.name == "dot_general"]
  assert product.outvars[0].aval.dtype == jnp.float32


def gathered(text):
  """Elements of everything that is gathered or exchanged in a program."""
  moved = (
    r"= \(?\w+\[([\d,]*)\][^=]*? (?:all-gather|all-to-all|collective-permute)"
  )
  shapes = (m[1].split(",") for m in re.finditer(moved, text))
  return [math.prod(int(size) for size in shape if size) for shape in shapes]


@pytest.mark.perf
@pytest.mark.parametrize(
  "kernel, down, router",
  [
    (P("tensor"), P("tensor"), P()),
    # As sharding.py has it: the width over the other axis.
    (P("tensor", "fsdp"), P("tensor", None, "fsdp"), P("fsdp")),
  ],
  ids=["by expert", "by expert and width"],
)
def test_experts_spread_over_devices_stay_where_they_are(kernel, down, router):
  mesh = meshes.make_mesh(fsdp=2, tensor=4)
  args = some(3)
  specs = P("fsdp"), router, kernel, kernel, down
  places = tuple(NamedSharding(mesh, spec) for spec in specs)
  spread = tuple(map(jax.device_put, args, places))
  run = functools.partial(experts.routed, per_token=2, normalize=True)
  weight = np.random.default_rng(2).normal(size=(n, D)).astype(np.float32)
  grad = jax.grad(lambda *a: jnp.sum(weight * run(*a)), argnums=range(5))
  for f, out in (run, places[0]), (grad, places):
    program = jax.jit(f, out_shardings=out).lower(*spread).compile()
    got, want = program(*spread), f(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      np.testing.assert_allclose(a, b, atol=1e-5)
    moved = gathered(program.as_text())
    # Tokens move, weights do not: not even the experts of one device.
    assert moved and max(moved) < E // 4 * D * F


def test_a_weight_that_is_gathered_is_seen():
  mesh = meshes.make_mesh(fsdp=2, tensor=4)
  there, whole = (NamedSharding(mesh, spec) for spec in (P("tensor"), P()))
  weight = jax.device_put(some()[2], there)
  program = jax.jit(lambda w: 2 * w, out_shardings=whole).lower(weight)
  assert gathered(program.compile().as_text()) == [E * D * F]
