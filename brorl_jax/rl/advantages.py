"""From the rewards of N rollouts of the same prompt to advantages.

REINFORCE++-baseline, as ProRL v2 and BroRL use it, is `center_by_group`
followed by one of the two whitenings:

    A'[p,n] = r[p,n] - mean_n r[p,:]
    A[p,n]  = (A'[p,n] - mean(A')) / std(A')

with mean and std over every rollout of the step that is trained on. The paper
writes the mean over trajectories; the released implementations weight each
trajectory by its number of tokens. Both are here, as two functions.

The others need no batch: each is the centered reward times a weight that the
counts of the group decide, K of N rollouts right. The weight is what a run
maximizes, because the expected gradient of prompt p is a multiple of grad p:

    A[p,n] = w(K, N) * A'[p,n]

    function            w(K, N)                       expected gradient
    center_by_group     1                             (N - 1) / N * grad p
    leave_one_out       N / (N - 1)                   grad p
    normalize_by_group  N / sqrt(K (N - K))           -> grad 2 asin(sqrt(p))
    maxrl               N / K                         -> grad log(p)
    pass_at_k           k N / (N - k) *
                        C(N-K-1, k-1) / C(N-1, k-1)   grad (1 - (1 - p)^k)

with -> for N much larger than 1 / p and 1 / (1 - p), = otherwise.

`ADVANTAGES` is the table of what a run may choose, and `KEEP` of which prompts
it trains on. For binary rewards all rules but "all" agree; for others the
papers do not say which one BroRL uses. They read raw rewards: a penalty on
length would make groups of wrong answers look informative.

Rollouts that do not count (`valid` is False; all count if it is None) get
exactly 0 everywhere, do not influence the others, and may hold anything.

Sources: Hu et al. 2025 (BroRL), arXiv:2510.01180, section 3; Hu et al. 2025
(REINFORCE++), arXiv:2501.03262, the baseline variant.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brorl_jax.rl import arrays

# Rewards are O(1): a smaller variance is rounding, and must not be divided by.
_MIN_VARIANCE = 1e-8

# Added to the standard deviation of a group. One right answer among 1024 has
# 0.03, which this changes by less than a part in 10^4.
_MIN_STD = 1e-6


def informative(
  reward: Float[Array, "P N"], valid: Bool[Array, "P N"] | None = None
) -> Bool[Array, " P"]:
  """Which prompts carry a gradient: their N raw rewards are not all equal.

  Raw: before any penalty on length. A group in which fewer than two rewards
  count is not informative. Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq.
  11 (dynamic sampling), for binary rewards; for others its strict reading.

  >>> informative(jnp.array([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])).tolist()
  [True, False]
  """
  arrays.check(reward=(reward, "PN"), valid=(valid, "PN"))
  high = jnp.max(reward, axis=1, initial=-jnp.inf, where=valid)
  low = jnp.min(reward, axis=1, initial=jnp.inf, where=valid)
  return high > low  # -inf > inf where none counts


def partly_solved(
  reward: Float[Array, "P N"], valid: Bool[Array, "P N"] | None = None
) -> Bool[Array, " P"]:
  """Which prompts some rollouts solve and some do not.

    0 < #{n: reward[p,n] >= 1} < number of rollouts

  >>> reward = jnp.array([[1.0, 0.2], [0.5, 0.2], [1.0, 1.5]])
  >>> partly_solved(reward).tolist(), informative(reward).tolist()
  ([True, False, False], [True, True, True])
  """
  arrays.check(reward=(reward, "PN"), valid=(valid, "PN"))
  solved = jnp.sum(reward >= 1.0, axis=1, where=valid)
  count = jnp.sum(jnp.ones_like(reward), axis=1, where=valid)
  return (solved > 0) & (solved < count)


# (raw reward [P,N], valid [P,N]) -> which prompts are trained on [P].
Rule = Callable[[Array, Array], Array]
KEEP: dict[str, Rule] = {
  "differ": informative,
  "solved": partly_solved,
  "all": lambda reward, valid: jnp.ones(len(reward), bool),
}
# A user's function, if it can stand in `KEEP`.
rule_from_user = functools.partial(arrays.from_user, takes=2, gives="bool[4]")


def center_by_group(
  reward: Float[Array, "P N"], valid: Bool[Array, "P N"] | None = None
) -> Float[Array, "P N"]:
  """Subtracts each prompt's mean reward: A'[p,n] = r[p,n] - mean_n r[p,:].

  A group of equal rewards becomes exactly 0, whatever the rounding of its mean.
  Without a whitening after it this is the plain advantage over the group mean.

  >>> center_by_group(jnp.array([[1.0, 0.0, 0.0, 0.0]])).tolist()
  [[0.75, -0.25, -0.25, -0.25]]
  """
  arrays.check(reward=(reward, "PN"), valid=(valid, "PN"))
  centered = reward - jnp.mean(reward, axis=1, keepdims=True, where=valid)
  return jnp.where(_carries(reward, valid), centered, 0.0)


def normalize_by_group(
  centered: Float[Array, "P N"], valid: Bool[Array, "P N"] | None = None
) -> Float[Array, "P N"]:
  """Divides by the standard deviation of each prompt's rewards, as GRPO does.

    A[p,n] = A'[p,n] / (std_n A'[p,:] + 1e-6)         A': `center_by_group`

  Every prompt gets the same scale, so that a single right answer among N weighs
  sqrt(N - 1). A group of equal rewards becomes exactly 0.
  Source: Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300, section 4.1.2. It
  does not say which deviation; this is the one that divides by N.

  >>> centered = center_by_group(jnp.array([[1.0, 0.0, 0.0, 0.0, 0.0]]))
  >>> normalize_by_group(centered).round(2).tolist()  # sqrt(5 - 1) for 1 of 5
  [[2.0, -0.5, -0.5, -0.5, -0.5]]
  """
  arrays.check(centered=(centered, "PN"), valid=(valid, "PN"))
  std = jnp.std(centered, axis=1, keepdims=True, where=valid)
  return jnp.where(_carries(centered, valid), centered / (std + _MIN_STD), 0.0)


def leave_one_out(
  reward: Float[Array, "P N"], valid: Bool[Array, "P N"] | None = None
) -> Float[Array, "P N"]:
  """Subtracts the mean reward of the other rollouts of the prompt, as RLOO.

    A[p,n] = r[p,n] - mean_{m != n} r[p,m]
           = N / (N - 1) * (r[p,n] - mean_m r[p,m])

  A baseline that does not depend on the rollout leaves the policy gradient
  unbiased. A group of equal rewards becomes exactly 0.
  Sources: Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for
  free!"; Ahmadian et al. 2024 (RLOO), arXiv:2402.14740, section 3.3.

  >>> leave_one_out(jnp.array([[1.0, 0.0, 0.0]])).round(2).tolist()
  [[1.0, -0.5, -0.5]]
  """
  centered = center_by_group(reward, valid)
  count = jnp.ones_like(reward).sum(axis=1, keepdims=True, where=valid)
  return centered * count / jnp.maximum(count - 1.0, 1.0)


def maxrl(
  reward: Float[Array, "P N"], valid: Bool[Array, "P N"] | None = None
) -> Float[Array, "P N"]:
  """Divides by the mean reward of the prompt: maximum likelihood, not mean.

    A[p,n] = (r[p,n] - mean r[p,:]) / mean r[p,:]

  For rewards 0 and 1 the expected gradient is that of log p instead of p, with
  the first N - 1 terms of its series in 1 - p. The only right rollout of a
  prompt gets N - 1, one of many right ones little. Rewards are at least 0: the
  mean is a scale. A group whose mean is 0 or less gets exactly 0, as one of
  equal rewards does.
  Source: Tajwar et al. 2026 (MaxRL), arXiv:2602.02710.

  >>> maxrl(jnp.array([[1.0, 0.0, 0.0, 0.0]])).tolist()
  [[3.0, -1.0, -1.0, -1.0]]
  """
  centered = center_by_group(reward, valid)
  mean = jnp.mean(reward, axis=1, keepdims=True, where=valid)
  scaled = centered / jnp.where(mean > 0.0, mean, 1.0)
  return jnp.where(mean > 0.0, scaled, 0.0)


def pass_at_k(
  reward: Float[Array, "P N"],
  valid: Bool[Array, "P N"] | None = None,
  *,
  k: int,
) -> Float[Array, "P N"]:
  """The gradient of pass@k: that one of k samples is right, instead of each.

    A[p,n] = k N / (N - k) * C(N - K - 1, k - 1) / C(N - 1, k - 1)
             * (r[p,n] - mean r[p,:])        with K = sum_n r[p,n] of N right

  The binomials are the chance that the k - 1 rollouts drawn beside a wrong one
  are wrong too. In expectation this is exactly grad (1 - (1 - p)^k), for any N
  > k. k = 1 is `leave_one_out`. A prompt with at most k - 1 wrong rollouts gets
  exactly 0: k samples solve it. Up to N / 4 it is a useful choice.

  Rewards other than 0 and 1 count with what they add to the sum, kept within
  [0, N]. A group with at most k valid rollouts gets 0.

  Sources: Walder and Karkhanis 2025 (PKPO), arXiv:2505.15201, the gradient
  whose baseline is the mean of the group; Chen et al. 2025 (Pass@k training),
  arXiv:2508.10751, which divides by the standard deviation.

  >>> reward = jnp.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
  >>> pass_at_k(reward, k=2)[:, 0].round(2).tolist()  # 3 of 4: two solve it
  [2.0, 0.0]
  """
  centered = center_by_group(reward, valid)
  n = jnp.ones_like(reward).sum(axis=1, keepdims=True, where=valid)  # [P, 1]
  right = jnp.sum(reward, axis=1, keepdims=True, where=valid)
  right = jnp.clip(right, 0.0, n)
  i = jnp.arange(1, k, dtype=jnp.float32)[None]  # [1, k-1], against [P, 1]
  wrong, others = jnp.maximum(n - right - i, 0.0), jnp.maximum(n - i, 1.0)
  alone = jnp.prod(wrong / others, axis=1, keepdims=True)
  # With at most k that count `alone` is 0, or the group is a single rollout.
  return k * n / jnp.maximum(n - k, 1.0) * alone * centered


def _carries(reward, valid):
  """Rollouts that count, of informative groups: the others get exactly 0."""
  kept = informative(reward, valid)[:, None]
  return kept if valid is None else kept & valid


def whiten_by_batch(
  advantage: Float[Array, "P N"],
  length: Float[Array, "P N"],
  where: Bool[Array, " P"],
) -> Float[Array, "P N"]:
  """Whitens over the tokens of all kept prompts.

    mean = sum(length * A') / sum(length)
    A    = (A' - mean) / sqrt(sum(length * (A' - mean)^2) / sum(length))

  Wrong answers that are longer than right ones make the mean negative, so that
  every rollout gets a shift that depends on the lengths of the batch.

  `advantage` is centered by group; `length` is in response tokens, the end
  token included, and 0 for a rollout that does not count. Such rollouts, and
  prompts that are not kept (`where` is False), get exactly 0. Over the tokens
  of kept prompts the result has mean 0 and variance 1.

  >>> advantage, length = jnp.array([[0.5, -0.5]]), jnp.array([[1.0, 4.0]])
  >>> white = whiten_by_batch(advantage, length, jnp.array([True]))
  >>> white.round(2).tolist()  # mean -0.3, variance 0.16
  [[2.0, -0.5]]
  """
  arrays.check(
    advantage=(advantage, "PN"), length=(length, "PN"), where=(where, "P")
  )
  counts = where[:, None] & (length > 0.0)
  weight = jnp.where(counts, length, 0.0)
  advantage = jnp.where(counts, advantage, 0.0)  # 0 * nan is nan
  total = jnp.maximum(jnp.sum(weight), 1.0)
  shifted = advantage - jnp.sum(weight * advantage) / total
  variance = jnp.sum(weight * shifted**2) / total
  scaled = shifted / jnp.sqrt(jnp.maximum(variance, _MIN_VARIANCE))
  return jnp.where(counts, scaled, 0.0)


def _over_tokens(reward, valid, length, weight=1.0):
  centered, kept = center_by_group(reward, valid), informative(reward, valid)
  counted = jnp.where(valid, length, 0.0) * weight
  return whiten_by_batch(centered, counted, kept)


def _over_trajectories(reward, valid, length, weight=1.0):
  # Every rollout counts once, as the paper writes it. The mean of rewards that
  # are centered by group is 0, so only the scale changes.
  return _over_tokens(reward, valid, jnp.ones_like(length), weight)


# (reward [P,N], valid [P,N], length [P,N]) -> advantage [P,N], over all groups
# that a step trains on; lengths in tokens, as float32. What does not count
# (valid is False) may hold anything and gets 0. 'pass_at_k' takes k beside.
Advantage = Callable[[Array, Array, Array], Array]
ADVANTAGES: dict[str, Callable[..., Array]] = {
  "tokens": _over_tokens,
  "trajectories": _over_trajectories,
  "grpo": lambda reward, valid, length: normalize_by_group(
    center_by_group(reward, valid), valid
  ),
  "centered": lambda reward, valid, length: center_by_group(reward, valid),
  "leave_one_out": lambda reward, valid, length: leave_one_out(reward, valid),
  "maxrl": lambda reward, valid, length: maxrl(reward, valid),
  "pass_at_k": lambda reward, valid, length, **k: pass_at_k(reward, valid, **k),
}


# These whiten: they take how much each rollout counts in that, as `weight`.
WHITENED = ("tokens", "trajectories")


# A user's function, if it can stand in `ADVANTAGES`.
from_user = functools.partial(arrays.from_user, takes=3, gives="float32[4,6]")


def each_prompt_once(
  function: Callable[..., Array],
  reward: Float[Array, "P N"],
  valid: Bool[Array, "P N"],
  length: Float[Array, "P N"],
  *,
  whitened: bool,
) -> Float[Array, "P N"]:
  """An advantage with which every prompt counts once in the loss.

    A[p,n] * mean(n) / n[p]          n[p]: rollouts of prompt p that count

  A step's loss is a mean over tokens or rollouts, in which a prompt with n of
  them counts n times. In rounds that is biased, as a prompt stops by its
  rewards: K (n - K) / n (n - 1) estimates p (1 - p), the size of the gradient,
  and with rounds of 16, 64, 256 and 1,024 it is 3.02 times too large at p =
  .001 if one right and one wrong rollout suffice, 2.09 times at p = .01, and
  there 1.18 times if four do.

  `function` gives A; `whitened`: it is one of `WHITENED`, which take `weight`.

  >>> reward = jnp.array([[1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
  >>> valid = jnp.array([[True] * 4, [True, True, False, False]])
  >>> centered = ADVANTAGES["centered"]  # .75 * 3/4 for the first, .5 * 3/2
  >>> args = centered, reward, valid, jnp.ones((2, 4))
  >>> each_prompt_once(*args, whitened=False)[:, 0].tolist()
  [0.5625, 0.75]
  """
  arrays.check(
    reward=(reward, "PN"), valid=(valid, "PN"), length=(length, "PN")
  )
  n = jnp.sum(valid, axis=1, keepdims=True)
  drawn = jnp.maximum(jnp.sum(n > 0), 1)
  once = jnp.where(n > 0, jnp.sum(n) / drawn / jnp.maximum(n, 1), 0.0)
  more: dict[str, Any] = {"weight": once} if whitened else {}
  return function(reward, valid, length, **more) * once
