"""Which keys each query sees, and where both stand."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brorl_jax.model.spec import PolicySpec


class View(NamedTuple):
  """Positions of a layer's queries, as angles, and the keys that they see."""

  cos: Float[Array, "*kinds P M Q half"]
  sin: Float[Array, "*kinds P M Q half"]
  # Own keys that each query sees: a mask, or in decoding the number of the
  # newest ones.
  own: Bool[Array, "*kinds P M Q T"] | Int[Array, "P M"]
  shared: Any  # mask [*kinds,P,M,Q,S] of the prefix, axes M and Q may be 1


def of_rows(
  c: PolicySpec,
  position: Int[Array, "P #M Q"],
  own: Bool[Array, "P #M Q T"],
  own_position: Int[Array, "P #M T"],
  prefix_mask: Bool[Array, "P S"] | None,
) -> View:
  """Angles and masks of full layers, or [2, ...] of full and sliding ones."""
  shared = None if prefix_mask is None else prefix_mask[:, None, None]
  turn = lambda rope: rope.turn(position, c.head_size)
  cos, sin = turn(c.rope)
  if not any(c.sliding):
    return View(cos, sin, own, shared)
  near = lambda mask, key: within(mask, position, key, c.window)
  close_cos, close_sin = turn(c.sliding_rope or c.rope)
  near_shared = None
  if prefix_mask is not None and shared is not None:
    before = jnp.cumsum(prefix_mask, axis=1, dtype=jnp.int32) - 1
    near_shared = near(shared, before[:, None])
    shared = jnp.broadcast_to(shared, near_shared.shape)
  return jax.tree.map(
    lambda *both: jnp.stack(both),
    View(cos, sin, own, shared),
    View(close_cos, close_sin, near(own, own_position), near_shared),
  )


def of_layer(c: PolicySpec, views: View, layer: Int[Array, ""]) -> View:
  """Those of one layer."""
  if not any(c.sliding):
    return views
  slides = jnp.asarray(c.sliding, jnp.int32)[layer]
  return jax.tree.map(lambda both: both[slides], views)


def of_slots(
  c: PolicySpec,
  prompt_mask: Bool[Array, "A W S"],
  length: Int[Array, "A R"],
  which: Int[Array, "A R"],
) -> list[View]:
  """Views of decode slots: of full layers, then of sliding ones if any."""
  before = jnp.sum(prompt_mask, axis=2, dtype=jnp.int32)  # A W
  position = jnp.take_along_axis(before, which, axis=1) + length - 1
  A, W, S = prompt_mask.shape
  own_prompt = which[..., None] == jnp.arange(W)[None, None]  # A R W
  if W == 1:
    own_prompt = jnp.ones((A, 1, 1), bool)
  mask = own_prompt[..., None] & prompt_mask[:, None]
  flat = lambda x: x.reshape(A, -1, W * S)
  cos, sin = c.rope.turn(position[..., None], c.head_size)
  views = [View(cos, sin, length, flat(mask))]
  if any(c.sliding):
    place = jnp.cumsum(prompt_mask, axis=2, dtype=jnp.int32) - 1  # A W S
    near = position[..., None, None] - place[:, None] < c.window  # A R W S
    limit = jnp.minimum(length, c.window)
    rope = c.sliding_rope or c.rope
    cos, sin = rope.turn(position[..., None], c.head_size)
    views.append(View(cos, sin, limit, flat(mask & near)))
  return views


def segment_start(segment: Int[Array, "P M Q"]) -> Int[Array, "P M Q"]:
  """Index of the first token of each token's segment."""
  begins = segment[..., 1:] != segment[..., :-1]
  index = jnp.arange(1, segment.shape[-1], dtype=jnp.int32)
  start = jnp.where(begins, index[None, None], 0)
  start = jnp.pad(start, ((0, 0), (0, 0), (1, 0)))
  return jax.lax.cummax(start, axis=2)


def of_trees(
  end: Int[Array, "P M Q"],
) -> tuple[Bool[Array, "P M Q Q"], Int[Array, "P M Q"]]:
  """Which tokens each token of `Trees` sees, and its depth."""
  index = jnp.arange(end.shape[-1])
  i, j = index[None, None, :, None], index[None, None, None, :]
  # Padding, whose end is 0, sees itself: attention over no key is 0 / 0.
  visible = (j <= i) & (i < end[..., None, :]) | (i == j)
  return visible, jnp.sum(visible, axis=-1, dtype=jnp.int32) - 1


def within(
  mask: Bool[Array, "P #M #Q T"],
  query: Int[Array, "P #M Q"],
  key: Int[Array, "P #M T"],
  window: int,
) -> Bool[Array, "P M Q T"]:
  """The part of `mask` that a sliding layer sees: the last `window` positions.

  Args:
    mask: What a full layer sees; axes M and Q may be 1.
    query: Positions of the queries; axis M may be 1.
    key: Positions of the keys; axis M may be 1.
    window: Positions, the query's own included.
  """
  return mask & (query[..., None] - key[:, :, None] < window)
