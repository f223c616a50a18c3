"""The theorem's quantities on the real policy, for a few prompts of a step.

Whole responses to one prompt take the place of the theorem's tokens.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, PyTree

from brorl_jax.rl import mass_balance
from brorl_jax.types import Array, Prompts, Rollouts, own_tokens

# What a run's probe holds of a prompt: the most probable responses and tokens.
# At .3 nats per token a response of 128 has probability 2e-17 and changes no
# mean, but gradients of 2 x 16 responses of 15,360 tokens take 42 GB with 1p5b.
RESPONSES, TOKENS = 16, 128
# Sampler and trainer agree on a response's probability to about 1e-5.
_NOISE = 1e-4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Probe:
  """Distinct responses to a few prompts, most probable first, on the host.

  The probability of a sampled response is p = exp(sum of its
  log-probabilities), and it is correct if its reward is 1. Of the others only
  the total probability is known: 1 minus that of these.
  """

  prompt: Int[Array, "P S"]
  prompt_mask: Bool[Array, "P S"]
  response: Int[Array, "P M T"]
  mask: Bool[Array, "P M T"]
  probability: Float[Array, "P M"]  # before the update; 0 in empty rows
  correct: Bool[Array, "P M"]
  # Of all distinct responses, not only of those above.
  sampled: Float[Array, "P N"]  # probability; 0 in empty places
  sampled_correct: Bool[Array, "P N"]
  unsampled: Float[Array, " P"]  # mass of responses that were never drawn
  draws: Float[Array, " P"]  # N of each prompt


def probe(
  prompts: Prompts,
  rollouts: Rollouts,
  reward: Float[np.ndarray, "P N"],
  *,
  count: int,
  rows: int = RESPONSES,
  tokens: int = TOKENS,
) -> Probe:
  """Takes the first `count` prompts and their `rows` likeliest responses.

  Its shapes depend on the arguments alone, not on what was sampled: an update
  that reads it is compiled once, and what it needs can be planned. Longer
  responses than `tokens`, and rarer ones, are left out, but for their mass.
  Rollouts should have temperature 1 and nothing cut, or the mass is that of the
  sampling distribution. `reward` is raw.
  """
  N, T = rollouts.tokens.shape[1:]
  count, T = min(count, len(reward)), min(tokens, T)
  out = Probe(
    prompt=prompts.tokens[:count],
    prompt_mask=prompts.mask[:count],
    response=np.zeros((count, rows, T), np.int32),
    mask=np.zeros((count, rows, T), bool),
    probability=np.zeros((count, rows), np.float32),
    correct=np.zeros((count, rows), bool),
    sampled=np.zeros((count, N), np.float32),
    sampled_correct=np.zeros((count, N), bool),
    unsampled=np.zeros(count, np.float32),
    draws=rollouts.drawn[:count].sum(axis=1).astype(np.float32),
  )
  for p in range(count):
    first, _ = rollouts.distinct(p)
    mass = np.exp(rollouts.logp[p, first].sum(axis=1, dtype=np.float64))
    correct = reward[p, first] >= 1.0
    out.sampled[p, : len(first)] = mass
    out.sampled_correct[p, : len(first)] = correct
    out.unsampled[p] = max(1.0 - mass.sum(), 0.0)
    short = np.flatnonzero(rollouts.mask[p, first].sum(axis=1) <= T)
    likeliest = short[np.argsort(-mass[short], kind="stable")[:rows]]
    to = (p, slice(len(likeliest)))
    out.response[to] = rollouts.tokens[p, first[likeliest], :T]
    logp = rollouts.logp[p, first[likeliest], :T]
    out.mask[to] = own_tokens(rollouts.mask[p, first[likeliest], :T], logp)
    out.probability[to] = mass[likeliest]
    out.correct[to] = correct[likeliest]
  return out


@jax.jit
def sampled_terms(probed: Probe) -> Float[Array, " P"]:
  """The two terms of Theorem 1 that are never negative, per unit of rate.

  The responses are the atoms of a softmax with a logit each, with rewards 1 and
  -1 and one plain gradient step. The third term would need the single
  probabilities of what was not sampled. So this is no forecast of what Adam
  does to a network, in sign or in size (for that, see `measure`); it shows how
  much of the theorem's push there is at this N.
  """

  def terms(probability, correct, unsampled, draws):
    # The remainder as one wrong atom: it enters the masses only, because the
    # term of what was not sampled is left out.
    probs = jnp.append(probability, unsampled)
    marks = jnp.append(correct, False), jnp.append(probability > 0.0, False)
    rewards = {"reward_correct": 1.0, "reward_wrong": -1.0}
    balance = mass_balance.mass_balance(  # n: a factor of 1 / N
      probs / jnp.sum(probs), *marks, **rewards, lr=1.0, n=1
    )
    return (balance.sampled_correct + balance.sampled_wrong) / draws

  sampled = probed.sampled, probed.sampled_correct, probed.unsampled
  return jax.vmap(terms)(*sampled, probed.draws)


@dataclasses.dataclass(frozen=True)
class Mass:
  """The probability of a probe's correct responses, by a policy's parameters.

  Q[p] = sum over correct responses r of exp(sum_t log pi(r_t))
  """

  response_logp: Callable[..., tuple[Array, Array]]  # see `objective`
  temperature: float

  def of_prompts(self, probed: Probe, params: PyTree) -> Float[Array, " P"]:
    """Q of each prompt."""
    arrays = probed.prompt, probed.prompt_mask, probed.response
    texts = map(jnp.asarray, arrays)
    logp, _ = self.response_logp(params, *texts, self.temperature)
    total = jnp.sum(jnp.where(probed.mask, logp, 0.0), axis=2)
    return jnp.sum(jnp.where(probed.correct, jnp.exp(total), 0.0), axis=1)

  def mean(self, probed: Probe, params: PyTree) -> Float[Array, ""]:
    """Their mean, of which an update watches the first-order change."""
    return jnp.mean(self.of_prompts(probed, params))


compiled_mass = jax.jit(Mass.of_prompts, static_argnums=0)


_NAMES = (
  "unsampled_mass", "correct_change", "correct_change_first_order",
  "sampled_terms_per_lr", "fell_fraction",
)  # fmt: skip


def unmeasured() -> dict[str, None]:
  """The metrics of `measure` where there is nothing to measure."""
  return {f"theory/{name}": None for name in _NAMES}


def measure(
  probed: Probe, after: Float[np.ndarray, " P"], first_order: float
) -> dict[str, float] | dict[str, None]:
  """Metrics of a step: what the theorem is about, before and after the update.

  The forecast of the change for a network is its first-order one:

    correct_change ~ sum over updates of <d Q / d params, params' - params>

  with Q the mean correct mass of the probe. Where the two agree the step is
  small enough for first-order theory to speak about it. All are None where
  float32 holds no response's probability, as with hundreds of tokens. `after`
  is Q of each prompt with the updated parameters, and `first_order` that sum.
  """
  if not probed.probability.any():
    return unmeasured()
  before = (probed.probability * probed.correct).sum(axis=1)
  change = after - before
  terms, fell = sampled_terms(probed).mean(), (change < -_NOISE).mean()
  values = probed.unsampled.mean(), change.mean(), first_order, terms, fell
  return dict(zip(unmeasured(), map(float, values), strict=True))
