"""A decoder-only transformer as pure functions of a plain dict of arrays.

`Policy` is a static description; its methods take `params` and change nothing.
Flax NNX is used as a vocabulary of layers: a module is merged from the dict
inside the traced function and never leaves it.

One attention serves every use. A query attends to a *prefix* that all rows of
its prompt share and to keys of its *own* row, merged in one softmax:

  prefill          no prefix, the prompt's own tokens, causal
  decode_step      prefix = prompt, own = cache of the row's response so far
  response_logits  prefix = prompt, own = the response's tokens, causal
  logits           no prefix, own tokens, causal
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

# Not -inf: a query without any visible key (padding) must stay finite.
_MASKED = -1e30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
  """Keys and values of the prompts, stored once however many rows read them."""

  k: Float[Array, "L P G S K"]
  v: Float[Array, "L P G S K"]
  mask: Bool[Array, "P S"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Suffix:
  """Keys and values of the rows' own tokens."""

  k: Float[Array, "L P R G T K"]
  v: Float[Array, "L P R G T K"]


@dataclasses.dataclass(frozen=True)
class Policy:
  """Shapes and constants of a decoder; hashable, so jit may close over it."""

  vocab: int  # V, rows of the embedding
  width: int  # D
  layers: int  # L
  heads: int  # H
  kv_heads: int  # G, divides H
  head_size: int  # K, even
  mlp: int  # F
  rope_theta: float
  norm_eps: float
  tied: bool  # the head is the embedding, transposed
  qkv_bias: bool
  dtype: str = "float32"  # of activations and caches; logits are float32

  def init(self, key: Key[Array, ""]) -> PyTree:
    """Random float32 parameters, N(0, 0.02^2), norms 1 and biases 0."""
    k_embed, k_blocks, k_head = jax.random.split(key, 3)
    module = lambda make: (
      lambda k: nnx.to_pure_dict(nnx.state(make(self, rngs=nnx.Rngs(params=k))))
    )
    params = module(_Outside)(k_embed)
    keys = jax.random.split(k_blocks, self.layers)
    params["blocks"] = jax.vmap(module(_Block))(keys)
    if not self.tied:
      shape = (self.width, self.vocab)
      params["head"] = {"kernel": 0.02 * jax.random.normal(k_head, shape)}
    return params

  def logits(
    self, params: PyTree, tokens: Int[Array, "B T"], mask: Bool[Array, "B T"]
  ) -> Float[Array, "B T V"]:
    """Next-token logits at every position.

    Args:
      params: Nested dict of arrays.
      tokens: Token ids, padded on the left or on the right.
      mask: True on real tokens. Logits elsewhere mean nothing.
    """
    hidden, _, _ = self._own(params, tokens[:, None], mask[:, None])
    return self._head(params, hidden[:, 0])

  def prefill(
    self, params: PyTree, tokens: Int[Array, "P S"], mask: Bool[Array, "P S"]
  ) -> tuple[Float[Array, "P V"], Prefix]:
    """Reads the prompts once: logits of the first response token, and cache.

    Args:
      params: Nested dict of arrays.
      tokens: Left-padded, so that the last position is a real token.
      mask: True on real tokens.
    """
    hidden, k, v = self._own(params, tokens[:, None], mask[:, None])
    prefix = Prefix(k=k[:, :, 0], v=v[:, :, 0], mask=mask)
    return self._head(params, hidden[:, 0, -1]), prefix

  def suffix(self, prompts: int, rows: int, columns: int) -> Suffix:
    """An empty cache for `rows` responses to each of `prompts` prompts."""
    shape = (
      self.layers, prompts, rows, self.kv_heads, columns, self.head_size,
    )  # fmt: skip
    zeros = jnp.zeros(shape, self.dtype)
    return Suffix(k=zeros, v=zeros)

  def decode_step(
    self,
    params: PyTree,
    prefix: Prefix,
    suffix: Suffix,
    token: Int[Array, "P R"],
    length: Int[Array, "P R"],
    column: Int[Array, ""],
    mask: Bool[Array, "P R T"],
  ) -> tuple[Float[Array, "P R V"], Suffix]:
    """Next-token logits of every row, given one more token of each.

    Args:
      params: Nested dict of arrays.
      prefix: From `prefill`.
      suffix: The rows' cache so far.
      token: The last token of each row, not yet in the cache.
      length: Response tokens of each row, `token` included; its position is
        the prompt's length + `length` - 1.
      column: Where all rows write this token. Attention does not look at the
        order of columns, so rows of different length may share one.
      mask: Columns that belong to the row's present response, `column` too.

    Returns:
      Logits and the cache with `token` in it.
    """
    prompt_length = jnp.sum(prefix.mask, axis=1, dtype=jnp.int32)
    position = (prompt_length[:, None] + length - 1)[..., None]
    block = _block_graph(self)

    def layer(carry, xs):
      x, all_k, all_v = carry
      index, weights, prefix_k, prefix_v = xs
      one = nnx.merge(block, weights)
      q, k, v = one.project(x, position)
      # In place: only the new column moves.
      at = (index, 0, 0, 0, column, 0)
      all_k = jax.lax.dynamic_update_slice(all_k, k[None], at)
      all_v = jax.lax.dynamic_update_slice(all_v, v[None], at)
      own = (all_k[index], all_v[index], mask[:, :, None, :])
      shared = (prefix_k, prefix_v, prefix.mask)
      x = one.close(x, attend(q, shared, own))
      return (x, all_k, all_v), None

    x = self._embed(params, token[..., None])
    xs = (jnp.arange(self.layers), params["blocks"], prefix.k, prefix.v)
    (x, k, v), _ = jax.lax.scan(layer, (x, suffix.k, suffix.v), xs)
    return self._head(params, self._norm(params, x)[:, :, 0]), Suffix(k=k, v=v)

  def response_logits(
    self,
    params: PyTree,
    prompt: Int[Array, "P S"],
    prompt_mask: Bool[Array, "P S"],
    response: Int[Array, "P R T"],
  ) -> Float[Array, "P R T V"]:
    """Logits of each response token given what came before it.

    The prompt is read once for its R responses; gradients flow into it.
    Equals `logits` of prompt and response joined, shifted by one.
    """
    first, prefix = self.prefill(params, prompt, prompt_mask)
    P, R, T = response.shape
    first = jnp.broadcast_to(first[:, None, None], (P, R, 1, self.vocab))
    if T == 1:
      return first
    # Right padding: a real token never sees a padded one behind it.
    inputs = response[:, :, :-1]
    everything = jnp.ones(inputs.shape, bool)
    hidden, _, _ = self._own(params, inputs, everything, prefix)
    return jnp.concatenate([first, self._head(params, hidden)], axis=2)

  def _own(
    self,
    params: PyTree,
    tokens: Int[Array, "P R Q"],
    mask: Bool[Array, "P R Q"],
    prefix: Prefix | None = None,
  ) -> tuple[Float[Array, "P R Q D"], Array, Array]:
    """Hidden states of rows that attend to themselves, and to a prefix."""
    position = jnp.maximum(jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1, 0)
    Q = tokens.shape[-1]
    visible = jnp.tril(jnp.ones((Q, Q), bool))[None, None] & mask[:, :, None]
    if prefix is not None:
      before = jnp.sum(prefix.mask, axis=1, dtype=jnp.int32)
      position = position + before[:, None, None]
    block = _block_graph(self)

    def layer(x, xs):
      weights, shared = xs
      one = nnx.merge(block, weights)
      q, k, v = one.project(x, position)
      if prefix is not None:
        shared = (*shared, prefix.mask)
      x = one.close(x, attend(q, shared, (k, v, visible)))
      return x, (k, v)

    shared = None if prefix is None else (prefix.k, prefix.v)
    x = self._embed(params, tokens)
    # Recomputed in the backward pass: what the scan would keep of a layer is a
    # dozen times the size of its input, and slower to store than to recompute.
    layer = jax.checkpoint(layer, prevent_cse=False)
    x, (k, v) = jax.lax.scan(layer, x, (params["blocks"], shared))
    return self._norm(params, x), k, v

  def _embed(self, params, tokens):
    return params["embed"]["embedding"][tokens].astype(self.dtype)

  def _norm(self, params, x):
    outside = {name: params[name] for name in ("embed", "ln_final")}
    return nnx.merge(_outside_graph(self), outside).ln_final(x)

  def _head(
    self, params: PyTree, x: Float[Array, "*axes D"]
  ) -> Float[Array, "*axes V"]:
    if self.tied:
      kernel = params["embed"]["embedding"].T
    else:
      kernel = params["head"]["kernel"]
    flat = jnp.matmul(
      x.reshape(-1, self.width),
      kernel.astype(x.dtype),
      preferred_element_type=jnp.float32,
    )
    return flat.reshape(*x.shape[:-1], self.vocab)


