"""Whole rollouts, whatever shape the programs have."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import simple_sampler
import tiers
from compiled import compilations
from hypothesis import given
from hypothesis import strategies as st
from messages import refuses
from small_decoders import (
  KEY,
  POLICY,
  PROMPTS,
  RECALL,
  STOP,
  TABLE,
  Recall,
  Table,
  V,
  devices,
  numbered,
  policy_params,
  run,
  same,
  truncated,
  with_two_ends,
)
from small_decoders import spec as spec_of

from brorl_jax.model import sharding
from brorl_jax.rollout import sampler
from brorl_jax.rollout import slots as states
from brorl_jax.rollout.slots import DecodeProgress

INVARIANT = {
  "n 8, slots 3": {"n": 8, "slots": 3}, "limit 5": {"max_new_tokens": 5},
  "8 devices": {"mesh": 8}, "2 lanes, slots 1": {"lanes": 2, "slots": 1},
  "pages of 5, slots 7": {"columns": 5, "slots": 7},
  "pages of 2, slots 40": {"columns": 2, "slots": 40},
  "pages of 3, 1 lane, 2 devices": {"columns": 3, "lanes": 1, "mesh": 2},
  "1 device": {"mesh": 1},
}  # fmt: skip


@functools.cache
def base():
  return run(n=64, policy=Recall(), params=RECALL)


@pytest.mark.parametrize(
  "change",
  tiers.some([pytest.param(x, id=k) for k, x in INVARIANT.items()], 2, 4),
)
def test_a_rollout_does_not_depend_on(change, monkeypatch):
  settings = {"n": 64, "policy": Recall(), "params": RECALL} | change
  if columns := settings.pop("columns", None):
    for where in (sampler, states):
      monkeypatch.setattr(where, "page_columns", lambda T: columns)
  if "mesh" in change:
    settings["mesh"] = devices(change["mesh"])
  out, want = run(**settings), base()
  N, T = settings["n"], settings.get("max_new_tokens", 12)
  at = np.s_[:, :N, :T]
  np.testing.assert_array_equal(out.tokens, want.tokens[at])
  np.testing.assert_array_equal(out.mask, want.mask[at])
  np.testing.assert_allclose(out.logp, want.logp[at], atol=1e-6)
  longer = np.asarray(want.mask).sum(2)[:, :N] > T
  np.testing.assert_array_equal(out.truncated, want.truncated[:, :N] | longer)


@pytest.mark.ci
def test_what_the_decoder_is_shown_is_the_rollout_and_nothing_else():
  """Refilled slots, a circle of columns, stale columns, idle slots."""
  out = run(n=64, slots=3, policy=Recall(), params=RECALL)
  table, worst = np.asarray(RECALL, np.float64), 0.0
  assert np.isfinite(out.logp).all()
  assert len(set(np.asarray(out.mask).sum(2).ravel())) > 5
  for p, n in np.ndindex(3, 64):
    ids = np.asarray(out.tokens[p, n])[: int(out.mask[p, n].sum())].tolist()
    for i, logits in enumerate(Recall().logits(table, PROMPTS[p], ids)):
      want = scipy.special.log_softmax(logits)[ids[i]]
      worst = max(worst, abs(float(out.logp[p, n, i]) - want))
  assert worst < 2e-6


@pytest.mark.ci
def test_the_end_token_counts_and_nothing_follows_it():
  out = with_two_ends()
  tokens, mask = np.asarray(out.tokens), np.asarray(out.mask)
  ends = set()
  for p, n in np.ndindex(3, 200):
    ids, length = tokens[p, n], mask[p, n].sum()
    assert mask[p, n, :length].all() and not mask[p, n, length:].any()
    inside, last = ids[: length - 1], ids[length - 1]
    assert not np.isin(inside, (STOP, 4)).any()
    assert bool(out.truncated[p, n]) == (last not in (STOP, 4))
    assert length == 12 or not out.truncated[p, n]
    ends.add((int(last), length == 12))
    assert not ids[length:].any() and not out.logp[p, n, length:].any()
    assert (np.asarray(out.logp[p, n, :length]) < 0).all()
  # Both ends occur, and an end in the very last place is not a cut.
  assert {(STOP, False), (4, False)} <= ends
  assert {True, False} == set(np.asarray(out.truncated).ravel().tolist())


@dataclasses.dataclass(frozen=True)
class Other(Recall):
  """A kind of its own: nobody has compiled anything for it."""

  number: int


@pytest.mark.ci
def test_prompts_of_other_lengths_compile_nothing():
  policy = Other(next(_FRESH))
  settings = {"policy": policy, "params": RECALL, "n": 8}
  first = run(prompts=[[1], [2, 3]], **settings)
  with compilations() as seen:
    again = run(prompts=[[1], [2, 3]], **settings)
    other = run(prompts=[[3] * 16, [4, 1, 1]], **settings)
    assert seen == []
    longer = run(prompts=[[3] * 17, [4, 1, 1]], **settings)
    assert seen != []
  same(first, again)
  for prompts, out in (([3] * 16, other), ([3] * 17, longer)):
    likely = jax.nn.log_softmax(next(policy.logits(RECALL, prompts, [0])))
    want = likely[out.tokens[0, :, 0]]
    np.testing.assert_allclose(out.logp[0, :, 0], want, rtol=1e-5)


_FRESH = itertools.count()


@pytest.mark.ci
def test_one_token_is_drawn_from_the_prefill_alone():
  """T = 1, and prompts of all lengths end in the last place."""
  seen = []
  note = lambda *x: seen.extend(map(np.array, x))

  class Watched(Table):
    def prefill(self, params, tokens, mask):
      jax.debug.callback(note, tokens, mask)
      return super().prefill(params, tokens, mask)

    def decode_step(self, *args):  # is never run
      logits, page = super().decode_step(*args)
      return jnp.full_like(logits, jnp.nan), page

  out = run(policy=Watched(), max_new_tokens=1, n=500)
  jax.effects_barrier()
  tokens, mask = (x[:, -3:] for x in seen)
  np.testing.assert_array_equal(tokens, [[0, 0, 3], [1, 4, 2], [0, 5, 5]])
  np.testing.assert_array_equal(mask, [[0, 0, 1], [1, 1, 1], [0, 1, 1]])
  assert seen[1].shape == (3, 16) and not seen[1][:, :-3].any()
  table = np.log(np.stack([truncated(row) for row in TABLE]))
  for p, prompt in enumerate(PROMPTS):
    tokens = np.asarray(out.tokens[p, :, 0])
    want = table[prompt[-1]][tokens]
    np.testing.assert_allclose(out.logp[p, :, 0], want, rtol=1e-5)
    np.testing.assert_array_equal(out.truncated[p], tokens != STOP)
  assert np.all(out.mask) and not np.any(out.slot_steps)


def prompts_of_policy():
  rng = np.random.default_rng(1)
  return [rng.integers(1, 24, size).tolist() for size in (3, 7, 1, 5, 2, 4, 6)]


def run_policy(**changes):
  settings = {"n": 160, "max_new_tokens": 24, "stop_ids": (STOP,)}
  settings |= {"temperature": 0.8, "top_p": 0.95, "params": policy_params()}
  settings["policy"] = POLICY
  return run(prompts_of_policy(), **settings | changes)


base_of_policy = functools.cache(run_policy)


def flips(a, b):
  """Tokens that differ, and tokens compared up to the first that does."""
  N, T = b.tokens.shape[1:]
  both = np.asarray(a.mask)[:, :N, :T] | np.asarray(b.mask)
  differ = both & (np.asarray(a.tokens)[:, :N, :T] != np.asarray(b.tokens))
  before = np.cumsum(differ, axis=2) - differ == 0
  return int(np.sum(differ & before)), int(np.sum(both & before))


@pytest.mark.slow
def test_shapes_of_the_program_flip_fewer_than_one_token_in_10000():
  mesh = devices(8, data=2, tensor=2, expert=2)
  places = sharding.param_shardings(policy_params(), mesh)
  spread = jax.device_put(policy_params(), places)
  assert len(spread["head"]["kernel"].sharding.device_set) == 8
  total = np.zeros(2, int)
  for change in ({"slots": 37}, {"n": 64, "max_new_tokens": 20},
    {"mesh": mesh, "params": spread}):  # fmt: skip
    flipped, compared = flips(base_of_policy(), run_policy(**change))
    assert compared > 3_000
    total += flipped, compared
  print(f"flips {total[0]} of {total[1]}")
  assert total[1] >= 20_000 and total[0] < 1e-4 * total[1]


REFERENCE = {
  "cut": {"temperature": 0.7, "top_k": 15, "top_p": 0.9, "min_p": 0.02},
  "greedy": {"temperature": 0.0},
}


@functools.cache
def simple(name):
  return simple_sampler.sample(
    POLICY, policy_params(), prompts_of_policy(), KEY, n=24, max_new_tokens=24,
    stop_ids=(STOP,), **REFERENCE[name],
  )  # fmt: skip


@pytest.mark.parametrize("columns, lanes, slots",
  [pytest.param(24, 7, 24, marks=pytest.mark.slow), (8, 2, 10)])  # fmt: skip
@pytest.mark.parametrize("name", tiers.some(REFERENCE, 1, 1))
def test_equals_the_simple_sampler(name, columns, lanes, slots, monkeypatch):
  for where in (sampler, states):
    monkeypatch.setattr(where, "page_columns", lambda T: columns)
  out = run_policy(n=24, slots=slots, lanes=lanes,
    **{"temperature": 1.0, "top_p": 1.0} | REFERENCE[name])  # fmt: skip
  tokens, logp, mask = simple(name)
  assert len(np.unique(mask.sum(axis=2))) > 3
  differ = (tokens != np.asarray(out.tokens)).any(axis=2)
  if name == "greedy":
    assert not differ.any()
  # Elsewhere a uniform number may fall between two roundings of one sum.
  assert differ.sum() <= 1
  np.testing.assert_array_equal(out.mask[~differ], mask[~differ])
  np.testing.assert_allclose(out.logp[~differ], logp[~differ], atol=2e-5)


@pytest.mark.parametrize("change, message", [
  ({"n": 0}, "n = 0 ... at least 1"),
  ({"max_new_tokens": 0}, "max_new_tokens = 0 ... at least 1"),
  ({"slots": 0}, "slots = 0 ... at least 1 ... at most 16"),
  ({"slots": 17}, "slots = 17 ... at least 1 ... at most 16"),
  ({"lanes": 4}, "lanes = 4 ... at least 1 ... at most 3"),
  ({"prompts": []}, "prompts = 0 ... at least 1"),
  ({"prompts": [[1], [], [2]]}, "prompt 1 is empty"),
  ({"prompts": [[1], [2, V]]}, "token 6 ... prompt 1 ... 0 to 5"),
  ({"prompts": [[-1]]}, "token -1 ... prompt 0 ... 0 to 5"),
  ({"stop_ids": (0, 99)}, "token 99 ... stop_ids ... 0 to 5"),
  ({"temperature": -0.1}, "temperature = -0.1"),
  ({"temperature": float("nan")}, "temperature = nan"),
  ({"top_k": -1}, "top_k = -1"), ({"top_p": 0.0}, "top_p = 0.0"),
  ({"top_p": 1.01}, "top_p = 1.01"), ({"min_p": 1.5}, "min_p = 1.5"),
], ids=str)  # fmt: skip
def test_refuses_by_name_and_value(change, message):
  with refuses(ValueError, message):
    run(**change)


@pytest.mark.parametrize("count, n, lanes, slots", [
  (1, 512, 1, 128), (3, 16, 3, 16), (40, 16, 16, 8), (300, 8, 32, 4),
])  # fmt: skip
def test_a_cpu_decodes_128_rows_at_a_time(count, n, lanes, slots, monkeypatch):
  found = []

  def rollouts(spec, *_):
    found.append((spec.lanes, spec.slots))
    raise InterruptedError

  monkeypatch.setattr(sampler, "rollouts", rollouts)
  pooled = Table(pool_columns=4)
  for policy, want in ((Table(), (lanes, slots)), (pooled, (count, n))):
    with pytest.raises(InterruptedError):
      sampler.sample(policy, TABLE, [[1]] * count, KEY, n=n, max_new_tokens=4)
    assert found[-1] == want


@pytest.mark.parametrize("count, groups, lanes, slots", tiers.some([
  (4, 2, 2, 5), (3, 2, 2, 5), (1, 2, None, 16), (6, 3, 1, 16), (3, 5, 1, 4),
], 2, 3))  # fmt: skip
def test_groups_make_the_same(count, groups, lanes, slots, monkeypatch):
  trims, how = [], {"lanes": lanes, "slots": slots, "max_new_tokens": 90}
  monkeypatch.setattr(sampler.processes, "trim", trims.append)
  of = functools.partial(spec_of, Recall(), n=16, **how)
  args = RECALL, numbered(count), KEY
  one, got = (sampler.rollouts(of(groups=g), *args) for g in (1, groups))
  assert len(trims) > 1 and not any(trims)  # whatever the size of the process
  for name in ("tokens", "mask", "truncated"):
    np.testing.assert_array_equal(getattr(got, name), getattr(one, name))
  np.testing.assert_allclose(got.logp, one.logp, atol=1e-6)
  assert got.slot_steps.shape == (count,) and 0 < got.slot_occupancy() <= 1
  decoded = got.mask.sum() - got.mask[:, :, 0].size  # all but first tokens
  assert got.slot_steps.sum() >= decoded
  assert spec_of(Table(), n=8, lanes=1, groups=2).share(9).slots == 4


def spec(lanes, slots, pages=3, blocks=0):
  one = spec_of(Table(), n=slots, max_new_tokens=5 * pages).program(lanes)
  return dataclasses.replace(one, columns=5, blocks=blocks)


def shrunk(full, rows, waiting=0, now=None):
  """(lanes, slots), where lanes have so many busy slots."""
  rows = np.array([*rows, *[0] * (full.lanes - len(rows))])
  busy = DecodeProgress(9, rows.sum(), waiting, 1, 0, 0, 0, np.zeros(1), rows)
  nothing: Any = None
  got = sampler.shrunk(
    sampler.OpenRollouts(full, now or full, nothing, (), nothing, busy, 5)
  )
  return got.lanes, got.slots


# (prompt, new, pool, lanes, slots): sizes
SIZES = {
  (5, 99, False, 1, 512): [512, 288, 164, 92, 52, 32, 16, 4],
  (5, 99, False, 1, 3): [3],
  (5, 99, True, 1, 64): [64, 44, 28, 16, 12, 8, 4, 1],
  (5, 99, False, 8, 16): [(44, 2), (56, 1), (40, 1), (28, 1), (16, 1), (4, 1)],
  # Prompts that are long, or a pool that stays: no more lanes than before.
  (999, 99, False, 8, 16): [(8, 11), (8, 7), (8, 5), (7, 4), (8, 2), (4, 1)],
  (5, 99, True, 2, 4): [(2, 2), (1, 1)],
}


@pytest.mark.parametrize("case", SIZES)
def test_the_sizes(case):
  prompt, new, pool, lanes, slots = case
  how = {"prompt": prompt, "new": new, "pool": pool}
  got = sampler.compact_sizes(lanes, slots, **how)
  want = [x if isinstance(x, tuple) else (1, x) for x in SIZES[case]]
  assert got == [(lanes, slots)] * (lanes > 1) + want


@given(st.integers(1, 40), st.integers(1, 600),
  st.integers(1, 5000), st.integers(1, 5000), st.booleans())  # fmt: skip
def test_no_size_needs_more_than_the_first(lanes, slots, prompt, new, pool):
  sizes = sampler.compact_sizes(lanes, slots, prompt=prompt, new=new, pool=pool)
  rows = [math.prod(size) for size in sizes]
  assert sizes[0] == (lanes, slots) and len(sizes) <= 8
  assert rows == sorted(set(rows), reverse=True)
  for count, narrow in sizes:
    columns = 2 * count * prompt + (0 if pool else count * narrow * new)
    assert columns <= 2 * lanes * prompt + (0 if pool else rows[0] * new)


@pytest.mark.parametrize("busy, want", [
  ([16] * 8, (8, 16)),
  ([16, 16, 16, 16, 16, 9], (8, 16)),  # 89: 45 lanes of 2
  ([16, 16, 16, 16, 16, 8], (44, 2)),
  ([15, 15, 15, 15, 15, 3, 3, 1], (8, 16)),  # 40 + 2 + 2 + 1
  ([9, 9, 9, 9, 9, 9, 1, 1], (56, 1)), ([4], (4, 1)), ([1, 1, 1, 1], (4, 1)),
])  # fmt: skip
def test_the_smallest_size_that_holds_what_is_busy(busy, want):
  assert shrunk(spec(8, 16, pages=20), busy) == want


def test_what_was_dropped_does_not_come_back():
  full = spec(8, 16, pages=20)
  now = dataclasses.replace(full, lanes=28, slots=1)
  assert shrunk(full, [16, 16], now=now) == (28, 1)
  assert shrunk(full, [16], now=now) == (16, 1)


def test_nothing_shrinks_while_rollouts_wait_or_for_one_page():
  for pages, waiting in ((3, 1), (1, 0)):
    assert shrunk(spec(16, 64, pages), [1], waiting) == (16, 64)
