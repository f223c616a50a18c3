"""Tests of brorl_jax/policy.py."""

import dataclasses

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
import pytest

from brorl_jax import policy as policy_lib
from brorl_jax.attention import Rope
from brorl_jax.policy import Policy

# Sizes that are all different, so that no two axes can be swapped unnoticed; an
# epsilon and a base that matter at this size.
TINY = Policy(
  vocab=37, width=16, layers=2, heads=6, kv_heads=2, head_size=4, mlp=20,
  rope=Rope(100.0), norm_eps=1e-2, tied=False, qkv_bias=True,
)  # fmt: skip


logits = jax.jit(Policy.logits, static_argnums=0)


def shaken(policy, seed=0, by=0.3):
  """Parameters in which no bias is 0 and no scale is 1."""
  params = policy.init(jax.random.key(seed))
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda a: a + jnp.asarray(by * rng.normal(size=a.shape), a.dtype), params
  )


def reference(policy, params, ids):
  """The decoder in float64, one head and one pair of numbers at a time."""
  c, ids = policy, np.asarray(ids)
  w = jax.tree.map(lambda a: np.asarray(a, np.float64), params)

  def norm(x, scale):
    square = np.mean(x**2, axis=-1, keepdims=True)
    return x / np.sqrt(square + c.norm_eps) * scale

  def turned(x):
    """x [T,K], each pair a complex number that turns."""
    pairs = x[:, : c.head_size // 2] + 1j * x[:, c.head_size // 2 :]
    for t in range(len(pairs)):
      for i in range(pairs.shape[1]):
        pairs[t, i] *= np.exp(1j * t * c.rope.theta ** (-2 * i / c.head_size))
    return np.concatenate([pairs.real, pairs.imag], axis=1)

  x = w["embed"]["embedding"][ids]
  for layer in range(c.layers):
    b = jax.tree.map(lambda a: a[layer], w["blocks"])
    h = norm(x, b["ln_attn"]["scale"])
    total = np.zeros_like(x)
    for head in range(c.heads):
      group = head // (c.heads // c.kv_heads)
      bias = lambda n, i: b[n]["bias"][i] if c.qkv_bias else 0.0
      q = turned(h @ b["q"]["kernel"][:, head] + bias("q", head))
      k = turned(h @ b["k"]["kernel"][:, group] + bias("k", group))
      v = h @ b["v"]["kernel"][:, group] + bias("v", group)
      for t in range(len(ids)):
        score = np.exp(k[: t + 1] @ q[t] / np.sqrt(c.head_size))
        out = (score / score.sum()) @ v[: t + 1]
        total[t] += out @ b["o"]["kernel"][head]
    x = x + total
    h = norm(x, b["ln_mlp"]["scale"])
    gate = h @ b["gate"]["kernel"]
    up = h @ b["up"]["kernel"]
    x = x + (gate / (1 + np.exp(-gate)) * up) @ b["down"]["kernel"]
  x = norm(x, w["ln_final"]["scale"])
  head = w["embed"]["embedding"].T if c.tied else w["head"]["kernel"]
  return x @ head


def padded(rows, width, side):
  tokens = np.zeros((len(rows), width), np.int32)
  mask = np.zeros((len(rows), width), bool)
  for tokens_row, mask_row, ids in zip(tokens, mask, rows, strict=True):
    at = slice(width - len(ids), None) if side == "left" else slice(len(ids))
    tokens_row[at], mask_row[at] = ids, True
  return jnp.asarray(tokens), jnp.asarray(mask)


def whole(*parts):
  """One row without padding."""
  tokens = jnp.asarray(np.concatenate(parts)[None], jnp.int32)
  return tokens, jnp.ones(tokens.shape, bool)


def some_ids(*lengths, seed=0):
  rng = np.random.default_rng(seed)
  return [rng.integers(0, TINY.vocab, length) for length in lengths]


@pytest.mark.parametrize(
  "change",
  [
    {"tied": True, "qkv_bias": False, "kv_heads": 6},
    {"kv_heads": 1, "layers": 3, "rope": Rope(1e4), "norm_eps": 1e-6},
  ],
)
def test_logits_are_those_of_a_decoder_written_with_loops(change):
  policy = dataclasses.replace(TINY, **change)
  params = shaken(policy)
  assert ("head" in params) == (not policy.tied)
  assert ("bias" in params["blocks"]["k"]) == policy.qkv_bias
  (ids,) = some_ids(9)
  want = reference(policy, params, ids)
  got = logits(policy, params, *whole(ids))[0]
  np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * abs(want).max())


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_whatever_its_side_and_content(side):
  params = shaken(TINY)
  rows = some_ids(7, 1, 4)
  tokens, mask = padded(rows, 10, side)
  junk = jnp.where(mask, tokens, 5)
  for filled in tokens, junk:
    got = logits(TINY, params, filled, mask)
    for row, ids in enumerate(rows):
      alone = reference(TINY, params, ids)
      np.testing.assert_allclose(got[row][mask[row]], alone, atol=2e-5)
  assert np.isfinite(got).all()  # a row's padding sees no key at all


