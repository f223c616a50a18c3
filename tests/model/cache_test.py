"""Decoding over pages and over a pool of blocks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pools
import pytest
import tiers
from compiled import equations
from jax.sharding import PartitionSpec
from pools import Sizes

from brorl_jax.many import meshes
from brorl_jax.many.meshes import Axes
from brorl_jax.model import attention, cache, target
from brorl_jax.model.cache import BlockPool, Page, SharedKeys
from brorl_jax.model.target import here


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


def drawn(rng, A=2, R=3, H=6, G=2, K=4, S=5, C=3, pages=2):
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  mask = jnp.asarray(rng.random((A, R, S)) < 0.6)
  shared = SharedKeys(normal(A, G, S, K), normal(A, G, S, K), mask)
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
@pytest.mark.parametrize("column, most", [(0, 1), (2, 6)])
def test_equals_the_attention_of_training(column, most, softcap):
  rng = np.random.default_rng(most)
  q, shared, pages = drawn(rng)
  limit = jnp.asarray(rng.integers(1, most + 1, (2, 3)), jnp.int32)
  at = jnp.int32(column), limit
  run = functools.partial(
    cache.attend_pages, q, shared, column=at[0], limit=limit, scale=0.5,
    softcap=softcap,
  )  # fmt: skip
  got = run(pages, used=1)
  want = plain(q, shared, pages, *at, softcap)
  np.testing.assert_allclose(got, want, atol=1e-6)
  # What is in front is not read, whatever it is.
  spoilt = jax.tree.map(lambda x: x * np.nan, pages[0])
  more = jax.jit(run)([spoilt, spoilt, *pages], used=jnp.int32(1))
  np.testing.assert_allclose(more, got, atol=1e-6)


@pytest.mark.parametrize("width, prompts", [(2, 2), (1, 5)])
def test_prompts_in_pieces_are_the_prompts(monkeypatch, width, prompts):
  """And a piece that no row sees is not read, whatever it is."""
  monkeypatch.setattr(cache, "_LEAST_PIECE", 2)
  rng = np.random.default_rng(width)
  q, shared, pages = drawn(rng, S=width * prompts)
  run = functools.partial(
    cache.attend_pages, q, pages=pages, column=jnp.int32(1), used=1,
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
  _, _, (page, _) = drawn(rng)
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
  q, shared, pages = drawn(rng, C=3)
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
    cache.attend_pages, q, shared, column=jnp.int32(1), used=1,
    limit=jnp.full((2, 3), 5, jnp.int32), scale=0.5,
  )  # fmt: skip
  np.testing.assert_allclose(run(pages=small), run(pages=large), atol=1e-6)


ON_GPU = dataclasses.replace(here(), platform="gpu")


def draw(rng, B=6, G=2, J=3, K=4, C=3, most=4):
  """Queries, a pool with spare blocks, and a table that shuffles it."""
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  blocks = B * most + 2
  table = rng.permutation(blocks)[: B * most].reshape(B, most)
  state = normal(B, G, J), jnp.exp(normal(B, G, J)), normal(B, G, J, K)
  return (
    normal(B, G, J, K),
    state,
    BlockPool(normal(blocks, 2, G, C, K)),
    jnp.asarray(table, jnp.int32),
  )


def simple(q, state, held, table, first, stop, softcap=0.0):
  """One row, head and token after the other, all scores at once."""
  q, kv, table = np.asarray(q, float), np.asarray(held.kv, float), table
  if held.scale is not None:
    kv = kv * np.asarray(held.scale, float)[..., None]
  B, G, J, _ = q.shape
  C = kv.shape[3]
  out = np.zeros(q.shape)
  for b, g, j in np.ndindex(B, G, J):
    top, total, before = (float(x[b, g, j]) for x in (*state[:2], 0 * state[0]))
    scores, values = [], []
    for i in range(int(first[b]), int(stop[b])):
      k, v = kv[int(table[b, i // C]), :, g, i % C]
      score = q[b, g, j] @ k
      scores.append(softcap * np.tanh(score / softcap) if softcap else score)
      values.append(v)
    weights = np.exp(np.asarray(scores) - top)
    before = np.asarray(state[2][b, g, j], float)
    for weight, v in zip(weights, values, strict=True):
      total, before = total + weight, before + weight * v
    out[b, g, j] = before / total
  return out


SPANS = {
  "nothing": (0, 0), "nothing, late": (5, 5), "one": (0, 1),
  "one less than a block": (0, 2), "a block": (0, 3),
  "one more than a block": (0, 4), "all": (0, 12),
  "a window inside of a block": (4, 5), "a window over blocks": (2, 11),
}  # fmt: skip


@pytest.mark.parametrize("softcap", [0.0, 0.7])
def test_goes_on_with_a_softmax_over_what_a_row_sees(softcap):
  rng = np.random.default_rng(0)
  case = draw(rng, B=len(SPANS))
  first, stop = jnp.asarray(list(SPANS.values()), jnp.int32).T
  got = cache.row_attention(*case, first, stop, softcap=softcap)
  want = simple(*case, first, stop, softcap)
  np.testing.assert_allclose(got, want, atol=1e-5)
  _, total, out = case[1]
  np.testing.assert_allclose(got[:2], (out / total[..., None])[:2], rtol=1e-6)


@pytest.mark.parametrize("outside", [-1, 10**6])
def test_what_a_row_does_not_see_may_be_anything(outside):
  rng = np.random.default_rng(1)
  q, state, held, table = draw(rng)
  first = jnp.asarray([0, 0, 4, 5, 3, 0], jnp.int32)
  stop = jnp.asarray([1, 3, 7, 12, 3, 6], jnp.int32)
  want = cache.row_attention(q, state, held, table, first, stop)
  token = np.arange(12)[None]
  seen = (token >= first[:, None]) & (token < stop[:, None])
  used = np.zeros((len(held.kv), 3), bool)
  used[np.asarray(table)] = seen.reshape(6, 4, 3)
  kv = jnp.where(used[:, None, None, :, None], held.kv, np.nan)
  behind = np.arange(4)[None] * 3 >= stop[:, None]
  table = jnp.where(behind, outside, table)
  got = cache.row_attention(q, state, BlockPool(kv), table, first, stop)
  np.testing.assert_array_equal(got, want)


def test_a_row_without_prompt_and_tokens_is_finite():
  q, state, held, table = draw(np.random.default_rng(0))
  state = jnp.full_like(state[0], -1e30), *state[1:]
  none = jnp.zeros(6, jnp.int32)
  got = cache.row_attention(q, state, held, table, none, none)
  np.testing.assert_allclose(got, state[2] / state[1][..., None], rtol=1e-6)


def test_a_token_is_written_to_its_place_and_nowhere_else():
  rng = np.random.default_rng(0)
  _, _, held, _ = draw(rng)
  k, v = jnp.asarray(rng.normal(size=(2, 4, 2, 4)), jnp.float32)
  blocks = len(held.kv)
  block = jnp.asarray([3, blocks, 0, 10**6], jnp.int32)
  column = jnp.asarray([1, 0, 2, 2], jnp.int32)
  new = cache.write_pool(held, k, v, block, column)
  want = np.array(held.kv)
  want[3, 0, :, 1], want[3, 1, :, 1] = k[0], v[0]
  want[0, 0, :, 2], want[0, 1, :, 2] = k[2], v[2]
  np.testing.assert_array_equal(new.kv, want)


def test_int8_tokens_keep_their_own_scale():
  held = cache.empty_pool(2, 3, 1, 2, "float32", int8=True)
  k, v = jnp.asarray([[[2.54, -1.005]]]), jnp.asarray([[[0.0, 0.0]]])
  one = lambda x: jnp.asarray([x], jnp.int32)
  new = cache.write_pool(held, k, v, one(1), one(2))
  # Of 127 steps of 0.02: -1.005 is 50.25.
  np.testing.assert_array_equal(new.kv[1, 0, 0, 2], [127, -50])
  np.testing.assert_allclose(new.scale[1, 0, 0, 2], 0.02, rtol=1e-6)
  assert jnp.sum(new.kv != 0) == 2 and jnp.sum(new.scale != 0) == 2
  assert new.scale[1, 1, 0, 2] > 0.0  # of zeros too: they are divided by it


def test_int8_scores_of_a_pool_are_those_of_what_was_stored():
  rng = np.random.default_rng(0)
  q, state, held, table = draw(rng)
  whole = jnp.asarray(rng.integers(-127, 128, held.kv.shape), jnp.int8)
  scale = jnp.asarray(rng.random(whole.shape[:-1]) / 60, jnp.float32)
  spans = jnp.zeros(6, jnp.int32), jnp.asarray([1, 3, 7, 12, 0, 6], jnp.int32)
  run = lambda held: cache.row_attention(
    q, state, held, table, *spans, softcap=2.0
  )
  coded = BlockPool(whole, scale)
  np.testing.assert_allclose(
    run(coded), run(BlockPool(whole * scale[..., None])), atol=1e-6
  )
  seen = np.arange(12)[None] < spans[1][:, None]
  used = np.zeros(scale.shape[::3], bool)
  used[np.asarray(table)] = seen.reshape(6, 4, 3)
  spoilt = jnp.where(used[:, None, None], scale, np.nan)
  np.testing.assert_array_equal(run(BlockPool(whole, spoilt)), run(coded))


@pytest.mark.parametrize("softcap", tiers.some([0.0, 0.7], 1))
def test_equals_decoding_over_pages(softcap):
  """The same tokens, once in lock-step columns and once in blocks."""
  rng = np.random.default_rng(0)
  A, R, H, G, K, S, T, C = 2, 3, 6, 2, 4, 5, 7, 3
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  mask = jnp.asarray(rng.random((A, R, S)) < 0.6)
  shared = SharedKeys(normal(A, G, S, K), normal(A, G, S, K), mask)
  q, k, v = normal(A, R, H, K), normal(T, A * R, G, K), normal(T, A * R, G, K)
  page = cache.Page(jnp.zeros((A * R, G, K, T)), jnp.zeros((A * R, G, T, K)))
  held = cache.empty_pool(A * R * 3, C, G, K, "float32")
  table = jnp.asarray(rng.permutation(A * R * 3).reshape(A * R, 3), jnp.int32)
  full = lambda x: jnp.full(A * R, x, jnp.int32)
  for i in range(T):
    page = page.write(k[i], v[i], i)
    held = cache.write_pool(held, k[i], v[i], table[:, i // C], full(i % C))
  limit = jnp.asarray([[1, 2, 7], [3, 4, 6]], jnp.int32)
  last = {"scale": 0.5, "softcap": softcap}
  want = cache.attend_pages(
    q, shared, [page], column=jnp.int32(T - 1), used=0, limit=limit, **last
  )
  decode = jax.jit(functools.partial(cache.attend_pool, **last, target=ON_GPU))
  got = decode(q, shared, held, table, T - limit.reshape(-1), full(T))
  np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.fixture(params=[Sizes(20, 2, 3, 4)])
def half(monkeypatch, request):
  """A case in half precision whose kernel runs without a GPU."""
  J, G, K = request.param[2:]
  supports, kernel = cache.KERNELS["gpu"]
  kernel = functools.partial(kernel, interpret=True)
  monkeypatch.setitem(cache.KERNELS, "gpu", (supports, kernel))
  rng = np.random.default_rng(0)
  case = pools.draw(rng, request.param, "float16", "float16")
  rows = lambda x: x[:12]
  q, _, held, table, first, stop = case
  shared = SharedKeys(
    jnp.ones((12, G, 1, K), jnp.float16),
    jnp.ones((12, G, 1, K), jnp.float16),
    jnp.ones((12, 1, 1), bool),
  )
  q = rows(q).reshape(12, 1, G * J, K)
  return q, shared, held, *map(rows, (table, first, stop))


def kernels_of(form, case):
  program = jax.make_jaxpr(form)(*case)
  return len([*equations(program.jaxpr, "pallas_call")])


def attending(platform, **more):
  kind = dataclasses.replace(here(), platform=platform)
  return functools.partial(cache.attend_pool, scale=0.3, target=kind, **more)


def test_a_kernel_is_that_of_the_machine_if_it_supports_the_arrays(half):
  assert kernels_of(attending("gpu"), half) == 1
  assert (
    kernels_of(attending("cpu"), half)
    == kernels_of(attending("rocm"), half)
    == 0
  )
  assert kernels_of(attending("tpu"), half) == 0  # 16 is no multiple of 128
  wide = jax.tree.map(jnp.float32, half[:3])
  wide = wide[0], half[1]._replace(k=wide[1].k, v=wide[1].v), wide[2]
  assert kernels_of(attending("gpu"), (*wide, *half[3:])) == 0
  number = lambda kind, *shape: jax.ShapeDtypeStruct(shape, kind)
  keys = number("float32", 2, 2, 1, 128)
  case = (
    number("float32", 2, 1, 4, 128),
    SharedKeys(keys, keys, number("bool", 2, 1, 1)),
    BlockPool(number("float32", 5, 2, 2, 128, 128)),
    number("int32", 2, 3),
    *[number("int32", 2)] * 2,
  )
  assert kernels_of(attending("tpu"), case) == 1


def test_the_kernel_is_told_everything(half):
  got = attending("gpu", softcap=0.5)(*half)
  np.testing.assert_allclose(
    got, attending("cpu", softcap=0.5)(*half), atol=1e-2
  )


SHARED = Sizes(20, 2, 6, 2)  # by devices of axis `expert`, with its queries


@pytest.mark.ci
@pytest.mark.parametrize(
  "half, every",
  [
    (Sizes(20, 2, 3, 4), [Axes(1, 4, 2), Axes(1, 2, 4), Axes(1, 4)]),
    (SHARED, [Axes(1, 1, 2, 3), Axes(1, 2, 2, 2)]),
  ],
  indirect=["half"],
)
def test_heads_spread_over_devices_stay_there(half, every):
  want = attending("cpu")(*half)
  for axes in every:
    mesh = meshes.over([jax.devices()[: axes.devices]], axes)
    own, whole = PartitionSpec("fsdp"), PartitionSpec()
    form = jax.shard_map(
      attending("gpu"),
      mesh=mesh,
      in_specs=(own, own, whole, own, own, own),
      out_specs=own,
      axis_names={*meshes.ROWS},
      check_vma=False,
    )
    assert kernels_of(form, half) == 1
    heads = jax.NamedSharding(mesh, PartitionSpec(None, None, "tensor"))
    case = *half[:2], jax.device_put(half[2], heads), *half[3:]
    program = jax.jit(form).lower(*case).compile()
    assert "all-gather" not in program.as_text()
    np.testing.assert_allclose(program(*case), want, atol=1e-2)


def test_heads_that_do_not_spread_over_one_axis_take_the_simple_form(half):
  """GSPMD would gather them: 4 heads on 2 x 2 or on 8 devices."""
  for fsdp, tensor, kernels in ((1, 4, 1), (2, 2, 0), (1, 8, 0)):
    devices = jax.devices()[: fsdp * tensor]
    mesh = meshes.over([devices], Axes(fsdp=fsdp, tensor=tensor))
    with jax.set_mesh(mesh):
      assert kernels_of(attending("gpu"), half) == kernels


@pytest.mark.parametrize("devices, heads", [(1, 4), (2, 2), (4, 1)])
def test_a_device_of_a_tpu_writes_and_reads_its_own_heads(devices, heads):
  number = lambda kind, *shape: jax.ShapeDtypeStruct(shape, kind)
  mesh = meshes.over([jax.devices()[:devices]], Axes(tensor=devices))
  token = number("bfloat16", 3, 4, 128)
  rows = number("int32", 3)
  held = BlockPool(number("bfloat16", 5, 2, 4, 128, 128))
  keys = number("bfloat16", 1, 4, 1, 128)
  shared = SharedKeys(keys, keys, number("bool", 1, 1, 1))
  q, table = number("bfloat16", 1, 3, 8, 128), number("int32", 3, 2)
  inside = f"bf16[5,2,{heads},128,128]"
  with jax.set_mesh(mesh):
    wrote = jax.make_jaxpr(cache.write_pool)(held, token, token, rows, rows)
    read = jax.make_jaxpr(attending("tpu"))(q, shared, held, table, rows, rows)
  for program in (wrote, read):
    (kernel,) = equations(program.jaxpr, "pallas_call")
    assert inside in [
      x.aval.str_short(short_dtypes=True) for x in kernel.invars
    ]
