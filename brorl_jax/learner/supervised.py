"""Supervised training on prompts with responses, packed side by side in rows.

loss = - sum over response tokens of log pi(token | what precedes it) / count
"""

import collections
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, PyTree

from brorl_jax.learner.update import placed
from brorl_jax.model import sharding

# (params, tokens [B,T], segment [B,T]) -> log-probabilities [B,T]
PackedLogp = Callable[[PyTree, Array, Array], Array]
_LOOKS = 10  # times that losses are measured, evenly over the updates


class Pair(NamedTuple):
  """Token ids of a prompt and of its response, the end token included."""

  prompt: Sequence[int]
  response: Sequence[int]


class PairLayout(NamedTuple):
  """The static shape of all updates."""

  tokens: int  # T, of a row
  rows: int  # B, of a microbatch, over all devices
  microbatches: int  # C, of an update


class Rows(NamedTuple):
  """The pairs of one update; `Policy.packed_logp` explains segments."""

  tokens: Int[Array, "C B T"] | Int[np.ndarray, "C B T"]
  segment: Int[Array, "C B T"] | Int[np.ndarray, "C B T"]
  counts: Bool[Array, "C B T"] | Bool[np.ndarray, "C B T"]  # response tokens
  used: Int[Array, ""] | Int[np.ndarray, ""]  # microbatches with any pair


def epoch(
  lengths: Sequence[int], layout: PairLayout, order: Sequence[int]
) -> Iterator[list[list[int]]]:
  """The rows of each update of one epoch, as indices of pairs.

  A pair goes into the first row with room. One that fits into no row waits for
  the next update, which begins with it. An update ends when as many pairs wait
  as it has rows. None of the `lengths` is more than a row has tokens.
  """
  rows, waiting = layout.rows * layout.microbatches, collections.deque(order)
  while waiting:
    placed: list[list[int]] = [[] for _ in range(rows)]
    room = np.full(rows, layout.tokens)
    left = []
    while waiting and len(left) < rows:
      pair = waiting.popleft()
      fits = np.flatnonzero(room >= lengths[pair])
      if fits.size:
        placed[fits[0]].append(pair)
        room[fits[0]] -= lengths[pair]
      else:
        left.append(pair)
    yield [row for row in placed if row]
    waiting.extendleft(reversed(left))


def updates(
  pairs: Sequence[Pair], layout: PairLayout, *, seed: int
) -> Iterator[tuple[int, list[list[int]]]]:
  """The epoch, from 0, and the rows of each update, shuffled in each epoch."""
  for number in itertools.count():
    order = np.random.default_rng([seed, number]).permutation(len(pairs))
    for rows in epoch(_lengths(pairs), layout, order.tolist()):
      yield number, rows


def _lengths(pairs: Sequence[Pair]) -> list[int]:
  return [len(x.prompt) + len(x.response) for x in pairs]


def updates_in(
  pairs: Sequence[Pair], layout: PairLayout, *, epochs: int, seed: int
) -> int:
  """The number of updates in `epochs` epochs."""
  each = updates(pairs, layout, seed=seed)
  return sum(1 for _ in itertools.takewhile(lambda x: x[0] < epochs, each))


