"""Tests of brorl_jax/sampler.py.

Two decoders of a few lines stand in for the policy: one whose next token
depends on the last one alone, so that every probability is known, and one that
depends on everything it is shown, so that nothing it is shown can be wrong.
"""

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import simple_sampler
from compiled import compiled
from jax.sharding import AxisType

from brorl_jax import cache, sampler, sharding
from brorl_jax.attention import Rope
from brorl_jax.policy import Policy
from brorl_jax.types import Prompts

V, STOP = 6, 0
KEY = jax.random.key(3)


@dataclasses.dataclass(frozen=True)
class Table:
  """params[v] are the logits after token v."""

  vocab = V

  def cast(self, params):
    return params

  def unroll(self, params):
    return params

  def prefill(self, params, tokens, mask):
    assert tokens.shape == mask.shape
    return params[tokens[:, -1]], jnp.zeros(len(tokens), jnp.int32)

  def lanes(self, prefix, window):
    return jnp.append(prefix, 0)[window]

  def page(self, rows, columns):
    return jnp.full((rows, columns), 1000, jnp.int32)  # not to be looked at

  def decode_step(self, weights, shared, pages, token, length, which, column):
    page = pages[-1].at[:, column].set(token.ravel())
    return weights[token], page


@dataclasses.dataclass(frozen=True)
class Recall(Table):
  """params[m, v], m from all of the prompt and of the response so far."""

  def prefill(self, params, tokens, mask):
    total = jnp.sum(jnp.where(mask, tokens + 1, 0), axis=1)
    return params[total % len(params), tokens[:, -1]], total

  def decode_step(self, weights, shared, pages, token, length, which, column):
    page = pages[-1].at[:, column].set(token.ravel())
    total, seen, columns = 0, 0, page.shape[1]
    circle = cache.ages(column, len(pages), columns)
    for age, cells in zip(circle, [*pages[:-1], page], strict=True):
      mask = age < length.reshape(-1, 1)
      total += jnp.sum(jnp.where(mask, cells + 1, 0), axis=1)
      seen += jnp.sum(mask, axis=1)
    prompt = jnp.take_along_axis(shared, which, axis=1)
    total = prompt + total.reshape(length.shape) + 5 * length
    wrong = seen.reshape(length.shape) != length
    logits = weights[total % len(weights), token]
    return jnp.where(wrong[..., None], jnp.nan, logits), page

  def logits(self, params, prompt, response):
    """The same for one rollout, in plain Python."""
    for i in range(len(response)):
      m = sum(prompt) + len(prompt) + sum(response[:i]) + i + 5 * i
      yield params[m % len(params)][[*prompt, *response][len(prompt) + i - 1]]


TABLE = 1.5 * jax.random.normal(jax.random.key(0), (V, V))
RECALL = jax.random.normal(jax.random.key(1), (7, V, V))
PROMPTS = [[3], [1, 4, 2], [5, 5]]

POLICY = Policy(
  vocab=24, width=16, layers=2, heads=4, kv_heads=2, head_size=4, mlp=16,
  rope=Rope(100.0), norm_eps=1e-6, tied=False, qkv_bias=True,
)  # fmt: skip


@functools.cache
def policy_params():
  params = POLICY.init(jax.random.key(0))
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda a: a + jnp.asarray(0.3 * rng.normal(size=a.shape), a.dtype), params
  )


