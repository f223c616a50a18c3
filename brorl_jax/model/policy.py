"""A decoder-only transformer as pure functions of a plain dict of arrays.

`Policy` is a static description. Its methods take `params` and change nothing.

In every method a query attends to a *prefix*, which all rows of its prompt
share, and to keys of its *own* row, in one softmax:

  method           prefix    own keys
  prefill          none      the prompt's tokens, causal
  decode_step      prompt    pages with the row's response so far
  pool_step        prompt    blocks of a pool with the same, see decoding.py
  response_logits  prompt    the response's tokens, causal; response_logp too
  logits           none      the row's tokens, causal
  packed_logp      none      the tokens of the same text, causal
  response_logp    none      of trees: a token's ancestors, see `types.Trees`

Those that only read tokens which are there are in reading.py.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from brorl_jax.model import cache, decode_weights, layers, sharding
from brorl_jax.model.cache import LanePrompts, Prefix
from brorl_jax.model.decoding import Decoding
from brorl_jax.model.reading import Reading
from brorl_jax.types import Trees


@dataclasses.dataclass(frozen=True)
class Policy(Reading, Decoding):
  """A decoder as pure functions of its parameters."""

  def init(self, key: Key[Array, ""]) -> PyTree:
    """Random float32 parameters, N(0, 0.02^2), norms 1 and biases 0."""
    return layers.init(self, key)

  @functools.cached_property
  def shapes(self) -> PyTree:
    """Shapes of the parameters; none is computed."""
    return jax.eval_shape(self.init, jax.random.key(0))

  def cast(self, params: PyTree) -> PyTree:
    """The parameters in `dtype`, except for norms, which compute in float32.

    Changes no result, because products convert their weights anyway. A bfloat16
    copy halves what every decode step reads.
    """
    return jax.tree_util.tree_map_with_path(
      lambda path, x: x if path[-1].key == "scale" else x.astype(self.dtype),
      params,
    )

  def unroll(self, params: PyTree) -> PyTree:
    """The parameters as `decode_step` reads them: one dict per layer.

    Made once per call of the sampler, so that no step slices a stacked weight.
    Joined or transposed where that is faster; see `decode_weights`.
    """
    layer = lambda i: jax.tree.map(lambda x: x[i], params["blocks"])
    blocks = [layer(i) for i in range(self.layers)]
    if not self.target.on_cpu and sharding.axes_here(None).get("expert", 1) < 2:
      # Where devices share key/value heads, joined weights would move queries.
      blocks = [decode_weights.fused(self, block) for block in blocks]
    plain = not (self.experts or self.mlp_bias)
    alone = self.mesh is None  # sharding.py has no rule for transposed ones
    if self.target.on_cpu and self.dtype == "float32" and plain and alone:
      blocks = [decode_weights.turned(block) for block in blocks]
    return params | {"blocks": blocks}

  def lane_prompts(
    self, prefix: Prefix, window: Int[Array, "A W"]
  ) -> LanePrompts:
    """Keys and values of the prompts of each lane, W prompts side by side.

    Args:
      prefix: From `prefill`.
      window: Prompts of each lane, 0 to P; P means no prompt.
    """
    return cache.lane_prompts(prefix, window)

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

    Args:
      weights: From `unroll`.
      shared: From `lane_prompts`.
      pages: Cached keys and values, oldest page first; see `cache.ages`.
      token: The last token of each row, not yet in the cache.
      length: Response tokens of each row including `token`, whose position is
        the prompt's length + `length` - 1.
      which: Index of each row's prompt in its lane's window, 0 to W - 1.
      column: Column of the last page to which all rows write this token.
        Attention ignores the order of columns, so rows of any length share it.
      used: How many pages before the last are read; see `cache.ages`.

    Returns:
      Logits, and the last page with the keys and values of `token`.
    """
    *older, newest = pages
    written = []
    pieces = cache.prompt_pieces(*shared.mask.shape[1:])

    def attend(i, q, k, v, shared, limit):
      written.append(newest[i].write(k, v, column))
      return cache.decode(
        q,
        shared,
        [*(page[i] for page in older), written[i]],
        column=column,
        used=used,
        limit=limit,
        scale=self.attention_scale,
        softcap=self.attention_softcap,
        pieces=pieces,
      )

    return self._decode(weights, shared, token, length, which, attend), written

  def response_logits(
    self,
    params: PyTree,
    prompt: Int[Array, "P S"],
    prompt_mask: Bool[Array, "P S"],
    response: Int[Array, "P M T"],
  ) -> Float[Array, "P M T V"]:
    """Logits from which each response token is drawn.

    The prompt is read once for its M responses, and gradients flow into it.
    Equals `logits` of the prompt joined with the response, shifted by one.
    """
    hidden = self._response(params, prompt, prompt_mask, response)
    return layers.head(self, params, hidden)

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

    Both are of `response_logits` / temperature, computed for a few tokens at a
    time: all logits would be 1.2 GB for 2,048 tokens and V = 151,936. A mesh
    spreads prompts over its rows, or their responses if prompts are too few.

    Args:
      prompt: Left-padded, so that the last position is a real token.
      prompt_mask: True on real tokens.
      response: Of each prompt, padded on the right.
      temperature: By which logits are divided.
      trees: Prompts and responses, read in place of the others; or None.
    """
    if trees is not None:
      found = self._tree_logp(params, trees, temperature)
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

  def _tree_logp(
    self, params: PyTree, trees: Trees, temperature: float
  ) -> tuple[Float[Array, "P E"], Float[Array, "P E"]]:
    """Log-probability of each target of trees, and entropy."""

    def here(params, token, end, parent, target):
      hidden, _, _ = self._own(params, token[:, None], None, end=end[:, None])
      at = jnp.take_along_axis(hidden[:, 0], parent[..., None], axis=1)
      return layers.token_logp(self, params, at, target, temperature)

    read = sharding.over_rows(here, params, self.mesh)
    return read(trees.token, trees.end, trees.parent, trees.target)

  def packed_logp(
    self,
    params: PyTree,
    tokens: Int[Array, "B T"],
    segment: Int[Array, "B T"],
  ) -> Float[Array, "B T"]:
    """Log-probability of each token given its text so far, in nats.

    A row holds several texts. No text attends to another, and the positions of
    each begin at 0, so the result equals that of `logits` of each text alone.
    A mesh spreads them over its rows of devices.

    Args:
      segment: Number of the token's text, from 1; adjacent texts have different
        numbers. 0 is padding, after the last text.

    Returns:
      Log-probabilities; 0 for the first token of a text and for padding.
    """

    def here(params, tokens, segment):
      mask = (segment > 0)[:, None]
      hidden, _, _ = self._own(
        params, tokens[:, None], mask, segment=segment[:, None]
      )
      hidden = hidden[:, 0, :-1]
      return layers.token_logp(self, params, hidden, tokens[:, 1:])[0]

    logp = sharding.over_rows(here, params, self.mesh)(tokens, segment)
    # The first token of a text would be scored by the last of the one before.
    same = (segment[:, 1:] == segment[:, :-1]) & (segment[:, 1:] > 0)
    return jnp.pad(jnp.where(same, logp, 0.0), ((0, 0), (1, 0)))

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
    # Responses are padded on the right, where causal attention never looks: no
    # mask is needed.
    hidden, _, _ = self._own(params, inputs, None, prefix)
    return jnp.concatenate([first, hidden[:, :, : T - 1]], axis=2)
