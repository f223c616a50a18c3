"""Small policies of every architecture, for tests of the model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from brorl_jax.model import layers
from brorl_jax.model.policy import Policy
from brorl_jax.model.spec import Rope

# Sizes that are all different, so that no two axes can be swapped unnoticed; an
# epsilon and a base that matter at this size.
TINY = Policy(
  vocab=37, width=16, layers=2, heads=6, kv_heads=2, head_size=4, mlp=20,
  rope=Rope(100.0), norm_eps=1e-2, tied=False, qkv_bias=True,
)  # fmt: skip


def changed(**fields):
  return dataclasses.replace(TINY, **fields)


# As Gemma 2: layers that slide and layers that do not, everything capped and
# scaled. The window is smaller than prompts and responses are.
GEMMA2 = changed(
  layers=3, tied=True, qkv_bias=False, window=3, sliding=(True, False, True),
  attention_softcap=1.5, final_softcap=2.5, norm_offset=1.0, post_norms=True,
  embed_scale=4.0, activation="gelu_tanh", query_scale=0.7,
)  # fmt: skip


# As Gemma 3: a long rope for full layers, a short one for those that slide.
GEMMA3 = changed(layers=3, tied=True,
  qkv_bias=False, window=2, sliding=(True, True, False), sliding_rope=Rope(7.0),
  rope=Rope(100.0, "linear", 4.0, scale=1.2), qk_norm=True, norm_offset=1.0,
  post_norms=True, embed_scale=4.0, activation="gelu_tanh")  # fmt: skip


# As Qwen 3 with routed experts.
EXPERTS = changed(qkv_bias=False, qk_norm=True,
  experts=5, experts_per_token=2, normalize_experts=True)  # fmt: skip


def shaken(policy, seed=0, by=0.3):
  """Parameters in which no bias is 0 and no scale is 1."""
  params = policy.init(jax.random.key(seed))
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda a: a + jnp.asarray(by * rng.normal(size=a.shape), a.dtype), params
  )


def padded(rows, width, side):
  tokens = np.zeros((len(rows), width), np.int32)
  mask = np.zeros((len(rows), width), bool)
  for tokens_row, mask_row, ids in zip(tokens, mask, rows, strict=True):
    at = slice(width - len(ids), None) if side == "left" else slice(len(ids))
    tokens_row[at], mask_row[at] = ids, True
  return jnp.asarray(tokens), jnp.asarray(mask)


def some_ids(*lengths, seed=0):
  rng = np.random.default_rng(seed)
  return [rng.integers(0, TINY.vocab, length) for length in lengths]


def response_logits(policy, params, prompt, mask, response):
  """Logits from which `response_logp` takes its tokens."""
  hidden = policy._response(params, prompt, mask, response)
  return layers.head(policy, params, hidden)
