"""Tests of brorl_jax/stages/advantages.py: rewards to advantages."""

import numpy as np
import pytest
import scored
from messages import refuses
from one_step import groups, resolved, short

from brorl_jax.stages import advantages as advantage_stage
from brorl_jax.types import RunState


def phase(**changes):
  return resolved(short(**changes)).phases[0]


def informative(some, **changes):
  return advantage_stage.informative(phase(**changes), some)


def shaped(c, some, *, active):
  limit = c.sampling.max_new_tokens
  return advantage_stage.shaped(c.reward, some, limit=limit, active=active)


REWARDS = [[0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0],
  [0.5, 0.5, 0.5, 0.5], [0.5, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]  # fmt: skip


@pytest.mark.parametrize("changes, want", [
  ({"keep": "differ"}, [0, 0, 1, 0, 1, 1]),
  ({"keep": "solved"}, [0, 0, 1, 0, 0, 1]),
  ({"keep": "all"}, [1, 1, 1, 1, 1, 1]),
], ids=str)  # fmt: skip
def test_which_groups_are_kept(changes, want):
  got = informative(groups(REWARDS), **changes)
  assert got.dtype == bool and got.tolist() == want


@pytest.mark.parametrize("keep", ["differ", "solved"])
@pytest.mark.parametrize("masked", [False, True])
def test_the_rule_sees_rollouts_that_count(keep, masked):
  """Of the first group only the right ones count, of the last none."""
  reward = [[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 1, 0], [1, 0, 0, 0]]
  counts = np.array([[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0] * 4], bool)
  some = groups(reward, truncated=~counts & masked)
  if not masked:
    some = some._replace(scores=scored.scores(reward, valid=counts))
  got = informative(some, keep=keep, mask_truncated=masked)
  assert got.tolist() == [False, True, True, False]


@pytest.mark.parametrize("keep", ["differ", "solved"])
def test_a_length_reward_makes_no_group_of_wrong_answers_informative(keep):
  how = dict(keep=keep, length="replace", length_range=(-1.0, 1.0),
    repeat_penalty=(0.01, 1), truncated_factor=0.5)  # fmt: skip
  raw, length = [[0.0] * 4, [1.0] * 4], [[1, 2, 3, 4]] * 2
  cut = [[False, False, False, True]] * 2
  wrong = groups(raw, length=length, truncated=cut)
  reward, _ = shaped(short(**how), wrong, active=True)
  assert len(np.unique(reward[0])) == len(np.unique(reward[1])) == 4
  assert informative(wrong, **how).tolist() == [False, False]


# The cosine of 2 of 4 tokens is halfway, that of 4 is the minimum.
RIGHT, LENGTHS = [[1.0, 0.0, 1.0, 0.5]], [[2, 2, 4, 4]]
COSINE = {"length": "cosine", "length_range": (-1.0, 0.0)}
OVERLONG = {"length": "overlong", "length_range": (-0.5, 0.0)}
REPLACE = {"length": "replace", "length_range": (-1.0, 1.5)}
REPEATS = {"repeat_penalty": (0.25, 1)}


@pytest.mark.parametrize("changes, active, added", [
  ({}, True, [0.0, 0.0, 0.0, 0.0]), (COSINE, True, [-0.5, 0.0, -1.0, 0.0]),
  (COSINE, False, [0.0, 0.0, 0.0, 0.0]),
  (COSINE | {"length_range": (0.0, 1.0)}, True, [0.5, 0.0, 0.0, 0.0]),
  (OVERLONG, False, [0.0, 0.0, -0.5, -0.5]),
  (OVERLONG | {"length_buffer": 4}, True, [-0.25, -0.25, -0.5, -0.5]),
  # Right: halfway from 1.5 to .5, and .5. Wrong, as a half is: halfway from
  # -1 to 0, and 0.
  (REPLACE, True, [0.0, -0.5, -0.5, -0.5]),
  (REPLACE, False, [0.0, 0.0, 0.0, 0.0]),
  (REPEATS, True, [0.0, 0.0, -0.5, -0.5]),
  (REPEATS, False, [0.0, 0.0, 0.0, 0.0]),
  (REPEATS | REPLACE, True, [0.0, -0.5, -1.0, -1.0]),
  ({"repeat_penalty": (0.25, 4)}, True, [0.0, 0.0, 0.0, 0.0]),
], ids=str)  # fmt: skip
def test_rewards_of_length_by_hand(changes, active, added):
  some = groups(RIGHT, length=LENGTHS)
  # Tokens that all differ, but for those of the two long ones: a b b b.
  some.rollouts.tokens[0, 2:, 2:] = some.rollouts.tokens[0, 2:, 1:2]
  reward, got = shaped(short(**changes), some, active=active)
  np.testing.assert_allclose(got, [added], atol=1e-6)
  np.testing.assert_allclose(reward, np.add(RIGHT, [added]), atol=1e-6)


def test_a_response_that_was_cut_keeps_a_share_of_its_reward():
  cut = [[True, False, True, True]]
  some = groups([[1.0, 1.0, 0.5, 0.0]], length=LENGTHS, truncated=cut)
  c = short(truncated_factor=0.25)
  reward, added = shaped(c, some, active=True)
  assert reward.tolist() == [[0.25, 1.0, 0.125, 0.0]]
  assert added.tolist() == [[0.0] * 4]
  # Not of what is added for its length; its raw reward says that it is right.
  reward, _ = shaped(short(truncated_factor=0.0, **COSINE), some, active=True)
  np.testing.assert_allclose(reward, [[-0.5, 0.5, 0.0, 0.0]], atol=1e-6)
  # But of what replaces it, a quarter of 1, -.5, 0 and 0.
  reward, _ = shaped(short(truncated_factor=0.25, **REPLACE), some, active=True)
  np.testing.assert_allclose(reward, [[0.25, 1.0, 0.0, 0.0]], atol=1e-6)


def stage(some, progress=RunState(), **changes):  # noqa: B008
  return advantage_stage.credit(phase(**changes), some, progress)


@pytest.mark.parametrize("advantage, want", [
  # Of the three that count: less 2/3. Their deviation is sqrt(2) / 3.
  ("centered", [1 / 3, -2 / 3, 1 / 3, 0]),
  ("grpo", [2**-0.5, -(2**0.5), 2**-0.5, 0]),
  ("trajectories", [2**-0.5, -(2**0.5), 2**-0.5, 0]),
  # Of their 1 + 1 + 2 tokens: the mean is 1/12, the variance 3/16.
  ("tokens", [3**-0.5, -(3**0.5), 3**-0.5, 0]),
])  # fmt: skip
def test_what_was_cut_may_count_nowhere(advantage, want):
  cut = [[False, False, False, True]]
  some = groups([[1, 0, 1, 0]], length=[[1, 1, 2, 4]], truncated=cut)
  got = stage(some, advantage=advantage, mask_truncated=True)
  np.testing.assert_allclose(got.advantage, [want], atol=2e-5)
  assert got.counts.tolist() == [[True, True, True, False]]
  assert got.metrics["reward/masked_fraction"] == pytest.approx(0.25)
  all_in = stage(some, advantage=advantage)
  assert all_in.counts.all() and all_in.metrics["reward/masked_fraction"] == 0.0
  assert all_in.advantage[0, 3] < 0.0


@pytest.mark.parametrize("masked", [False, True])
def test_only_right_rollouts_that_count_are_boosted(masked):
  """Not the cut, the invalid, the half right, nor the two that are empty."""
  reward, cut = [[1, 0, 1, 1], [0.5, 2, 1, 1]], [[0, 0, 0, 1], [0, 0, 0, 0]]
  some = groups(reward, truncated=np.array(cut, bool))
  some.rollouts.mask[1, 2:] = some.scores.valid[1, 2:] = False
  some.scores.valid[0, 2] = False
  how = dict(advantage="centered", mask_truncated=masked)
  plain, got = stage(some, **how), stage(some, **how, boost=0.25)
  want = [[1, 0, 0, not masked], [0, 1, 0, 0]]
  np.testing.assert_allclose(
    got.advantage - plain.advantage, 0.25 * np.array(want), atol=1e-6
  )
  assert got.advantage.dtype == np.float32
  assert got.metrics == plain.metrics  # the theorem is of the advantage alone


def test_a_group_that_shaping_made_equal_gets_exactly_0():
  """Not the shift that longer wrong answers give to all others."""
  length, cut = [[4, 4], [1, 3]], [[True, False], [False, False]]
  some = groups([[1, 0], [1, 0]], length=length, truncated=cut)
  got = stage(some, advantage="tokens", truncated_factor=0.0).advantage
  np.testing.assert_array_equal(got[0], 0.0)
  np.testing.assert_allclose(got[1], [3**0.5, -(3**-0.5)], rtol=1e-5)


def test_the_schedule_of_the_length_reward_has_its_own_count():
  some, progress, seen = groups(RIGHT, length=LENGTHS), RunState(tokens=7), []
  # Two steps before a phase that turns it on: nothing is counted.
  for _ in range(2):
    got = stage(some, progress, length_steps=(1, 2))
    assert got.progress == progress
    assert got.metrics["reward/length_active"] == 0.0
  for _ in range(5):
    got = stage(some, progress, **COSINE, length_steps=(1, 2))
    progress = got.progress
    seen.append(got.metrics["reward/length_active"])
    mean = (-0.5 - 1.0) / 4 if seen[-1] else 0.0
    assert got.metrics["reward/length_mean"] == pytest.approx(mean)
    assert got.metrics["reward/shaped_mean"] == pytest.approx(2.5 / 4 + mean)
  assert seen == [1.0, 0.0, 0.0, 1.0, 0.0]
  assert progress == RunState(tokens=7, shaped=5)


@pytest.mark.parametrize("done, off, active", [(3, 0, 1.0), (3, 1, 0.0)])
@pytest.mark.parametrize("how", [COSINE, REPLACE, REPEATS, OVERLONG, {}])
def test_without_off_the_length_reward_stays_on(done, off, active, how):
  some, follows = groups(RIGHT, length=LENGTHS), how not in (OVERLONG, {})
  got = stage(some, RunState(shaped=done), **how, length_steps=(3, off))
  assert got.metrics["reward/length_active"] == (active if follows else 0.0)
  assert got.progress.shaped == done + follows


MINE = """
def raw(reward, valid, length):
  return reward - 0.5

def endless(reward, valid, length):
  return reward / 0.0
"""


def test_an_own_advantage_gives_nothing_to_what_does_not_count(tmp_path):
  (tmp_path / "mine.py").write_text(MINE)
  some = groups([[1, 0, 1, 1]], truncated=[[False, False, False, True]])
  mine = f"{tmp_path}/mine.py"
  got = stage(some, advantage=f"{mine}:raw", mask_truncated=True)
  np.testing.assert_array_equal(got.advantage, [[0.5, -0.5, 0.5, 0.0]])
  with refuses(FloatingPointError, "config.advantage.kind ... mine.py:endless"):
    stage(some, advantage=f"{mine}:endless")


# Prompts of 4, 2 and 4 rollouts of which one is right.
def ragged():
  it = groups([[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0]], length=[[1] * 4] * 3)
  it.rollouts.mask[1, 2:] = it.scores.valid[1, 2:] = False
  it.scores.responses[1, 2:] = None
  return it


def test_a_prompt_with_a_number_of_its_own_by_hand():
  """n / mean(n) = 1.2, .6, 1.2; with leave-one-out 1 and -1/3, 1 and -1."""
  some = ragged()
  rule = {"rounds": (2, 4), "stop_right": 1}
  got = stage(some, advantage="leave_one_out", **rule)
  want = [[5 / 6, *[-5 / 18] * 3],
    [5 / 3, -5 / 3, 0, 0], [-5 / 18, -5 / 18, 5 / 6, -5 / 18]]  # fmt: skip
  np.testing.assert_allclose(got.advantage, want, atol=1e-6)
  assert not got.advantage[1, 2:].any() and not got.counts[1, 2:].any()
  assert got.metrics["reward/masked_fraction"] == 0.0
  assert got.metrics["reward/shaped_mean"] == pytest.approx(3 / 10)
  each = 1 / 4, 1 / 2, 1 / 4  # of a prompt alone
  assert got.metrics["theory/coefficient"] == pytest.approx(sum(each) / 3)
