"""Tests of brorl_jax/model/kernels.py, by Pallas' interpreter."""

import contextlib
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from brorl_jax.model import cache, kernels
from brorl_jax.model.cache import Page, Shared


class Sizes(NamedTuple):
  columns: int  # C
  pages: int
  heads: int = 6  # H
  kv_heads: int = 2  # G
  head_size: int = 16  # K
  lanes: int = 2  # A
  rows: int = 3  # R
  prompt: int = 9  # S
  windows: int = 1  # prompts side by side in a lane

  @property
  def most(self):
    return self.columns * self.pages


class Case(NamedTuple):
  q: jax.Array
  shared: Shared
  pages: list[Page]


SIZES = {
  "a page as a circle": Sizes(12, 1),
  "a circle of several blocks": Sizes(200, 1),
  "pages": Sizes(64, 3),
  "pages of several blocks": Sizes(128, 2, heads=4, kv_heads=4),
  "odd pages": Sizes(75, 3, heads=7, kv_heads=1),
  "many heads": Sizes(16, 2, heads=18, kv_heads=1),
  "two prompts": Sizes(24, 2, windows=2),
}


def draw(rng, z, kind="float32", activations=None):
  """Queries, prompts and pages, with a row that sees no prompt."""
  dtype = activations or ("float32" if kind == "int8" else kind)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
  A, R, G, K, S = z.lanes, z.rows, z.kv_heads, z.head_size, z.prompt
  keys = A, G, z.windows * S, K
  mask = rng.random((A, R, z.windows, S)) < 0.7
  mask &= (
    rng.integers(0, z.windows, (A, R, 1, 1)) == np.arange(z.windows)[:, None]
  )
  mask[-1, -1] = False
  mask = jnp.asarray(mask.reshape(A, R, -1))
  pages = [page(rng, z, kind) for _ in range(z.pages)]
  shared = Shared(normal(*keys), normal(*keys), mask)
  return Case(normal(A, R, z.heads, K), shared, pages)


def page(rng, z, kind):
  B, G, K, C = z.lanes * z.rows, z.kv_heads, z.head_size, z.columns
  if kind != "int8":
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), kind)
    return Page(normal(B, G, K, C), normal(B, G, C, K))
  whole = lambda *shape: jnp.asarray(rng.integers(-127, 128, shape), jnp.int8)
  size = lambda: jnp.asarray(rng.random((B, G, C)) / 60, jnp.float32)
  return Page(whole(B, G, K, C), whole(B, G, C, K), size(), size())


def place(rng, z, trial):
  """A column and limits; the first trials are the ends of both."""
  ends = [
    (0, 1),
    (z.columns - 1, z.most),
    (0, z.most),
    (z.columns - 1, 1),
    (1, z.most + 3),
  ]
  shape = z.lanes, z.rows
  if trial < len(ends):
    column, limit = ends[trial]
    limit = np.full(shape, limit)
  else:
    column = rng.integers(0, z.columns)
    limit = rng.integers(1, z.most + 1, shape)
  return jnp.int32(column), jnp.asarray(limit, jnp.int32)


@functools.partial(jax.jit, static_argnames=("form", "softcap"))
def run(form, case, column, limit, softcap=0.0):
  return form(
    *case, column=column, limit=limit, scale=0.3, softcap=softcap
  ).astype(jnp.float32)


