"""Intervals and tests for what is measured on many prompts."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import betainc, erfc
from jaxtyping import Array, Float, Int, Key

from brorl_jax.rl import shapes

_Z95 = 1.959964  # the normal distribution holds 95 % within +- this
# Numbers that are drawn at a time: 4 MB of each of a few arrays.
_AT_ONCE = 2**20


def mean_interval(
  values: Float[Array, " n"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
  """Mean and half-width of its 95 % interval over independent values.

    half = 1.96 * sqrt(sum((v - mean)^2) / (n - 1) / n)

  Give one value per prompt (its mean over samples), not one per sample:
  samples of a prompt are not independent. For a gain give the differences.

  Raises:
    ValueError: Fewer than two values.
  """
  shapes.check(values=(values, "N"))
  n = values.shape[0]
  if n < 2:
    raise ValueError(f"an interval needs at least 2 values, not {n}")
  return jnp.mean(values), _Z95 * jnp.std(values, ddof=1) / jnp.sqrt(n)


class PairedT(NamedTuple):
  """Whether a is larger than b, measured on the same things."""

  difference: Float[Array, ""]  # mean of a - b
  standard_error: Float[Array, ""]  # of the difference
  t: Float[Array, ""]
  p_one_sided: Float[Array, ""]  # small if a is larger
  p_two_sided: Float[Array, ""]
  dof: int
  effect_size: Float[Array, ""]  # Cohen's d_z: difference / std of a - b
  n: int  # pairs
  clusters: int  # independent groups of them; n if each pair is one


def paired_t(
  a: Float[Array, " n"],
  b: Float[Array, " n"],
  *,
  cluster: Int[Array, " n"] | None = None,
) -> PairedT:
  """Student's test of mean(a - b) = 0, plain or robust to clusters.

    d_i = a_i - b_i,  e_i = d_i - mean(d),  t = mean(d) / se
    plain:     se^2 = sum_i e_i^2 / (n - 1) / n,                dof = n - 1
    clustered: se^2 = G / (G - 1) * sum_g (sum_{i in g} e_i)^2 / n^2,
               dof = G - 1
    p (two sides) = I_x(dof / 2, 1 / 2),  x = dof / (dof + t^2)

  The clustered form (CR1, of a regression on a constant) lets prompts of one
  task rise and fall together; with every pair a cluster of its own it is the
  plain one. It needs some tens of clusters to be exact. Differences that are
  all equal have no spread: t is then 0 if they are 0, and infinite otherwise.

  Args:
    a: One value per prompt, such as its mean over samples.
    b: The same prompts in the same order.
    cluster: Equal numbers for prompts of one cluster; not under jit, because
      how many there are is counted.

  Raises:
    ValueError: Fewer than two pairs or clusters.

  References:
    Student 1908, doi:10.1093/biomet/6.1.1.
    Cameron, Miller 2015, doi:10.3368/jhr.50.2.317, section II.
  """
  shapes.check(a=(a, "N"), b=(b, "N"), cluster=(cluster, "N"))
  n = a.shape[0]
  if n < 2:
    raise ValueError(f"a test needs at least 2 pairs, not {n}")
  d = a - b
  difference = jnp.mean(d)
  spread, clusters = jnp.std(d, ddof=1), n
  if cluster is None:
    error = spread / jnp.sqrt(n)
  else:
    _, of = jnp.unique(cluster, return_inverse=True)
    clusters = int(of.max()) + 1
    if clusters < 2:
      raise ValueError(f"a test needs at least 2 clusters, not {clusters}")
    sums = jax.ops.segment_sum(d - difference, of, num_segments=clusters)
    error = jnp.sqrt(clusters / (clusters - 1) * jnp.sum(sums**2)) / n
  dof = clusters - 1
  t = _ratio(difference, error)
  two_sided = _outside(t, dof)
  # Each end of [0, 1] from its own side, or the smaller one would be rounded.
  upper = jnp.where(t > 0, two_sided / 2, 1.0 - two_sided / 2)
  return PairedT(
    difference=difference,
    standard_error=error,
    t=t,
    p_one_sided=upper,
    p_two_sided=two_sided,
    dof=dof,
    effect_size=_ratio(difference, spread),
    n=n,
    clusters=clusters,
  )


def _outside(t: Float[Array, ""], dof: int) -> Float[Array, ""]:
  """Probability that Student's t is farther from 0, to 1e-4 of it in float32.

  In float32 the incomplete beta function is off by 2e-3 with 10,000 degrees of
  freedom and by 4 % with 100,000. With many of them t is made into z of the
  normal distribution (G. W. Hill, CACM 13 (1970), algorithm 395, two terms):

    z = u + (u^3 + 3 u) / (48 a^2),  u^2 = a log(1 + t^2 / dof),  a = dof - 1/2
  """
  if dof < 100:
    return betainc(dof / 2, 0.5, 1.0 / (1.0 + t**2 / dof))
  a = dof - 0.5
  u = jnp.sqrt(a * jnp.log1p(t**2 / dof))
  z = u + (u**3 + 3.0 * u) / (48.0 * a**2)
  return erfc(z / 2.0**0.5)


def _ratio(x: Float[Array, ""], y: Float[Array, ""]) -> Float[Array, ""]:
  """x / y, and 0 / 0 = 0."""
  return jnp.where(x == 0, 0.0, x / jnp.where(x == 0, 1.0, y))


@functools.partial(jax.jit, static_argnames=("count", "draws"))
def bootstrap_means(
  key: Key[Array, ""],
  values: Float[Array, " n"],
  groups: Int[Array, " n"],
  *,
  count: int,
  draws: int = 2000,
) -> Float[Array, "draws G"]:
  """The mean of each group when its values are drawn anew, with replacement.

    m[d,g] = mean of v[i], i drawn size(g) times from the members of g

  What is averaged over groups is averaged over a row; `percentile_interval`
  of that is its interval, for the same groups and other members: prompts are
  a sample, tasks are not.

  Args:
    key: Of the draws.
    values: One per prompt, such as its mean over samples.
    groups: Of each value, from 0 to count - 1, such as its task.
    count: Groups, none of which is empty.
    draws: How often all are drawn anew.

  References:
    Efron 1979, doi:10.1214/aos/1176344552; stratified: Davison, Hinkley 1997,
    section 3.2.
  """
  shapes.check(values=(values, "N"), groups=(groups, "N"))
  n = values.shape[0]
  order = jnp.argsort(groups)
  values, groups = values[order], groups[order]
  size = jnp.bincount(groups, length=count)
  first = (jnp.cumsum(size) - size)[groups]
  last = size[groups] - 1

  def one(key: Key[Array, ""]) -> Float[Array, " G"]:
    u = jax.random.uniform(key, (n,))
    # In float32 u times the size may round up to it.
    place = jnp.minimum((u * size[groups]).astype(jnp.int32), last)
    sums = jax.ops.segment_sum(
      values[first + place], groups, num_segments=count
    )
    return sums / size

  keys = jax.random.split(key, draws)
  return jax.lax.map(one, keys, batch_size=min(max(_AT_ONCE // n, 1), draws))


def percentile_interval(
  draws: Float[Array, " draws"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
  """Ends of the 95 % interval of something that was drawn many times.

  2.5th and 97.5th percentile, linear between neighbours
  """
  shapes.check(draws=(draws, "D"))
  low, high = jnp.percentile(draws, jnp.array([2.5, 97.5]))
  return low, high
