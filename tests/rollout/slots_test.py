"""Slots are refilled in the same step, and lanes go on to their next prompt."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from small_decoders import DOWN, KEY, RECALL, STOP, Recall, V, run

from brorl_jax.rollout import compaction, program_spec, programs, sampler
from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.types import Prompts


@pytest.mark.parametrize(
  "prompts, n, slots, limit, slot_steps, written",
  tiers.some(
    [
      # Length 3: rollouts 0 and 1 take two steps, then rollout 2 takes two
      # beside an idle slot. Length 2: one step each. Length 1: never in one.
      ([3, 1, 2], 3, 2, 9, 3 * 8, 6 + 0 + 3),
      # Two slots end in one step and take a rollout each: 3 rounds, not more.
      ([3, 1, 2], 5, 2, 9, 3 * 12, 10 + 0 + 5),
      ([3, 1, 2], 1, 1, 9, 3 * 2, 2 + 0 + 1),
      ([3, 1, 2], 3, 2, 2, 3 * 4, 3 + 0 + 3),
      ([1, 1, 1], 3, 2, 9, 0, 0),  # every slot idles from the start
    ],
    1,
    3,
  ),
)
def test_slot_steps_by_hand(prompts, n, slots, limit, slot_steps, written):
  out = run(
    [[v] for v in prompts], params=DOWN, n=n, slots=slots, max_new_tokens=limit
  )
  for p, start in enumerate(prompts):
    want = np.zeros(limit)
    length = min(start, limit)
    want[:length] = np.arange(start)[::-1][:length]
    for r in range(n):
      np.testing.assert_array_equal(out.tokens[p, r], want)
      assert out.mask[p, r].sum() == length and out.mask[p, r, 0]
      assert out.truncated[p, r] == (start > limit)
  np.testing.assert_allclose(out.slot_steps, [slot_steps / 3] * 3, rtol=1e-6)
  share = written / max(slot_steps, 1)
  assert out.slot_occupancy() == pytest.approx(share)
  assert not np.any(out.logp)


# After 4 rollouts end with their third token; after 3 none does.
ENDLESS = jnp.full((V, V), -jnp.inf).at[3, 3].set(0.0)


ENDLESS = ENDLESS.at[jnp.array([4, 5, 1]), jnp.array([5, 1, 0])].set(0.0)


@pytest.mark.parametrize("columns", tiers.some([40, 8], 1, 1))
def test_lanes_go_on_in_the_middle_of_a_page(columns, monkeypatch):
  for where in (sampler, program_spec):
    monkeypatch.setattr(where, "page_columns", lambda T: columns)
  out = run(
    [[3], *[[4]] * 18], params=ENDLESS, n=2, slots=2, lanes=2,
    max_new_tokens=40,
  )  # fmt: skip
  length = np.asarray(out.mask).sum(axis=2)
  np.testing.assert_array_equal(length, [[40] * 2, *[[3] * 2] * 18])
  # One lane has 39 steps of the first prompt and then 2 of the next, which was
  # in its window; the other has all the rest meanwhile.
  written = 2 * 39 + 2 * 2 * 18
  share = out.slot_occupancy()
  assert share >= written / (2 * 2 * 41) - 1e-6


def test_lanes_go_through_all_prompts_in_one_program(monkeypatch):
  told, segment = [], programs.segment

  def spy(*args):
    told.append(args)
    return segment(*args)

  monkeypatch.setattr(programs, "segment", spy)
  run(
    [[3], *[[4]] * 19], params=ENDLESS, n=2, slots=2, lanes=2,
    max_new_tokens=40,
  )  # fmt: skip
  assert len(told) == 1


@pytest.mark.slow
@pytest.mark.parametrize("slots", [64, pytest.param(9, marks=pytest.mark.slow)])
def test_pages_and_slots_are_as_few_as_the_rollouts_need(slots, monkeypatch):
  for where in (sampler, program_spec):
    monkeypatch.setattr(where, "page_columns", lambda T: 3)
  told, calls, compacted, every = [], [], [], slots
  segment, compact = programs.segment, programs.resize

  def spy(spec, inputs, older, used, newest, s, turned, most):
    assert len(older) == 7  # one program, however many are used
    calls.append((spec, int(used), turned))
    return segment(spec, inputs, older, used, newest, s, turned, most)

  def spy_compact(spec, s):
    compacted.append(spec)
    return compact(spec, s)

  monkeypatch.setattr(programs, "segment", spy)
  monkeypatch.setattr(programs, "resize", spy_compact)
  index = np.arange(5)
  out = sampler.rollouts(
    Recall(),
    RECALL,
    Prompts(index[:, None] + 1, np.ones((5, 1), bool), index),
    KEY,
    n=64,
    max_new_tokens=24,
    sampling=SamplingParams(),
    stop_ids=(STOP,),
    slots=slots,
    watch=told.append,
  )
  assert int(np.asarray(out.mask).sum(axis=2).max()) > 12
  *before, last = told
  assert not last.busy + last.waiting
  for progress, (spec, older, turned) in zip(before, calls, strict=True):
    if turned:  # pages with columns of the longest rollout; one is overwritten
      assert older == min(-(-(progress.longest - 1) // 3), 7)
    if not progress.waiting:
      # 5 lanes, 3, and 1 of 64 slots, 16, and 4 in a single lane.
      fits = [
        (lanes, slots)
        for lanes, slots in compaction.sizes(5, every, pool=False)
        if lanes >= progress.lanes and slots >= progress.slots
      ]
      assert (spec.lanes, spec.slots) in fits
      assert spec.lanes * spec.slots == min(a * b for a, b in fits)
  jobs = [spec for spec, _, _ in calls]
  changed = [b for a, b in itertools.pairwise(jobs) if a != b]
  assert compacted == changed and changed
  rows = [spec.lanes * spec.slots for spec in jobs]
  assert rows[0] == 5 * slots and rows[-1] < 5 * slots / 6
