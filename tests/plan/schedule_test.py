"""Tests of brorl_jax/plan/schedule.py: a made-up run, by hand."""

import dataclasses

import pytest
import runs_ahead as made

from brorl_jax.plan import costs, schedule
from brorl_jax.plan.chips import Chip
from brorl_jax.plan.costs import Work
from brorl_jax.plan.hlo import Collective
from brorl_jax.plan.schedule import Part, Schedule

CHIP = Chip("x", "tpu", 1, 1e9, 1e12, 8.0, 64, 8.0)
NAMES = (
  "prefill", "decode", "read", "compact", "score", "gradient", "apply",
  "evaluation: decode",
)  # fmt: skip


def parts(run, names=NAMES, **sent):
  of = [made.measured(n, sent=sent.get(n, {})) for n in names]
  return {p.name: p for p in schedule.of(run, of, CHIP).parts}


def test_how_often_a_step_runs_each_program():
  # 16 of 24 prompts are read together, the others then. 24 x 4 responses of 6
  # tokens in 16 lanes of 3 slots; 8 x 4 x 6 tokens to a microbatch. Two
  # minibatches, whose second needs old log-probabilities.
  calls = {k: v.calls for k, v in parts(made.run(kl_weight=0.0)).items()}
  assert calls == {
    "prefill": 1, "read": 0.5, "decode": 576 / 48, "score": 3.0,
    "gradient": 3.0, "apply": 2,
  }  # fmt: skip


@pytest.mark.parametrize(
  "minibatches, kl_weight, scores", [(1, 0.0, 0), (1, 0.1, 3), (2, 0.1, 6)]
)
def test_scores_are_of_old_and_reference_policies(
  minibatches, kl_weight, scores
):
  run = made.run(minibatches=minibatches, kl_weight=kl_weight)
  assert ("score" in parts(run)) == bool(scores)
  assert not scores or parts(run)["score"].calls == scores
  assert parts(run)["apply"].calls == minibatches


def test_shorter_responses_take_fewer_steps():
  run = made.run(mean_tokens=2)
  assert parts(run)["decode"].calls == 192 / 48
  assert parts(run)["gradient"].calls == 1.0


def test_the_work_of_each_program():
  run = made.run()
  cost = costs.Counts(run.policy, copies=8)
  of = {k: v.work for k, v in parts(run).items()}
  # Prompts have 10 tokens, each of which sees 5 on average.
  assert of["prefill"] == cost.forward(160, 5, 16)
  assert of["read"] == of["prefill"]
  # Responses are half done.
  assert of["decode"] == cost.step(48, 16, 10, 3)
  read = cost.forward(80, 5, 0) + cost.forward(192, 13, 192)
  assert of["score"] == read
  assert of["gradient"] == cost.gradient(80, 5, 0) + cost.gradient(192, 13, 192)
  # TINY has 37 x 16 twice, and two layers with biases and norms.
  layer = 16 * 40 + 24 * 16 + 3 * 16 * 20 + 40 + 2 * 16
  assert of["apply"] == cost.apply(2 * 37 * 16 + 2 * layer + 16)


def test_seconds_are_of_all_calls_with_their_messages():
  run = made.run()
  quiet, slow = (
    parts(run, decode=sent)["decode"]
    for sent in ({}, {Collective("collective-permute", 16, 8): 5})
  )
  assert quiet.seconds == pytest.approx(12 * quiet.work.bytes / 1e9 / 8)
  assert slow.seconds - quiet.seconds == pytest.approx(12 * 5 * 16 / 8)


def test_programs_that_were_not_measured_are_left_out():
  assert parts(made.run(), names=["decode"]).keys() == {"decode"}


def test_no_prompt_is_admitted_where_all_come_first():
  assert "admit" not in parts(made.run(samples=64))


def test_a_run_in_hours():
  one = Part("a", 2, Work(1, 1), 3.0)
  plan = Schedule([one, dataclasses.replace(one, seconds=5.0)], 6, 96, 90, 16)
  assert plan.seconds == 8
  assert plan.device_hours == pytest.approx(90 * 8 * 16 / 3600)
  assert plan.rollouts_per_hour == 96 * 450


def test_a_plan_is_of_the_whole_step():
  plan = schedule.of(made.run(), [made.measured("decode")], CHIP)
  assert (plan.tokens, plan.rollouts, plan.devices) == (6, 96, 8)
  assert plan.steps == made.run().config.run.steps


def test_how_many_programs_a_run_compiles():
  # Rollouts of one page are not compacted: the decode loop and an empty page.
  # One length of responses, or trees: score and gradient; apply, and sums of
  # nothing.
  assert schedule.programs(made.run()) == {
    "sampling": 4 + 2,
    "updating": 2 * 2 + 2,
    "evaluation": 2 + 2,
  }
  alone = made.run(minibatches=1, kl_weight=0.0)
  assert schedule.programs(alone)["updating"] == 2 + 2
