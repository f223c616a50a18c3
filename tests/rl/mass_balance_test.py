"""Tests of brorl_jax/rl/mass_balance.py, in float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st

from brorl_jax.rl import mass_balance as mb

REWARDS = dict(reward_correct=1.0, reward_wrong=-1.0)


@pytest.fixture(autouse=True)
def x64():
  with jax.enable_x64(True):
    yield


def problem(seed, vocab=60, n=8, spread=2.0):
  """Logits, correct mask and the counts of N draws."""
  rng = np.random.default_rng(seed)
  logits = jnp.asarray(spread * rng.normal(size=vocab))
  correct = rng.random(vocab) < 0.3
  correct[rng.integers(vocab)] = True
  draws = rng.choice(vocab, size=n, p=np.asarray(jax.nn.softmax(logits)))
  counts = np.bincount(draws, minlength=vocab)
  return logits, jnp.asarray(correct), jnp.asarray(counts)


def slope(logits, correct, objective):
  """d Q_pos / d lr along the gradient of the objective, by autodiff."""
  q_pos = lambda z: jnp.sum(jax.nn.softmax(z), where=correct)
  return jax.jvp(q_pos, (logits,), (jax.grad(objective)(logits),))[1]


def close(got, want, scale):
  assert abs(float(got) - float(want)) <= 1e-12 * float(scale)


def size(balance):
  """The largest of the terms that cancel in the total."""
  terms = (balance.sampled_correct, balance.sampled_wrong, balance.unsampled)
  return max(abs(float(term)) for term in terms)


problems = st.tuples(st.integers(0, 2**32 - 1), st.sampled_from([2, 40]),
  st.sampled_from([1, 2, 4, 16, 64, 512]), st.floats(0.1, 4.0))  # fmt: skip


@settings(deadline=None, max_examples=20)
@given(problems, st.floats(0.01, 3.0), st.floats(-3.0, -0.01))
def test_both_forms_are_the_derivative_along_their_steps(case, right, wrong):
  seed, vocab, n, spread = case
  logits, correct, counts = problem(seed, vocab, n, spread)
  how = dict(reward_correct=right, reward_wrong=wrong, lr=0.7, n=n)
  given = jax.nn.softmax(logits), correct
  one = mb.mass_balance(*given, counts > 0, **how)
  for balance, times, least in ((one, counts > 0, 1e-3 / n),
    (mb.mass_balance_counts(*given, counts, **how), counts, 1e-3)):  # fmt: skip
    reward = jnp.where(correct, right, wrong) * times
    objective = lambda z, w=reward: jnp.sum(w * jax.nn.softmax(z)) / n
    want = 0.7 * slope(logits, correct, objective)
    close(balance.total, want, max(size(balance), least))
  assert one.sampled_correct >= 0.0 and one.sampled_wrong >= 0.0
  assert wrong - 1e-12 <= one.moments.s_r <= right + 1e-12


def test_hand_computed_values():
  # p = (.5, .25, .25), the first correct; tokens 0 and 1 drawn.
  probs = jnp.array([0.5, 0.25, 0.25])
  correct = jnp.array([True, False, False])
  sampled = jnp.array([True, True, False])
  b = mb.mass_balance(probs, correct, sampled, lr=2.0, n=4, **REWARDS)
  # S = .5 - .25 = .25; A2 = .25; B2 = U_neg2 = .0625; lr / n = .5.
  np.testing.assert_allclose(b.sampled_correct, 0.5 * 0.75 * 0.5 * 0.25)
  np.testing.assert_allclose(b.sampled_wrong, 0.5 * 1.25 * 0.5 * 0.0625)
  np.testing.assert_allclose(b.unsampled, 0.5 * 0.25 * 0.5 * 0.0625)
  m = b.moments
  got = [m.q_pos, m.q_neg, m.p_pos, m.p_neg, m.a2, m.b2, m.u_pos2, m.u_neg2]
  want = [0.5, 0.5, 0.5, 0.25, 0.25, 0.0625, 0.0, 0.0625]
  np.testing.assert_allclose(got, want)
  np.testing.assert_allclose(m.s_r, 0.25)


@pytest.mark.ci
def test_multiset_equals_set_form_when_every_draw_differs():
  logits, correct, _ = problem(3)
  counts = (jnp.arange(60) % 6 == 0).astype(int)
  probs, n = jax.nn.softmax(logits), int(counts.sum())
  one = mb.mass_balance(probs, correct, counts > 0, lr=0.1, n=n, **REWARDS)
  many = mb.mass_balance_counts(probs, correct, counts, lr=0.1, n=n, **REWARDS)
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12)
  jax.tree.map(close, one, many)


def test_exact_step_differs_by_the_square_of_the_learning_rate():
  logits, correct, counts = problem(0, vocab=200, n=16, spread=1.5)
  probs = jax.nn.softmax(logits)
  reward = jnp.where(correct, 1.0, -1.0) * (counts > 0)
  mass = lambda p: jnp.sum(p, where=correct)

  slope = probs * (reward - jnp.sum(reward * probs)) / 16  # of the logits

  def gap(lr):
    first = mb.mass_balance(probs, correct, counts > 0, lr=lr, n=16, **REWARDS)
    exact = jax.nn.softmax(logits + lr * slope)
    return float(abs(mass(exact) - mass(probs) - first.total))

  ratios = [gap(10 * lr) / gap(lr) for lr in (0.1, 0.01, 0.001)]
  assert all(95 < ratio < 105 for ratio in ratios), ratios


@pytest.mark.parametrize("p, n", [(0.3, 4), (6.28e-5, 51200)])
def test_lemma_2_by_monte_carlo(p, n):
  trials = 400_000
  never = np.random.default_rng(0).binomial(n, p, trials) == 0
  want = float(mb.expected_unsampled_second_moment(jnp.asarray(p), n))
  share = want / p**2
  error = p**2 * np.sqrt(share * (1 - share) / trials)
  assert abs(p**2 * never.mean() - want) < 4 * error


@pytest.mark.parametrize("n", tiers.some([4, 64, 512, 4096], 1))
def test_corollary_3_by_monte_carlo(n):
  rng = np.random.default_rng(1)
  p = np.asarray(jax.nn.softmax(jnp.asarray(2.0 * rng.normal(size=1000))))
  moment = ((rng.multinomial(n, p, size=3000) == 0) * p**2).sum(axis=1)
  want = float(mb.expected_unsampled_second_moment(jnp.asarray(p), n).sum())
  assert abs(moment.mean() - want) < 4 * moment.std() / np.sqrt(3000)


def test_negative_steps_become_rarer_with_n():
  rng = np.random.default_rng(0)
  p = 1.0 / np.arange(1, 2001)
  p = rng.permutation(p / p.sum())
  correct = np.zeros(2000, bool)
  correct[rng.choice(2000, 200, replace=False)] = True
  both, how = (jnp.asarray(p), jnp.asarray(correct)), dict(lr=1.0, n=1)
  total = lambda drawn: mb.mass_balance(*both, drawn, **how, **REWARDS).total
  balance = jax.jit(jax.vmap(total))
  share = []
  for n in (1, 2, 4, 8, 16, 64):
    counts = rng.multinomial(n, p, size=400)
    share.append(float((balance(jnp.asarray(counts > 0)) < 0).mean()))
  assert share[0] > 0.4 and share[-1] == 0.0
  assert all(a > b for a, b in itertools.pairwise(share))


GOOD = dict(
  probs=jnp.full(4, 0.25), correct=jnp.array([True, False, False, True]),
  sampled=jnp.array([True, True, False, False]),
)  # fmt: skip
COUNTED = dict(
  probs=GOOD["probs"], correct=GOOD["correct"], counts=jnp.array([1, 1, 0, 0])
)


@pytest.mark.parametrize("change, message", [
  (dict(probs=jnp.full(4, 0.3)), r"the sum of probs = 1\.2"),
  (dict(probs=jnp.array([1.5, -0.5, 0.0, 0.0])), r"probs = -0\.5"),
  (dict(correct=jnp.zeros(4, bool)), "correct is False for all 4"),
  (dict(n=0), "n = 0 must be an integer"),
  (dict(probs=jnp.full(4, 0.25001)), r"the sum of probs = 1\.00004"),
  (dict(n=1), "sampled has 2 tokens, more than n = 1 draws"),
  (dict(lr=float("nan")), "lr = nan must be finite"),
  (dict(lr=-1e-9), "lr = -1e-09 must be finite and at least 0"),
  (dict(reward_correct=float("inf")), "reward_correct = inf"),
  (dict(reward_correct=-1.0), r"reward_correct = -1\.0"),
  (dict(reward_wrong=0.5), r"reward_wrong = 0\.5"),
])  # fmt: skip
def test_bad_input_is_refused_with_its_value(change, message):
  args = GOOD | dict(lr=0.1, n=2, **REWARDS) | change
  arrays = [args.pop(name) for name in ("probs", "correct", "sampled")]
  with pytest.raises(Exception, match=message):
    mb.mass_balance(*arrays, **args)


def test_shapes_are_named_as_the_caller_named_them(unhooked):
  with pytest.raises(ValueError, match=r"shape \(2,\).*counts must be \[V\]"):
    mb.mass_balance_counts(
      **(COUNTED | dict(counts=jnp.array([1, 1]))), lr=0.1, n=2, **REWARDS
    )
  with pytest.raises(ValueError, match="probs is a list"):
    mb.mass_balance(**GOOD | {"probs": [0.25] * 4}, lr=0.1, n=2, **REWARDS)


WITH_N = [
  lambda n: mb.mass_balance(**GOOD, lr=0.1, n=n, **REWARDS).total,
  lambda n: mb.mass_balance_counts(**COUNTED, lr=0.1, n=n, **REWARDS).total,
  lambda n: mb.expected_unsampled_second_moment(jnp.array([0.5]), n),
]


def test_n_is_an_integer_of_at_least_1(unhooked):
  for function in WITH_N:
    for n in (0, 2.0, np.float32(2.5)):
      with pytest.raises(ValueError, match=r"^n = "):
        function(n)


@pytest.mark.parametrize("function", tiers.some(WITH_N, 1))
def test_n_may_be_traced_or_closed_over(unhooked, function):
  np.testing.assert_allclose(jax.jit(function)(2), function(2), rtol=1e-12)
  n = jnp.int32(2)
  np.testing.assert_allclose(jax.jit(lambda: function(n))(), function(2), 1e-12)
  with pytest.raises(ValueError, match="must be an integer"):
    jax.jit(function)(2.0)


@pytest.mark.parametrize("wide, off, fine", [
  (True, 1e-8, False), (True, 1e-12, True), (False, 1e-4, False),
  (False, 1e-6, True),
])  # fmt: skip
def test_the_sum_of_numpys_probabilities(unhooked, wide, off, fine):
  # Where x64 is off, jax sums float64 in float32.
  p = np.random.default_rng(0).dirichlet(np.ones(30_000))
  assert p.dtype == np.float64
  p[p.argmax()] += off
  mask = np.arange(p.size) < 2
  with jax.enable_x64(wide):
    run = lambda: mb.mass_balance(p, mask, mask, lr=0.1, n=2, **REWARDS)
    if fine:
      assert np.isfinite(run().total)
    else:
      with pytest.raises(ValueError, match="the sum of probs"):
        run()


@pytest.mark.parametrize("counts, message", [
  ([2, 0, 1, 0], "counts sum to 3, not to n = 4"),
  ([5, -1, 0, 0], "counts = -1"), ([2.0, 2.0, 0.0, 0.0], "counts are float"),
])  # fmt: skip
def test_counts_are_integers_that_sum_to_n(unhooked, counts, message):
  args = COUNTED | {"counts": jnp.array(counts)}
  with pytest.raises(ValueError, match=message):
    mb.mass_balance_counts(**args, lr=0.1, n=4, **REWARDS)
  args = GOOD | {"sampled": jnp.array([2, 0, 1, 0])}
  with pytest.raises(ValueError, match="sampled is int"):
    mb.mass_balance(**args, lr=0.1, n=3, **REWARDS)


def test_lemma_2_refuses_what_is_no_probability():
  for p in (-0.1, float("nan")):
    with pytest.raises(ValueError, match="p = "):
      mb.expected_unsampled_second_moment(jnp.asarray(p), 2)


def test_constants_may_be_closed_over_and_refused():
  logits, correct, counts = problem(0)
  probs, sampled = jax.nn.softmax(logits), counts > 0
  how = dict(lr=0.1, n=8, **REWARDS)
  run = lambda sampled: mb.mass_balance(probs, correct, sampled, **how).total
  close(jax.jit(run)(sampled), run(sampled), 1.0)
  wrong = jnp.full(60, 0.5)
  with pytest.raises(ValueError, match="the sum of probs = 30"):
    jax.jit(lambda s: mb.mass_balance(wrong, correct, s, **how))(sampled)


def test_a_rare_token_keeps_its_digits():
  with jax.enable_x64(False):
    tiny = mb.expected_unsampled_second_moment(jnp.float32(1e-9), 10**9)
  np.testing.assert_allclose(tiny, 1e-18 * np.exp(-1.0), rtol=1e-5)