def test_no_gradient_flows_from_later_tokens_other_rows_or_padding():
  params = shaken(TINY)
  # Each token once: its row of the embedding's gradient is its place's.
  tokens = jnp.arange(12).reshape(2, 6)
  mask = jnp.ones((2, 6), bool).at[0, :2].set(False).at[1, 4:].set(False)

  @jax.jit
  def reached(b, t):
    def one(params):
      return jnp.sum(TINY.logits(params, tokens, mask)[b, t] ** 2)

    grad = jax.grad(one)(params)["embed"]["embedding"]
    return jnp.any(grad != 0.0, axis=1)

  for b, t in np.argwhere(mask):
    want = tokens[b, : t + 1][mask[b, : t + 1]]
    np.testing.assert_array_equal(np.flatnonzero(reached(b, t)), want)


def test_response_logits_read_their_own_prompt_and_their_own_past():
  params = shaken(TINY)
  prompt = jnp.arange(6).reshape(2, 3)
  prompt_mask = jnp.asarray([[False, True, True], [True, True, True]])
  response = jnp.arange(6, 18).reshape(2, 2, 3)

  @jax.jit
  def reached(p, r, t):
    def one(params):
      logits = TINY.response_logits(params, prompt, prompt_mask, response)
      return jnp.sum(logits[p, r, t] ** 2)

    grad = jax.grad(one)(params)["embed"]["embedding"]
    return jnp.any(grad != 0.0, axis=1)

  for p, r, t in np.ndindex(2, 2, 3):
    want = [*prompt[p][prompt_mask[p]], *response[p, r, :t]]
    np.testing.assert_array_equal(np.flatnonzero(reached(p, r, t)), want)


@pytest.mark.parametrize("length", [1, 5])
def test_response_logits_are_logits_of_the_joined_row_shifted(length):
  params = shaken(TINY)
  prompts = some_ids(4, 1, 6)
  prompt, prompt_mask = padded(prompts, 6, "left")
  response = jnp.asarray(some_ids(*[length] * 6, seed=1), jnp.int32)
  response = response.reshape(3, 2, length)
  apply = jax.jit(TINY.response_logits)
  got = apply(params, prompt, prompt_mask, response)
  assert got.shape == (3, 2, length, TINY.vocab) and got.dtype == jnp.float32
  rows = [[*prompts[p], *response[p, r]] for p, r in np.ndindex(3, 2)]
  joined = logits(TINY, params, *padded(rows, 12, "right"))
  joined = joined.reshape(3, 2, *joined.shape[1:])
  for p, ids in enumerate(prompts):
    at = slice(len(ids) - 1, len(ids) - 1 + length)
    np.testing.assert_allclose(got[p], joined[p, :, at], atol=2e-5)


def test_gradients_of_a_shared_prompt_are_those_of_joined_rows():
  params = shaken(TINY)
  prompts = some_ids(3, 5)
  prompt, prompt_mask = padded(prompts, 5, "left")
  response = jnp.asarray(some_ids(*[4] * 4, seed=1), jnp.int32)
  response = response.reshape(2, 2, 4)
  weight = np.random.default_rng(2).normal(size=(2, 2, 4, TINY.vocab))
  weight = weight.astype(np.float32)

  rows = [[*prompts[p], *response[p, r]] for p, r in np.ndindex(2, 2)]
  joined_rows = padded(rows, 9, "right")

  def shared(params):
    logits = TINY.response_logits(params, prompt, prompt_mask, response)
    return jnp.sum(weight * logits)

  def joined(params):
    logits = TINY.logits(params, *joined_rows).reshape(2, 2, 9, TINY.vocab)
    parts = [logits[p, :, S - 1 : S + 3] for p, S in enumerate((3, 5))]
    return jnp.sum(weight * jnp.stack(parts))

  got, want = (jax.jit(jax.grad(f))(params) for f in (shared, joined))
  scale = max(float(jnp.max(jnp.abs(g))) for g in jax.tree.leaves(want))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * scale), got, want
  )