def kernel(
  q, shared, pages, *, column, limit, scale, softcap=0.0, interpret=True
):
  """`cache.decode` with the kernel in it."""
  A, R, H, K = q.shape
  q *= scale
  out = kernels.own(
    q.reshape(A * R, -1, H // shared.k.shape[1], K),
    cache.prompts(q, shared, softcap),
    pages,
    column,
    limit.reshape(A * R),
    softcap=softcap,
    interpret=interpret,
  )
  return out.reshape(A, R, H, K)


def compiled_kernel(*args, **options):
  return kernel(*args, **options, interpret=False)


def seen(z, column, limit):
  """Which columns of each page each row sees, B C."""
  limit = np.asarray(limit).reshape(-1, 1)
  return [
    np.asarray(age) < limit for age in cache.ages(column, z.pages, z.columns)
  ]


def spoilt(pages, where, value):
  """With `value` in the columns `where` of every float array of each page."""

  def spoil(at, x, axes):
    if x is None or x.dtype == jnp.int8:
      return x
    return jnp.where(at.reshape(axes), jnp.asarray(value, x.dtype), x)

  def one(page, at):
    B, C = at.shape
    alone = B, 1, C
    return Page(
      spoil(at, page.k, (B, 1, 1, C)),
      spoil(at, page.v, (B, 1, C, 1)),
      spoil(at, page.k_scale, alone),
      spoil(at, page.v_scale, alone),
    )

  return [one(page, at) for page, at in zip(pages, where, strict=True)]


@pytest.mark.parametrize("name", tiers.some(SIZES, 1, 4))
def test_equals_the_plain_form_whatever_lies_in_columns_not_seen(name):
  z = SIZES[name]
  rng = np.random.default_rng(len(name))
  case = draw(rng, z)
  for trial in range(10):
    at = place(rng, z, trial)
    want = run(cache.decode, case, *at)
    unseen = [~x for x in seen(z, *at)]
    for value in (1e9, np.nan):
      pages = spoilt(case.pages, unseen, value)
      got = run(kernel, case._replace(pages=pages), *at)
      np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.ci
@pytest.mark.parametrize(
  "kind, activations, softcap, tolerance",
  tiers.some(
    [
      ("float32", "float32", 1.5, 1e-5),
      ("int8", "float32", 0.0, 1e-5),
      ("int8", "float32", 1.5, 1e-5),
      ("bfloat16", "bfloat16", 0.0, 2e-2),
      ("int8", "bfloat16", 0.0, 2e-2),
      ("float32", "bfloat16", 0.0, 2e-2),  # as on a CPU
    ],
    3,
    3,
  ),
)
def test_equals_the_plain_form_in_all_precisions(
  kind, activations, softcap, tolerance
):
  z = Sizes(70, 2)
  rng = np.random.default_rng(0)
  case = draw(rng, z, kind, activations)
  for trial in range(8):
    at = place(rng, z, trial)
    want = run(cache.decode, case, *at, softcap=softcap)
    pages = spoilt(case.pages, [~x for x in seen(z, *at)], np.nan)
    got = run(kernel, case._replace(pages=pages), *at, softcap=softcap)
    np.testing.assert_allclose(got, want, atol=tolerance)
  out = kernel(*case, column=at[0], limit=at[1], scale=0.3)
  assert out.dtype == jnp.dtype(activations)


def test_a_prompt_mask_may_be_one_for_all_rows():
  z = Sizes(20, 1)
  rng = np.random.default_rng(0)
  case = draw(rng, z)
  shared = case.shared._replace(mask=case.shared.mask[:, :1])
  case = case._replace(shared=shared)
  at = place(rng, z, 4)
  want = run(cache.decode, case, *at)
  np.testing.assert_allclose(run(kernel, case, *at), want, atol=1e-5)


def test_scores_far_apart_do_not_overflow():
  z = Sizes(70, 2)
  rng = np.random.default_rng(0)
  case = draw(rng, z)
  case = case._replace(q=case.q * 1e3)
  for trial in range(7):
    at = place(rng, z, trial)
    want = run(cache.decode, case, *at)
    np.testing.assert_allclose(run(kernel, case, *at), want, atol=1e-5)


@pytest.mark.parametrize(
  "columns, pages", tiers.some([(12, 1), (40, 1), (16, 3), (23, 2)], 1, 2)
)
@pytest.mark.parametrize("block", [8, 16])
def test_every_seen_column_is_in_one_span_and_blocks_of_others_in_none(
  columns, pages, block
):
  z = Sizes(columns, pages)

  @jax.jit
  @jax.vmap
  def bounds(column, limit):
    spans = kernels._spans(column, limit, pages, columns)
    ends = [(first, stop) for _, first, stop in spans]
    blocks = [kernels._blocks(*span, block) for span in ends]
    return jnp.asarray([jnp.asarray(x) for x in (ends, blocks)])

  case = np.stack(
    np.meshgrid(np.arange(columns), 1 + np.arange(z.most)), -1
  ).reshape(-1, 2)
  which = [i for i, _, _ in kernels._spans(0, 1, pages, columns)]
  found = np.asarray(bounds(*jnp.asarray(case, jnp.int32).T))
  for (column, limit), (ends, blocks) in zip(case, found, strict=True):
    sees = seen(z, jnp.int32(column), [limit])
    got = np.zeros((pages, columns), int)
    for i, (first, stop), (low, high) in zip(which, ends, blocks, strict=True):
      got[i, first : max(stop, first)] += 1
      inside = lambda b: any(sees[i][0, b * block : (b + 1) * block])
      assert all(inside(b) for b in range(low, high))
      if first < stop:
        assert 0 <= low * block <= first and stop <= high * block
        assert high <= -(-columns // block)
    np.testing.assert_array_equal(got, np.concatenate(sees))


@pytest.mark.ci
def test_blocks_not_seen_are_not_read(monkeypatch):
  """Nor cleared, then, of what is not a number."""
  z = Sizes(131, 2, head_size=32)
  rng = np.random.default_rng(0)
  case = draw(rng, z)
  block = kernels._BLOCK
  at = jnp.int32(80), jnp.full((z.lanes, z.rows), 90, jnp.int32)
  want = run(cache.decode, case, *at)
  sees = seen(z, *at)
  near = [np.zeros_like(x) for x in sees]
  for x, wide in zip(sees, near, strict=True):
    for start in range(0, z.columns, block):
      of_block = slice(start, start + block)
      wide[:, of_block] = x[:, of_block].any(axis=1, keepdims=True)
  far = [~x for x in near]
  assert all(x.any() for x in far)
  monkeypatch.setattr(kernels, "_cleared", lambda x, seen: x)
  form = lambda *args, **options: kernel(*args, **options)  # traced anew
  jax.clear_caches()
  pages = spoilt(case.pages, far, np.nan)
  got = run(form, case._replace(pages=pages), *at)
  np.testing.assert_allclose(got, want, atol=1e-5)
  # Of a block that is read, nothing may be left.
  pages = spoilt(case.pages, [~x for x in sees], np.nan)
  assert np.isnan(run(form, case._replace(pages=pages), *at)).all()
  jax.clear_caches()


@pytest.mark.ci
def test_heads_spread_over_devices_stay_there():
  z = Sizes(20, 2, heads=8, kv_heads=4, lanes=4)
  rng = np.random.default_rng(0)
  case = draw(rng, z)
  at = place(rng, z, 4)
  want = run(cache.decode, case, *at)
  for data, model in ((4, 2), (2, 4), (4, 1)):
    mesh = jax.make_mesh(
      (data, model),
      ("data", "model"),
      axis_types=(AxisType.Auto, AxisType.Auto),
      devices=jax.devices()[: data * model],
    )
    lanes = PartitionSpec("data")
    inside = []

    def form(*args, mesh=mesh, lanes=lanes, inside=inside):
      def one(case, column, limit):
        inside.append(kernels.supports(case.q, case.pages))
        return kernel(*case, column=column, limit=limit, scale=0.3)

      return jax.shard_map(
        one,
        mesh=mesh,
        in_specs=(lanes, PartitionSpec(), lanes),
        out_specs=lanes,
        axis_names={"data"},
        check_vma=False,
      )(*args)

    heads = jax.NamedSharding(mesh, PartitionSpec("data", "model"))
    pages = jax.device_put(case.pages, heads)
    program = jax.jit(form).lower(case._replace(pages=pages), *at).compile()
    gathered = "all-gather" in program.as_text()
    assert inside == [True] and not gathered
    got = jax.jit(form)(case._replace(pages=pages), *at)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_heads_are_not_spread_over_two_axes():
  """GSPMD would gather them: pages of 8 heads on 2 x 4 devices."""
  case = draw(np.random.default_rng(0), Sizes(20, 2, heads=8, kv_heads=8))
  asked = []

  def form(q):
    asked.append(kernels.supports(q, case.pages))
    return q

  for data, model, supported in ((1, 8, True), (2, 4, False)):
    mesh = jax.make_mesh(
      (data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2
    )
    with jax.set_mesh(mesh):
      jax.eval_shape(form, case.q)
    assert asked.pop() == supported


def shapes(z, kind, activations):
  rng = np.random.default_rng(0)
  return jax.eval_shape(lambda: draw(rng, z, kind, activations))


@contextlib.contextmanager
def some_gpu():
  """What to lower for, where there is none. JAX 0.10 takes any."""
  if not hasattr(jax.sharding, "AbstractDevice"):
    yield
    return
  device = jax.sharding.AbstractDevice(
    device_kind="NVIDIA H100", num_cores=None, platform="gpu"
  )
  with jax.sharding.use_abstract_mesh(
    AbstractMesh((), (), abstract_device=device)
  ):
    yield


def lowered(case, softcap=0.0):
  number = jax.ShapeDtypeStruct((), jnp.int32)
  limit = jax.ShapeDtypeStruct(case.q.shape[:2], jnp.int32)
  with some_gpu():
    program = run.trace(compiled_kernel, case, number, limit, softcap=softcap)
    return program.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("head_size", tiers.some([16, 32, 64, 128, 256], 2, 2))
@pytest.mark.parametrize(
  "kind, activations",
  tiers.some(
    [
      ("float32", "float32"),
      ("bfloat16", "bfloat16"),
      ("int8", "bfloat16"),
      ("int8", "float32"),
    ],
    3,
  ),
)
def test_lowers_for_a_gpu_without_one(kind, activations, head_size):
  for each, columns, softcap in (
    (1, 192, 0.0),
    (4, 50, 0.0),
    (6, 320, 3.0),
    (7, 192, 0.0),
  ):
    z = Sizes(columns, 2, heads=2 * each, head_size=head_size)
    case = shapes(z, kind, activations)
    assert kernels.supports(case.q, case.pages)
    text = lowered(case, softcap)
    assert text.count("__gpu$xla.gpu.triton") == 1
    # Own scores exist nowhere else: no matrix of rows times columns.
    assert f"x{each}x{columns}xf32" not in text


@pytest.mark.parametrize(
  "changed", [{"head_size": 96}, {"head_size": 8}, {"head_size": 80}]
)
def test_what_the_kernel_does_not_support_is_said(changed):
  case = shapes(Sizes(64, 2)._replace(**changed), "float32", None)
  assert not kernels.supports(case.q, case.pages)


def test_pages_beyond_32_bits_are_not_supported():
  z = Sizes(2048, 1, head_size=128, lanes=1)
  number = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
  supports = lambda rows, dtype, scale: kernels.supports(
    number(jnp.bfloat16, 1, rows, 16, 128),
    [
      Page(
        number(dtype, rows, 8, 128, z.columns),
        number(dtype, rows, 8, z.columns, 128),
        scale,
        scale,
      )
    ],
  )
  scale = number(jnp.float32, 1, 8, z.columns)
  assert supports(1024, jnp.int8, scale)  # 2^31 elements
  assert not supports(1025, jnp.int8, scale)
  assert supports(2049, jnp.int8, scale)
  assert supports(1024, jnp.bfloat16, None)
  assert supports(1025, jnp.bfloat16, None)
  assert not supports(64, jnp.int8, None)  # a number is missing


def test_equal_pages_are_supported_and_others_not():
  one, other = (shapes(Sizes(c, 1), "float32", None) for c in (64, 128))
  assert kernels.supports(one.q, [*one.pages, *one.pages])
  assert not kernels.supports(one.q, [*one.pages, *other.pages])
