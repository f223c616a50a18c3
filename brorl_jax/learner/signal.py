"""Signal and noise of a step's gradient, from blocks of its prompts.

With B blocks of prompts, sums S_b of their gradients and C tokens together, the
gradient is the mean of g_b = B S_b / C. If blocks were drawn independently with
mean G,

  |G|^2    is estimated without bias by the mean of g_b . g_c over b != c
           = (B^2 |g|^2 - sum_b |g_b|^2) / (B (B - 1)),  g = mean_b g_b
  noise^2  = E|g - G|^2, by |g|^2 minus that

For B = 2 they are g_1 . g_2 and |g_1 - g_2|^2 / 4. Only sums are kept, so that
there are never more than two gradients. With T_b = g_1 + ... + g_b the products
d_b = g_b . T_(b-1), of b - 1 pairs each, are uncorrelated without a signal.
What noise alone gives has then a standard deviation of about
sqrt(sum_b (d_b - (b - 1) m)^2) over the number of pairs, m their mean. It tells
a signal from none, with 8 blocks or more. Where both are as large, the standard
error of m is up to twice that.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import jax
from jaxtyping import PyTree

from brorl_jax.learner import update
from brorl_jax.learner.objective import Objective, ResponseLogp
from brorl_jax.types import Batch


class Signal(NamedTuple):
  """Of one gradient."""

  norm: float  # |g|
  signal: float  # estimate of |G|^2; may be below 0
  error: float  # of that, from noise alone
  noise: float  # estimate of E|g - G|^2

  @property
  def ratio(self) -> float | None:
    """Signal to noise, of powers; None where there is no gradient."""
    return self.signal / self.noise if self.noise > 0.0 else None

  @property
  def ratio_error(self) -> float | None:
    """What of it noise alone may give."""
    return self.error / self.noise if self.noise > 0.0 else None


_dot = jax.jit(update.dot)
_add = jax.jit(
  lambda a, b: jax.tree.map(lambda x, y: x + y, a, b), donate_argnums=0
)
_divide = jax.jit(
  lambda a, by: jax.tree.map(lambda x: x / by, a), donate_argnums=0
)


def of_blocks(
  params: PyTree,
  blocks: Iterable[Iterable[Batch]],
  *,
  response_logp: ResponseLogp,
  objective: Objective,
) -> tuple[PyTree, Signal]:
  """The gradient of all blocks together, and its signal and noise.

  Args:
    params: Where it is taken.
    blocks: At least two; batches of each, from `packing.pack`, none if nothing
      of it is trained on.
    response_logp: The policy.
    objective: Constants of the loss.
  """
  total, squares, tokens = None, 0.0, 0.0
  products: list[float] = []  # S_b . (S_1 + ... + S_(b-1))
  for batches in blocks:
    sums, stats = update.summed(
      params, batches, response_logp=response_logp, objective=objective
    )
    squares += float(_dot(sums, sums))
    tokens += float(stats.entropy.count)
    products.append(0.0 if total is None else float(_dot(total, sums)))
    total = sums if total is None else _add(total, sums)
  B, unit = len(products), max(tokens, 1.0) ** 2
  gradient = _divide(total, max(tokens, 1.0))
  power = max(squares + 2.0 * sum(products), 0.0) / unit  # |g|^2
  mean = sum(products) / (B * (B - 1) / 2)  # of S_b . S_c
  off = [d - b * mean for b, d in enumerate(products)]
  error = math.hypot(*off) / (B * (B - 1) / 2)
  of = lambda x: B**2 * x / unit  # of g_b . g_c
  found = Signal(power**0.5, of(mean), of(error), power - of(mean))
  return gradient, found


def cosine(a: PyTree, b: PyTree) -> float | None:
  """Of the angle between two gradients; None if one is 0."""
  norms = float(_dot(a, a)) * float(_dot(b, b))
  return float(_dot(a, b)) / norms**0.5 if norms > 0.0 else None
