"""Decoders for tests of the sampler, in place of a policy.

Two have a few lines: the next token of one depends on the last one alone, so
that every probability is known; that of the other depends on everything it is
shown, so that nothing it is shown can be wrong.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from brorl_jax.many import meshes
from brorl_jax.many.meshes import Axes
from brorl_jax.model import cache
from brorl_jax.model.policy import Policy
from brorl_jax.model.spec import Rope
from brorl_jax.rollout import sampler
from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.rollout.slots import RolloutSpec
from brorl_jax.types import Prompts

V, STOP = 6, 0
KEY = jax.random.key(3)


@dataclasses.dataclass(frozen=True)
class Table:
  """params[v] are the logits after token v."""

  vocab = V
  # Over pages, if it is not said otherwise.
  pool_columns: int = dataclasses.field(default=0, kw_only=True)

  def cast(self, params):
    return params

  def unroll(self, params):
    return params

  def prefill(self, params, tokens, mask):
    assert tokens.shape == mask.shape
    return params[tokens[:, -1]], jnp.zeros(len(tokens), jnp.int32)

  def lane_prompts(self, prefix, window):
    return jnp.append(prefix, 0)[window]

  def page(self, rows, columns):
    return jnp.full((rows, columns), 1000, jnp.int32)  # not to be looked at

  def decode_step(
    self, weights, shared, pages, token, length, which, column, used
  ):
    return weights[token], pages[-1].at[:, column].set(token.ravel())

  def pool(self, blocks, columns):
    return jnp.full((blocks, columns), 1000, jnp.int32)

  def pool_step(
    self, weights, shared, pools, token, length, which, table, goes
  ):
    return weights[token], pools


@dataclasses.dataclass(frozen=True)
class Recall(Table):
  """params[m, v], m from all of the prompt and of the response so far."""

  def prefill(self, params, tokens, mask):
    total = jnp.sum(jnp.where(mask, tokens + 1, 0), axis=1)
    return params[total % len(params), tokens[:, -1]], total

  def decode_step(
    self, weights, shared, pages, token, length, which, column, used
  ):
    page = pages[-1].at[:, column].set(token.ravel())
    total, seen, columns = 0, 0, page.shape[1]
    circle = cache.ages(column, len(pages), columns, used)
    for age, cells in zip(circle, [*pages[:-1], page], strict=True):
      mask = age < length.reshape(-1, 1)
      total += jnp.sum(jnp.where(mask, cells + 1, 0), axis=1)
      seen += jnp.sum(mask, axis=1)
    prompt = jnp.take_along_axis(shared, which, axis=1)
    total = prompt + total.reshape(length.shape) + 5 * length
    wrong = seen.reshape(length.shape) != length
    logits = weights[total % len(weights), token]
    return jnp.where(wrong[..., None], jnp.nan, logits), page

  def pool_step(
    self, weights, shared, pools, token, length, which, table, goes
  ):
    blocks, columns = pools.shape
    last = length.ravel() - 1
    row = jnp.arange(len(table))
    block = jnp.where(goes.ravel(), table[row, last // columns], blocks)
    pools = pools.at[block, last % columns].set(token.ravel(), mode="drop")
    cells = pools[table].reshape(len(table), -1)
    seen = jnp.arange(cells.shape[1])[None] <= last[:, None]
    total = jnp.sum(jnp.where(seen, cells + 1, 0), axis=1)
    prompt = jnp.take_along_axis(shared, which, axis=1)
    total = prompt + total.reshape(length.shape) + 5 * length
    logits = weights[total % len(weights), token]
    return jnp.where(goes[..., None], logits, jnp.nan), pools

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


def devices(count, **axes):
  return meshes.over([jax.devices()[:count]], Axes(**{"fsdp": -1} | axes))


def spec(policy=Recall(), **changes):
  """16 rollouts of at most 12 tokens, all at once, if not said otherwise."""
  how = dict(sampling=SamplingParams(), stop_ids=(STOP,), n=16)
  how |= dict(max_new_tokens=12) | changes
  return RolloutSpec(policy=policy, **{"slots": how["n"]} | how)


def numbered(count):
  tokens = np.arange(count, dtype=np.int32)[:, None] % 6
  return Prompts(tokens, tokens >= 0, np.arange(count, dtype=np.int32))


class Feed:
  def __init__(self, prompts, most=3):
    self.prompts, self.most, self.given, self.asked = prompts, most, 0, []

  def __call__(self, room, idle):
    self.asked.append((room, idle))
    left = len(self.prompts.index) - self.given
    if not left:
      return None
    some = slice(self.given, self.given + min(room, left, self.most))
    self.given = some.stop
    return jax.tree.map(lambda x: x[some], self.prompts)


def by_prompt(stream):
  out = {}
  for prompts, rollouts in stream:
    for i, p in enumerate(prompts.index.tolist()):
      assert p not in out
      out[p] = jax.tree.map(lambda x, i=i: x[i : i + 1], rollouts)
  return out


def run(prompts=PROMPTS, key=KEY, policy=Table(), params=TABLE, **changes):
  settings = {"n": 16, "max_new_tokens": 12, "stop_ids": (STOP,)}
  out = sampler.sample(policy, params, prompts, key, **settings | changes)
  return jax.device_get(out)


def same(a, b):
  for field in dataclasses.fields(a):
    x, y = getattr(a, field.name), getattr(b, field.name)
    np.testing.assert_array_equal(x, y, err_msg=field.name)


def fits(counts, prob):
  """The p-value of counts under the distribution; 0 if one cannot happen."""
  possible = prob > 0
  if counts[~possible].any():
    return 0.0
  want = prob[possible] / prob[possible].sum() * counts.sum()
  order = np.argsort(want)
  # Those with less than 5 expected are one bin, which has at least 5.
  bins = np.searchsorted(np.cumsum(want[order]), 5.0) + 1
  bins = max(bins, np.sum(want < 5.0))
  merge = lambda x: np.append(x[order][bins:], x[order][:bins].sum())
  got, want = merge(counts[possible]), merge(want)
  return 1.0 if len(want) == 1 else scipy.stats.chisquare(got, want).pvalue


def truncated(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
  """The sampling distribution, one token at a time. No ties, please."""
  logits = [float(x) for x in logits]
  order = sorted(range(len(logits)), key=lambda v: -logits[v])
  if temperature == 0.0:
    return np.eye(len(logits))[order[0]]
  top = logits[order[0]]
  weight = {v: np.exp((logits[v] - top) / temperature) for v in order}
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


@functools.cache
def with_two_ends():
  return run(n=200, slots=17, stop_ids=(STOP, 4))


# Each token leads to the one below; 0 ends.
DOWN = jnp.log(jnp.eye(V, k=-1))
DOWN = DOWN.at[0, 0].set(0.0)
