"""Tests of brorl_jax/learner/theory.py."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scored
from update_cases import POLICY

from brorl_jax.learner import theory
from brorl_jax.rl import losses, mass_balance
from brorl_jax.types import Prompts

probe = functools.partial(theory.probe, tokens=2)

# Two prompts, four rollouts of at most two tokens.
TOKENS = np.array(
  [[[5, 1], [5, 1], [1, 0], [6, 1]], [[7, 1], [7, 1], [7, 1], [1, 0]]], np.int32
)
LENGTH = np.array([[2, 2, 1, 2], [2, 2, 2, 1]])
MASS = np.array([[0.4, 0.4, 0.1, 0.2], [0.5, 0.5, 0.5, 0.25]])
REWARD = np.array([[1, 1, 0, 0], [0, 0, 0, 1]], np.float32)


def groups():
  mask = np.arange(2) < LENGTH[..., None]
  logp = np.where(mask, np.log(MASS)[..., None] / LENGTH[..., None], 0.0)
  rollouts = scored.rollouts(TOKENS, mask, logp)
  prompts = Prompts(np.array([[2, 3], [0, 4]], np.int32),
    np.array([[True, True], [False, True]]),
    np.arange(2, dtype=np.int32))  # fmt: skip
  return prompts, rollouts, REWARD


def test_probe_holds_distinct_responses_by_probability():
  found = probe(*groups(), count=2, rows=4)
  np.testing.assert_allclose(
    found.probability, [[0.4, 0.2, 0.1, 0.0], [0.5, 0.25, 0.0, 0.0]], rtol=1e-6
  )
  assert found.correct.tolist() == [[1, 0, 0, 0], [0, 1, 0, 0]]
  np.testing.assert_allclose(found.unsampled, [0.3, 0.25], rtol=1e-5)
  assert found.response[0, :3].tolist() == [[5, 1], [6, 1], [1, 0]]
  assert found.mask[0].tolist() == [[1, 1], [1, 1], [1, 0], [0, 0]]
  prompts, rollouts, reward = groups()
  certain = dataclasses.replace(rollouts, logp=rollouts.logp * 0.0)
  found = probe(prompts, certain, 0.75 * reward, count=1, rows=4)
  assert found.unsampled.tolist() == [0.0]  # of mass beyond 1 by rounding
  assert not found.correct.any()  # a partial reward


def test_the_theorems_terms_count_responses_beyond_the_rows():
  every = probe(*groups(), count=2, rows=4)
  likeliest = probe(*groups(), count=2, rows=1)
  np.testing.assert_allclose(likeliest.unsampled, [0.3, 0.25], rtol=1e-5)
  terms = lambda found: theory.measure(found, np.zeros(2), 0.0)[
    "theory/sampled_terms_per_lr"
  ]
  assert terms(likeliest) == terms(every) > 0.0


def test_nothing_is_reported_where_nothing_can_be_measured():
  prompts, rollouts, reward = groups()
  long = dataclasses.replace(rollouts, logp=rollouts.logp - 400.0)
  found = probe(prompts, long, reward, count=2, rows=4)
  nothing = theory.measure(found, np.zeros(2), 0.0)
  found = probe(*groups(), count=2, rows=4)
  measured = theory.measure(found, np.zeros(2), 0.0)
  assert nothing == theory.unmeasured() == dict.fromkeys(measured)


def test_longer_responses_are_left_out_but_were_sampled():
  found = theory.probe(*groups(), count=2, rows=4, tokens=1)
  assert found.response.shape == found.mask.shape == (2, 4, 1)
  # The one of one token of each prompt.
  assert found.response[:, :, 0].tolist() == [[1, 0, 0, 0], [1, 0, 0, 0]]
  assert found.mask[:, :, 0].tolist() == [[1, 0, 0, 0], [1, 0, 0, 0]]
  np.testing.assert_allclose(
    found.probability, [[0.1, 0, 0, 0], [0.25, 0, 0, 0]], rtol=1e-6
  )
  assert found.correct.tolist() == [[0, 0, 0, 0], [1, 0, 0, 0]]
  whole = probe(*groups(), count=2, rows=4)
  np.testing.assert_array_equal(found.sampled, whole.sampled)
  np.testing.assert_array_equal(found.unsampled, whole.unsampled)


def test_the_probe_has_the_same_shapes_whatever_was_sampled():
  """Or an update would be compiled anew when a short response comes."""
  prompts, rollouts, reward = groups()
  shapes = lambda found: [*map(np.shape, jax.tree.leaves(found))]
  want = shapes(probe(*groups(), count=2, rows=4))
  long = dataclasses.replace(rollouts, logp=rollouts.logp - 400.0)
  assert shapes(probe(prompts, long, reward, count=2, rows=4)) == want
  none = dataclasses.replace(rollouts, mask=np.ones_like(rollouts.mask))
  found = theory.probe(prompts, none, reward, count=2, rows=4, tokens=1)
  want = theory.probe(*groups(), count=2, rows=4, tokens=1)
  assert shapes(found) == shapes(want)
  assert not found.mask.any() and not found.probability.any()
  # No more tokens than there are.
  assert shapes(theory.probe(*groups(), count=2, rows=4, tokens=9)) == shapes(
    probe(*groups(), count=2, rows=4)
  )


@pytest.mark.parametrize(
  "changes", [(-1e-5, -1e-3), (-2e-4, 2e-4)], ids=["rounding", "twice"]
)
def test_a_fall_is_more_than_noise(changes):
  found = probe(*groups(), count=2, rows=4)
  after = np.array([0.4, 0.25]) + changes
  assert theory.measure(found, after, 0.0)["theory/fell_fraction"] == 0.5


def test_measure_by_hand():
  found = probe(*groups(), count=2, rows=4)
  got = theory.measure(found, np.array([0.5, 0.2]), 0.03)
  assert got["theory/correct_change"] == pytest.approx((0.1 - 0.05) / 2)
  assert got["theory/correct_change_first_order"] == 0.03
  assert got["theory/fell_fraction"] == 0.5
  assert got["theory/unsampled_mass"] == pytest.approx(0.275)
  terms = []
  for probs, correct, sampled in (
    ([0.4, 0.2, 0.1, 0.3], [1, 0, 0, 0], [1, 1, 1, 0]),
    ([0.5, 0.25, 0.25], [0, 1, 0], [1, 1, 0]),
  ):
    b = mass_balance.mass_balance(jnp.array(probs), jnp.array(correct, bool),
      jnp.array(sampled, bool), reward_correct=1.0, reward_wrong=-1.0, lr=1.0,
      n=4)  # fmt: skip
    terms.append(float(b.sampled_correct + b.sampled_wrong))
  want = pytest.approx(np.mean(terms), rel=1e-5)
  assert got["theory/sampled_terms_per_lr"] == want


@pytest.mark.ci
def test_correct_mass_is_that_of_the_policy():
  policy, temperature = POLICY, 0.5
  params = jax.tree.map(lambda x: x * 9.0, policy.init(jax.random.key(0)))
  prompts, _, _ = groups()
  found = probe(*groups(), count=2, rows=4)
  mass = theory.Mass(policy.response_logp, temperature)
  each = mass.of_prompts(found, params)
  # The one right response to each prompt, by the plain form.
  for p, response in enumerate(([5, 1], [1])):
    ids = [*prompts.tokens[p][prompts.mask[p]], *response]
    ids = jnp.array([ids], jnp.int32)
    logits = policy.logits(params, ids, jnp.ones(ids.shape, bool))
    logp, _ = losses.token_logp(logits[:, :-1] / temperature, ids[:, 1:])
    want = jnp.exp(logp[0, -len(response) :].sum())
    np.testing.assert_allclose(each[p], want, rtol=1e-5)
  assert mass.mean(found, params) == pytest.approx(float(each.mean()))
