"""Every form of reading and decoding gives the same logits."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import plain_decoder
import pytest
import small_policies
import tiers
from compiled import equations
from loads import on_gpu
from small_policies import TINY, changed, response_logits, shaken, some_ids

from brorl_jax.many import meshes
from brorl_jax.model import policy as policies
from brorl_jax.model.policy import Policy
from brorl_jax.model.spec import Rope, Target, here

POLICIES = {
  "qwen2": TINY,
  "tied, without groups": changed(tied=True, qkv_bias=False, kv_heads=6),
  "qwen3": changed(qkv_bias=False, qk_norm=True, head_size=6),
  "llama, biased": changed(output_bias=True, mlp_bias=True,
    rope=Rope(50.0, "linear", 3.0)),
  "mistral": changed(qkv_bias=False, window=4, sliding=(True, True)),
  "gemma2": small_policies.GEMMA2, "gemma3": small_policies.GEMMA3,
  "experts": small_policies.EXPERTS,
  "experts, shares as they are, slide": dataclasses.replace(
    small_policies.EXPERTS, normalize_experts=False, experts_per_token=3,
    window=3, sliding=(False, True), output_bias=True),
}  # fmt: skip
NAMES = ("qwen2", "gemma2", "gemma3", "experts")
logits = jax.jit(Policy.logits, static_argnums=0)


def whole(*parts):
  """One row without padding."""
  tokens = jnp.asarray(np.concatenate(parts)[None], jnp.int32)
  return tokens, jnp.ones(tokens.shape, bool)


@pytest.mark.parametrize("name", tiers.some(POLICIES, 1))
def test_logits_are_those_of_a_decoder_written_with_loops(name):
  policy = POLICIES[name]
  params = shaken(policy)
  assert ("head" in params) == (not policy.tied)
  assert ("bias" in params["blocks"]["k"]) == policy.qkv_bias
  (ids,) = some_ids(9)
  want = plain_decoder.logits(policy, params, ids)
  got = logits(policy, params, *whole(ids))[0]
  np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * abs(want).max())


@pytest.mark.parametrize("name", tiers.some(["qwen2", "gemma2"], 1))
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_whatever_its_side_and_content(side, name):
  policy = POLICIES[name]
  params = shaken(policy)
  rows = some_ids(7, 1, 4)
  tokens, mask = small_policies.padded(rows, 10, side)
  junk = jnp.where(mask, tokens, 5)
  for filled in tokens, junk:
    got = logits(policy, params, filled, mask)
    for row, ids in enumerate(rows):
      alone = plain_decoder.logits(policy, params, ids)
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

  for b, t in ((0, 2), (0, 5), (1, 0), (1, 3)):
    want = tokens[b, : t + 1][mask[b, : t + 1]]
    np.testing.assert_array_equal(np.flatnonzero(reached(b, t)), want)


@pytest.mark.parametrize(
  "name, length", tiers.some([("qwen2", 1), ("gemma2", 5), ("experts", 5)], 1)
)
def test_response_logits_are_logits_of_the_joined_row_shifted(name, length):
  policy = POLICIES[name]
  params = shaken(policy)
  prompts = some_ids(4, 1, 6)
  prompt, prompt_mask = small_policies.padded(prompts, 6, "left")
  response = jnp.asarray(some_ids(*[length] * 6, seed=1), jnp.int32)
  response = response.reshape(3, 2, length)
  apply = jax.jit(functools.partial(response_logits, policy))
  got = apply(params, prompt, prompt_mask, response)
  assert got.shape == (3, 2, length, TINY.vocab) and got.dtype == jnp.float32
  rows = [[*prompts[p], *response[p, r]] for p, r in np.ndindex(3, 2)]
  joined = logits(policy, params, *small_policies.padded(rows, 12, "right"))
  joined = joined.reshape(3, 2, *joined.shape[1:])
  for p, ids in enumerate(prompts):
    at = slice(len(ids) - 1, len(ids) - 1 + length)
    np.testing.assert_allclose(got[p], joined[p, :, at], atol=2e-5)


# Prompts of each lane, and columns of a page.
WAYS = {"a lane each": ([[0], [1]], 4),
  "pages of 2, one lane and an empty one": ([[0, 1], [2, 2]], 2)}  # fmt: skip
TURNS = [("qwen2", "a lane each")]
TURNS += [(name, "pages of 2, one lane and an empty one") for name in NAMES]


@pytest.mark.ci
@pytest.mark.parametrize("name, way", tiers.some(TURNS, 0, 1))
def test_decoding_in_a_circle_of_columns_gives_logits_of_whole_rows(name, way):
  """Responses of different length follow each other in the slots."""
  window, columns = WAYS[way]
  policy = POLICIES[name]
  params = shaken(policy)
  prompts = some_ids(2, 5)
  tokens, mask = small_policies.padded(prompts, 5, "left")
  T, R, steps = 4, 3, 11
  lengths = [
    [[4, 4, 3], [1, 3, 4, 2], [2]],  # slot 2 idles after two steps
    [[3, 1, 4], [4, 4], []],  # slot 2 never works
  ]
  rng = np.random.default_rng(3)
  first, prefix = jax.jit(policy.prefill)(params, tokens, mask)
  weights = jax.jit(lambda p: policy.unroll(policy.cast(p)))(params)
  shared = jax.jit(policy.lane_prompts)(prefix, jnp.asarray(window))
  A, W = np.shape(window)
  rows = R * W  # slots of a lane: R for each of its prompts
  step = jax.jit(policy.decode_step)
  new = lambda: jax.tree.map(lambda x: x + 1e9, policy.page(A * rows, columns))
  pages = [new() for _ in range(T // columns)]

  def stream(lengths):
    for length in lengths:
      ids = rng.integers(0, TINY.vocab, length)
      yield from ((ids, i) for i in range(length))

  streams = [[stream(slot) for slot in prompt] for prompt in lengths]
  seen = 0
  for s in range(steps):
    column = s % columns
    if column == 0:
      pages = [*pages[1:], pages[0]]
    token = np.full((A, rows), 11, np.int32)  # of idle slots
    length, which = np.ones((2, A, rows), np.int32)
    which = (which - 1 + np.arange(rows)[None] // R).astype(np.int32)
    now = {}
    for p, r in np.ndindex(2, R):
      if (at := next(streams[p][r], None)) is not None:
        lane = p % A if W == 1 else 0
        row = r if W == 1 else p * R + r
        now[p, lane, row], length[lane, row] = at, at[1] + 1
        token[lane, row] = at[0][at[1]]
    row = map(jnp.asarray, (token, length, which, jnp.int32(column)))
    used = jnp.int32(len(pages) - 1)
    logits, pages[-1] = step(weights, shared, pages, *row, used)
    for (p, lane, row), (ids, i) in now.items():
      joined = np.concatenate([prompts[p], ids[: i + 1]])
      want = plain_decoder.logits(policy, params, joined)[-1]
      np.testing.assert_allclose(logits[lane, row], want, atol=3e-5)
      seen += 1
    assert np.isfinite(logits).all()
  assert seen == sum(sum(slot) for prompt in lengths for slot in prompt)
  for p, ids in enumerate(prompts):
    want = plain_decoder.logits(policy, params, ids)[-1]
    np.testing.assert_allclose(first[p], want, atol=3e-5)


def left_padded(tokens):
  """By two, whose content does not matter."""
  widths = (0, 0), (2, 0)
  ones = jnp.ones(tokens.shape, bool)
  return jnp.pad(tokens, widths), jnp.pad(ones, widths)


def last_by_response_logits(policy, params, rows, prompt):
  # One more token, whose own value does not matter.
  response = jnp.pad(rows, ((0, 0), (0, 1)))[:, None, prompt:]
  tokens, mask = left_padded(rows[:, :prompt])
  return response_logits(policy, params, tokens, mask, response)[:, 0, -1]


def last_by_decoding(policy, params, rows, prompt):
  tokens, mask = left_padded(rows[:, :prompt])
  logits, prefix = policy.prefill(params, tokens, mask)
  weights = policy.unroll(policy.cast(params))
  B, T = len(rows), rows.shape[1] - prompt
  shared = policy.lane_prompts(prefix, jnp.arange(B)[:, None])
  page, zero = policy.page(B, T), jnp.zeros((B, 1), jnp.int32)
  for t in range(T):
    # The response begins in the middle of the circle.
    logits, page = policy.decode_step(weights, shared, (page,),
      rows[:, None, prompt + t], zero + t + 1, zero, jnp.int32((2 + t) % T),
      0)  # fmt: skip
    logits = logits[:, 0]
  return logits


@pytest.mark.ci
@pytest.mark.parametrize("prompt, last", [
  (2, last_by_response_logits), (6, last_by_response_logits),
  (2, last_by_decoding), (8, last_by_decoding),
], ids=lambda x: getattr(x, "__name__", x))  # fmt: skip
def test_a_sliding_layer_sees_its_window_and_no_further(last, prompt):
  """In one layer, so that nothing comes from further away through others."""
  window, T = 4, 8
  policy = changed(layers=1, window=window, sliding=(True,))
  params = shaken(policy)
  (ids,) = some_ids(T)
  # The first row is as it was; in row 1 + i token i is another.
  rows = np.tile(ids, (T + 1, 1))
  rows[np.arange(1, T + 1), np.arange(T)] = (ids + 1) % TINY.vocab
  out = jax.jit(last, static_argnums=(0, 3))(
    policy, params, jnp.asarray(rows), prompt
  )
  change = np.abs(out[1:] - out[:1]).max(axis=1)
  assert (change[: T - window] < 1e-5).all()
  assert (change[T - window :] > 1e-3).all()


@pytest.mark.ci
def test_unrolled_weights_read_a_prompt_as_the_stacked_ones():
  policy = changed(window=3, sliding=(True, False))
  params = policy.cast(shaken(policy))
  prompts = [some_ids(n)[0] for n in (5, 9)]
  tokens, mask = small_policies.padded(prompts, 9, "left")
  read = jax.jit(policy.prefill)
  # A transposed weight is multiplied in another order.
  got = read(policy.unroll(params), tokens, mask)
  chex.assert_trees_all_close(got, read(params, tokens, mask), atol=2e-5)


@pytest.mark.ci
def test_bfloat16_activations_stay_so_and_logits_are_float32():
  policy = changed(dtype="bfloat16")
  params = shaken(policy)
  assert {a.dtype.name for a in jax.tree.leaves(params)} == {"float32"}
  (ids,) = some_ids(6)
  prompt, mask = whole(ids[:3])
  response = whole(ids[3:])[0][None]
  got = logits(policy, params, *whole(ids))
  assert got.dtype == jnp.float32 and jnp.any(got != got.astype(jnp.bfloat16))
  exact = logits(TINY, params, *whole(ids))
  assert 0 < float(jnp.max(jnp.abs(got - exact))) < 0.05 * jnp.ptp(exact)

  one = jnp.ones((1, 1), jnp.int32)
  # As on an accelerator; a CPU keeps the same values in float32.
  policy = on_gpu(policy)

  def decode(params):
    first, prefix = policy.prefill(params, prompt, mask)
    shared = policy.lane_prompts(prefix, one - 1)
    weights = policy.unroll(policy.cast(params))
    last, page = policy.decode_step(
      weights, shared, [policy.page(1, 4)], one, one, one - 1, jnp.int32(0), 0
    )
    return (first, last), jax.tree.leaves((prefix.k, shared.v, page))

  dtypes = lambda tree: {a.dtype.name for a in jax.tree.leaves(tree)}
  outputs, caches = jax.eval_shape(decode, params)
  assert dtypes(outputs) == {"float32"} and dtypes(caches) == {"bfloat16"}
  # No product reads a wider operand: half the bytes of all weights and pages.
  score = lambda p: response_logits(policy, p, prompt, mask, response)
  for program in (decode, score):
    dots = list(equations(jax.make_jaxpr(program)(params).jaxpr, "dot_general"))
    assert dots
    assert dtypes([v.aval for eqn in dots for v in eqn.invars]) == {"bfloat16"}


def asked(P, R, T=6, S=5):
  rng = np.random.default_rng(0)
  tokens = lambda *shape: rng.integers(1, TINY.vocab, shape).astype(np.int32)
  mask = np.arange(S) >= rng.integers(0, S, (P, 1))
  return tokens(P, S), mask, tokens(P, R, T)


@pytest.mark.parametrize("P, R, axes", tiers.some([
  (3, 5, dict(fsdp=4, tensor=2)), (2, 16, dict(data=2, fsdp=2, expert=2)),
  (1, 1, dict(data=8)),
], 1, 1), ids=str)  # fmt: skip
def test_a_mesh_changes_no_log_probability_however_few_prompts(P, R, axes):
  alone = changed(vocab=38)  # TINY's does not divide over 2 devices
  params = jax.tree.map(lambda x: x * 9.0, alone.init(jax.random.key(0)))
  spread = dataclasses.replace(alone, mesh=meshes.make_mesh(**axes))
  logp = lambda x: jax.jit(functools.partial(x.response_logp, temperature=0.7))
  got = logp(spread)(params, *asked(P, R))
  want = logp(alone)(params, *asked(P, R))
  for a, b in zip(got, want, strict=True):
    assert a.shape == (P, R, 6)
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.ci
@pytest.mark.parametrize("name", tiers.some(NAMES, 0, 1))
def test_a_prompt_read_in_chunks_is_the_prompt_read_at_once(name, monkeypatch):
  policy = POLICIES[name]
  params = shaken(policy)
  # Chunks that are all padding for one prompt, and 2 places too many in front.
  tokens, mask = small_policies.padded(some_ids(2, 13, 9), 13, "left")
  want, whole_prefix = policy.prefill(params, tokens, mask)
  monkeypatch.setattr(policies, "PREFILL_CHUNK", 5)
  got, prefix = policy.prefill(params, tokens, mask)
  np.testing.assert_allclose(got, want, atol=3e-5)
  np.testing.assert_array_equal(prefix.mask, mask)
  real = np.asarray(mask)[:, None, None, :, None]
  for a, b in ((prefix.k, whole_prefix.k), (prefix.v, whole_prefix.v)):
    assert a.shape == b.shape
    a, b = np.where(real, a, 0), np.where(real, b, 0)
    np.testing.assert_allclose(a, b, atol=3e-5)
  # No array has S x S scores, and only the last positions have logits.
  program = jax.make_jaxpr(lambda: policy.prefill(params, tokens, mask))()
  shapes = [v.aval.shape for eqn in equations(program.jaxpr, "dot_general")
    for v in eqn.outvars]  # fmt: skip
  assert any(5 in s for s in shapes)
  others = [math.prod(s) for s in shapes if policy.vocab not in s]
  assert max(others) < len(tokens) * policy.heads * 13 * 13
  # The head multiplies its weight first, as there are few rows.
  assert [s for s in shapes if policy.vocab in s] == [(policy.vocab, 3)]


# Accelerators whose kernels no CPU can run have the others' form.
POOLED = Target("rocm", 8, 2**30)


@pytest.mark.ci
@pytest.mark.parametrize("name", tiers.some(NAMES, 1, 1))
@pytest.mark.parametrize("W", [2, tiers.at_night(1)])
def test_rows_decode_at_their_own_pace_from_blocks_of_a_pool(name, W):
  """5 rows, of which some wait in a step; nothing else is in their blocks."""
  policy = dataclasses.replace(POLICIES[name], target=POOLED)
  params, rng = shaken(policy), np.random.default_rng(1)
  S, C, most, T = 5, 3, 3, 8
  prompts = [rng.integers(0, policy.vocab, n) for n in (2, 5)]
  _, prefix = policy.prefill(params, *small_policies.padded(prompts, S, "left"))
  weights = policy.unroll(policy.cast(params))
  # One prompt for each of two lanes, or both for one.
  A, R = (2, 3) if W == 1 else (1, 5)
  window = np.arange(2, dtype=np.int32).reshape(A, W)
  shared = policy.lane_prompts(prefix, jnp.asarray(window))
  which = rng.integers(0, W, (A, R)).astype(np.int32)
  blocks = A * R * most + 1
  table = rng.permutation(blocks)[: A * R * most].reshape(A * R, most)
  table = table.astype(np.int32)
  # What was never written is not to be looked at.
  pools = jax.tree.map(lambda x: x + jnp.nan, policy.pool(blocks, C))
  step = jax.jit(Policy.pool_step, static_argnums=0)
  ids = rng.integers(0, policy.vocab, (A, R, T)).astype(np.int32)
  length = np.ones((A, R), np.int32)
  want = np.zeros((A, R, T, policy.vocab), np.float32)
  for a, r in np.ndindex(A, R):
    prompt = prompts[window[a, which[a, r]]]
    row = np.concatenate([prompt, ids[a, r]])[None]
    own = logits(policy, params, jnp.asarray(row), jnp.ones(row.shape, bool))
    want[a, r] = own[0, len(prompt) :]
  while (length <= T).any():
    goes = (rng.random((A, R)) < 0.7) & (length <= T)
    at = np.minimum(length, T)
    token = np.take_along_axis(ids, at[..., None] - 1, axis=2)[..., 0]
    args = (token, at, which, table, goes)
    got, pools = step(policy, weights, shared, pools, *map(jnp.asarray, args))
    for a, r in np.argwhere(goes):
      last = want[a, r, length[a, r] - 1]
      np.testing.assert_allclose(got[a, r], last, atol=3e-5)
    length += goes
  # Nothing was written elsewhere.
  used = np.zeros((blocks, C), bool)
  for row in table:
    used[row[np.arange(T) // C], np.arange(T) % C] = True
  for pool in pools:
    written = np.isfinite(np.asarray(pool.kv)).all(axis=(1, 2, 4))
    np.testing.assert_array_equal(written, used)


def test_a_cpu_has_pages_in_float32_and_others_a_pool():
  """In bfloat16 XLA would convert a whole page in every step."""
  assert dataclasses.replace(TINY, target=here()).pool_columns == 0
  for platform, columns in (("gpu", 64), ("rocm", 64), ("tpu", 256)):
    target = Target(platform, 1, 2**30)
    assert dataclasses.replace(TINY, target=target).pool_columns == columns
  half = changed(dtype="bfloat16")
  dtypes = lambda policy: {str(x.dtype) for x in jax.tree.leaves(
      jax.eval_shape(lambda: policy.page(2, 8)))}  # fmt: skip
  assert dtypes(dataclasses.replace(half, target=here())) == {"float32"}
  gpu = dataclasses.replace(half, target=Target("gpu", 1, 2**30))
  assert dtypes(gpu) == {"bfloat16"}
