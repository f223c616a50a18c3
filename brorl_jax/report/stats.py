"""Intervals and tests for what is measured on many prompts, in float64."""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

_Z95 = 1.959964  # the normal distribution holds 95 % within +- this


def mean_interval(values: Float[np.ndarray, " n"]) -> tuple[float, float]:
  """Mean and half-width of its 95 % interval over independent values.

    half = 1.96 * sqrt(sum((v - mean)^2) / (n - 1) / n)

  Give one value per prompt (its mean over samples), not one per sample: samples
  of a prompt are not independent. For a gain give the differences. Raises
  ValueError for fewer than two values.
  """
  values, n = values.astype(np.float64), len(values)
  if n < 2:
    raise ValueError(f"an interval needs at least 2 values, not {n}")
  return float(values.mean()), float(_Z95 * values.std(ddof=1) / math.sqrt(n))


class PairedT(NamedTuple):
  """Whether a is larger than b, measured on the same things."""

  difference: float  # mean of a - b
  standard_error: float  # of the difference
  t: float
  p_one_sided: float  # small if a is larger
  p_two_sided: float
  dof: int
  effect_size: float  # Cohen's d_z: difference / std of a - b


def paired_t(
  a: Float[np.ndarray, " n"],
  b: Float[np.ndarray, " n"],
  *,
  cluster: Int[np.ndarray, " n"] | None = None,
) -> PairedT:
  """Student's test of mean(a - b) = 0, plain or robust to clusters.

    d_i = a_i - b_i,  e_i = d_i - mean(d),  t = mean(d) / se
    plain:     se^2 = sum_i e_i^2 / (n - 1) / n,                dof = n - 1
    clustered: se^2 = G / (G - 1) * sum_g (sum_{i in g} e_i)^2 / n^2,
               dof = G - 1
    p (two sides) = I_x(dof / 2, 1 / 2),  x = dof / (dof + t^2)

  The clustered form (CR1, of a regression on a constant; Cameron, Miller 2015,
  doi:10.3368/jhr.50.2.317, section II) lets prompts of one task rise and fall
  together; with every pair as a cluster it is the plain one. It needs some tens
  of clusters to be exact. Differences that are all equal have no spread: t is
  then 0 if they are 0, and infinite otherwise.

  `a` and `b` have one value per prompt, such as its mean over samples, in the
  same order; equal numbers in `cluster` are one cluster. Raises ValueError for
  fewer than two pairs or clusters.
  """
  import scipy.special  # in .2 s, of which a run in training has no need

  n = len(a)
  if not n == len(b) >= 2:
    raise ValueError(f"a test needs at least 2 pairs, not {n} and {len(b)}")
  d = np.subtract(a, b, dtype=np.float64)
  difference, spread = float(d.mean()), float(d.std(ddof=1))
  error, dof = spread / math.sqrt(n), n - 1
  if cluster is not None:
    _, of = np.unique(cluster, return_inverse=True)
    sums = np.bincount(of, d - difference)
    dof = len(sums) - 1
    if dof < 1:
      raise ValueError("a test needs at least 2 clusters, not 1")
    error = math.sqrt((dof + 1) / dof * np.sum(sums**2)) / n
  t = _ratio(difference, error)
  return PairedT(
    difference=difference,
    standard_error=error,
    t=t,
    p_one_sided=float(scipy.special.stdtr(dof, -t)),
    p_two_sided=float(2 * scipy.special.stdtr(dof, -abs(t))),
    dof=dof,
    effect_size=_ratio(difference, spread),
  )


def _ratio(x: float, y: float) -> float:
  """x / y; 0 / 0 = 0, and x / 0 is infinite."""
  if x == 0:
    return 0.0
  return x / y if y else math.copysign(math.inf, x)


def coefficient(
  kind: str, p: Float[np.ndarray, " P"], n: int | float
) -> Float[np.ndarray, " P"]:
  """How much a prompt counts in an expected update, by its pass rate p.

    c(p) = E[1/N sum of A[p,n] over right rollouts n]

    maxrl     1 - p - (1 - p)^N           grows with N up to 1 - p
    grpo      E sqrt(K (N - K)) / N       about p sqrt(N) below 1 / N
    others    p (1 - p)                   N decides only the noise

  Those of the others have a factor, the same for all prompts. `n` may be inf.
  """
  if kind == "maxrl":
    return 1.0 - p - (1.0 - p) ** n
  if kind != "grpo" or n == np.inf:
    return np.sqrt(p * (1.0 - p)) if kind == "grpo" else p * (1.0 - p)
  k, p = np.arange(1.0, n + 1), np.clip(p, 1e-12, 1.0 - 1e-12)[:, None]
  ways = np.cumsum(np.log((n - k + 1) / k))
  chance = np.exp(ways + k * np.log(p) + (n - k) * np.log1p(-p))
  return chance @ np.sqrt(k * (n - k)) / n


def protecting_n(
  kind: str, right: Int[np.ndarray, " P"], drawn: Int[np.ndarray, " P"]
) -> int | None:
  """The smallest power of 2 with which nine prompts in ten have half of their
  coefficient with unlimited N; None if it is above what was drawn.

  `right` of `drawn` rollouts of each prompt were right. A prompt with none may
  need any N.
  """
  p = right / drawn
  half = coefficient(kind, p, np.inf) / 2.0
  some = lambda n: (p > 0.0) & (coefficient(kind, p, n) >= half)
  tried = (2**i for i in range(1, int(drawn.max()).bit_length()))
  return next((n for n in tried if some(n).mean() >= 0.9), None)
