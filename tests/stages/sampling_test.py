"""The sampling stage passes on what was planned."""

import dataclasses

import jax
import numpy as np
import pytest
from configured import config
from one_step import resolved

from brorl_jax import types
from brorl_jax.model import sharding
from brorl_jax.plan.memory import RolloutPlan
from brorl_jax.rollout import prefixes, sampler, stream
from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.rollout.slots import RolloutSpec
from brorl_jax.stages import sampling

ONE = np.ones((1, 2), np.int32)
PROMPTS = types.Prompts(ONE, ONE > 0, ONE[:, 0])
MADE = types.Rollouts(ONE[..., None], np.ones((1, 2, 1), np.float32),
  ONE[..., None] > 0, ONE > 0, np.ones(1, np.float32))  # fmt: skip


@pytest.fixture
def called(monkeypatch):
  calls = []

  def note(name, result):
    def call(*args, **named):
      calls.append((name, args, named))
      return result

    return call

  monkeypatch.setattr(stream, "stream", note("slots", iter(())))
  monkeypatch.setattr(sampler, "rollouts", note("slots", MADE))
  monkeypatch.setattr(prefixes, "stream", note("rows", iter(())))
  monkeypatch.setattr(prefixes, "rollouts", note("rows", MADE))
  return calls


def sample(this, **changed):
  phase = dataclasses.replace(this.phases[0], **changed)
  feed, key = lambda room, idle: None, jax.random.key(0)
  sampling.stream_rollouts(this, phase, {"w": ONE}, feed, key)
  how = phase.memory.heldout
  sampling.sample_heldout(this, phase.config, how, {}, PROMPTS, key)


def test_the_sampler_gets_what_was_planned(called, monkeypatch):
  this = resolved(config(
    int8_cache=True, lanes=3, slots=40, max_new_tokens=17, temperature=0.9
  ))  # fmt: skip
  # On CPUs there are none.
  blocks = property(lambda plan: plan.slots + 1)
  monkeypatch.setattr(RolloutPlan, "blocks", blocks)
  sample(this, memory=this.phases[0].memory)
  (_, (trained, *_), streamed), (_, (held_out, *_), _) = called
  assert streamed == {"places": 8}
  assert trained == RolloutSpec(
    policy=dataclasses.replace(this.policy, int8_cache=True),
    n=512, max_new_tokens=17, sampling=SamplingParams(temperature=0.9),
    stop_ids=this.text.stop_ids, slots=40, lanes=3, blocks=41,
    mesh=sharding.local_mesh(this.mesh), groups=2,
  )  # fmt: skip
  assert held_out == dataclasses.replace(trained, n=16, slots=8,
    lanes=16, blocks=9, sampling=SamplingParams(0.6, top_p=0.95))  # fmt: skip


@pytest.mark.parametrize("T, how", [(17, "slots"), (6, "rows")])
def test_rounds_are_sampled_in_chunks(called, T, how):
  sample(resolved(stop(max_new_tokens=T)))
  (name, (spec, *_), streamed), *_ = called
  assert (name, spec.n, streamed["places"]) == (how, 4, 16)


@pytest.mark.parametrize(
  "T, memory, shares", [(16, 2**34, True), (17, 2**34, False), (16, 1, False)]
)
def test_short_rollouts_share_rows_where_that_pays(called, T, memory, shares):
  this = resolved(config(max_new_tokens=T))
  plans = this.phases[0].memory

  def on(plan):
    policy = plan.load.policy
    at = dataclasses.replace(policy.target, memory_bytes=memory)
    policy = dataclasses.replace(policy, target=at)
    load = dataclasses.replace(plan.load, policy=policy)
    return dataclasses.replace(plan, load=load)

  plans = dataclasses.replace(
    plans, rollouts=on(plans.rollouts), heldout=on(plans.heldout)
  )
  sample(this, memory=plans)
  assert [name for name, *_ in called] == ["rows" if shares else "slots"] * 2
  row = "a row for each prefix, of at most 16 tokens"
  phase = dataclasses.replace(this.phases[0], memory=plans)
  assert sampling.form(phase) == (row if shares else plans.rollouts.line())


def stop(**changes):
  some = dict(n=64, rounds=(4, 16, 64), samples=512, in_flight=64)
  return config(**some | changes)


def test_chunks_decode_in_as_many_rows_as_prompts_would():
  lanes = lambda c: resolved(c).phases[0].memory.rollouts.lanes
  assert lanes(stop(slots=64, lanes=2, in_flight=256)) == 2 * 64 // 4
  assert lanes(stop(slots=2, lanes=3)) == 3
  assert lanes(stop(slots=64, lanes=0)) == 16  # as many as fit
  assert lanes(config(n=64, slots=32, lanes=2)) == 2


def test_the_plan_has_the_rounds_of_the_config():
  plan_of = lambda c: sampling.round_plan(resolved(c).phases[0])
  plan = plan_of(stop(stop_right=3))
  assert plan == ((4, 16, 64), 3, 4) and (plan.chunk, plan.n) == (4, 64)
  assert plan_of(config(n=64)).after == (64,)