def test_decoding_in_a_circle_of_columns_gives_the_logits_of_the_whole_row():
  """Responses of different length follow each other in the slots."""
  params = shaken(TINY)
  prompts = some_ids(2, 5)
  tokens, mask = padded(prompts, 5, "left")
  T, R, steps = 4, 3, 11
  lengths = [
    [[4, 4, 3], [1, 3, 4, 2], [2]],  # slot 2 idles after two steps
    [[3, 1, 4], [4, 4], []],  # slot 2 never works
  ]
  rng = np.random.default_rng(3)
  first, prefix = jax.jit(TINY.prefill)(params, tokens, mask)
  step = jax.jit(TINY.decode_step)
  suffix = TINY.suffix(2, R, T)

  def stream(lengths):
    for length in lengths:
      ids = rng.integers(0, TINY.vocab, length)
      yield from ((ids, i) for i in range(length))

  streams = [[stream(slot) for slot in prompt] for prompt in lengths]
  seen = 0
  for s in range(steps):
    column = s % T
    token = np.full((2, R), 11, np.int32)  # of idle slots
    length = np.ones((2, R), np.int32)
    now = {}
    for p, r in np.ndindex(2, R):
      if (at := next(streams[p][r], None)) is not None:
        now[p, r], length[p, r] = at, at[1] + 1
        token[p, r] = at[0][at[1]]
    age = (column - np.arange(T)) % T
    visible = age < length[..., None]
    row = map(jnp.asarray, (token, length, jnp.int32(column), visible))
    logits, suffix = step(params, prefix, suffix, *row)
    assert np.isfinite(logits).all()
    for (p, r), (ids, i) in now.items():
      joined = np.concatenate([prompts[p], ids[: i + 1]])
      want = reference(TINY, params, joined)[-1]
      np.testing.assert_allclose(logits[p, r], want, atol=3e-5)
      seen += 1
  assert seen == sum(sum(slot) for prompt in lengths for slot in prompt)
  for p, ids in enumerate(prompts):
    want = reference(TINY, params, ids)[-1]
    np.testing.assert_allclose(first[p], want, atol=3e-5)


@pytest.mark.parametrize("shared", [False, True])
def test_attention_is_the_softmax_over_both_kinds_of_keys(shared):
  P, R, Q, H, G, K, S = 2, 3, 4, 6, 2, 5, 7
  rng = np.random.default_rng(0)
  normal = lambda *shape: 2 * rng.normal(size=shape).astype(np.float32)
  q = normal(P, R, Q, H, K)
  k_shared, v_shared = normal(P, G, S, K), normal(P, G, S, K)
  k_own, v_own = normal(P, R, G, Q, K), normal(P, R, G, Q, K)
  mask = rng.random((P, S)) < 0.6
  visible = np.broadcast_to(np.tril(np.ones((Q, Q), bool)), (P, R, Q, Q))
  prefix, own = (k_shared, v_shared, mask), (k_own, v_own, visible)
  got = policy_lib.attend(
    jnp.asarray(q),
    tuple(map(jnp.asarray, prefix)) if shared else None,
    tuple(map(jnp.asarray, own)),
  )
  want = np.zeros(q.shape)
  for p, r, t, h in np.ndindex(P, R, Q, H):
    g = h // (H // G)
    keys, values = k_own[p, r, g, : t + 1], v_own[p, r, g, : t + 1]
    if shared:
      keys = np.concatenate([k_shared[p, g][mask[p]], keys])
      values = np.concatenate([v_shared[p, g][mask[p]], values])
    weight = np.exp((keys @ q[p, r, t, h]).astype(np.float64) / np.sqrt(K))
    want[p, r, t, h] = weight / weight.sum() @ values
  np.testing.assert_allclose(got, want, atol=2e-5)


def test_rotation_by_hand():
  # Two pairs, (1, 0) and (2, 0); at position 3 they turn by 3 and by 3 / 10.
  x = jnp.asarray([1.0, 2.0, 0.0, 0.0]).reshape(1, 1, 1, 1, 4)
  got = policy_lib.rotate(x, jnp.full((1, 1, 1), 3), 100.0)
  want = [np.cos(3), 2 * np.cos(0.3), np.sin(3), 2 * np.sin(0.3)]
  np.testing.assert_allclose(got.ravel(), want, atol=1e-6)
  still = policy_lib.rotate(x, jnp.zeros((1, 1, 1), jnp.int32), 100.0)
  np.testing.assert_array_equal(still, x)


def test_rotated_products_depend_on_the_distance_alone():
  rng = np.random.default_rng(0)
  q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 1, 8))) for _ in range(2))
  turn = lambda x, at: policy_lib.rotate(x, jnp.full((1, 1, 1), at), 1e4)
  product = lambda at, to: float(jnp.sum(turn(q, at) * turn(k, to)))
  for distance in (0, 1, 17):
    base = product(distance, 0)
    for start in (1, 40, 500):
      assert product(start + distance, start) == pytest.approx(base, abs=2e-4)
  assert abs(product(0, 0) - product(3, 0)) > 0.01
  assert abs(product(3, 0) - product(0, 3)) > 0.01


