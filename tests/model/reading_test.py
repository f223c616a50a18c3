"""Tests of brorl_jax/model/reading.py."""

import math

import jax
import numpy as np
import pytest
import tiers
from compiled import equations
from small_policies import (
  EXPERTS,
  GEMMA2,
  GEMMA3,
  TINY,
  padded,
  shaken,
  some_ids,
)

from brorl_jax.model import reading

POLICIES = {
  "qwen2": TINY, "gemma2": GEMMA2, "gemma3": GEMMA3, "experts": EXPERTS
}  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize("name", tiers.some(POLICIES, 0, 2))
def test_a_prompt_read_in_chunks_is_the_prompt_read_at_once(name, monkeypatch):
  policy = POLICIES[name]
  params = shaken(policy)
  # Chunks that are all padding for one prompt, and 2 places too many in front.
  tokens, mask = padded(some_ids(2, 13, 9), 13, "left")
  want, whole_prefix = policy.prefill(params, tokens, mask)
  monkeypatch.setattr(reading, "PREFILL_CHUNK", 5)
  got, prefix = policy.prefill(params, tokens, mask)
  np.testing.assert_allclose(got, want, atol=3e-5)
  np.testing.assert_array_equal(prefix.mask, mask)
  real = np.asarray(mask)[:, None, None, :, None]
  for a, b in ((prefix.k, whole_prefix.k), (prefix.v, whole_prefix.v)):
    assert a.shape == b.shape
    np.testing.assert_allclose(
      np.where(real, a, 0), np.where(real, b, 0), atol=3e-5
    )
  # No array has S x S scores, and only the last positions have logits.
  program = jax.make_jaxpr(lambda: policy.prefill(params, tokens, mask))()
  shapes = [
    v.aval.shape
    for eqn in equations(program.jaxpr, "dot_general")
    for v in eqn.outvars
  ]
  assert any(5 in s for s in shapes)
  others = [math.prod(s) for s in shapes if policy.vocab not in s]
  assert max(others) < len(tokens) * policy.heads * 13 * 13
  # The head multiplies its weight first, as there are few rows.
  assert [s for s in shapes if policy.vocab in s] == [(policy.vocab, 3)]
