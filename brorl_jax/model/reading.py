"""Reading tokens that are there already: prompts, and rows beside them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from brorl_jax.model import attention, fused_attention, layers, sharding, views
from brorl_jax.model.cache import Prefix
from brorl_jax.model.spec import PolicySpec

# Prompt tokens that are read at a time. The scores of a chunk, [1,024, S] per
# head, are the largest array of a long prefill: 1.6 GB in float32 for 12 heads
# and S = 32,768, where S x S scores would take 51 GB.
PREFILL_CHUNK = 1024


class Reading(PolicySpec):
  """Hidden states and logits of given tokens."""

  def logits(
    self, params: PyTree, tokens: Int[Array, "B T"], mask: Bool[Array, "B T"]
  ) -> Float[Array, "B T V"]:
    """Next-token logits at every position.

    Args:
      tokens: Token ids, padded on the left or on the right.
      mask: True on real tokens. Logits at other positions are meaningless.
    """
    hidden, _, _ = self._own(params, tokens[:, None], mask[:, None])
    return layers.head(self, params, hidden[:, 0])

  def prefill(
    self, params: PyTree, tokens: Int[Array, "P S"], mask: Bool[Array, "P S"]
  ) -> tuple[Float[Array, "P V"], Prefix]:
    """Reads the prompts once: logits of the first response token, and a cache.

    Long prompts are read in chunks that attend to the chunks before them, so
    that no array has S x S scores. Only the last position gets logits.

    Args:
      params: Nested dict of arrays, or what `unroll` made of it.
      tokens: Left-padded, so that the last position is a real token.
      mask: True on real tokens.
    """
    last, prefix = self._read(params, tokens, mask)
    return layers.head(self, params, last), prefix

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
      at = i * PREFILL_CHUNK
      chunk = lambda x: jax.lax.dynamic_slice_in_dim(
        x, at, PREFILL_CHUNK, axis=1
      )
      hidden, k, v = self._own(
        params, chunk(tokens)[:, None], chunk(padded)[:, None], prefix
      )
      k, v = more(prefix.k, k, 3), more(prefix.v, v, 3)
      mask = more(prefix.mask, chunk(padded), 1)
      return Prefix(k, v, mask), hidden[:, 0, -1]

    hidden = jnp.zeros((P, self.width), self.dtype)
    chunks = (S + spare) // PREFILL_CHUNK
    prefix, last = jax.lax.fori_loop(0, chunks, read, (start, hidden))
    k, v = (x[:, :, :, spare:] for x in (prefix.k, prefix.v))
    return last, Prefix(k, v, mask)

  def _own(
    self,
    params: PyTree,
    tokens: Int[Array, "P M Q"],
    mask: Bool[Array, "P 1 Q"] | None,
    prefix: Prefix | None = None,
    segment: Int[Array, "P M Q"] | None = None,
    end: Int[Array, "P M Q"] | None = None,
  ) -> tuple[Float[Array, "P M Q D"], Array, Array]:
    """Hidden states of rows that attend to themselves and to a prefix.

    And keys and values [P,L,G,Q,K] of each prompt's first row. `segment`
    restricts attention to tokens of the same number, `end` to ancestors in a
    tree, see `Trees`.
    """
    P, _, Q = tokens.shape
    own = mask
    mask = jnp.ones((P, 1, Q), bool) if own is None else own
    position = jnp.maximum(jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1, 0)
    visible = jnp.tril(jnp.ones((Q, Q), bool))[None, None] & mask[:, :, None]
    if segment is not None:
      visible &= segment[..., :, None] == segment[..., None, :]
      position -= views.segment_start(segment)
    if end is not None:
      visible, position = views.of_trees(end)
    if prefix is not None:
      before = jnp.sum(prefix.mask, axis=1, dtype=jnp.int32)
      position = position + before[:, None, None]
    seen = views.of_rows(
      self, position, visible, position, None if prefix is None else prefix.mask
    )

    # What masks say of layers that do not slide.
    real = fused_attention.Real(
      own, None if prefix is None else prefix.mask, segment
    )
    real = None if any(self.sliding) or end is not None else real

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
      view = views.of_layer(self, seen, index)
      q, k, v = block.project(x, view)
      if prefix is not None:
        shared = (*shared, view.shared)
      x = block.close(x, self._attend(q, shared, (k, v, view.own), real))
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
    return (
      layers.final_norm(self, params, x),
      jnp.swapaxes(k, 0, 1),
      jnp.swapaxes(v, 0, 1),
    )

  def _attend(self, q, shared, own, real):
    return attention.attend(
      q,
      shared,
      own,
      scale=self.attention_scale,
      softcap=self.attention_softcap,
      target=self.target,
      mesh=self.mesh,
      real=real,
    )