def devices(count, model=1):
  return jax.make_mesh(
    (count // model, model),
    ("data", "model"),
    axis_types=(AxisType.Auto, AxisType.Auto),
    devices=jax.devices()[:count],
  )


def run(prompts=PROMPTS, key=KEY, policy=Table(), params=TABLE, **changes):
  settings = {"n": 16, "max_new_tokens": 12, "stop_ids": (STOP,)}
  return sampler.sample(policy, params, prompts, key, **settings | changes)


def same(a, b):
  for field in dataclasses.fields(a):
    x, y = getattr(a, field.name), getattr(b, field.name)
    np.testing.assert_array_equal(x, y, err_msg=field.name)


def truncated(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
  """The behaviour distribution, one token at a time. No ties, please."""
  logits = [float(x) for x in logits]
  order = sorted(range(len(logits)), key=lambda v: -logits[v])
  if temperature == 0.0:
    return np.eye(len(logits))[order[0]]
  weight = {
    v: np.exp((logits[v] - logits[order[0]]) / temperature) for v in order
  }
  if top_k:
    weight = {v: weight[v] for v in order[:top_k]}
  total, kept = sum(weight.values()), {}
  for v, w in weight.items():
    if sum(kept.values()) / total < top_p:
      kept[v] = w
  kept = {v: w for v, w in kept.items() if w >= min_p * kept[order[0]]}
  prob = np.zeros(len(logits))
  for v, w in kept.items():
    prob[v] = w / sum(kept.values())
  return prob


def fits(counts, prob):
  """The p-value of counts under the distribution; 0 if one cannot happen."""
  possible = prob > 0
  if counts[~possible].any():
    return 0.0
  if possible.sum() == 1:
    return 1.0
  want = prob[possible] / prob[possible].sum() * counts.sum()
  enough = want >= 5  # merge the rare ones into one bin
  merge = lambda x: np.append(x[enough], x[~enough].sum())
  got, want = merge(counts[possible]), merge(want)
  if want[-1] < 5:
    got = np.append(got[:-2], got[-2:].sum())
    want = np.append(want[:-2], want[-2:].sum())
  if len(want) == 1:
    return 1.0
  return scipy.stats.chisquare(got, want).pvalue


BEHAVIOURS = [
  {},
  {"temperature": 0.5},
  {"temperature": 1.7, "top_k": 3},
  {"top_p": 0.7},
  {"min_p": 0.2},
  {"temperature": 1.3, "top_k": 4, "top_p": 0.8, "min_p": 0.35},
]


@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=str)
def test_tokens_come_from_the_softmax_and_carry_its_log_probability(behaviour):
  n, prompt = 20_000, 2
  out = run(
    [[prompt]], n=n, max_new_tokens=3, slots=n // 2, stop_ids=(), **behaviour
  )
  tokens, logp = np.asarray(out.tokens[0]), np.asarray(out.logp[0])
  prob = np.stack([truncated(row, **behaviour) for row in TABLE])

  first = np.bincount(tokens[:, 0], minlength=V)
  assert fits(first, prob[prompt]) > 1e-3
  for i in (1, 2):
    for previous in range(V):
      rows = tokens[:, i - 1] == previous
      if rows.sum() > 100:
        counts = np.bincount(tokens[rows, i], minlength=V)
        assert fits(counts, prob[previous]) > 1e-3, (i, previous)
  # Whole sequences: no token knows more of another than the table says.
  a, b = tokens[:, 0], tokens[:, 1]
  pairs = np.bincount(a * V + b, minlength=V * V)
  assert fits(pairs, (prob[prompt][:, None] * prob).ravel()) > 1e-3
  triples = np.bincount((a * V + b) * V + tokens[:, 2], minlength=V**3)
  joint = prob[prompt][:, None, None] * prob[:, :, None] * prob
  assert fits(triples, joint.ravel()) > 1e-3

  before = np.concatenate([np.full((n, 1), prompt), tokens[:, :-1]], axis=1)
  want = np.log(prob[before, tokens])
  np.testing.assert_allclose(logp, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
  "behaviour, kept",
  [
    # Probabilities 1/2, 1/4, 1/8, 1/8 less a little, and 2^-30.
    ({}, 5),
    ({"top_k": 1}, 1),
    ({"top_k": 2}, 2),
    ({"top_k": 5}, 5),
    ({"top_k": 9}, 5),
    ({"top_p": 0.45}, 1),
    ({"top_p": 0.55}, 2),
    ({"top_p": 0.80}, 3),
    ({"top_p": 0.95}, 4),
    ({"min_p": 0.6}, 1),
    ({"min_p": 0.4}, 2),
    ({"min_p": 0.2}, 4),
    ({"min_p": 1.0}, 1),
    # Each works on what the one before left: of 2/3 and 1/3, 0.6 is one token.
    ({"top_k": 2, "top_p": 0.6}, 1),
    ({"top_p": 0.6}, 2),
    # Cold, the second token has (1/2)^4 of the first.
    ({"temperature": 0.25, "min_p": 0.1}, 1),
    ({"temperature": 0.25, "top_p": 0.9}, 1),
    ({"temperature": 4.0, "min_p": 0.6}, 4),
    ({"temperature": 0.0}, 1),
  ],
  ids=str,
)
def test_truncation_by_hand(behaviour, kept):
  p = np.asarray([1 / 2, 1 / 4, 1 / 8, 1 / 8 - 1e-3, 2.0**-30])
  shuffle = np.asarray([3, 0, 4, 1, 2])
  logits = jnp.asarray(np.log(p)[shuffle], jnp.float32)
  got = np.asarray(sampler.Behaviour(**behaviour).logp(logits))
  assert set(np.flatnonzero(np.isfinite(got))) == {
    int(i) for i in np.flatnonzero(shuffle < kept)
  }
  prob = truncated(np.asarray(logits), **behaviour)
  np.testing.assert_allclose(np.exp(got), prob, atol=1e-6)
  assert np.exp(got).sum() == pytest.approx(1.0, abs=1e-6)


def test_greedy_takes_the_likeliest_with_probability_one():
  out = run(temperature=0.0, n=3)
  for p, prompt in enumerate(PROMPTS):
    last, want = prompt[-1], []
    while len(want) < 12 and (not want or want[-1] != STOP):
      last = int(np.argmax(TABLE[last]))
      want.append(last)
    for n in range(3):
      assert list(out.tokens[p, n][out.mask[p, n]]) == want
  assert not np.any(out.logp)
  # Of equals, the first, and it alone.
  tie = sampler.Behaviour(temperature=0.0).logp(jnp.asarray([1.0, 2.0, 2.0]))
  np.testing.assert_array_equal(np.exp(tie), [0, 1, 0])


def test_draw_returns_the_token_whose_share_holds_the_uniform():
  prob = np.asarray([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
  logp = jnp.asarray(np.log(np.where(prob, prob, 1e-99)), jnp.float32)
  logp = jnp.where(prob > 0, logp, -jnp.inf)
  uniform = jnp.asarray([0.0, 0.1, 0.2499, 0.2501, 0.7499, 0.7501, 0.9999])
  got, got_logp = sampler.draw(logp + 3.0, uniform)
  np.testing.assert_array_equal(got, [1, 1, 1, 3, 3, 4, 4])
  np.testing.assert_allclose(got_logp, logp[got], rtol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_no_rounding_draws_a_token_of_probability_zero(seed):
  """Sums of 50,000 tiny numbers, with runs of zeros also at both ends."""
  rng = np.random.default_rng(seed)
  size = 50_000
  logits = rng.normal(size=(3, size)) * [[0.0], [1.0], [10.0]]
  logits[:, rng.random(size) < 0.5] = -np.inf
  logits[:, :100] = logits[:, -100:] = -np.inf
  logp = jax.nn.log_softmax(jnp.asarray(logits, jnp.float32))
  near = [0.0, 2.0**-32, 1e-38, 1 - 2.0**-23, 1 - 2.0**-24, 0.5]
  uniform = np.concatenate([near, rng.random(58)]).astype(np.float32)
  assert (uniform < 1).all()
  got, got_logp = sampler.draw(logp, jnp.broadcast_to(uniform, (3, 64)))
  chosen = np.take_along_axis(np.asarray(logp), np.asarray(got), axis=1)
  assert np.isfinite(chosen).all()
  np.testing.assert_allclose(got_logp, chosen, rtol=1e-5, atol=1e-5)
  for row, tokens in enumerate(np.asarray(got)):
    possible = np.flatnonzero(np.isfinite(logp[row]))
    assert tokens[0] == possible[0]  # uniform 0
  # The total is not 1 in float32, and the last tokens still have their share.
  assert (got[0, 3:5] > 0.99 * size).all()


def test_a_total_away_from_one_leaves_no_token_a_wrong_share():
  # 0.7 of all mass, as if rounding had lost the rest.
  logp = jnp.log(jnp.asarray([0.35, 0.35]))
  grid = jnp.arange(100) / 100
  got, _ = sampler.draw(logp, grid)
  assert int(jnp.sum(got)) == 50


@functools.cache
def with_two_ends():
  return run(n=200, slots=17, stop_ids=(STOP, 4))


def test_every_token_comes_from_its_own_key():
  """fold_in(fold_in(fold_in(key, p), n), i), as the contract says."""
  out = with_two_ends()
  fold = jnp.vectorize(jax.random.fold_in)
  p, n, i = np.ogrid[:3, :200, :12]
  keys = fold(fold(fold(KEY, p), n), i)
  uniform = np.asarray(jnp.vectorize(jax.random.uniform)(keys), np.float64)
  prob = np.stack([truncated(row) for row in TABLE])
  tokens, mask = np.asarray(out.tokens), np.asarray(out.mask)
  last = np.broadcast_to([[ids[-1]] for ids in PROMPTS], (3, 200))
  before = np.concatenate([last[..., None], tokens[..., :-1]], axis=2)
  cdf = np.cumsum(prob, axis=1)[before]
  want = np.sum(cdf <= uniform[..., None], axis=-1)
  # Nearer to a border than float32 resolves, either side is right.
  clear = np.abs(cdf - uniform[..., None]).min(axis=-1) > 1e-6
  assert np.mean(clear) > 0.99
  assert np.all((tokens == want)[mask & clear])


def test_different_steps_differ():
  settings = {"n": 64, "policy": Recall(), "params": RECALL}
  a, b = (run(key=jax.random.fold_in(KEY, t), **settings) for t in (1, 2))
  both = np.asarray(a.mask) & np.asarray(b.mask)
  agree = np.mean((np.asarray(a.tokens) == np.asarray(b.tokens))[both])
  # Two draws of one distribution agree with the sum of its squares.
  assert agree < 0.5
  rows = np.asarray(a.tokens).reshape(-1, 12)
  long = rows[np.asarray(a.mask).reshape(-1, 12).sum(1) > 6]
  assert len(long) > 30 and len(np.unique(long, axis=0)) == len(long)


INVARIANT = {
  "slots 1": {"slots": 1},
  "slots 3": {"slots": 3},
  "slots 7": {"slots": 7},
  "n 8, slots 3": {"n": 8, "slots": 3},
  "1 device": {"mesh": 1},
  "2 devices": {"mesh": 2},
  "4 devices": {"mesh": 4},
  "8 devices": {"mesh": 8},
  "limit 5": {"max_new_tokens": 5},
  "1 lane": {"lanes": 1},
  "1 lane, slots 1": {"lanes": 1, "slots": 1},
  "2 lanes, slots 3": {"lanes": 2, "slots": 3},
  "pages of 4": {"columns": 4},
  "pages of 5, slots 7": {"columns": 5, "slots": 7},
  "pages of 2, slots 40": {"columns": 2, "slots": 40},
  "pages of 4, 1 lane, slots 20": {"columns": 4, "lanes": 1, "slots": 20},
  "pages of 3, 2 devices": {"columns": 3, "mesh": 2, "slots": 9},
  "pages of 3, 1 lane, 2 devices": {"columns": 3, "lanes": 1, "mesh": 2},
}


@functools.cache
def base():
  return run(n=64, policy=Recall(), params=RECALL)


# Their programs take longest to compile.
SLOW = {"pages of 4", "pages of 2, slots 40", "pages of 4, 1 lane, slots 20"}


@pytest.mark.parametrize(
  "change",
  [
    pytest.param(change, id=name, marks=[pytest.mark.slow] * (name in SLOW))
    for name, change in INVARIANT.items()
  ],
)
def test_a_rollout_does_not_depend_on(change, monkeypatch):
  settings = {"n": 64, "policy": Recall(), "params": RECALL} | change
  if columns := settings.pop("columns", None):
    monkeypatch.setattr(sampler, "page_columns", lambda T: columns)
  if "mesh" in change:
    settings["mesh"] = devices(change["mesh"])
  out, want = run(**settings), base()
  T = min(12, settings["max_new_tokens"] if "max_new_tokens" in change else 12)
  at = np.s_[:, : settings["n"], :T]
  np.testing.assert_array_equal(out.tokens[:, :, :T], want.tokens[at])
  np.testing.assert_array_equal(out.mask[:, :, :T], want.mask[at])
  np.testing.assert_allclose(out.logp[:, :, :T], want.logp[at], atol=1e-6)
  longer = np.asarray(want.mask).sum(2)[:, : settings["n"]]
  if settings.get("max_new_tokens", 12) <= 12:
    limit = settings.get("max_new_tokens", 12)
    cut = np.asarray(want.truncated)[:, : settings["n"]] | (longer > limit)
    np.testing.assert_array_equal(out.truncated, cut)


def test_a_rollout_does_not_depend_on_the_other_prompts():
  p = 2
  tokens = jnp.asarray([PROMPTS[p]])
  out = sampler.rollouts(
    Recall(),
    RECALL,
    Prompts(tokens, tokens >= 0, jnp.asarray([p])),
    KEY,
    n=64,
    max_new_tokens=12,
    behaviour=sampler.Behaviour(),
    stop_ids=(STOP,),
    slots=64,
  )
  np.testing.assert_array_equal(out.tokens[0], base().tokens[p])


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


# Each token leads to the one below; 0 ends.
DOWN = jnp.where(
  jnp.arange(V)[:, None] - 1 == jnp.arange(V)[None], 0.0, -jnp.inf
)
DOWN = DOWN.at[0, 0].set(0.0)


@pytest.mark.parametrize(
  "prompts, n, slots, limit, slot_steps, written",
  [
    # Length 3: rollouts 0 and 1 take two steps, then rollout 2 takes two beside
    # an idle slot. Length 2: one step each. Length 1: never in a slot.
    ([3, 1, 2], 3, 2, 9, 3 * 8, 6 + 0 + 3),
    # Two slots end in one step and take a rollout each: 3 rounds, not more.
    ([3, 1, 2], 5, 2, 9, 3 * 12, 10 + 0 + 5),
    ([3, 1, 2], 1, 1, 9, 3 * 2, 2 + 0 + 1),
    ([3, 1, 2], 3, 2, 2, 3 * 4, 3 + 0 + 3),
    ([1, 1, 1], 3, 2, 9, 0, 0),  # every slot idles from the start
  ],
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


@pytest.mark.parametrize("columns", [40, 8])
def test_lanes_go_on_in_the_middle_of_a_page(columns, monkeypatch):
  monkeypatch.setattr(sampler, "page_columns", lambda T: columns)
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


@pytest.mark.parametrize("slots", [64, pytest.param(9, marks=pytest.mark.slow)])
def test_pages_and_slots_are_as_few_as_the_rollouts_need(slots, monkeypatch):
  monkeypatch.setattr(sampler, "page_columns", lambda T: 3)
  told, calls, compacted = [], [], []
  segment, compact = sampler._segment, sampler._resize

  def spy(job, fixed, older, newest, s, turned):
    calls.append((job, len(older), turned))
    return segment(job, fixed, older, newest, s, turned)

  def spy_compact(job, pages, s):
    compacted.append(job)
    return compact(job, pages, s)

  monkeypatch.setattr(sampler, "_segment", spy)
  monkeypatch.setattr(sampler, "_resize", spy_compact)
  index = np.arange(5)
  out = sampler.rollouts(
    Recall(),
    RECALL,
    Prompts(index[:, None] + 1, np.ones((5, 1), bool), index),
    KEY,
    n=64,
    max_new_tokens=24,
    behaviour=sampler.Behaviour(),
    stop_ids=(STOP,),
    slots=slots,
    watch=told.append,
  )
  assert int(np.asarray(out.mask).sum(axis=2).max()) > 12
  *before, last = told
  assert not last.busy + last.waiting
  for progress, (job, older, turned) in zip(before, calls, strict=True):
    if turned:  # pages with columns of the longest rollout; one is overwritten
      assert older == min(-(-(progress.longest - 1) // 3), 7)
    if not progress.waiting:
      for have, busy in (
        (job.lanes, progress.lanes),
        (job.rows, progress.rows),
      ):
        assert busy <= have and (have == 1 or -(-have // 4) < busy)
  jobs = [job for job, _, _ in calls]
  changed = [b for a, b in itertools.pairwise(jobs) if a != b]
  assert compacted == changed and changed
  rows = [job.lanes * job.rows for job in jobs]
  assert rows[0] == 5 * slots and rows[-1] < 5 * slots / 10


def test_prompts_are_read_in_groups_that_fit(monkeypatch):
  monkeypatch.setattr(sampler, "PREFILL_TOKENS", 10)
  assert sampler.read_together(6, 3) == 3
  assert sampler.read_together(7, 3) == 1  # 2 do not divide 7
  assert sampler.read_together(6, 100) == 1
  assert sampler.read_together(2, 1) == 2
  read = []

  class Reader(Recall):
    def prefill(self, params, tokens, mask):
      read.append(tokens.shape)
      return super().prefill(params, tokens, mask)

  prompts = [[1, 2, 3], [2, 2, 2], [3, 1, 5], [5, 4, 1], [1, 1, 1], [4, 5, 3]]
  settings = {"n": 8, "params": RECALL, "prompts": prompts}
  out = run(policy=Reader(), **settings)
  assert set(read) == {(3, 3)}
  same(out, run(policy=Recall(), **settings))


def test_one_token_is_drawn_from_the_prefill_alone():
  """T = 1, and prompts of all lengths end in the last place."""
  seen = []

  class Watched(Table):
    def prefill(self, params, tokens, mask):
      jax.debug.callback(lambda *x: seen.extend(map(np.array, x)), tokens, mask)
      return super().prefill(params, tokens, mask)

    def decode_step(self, *args):  # is never run
      logits, page = super().decode_step(*args)
      return jnp.full_like(logits, jnp.nan), page

  out = run(policy=Watched(), max_new_tokens=1, n=500)
  jax.effects_barrier()
  np.testing.assert_array_equal(seen[0], [[0, 0, 3], [1, 4, 2], [0, 5, 5]])
  np.testing.assert_array_equal(seen[1], [[0, 0, 1], [1, 1, 1], [0, 1, 1]])
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
  return run(prompts_of_policy(), policy=POLICY, **settings | changes)


base_of_policy = functools.cache(run_policy)


def flips(a, b):
  """Tokens that differ, and tokens compared up to the first that does."""
  N, T = b.tokens.shape[1:]
  both = np.asarray(a.mask)[:, :N, :T] | np.asarray(b.mask)
  differ = both & (np.asarray(a.tokens)[:, :N, :T] != np.asarray(b.tokens))
  before = np.cumsum(differ, axis=2) - differ == 0
  return int(np.sum(differ & before)), int(np.sum(both & before))


@pytest.mark.slow
def test_the_same_program_twice_gives_the_same_bits():
  same(run_policy(), base_of_policy())


@pytest.mark.slow
def test_shapes_of_the_program_flip_fewer_than_one_token_in_10000():
  mesh = devices(8, model=2)
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
  "greedy": {"temperature": 0.0},
  "sampled": {},
  "cut": {"temperature": 0.7, "top_k": 15, "top_p": 0.9, "min_p": 0.02},
}


@functools.cache
def simple(name):
  return simple_sampler.sample(
    POLICY,
    policy_params(),
    prompts_of_policy(),
    KEY,
    n=24,
    max_new_tokens=24,
    stop_ids=(STOP,),
    **REFERENCE[name],
  )


@pytest.mark.parametrize(
  "columns, lanes, slots",
  [pytest.param(24, 7, 24, marks=pytest.mark.slow), (8, 2, 10)],
)
@pytest.mark.parametrize("name", REFERENCE)
def test_equals_the_sampler_without_caches(
  name, columns, lanes, slots, monkeypatch
):
  monkeypatch.setattr(sampler, "page_columns", lambda T: columns)
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


def test_log_probabilities_are_those_of_scoring_the_response():
  behaviour = sampler.Behaviour(temperature=0.8, top_p=0.95)
  out = base_of_policy()
  prompts = prompts_of_policy()
  tokens = np.zeros((len(prompts), 7), np.int32)
  for row, ids in zip(tokens, prompts, strict=True):
    row[7 - len(ids) :] = ids
  logits = jax.jit(POLICY.response_logits)(
    policy_params(), jnp.asarray(tokens), jnp.asarray(tokens > 0), out.tokens
  )
  logp = np.take_along_axis(
    np.asarray(behaviour.logp(logits)), np.asarray(out.tokens)[..., None], -1
  )[..., 0]
  with np.errstate(invalid="ignore"):  # -inf where the token is cut
    gap = np.abs(np.where(out.mask, logp - np.asarray(out.logp), 0.0))
  # A token on the edge of top-p is kept by the one and cut by the other.
  prob = np.exp(np.asarray(jax.nn.log_softmax(logits / 0.8), np.float64))
  ordered = -np.sort(-prob, axis=-1)
  before = np.cumsum(ordered, axis=-1) - ordered
  edge = np.abs(before - 0.95).min(axis=-1) < 1e-6
  print(f"logp gap {gap[~edge].max():.2e}, {edge.sum()} on the edge")
  assert 10_000 < np.sum(out.mask) and gap[~edge].max() < 1e-4
  assert edge.mean() < 1e-3


@pytest.mark.parametrize(
  "change, message",
  [
    ({"n": 0}, "n = 0 must be at least 1"),
    ({"max_new_tokens": 0}, "max_new_tokens = 0 must be at least 1"),
    ({"slots": 0}, "slots = 0 must be at least 1 and at most 16"),
    ({"slots": 17}, "slots = 17 must be at least 1 and at most 16"),
    ({"lanes": 0}, "lanes = 0 must be at least 1 and at most 3"),
    ({"lanes": 4}, "lanes = 4 must be at least 1 and at most 3"),
    ({"prompts": []}, "prompts = 0 must be at least 1"),
    ({"prompts": [[1], [], [2]]}, "prompt 1 is empty"),
    (
      {"prompts": [[1], [2, V]]},
      "token 6 of prompt 1 is not in the vocabulary, 0 to 5",
    ),
    (
      {"prompts": [[-1]]},
      "token -1 of prompt 0 is not in the vocabulary, 0 to 5",
    ),
    (
      {"stop_ids": (0, 99)},
      "token 99 of stop_ids is not in the vocabulary, 0 to 5",
    ),
    ({"temperature": -0.1}, "temperature = -0.1 is out of range"),
    ({"temperature": float("nan")}, "temperature = nan is out of range"),
    ({"top_k": -1}, "top_k = -1 is out of range"),
    ({"top_p": 0.0}, "top_p = 0.0 is out of range"),
    ({"top_p": 1.01}, "top_p = 1.01 is out of range"),
    ({"min_p": -0.01}, "min_p = -0.01 is out of range"),
    ({"min_p": 1.5}, "min_p = 1.5 is out of range"),
  ],
  ids=str,
)
def test_refuses_by_name_and_value(change, message):
  with pytest.raises(ValueError) as e:
    run(**change)
  assert str(e.value) == message


# ------------------------------------------------ what the compiler makes of it

WIDE = Policy(
  vocab=320, width=32, layers=2, heads=8, kv_heads=2, head_size=16, mlp=32,
  rope=Rope(1e4), norm_eps=1e-6, tied=True,
)  # fmt: skip


def segment(pages, mesh=None, policy=WIDE):
  """The program of a step with so many pages, 2 lanes of 24 slots."""
  P, N, T, C = 2, 24, 512, 64
  A = P if mesh is None else P // mesh.shape["data"]
  job = sampler.Job(policy, sampler.Behaviour(), (0,), N, T, A, N, C, mesh)
  params = policy.init(jax.random.key(0))
  if mesh is not None:
    params = jax.device_put(params, sharding.param_shardings(params, mesh))
  prompts = Prompts(
    np.zeros((P, 8), np.int32), np.ones((P, 8), bool), np.arange(P)
  )
  start = functools.partial(sampler.start, job)
  units = sampler.Unit(prompts, np.zeros(P, np.int32), np.ones(P, bool))
  fixed, s, _ = start(params, units, KEY)
  step = functools.partial(sampler._segment, job)
  newest, s, _ = step(fixed, (), None, s, False)
  older = (newest,) * (pages - 1)
  return newest, compiled(step, fixed, older, newest, s, False, donated=(2, 3))


def test_a_step_copies_no_page():
  page, program = segment(1)
  used = program.memory_analysis()
  assert used.alias_size_in_bytes >= bytes_of(page)
  # Keys of one layer are the smallest copy there could be; scores are smaller.
  assert used.temp_size_in_bytes < page[0].k.nbytes


def test_a_step_widens_int8_pages_layer_by_layer():
  policy = dataclasses.replace(WIDE, int8_cache=True, layers=8)
  page, program = segment(1, policy=policy)
  used = program.memory_analysis()
  assert used.alias_size_in_bytes >= bytes_of(page)
  one = 4 * (page[0].k.nbytes + page[0].v.nbytes)
  assert used.temp_size_in_bytes < 4 * one  # of 8


def bytes_of(tree):
  return sum(x.nbytes for x in jax.tree.leaves(tree))


def test_heads_and_vocabulary_stay_apart_on_a_mesh():
  mesh = devices(4, model=2)
  policy = dataclasses.replace(WIDE, kv_heads=4)
  page, program = segment(2, mesh, policy)
  keys = page[0].k
  B, G, K, C = keys.shape
  assert keys.sharding.shard_shape(keys.shape) == (B // 2, G // 2, K, C)
  text = program.as_text()
  rows = B // 2
  assert f"f32[{rows},{G // 2},{K},{C}]" in text
  assert f"f32[{rows},{G},{K},{C}]" not in text
  # What devices tell each other: sums over heads, best logits, sums of blocks
  # of probabilities and the block of each row's draw; never logits or keys.
  told = [
    math.prod(map(int, size.split(",")))
    for size in re.findall(
      r"= \w+\[([\d,]+)\][^=]* (?:all-|collective-|reduce-s)\S*\(", text
    )
  ]
  assert told and max(told) < rows * policy.vocab / 2
