"""A decoder-only transformer as pure functions of a plain dict of arrays.

`Policy` is a static description; its methods take `params` and change nothing.
Flax NNX is used as a vocabulary of layers: a module is merged from the dict
inside the traced function and never leaves it.

One attention serves every use. A query attends to a *prefix* that all rows of
its prompt share and to keys of its *own* row, merged in one softmax:

  prefill          no prefix, the prompt's own tokens, causal
  decode_step      prefix = prompt, own = pages of the row's response so far
  response_logits  prefix = prompt, own = the response's tokens, causal
  logits           no prefix, own tokens, causal
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from brorl_jax import attention, cache, experts, products, sharding
from brorl_jax.rl import vocabulary


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
  """Keys and values of the prompts, stored once however many rows read them."""

  k: Float[Array, "P L G S K"]
  v: Float[Array, "P L G S K"]
  mask: Bool[Array, "P S"]


class Lanes(NamedTuple):
  """The prompts of A lanes, W of them side by side in each."""

  k: list[Float[Array, "A G W*S K"]]  # of each layer
  v: list[Float[Array, "A G W*S K"]]
  mask: Bool[Array, "A W S"]


# Prompt tokens that are read at a time. The scores of a chunk, [chunk, S] per
# head, are the largest array of a long prefill; matrix products gain nothing
# from more rows.
PREFILL_CHUNK = 1024


@dataclasses.dataclass(frozen=True)
class Policy:
  """Shapes and constants of a decoder; hashable, so jit may close over it."""

  vocab: int  # V, rows of the embedding
  width: int  # D
  layers: int  # L
  heads: int  # H
  kv_heads: int  # G, divides H
  head_size: int  # K, even
  mlp: int  # F, of an expert if there are experts
  rope: attention.Rope
  norm_eps: float
  tied: bool  # the head is the embedding, transposed
  dtype: str = "float32"  # of activations and caches; logits are float32
  max_positions: int = 32768  # of prompt and response together
  int8_cache: bool = False  # keys and values of responses, when sampling
  decode_kernel: bool = False  # attention of sampling as a GPU kernel
  # What the backward pass computes again: "layer" all but its input, "products"
  # all but its matrix products, or "nothing".
  remat: str = "layer"
  # Of parameters that are spread over its axis "data" and gathered for each
  # product; None if they are whole there.
  mesh: Mesh | None = None
  # The config.json it was read from, for writing it back.
  origin: str = dataclasses.field(default="", compare=False, repr=False)

  # Attention.
  qkv_bias: bool = False
  output_bias: bool = False
  qk_norm: bool = False  # RMSNorm of every head's query and key
  query_scale: float | None = None  # of the scores; K^-1/2 if None
  attention_softcap: float = 0.0  # of the scores; 0: none
  window: int = 0  # positions that a sliding layer sees, its own included
  sliding: tuple[bool, ...] = ()  # per layer; empty if none slides
  sliding_rope: attention.Rope | None = None  # of sliding layers, if another

  # Feed-forward.
  mlp_bias: bool = False
  activation: str = "silu"  # or "gelu_tanh"
  experts: int = 0  # E; 0: one feed-forward for all tokens
  experts_per_token: int = 0
  normalize_experts: bool = False  # shares of the chosen ones add up to 1

  # Around them.
  embed_scale: float = 1.0
  norm_offset: float = 0.0  # added to the scale of every norm
  post_norms: bool = False  # norms behind attention and feed-forward too
  final_softcap: float = 0.0  # of the logits; 0: none

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

    Long prompts are read in chunks, each attending to those before it, so that
    no array has S x S scores. No other position gets logits.

    Args:
      params: Nested dict of arrays.
      tokens: Left-padded, so that the last position is a real token.
      mask: True on real tokens.
    """
    last, prefix = self._read(params, tokens, mask)
    return self._head(params, last), prefix

  def _read(self, params, tokens, mask) -> tuple[Float[Array, "P D"], Prefix]:
    """`prefill`, but what the head reads instead of logits."""
    P, S = tokens.shape
    if S <= PREFILL_CHUNK:
      hidden, k, v = self._own(params, tokens[:, None], mask[:, None])
      return hidden[:, 0, -1], Prefix(k, v, mask)

    spare = -S % PREFILL_CHUNK  # in front, where prompts are padded anyway
    front = ((0, 0), (spare, 0))
    tokens, padded = jnp.pad(tokens, front), jnp.pad(mask, front)
    shape = (P, self.layers, self.kv_heads, S + spare, self.head_size)
    empty = jnp.zeros(shape, self.dtype)
    start = Prefix(empty, empty, jnp.zeros_like(padded))

    def read(i, carry):
      prefix, _ = carry
      at = i * PREFILL_CHUNK
      chunk = lambda x: jax.lax.dynamic_slice_in_dim(
        x, at, PREFILL_CHUNK, axis=1
      )
      put = functools.partial(
        jax.lax.dynamic_update_slice_in_dim, start_index=at
      )
      hidden, k, v = self._own(
        params, chunk(tokens)[:, None], chunk(padded)[:, None], prefix
      )
      prefix = Prefix(
        put(prefix.k, k, axis=3),
        put(prefix.v, v, axis=3),
        put(prefix.mask, chunk(padded), axis=1),
      )
      return prefix, hidden[:, 0, -1]

    hidden = jnp.zeros((P, self.width), self.dtype)
    chunks = (S + spare) // PREFILL_CHUNK
    prefix, last = jax.lax.fori_loop(0, chunks, read, (start, hidden))
    k, v = (x[:, :, :, spare:] for x in (prefix.k, prefix.v))
    return last, Prefix(k, v, mask)

  def cast(self, params: PyTree) -> PyTree:
    """The parameters in `dtype`, but for norms: they are computed in float32.

    Changes no result: products convert their weights anyway.
    """
    return jax.tree_util.tree_map_with_path(
      lambda path, x: x if path[-1].key == "scale" else x.astype(self.dtype),
      params,
    )

  def unroll(self, params: PyTree) -> PyTree:
    """The parameters as `decode_step` reads them: every layer apart.

    Made once per rollout, so that no step slices a weight.
    """
    layer = lambda i: jax.tree.map(lambda x: x[i], params["blocks"])
    return params | {"blocks": [layer(i) for i in range(self.layers)]}

  @property
  def cache_dtype(self) -> str:
    """What keys and values of responses lie in.

    On a CPU bfloat16 values lie in float32: XLA would convert a whole page
    forth and back to write one column of it, for a third of the speed.
    """
    return "float32" if jax.default_backend() == "cpu" else self.dtype

  def lanes(self, prefix: Prefix, window: Int[Array, "A W"]) -> Lanes:
    """What the rows of each lane read of the prompts: W prompts side by side.

    Args:
      prefix: From `prefill`.
      window: Prompts of each lane, 0 to P; P is none.
    """
    real = window < prefix.mask.shape[0]
    at = jnp.where(real, window, 0)
    K = self.head_size

    def layers(x: Float[Array, "P L G S K"]) -> list[Array]:
      x = jnp.moveaxis(x[at], 2, 0)  # L A W G S K
      x = jnp.swapaxes(x, 2, 3).reshape(*x.shape[:2], *x.shape[3:4], -1, K)
      return [x[i] for i in range(self.layers)]

    mask = prefix.mask[at] & real[..., None]
    return Lanes(layers(prefix.k), layers(prefix.v), mask)

  def page(self, rows: int, columns: int) -> list[cache.Page]:
    """Empty columns of the cache of so many rows, for each layer."""
    shape = (rows, self.kv_heads)
    kind = jnp.int8 if self.int8_cache else self.cache_dtype
    scale = jnp.zeros((*shape, columns)) if self.int8_cache else None
    k = jnp.zeros((*shape, self.head_size, columns), kind)
    v = jnp.zeros((*shape, columns, self.head_size), kind)
    return [cache.Page(k, v, scale, scale)] * self.layers

  def decode_step(
    self,
    weights: PyTree,
    shared: Lanes,
    pages: Sequence[list[cache.Page]],
    token: Int[Array, "A R"],
    length: Int[Array, "A R"],
    which: Int[Array, "A R"],
    column: Int[Array, ""],
  ) -> tuple[Float[Array, "A R V"], list[cache.Page]]:
    """Next-token logits of every row, given one more token of each.

    Args:
      weights: From `unroll`.
      shared: From `lanes`.
      pages: The rows' caches, oldest first; see `cache.ages`.
      token: The last token of each row, not yet in the cache.
      length: Response tokens of each row, `token` included; its position is
        the prompt's length + `length` - 1.
      which: Place of each row's prompt in its lane, 0 to W - 1.
      column: Of the last page, where all rows write this token. Attention does
        not look at the order of columns, so rows of different length share one.

    Returns:
      Logits and the last page with `token` in it.
    """
    views = self._decode_views(shared, length, which)
    *older, newest = pages
    written = []
    flat = lambda x: x.reshape(-1, *x.shape[2:])[:, :, 0]  # A R G 1 K -> B G K
    x = self._embed(weights, token)[:, :, None]
    for i, layer in enumerate(weights["blocks"]):
      one = nnx.merge(_block_graph(self), layer)
      view = views[bool(self.sliding) and self.sliding[i]]
      q, k, v = one.project(x, view)
      written.append(newest[i].write(flat(k), flat(v), column))
      out = cache.decode(
        q[:, :, 0],
        cache.Shared(shared.k[i], shared.v[i], view.shared),
        [*(page[i] for page in older), written[i]],
        column=column,
        limit=view.own,
        scale=self._scale,
        softcap=self.attention_softcap,
        kernel=self.decode_kernel,
      )
      x = one.close(x, out[:, :, None])
    return self._head(weights, self._norm(weights, x)[:, :, 0]), written

  def _decode_views(self, shared, length, which) -> "list[_View]":
    """Angles and limits of rows in full layers and, if any, sliding ones."""
    before = jnp.sum(shared.mask, axis=2, dtype=jnp.int32)  # A W
    position = jnp.take_along_axis(before, which, axis=1) + length - 1
    A, W, S = shared.mask.shape
    mine = which[..., None] == jnp.arange(W)[None, None]  # A R W
    if W == 1:
      mine = jnp.ones((A, 1, 1), bool)
    mask = mine[..., None] & shared.mask[:, None]
    flat = lambda x: x.reshape(A, -1, W * S)
    cos, sin = self.rope.turn(position[..., None], self.head_size)
    views = [_View(cos, sin, length, flat(mask))]
    if any(self.sliding):
      place = jnp.cumsum(shared.mask, axis=2, dtype=jnp.int32) - 1  # A W S
      near = position[..., None, None] - place[:, None] < self.window  # A R W S
      limit = jnp.minimum(length, self.window)
      rope = self.sliding_rope or self.rope
      cos, sin = rope.turn(position[..., None], self.head_size)
      views.append(_View(cos, sin, limit, flat(mask & near)))
    return views

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
    hidden = self._response(params, prompt, prompt_mask, response)
    return self._head(params, hidden)

  def response_logp(
    self,
    params: PyTree,
    prompt: Int[Array, "P S"],
    prompt_mask: Bool[Array, "P S"],
    response: Int[Array, "P R T"],
    temperature: float = 1.0,
  ) -> tuple[Float[Array, "P R T"], Float[Array, "P R T"]]:
    """Log-probability of each response token, and entropy, in nats.

    Those of `response_logits` / temperature, of a few tokens at a time, so that
    no array has all of their logits. With a mesh the work is spread over its
    axis "data": prompts if there are enough of them, and otherwise their rows.
    """
    cut, join = self._apart(*response.shape[:2])
    prompt, prompt_mask, response = map(cut, (prompt, prompt_mask, response))
    hidden = self._response(params, prompt, prompt_mask, response)
    P, R, T, D = hidden.shape
    rows, block = vocabulary.tile_shape(R * T, self.vocab, P)
    logp, entropy = vocabulary.token_logp(
      lambda x, head: self._logits(x, head) / temperature,
      self._unembedding(params),
      hidden.reshape(P, R * T, D),
      response.reshape(P, R * T),
      rows=rows,
      block=block,
    )
    return join(logp.reshape(P, R, T)), join(entropy.reshape(P, R, T))

  def _apart(
    self, P: int, R: int
  ) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    """Prompts [P,S] or their rows [P,R,T] to blocks that spread, and back."""
    data = 1 if self.mesh is None else self.mesh.shape["data"]
    if self.mesh is None or data == 1:
      return (lambda x: x), (lambda x: x)
    each, rows, blocks = sharding.blocks(P, R, data)
    spread = NamedSharding(self.mesh, PartitionSpec("data"))

    def cut(x: Array) -> Array:
      if x.ndim == 2:  # every block reads its prompt
        x = jnp.repeat(x, each, axis=0)
      else:
        x = jnp.pad(x, ((0, 0), (0, each * rows - R), (0, 0)))
        x = x.reshape(P * each, rows, -1)
      spare = ((0, blocks - P * each),) + ((0, 0),) * (x.ndim - 1)
      x = jnp.pad(x, spare, mode="edge")  # a prompt has a last token
      return jax.lax.with_sharding_constraint(x, spread)

    def join(x: Array) -> Array:
      return x[: P * each].reshape(P, each * rows, -1)[:, :R]

    return cut, join

  def _response(
    self, params, prompt, prompt_mask, response
  ) -> Float[Array, "P R T D"]:
    """What the head reads to give each response token."""
    last, prefix = self._read(params, prompt, prompt_mask)
    P, R, T = response.shape
    first = jnp.broadcast_to(last[:, None, None], (P, R, 1, self.width))
    if T == 1:
      return first
    # Right padding: a real token never sees a padded one behind it.
    inputs = response[:, :, :-1]
    everything = jnp.ones((P, 1, T - 1), bool)
    hidden, _, _ = self._own(params, inputs, everything, prefix)
    return jnp.concatenate([first, hidden], axis=2)

  def _own(
    self,
    params: PyTree,
    tokens: Int[Array, "P R Q"],
    mask: Bool[Array, "P #R Q"],
    prefix: Prefix | None = None,
  ) -> tuple[Float[Array, "P R Q D"], Array, Array]:
    """Hidden states of rows that attend to themselves, and to a prefix.

    Also keys and values [P,L,G,Q,K] of each prompt's first row.
    """
    position = jnp.maximum(jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1, 0)
    Q = tokens.shape[-1]
    visible = jnp.tril(jnp.ones((Q, Q), bool))[None, None] & mask[:, :, None]
    if prefix is not None:
      before = jnp.sum(prefix.mask, axis=1, dtype=jnp.int32)
      position = position + before[:, None, None]
    views = self._views(position, visible, position, prefix)
    block = _block_graph(self)

    def layer(x, xs):
      index, weights, shared = xs
      weights = sharding.gathered(weights, self.mesh, inside="blocks/")
      one = nnx.merge(block, weights)
      view = self._view(views, index)
      q, k, v = one.project(x, view)
      if prefix is not None:
        shared = (*shared, view.shared)
      x = one.close(x, self._attend(q, shared, (k, v, view.own)))
      return x, (k[:, 0], v[:, 0])

    shared = None
    if prefix is not None:
      shared = (jnp.swapaxes(prefix.k, 0, 1), jnp.swapaxes(prefix.v, 0, 1))
    x = self._embed(params, tokens)
    if self.remat != "nothing":
      keep = jax.checkpoint_policies
      kept = {
        "layer": keep.nothing_saveable,
        "products": keep.save_from_both_policies(
          keep.dots_with_no_batch_dims_saveable,
          keep.save_only_these_names(_PRODUCT),
        ),
      }
      layer = jax.checkpoint(layer, policy=kept[self.remat], prevent_cse=False)
    xs = (jnp.arange(self.layers), params["blocks"], shared)
    x, (k, v) = jax.lax.scan(layer, x, xs)
    return self._norm(params, x), jnp.swapaxes(k, 0, 1), jnp.swapaxes(v, 0, 1)

  def _views(
    self,
    position: Int[Array, "P #R Q"],
    own: Bool[Array, "P #R Q T"],
    own_position: Int[Array, "P #R T"],
    prefix: Prefix | None,
  ) -> "_View":
    """Angles and masks of full layers, or [2, ...] of full and sliding ones."""
    shared = None if prefix is None else prefix.mask[:, None, None]
    turn = lambda rope: rope.turn(position, self.head_size)
    cos, sin = turn(self.rope)
    if not any(self.sliding):
      return _View(cos, sin, own, shared)
    near = lambda mask, key: attention.within(mask, position, key, self.window)
    close_cos, close_sin = turn(self.sliding_rope or self.rope)
    near_shared = None
    if prefix is not None and shared is not None:
      before = jnp.cumsum(prefix.mask, axis=1, dtype=jnp.int32) - 1
      near_shared = near(shared, before[:, None])
      shared = jnp.broadcast_to(shared, near_shared.shape)
    return jax.tree.map(
      lambda *both: jnp.stack(both),
      _View(cos, sin, own, shared),
      _View(close_cos, close_sin, near(own, own_position), near_shared),
    )

  def _view(self, views: "_View", layer: Int[Array, ""]) -> "_View":
    if not any(self.sliding):
      return views
    slides = jnp.asarray(self.sliding, jnp.int32)[layer]
    return jax.tree.map(lambda both: both[slides], views)

  @property
  def _scale(self) -> float:
    return self.query_scale or self.head_size**-0.5

  def _attend(self, q, shared, own):
    return attention.attend(
      q, shared, own, scale=self._scale, softcap=self.attention_softcap
    )

  def _embed(self, params, tokens):
    x = self._whole(params, "embed")["embedding"][tokens].astype(self.dtype)
    return x * jnp.asarray(self.embed_scale, self.dtype)

  def _norm(self, params, x):
    outside = {
      "embed": params["embed"],
      "ln_final": self._whole(params, "ln_final"),
    }
    return nnx.merge(_outside_graph(self), outside).ln_final(x)

  def _head(
    self, params: PyTree, x: Float[Array, "*axes D"]
  ) -> Float[Array, "*axes V"]:
    return self._logits(x, self._unembedding(params))

  def _unembedding(self, params: PyTree) -> Float[Array, "V D"]:
    if self.tied:
      return self._whole(params, "embed")["embedding"]
    return self._whole(params, "head")["kernel"].T

  def _whole(self, params: PyTree, name: str) -> PyTree:
    return sharding.gathered(params[name], self.mesh, inside=f"{name}/")

  def _logits(
    self, x: Float[Array, "*axes D"], head: Float[Array, "v D"]
  ) -> Float[Array, "*axes v"]:
    flat = products.dot(
      x.reshape(-1, self.width), products.turned(head.astype(x.dtype))
    )
    flat = attention.capped(flat, self.final_softcap)
    return flat.reshape(*x.shape[:-1], len(head))


