"""Decoding over pages and over a pool of blocks, and its kernel."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import equations
from jax.sharding import AbstractMesh, PartitionSpec
from pools import Case, Sizes, draw, run, shapes, spoilt

from brorl_jax.many import meshes
from brorl_jax.many.meshes import Axes
from brorl_jax.model import attention, cache, tpu_kernels
from brorl_jax.model.cache import BlockPool, Page, SharedKeys
from brorl_jax.model.spec import here


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
  shared = SharedKeys([normal(A, G, S, K)], [normal(A, G, S, K)], mask)
  B = A * R
  own = [Page(normal(B, G, K, C), normal(B, G, C, K)) for _ in range(pages)]
  return normal(A, R, H, K), shared, own


def plain(q, shared, pages, column, limit, softcap):
  """By `attention.attend`: the token as the last of as many as there are."""
  A, R, _, K = q.shape
  k = jnp.concatenate([jnp.swapaxes(p.k, 2, 3) for p in pages], axis=2)
  v = jnp.concatenate([p.v for p in pages], axis=2)
  apart = lambda x: x.reshape(A, R, *x.shape[1:])
  ages = cache.ages(column, len(pages), 3, len(pages) - 1)
  age = jnp.concatenate(ages, axis=1)
  T = age.shape[1]
  seen = (
    jnp.zeros((A, R, T, T), bool).at[:, :, -1].set(age[None] < limit[..., None])
  )
  out = attention.attend(jnp.repeat(q[:, :, None], T, axis=2),
    (*shared.k, *shared.v, shared.mask[:, :, None]), (apart(k), apart(v), seen),
    scale=K**-0.5, softcap=softcap, target=here())  # fmt: skip
  return out[:, :, -1]


@pytest.mark.parametrize("column, most, softcap", [(0, 1, 0.0), (2, 6, 0.7)])
def test_equals_the_attention_of_training(column, most, softcap):
  rng = np.random.default_rng(most)
  q, shared, pages = drawn(rng)
  limit = jnp.asarray(rng.integers(1, most + 1, (2, 3)), jnp.int32)
  at = jnp.int32(column), limit
  run = functools.partial(cache.attend_pages, q, shared, column=at[0],
    limit=limit, scale=0.5, softcap=softcap)  # fmt: skip
  got = run(pages, used=1)
  want = plain(q, shared, pages, *at, softcap)
  np.testing.assert_allclose(got, want, atol=1e-6)
  # What is in front is not read, whatever it is.
  spoilt = jax.tree.map(lambda x: x * np.nan, pages[0])
  more = jax.jit(run)([spoilt, spoilt, *pages], used=jnp.int32(1))
  np.testing.assert_allclose(more, got, atol=1e-6)


def test_prompts_in_pieces_are_the_prompts(monkeypatch):
  """And a piece that no row sees is not read, whatever it is."""
  width, prompts = 2, 2
  monkeypatch.setattr(cache, "_LEAST_PIECE", 2)
  q, shared, pages = drawn(np.random.default_rng(width), S=width * prompts)
  run = functools.partial(cache.attend_pages, q, pages=pages,
    column=jnp.int32(1), used=1, limit=jnp.full((2, 3), 5, jnp.int32),
    scale=0.5, softcap=0.7)  # fmt: skip
  pieces = cache.prompt_pieces(prompts, width)
  first = pieces[0]

  def cut(keys):
    parts = ([x[0][:, :, at] for at in pieces] for x in keys[:2])
    return SharedKeys(*parts, keys.mask)

  np.testing.assert_allclose(
    run(shared=cut(shared)), run(shared=shared), atol=1e-6
  )
  # One row of the last lane alone sees the first piece.
  rare = shared.mask.at[:, :, first].set(False).at[-1, -1, first].set(True)
  some = shared._replace(mask=rare)
  np.testing.assert_allclose(run(shared=cut(some)), run(shared=some), atol=1e-6)
  # No row sees the first piece; the others are seen as before.
  unseen = shared._replace(mask=shared.mask.at[..., first].set(False))
  spoilt = unseen._replace(v=[unseen.v[0].at[:, :, first].set(jnp.nan)])
  want = run(shared=unseen)
  np.testing.assert_allclose(run(shared=cut(spoilt)), want, atol=1e-6)
  assert np.isnan(run(shared=spoilt)).any()


def test_pieces_of_prompts_cover_each_column_once():
  """From the right, where the tokens are; at most four for each prompt."""
  assert cache.prompt_pieces(1, 40) == [slice(0, 40)]
  assert cache.prompt_pieces(2, 80) == [
    slice(0, 16), slice(16, 80), slice(80, 96), slice(96, 160)
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
    coded = Page(jnp.zeros_like(page.k, jnp.int8),
      jnp.zeros_like(page.v, jnp.int8), size, size)  # fmt: skip
    for at in range(3):
      coded = coded.write(normal(), normal(), at)
    small.append(coded)
    k = coded.k * coded.k_scale[:, :, None]
    large.append(Page(k, coded.v * coded.v_scale[..., None]))
  run = functools.partial(cache.attend_pages, q, shared, column=jnp.int32(1),
    used=1, limit=jnp.full((2, 3), 5, jnp.int32), scale=0.5)  # fmt: skip
  np.testing.assert_allclose(run(pages=small), run(pages=large), atol=1e-6)


def simple(case: Case, softcap: float) -> np.ndarray:
  """One row, head and token after the other, all scores at once."""
  q, kv = np.asarray(case.q, float), np.asarray(case.pool.kv, float)
  if case.pool.scale is not None:
    kv = kv * np.asarray(case.pool.scale, float)[..., None]
  B, G, J, _ = q.shape
  C = kv.shape[3]
  top, total, before = (np.array(x, float) for x in case.state)
  out = np.zeros(q.shape)
  for b, g, j in np.ndindex(B, G, J):
    for i in range(int(case.first[b]), int(case.stop[b])):
      k, v = kv[int(case.table[b, i // C]), :, g, i % C]
      score = q[b, g, j] @ k
      score = softcap * np.tanh(score / softcap) if softcap else score
      weight = np.exp(score - top[b, g, j])
      total[b, g, j] += weight
      before[b, g, j] += weight * v
    out[b, g, j] = before[b, g, j] / total[b, g, j]
  return out


@pytest.mark.parametrize(
  "stored, softcap", [("float32", 0.0), ("float32", 0.7), ("int8", 2.0)]
)
@pytest.mark.parametrize("outside", [-1, 10**6])
def test_the_softmax_goes_over_what_a_row_sees(stored, softcap, outside):
  """And what it does not see may be anything."""
  case = draw(stored=stored)
  got = run(cache.row_attention, spoilt(case, outside), softcap)
  np.testing.assert_allclose(got, simple(case, softcap), atol=1e-5)
  _, total, out = case.state  # row 0 sees nothing
  np.testing.assert_allclose(got[0], (out / total[..., None])[0], rtol=1e-6)


@pytest.mark.parametrize(
  "form", [cache.row_attention, cache.row_kernel, tpu_kernels.row_kernel]
)
def test_a_row_without_prompt_and_tokens_is_finite(form):
  case = draw(Sizes(16, 2, head_size=16))
  state = jnp.full_like(case.state[0], -1e30), *case.state[1:]
  none = jnp.zeros_like(case.first)
  how = {} if form is cache.row_attention else {"interpret": True}
  form = functools.partial(form, **how)
  got = run(form, case._replace(state=state, first=none, stop=none))
  np.testing.assert_allclose(got, state[2] / state[1][..., None], rtol=1e-6)


def test_a_token_is_written_to_its_place_and_nowhere_else():
  rng = np.random.default_rng(0)
  held = draw().pool
  k, v = jnp.asarray(rng.normal(size=(2, 4, 2, 4)), jnp.float32)
  block = jnp.asarray([3, len(held.kv), 0, 10**6], jnp.int32)
  column = jnp.asarray([1, 0, 2, 2], jnp.int32)
  new = cache.write_pool(held, k, v, block, column)
  want = np.array(held.kv)
  want[3, 0, :, 1], want[3, 1, :, 1] = k[0], v[0]
  want[0, 0, :, 2], want[0, 1, :, 2] = k[2], v[2]
  np.testing.assert_array_equal(new.kv, want)


def test_int8_tokens_keep_their_own_scale():
  zeros = jnp.zeros((2, 2, 1, 3, 2), jnp.int8)
  held = cache.BlockPool(zeros, jnp.zeros(zeros.shape[:-1]))
  k, v = jnp.asarray([[[2.54, -1.005]]]), jnp.asarray([[[0.0, 0.0]]])
  one = lambda x: jnp.asarray([x], jnp.int32)
  new = cache.write_pool(held, k, v, one(1), one(2))
  # Of 127 steps of 0.02: -1.005 is 50.25.
  np.testing.assert_array_equal(new.kv[1, 0, 0, 2], [127, -50])
  np.testing.assert_allclose(new.scale[1, 0, 0, 2], 0.02, rtol=1e-6)
  assert jnp.sum(new.kv != 0) == 2 and jnp.sum(new.scale != 0) == 2
  assert new.scale[1, 1, 0, 2] > 0.0  # of zeros too: they are divided by it


KERNEL = functools.partial(cache.row_kernel, interpret=True)


@pytest.mark.parametrize("z, stored, activations, softcap, atol", [
  # Odd blocks, many of them in a tile; many tiles in a block.
  (Sizes(23, 3, 7, 1, 16), "float32", "float32", 1.5, 1e-5),
  (Sizes(128, 2, 1, 2, 16), "int8", "float32", 0.0, 1e-5),
  # More heads than a matrix has rows.
  (Sizes(40, 2, 18, 1, 16), "bfloat16", "bfloat16", 0.0, 2e-2),
  (Sizes(35, 2, 3, 2, 16), "int8", "bfloat16", 1.5, 2e-2),
])  # fmt: skip
def test_kernel_equals_the_simple_form(z, stored, activations, softcap, atol):
  case = draw(z, stored, activations)
  want = run(cache.row_attention, case, softcap)
  got = run(KERNEL, spoilt(case, -1), softcap)
  np.testing.assert_allclose(got, want, atol=atol)
  assert jax.eval_shape(KERNEL, *case).dtype == jnp.dtype(activations)


def test_scores_far_apart_do_not_overflow():
  case = draw(Sizes(40, 2, head_size=16))
  case = case._replace(q=case.q * 1e3)
  want = run(cache.row_attention, case)
  np.testing.assert_allclose(run(KERNEL, case), want, atol=1e-5)


def test_only_tiles_with_tokens_that_a_row_sees_are_read():
  tile, most = 8, 40
  ends = np.stack(np.meshgrid(*[np.arange(most)] * 2), -1).reshape(-1, 2)
  ends = ends[ends[:, 0] <= ends[:, 1]]
  find = jax.jit(jax.vmap(functools.partial(cache._tiles, tile=tile)))
  low, high = find(*jnp.asarray(ends, jnp.int32).T)
  for (first, stop), a, b in zip(ends, low, high, strict=True):
    assert list(range(a, b)) == sorted({i // tile for i in range(first, stop)})


@contextlib.contextmanager
def some_gpu():
  """What to lower for, where there is none. JAX 0.10 takes any."""
  if not hasattr(jax.sharding, "AbstractDevice"):
    yield
    return
  device = jax.sharding.AbstractDevice(
    device_kind="NVIDIA H100", num_cores=None, platform="gpu"
  )
  mesh = AbstractMesh((), (), abstract_device=device)
  with jax.sharding.use_abstract_mesh(mesh):
    yield


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("z, stored, softcap", [
  (Sizes(64, 3, 1, 2, 16), "bfloat16", 0.0),
  (Sizes(50, 3, 6, 2, 128), "int8", 3.0),
  (Sizes(128, 3, 18, 1, 256), "bfloat16", 3.0),
])  # fmt: skip
def test_lowers_for_a_gpu_without_one(z, stored, softcap):
  case = shapes(z, stored)
  assert cache.kernel_supports(case.q, case.pool)
  with some_gpu():
    program = run.trace(cache.row_kernel, case, softcap)
    text = program.lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("__gpu$xla.gpu.triton") == 1 and "gather" not in text


def test_arrays_that_the_kernel_supports():
  for size, stored, activations, supported in (
    (16, "bfloat16", "bfloat16", True), (16, "int8", "bfloat16", True),
    (16, "float32", "float32", False), (16, "int8", "float32", False),
    (16, "float16", "bfloat16", False), (96, "bfloat16", "bfloat16", False),
    (8, "bfloat16", "bfloat16", False),
  ):  # fmt: skip
    case = shapes(Sizes(16, 2, head_size=size), stored, activations)
    assert cache.kernel_supports(case.q, case.pool) == supported


def test_pools_beyond_32_bits_are_not_supported():
  number = lambda kind, *shape: jax.ShapeDtypeStruct(shape, kind)
  scale = number(jnp.float32, 1, 2, 8, 64)
  supports = lambda blocks, dtype, scale: cache.kernel_supports(
    number(jnp.bfloat16, 1, 8, 2, 128),
    BlockPool(number(dtype, blocks, 2, 8, 64, 128), scale),
  )
  most = 2**31 // (2 * 8 * 64 * 128)
  assert supports(most, jnp.int8, scale)
  assert not supports(most + 1, jnp.int8, scale)
  assert supports(2 * most + 1, jnp.int8, scale)
  assert supports(most, jnp.bfloat16, None)
  assert supports(most + 1, jnp.bfloat16, None)
  assert not supports(64, jnp.int8, None)  # a number is missing


@pytest.fixture(params=[Sizes(20, 2, 3, 4, 16)])
def half(monkeypatch, request):
  """A case in half precision whose kernel runs without a GPU."""
  J, G, K = request.param[2:]
  monkeypatch.setattr(cache, "row_kernel", KERNEL)
  q, _, held, *rest = draw(request.param, "float16", "float16")
  ones = jnp.ones((12, G, 1, K), jnp.float16)
  shared = SharedKeys([ones], [ones], jnp.ones((12, 1, 1), bool))
  q = q[:12].reshape(12, 1, G * J, K)
  return q, shared, held, *(x[:12] for x in rest)


def kernels_of(form, case):
  return len([*equations(jax.make_jaxpr(form)(*case).jaxpr, "pallas_call")])


def attending(platform, scale=0.3, **more):
  kind = dataclasses.replace(here(), platform=platform)
  return functools.partial(cache.attend_pool, scale=scale, target=kind, **more)


def test_a_gpu_takes_the_kernel_if_it_supports_the_arrays(half):
  assert kernels_of(attending("gpu"), half) == 1
  for other in ("cpu", "rocm", "tpu"):
    assert kernels_of(attending(other), half) == 0
  wide = jax.tree.map(jnp.float32, half[0]), *half[1:]
  assert kernels_of(attending("gpu"), wide) == 0
  got, want = (attending(x, softcap=0.5)(*half) for x in ("gpu", "cpu"))
  np.testing.assert_allclose(got, want, atol=1e-2)


SHARED = Sizes(20, 2, 6, 2, 16)  # by devices of axis `expert`, with its queries


@pytest.mark.ci
@pytest.mark.parametrize("half, every", [
  (Sizes(20, 2, 3, 4, 16), [Axes(1, 4, 2), Axes(1, 2, 4), Axes(1, 4)]),
  (SHARED, [Axes(1, 1, 2, 3), Axes(1, 2, 2, 2)]),
], indirect=["half"])  # fmt: skip
def test_heads_spread_over_devices_stay_there(half, every):
  want = attending("cpu")(*half)
  for axes in every:
    mesh = meshes.over([jax.devices()[: axes.devices]], axes)
    own, whole = PartitionSpec("fsdp"), PartitionSpec()
    form = jax.shard_map(attending("gpu"), mesh=mesh,
      in_specs=(own, own, whole, own, own, own), out_specs=own,
      axis_names={*meshes.ROWS}, check_vma=False)  # fmt: skip
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
    with jax.set_mesh(meshes.over([devices], Axes(fsdp=fsdp, tensor=tensor))):
      assert kernels_of(attending("gpu"), half) == kernels
