"""The sampling stage passes on what was planned."""

import dataclasses

import configured
import numpy as np
import one_step
import pytest
from configured import config
from loads import SMALL

from brorl_jax import meshes, types
from brorl_jax.main.commands import evaluate
from brorl_jax.main.commands import plan as plan_command
from brorl_jax.main.stages import sampling
from brorl_jax.main.stages.scoring import Scorer
from brorl_jax.meshes import ONE
from brorl_jax.model import huggingface, tokenizer
from brorl_jax.rollout import prefixes, sampler
from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.runs.run_state import RunState


@pytest.mark.ci
def test_the_sampler_gets_what_was_planned(monkeypatch):
  class Called(Exception):
    pass

  def called(*args, **named):
    raise Called(args[0], named)

  monkeypatch.setattr(sampler, "rollouts", called)
  monkeypatch.setattr(sampling, "stream", called)
  c = config(int8_cache=True, lanes=3, slots=40, max_new_tokens=17)
  mesh = meshes.make_mesh(fsdp=8)
  got = plan_command.make(c, SMALL, axes=ONE, keep_reference=True)
  planned = dataclasses.replace(got.rollouts, blocks=77)
  text = tokenizer.Tokenizer(huggingface.ASSETS)
  with pytest.raises(Called) as e:
    sampling.streamed(c.sampling, SMALL, text.stop_ids, mesh, planned)(
      {}, lambda room, idle: None, None
    )
  policy, streamed = e.value.args
  assert (streamed["slots"], streamed["lanes"], streamed["n"]) == (40, 3, 512)
  assert streamed["blocks"] == 77
  assert streamed["places"] == 8  # 4096 / 512
  assert streamed["sampling"] == SamplingParams()
  assert policy == dataclasses.replace(SMALL, int8_cache=True)
  examples = configured.examples(c, text)
  scorer = Scorer(c.reward, examples)
  with pytest.raises(Called) as e:
    measure = evaluate.measure(
      c, SMALL, examples, scorer, mesh, got.evaluations, got.chunk
    )
    next(measure({}, examples.heldout()))
  policy, named = e.value.args
  assert (named["slots"], named["lanes"], named["n"]) == (16, 256, 16)
  assert named["sampling"] == SamplingParams(temperature=0.6, top_p=0.95)
  assert policy == dataclasses.replace(SMALL, int8_cache=True)


@pytest.mark.parametrize(
  "T, memory, shares", [(16, 2**34, True), (17, 2**34, False), (16, 1, False)]
)
def test_short_rollouts_share_rows_where_that_pays(
  T, memory, shares, monkeypatch
):
  called, one = [], np.ones((1, 2), np.int32)
  some = types.Prompts(one, one > 0, one[:, 0])
  cube, real = one[..., None], one.astype(np.float32)
  made = types.Rollouts(cube, real[..., None], cube > 0, one > 0, real[:, 0])
  note = lambda name: lambda *_, **how: called.append((name, {*how})) or made
  monkeypatch.setattr(sampling, "stream", note("slots"))
  monkeypatch.setattr(sampler, "rollouts", note("slots"))
  monkeypatch.setattr(prefixes, "stream", note("rows"))
  monkeypatch.setattr(prefixes, "rollouts", note("rows"))
  mesh = meshes.make_mesh(fsdp=8)
  c = config(max_new_tokens=T)
  got = plan_command.make(c, SMALL, axes=ONE, keep_reference=True)
  fits = dataclasses.replace(got.rollouts, memory_bytes=memory)
  sampling.streamed(c.sampling, SMALL, (2,), mesh, fits)({}, None, None)
  sampling.heldout(c.sampling, c.eval, SMALL, (2,), mesh, fits)({}, some, None)
  assert [name for name, _ in called] == ["rows" if shares else "slots"] * 2
  assert all(("slots" in how) != shares for _, how in called)


def stop(**changes):
  some = dict(allocation="stop", n=64, n_min=4, groups=8, samples=128)
  return config(**some | changes).sampling


def test_rounds_grow_fourfold_up_to_n():
  assert stop().cumulative == (4, 16, 64)
  assert stop(n=48).cumulative == (4, 16, 48)
  assert stop(rounds=(8, 64)).cumulative == (8, 64)
  assert stop(n_min=64).cumulative == (64,)


def test_chunks_decode_in_as_many_rows_as_prompts_would():
  assert stop(slots=64, lanes=2).chunk_lanes == 2 * 64 // 4
  assert stop(slots=2, lanes=3).chunk_lanes == 3
  assert stop(slots=64, lanes=0).chunk_lanes == 0  # as many as fit
  assert config(n=64, slots=32, lanes=2).sampling.chunk_lanes == 2


