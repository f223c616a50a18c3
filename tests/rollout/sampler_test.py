"""Whole rollouts, whatever shape the programs have."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import simple_sampler
import tiers
from compiled import compilations
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
  "n 8, slots 3": {"n": 8, "slots": 3},
  "limit 5": {"max_new_tokens": 5},
  "8 devices": {"mesh": 8},
  "2 lanes, slots 1": {"lanes": 2, "slots": 1},
  "pages of 5, slots 7": {"columns": 5, "slots": 7},
  "pages of 2, slots 40": {"columns": 2, "slots": 40},
  "pages of 3, 1 lane, 2 devices": {"columns": 3, "lanes": 1, "mesh": 2},
  "1 device": {"mesh": 1},
}


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
    length = int(out.mask[p, n].sum())
    ids = np.asarray(out.tokens[p, n])[:length].tolist()
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
    if out.truncated[p, n]:
      assert length == 12
    else:
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
  for change in (
    {"slots": 37},
    {"n": 64, "max_new_tokens": 20},
    {"mesh": mesh, "params": spread},
  ):
    flipped, compared = flips(base_of_policy(), run_policy(**change))
    assert compared > 3_000
    total += flipped, compared
  print(f"flips {total[0]} of {total[1]}")
  assert total[1] >= 20_000
  assert total[0] < 1e-4 * total[1]


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


@pytest.mark.parametrize(
  "columns, lanes, slots",
  [pytest.param(24, 7, 24, marks=pytest.mark.slow), (8, 2, 10)],
)
@pytest.mark.parametrize("name", tiers.some(REFERENCE, 1, 1))
def test_equals_the_simple_sampler(name, columns, lanes, slots, monkeypatch):
  for where in (sampler, states):
    monkeypatch.setattr(where, "page_columns", lambda T: columns)
  out = run_policy(
    n=24,
    slots=slots,
    lanes=lanes,
    **{"temperature": 1.0, "top_p": 1.0} | REFERENCE[name],
  )
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
  ({"top_k": -1}, "top_k = -1"),
  ({"top_p": 0.0}, "top_p = 0.0"),
  ({"top_p": 1.01}, "top_p = 1.01"),
  ({"min_p": 1.5}, "min_p = 1.5"),
], ids=str)  # fmt: skip
def test_refuses_by_name_and_value(change, message):
  with refuses(ValueError, message):
    run(**change)


@pytest.mark.parametrize(
  "count, n, lanes, slots",
  [(1, 512, 1, 128), (3, 16, 3, 16), (40, 16, 40, 4), (300, 8, 128, 1)],
)
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


def spec(lanes, slots, pages=3, blocks=0):
  one = spec_of(Table(), n=slots, max_new_tokens=5 * pages).program(lanes)
  return dataclasses.replace(one, columns=5, blocks=blocks)


def progress(lanes, slots, waiting=0):
  return DecodeProgress(
    slots, lanes, 9, lanes * slots, waiting, 1, 0, 0, 0, np.zeros(1, bool)
  )


def shrunk(full, *busy):
  got = sampler.shrunk(full, full, progress(*busy))
  return got.lanes, got.slots


@pytest.mark.parametrize("lanes, slots, pool, by_lanes", [
  (64, 128, False, {64: [128, 24], 8: [128, 24], 1: [128, 24, 4]}),
  (32, 4, False, {32: [4], 6: [4], 1: [4]}),
  (1, 64, False, {1: [64, 32, 16, 8, 4]}),
  (1, 512, False, {1: [512, 232, 104, 48, 24, 12, 4]}),
  (1, 64, True, {1: [64, 16, 4, 1]}),
  (1, 3, False, {1: [3]}),
])  # fmt: skip
def test_the_sizes(lanes, slots, pool, by_lanes):
  want = {(a, r) for a, own in by_lanes.items() for r in own}
  got = sampler.compact_sizes(lanes, slots, pool=pool)
  assert set(got) == want and got[0] == (lanes, slots)
  assert len(got) == len(want) <= 7


@pytest.mark.parametrize("lanes, busy, want", [
  (16, (16, 64), (16, 64)), (16, (5, 17), (16, 64)), (16, (5, 16), (16, 16)),
  (16, (4, 16), (4, 16)), (16, (3, 17), (4, 64)), (16, (1, 1), (1, 4)),
  (1, (1, 33), (1, 64)), (1, (1, 32), (1, 32)), (1, (1, 2), (1, 4)),
])  # fmt: skip
def test_the_smallest_size_that_holds_what_is_busy(lanes, busy, want):
  assert shrunk(spec(lanes, 64), *busy) == want


def test_what_was_dropped_does_not_come_back():
  full = spec(16, 64)
  now = dataclasses.replace(full, lanes=4, slots=16)
  for busy in ((4, 16), (2, 3), (1, 1)):
    got = sampler.shrunk(full, now, progress(*busy))
    assert got.lanes <= 4 and got.slots <= 16
  assert (got.lanes, got.slots) == (1, 4)


def test_nothing_shrinks_while_rollouts_wait_or_for_one_page():
  for one, waiting in ((spec(16, 64), 1), (spec(16, 64, pages=1), 0)):
    assert shrunk(one, 1, 1, waiting) == (16, 64)
