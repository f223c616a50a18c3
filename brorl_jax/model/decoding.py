"""One decode step of a policy, over pages or over a pool of blocks.

Both forms are the same layers; they differ in where a row's own keys and values
lie. `Policy.decode_step` is the form over pages.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from brorl_jax.model import cache, layers, pool, sharding, views
from brorl_jax.model.cache import LanePrompts
from brorl_jax.model.pool import Pool
from brorl_jax.model.spec import PolicySpec

# (layer, queries, keys, values, prompts, number of own tokens that each row
# sees) -> attended values. It writes the keys and values first.
Attend = Callable[
  [
    int,
    Float[Array, "A R H K"],
    Float[Array, "B G K"],
    Float[Array, "B G K"],
    cache.Shared,
    Int[Array, "A R"],
  ],
  Float[Array, "A R H K"],
]


class Decoding(PolicySpec):
  """The cache of a decoder, and how it decodes over a pool."""

  @property
  def cache_dtype(self) -> str:
    """The dtype of the pages, which hold keys and values of responses.

    On a CPU it is float32 even for bfloat16 policies: to write one column, XLA
    would convert the whole page to float32 and back, at a third of the speed.
    """
    return "float32" if self.target.on_cpu else self.dtype

  def page(self, rows: int, columns: int) -> list[cache.Page]:
    """An empty page of the cache for `rows` rows, for each layer."""
    # B = A R rows in one axis: with [A, R] XLA copies a page in every step.
    shape = (rows, self.kv_heads)
    kind = jnp.int8 if self.int8_cache else self.cache_dtype
    scale = jnp.zeros((*shape, columns)) if self.int8_cache else None
    k = jnp.zeros((*shape, self.head_size, columns), kind)
    v = jnp.zeros((*shape, columns, self.head_size), kind)
    own = cache.Page(k, v, scale, scale)
    return sharding.heads_apart([own] * self.layers, axis=1)

  @property
  def pool_columns(self) -> int:
    """Tokens of a block of the pool; 0: the target decodes over pages."""
    return 0 if self.target.on_cpu else pool.columns(self.target)

  def pool(self, blocks: int, columns: int) -> list[Pool]:
    """A pool of `blocks` blocks in which nothing is written, for each layer."""
    own = pool.empty(
      blocks,
      columns,
      self.kv_heads,
      self.head_size,
      self.dtype,
      int8=self.int8_cache,
    )
    return sharding.heads_apart([own] * self.layers, axis=2)

  def pool_step(
    self,
    weights: PyTree,
    shared: LanePrompts,
    pools: list[Pool],
    token: Int[Array, "A R"],
    length: Int[Array, "A R"],
    which: Int[Array, "A R"],
    table: Int[Array, "B most"],
    goes: Bool[Array, "A R"],
  ) -> tuple[Float[Array, "A R V"], list[Pool]]:
    """Next-token logits of every row, after one more token of each.

    Args are those of `Policy.decode_step`, and

      pools: Of each layer; written in place if donated.
      table: Blocks of each row, see `pool.own`; that of `token` included.
      goes: Rows that advance. The logits of others mean nothing, and nothing of
        them is written.

    Returns:
      Logits, and the pools with the keys and values of `token`.
    """
    blocks, C = pools[0].kv.shape[0], pools[0].kv.shape[3]
    goes = goes.ravel()
    last = length.ravel() - 1
    block = jnp.take_along_axis(table, (last // C)[:, None], axis=1)[:, 0]
    block = jnp.where(goes, block, blocks)  # out of bounds
    stop = jnp.where(goes, last + 1, 0)
    written = []

    def attend(i, q, k, v, shared, limit):
      written.append(pool.write(pools[i], k, v, block, last % C))
      return pool.decode(
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
    seen = views.of_slots(self, shared.mask, length, which)
    flat = lambda x: x.reshape(-1, *x.shape[2:])[:, :, 0]  # A R G 1 K -> B G K
    x = layers.embed(self, weights, token)[:, :, None]
    # A Python loop, not a scan: a scan would slice each layer's cache out of a
    # stacked one and write it back, 2 copies of the cache per token.
    for i, layer in enumerate(weights["blocks"]):
      block = layers.block(self, layer)
      view = seen[bool(self.sliding) and self.sliding[i]]
      q, k, v = block.project(x, view)
      prompts = cache.Shared(shared.k[i], shared.v[i], view.shared)
      out = attend(i, q[:, :, 0], flat(k), flat(v), prompts, view.own)
      x = block.close(x, out[:, :, None])
    return layers.head(
      self, weights, layers.final_norm(self, weights, x)[:, :, 0]
    )