def test_a_stop_plan_asks_for_rounds_until_the_budget_ends_them():
  plan_of = sampling.plan_of(stop(stop_right=1), candidates=80)
  plan = plan_of(RunState(), range(80))
  assert (plan.chunk, plan.most, plan.rule.first(3)) == (4, 64, 4)
  valid = lambda reward: np.ones(len(reward), bool)
  more = lambda *reward: plan.rule.more(np.array(reward), valid(reward))
  assert more(0, 0, 0, 0) == 12 and more(*[0] * 16) == 48
  assert more(1, 0, 0, 0) == 12  # three wrong ones do not suffice
  assert more(1, *[0] * 15) == 0 and more(*[0] * 64) == 0
  assert more(0.9, *[0] * 15) == 48  # nearly right is not right
  plan = plan_of(RunState(most=16), range(80))
  assert more(*[0] * 16) == 0


@pytest.mark.parametrize(
  "drawn, before, most",
  [
    ([64, 4, 4, 4], 0, 0),  # 76 of 128: as it was
    ([64, 64, 4, 4], 0, 16),  # 136: with 16 at most 40
    ([64, 64], 0, 0),  # 128 are not more than 128
    ([64] * 40, 0, 4),  # even 4 are too many
    ([16, 4, 4, 4], 16, 0),  # 28 + 48 fit
    ([16] * 1 + [4] * 16, 16, 0),  # 80 + 48 just fit
    ([16] * 3 + [4], 16, 16),  # 52 + 3 x 48 do not
    ([4] * 4, 4, 16),  # 16 + 4 x 12
  ],
)
def test_a_budget_acts_on_the_next_step(drawn, before, most):
  some = one_step.groups(np.zeros((len(drawn), 64)))
  mask = (
    some.rollouts.mask & (np.arange(64) < np.array(drawn)[:, None])[..., None]
  )
  some = some._replace(rollouts=dataclasses.replace(some.rollouts, mask=mask))
  got = sampling.after_step(stop())(RunState(most=before), some)
  assert (got.most, got.most_before) == (most, before)


def test_who_had_enough_with_the_last_round_needs_no_other():
  """Of three prompts with 16 two have 4 right and 4 wrong ones: 52 + 48 fit."""
  some = one_step.groups(np.zeros((4, 64)))
  reward = some.scores.reward.copy()
  reward[:2, :4] = 1.0
  has = np.arange(64) < np.array([16, 16, 16, 4])[:, None]
  rollouts = dataclasses.replace(
    some.rollouts, mask=some.rollouts.mask & has[..., None]
  )
  some = some._replace(
    rollouts=rollouts, scores=some.scores._replace(reward=reward)
  )
  got = sampling.after_step(stop())(RunState(most=16), some)
  assert (got.most, got.most_before) == (0, 16)


@pytest.mark.parametrize("allocation", ["history", "knapsack", "coba"])
def test_numbers_from_earlier_visits(allocation):
  """Pool prompts 7 and 9 were seen; the others get the least."""
  c = stop(allocation=allocation, distinct_prompts=20)
  plan_of = sampling.plan_of(c, candidates=10)
  seen = {7: (1.0, 32.0), 9: (14.0, 16.0)}
  plan = plan_of(RunState(seen=seen), [9, 7, 2, 3])
  first = {p: plan.rule.first(p) for p in (9, 7, 2, 3)}
  assert first[2] == first[3] == 4
  # 7 is right in 1 of 22, 9 in 6 of 7: CoBA takes the easy one while many fail.
  assert (first[7] > first[9]) == (allocation != "coba")
  assert plan.rule.more(np.zeros(first[7]), np.ones(first[7], bool)) == 0
  assert first[7] + first[9] == 2 * 128 // 8
  again = plan_of(RunState(seen=seen), [9, 7, 2, 3])
  assert again.rule == plan.rule


def test_a_step_is_remembered_by_prompt():
  some = one_step.groups([[1, 0, 1, 0], [0, 0, 0, 0]])
  c = stop(allocation="history", distinct_prompts=20)
  got = sampling.after_step(c)(RunState(seen={1: (2.0, 8.0)}), some)
  assert got.seen == {0: (2.0, 4.0), 1: (1.0, 8.0)}
  fixed = sampling.after_step(config().sampling)(RunState(), some)
  assert fixed == RunState()