class _View(NamedTuple):
  """What a layer knows of its queries' place."""

  cos: Float[Array, "*kinds P R Q half"]
  sin: Float[Array, "*kinds P R Q half"]
  # Which own keys each query sees: a mask, or in decoding the newest so many.
  own: Bool[Array, "*kinds P R Q T"] | Int[Array, "P R"]
  shared: Any  # mask [*kinds,P,R,Q,S] of the prefix, axes R and Q may be 1


class _Outside(nnx.Module):
  """What stands before and after the blocks."""

  def __init__(self, c: Policy, *, rngs: nnx.Rngs):
    init = nnx.initializers.normal(0.02)
    self.embed = nnx.Embed(c.vocab, c.width, embedding_init=init, rngs=rngs)
    self.ln_final = _Norm(c, c.width)


class _Block(nnx.Module):
  """Attention and a gated feed-forward, each behind an RMSNorm."""

  def __init__(self, c: Policy, *, rngs: nnx.Rngs):
    D, H, G, K, F = c.width, c.heads, c.kv_heads, c.head_size, c.mlp
    self.policy = c
    self.ln_attn = _Norm(c, D)
    self.ln_mlp = _Norm(c, D)
    if c.post_norms:
      self.ln_attn_out = _Norm(c, D)
      self.ln_mlp_out = _Norm(c, D)
    if c.qk_norm:
      self.ln_q = _Norm(c, K)
      self.ln_k = _Norm(c, K)
    one = functools.partial(_einsum, c, rngs=rngs)
    self.q = one("nd,dhk->nhk", (D, H, K), bias=c.qkv_bias)
    self.k = one("nd,dgk->ngk", (D, G, K), bias=c.qkv_bias)
    self.v = one("nd,dgk->ngk", (D, G, K), bias=c.qkv_bias)
    self.o = one("nhk,hkd->nd", (H, K, D), bias=c.output_bias)
    if c.experts:
      self.router = _Kernel((D, c.experts), rngs=rngs)
      self.expert_gate = _Kernel((c.experts, D, F), rngs=rngs)
      self.expert_up = _Kernel((c.experts, D, F), rngs=rngs)
      self.expert_down = _Kernel((c.experts, F, D), rngs=rngs)
    else:
      self.gate = one("nd,df->nf", (D, F), bias=c.mlp_bias)
      self.up = one("nd,df->nf", (D, F), bias=c.mlp_bias)
      self.down = one("nf,fd->nd", (F, D), bias=c.mlp_bias)

  def project(
    self, x: Float[Array, "P R Q D"], view: _View
  ) -> tuple[Array, Array, Array]:
    """Rotated queries [P,R,Q,H,K], rotated keys and values [P,R,G,Q,K]."""
    h = _rows(self.ln_attn(x))
    apart = lambda y: y.reshape(*x.shape[:3], *y.shape[1:])
    q, k, v = self.q(h), self.k(h), self.v(h)
    if self.policy.qk_norm:
      q, k = self.ln_q(q), self.ln_k(k)
    q = attention.rotate(apart(q), view.cos, view.sin)
    k = attention.rotate(apart(k), view.cos, view.sin)
    return q, jnp.swapaxes(k, 2, 3), jnp.swapaxes(apart(v), 2, 3)

  def close(
    self, x: Float[Array, "P R Q D"], attended: Float[Array, "P R Q H K"]
  ) -> Float[Array, "P R Q D"]:
    """Adds what was attended to, then the feed-forward."""
    post = self.policy.post_norms
    y = self.o(attended.reshape(-1, *attended.shape[3:]))
    y = _rows(x) + (self.ln_attn_out(y) if post else y)
    z = self.feed_forward(self.ln_mlp(y))
    y += self.ln_mlp_out(z) if post else z
    return y.reshape(x.shape)

  def feed_forward(self, h: Float[Array, "n D"]) -> Float[Array, "n D"]:
    c = self.policy
    if c.experts:
      weight = lambda kernel: kernel.kernel[...].astype(c.dtype)
      return experts.routed(
        h,
        weight(self.router),
        weight(self.expert_gate),
        weight(self.expert_up),
        weight(self.expert_down),
        per_token=c.experts_per_token,
        normalize=c.normalize_experts,
      )
    act = _ACTIVATIONS[c.activation]
    return self.down(act(self.gate(h)) * self.up(h))


