"""Tests of brorl_jax/rollout/prefill.py."""

import jax.numpy as jnp
import numpy as np
import pytest
from small_decoders import KEY, RECALL, Recall, Table, run, same

from brorl_jax.rollout import prefill
from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.rollout.program_spec import ProgramSpec
from brorl_jax.rollout.slots import fold_in, unpack


@pytest.mark.ci
def test_prompts_are_read_in_groups_that_fit(monkeypatch):
  monkeypatch.setattr(prefill, "PREFILL_TOKENS", 53)
  assert prefill.read_together(6, 16) == 3
  assert prefill.read_together(7, 16) == 1  # 2 and 3 do not divide 7
  assert prefill.read_together(6, 100) == 1
  assert prefill.read_together(2, 16) == 2
  read = []

  class Reader(Recall):
    def prefill(self, params, tokens, mask):
      read.append(tokens.shape)
      return super().prefill(params, tokens, mask)

  prompts = [[1, 2, 3], [2, 2, 2], [3, 1, 5], [5, 4, 1], [1, 1, 1], [4, 5, 3]]
  settings = {"n": 8, "params": RECALL, "prompts": prompts}
  out = run(policy=Reader(), **settings)
  assert set(read) == {(3, 16)}
  same(out, run(policy=Recall(), **settings))


def queued(n, *, offset=0, real=True):
  """Of prompt 7, whose first token is 0, which ends a rollout, in half."""
  spec = ProgramSpec(Table(), SamplingParams(), (0,), n, 9, 1, n, 9, None)
  logits = jnp.log(jnp.array([[0.5, 0.0, 0.25, 0.25, 0.0, 0.0]]))
  one = lambda x: np.array([x], np.int32)
  chunk = prefill.Chunks(one(7), one(offset), np.array([real]), one(3))
  return prefill.queued(spec, logits, chunk, KEY)


def test_rollouts_that_ended_need_no_slot():
  queue, packed = queued(64)
  tokens, logp = unpack(packed[0])
  np.testing.assert_allclose(
    logp, np.where(tokens == 0, np.log(0.5), np.log(0.25)), rtol=1e-6
  )
  goes = np.flatnonzero(np.asarray(tokens) != 0)
  assert 16 < len(goes) < 48
  assert queue.waiting.tolist() == [len(goes)]
  np.testing.assert_array_equal(queue.order[0, : len(goes)], goes)
  np.testing.assert_array_equal(queue.first[0], tokens)
  assert (queue.offset.tolist(), queue.row.tolist()) == ([0], [3])
  assert queued(64, real=False)[0].waiting.tolist() == [0]


def test_first_tokens_of_a_chunk_are_those_of_the_whole():
  _, whole = queued(64)
  _, part = queued(16, offset=48)
  np.testing.assert_array_equal(part[0], whole[0, 48:])


def test_the_prompt_that_is_none_has_no_rollouts_and_no_row():
  queue = prefill.with_none(queued(4)[0], KEY)
  assert queue.sizes == (1, 4)
  assert queue.waiting[1] == 0 and queue.row.tolist() == [3, 1]
  assert queue.key[0] == fold_in(KEY, 7)
