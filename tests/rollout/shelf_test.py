"""Tests of brorl_jax/rollout/shelf.py."""

import jax
import numpy as np
import pytest
from small_decoders import KEY, RECALL, Recall

from brorl_jax.rollout import prefill, rounds, sampler, shelf, stream
from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.types import Prompts


def batch(*index):
  """Prompts p of two tokens, 10 p and 10 p + 1; None is padding."""
  real = np.array([p is not None for p in index])
  index = np.array([p or 0 for p in index], np.int32)
  tokens = np.stack([10 * index, 10 * index + 1], axis=1).astype(np.int32)
  prompts = Prompts(tokens, tokens >= 0, index)
  return prefill.PrefillBatch(prompts, np.zeros(len(index), np.int32), real)


def test_2048_tokens_are_read_together_or_as_many_as_there_are_places():
  assert shelf.together(100, 80) == 25
  assert shelf.together(3, 80) == 3
  assert shelf.together(100, 5000) == 1


def test_each_device_reads_what_it_has_not_read(monkeypatch):
  """2 devices of 3 rows, which read 2 prompts at a time."""
  monkeypatch.setattr(shelf, "_TOKENS", 4)
  held = shelf.Shelf(2, 3)
  rows, parts = held.rows(batch(4, 5, 6, 5, None, None), [{4, 5, 6}, {5}])
  assert rows.tolist() == [0, 1, 2, 0, 0, 0]
  (a, b) = parts
  # 3 is no row. Padding reads whatever is first.
  assert a.to.tolist() == [0, 1, 0, 3]
  assert b.to.tolist() == [2, 3, 3, 3]
  assert a.tokens[[0, 1, 2], 0].tolist() == [40, 50, 50]
  assert b.tokens[0].tolist() == [60, 61]
  assert a.mask.all()
  # Both have prompt 5, and nobody 7, for which 4 goes: it was used before 6,
  # and 5 is used again.
  rows, parts = held.rows(batch(5, 7, None, 5, 5, None), [{5, 6, 7}, {5}])
  assert rows.tolist() == [1, 0, 0, 0, 0, 0]
  (a,) = parts
  assert a.to.tolist() == [0, 3, 3, 3] and a.tokens[0, 0] == 70
  # Prompt 6 was used before, but it is in use.
  rows, parts = held.rows(batch(8, None, None, None, None, None), [{6, 8}, {5}])
  assert rows[0] == 1 and parts[0].to.tolist() == [1, 3, 3, 3]
  # Prompt 6 is older than 7 and 8, but it is used once more.
  rows, _ = held.rows(batch(6, None, None, None, None, None), [{6}, {5}])
  assert rows[0] == 2
  rows, parts = held.rows(batch(9, None, None, None, None, None), [{9}, {5}])
  assert rows[0] == 0 and parts[0].to.tolist() == [0, 3, 3, 3]
  # Prompt 5 is gone from the first device, and is read again there alone.
  rows, parts = held.rows(batch(5, None, None, 5, None, None), [{5, 6}, {5}])
  assert [part.to.tolist() for part in parts] == [[1, 3, 3, 3]]


@pytest.mark.ci
@pytest.mark.parametrize("places, reads", [(8, 5), (2, 40)])
def test_a_prompt_is_read_once_if_there_is_room(monkeypatch, places, reads):
  """5 prompts, 8 chunks of each, in the order of a rule's rounds."""
  found = []
  for name in ("opened", "read"):
    real = getattr(shelf, name)

    def seen(*args, real=real, **how):
      (part,) = [x for x in args if isinstance(x, shelf.Part)]
      found.append(int((part.to < places).sum()))
      return real(*args, **how)

    monkeypatch.setattr(shelf, name, seen)
  chunks = [rounds.Chunk(p, 4 * k) for k in range(8) for p in range(5)]

  def feed(room, idle):
    some = [chunks.pop(0) for _ in range(min(room, len(chunks), places))]
    if not some:
      return None
    index = np.array([c.p for c in some], np.int32)
    tokens = index[:, None] % 6
    return rounds.with_first(Prompts(tokens, tokens >= 0, index), some)

  out = [*stream.stream(
    Recall(), RECALL, feed, KEY, n=4, max_new_tokens=12,
    sampling=SamplingParams(), stop_ids=(0,), slots=4, lanes=2, places=places,
  )]  # fmt: skip
  assert sum(len(prompts.index) for prompts, _ in out) == 40
  assert sum(found) <= reads
  assert reads == 40 or sum(found) == reads
  # Whatever was read again, the rollouts are those of the prompt.
  index = np.arange(5, dtype=np.int32)
  every = Prompts(index[:, None] % 6, index[:, None] >= 0, index)
  want = sampler.rollouts(
    Recall(), RECALL, every, KEY, n=32, max_new_tokens=12,
    sampling=SamplingParams(), stop_ids=(0,), slots=32,
  )  # fmt: skip
  for prompts, rollouts in out:
    for i, (p, n) in enumerate(zip(prompts.index, prompts.first, strict=True)):
      np.testing.assert_array_equal(
        rollouts.tokens[i], want.tokens[p, n : n + 4]
      )


def test_prompts_that_come_when_few_slots_are_left_need_no_other_program(
  monkeypatch,
):
  """8 lanes of 16 are compacted to fewer before the last prompts come."""
  left, told, shapes = [*range(12)], [], []
  read = shelf.read

  def seen(*args, **how):
    shapes.append([np.shape(x) for x in jax.tree.leaves((args, how))])
    return read(*args, **how)

  monkeypatch.setattr(shelf, "read", seen)

  def feed(room, idle):
    late = len(left) <= 2 and not (told and told[-1].busy <= 8)
    some = [] if late and not idle else [left.pop(0) for _ in left[:room][:2]]
    if not some:
      return None
    tokens = np.array(some, np.int32)[:, None] % 6
    return Prompts(tokens, tokens >= 0, np.array(some, np.int32))

  endless = RECALL.at[:, :, 0].add(-3.0)
  out = [*stream.stream(
    Recall(), endless, feed, KEY, n=16, max_new_tokens=200,
    sampling=SamplingParams(), stop_ids=(0,), slots=16, lanes=8, places=8,
    watch=told.append,
  )]  # fmt: skip
  assert sum(len(prompts.index) for prompts, _ in out) == 12
  assert len(shapes) > 2
  assert all(x == shapes[0] for x in shapes)
