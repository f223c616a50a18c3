"""The loss of a microbatch, by hand and against its plain form."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiers
from update_cases import N, P, V, assert_close, packed, prompts, rollouts, table

from brorl_jax.learner import state as states
from brorl_jax.learner import update
from brorl_jax.learner.objective import Correction, Objective, loss_and_stats
from brorl_jax.rl import losses
from brorl_jax.rl.losses import policy_loss
from brorl_jax.types import Batch


def table_logp(at, prompt, mask, response, temperature, trees=None):
  """The next token depends on the last prompt token and the position."""
  logits = at["w"][prompt[:, -1], : response.shape[2]] / temperature
  logp = jnp.broadcast_to(
    jax.nn.log_softmax(logits)[:, None], (*response.shape, V)
  )
  chosen = jnp.take_along_axis(logp, response[..., None], axis=3)[..., 0]
  return chosen, -jnp.sum(jnp.exp(logp) * logp, axis=3)


def table_step(batches, objective, logp_old=None):
  """The gradient, by one step of plain gradient descent.

  Its rate is large, so that the parameters' rounding does not matter.
  """
  if logp_old is not None:
    batches = [
      dataclasses.replace(
        batch,
        logp_old=table_logp(logp_old, *of_blocks(batch), 1.0)[0].reshape(
          batch.mask.shape
        ),
      )
      for batch in batches
    ]
  rate, at = 1e4, table()
  tx = optax.sgd(rate)
  state, stats = update.minibatch_step(
    states.init_state(at, tx, keep_reference=False), batches, tx=tx,
    response_logp=table_logp, objective=objective,
  )  # fmt: skip
  return jax.tree.map(
    lambda a, b: np.asarray(a - b) / rate, table(), state.params
  ), stats


def of_blocks(batch):
  join = lambda x: jnp.asarray(x).reshape(-1, *x.shape[2:])
  return join(batch.prompt), join(batch.prompt_mask), join(batch.response)


PLAIN = Objective(
  clip_low=0.2, clip_high=0.28, kl_weight=0.0, kl_clamp=10.0, temperature=1.0
)
CLIP = dict(clip_low=0.2, clip_high=0.28)


def correct(kind, low=0.3, high=0.6):
  return Correction(kind, low, high)


@pytest.mark.parametrize("old", [None, 1], ids=["one minibatch", "several"])
@pytest.mark.parametrize(
  "changes",
  tiers.some([
    {"entropy_weight": 0.3},
    {"loss": losses.LOSSES["gspo"], "entropy_weight": 0.3},
    {"loss": losses.LOSSES["reinforce"]}, {"correction": correct("truncated")},
    {"correction": correct("banded")}, {"correction": correct("sequence")},
    {"correction": correct("truncated"), "loss": losses.LOSSES["gspo"]},
    {"correction": correct("truncated"), "loss": losses.LOSSES["cispo"]},
  ], 2, 3),
  # Not by their values: a function's address differs in each worker.
  ids=["entropy", "gspo", "reinforce", "truncated", "banded", "sequence",
       "truncated gspo", "truncated cispo"],
)  # fmt: skip
def test_terms_of_the_loss_equal_the_plain_form(changes, old):
  """Blocks, copies as weights and microbatches change nothing."""
  out, advantage = rollouts()
  objective = dataclasses.replace(PLAIN, **changes)
  other = None if old is None else table(old)
  by = objective.loss.unit == "sequence"
  batches = packed(roll=(out, advantage), unit=objective.loss.unit)
  grads, stats = table_step(batches, objective, other)
  flat = lambda x: jnp.asarray(x).reshape(P * N, *x.shape[2:])
  mask, sampled = flat(out.mask), flat(out.logp)
  both = lambda at: [flat(x) for x in table_logp(at,
      prompts().tokens, None, jnp.asarray(out.tokens), 1.0)]  # fmt: skip

  def loss(at):
    logp, entropy = both(at)
    before = sampled
    if other is not None:
      before = both(other)[0]
    elif objective.correction is not None:
      before = jax.lax.stop_gradient(logp)
    weight = None
    if objective.correction is not None:
      ratio = np.where(mask, np.exp(before - sampled), 1.0)
      mean = np.exp(np.log(ratio).sum(axis=1) / mask.sum(axis=1))[:, None]
      kind = objective.correction.kind
      seen = np.broadcast_to(mean if by else ratio, ratio.shape)
      inside = mean if kind == "sequence" else seen
      weight = {
        "truncated": np.minimum(seen, 0.6),
        "banded": np.where((seen >= 0.3) & (seen <= 0.6), seen, 0.0),
        "sequence": np.where((inside >= 0.3) & (inside <= 0.6), seen, 0.0),
      }[kind]
      assert (weight != seen).any() and (weight == seen).any()
      weight = jnp.asarray(weight[:, 0] if by else weight)
    mean, _ = policy_loss(
      objective.loss, logp, before, flat(advantage), mask, correction=weight,
      **{name: getattr(objective, name) for name in objective.loss.options},
    )  # fmt: skip
    return mean.value - objective.entropy_weight * jnp.mean(entropy, where=mask)

  value, want = jax.value_and_grad(loss)(table())
  assert_close(grads, want)
  assert float(stats.entropy.count) == out.mask.sum()
  got = stats.loss.value - objective.entropy_weight * stats.entropy.value
  np.testing.assert_allclose(got, value, rtol=1e-4, atol=1e-6)


def some_do_not_count(seed=0):
  """Of the third prompt nothing counts, of the first all but four rollouts."""
  out, advantage = rollouts(seed)
  counts = np.ones((P, N), bool)
  counts[0, 4:], counts[2] = False, False
  return dataclasses.replace(out, tokens=np.where(counts[..., None],
      out.tokens, 0), mask=out.mask & counts[..., None]), advantage  # fmt: skip


def mean_by_hand(loss, mask, mean):
  """One prompt, one rollout and one token after the other."""
  rollouts = [(p, n) for p, n in np.ndindex(P, N) if mask[p, n].any()]
  of = {pn: [loss[pn][t] for t in np.flatnonzero(mask[pn])] for pn in rollouts}
  prompts = sorted({p for p, _ in rollouts})
  over = lambda xs: sum(xs) / len(xs)
  if mean == "token":
    return over([x for xs in of.values() for x in xs])
  if mean == "sequence":
    return over([over(xs) for xs in of.values()])
  if mean == "constant":
    return over([sum(xs) / 7 for xs in of.values()])
  of_prompt = lambda q: [x for (p, _), xs in of.items() if p == q for x in xs]
  return over([over(of_prompt(q)) for q in prompts])


@pytest.mark.parametrize(
  "mean", tiers.some(["sequence", "prompt", "constant"], 1)
)
def test_means_of_the_loss_by_hand(mean, three_lengths):
  """Whatever the blocks, the lengths and the copies are."""
  out, advantage = some_do_not_count()

  def loss(at):
    logp, _ = table_logp(at, prompts().tokens, None, jnp.array(out.tokens), 1.0)
    ratio = jnp.exp(jnp.clip(logp - out.logp, -9.0, 9.0))
    adv = advantage[..., None]
    gain = jnp.minimum(ratio * adv, jnp.clip(ratio, 0.8, 1.28) * adv)
    return mean_by_hand(-gain, out.mask, mean)

  value, want = jax.value_and_grad(loss)(table())
  for rows, blocks in ((4, 3), (1, 2)):
    batches = packed(rows, blocks, (out, advantage), mean=mean)
    grads, stats = table_step(batches, PLAIN)
    assert_close(grads, want)
    np.testing.assert_allclose(stats.loss.value, value, rtol=1e-4, atol=1e-6)


def two_tokens(log_ratio):
  """Rollouts of one token with these ratios; the first rollout counts twice."""
  one = jax.tree.map(np.zeros_like, packed()[0])
  one.used[...] = 1
  one.prompt_mask[...] = True
  one.mask[0, 0, :2, 0] = True
  one.weight[0, 0, :2] = 2.0, 1.0
  logp = np.asarray(table_logp(table(), *of_blocks(one), 1.0)[0])
  one.logp_sampled[0, 0, :2, 0] = logp[0, :2, 0] - np.asarray(log_ratio)
  return one, logp[0, :2, 0]


def micro_loss(batch, objective):
  micro = jax.tree.map(lambda x: jnp.asarray(x[0] if x.ndim else x), batch)
  return jax.value_and_grad(loss_and_stats, has_aux=True)(
    table(), micro, response_logp=table_logp, objective=objective
  )


def test_a_distance_from_the_reference_is_added_and_pulls_towards_it():
  """Of .5 and -1 nats; the first of them twice."""
  batch, logp = two_tokens([0.0, 0.0])
  reference = np.zeros_like(batch.logp_sampled)
  reference[0, 0, :2, 0] = logp - [0.5, -1.0]
  batch = dataclasses.replace(batch, logp_ref=reference)
  (without, _), plain = micro_loss(batch, PLAIN)
  objective = dataclasses.replace(PLAIN, kl_weight=0.3)
  (total, stats), slope = micro_loss(batch, objective)
  k2 = 2 * 0.5**2 / 2 + 1.0**2 / 2
  np.testing.assert_allclose(stats.kl_ref.total, k2, rtol=1e-5)
  np.testing.assert_allclose(total - without, 0.3 * k2, rtol=1e-5)
  # Both rollouts are the token 0 after the prompt 0; descent lowers 2 x .5 - 1.
  np.testing.assert_allclose(slope["w"], plain["w"], atol=1e-6)
  batch.weight[0, 0, 1] = 0.0
  (_, _), slope = micro_loss(batch, objective)
  assert slope["w"][0, 0, 0] > 0.01  # it is .5 above: descent lowers it


def test_a_ratio_beyond_20_nats_is_clamped():
  batch, _ = two_tokens([30.0, -30.0])
  batch.advantage[0, 0, :2] = -1.0, -1.0
  (total, stats), slope = micro_loss(batch, PLAIN)
  np.testing.assert_allclose(total, 2 * np.exp(20.0) + 0.8, rtol=1e-5)
  k3 = np.exp(20.0) - 1 - 20, np.exp(-20.0) - 1 + 20
  want = (2 * k3[0] + k3[1]) / 3
  np.testing.assert_allclose(stats.kl_old.value, want, rtol=1e-5)
  np.testing.assert_array_equal(slope["w"], 0.0)  # not 0 x inf
  capped = dataclasses.replace(PLAIN, correction=correct("truncated"))
  (_, stats), _ = micro_loss(batch, capped)
  np.testing.assert_allclose(stats.kl_sampler.value, want, rtol=1e-5)


def test_statistics_of_a_correction_by_hand():
  one, _ = two_tokens(np.log([2.0, 0.25]))
  capped = correct("truncated", high=1.3)
  _, stats = table_step([one], dataclasses.replace(PLAIN, correction=capped))
  want = (2 * 1.3 + 0.25) / 3
  np.testing.assert_allclose(stats.correction.value, want, rtol=1e-5)
  np.testing.assert_allclose(stats.corrected.value, 2 / 3, rtol=1e-5)
  k3 = lambda r: r - 1 - np.log(r)
  np.testing.assert_allclose(
    stats.kl_sampler.value, (2 * k3(2.0) + k3(0.25)) / 3, rtol=1e-4
  )
  _, without = table_step([one], PLAIN)
  assert without.correction.count == without.kl_sampler.count == 0.0


def test_the_gap_of_older_tokens_is_told_apart():
  one, _ = two_tokens([0.5, 0.25])
  _, stats = table_step([one], PLAIN)
  assert stats.logp_gap_old.count == 0.0
  for n, want in enumerate((0.5, 0.25)):
    old = np.zeros_like(one.mask)
    old[0, 0, n, 0] = old[0, 0, 2:] = True  # no padding counts
    _, stats = table_step([dataclasses.replace(one, old=old)], PLAIN)
    np.testing.assert_allclose(stats.logp_gap_old.value, want, rtol=1e-4)
  np.testing.assert_allclose(stats.logp_gap.value, 1.25 / 3, rtol=1e-4)


@pytest.mark.ci
def test_a_wrong_sampler_is_corrected():
  """All V tokens, as often as a sampler would draw them that is wrong by e^.3.

  With the weights the gradient is that of the policy's own expectation.
  """
  at = table()
  p = np.asarray(jax.nn.softmax(at["w"][3, 0]))
  q = p * np.exp(0.3 * np.random.default_rng(0).normal(size=V))
  q /= q.sum()
  advantage = np.random.default_rng(1).normal(size=V)
  tokens = np.arange(V, dtype=np.int32).reshape(1, 1, 1, V, 1)
  batch = Batch(
    prompt=np.full((1, 1, 1), 3, np.int32),
    prompt_mask=np.ones((1, 1, 1), bool),
    response=tokens[0],
    mask=np.ones((1, 1, V, 1), bool),
    logp_sampled=np.log(q, dtype=np.float32).reshape(1, 1, V, 1),
    advantage=advantage.reshape(1, 1, V).astype(np.float32),
    weight=q.reshape(1, 1, V).astype(np.float32) * 1e6,
    used=np.array(1, np.int32),
  )
  # d/dz sum_v p_v A_v = p_v (A_v - mean); descent goes against it.
  want = -p * (advantage - p @ advantage)
  far = correct("truncated", high=10.0)
  found = {name: table_step([batch], dataclasses.replace(PLAIN, correction=c),
      old)[0]["w"][3, 0] for name, c, old in (("wrong", None, at),
      ("corrected", far, at), ("corrected, one minibatch", far, None),
      ("capped", correct("truncated", high=1.1), at))}  # fmt: skip
  error = {k: abs(x - want).max() / abs(want).max() for k, x in found.items()}
  assert error["wrong"] > 0.1
  assert error["corrected"] < 1e-4 and error["corrected, one minibatch"] < 1e-4
  assert 1e-3 < error["capped"] < error["wrong"]
