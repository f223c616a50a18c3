"""Supervised training on prompts with responses, packed side by side in rows.

  loss = - sum over response tokens of log pi(token | what precedes it) / count

Prompt tokens are read and not learned. The count is that of the whole update,
so that neither microbatches nor packing change the loss: an update of so many
pairs has the same gradient however they lie in their rows.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, PyTree

from brorl_jax.learner.pair_packing import (
  Layout,
  Pair,
  Rows,
  epoch,
  pack,
  updates,
)
from brorl_jax.many import meshes
from brorl_jax.model import sharding

# (params, tokens [B,T], segment [B,T]) -> log-probabilities [B,T]
PackedLogp = Callable[[PyTree, Array, Array], Array]
_LOOKS = 10  # times that losses are measured, evenly over the updates


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
  layout: Layout,
  count: int,
  seed: int,
  look: Callable[[Look], None],
  heldout: Sequence[Pair] = (),
  mesh: Mesh | None = None,
) -> PyTree:
  """Minimises the negative log-likelihood of the responses.

  Args:
    params: To begin with; donated.
    pairs: At least one, none longer than a row.
    count: Updates.
    seed: Decides the order of the pairs.
    look: Receives the losses before the first update, after the last, and some
      ten times between them.
    heldout: Pairs that are only measured.

  Returns:
    The trained parameters.

  Raises:
    FloatingPointError: A loss is not finite.
  """
  place = functools.partial(_placed, mesh=mesh)
  sums = jax.jit(functools.partial(_sums, packed_logp=packed_logp))
  state = params, _moments(tx, params, mesh)
  del params
  learned, seen = 0, 0

  def report(number: int, loss: Array | None) -> None:
    measured = None
    if heldout:
      measured = mean_loss(state[0], heldout, layout, sums=sums, place=place)
    batch_loss = None if loss is None else float(loss)
    for what, x in (("loss", batch_loss), ("held-out loss", measured)):
      if x is not None and not np.isfinite(x):
        raise FloatingPointError(
          f"update {number}: the {what} is {x}; lower the learning rate"
        )
    look(Look(number, batch_loss, measured, seen / len(pairs), learned))

  report(0, None)
  plan = itertools.islice(updates(pairs, layout, seed=seed), count)
  for number, (_, rows) in enumerate(plan, 1):
    batch = pack(pairs, rows, layout)
    learned += int(batch.counts.sum())
    seen += sum(map(len, rows))
    *state, loss = _update(*state, place(batch), packed_logp=packed_logp, tx=tx)
    if number % max(count // _LOOKS, 1) == 0 or number == count:
      report(number, loss)
  return state[0]


def mean_loss(
  params: PyTree,
  pairs: Sequence[Pair],
  layout: Layout,
  *,
  sums: Callable[[PyTree, Rows], tuple[Array, Array]],
  place: Callable[[Rows], Rows],
) -> float:
  """Nats per response token over all pairs."""
  lengths = [len(x.prompt) + len(x.response) for x in pairs]
  total = count = 0.0
  for rows in epoch(lengths, layout, range(len(pairs))):
    more = sums(params, place(pack(pairs, rows, layout)))
    total, count = total + float(more[0]), count + float(more[1])
  return total / count


def _placed(rows: Rows, *, mesh: Mesh | None) -> Rows:
  if mesh is None:
    return rows
  spread = lambda x: PartitionSpec(*(None, meshes.rows(mesh))[: x.ndim])
  return jax.tree.map(lambda x: sharding.to_mesh(mesh, spread(x), x), rows)


def _moments(
  tx: optax.GradientTransformation, params: PyTree, mesh: Mesh | None
) -> PyTree:
  """The optimizer's, where their parameters lie."""
  places = None
  if mesh is not None:
    abstract = jax.eval_shape(tx.init, params)
    places = sharding.state_shardings(abstract, params, mesh)
  return jax.jit(tx.init, out_shardings=places)(params)


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
