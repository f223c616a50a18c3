"""Tests of launch/bench/kernels.py, without an accelerator."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from brorl_jax.model import attention, cache, spec
from launch.bench import kernels

pytestmark = pytest.mark.ci
CPU = spec.Target("cpu", 1, 0)


@pytest.fixture(autouse=True)
def once(monkeypatch):
  monkeypatch.setattr(kernels, "_ms", lambda *_: 2.0)


def test_errors_and_pairs_by_hand():
  assert kernels.error([3.0, 4.0], [3.0, 4.0]) == 0.0
  assert kernels.error([3.0, 4.5], [3.0, 4.0]) == 0.1
  # Of 3 tokens behind 2: 2 + 1, 2 + 2 and 2 + 3.
  assert kernels._pairs(np.asarray([True, True, True, False]), 2) == 12


@pytest.mark.parametrize("S", [37, 0])
def test_attention_is_compared_with_float32(S, monkeypatch):
  case = functools.partial(kernels.of_attention, CPU, 1e12, M=2, Q=45, S=S)
  line = case()
  errors = [line["error"], *line["slope_error"]]
  assert len(errors) == (6 if S else 4)
  assert all(5e-4 < e < 5e-3 for e in errors)  # bfloat16's
  # 45 tokens each: 7 products of 2 x 12 heads x 128 for every pair.
  own = 40 if S else 45  # behind a prompt a ninth is padding
  pairs = 2 * (own * (own + 1) / 2 + own * (37 - 7 if S else 0))
  share = 7 * 2 * 12 * 128 * pairs / 1e12 / 2e-3
  assert line["roofline_share"] == pytest.approx(share, abs=1e-3)
  attend = attention.attend
  # Wrong in half precision alone, as a kernel would be.
  wrong = lambda q, *rest, **how: (
    attend(q, *rest, **how) * (1.02 if q.dtype == jnp.bfloat16 else 1.0)
  )
  monkeypatch.setattr(attention, "attend", wrong)
  assert case()["error"] > 0.015


@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
def test_decoding_is_compared_with_float32(stored):
  kernel = functools.partial(cache.row_kernel, interpret=True)
  case = functools.partial(
    kernels.of_decoding, bandwidth=1e12, stored=stored, B=7, T=150
  )
  assert 5e-4 < case(kernel)["error"] < 5e-3
  late = lambda q, state, tokens, table, first, stop: cache.row_attention(
    q, state, tokens, table, first, stop - (stop > first)
  )
  assert case(late)["error"] > 0.015


def test_a_cpu_has_no_kernels():
  with pytest.raises(SystemExit, match="no kernels for cpu"):
    kernels.main()