def pack(
  pairs: Sequence[Pair], rows: Sequence[Sequence[int]], layout: PairLayout
) -> Rows:
  """The pairs of each row, as arrays."""
  C, B, T = layout.microbatches, layout.rows, layout.tokens
  tokens = np.zeros((C * B, T), np.int32)
  segment, counts = np.zeros_like(tokens), np.zeros(tokens.shape, bool)
  for i, row in enumerate(rows):
    at = 0
    for number, pair in enumerate(row, 1):
      prompt, response = pairs[pair]
      middle, end = at + len(prompt), at + len(prompt) + len(response)
      tokens[i, at:end] = [*prompt, *response]
      segment[i, at:end] = number
      counts[i, middle:end] = True
      at = end
  fold = lambda x: x.reshape(C, B, T)
  used = np.array(-(-len(rows) // B), np.int32)
  return Rows(fold(tokens), fold(segment), fold(counts), used)


def check(
  pairs: Sequence[Pair], layout: PairLayout, names: Sequence[str]
) -> None:
  """Raises ValueError for a pair without prompt or response, or too long."""
  for pair, name in zip(pairs, names, strict=True):
    for what, ids in zip(("prompt", "response"), pair, strict=True):
      if not ids:
        raise ValueError(f"{name}: the {what} has no tokens")
    if (length := len(pair.prompt) + len(pair.response)) > layout.tokens:
      raise ValueError(
        f"{name}: prompt and response have {length:,} tokens, more than the "
        f"{layout.tokens:,} of a row; shorten them or use longer rows"
      )


class Look(NamedTuple):
  """How training stands after some updates."""

  update: int  # 0: before the first
  loss: float | None  # nats per token of this update's pairs; None before any
  heldout: float | None  # of the held-out pairs, if there are any
  epochs: float  # of the pairs, that were seen
  tokens: int  # response tokens that were learned from


def train(
  params: PyTree,
  pairs: Sequence[Pair],
  *,
  packed_logp: PackedLogp,
  tx: optax.GradientTransformation,
  layout: PairLayout,
  count: int,
  seed: int,
  look: Callable[[Look], None],
  heldout: Sequence[Pair] = (),
  mesh: Mesh | None = None,
) -> PyTree:
  """Minimises the negative log-likelihood of the responses, in `count` updates.

  The loss is divided by the tokens of the whole update: neither microbatches
  nor packing change it. `params` are donated. There is at least one pair, none
  longer than a row; `heldout` pairs are only measured. `look` receives the
  losses before the first update, after the last, and some ten times between
  them. Raises FloatingPointError if a loss is not finite.
  """
  place = lambda rows: rows if mesh is None else placed(rows, mesh)
  home = None  # of the moments: where their parameters lie
  if mesh is not None:
    shapes = jax.eval_shape(tx.init, params)
    home = sharding.state_shardings(shapes, params, mesh)
  state = params, jax.jit(tx.init, out_shardings=home)(params)
  del params
  sums = jax.jit(functools.partial(_sums, packed_logp=packed_logp))
  learned = seen = 0

  def mean_loss() -> float:
    """Nats per response token over all pairs held out."""
    total = count = 0.0
    for rows in epoch(_lengths(heldout), layout, range(len(heldout))):
      more = sums(state[0], place(pack(heldout, rows, layout)))
      total, count = total + float(more[0]), count + float(more[1])
    return total / count

  def report(number: int, loss: float | None) -> None:
    measured = mean_loss() if heldout else None
    for what, x in (("loss", loss), ("held-out loss", measured)):
      if x is not None and not np.isfinite(x):
        raise FloatingPointError(
          f"update {number}: the {what} is {x}; lower the learning rate"
        )
    look(Look(number, loss, measured, seen / len(pairs), learned))

  report(0, None)
  plan = itertools.islice(updates(pairs, layout, seed=seed), count)
  for number, (_, rows) in enumerate(plan, 1):
    batch = pack(pairs, rows, layout)
    learned += int(batch.counts.sum())
    seen += sum(map(len, rows))
    *state, loss = _update(*state, place(batch), packed_logp=packed_logp, tx=tx)
    if number % max(count // _LOOKS, 1) == 0 or number == count:
      report(number, float(loss))
  return state[0]


def _loss(
  params: PyTree, rows: Rows, i: Array, packed_logp: PackedLogp
) -> Float[Array, ""]:
  """Of one microbatch, not divided."""
  logp = packed_logp(params, rows.tokens[i], rows.segment[i])
  return -jnp.sum(logp, where=rows.counts[i])


def _sums(
  params: PyTree, rows: Rows, *, packed_logp: PackedLogp
) -> tuple[Float[Array, ""], Float[Array, ""]]:
  """Summed loss of all microbatches, and its tokens."""
  add = lambda i, total: total + _loss(params, rows, i, packed_logp)
  total = jax.lax.fori_loop(0, rows.used, add, jnp.zeros(()))
  return total, jnp.sum(rows.counts, dtype=jnp.float32)


@functools.partial(
  jax.jit,
  static_argnames=("packed_logp", "tx"),
  donate_argnames=("params", "opt"),
)
def _update(
  params: PyTree,
  opt: PyTree,
  rows: Rows,
  *,
  packed_logp: PackedLogp,
  tx: optax.GradientTransformation,
) -> tuple[PyTree, PyTree, Float[Array, ""]]:
  def add(i, sums):
    loss, grads = jax.value_and_grad(_loss)(params, rows, i, packed_logp)
    return jax.tree.map(jnp.add, sums, (loss, grads))

  zeros = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), params)
  sums = jax.lax.fori_loop(0, rows.used, add, (jnp.zeros(()), zeros))
  count = jnp.sum(rows.counts, dtype=jnp.float32)
  loss, grads = jax.tree.map(lambda x: x / count, sums)
  changes, opt = tx.update(grads, opt, params)
  return optax.apply_updates(params, changes), opt, loss
