"""A decoder-only transformer as pure functions of a plain dict of arrays.

`Policy` is a static description. Its methods take `params` and change nothing.

In every method a query attends to a *prefix*, which all rows of its prompt
share, and to keys of its *own* row, in one softmax:

  method           prefix    own keys
  prefill          none      the prompt's tokens, causal
  decode_step      prompt    pages with the row's response so far
  pool_step        prompt    blocks of a pool with the same
  response_logp    prompt    the response's tokens, causal
  logits           none      the row's tokens, causal
  response_logp    none      of trees: a token's ancestors, see `types.Trees`
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from brorl_jax.model import (
  adapters,
  attention,
  cache,
  fused_attention,
  layers,
  sharding,
)
from brorl_jax.model.cache import LanePrompts, Prefix
from brorl_jax.model.spec import PolicySpec
from brorl_jax.types import Trees

# Prompt tokens that are read at a time. The scores of a chunk, [1,024, S] per
# head, are the largest array of a long prefill: 1.6 GB in float32 for 12 heads
# and S = 32,768, where S x S scores would take 51 GB.
PREFILL_CHUNK = 1024

# (layer, queries [A,R,H,K], keys and values [B,G,K], prompts, number of own
# tokens that each row sees) -> attended values [A,R,H,K]. It writes the keys
# and values first.
Attend = Callable[[int, Array, Array, Array, cache.SharedKeys, Array], Array]


@dataclasses.dataclass(frozen=True)
class Policy(PolicySpec):
  """A decoder as pure functions of its parameters."""

  def init(self, key: Key[Array, ""]) -> PyTree:
    """As `layers.init`, with an adapter if there is a `lora_rank`."""
    return layers.init(self, key)

  @functools.cached_property
  def shapes(self) -> PyTree:
    """Shapes of the parameters; none is computed."""
    return jax.eval_shape(self.init, jax.random.key(0))

  def cast(self, params: PyTree) -> PyTree:
    """The parameters in `dtype`, except for norms, which compute in float32; an
    adapter is merged first.

    Changes no result, because products convert their weights anyway. A bfloat16
    copy halves what every decode step reads.
    """
    return jax.tree_util.tree_map_with_path(
      lambda path, x: x if path[-1].key == "scale" else x.astype(self.dtype),
      adapters.merged(self, params),
    )

  def unroll(self, params: PyTree) -> PyTree:
    """The parameters as `decode_step` reads them: one dict per layer. Made once
    per call of the sampler, so that no step slices a stacked weight; joined or
    transposed where that is faster, see `layers.layer_form`.
    """
    layer = lambda i: jax.tree.map(lambda x: x[i], params["blocks"])
    blocks = [layer(i) for i in range(self.layers)]
    if not self.target.on_cpu and sharding.axes_here(None).get("expert", 1) < 2:
      # Where devices share key/value heads, joined weights would move queries.
      blocks = [layers.fused_layer(self, block) for block in blocks]
    plain = not (self.experts or self.mlp_bias)
    alone = self.mesh is None  # sharding.py has no rule for transposed ones
    if self.target.on_cpu and self.dtype == "float32" and plain and alone:
      blocks = [layers.turned_layer(block) for block in blocks]
    return params | {"blocks": blocks}

  def logits(
    self, params: PyTree, tokens: Int[Array, "B T"], mask: Bool[Array, "B T"]
  ) -> Float[Array, "B T V"]:
    """Next-token logits where `mask` is True; rows padded on either side."""
    hidden, _, _ = self._own(params, tokens[:, None], mask[:, None])
    return layers.head(self, params, hidden[:, 0])

  def prefill(
    self, params: PyTree, tokens: Int[Array, "P S"], mask: Bool[Array, "P S"]
  ) -> tuple[Float[Array, "P V"], Prefix]:
    """Reads the prompts once: logits of the first response token, and a cache.

    Long prompts are read in chunks that attend to earlier ones. `unroll` may
    have made `params`; tokens are padded on the left.
    """
    last, prefix = self._read(params, tokens, mask)
    return layers.head(self, params, last), prefix

  def response_logp(
    self,
    params: PyTree,
    prompt: Int[Array, "P S"],
    prompt_mask: Bool[Array, "P S"],
    response: Int[Array, "P M T"],
    temperature: float = 1.0,
    trees: Trees | None = None,
  ) -> tuple[Float[Array, "P M T"], Float[Array, "P M T"]]:
    """Log-probability of each response token, and entropy, in nats.

    The prompt is read once for its M responses, and gradients flow into it.
    Both are of logits / temperature, computed for a few tokens at a time: all
    logits would be 1.2 GB for 2,048 tokens and V = 151,936. A mesh
    spreads prompts over its rows, or their responses if prompts are too few.
    Prompts are padded on the left, responses on the right; `trees`, if given,
    are read in place of both.
    """
    if trees is not None:

      def ends(params, token, end, parent, target):
        hidden, _, _ = self._own(params, token[:, None], None, end=end[:, None])
        at = jnp.take_along_axis(hidden[:, 0], parent[..., None], axis=1)
        return layers.token_logp(self, params, at, target, temperature)

      read = sharding.over_rows(ends, params, self.mesh)
      found = read(trees.token, trees.end, trees.parent, trees.target)
      rows = jnp.arange(len(trees.at))[:, None, None]
      logp, entropy = (x[rows, trees.at] for x in found)
      return logp, entropy
    cut, join = sharding.spread(self.mesh, *response.shape[:2])

    def here(params, prompt, prompt_mask, response):
      hidden = self._response(params, prompt, prompt_mask, response)
      flat = lambda x, *axes: x.reshape(len(x), -1, *axes)
      hidden, tokens = flat(hidden, self.width), flat(response)
      return layers.token_logp(self, params, hidden, tokens, temperature)

    rows = cut(prompt), cut(prompt_mask), cut(response)
    out = sharding.over_rows(here, params, self.mesh)(*rows)
    logp, entropy = (join(x.reshape(rows[2].shape)) for x in out)
    return logp, entropy

  def likeliest(
    self, params: PyTree, tokens: Int[Array, "S"]
  ) -> tuple[Float[Array, "T"], Int[Array, "T"], Float[Array, "T"]]:
    """Of each token but the first its log-probability, the likeliest token in
    its place, and its own; 64 at a time, as all logits may be too many.
    """
    one, more = tokens[None, :1], tokens[None, None, 1:]
    hidden = self._response(params, one, jnp.ones_like(one, bool), more)[0, 0]

    def at(x):
      logp = jax.nn.log_softmax(layers.head(self, params, x[0]))
      return logp[x[1]], logp.argmax(), logp.max()

    return jax.lax.map(at, (hidden, tokens[1:]), batch_size=64)

  def _response(
    self, params, prompt, prompt_mask, response
  ) -> Float[Array, "P M T D"]:
    """Hidden states from which the head computes each response token."""
    last, prefix = self._read(params, prompt, prompt_mask)
    P, M, T = response.shape
    # The prompt's last position gives token 0 of all M rows, and response token
    # t gives token t + 1: the last token is never an input.
    first = jnp.broadcast_to(last[:, None, None], (P, M, 1, self.width))
    if T == 1:
      return first
    # On accelerators the last token is read too, for nothing: their arrays have
    # T rows then, which is even and a multiple of their tiles.
    inputs = response if not self.target.on_cpu else response[:, :, :-1]
    # Responses are padded on the right, where causal attention never looks.
    hidden, _, _ = self._own(params, inputs, None, prefix)
    return jnp.concatenate([first, hidden[:, :, : T - 1]], axis=2)

  def _read(self, params, tokens, mask) -> tuple[Float[Array, "P D"], Prefix]:
    """`prefill` with the hidden states of the last position, not its logits."""
    P, S = tokens.shape
    if S <= PREFILL_CHUNK:
      hidden, k, v = self._own(params, tokens[:, None], mask[:, None])
      return hidden[:, 0, -1], Prefix(k, v, mask)

    # Padding goes in front, where prompts are padded anyway: the last position
    # stays a real token, and `spare` columns are dropped at the end.
    spare = -S % PREFILL_CHUNK
    front = ((0, 0), (spare, 0))
    tokens, padded = jnp.pad(tokens, front), jnp.pad(mask, front)
    shape = (P, self.layers, self.kv_heads, S + spare, self.head_size)
    empty = jnp.zeros(shape, self.dtype)
    start = Prefix(empty, empty, jnp.zeros_like(padded))

    # What is read moves in from the right: real tokens stay without a gap.
    more = lambda x, new, axis: jnp.concatenate(
      [jax.lax.slice_in_dim(x, PREFILL_CHUNK, None, axis=axis), new], axis
    )

    def read(i, carry):
      prefix, _ = carry
      cut = jax.lax.dynamic_slice_in_dim
      chunk = lambda x: cut(x, i * PREFILL_CHUNK, PREFILL_CHUNK, axis=1)
      new, real = chunk(tokens)[:, None], chunk(padded)
      hidden, k, v = self._own(params, new, real[:, None], prefix)
      k, v = more(prefix.k, k, 3), more(prefix.v, v, 3)
      return Prefix(k, v, more(prefix.mask, real, 1)), hidden[:, 0, -1]

    hidden = jnp.zeros((P, self.width), self.dtype)
    chunks = (S + spare) // PREFILL_CHUNK
    prefix, last = jax.lax.fori_loop(0, chunks, read, (start, hidden))
    k, v = (x[:, :, :, spare:] for x in (prefix.k, prefix.v))
    return last, Prefix(k, v, mask)

  def _seen(
    self, tokens, mask, prefix, end
  ) -> tuple[attention.View, fused_attention.Real | None]:
    """Which keys the tokens of `_own` see, and whether real tokens say it."""
    P, _, Q = tokens.shape
    own = mask
    mask = jnp.ones((P, 1, Q), bool) if own is None else own
    position = jnp.maximum(jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1, 0)
    visible = jnp.tril(jnp.ones((Q, Q), bool))[None, None] & mask[:, :, None]
    if end is not None:
      visible, position = attention.tree_views(end)
    if prefix is not None:
      before = jnp.sum(prefix.mask, axis=1, dtype=jnp.int32)
      position = position + before[:, None, None]
    prefix_mask = None if prefix is None else prefix.mask
    seen = attention.row_views(self, position, visible, prefix_mask)
    # What masks say of layers that do not slide.
    real = fused_attention.Real(own, prefix_mask)
    return seen, None if any(self.sliding) or end is not None else real

  def _own(
    self,
    params: PyTree,
    tokens: Int[Array, "P M Q"],
    mask: Bool[Array, "P 1 Q"] | None,
    prefix: Prefix | None = None,
    end: Int[Array, "P M Q"] | None = None,
  ) -> tuple[Float[Array, "P M Q D"], Array, Array]:
    """Hidden states of rows that attend to themselves and to a prefix, and keys
    and values [P,L,G,Q,K] of each prompt's first row. `end` restricts
    attention to ancestors, see `Trees`.
    """
    seen, real = self._seen(tokens, mask, prefix, end)
    blocks = params["blocks"]

    def layer(x, xs):
      index, weights, shared = xs
      if weights is None:
        # Of `unroll`: a copy of one layer at a time. Stacked, 1.5B would take
        # 3.6 GB more; a Python loop would compile 28 layers.
        weights = jax.lax.switch(index, [lambda x=x: x for x in blocks])
      # Whole for this layer alone: a device keeps 1/data of all other layers.
      weights = sharding.gathered(
        weights, self.mesh, self.dtype, inside="blocks/"
      )
      block = layers.block(self, weights)
      view = attention.layer_view(self, seen, index)
      q, k, v = block.project(x, view)
      if prefix is not None:
        shared = (*shared, view.shared)
      out = attention.attend(
        q,
        shared,
        (k, v, view.own),
        scale=self.attention_scale,
        softcap=self.attention_softcap,
        target=self.target,
        mesh=self.mesh,
        real=real,
      )
      x = block.close(x, out)
      # Only `_read` uses them, with one row per prompt; XLA removes the rest.
      return x, (k[:, 0], v[:, 0])

    shared = None
    if prefix is not None:
      shared = (jnp.swapaxes(prefix.k, 0, 1), jnp.swapaxes(prefix.v, 0, 1))
    x = layers.embed(self, params, tokens)
    layer = layers.rematerialized(layer, self.remat)
    # A scan: one layer is compiled, whatever L is (28 for 1.5B, 48 for 30B).
    stacked = blocks if isinstance(blocks, dict) else None
    xs = (jnp.arange(self.layers), stacked, shared)
    x, (k, v) = jax.lax.scan(layer, x, xs)
    k, v = jnp.swapaxes(k, 0, 1), jnp.swapaxes(v, 0, 1)
    return layers.final_norm(self, params, x), k, v

  def page(self, rows: int, columns: int) -> list[cache.Page]:
    """An empty page of the cache for `rows` rows, for each layer."""
    # B = A R rows in one axis: with [A, R] XLA copies a page in every step.
    shape = (rows, self.kv_heads)
    # On a CPU float32 even for bfloat16 policies: to write one column, XLA
    # would convert the whole page to float32 and back, at a third of the speed.
    wide = "float32" if self.target.on_cpu else self.dtype
    kind = jnp.int8 if self.int8_cache else wide
    scale = jnp.zeros((*shape, columns)) if self.int8_cache else None
    k = jnp.zeros((*shape, self.head_size, columns), kind)
    v = jnp.zeros((*shape, columns, self.head_size), kind)
    own = cache.Page(k, v, scale, scale)
    return sharding.heads_apart([own] * self.layers, axis=1)

  @property
  def pool_columns(self) -> int:
    """Tokens of a block of the pool; 0: the target decodes over pages."""
    return 0 if self.target.on_cpu else cache.pool_columns(self.target)

  def pool(self, blocks: int, columns: int) -> list[cache.BlockPool]:
    """A pool of `blocks` blocks in which nothing is written, for each layer."""
    shape = blocks, 2, self.kv_heads, columns
    kind = jnp.int8 if self.int8_cache else self.dtype
    scale = jnp.zeros(shape) if self.int8_cache else None
    own = cache.BlockPool(jnp.zeros((*shape, self.head_size), kind), scale)
    return sharding.heads_apart([own] * self.layers, axis=2)

  def lane_prompts(
    self, prefix: Prefix, window: Int[Array, "A W"]
  ) -> LanePrompts:
    """Prompts of each lane, W side by side; number P of `window` is none."""
    real = window < prefix.mask.shape[0]
    at = jnp.where(real, window, 0)
    W, S = window.shape[1], prefix.mask.shape[1]
    whole = slice(0, W * S)
    pieces = cache.prompt_pieces(W, S) if self.target.on_cpu else [whole]

    def layers(x: Float[Array, "P L G S K"]) -> list[list[Array]]:
      x = jnp.moveaxis(x[at], 2, 0)  # L A W G S K
      x = jnp.swapaxes(x, 2, 3)
      x = x.reshape(*x.shape[:3], -1, self.head_size)
      # Cut here: a step that did it took a tenth more time with 16 lanes.
      return [[x[i, :, :, p] for p in pieces] for i in range(self.layers)]

    mask = prefix.mask[at] & real[..., None]
    return LanePrompts(layers(prefix.k), layers(prefix.v), mask)

  def decode_step(
    self,
    weights: PyTree,
    shared: LanePrompts,
    pages: Sequence[list[cache.Page]],
    token: Int[Array, "A R"],
    length: Int[Array, "A R"],
    which: Int[Array, "A R"],
    column: Int[Array, ""],
    used: cache.Used,
  ) -> tuple[Float[Array, "A R V"], list[cache.Page]]:
    """Next-token logits of every row, after one more token of each.

    `token`, the last of each row, is not yet in the cache; its position is the
    prompt's length + `length` - 1. `which` is the index of each row's prompt in
    its lane's window. All rows write to `column` of the last page: attention
    ignores the order of columns, so rows of any length share it. `pages` are
    the oldest first, and `used` of them before the last are read, see
    `cache.ages`. Returns the last page too, with keys and values of `token`.
    """
    *older, newest = pages
    written = []

    def attend(i, q, k, v, shared, limit):
      written.append(newest[i].write(k, v, column))
      return cache.attend_pages(
        q,
        shared,
        [*(page[i] for page in older), written[i]],
        column=column,
        used=used,
        limit=limit,
        scale=self.attention_scale,
        softcap=self.attention_softcap,
      )

    return self._decode(weights, shared, token, length, which, attend), written

  def pool_step(
    self,
    weights: PyTree,
    shared: LanePrompts,
    pools: list[cache.BlockPool],
    token: Int[Array, "A R"],
    length: Int[Array, "A R"],
    which: Int[Array, "A R"],
    table: Int[Array, "B most"],
    goes: Bool[Array, "A R"],
  ) -> tuple[Float[Array, "A R V"], list[cache.BlockPool]]:
    """As `decode_step`, with the rows' own tokens in a pool of each layer.

    `table` has the blocks of each row, see `cache.row_attention`, that of
    `token` too. Rows advance if `goes`; the logits of others mean nothing, and
    none of them is written. Returns the pools too, in place if donated.
    """
    blocks, C = pools[0].kv.shape[0], pools[0].kv.shape[3]
    goes = goes.ravel()
    last = length.ravel() - 1
    block = jnp.take_along_axis(table, (last // C)[:, None], axis=1)[:, 0]
    block = jnp.where(goes, block, blocks)  # out of bounds
    stop = jnp.where(goes, last + 1, 0)
    written = []

    def attend(i, q, k, v, shared, limit):
      written.append(cache.write_pool(pools[i], k, v, block, last % C))
      return cache.attend_pool(
        q,
        shared,
        written[i],
        table,
        jnp.maximum(stop - limit.ravel(), 0),
        stop,
        scale=self.attention_scale,
        softcap=self.attention_softcap,
        target=self.target,
      )

    return self._decode(weights, shared, token, length, which, attend), written

  def _decode(
    self,
    weights: PyTree,
    shared: LanePrompts,
    token: Int[Array, "A R"],
    length: Int[Array, "A R"],
    which: Int[Array, "A R"],
    attend: Attend,
  ) -> Float[Array, "A R V"]:
    """Logits after `token`, for any form of the rows' own keys and values."""
    seen = attention.slot_views(self, shared.mask, length, which)
    flat = lambda x: x.reshape(-1, *x.shape[2:])[:, :, 0]  # A R G 1 K -> B G K
    x = layers.embed(self, weights, token)[:, :, None]
    # A Python loop, not a scan: a scan would slice each layer's cache out of a
    # stacked one and write it back, 2 copies of the cache per token.
    for i, layer in enumerate(weights["blocks"]):
      block = layers.block(self, layer)
      view = seen[bool(self.sliding) and self.sliding[i]]
      q, k, v = block.project(x, view)
      prompts = cache.SharedKeys(shared.k[i], shared.v[i], view.shared)
      out = attend(i, q[:, :, 0], flat(k), flat(v), prompts, view.own)
      x = block.close(x, out[:, :, None])
    x = layers.final_norm(self, weights, x)[:, :, 0]
    return layers.head(self, weights, x)