_ACTIVATIONS = {
  "silu": jax.nn.silu,
  "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


class _Norm(nnx.Module):
  """x / sqrt(mean(x^2) + eps) * (offset + scale), in float32."""

  def __init__(self, c: Policy, size: int):
    self.eps, self.offset, self.dtype = c.norm_eps, c.norm_offset, c.dtype
    self.scale = nnx.Param(jnp.full((size,), 1.0 - c.norm_offset, jnp.float32))

  def __call__(self, x: Float[Array, "*axes D"]) -> Float[Array, "*axes D"]:
    y = x.astype(jnp.float32)
    y *= jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
    scale = self.offset + self.scale[...].astype(jnp.float32)
    return (y * jnp.broadcast_to(scale, y.shape)).astype(self.dtype)


class _Kernel(nnx.Module):
  """A weight that is not used by one product alone."""

  def __init__(self, shape: tuple[int, ...], *, rngs: nnx.Rngs):
    self.kernel = nnx.Param(
      nnx.initializers.normal(0.02)(rngs.params(), shape, jnp.float32)
    )


def _rows(x: Float[Array, "P R Q D"]) -> Float[Array, "n D"]:
  # Matrices, not tensors: XLA's CPU gradient of a weight contracted over
  # several axes takes three times as long.
  return x.reshape(-1, x.shape[-1])


def _einsum(
  c: Policy, spec: str, kernel: tuple[int, ...], *, bias: bool, rngs: nnx.Rngs
) -> nnx.Einsum:
  init = nnx.initializers.normal(0.02)
  # The bias has the axes that the product adds.
  inputs, added = spec.split("->")[0].split(",")
  shape = tuple(
    n for n, axis in zip(kernel, added, strict=True) if axis not in inputs
  )
  return nnx.Einsum(
    spec,
    kernel,
    shape if bias else None,
    dtype=c.dtype,
    kernel_init=init,
    einsum_op=_product,
    rngs=rngs,
  )


_PRODUCT = "product"


def _product(spec: str, x: Array, kernel: Array, **options) -> Array:
  """einsum of rows with a kernel, as matrices where that is faster."""
  if not products.half_on_cpu(x):
    return jnp.einsum(spec, x, kernel, **options)
  n = math.prod(x.shape[1:])  # axes summed over, in front in the kernel
  y = products.dot(x.reshape(-1, n), kernel.reshape(n, -1)).astype(x.dtype)
  # Its own gradient hides the product from `remat`, hence the name.
  y = checkpoint_name(y, _PRODUCT)
  return y.reshape(-1, *kernel.shape[x.ndim - 1 :])


@functools.cache
def _block_graph(c: Policy) -> nnx.GraphDef:
  return nnx.split(nnx.eval_shape(lambda: _Block(c, rngs=nnx.Rngs(0))))[0]


@functools.cache
def _outside_graph(c: Policy) -> nnx.GraphDef:
  return nnx.split(nnx.eval_shape(lambda: _Outside(c, rngs=nnx.Rngs(0))))[0]
