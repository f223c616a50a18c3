"""The paper's token simulator: many steps of one softmax, for one N.

A vocabulary of V tokens of which some are correct, reward +1 on these and -1
elsewhere. A step draws N tokens, centres their rewards, and moves the logits by
an optimizer. The change of the correct mass depends on N, and just as much on
the optimizer and the surrogate. So all three are arguments without a default.

Source: Hu et al. 2025 (BroRL), arXiv:2510.01180, section 4.1 and Figure 3.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from brorl_jax.rl import arrays

# Block of the two-level inverse CDF; a power of 2 for the binary search.
_BLOCK = 512


class Trajectory(NamedTuple):
  """What Figure 3 shows, before the first step and after each: [steps + 1]."""

  correct_mass: Float[Array, "*seeds steps"]  # Q_pos
  improved_fraction: Float[Array, "*seeds steps"]  # correct tokens above start
  worst_drop: Float[Array, "*seeds steps"]  # min of p - p_start over correct


# (probs, summed reward of each token's draws, n) -> gradient of the surrogate
Surrogate = Callable[
  [Float[Array, " V"], Float[Array, " V"], int], Float[Array, " V"]
]


def weighted_by_probability(
  probs: Float[Array, " V"], reward: Float[Array, " V"], n: int
) -> Float[Array, " V"]:
  """Gradient in the logits of L = -(1/N) sum over draws j of r_j p[y_j].

    dL/dz = -(1/N) p (w - sum of w p),   w[i] = sum of r_j over draws of i

  The paper's surrogate. Its p weights a draw by its probability once more, so
  that it is not an unbiased estimate of the policy gradient.

  >>> probs, reward = jnp.array([0.75, 0.25]), jnp.array([2.0, 0.0])
  >>> weighted_by_probability(probs, reward, 2).tolist()
  [-0.1875, 0.1875]
  """
  arrays.check(probs=(probs, "V"), reward=(reward, "V"))
  return -probs * (reward - jnp.sum(reward * probs)) / n


def log_probability(
  probs: Float[Array, " V"], reward: Float[Array, " V"], n: int
) -> Float[Array, " V"]:
  """Gradient in the logits of L = -(1/N) sum over draws j of r_j log p[y_j].

    dL/dz = -(1/N) (w - p sum of w)

  REINFORCE. The ratio p / p_old has this same gradient at p = p_old, where the
  simulator, which makes one update per draw, always stands.

  >>> probs, reward = jnp.array([0.75, 0.25]), jnp.array([2.0, 0.0])
  >>> log_probability(probs, reward, 2).tolist()
  [-0.25, 0.25]
  """
  arrays.check(probs=(probs, "V"), reward=(reward, "V"))
  return -(reward - jnp.sum(reward) * probs) / n


ratio = log_probability


def _require(settings: object, name: str, good: bool) -> None:
  value = getattr(settings, name)
  if not (good and math.isfinite(value)):
    raise ValueError(f"{name} = {value} is out of range")


@dataclasses.dataclass(frozen=True)
class AdamW:
  """AdamW with decoupled decay; eps decides what tiny gradients do.

  >>> adam = AdamW(lr=0.5, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.0)
  >>> logits, grad, one = jnp.zeros(2), jnp.array([1e-3, -8.0]), jnp.ones(())
  >>> adam.step(logits, grad, adam.init(logits), one)[0].round(2).tolist()
  [-0.5, 0.5]
  """

  lr: float
  b1: float
  b2: float
  eps: float
  weight_decay: float

  def __post_init__(self):
    _require(self, "lr", self.lr > 0.0)
    _require(self, "b1", 0.0 <= self.b1 < 1.0)
    _require(self, "b2", 0.0 <= self.b2 < 1.0)
    _require(self, "eps", self.eps > 0.0)
    _require(self, "weight_decay", self.weight_decay >= 0.0)

  def init(self, logits: Float[Array, " V"]) -> PyTree:
    return jnp.zeros_like(logits), jnp.zeros_like(logits)

  def step(self, logits, grad, state, count):
    """New logits and moments; updates count from 1."""
    mean, square = state
    mean = self.b1 * mean + (1.0 - self.b1) * grad
    square = self.b2 * square + (1.0 - self.b2) * grad**2
    # Powers in float32 of a float32 count would lose digits late in the run.
    steady = lambda x, b: x / -jnp.expm1(count * math.log(b)) if b else x
    scale = jnp.sqrt(steady(square, self.b2)) + self.eps
    move = steady(mean, self.b1) / scale
    logits = logits * (1.0 - self.lr * self.weight_decay)
    return logits - self.lr * move, (mean, square)


@dataclasses.dataclass(frozen=True)
class Sgd:
  """Plain gradient descent: the control that shows what AdamW adds.

  >>> Sgd(lr=0.5).step(jnp.zeros(2), jnp.array([1.0, -8.0]), (), 1)[0].tolist()
  [-0.5, 4.0]
  """

  lr: float

  def __post_init__(self):
    _require(self, "lr", self.lr > 0.0)

  def init(self, logits: Float[Array, " V"]) -> PyTree:
    return ()

  def step(self, logits, grad, state, count):
    return logits - self.lr * grad, state


def initial_logits(
  *, vocab: int, correct: int, seeding: float, anchor: float | None
) -> tuple[Float[Array, " V"], Bool[Array, " V"]]:
  """Logits at the start, and which tokens are correct, see `simulate`.

  >>> logits, _ = initial_logits(vocab=4, correct=2, seeding=1.0, anchor=3.0)
  >>> logits.tolist()
  [3.0, 1.0, 0.0, 0.0]
  """
  if not 1 <= correct < vocab:
    raise ValueError(f"correct = {correct} must be 1 to {vocab - 1}")
  for name, value in (("seeding", seeding), ("anchor", anchor)):
    if value is not None and not math.isfinite(value):
      raise ValueError(f"{name} = {value} must be finite")
  is_correct = jnp.arange(vocab) < correct
  logits = jnp.where(is_correct, seeding, 0.0)  # float64 when x64 is on
  if anchor is not None:
    logits = logits.at[0].set(anchor)
  return logits, is_correct


def draw_counts(
  key: Key[Array, ""], probs: Float[Array, " V"], n: int
) -> Int[Array, " V"]:
  """How often each token occurs among N independent draws.

  Inverse CDF in two levels, block and token, with a uniform for each: a sum
  over 128,000 tokens in float32 may be off by a third of a rare token's
  probability, a sum over one block is not. Memory grows with N + V, not N V.

  >>> counts = draw_counts(jax.random.key(0), jnp.array([0.5, 0.0, 0.5]), 8)
  >>> int(counts.sum()), int(counts[1])
  (8, 0)
  """
  arrays.check(probs=(probs, "V"))
  blocks = -(-probs.size // _BLOCK)
  table = jnp.pad(probs, (0, blocks * _BLOCK - probs.size))

  def sums(x):
    # One after the other: those of `jnp.cumsum` fall in places by rounding, and
    # rise at tokens of probability 0, which would then be drawn.
    add = lambda total, y: (total + y,) * 2
    return jax.lax.scan(add, jnp.zeros_like(x[0]), x)[1]

  inside = sums(table.reshape(blocks, _BLOCK).T).T
  outside = sums(inside[:, -1])
  u_block, u_token = jax.random.uniform(key, (2, n))
  block = jnp.searchsorted(outside, u_block * outside[-1], side="right")
  block = jnp.minimum(block, blocks - 1)
  goal = u_token * inside[block, -1]

  def halve(i, low):
    # The token is the number of cumulative sums that are at most `goal`.
    step = _BLOCK >> (i + 1)
    return jnp.where(inside[block, low + step - 1] <= goal, low + step, low)

  low, rounds = jnp.zeros(n, jnp.int32), _BLOCK.bit_length() - 1
  token = jax.lax.fori_loop(0, rounds, halve, low)
  counts = jnp.bincount(block * _BLOCK + token, length=table.size)
  return counts[: probs.size].astype(jnp.int32)


# What programs are compiled for: all but the key.
_STATIC = "n steps vocab correct seeding anchor surrogate optimizer centred"


@functools.partial(jax.jit, static_argnames=_STATIC.split())
def simulate(
  key: Key[Array, ""],
  *,
  n: int,
  steps: int,
  vocab: int,
  correct: int,
  seeding: float,
  anchor: float | None,
  surrogate: Surrogate,
  optimizer: AdamW | Sgd,
  centred: bool,
) -> Trajectory:
  """Runs the simulator for one N and one seed; vmap over keys for more.

  A step has `n` draws. The first `correct` of `vocab` tokens, in [1, V - 1],
  have reward 1, the others -1; if `centred`, the mean reward of the draws is
  subtracted. Logits are 0 at the start, `seeding` for correct tokens and
  `anchor` (None: as the others) for token 0, a correct one. `surrogate` is
  `weighted_by_probability`, `ratio` or `log_probability`. Raises ValueError if
  a number is out of range.

  >>> loss, sgd = weighted_by_probability, Sgd(lr=4.0)
  >>> one = dict(surrogate=loss, optimizer=sgd, centred=True, n=64, steps=20)
  >>> start = dict(vocab=8, correct=2, seeding=0.0, anchor=None)
  >>> correct_mass = simulate(jax.random.key(0), **one, **start).correct_mass
  >>> len(correct_mass), float(correct_mass[0]), bool(correct_mass[-1] > 0.5)
  (21, 0.25, True)
  """
  for name, value in (("n", n), ("steps", steps)):
    if value < 1:
      raise ValueError(f"{name} = {value} must be at least 1")
  start, is_correct = initial_logits(
    vocab=vocab, correct=correct, seeding=seeding, anchor=anchor
  )
  p_start = jax.nn.softmax(start)
  reward = jnp.where(is_correct, 1.0, -1.0)

  def observe(probs) -> Trajectory:
    change = (probs - p_start)[:correct]
    return Trajectory(
      correct_mass=jnp.sum(probs[:correct]),
      improved_fraction=jnp.mean((change > 0.0).astype(jnp.float32)),
      worst_drop=jnp.min(change),
    )

  def step(carry, count):
    logits, state = carry
    probs = jax.nn.softmax(logits)
    counts = draw_counts(jax.random.fold_in(key, count), probs, n)
    mean = jnp.sum(counts * reward) / n if centred else 0.0
    grad = surrogate(probs, counts * (reward - mean), n)
    count = count.astype(logits.dtype)
    logits, state = optimizer.step(logits, grad, state, count)
    return (logits, state), observe(jax.nn.softmax(logits))

  carry = (start, optimizer.init(start))
  _, after = jax.lax.scan(step, carry, jnp.arange(1, steps + 1))
  join = lambda first, rest: jnp.concatenate([first[None], rest])
  return jax.tree.map(join, observe(p_start), after)