def attend(
  q: Float[Array, "P R Q H K"],
  shared: tuple[Array, Array, Array] | None,
  own: tuple[Array, Array, Array],
) -> Float[Array, "P R Q H K"]:
  """Grouped-query attention over a shared prefix and own keys, one softmax.

    out = softmax([q k_shared', q k_own'] / sqrt(K)) [v_shared; v_own]

  The scores of the prefix are one matrix product per prompt and key/value
  head, [R Q H/G, K] x [K, S], not R small ones.

  Args:
    q: Queries, rotated.
    shared: Keys and values [P,G,S,K] and mask [P,S], or None.
    own: Keys and values [P,R,G,T,K] and mask [P,R,Q,T].
  """
  P, R, Q, H, K = q.shape
  k_own, v_own, visible = own
  G = k_own.shape[2]
  q = q.reshape(P, R, Q, G, H // G, K) * K**-0.5

  score = jnp.einsum(
    "prqgjk,prgtk->prgqjt", q, k_own, preferred_element_type=jnp.float32
  )
  score = jnp.where(visible[:, :, None, :, None], score, _MASKED)
  if shared is None:
    weight = jax.nn.softmax(score, axis=-1).astype(q.dtype)
    out = jnp.einsum("prgqjt,prgtk->prqgjk", weight, v_own)
    return out.reshape(P, R, Q, H, K)

  k_shared, v_shared, mask = shared
  score_shared = jnp.einsum(
    "prqgjk,pgsk->prgqjs", q, k_shared, preferred_element_type=jnp.float32
  )
  mask = mask[:, None, None, None, None]
  score_shared = jnp.where(mask, score_shared, _MASKED)
  score = jnp.concatenate([score_shared, score], axis=-1)
  weight = jax.nn.softmax(score, axis=-1).astype(q.dtype)
  S = k_shared.shape[2]
  out = jnp.einsum("prgqjs,pgsk->prqgjk", weight[..., :S], v_shared)
  out += jnp.einsum("prgqjt,prgtk->prqgjk", weight[..., S:], v_own)
  return out.reshape(P, R, Q, H, K)


def rotate(
  x: Float[Array, "P R Q h K"], position: Int[Array, "P R Q"], theta: float
) -> Float[Array, "P R Q h K"]:
  """Rotary embedding: pairs (i, i + K/2) turn by position / theta^(2i/K).

  References:
    Su et al. 2021, arXiv:2104.09864, eq. 34, in the half-split layout of
    Hugging Face checkpoints.
  """
  half = x.shape[-1] // 2
  frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle = jnp.multiply.outer(position.astype(jnp.float32), frequency)
  angle = angle[..., None, :]  # the same for every head
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return turned.astype(x.dtype)


class _Outside(nnx.Module):
  """What stands before and after the blocks."""

  def __init__(self, c: Policy, *, rngs: nnx.Rngs):
    init = nnx.initializers.normal(0.02)
    self.embed = nnx.Embed(c.vocab, c.width, embedding_init=init, rngs=rngs)
    self.ln_final = _norm(c, rngs)


class _Block(nnx.Module):
  """Attention and SwiGLU feed-forward, each behind an RMSNorm."""

  def __init__(self, c: Policy, *, rngs: nnx.Rngs):
    D, H, G, K, F = c.width, c.heads, c.kv_heads, c.head_size, c.mlp
    self.theta = c.rope_theta
    self.ln_attn = _norm(c, rngs)
    self.ln_mlp = _norm(c, rngs)
    bias = lambda *shape: shape if c.qkv_bias else None
    self.q = _einsum(c, "nd,dhk->nhk", (D, H, K), bias(H, K), rngs)
    self.k = _einsum(c, "nd,dgk->ngk", (D, G, K), bias(G, K), rngs)
    self.v = _einsum(c, "nd,dgk->ngk", (D, G, K), bias(G, K), rngs)
    self.o = _einsum(c, "nhk,hkd->nd", (H, K, D), None, rngs)
    self.gate = _einsum(c, "nd,df->nf", (D, F), None, rngs)
    self.up = _einsum(c, "nd,df->nf", (D, F), None, rngs)
    self.down = _einsum(c, "nf,fd->nd", (F, D), None, rngs)

  def project(
    self, x: Float[Array, "P R Q D"], position: Int[Array, "P R Q"]
  ) -> tuple[Array, Array, Array]:
    """Rotated queries [P,R,Q,H,K], rotated keys and values [P,R,G,Q,K]."""
    h = _rows(self.ln_attn(x))
    apart = lambda y: y.reshape(*x.shape[:3], *y.shape[1:])
    q = rotate(apart(self.q(h)), position, self.theta)
    k = rotate(apart(self.k(h)), position, self.theta)
    return q, jnp.swapaxes(k, 2, 3), jnp.swapaxes(apart(self.v(h)), 2, 3)

  def close(
    self, x: Float[Array, "P R Q D"], attended: Float[Array, "P R Q H K"]
  ) -> Float[Array, "P R Q D"]:
    """Adds what was attended to, then the feed-forward."""
    y = _rows(x) + self.o(attended.reshape(-1, *attended.shape[3:]))
    h = self.ln_mlp(y)
    y += self.down(jax.nn.silu(self.gate(h)) * self.up(h))
    return y.reshape(x.shape)


def _rows(x: Float[Array, "P R Q D"]) -> Float[Array, "n D"]:
  # Matrices, not tensors: XLA's CPU gradient of a weight contracted over
  # several axes takes three times as long.
  return x.reshape(-1, x.shape[-1])


def _norm(c: Policy, rngs: nnx.Rngs) -> nnx.RMSNorm:
  return nnx.RMSNorm(c.width, epsilon=c.norm_eps, dtype=c.dtype, rngs=rngs)


def _einsum(c: Policy, spec: str, kernel, bias, rngs: nnx.Rngs) -> nnx.Einsum:
  init = nnx.initializers.normal(0.02)
  return nnx.Einsum(
    spec, kernel, bias, dtype=c.dtype, kernel_init=init, rngs=rngs
  )


@functools.cache
def _block_graph(c: Policy) -> nnx.GraphDef:
  return nnx.split(nnx.eval_shape(lambda: _Block(c, rngs=nnx.Rngs(0))))[0]


@functools.cache
def _outside_graph(c: Policy) -> nnx.GraphDef:
  return nnx.split(nnx.eval_shape(lambda: _Outside(c, rngs=nnx.Rngs(0))))[0]
