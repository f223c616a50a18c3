"""How one policy-gradient step moves probability onto correct tokens.

Setting of every function here: one softmax over V tokens with its own logits
(no shared parameters), N independent draws from it, reward Rc on correct and Rw
on wrong tokens, and one plain gradient step of size lr on the surrogate

    L = -(1/N) sum over sampled i of R[i] p[i]        (set form)

No clipping, no KL, no Adam, no baseline. Under these assumptions Theorem 1 of
BroRL splits the first-order change of the correct mass Q_pos into two terms
that are never negative and one that may be, which vanishes as N grows. It
promises a step of surer sign, not a larger one, and nothing about many steps.

Arguments: `probs` is the policy's next-token distribution, `correct` marks the
tokens whose reward is `reward_correct` = Rc; the others have `reward_wrong` =
Rw. `sampled` are the tokens drawn at least once, `counts` how often each was.
`lr` is the step size on the logits, at least 0, and `n` = N the number of
draws. A ValueError says which of them is out of range, does not sum to 1 or n,
or has another shape; of what is traced only shapes and types are checked.

Values keep the dtype of the probabilities: enable x64 for identities to 1e-12.

Source: Hu et al. 2025 (BroRL), arXiv:2510.01180, section 2 and appendix C.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from brorl_jax.rl import arrays
from brorl_jax.rl.arrays import require, require_count

# How far the sum of 1e5 rounded probabilities may be from 1, by bytes of each.
_SUM_TOLERANCE = {2: 1e-2, 4: 1e-5, 8: 1e-10}


class Moments(NamedTuple):
  """What Theorem 1 is made of; pos is correct, neg is wrong."""

  q_pos: Float[Array, ""]  # Q_pos, mass of correct tokens
  q_neg: Float[Array, ""]  # 1 - Q_pos
  p_pos: Float[Array, ""]  # P_pos, mass of sampled correct tokens
  p_neg: Float[Array, ""]  # P_neg, mass of sampled wrong tokens
  a2: Float[Array, ""]  # A_2, sum of p^2 over sampled correct tokens
  b2: Float[Array, ""]  # B_2, sum of p^2 over sampled wrong tokens
  u_pos2: Float[Array, ""]  # U_pos2, sum of p^2 over unsampled correct tokens
  u_neg2: Float[Array, ""]  # U_neg2, sum of p^2 over unsampled wrong tokens
  s_r: Float[Array, ""]  # S_R = Rc P_pos + Rw P_neg, reward mass of the sample


class MassBalance(NamedTuple):
  """First-order change of the correct mass, split by its cause.

  Each term is a probability, lr / N included.
  """

  sampled_correct: Float[Array, ""]
  sampled_wrong: Float[Array, ""]
  unsampled: Float[Array, ""]
  moments: Moments

  @property
  def total(self) -> Float[Array, ""]:
    """Delta Q_pos to first order in lr."""
    return self.sampled_correct + self.sampled_wrong + self.unsampled


def mass_balance(
  probs: Float[Array, " V"],
  correct: Bool[Array, " V"],
  sampled: Bool[Array, " V"],
  *,
  reward_correct: float,
  reward_wrong: float,
  lr: float,
  n: int,
) -> MassBalance:
  """Theorem 1: the change of Q_pos by one step on the set form.

    Delta Q_pos = lr/N [ (Rc - S) Q_neg A_2            sampled_correct, >= 0
                       + (S - Rw) Q_pos B_2            sampled_wrong,   >= 0
                       + S (Q_pos U_neg2 - Q_neg U_pos2) ]     unsampled

  The signs need Rc >= 0 >= Rw, which keeps S in [Rw, Rc]. The set form counts a
  token once however often it was drawn; with multiplicities use
  `mass_balance_counts`, for which the signs are not promised.
  Source: arXiv:2510.01180, Theorem 1. The lr/N belongs to the 1/N of L.

  >>> probs = jnp.array([0.5, 0.25, 0.25])
  >>> correct = jnp.array([True, True, False])
  >>> drawn = jnp.array([True, False, True])  # of the correct ones the first
  >>> options = dict(reward_correct=1.0, reward_wrong=-1.0, lr=2.0, n=2)
  >>> change = mass_balance(probs, correct, drawn, **options)
  >>> float(change.sampled_correct)  # (1 - 1/4) * 1/4 * 1/4, as S = 1/2 - 1/4
  0.046875
  >>> float(change.sampled_wrong)  # (1/4 + 1) * 3/4 * 1/16
  0.05859375
  >>> float(change.unsampled)  # 1/4 * (0 - 1/4 * 1/16): the second one falls
  -0.00390625
  """
  _check(probs, correct, sampled, n, lr, reward_correct, reward_wrong)
  require("reward_correct", reward_correct, lambda x: x >= 0, "at least 0")
  require("reward_wrong", reward_wrong, lambda x: x <= 0, "at most 0")
  m = _moments(probs, correct, sampled, reward_correct, reward_wrong)
  right, wrong = (reward_correct - m.s_r) * m.a2, (m.s_r - reward_wrong) * m.b2
  return _balance(lr / n, right, wrong, m)


def mass_balance_counts(
  probs: Float[Array, " V"],
  correct: Bool[Array, " V"],
  counts: Int[Array, " V"],
  *,
  reward_correct: float,
  reward_wrong: float,
  lr: float,
  n: int,
) -> MassBalance:
  """The multiset form: every draw counts, as in the paper's own simulator.

  With w[i] = counts[i] R[i] and S = sum of w[i] p[i], the step on
  L = -(1/N) sum over draws j of R[y_j] p[y_j] gives

    Delta Q_pos = lr/N [ Q_neg sum over sampled correct of p^2 (w - S)
                       + Q_pos sum over sampled wrong   of p^2 (S - w)
                       + S (Q_pos U_neg2 - Q_neg U_pos2) ]

  S may leave [Rw, Rc], so that neither of the first terms has a promised sign.
  Rewards may have any sign. Not in the paper, whose Theorem 1 is the set form
  and whose section 4.1 simulates this one; derived like Theorem 1.

  >>> probs, correct = jnp.array([0.5, 0.5]), jnp.array([True, False])
  >>> options = dict(reward_correct=1.0, reward_wrong=-1.0, lr=4.0, n=4)
  >>> change = mass_balance_counts(probs, correct, jnp.array([3, 1]), **options)
  >>> float(change.total)  # w = 3, -1 and S = 1: 1/2 * 1/4 * 2 twice
  0.5
  """
  require_count("n", n)
  arrays.check(probs=(probs, "V"), counts=(counts, "V"))
  if not jnp.issubdtype(counts.dtype, jnp.integer):
    raise ValueError(f"counts are {counts.dtype}; they must be integers")
  require("counts", counts, lambda x: x >= 0, "at least 0")
  total = _known_sum(counts)
  if total is not None and not isinstance(n, Tracer) and int(total) != int(n):
    raise ValueError(f"counts sum to {total}, not to n = {n}")
  sampled = counts > 0
  _check(probs, correct, sampled, n, lr, reward_correct, reward_wrong)
  probs = jnp.asarray(probs)
  m = _moments(probs, correct, sampled, reward_correct, reward_wrong)
  w = counts * jnp.where(correct, reward_correct, reward_wrong)
  w = w.astype(probs.dtype)
  s = jnp.sum(w * probs)
  right = jnp.sum(probs**2 * (w - s), where=correct & sampled)
  wrong = jnp.sum(probs**2 * (s - w), where=~correct & sampled)
  return _balance(lr / n, right, wrong, m._replace(s_r=s))


def expected_unsampled_second_moment(
  p: Float[Array, "*axes"], n: int
) -> Float[Array, "*axes"]:
  """Lemma 2: E[p^2 1{token never drawn in N}] = p^2 (1 - p)^N, elementwise.

  Exact for independent draws; tokens may be dependent, so that the sum over
  tokens is Corollary 3's E[U_2]. It decays exponentially only for p >> 1/N.
  Source: arXiv:2510.01180, Lemma 2 and Corollary 3 (appendix C.2).

  >>> p = jnp.array([0.5, 0.25])
  >>> expected = expected_unsampled_second_moment(p, 2)  # (1/2 * 1/2)^2, ...
  >>> [round(x, 4) for x in expected.tolist()]
  [0.0625, 0.0352]
  """
  require_count("n", n)
  p = jnp.asarray(p)
  require("p", p, lambda x: (x >= 0) & (x <= 1), "in [0, 1]")
  # Of 1 - p as a power: log1p keeps p = 1e-9 where 1 - p is 1 in float32.
  return p**2 * jnp.exp(n * jnp.log1p(-p))


def _balance(step, right, wrong, m: Moments) -> MassBalance:
  """The terms, from the sums over sampled correct and sampled wrong tokens."""
  rest = m.s_r * (m.q_pos * m.u_neg2 - m.q_neg * m.u_pos2)
  right, wrong = m.q_neg * right, m.q_pos * wrong
  return MassBalance(step * right, step * wrong, step * rest, m)


def _moments(probs, correct, sampled, reward_correct, reward_wrong) -> Moments:
  mass = lambda where: jnp.sum(probs, where=where)
  second = lambda where: jnp.sum(probs**2, where=where)
  q_pos, q_neg = mass(correct), mass(~correct)
  p_pos, p_neg = mass(correct & sampled), mass(~correct & sampled)
  return Moments(
    q_pos=q_pos,
    q_neg=q_neg,
    p_pos=p_pos,
    p_neg=p_neg,
    a2=second(correct & sampled),
    b2=second(~correct & sampled),
    u_pos2=second(correct & ~sampled),
    u_neg2=second(~correct & ~sampled),
    s_r=reward_correct * p_pos + reward_wrong * p_neg,
  )


def _check(probs, correct, sampled, n, lr, reward_correct, reward_wrong):
  require_count("n", n)
  arrays.check(
    probs=(probs, "V"), correct=(correct, "V"), sampled=(sampled, "V")
  )
  good = lambda x: jnp.isfinite(x) & (x >= 0)
  require("lr", lr, good, "finite and at least 0")
  require("reward_correct", reward_correct, jnp.isfinite, "finite")
  require("reward_wrong", reward_wrong, jnp.isfinite, "finite")
  for name, mask in (("correct", correct), ("sampled", sampled)):
    if mask.dtype != jnp.bool_:
      raise ValueError(f"{name} is {mask.dtype}; it must be a mask, of bool")
  require("probs", probs, lambda x: x >= 0, "at least 0")
  if (total := _known_sum(probs)) is not None:
    wide = _SUM_TOLERANCE[total.dtype.itemsize]  # float32 if x64 is off
    require("the sum of probs", total, lambda x: abs(x - 1) < wide, "1")
  if (right := _known_sum(correct)) is not None and not int(right):
    raise ValueError(f"correct is False for all {correct.size} tokens")
  drawn = _known_sum(sampled)
  if drawn is not None and not isinstance(n, Tracer) and int(drawn) > int(n):
    raise ValueError(f"sampled has {drawn} tokens, more than n = {n} draws")


def _known_sum(x) -> Array | None:
  """The sum of an array; None if it is traced."""
  if isinstance(x, Tracer):
    return None
  with jax.ensure_compile_time_eval():
    return jnp.sum(x)
