"""The sampler in its simplest form: what the fast one is compared with.

No cache, no slots, no pages: in every step the whole of every row is read
again, and the next token is the first whose cumulative probability is above
the rollout's own uniform number.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from brorl_jax.rollout.draw import SamplingParams


@functools.partial(jax.jit, static_argnames=("logits", "sampling", "T"))
def _continue(logits, params, rows, keys, sampling, T):
  """rows [B,S+T], left-padded prompts of S tokens, marked -1 where padded."""
  B, S = rows.shape[0], rows.shape[1] - T

  def step(i, carry):
    rows, logp = carry
    seen = (rows >= 0) & (jnp.arange(S + T)[None] < S + i)
    all_logits = logits(params, jnp.maximum(rows, 0), seen)
    last = jax.lax.dynamic_index_in_dim(all_logits, S + i - 1, 1, False)
    now = sampling.logp(last)
    fold = jax.vmap(jax.random.fold_in, (0, None))
    uniform = jax.vmap(jax.random.uniform)(fold(keys, i))
    cdf = jnp.cumsum(jnp.exp(now), axis=1)
    token = jnp.argmax(cdf > uniform[:, None] * cdf[:, -1:], axis=1)
    of_token = jnp.take_along_axis(now, token[:, None], axis=1)[:, 0]
    rows = rows.at[:, S + i].set(token.astype(jnp.int32))
    return rows, logp.at[:, i].set(of_token)

  return jax.lax.fori_loop(0, T, step, (rows, jnp.zeros((B, T))))


def sample(
  policy, params, prompts, key, *, n, max_new_tokens, stop_ids=(), **sampling
):
  P, T, S = len(prompts), max_new_tokens, max(map(len, prompts))
  rows = np.full((P, n, S + T), -1, np.int32)
  for p, ids in enumerate(prompts):
    rows[p, :, S - len(ids) : S] = ids
  fold = jnp.vectorize(jax.random.fold_in)
  out, logp = _continue(
    policy.logits, params, jnp.asarray(rows.reshape(P * n, -1)),
    fold(fold(key, jnp.arange(P)[:, None]), jnp.arange(n)[None]).ravel(),
    SamplingParams(**sampling), T,
  )  # fmt: skip
  tokens = np.asarray(out)[:, S:].reshape(P, n, T)
  ended = np.isin(tokens, stop_ids)
  mask = np.cumsum(ended, axis=2) - ended == 0
  logp = np.asarray(logp).reshape(P, n, T)
  return np.where(mask, tokens, 0), np.where(mask, logp, 0.0), mask