def test_a_tied_head_is_the_embedding():
  tied = dataclasses.replace(TINY, tied=True)
  params = shaken(tied)
  own = params | {"head": {"kernel": params["embed"]["embedding"].T}}
  (ids,) = some_ids(5)
  args = whole(ids)
  np.testing.assert_allclose(
    logits(tied, params, *args), logits(TINY, own, *args), atol=1e-6
  )
  grow = lambda e: {**params, "embed": {"embedding": e}}
  total = lambda e: jnp.sum(tied.logits(grow(e), *args)[..., 30])
  gradient = jax.jit(jax.grad(total))(params["embed"]["embedding"])
  assert 30 not in ids and jnp.any(gradient[30] != 0)  # through the head


def equations(jaxpr, name):
  """Those of one kind in a program, the ones in its loops included."""
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == name:
      yield eqn
    for sub in jex.core.jaxprs_in_params(eqn.params):
      yield from equations(sub, name)


def test_bfloat16_activations_stay_so_and_logits_are_float32():
  policy = dataclasses.replace(TINY, dtype="bfloat16")
  params = shaken(policy)
  assert {a.dtype.name for a in jax.tree.leaves(params)} == {"float32"}
  (ids,) = some_ids(6)
  prompt, mask = whole(ids[:3])
  response = whole(ids[3:])[0][None]
  got = logits(policy, params, *whole(ids))
  assert got.dtype == jnp.float32
  assert jnp.any(got != got.astype(jnp.bfloat16))
  exact = logits(TINY, params, *whole(ids))
  assert 0 < float(jnp.max(jnp.abs(got - exact))) < 0.05 * jnp.ptp(exact)

  one = jnp.ones((1, 1), jnp.int32)
  seen = jnp.ones((1, 1, 4), bool)

  def decode(params):
    first, prefix = policy.prefill(params, prompt, mask)
    empty = policy.suffix(1, 1, 4)
    state = prefix, empty, one, one, jnp.int32(0), seen
    last, suffix = policy.decode_step(params, *state)
    return (first, last), jax.tree.leaves((prefix.k, prefix.v, empty, suffix))

  dtypes = lambda tree: {a.dtype.name for a in jax.tree.leaves(tree)}
  outputs, caches = jax.eval_shape(decode, params)
  assert dtypes(outputs) == {"float32"} and dtypes(caches) == {"bfloat16"}
  score = lambda p: policy.response_logits(p, prompt, mask, response)
  for program in decode, score:
    jaxpr = jax.make_jaxpr(program)(params).jaxpr
    dots = list(equations(jaxpr, "dot_general"))
    read = {v.aval.dtype.name for eqn in dots for v in eqn.invars}
    assert len(dots) > 10 and read == {"bfloat16"}
    # Twice the head; scores of the prompt, of the response, and between them.
    written = [eqn.outvars[0].aval.dtype.name for eqn in dots]
    assert written.count("float32") == 5
    layers = list(equations(jaxpr, "scan"))
    assert len(layers) == 2
    assert {eqn.outvars[0].aval.dtype.name for eqn in layers} == {"bfloat16"}


def test_initial_parameters_are_normal_with_standard_deviation_002():
  policy = dataclasses.replace(
    TINY, vocab=500, width=64, heads=8, kv_heads=4, head_size=8, mlp=96
  )
  params = policy.init(jax.random.key(1))
  kernels = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    assert leaf.dtype == jnp.float32
    if name.endswith("scale"):
      assert jnp.all(leaf == 1.0), name
    elif name.endswith("bias"):
      assert jnp.all(leaf == 0.0), name
    else:
      kernels[name] = np.asarray(leaf).ravel() / 0.02
  assert len(kernels) == 9
  for name, z in kernels.items():
    assert abs(z.mean()) < 5 / len(z) ** 0.5, name
    assert abs((z**2).mean() - 1) < 5 * (2 / len(z)) ** 0.5, name
    assert abs(z).max() > 3, name  # not truncated
  # No two layers and no two kernels start alike.
  up, gate = (
    params["blocks"]["up"]["kernel"],
    params["blocks"]["gate"]["kernel"],
  )
  assert jnp.all(up[0] != up[1]) and jnp.mean(up == gate) < 0.01
  embed = params["embed"]["embedding"]
  assert jnp.mean(embed == params["head"]["kernel"].T) < 0.01
  again = policy.init(jax.random.key(1))
  jax.tree.map(np.testing.assert_array_equal, again, params)
  other = policy.init(jax.random.key(2))["embed"]["embedding"]
  assert jnp.all(jnp.any(other != embed, axis=1))
