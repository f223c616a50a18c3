"""The distribution that is sampled, and tokens drawn from it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from small_decoders import (
  KEY,
  PROMPTS,
  STOP,
  TABLE,
  V,
  fits,
  run,
  truncated,
  with_two_ends,
)

from brorl_jax.rollout import draw
from brorl_jax.rollout.draw import SamplingParams

SAMPLINGS = [{}, {"temperature": 1.3, "top_k": 4, "top_p": 0.8, "min_p": 0.35}]


@pytest.mark.parametrize("sampling", tiers.some(SAMPLINGS, 1), ids=str)
def test_tokens_come_from_the_softmax_and_carry_its_log_probability(sampling):
  n, prompt = 20_000, 2
  out = run(
    [[prompt]], n=n, max_new_tokens=3, slots=n // 2, stop_ids=(), **sampling
  )
  tokens, logp = np.asarray(out.tokens[0]), np.asarray(out.logp[0])
  prob = np.stack([truncated(row, **sampling) for row in TABLE])

  assert fits(np.bincount(tokens[:, 0], minlength=V), prob[prompt]) > 1e-3
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
  "sampling, kept",
  tiers.some([
    # Probabilities 1/2, 1/4, 1/8, 1/8 less a little, and 2^-30.
    ({"top_k": 2}, 2), ({"top_k": 9}, 5), ({"top_p": 0.45}, 1),
    ({"top_p": 0.80}, 3), ({"min_p": 0.4}, 2), ({"min_p": 1.0}, 1),
    # Each works on what the one before left: of 2/3 and 1/3, 0.6 is one.
    ({"top_k": 2, "top_p": 0.6}, 1), ({"top_p": 0.6}, 2),
    # Cold, the second token has (1/2)^4 of the first.
    ({"temperature": 0.25, "min_p": 0.1}, 1),
    ({"temperature": 0.25, "top_p": 0.9}, 1),
    ({"temperature": 4.0, "min_p": 0.6}, 4),
    ({"temperature": 0.0}, 1),
  ], 4),
  ids=str,
)  # fmt: skip
def test_truncation_by_hand(sampling, kept):
  p = np.asarray([1 / 2, 1 / 4, 1 / 8, 1 / 8 - 1e-3, 2.0**-30])
  shuffle = np.asarray([3, 0, 4, 1, 2])
  logits = jnp.asarray(np.log(p)[shuffle], jnp.float32)
  got = np.asarray(SamplingParams(**sampling).logp(logits))
  assert set(np.flatnonzero(np.isfinite(got))) == {
    int(i) for i in np.flatnonzero(shuffle < kept)
  }
  prob = truncated(np.asarray(logits), **sampling)
  np.testing.assert_allclose(np.exp(got), prob, atol=1e-6)
  assert np.exp(got).sum() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.ci
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
  tie = SamplingParams(temperature=0.0).logp(jnp.asarray([1.0, 2.0, 2.0]))
  np.testing.assert_array_equal(np.exp(tie), [0, 1, 0])


@pytest.mark.ci
def test_draw_returns_the_token_whose_share_holds_the_uniform():
  prob = np.asarray([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
  logp = jnp.asarray(np.log(np.where(prob, prob, 1e-99)), jnp.float32)
  logp = jnp.where(prob > 0, logp, -jnp.inf)
  uniform = jnp.asarray([0.0, 0.1, 0.2499, 0.2501, 0.7499, 0.7501, 0.9999])
  got, got_logp = draw.draw(logp + 3.0, uniform)
  np.testing.assert_array_equal(got, [1, 1, 1, 3, 3, 4, 4])
  np.testing.assert_allclose(got_logp, logp[got], rtol=1e-6)


@pytest.mark.ci
def test_no_rounding_draws_a_token_of_probability_zero(seed=0):
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
  got, got_logp = draw.draw(logp, jnp.broadcast_to(uniform, (3, 64)))
  chosen = np.take_along_axis(np.asarray(logp), np.asarray(got), axis=1)
  assert np.isfinite(chosen).all()
  np.testing.assert_allclose(got_logp, chosen, rtol=1e-5, atol=1e-5)
  for row, tokens in enumerate(np.asarray(got)):
    possible = np.flatnonzero(np.isfinite(logp[row]))
    assert tokens[0] == possible[0]  # uniform 0
  # The total is not 1 in float32, and the last tokens still have their share.
  assert (got[0, 3:5] > 0.99 * size).all()


@pytest.mark.ci
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
  assert np.mean(clear) > 0.99 and np.all((tokens == want)[mask & clear])
