"""A step on fake clocks, beside the sampler's programs and by hand."""

import dataclasses

import numpy as np
import pytest
import runs_ahead
from messages import refuses
from small_decoders import KEY, RECALL, Feed, by_prompt, numbered, spec

from brorl_jax.plan import step_time
from brorl_jax.plan.step_time import Case
from brorl_jax.plan.topology import Chip
from brorl_jax.rollout import stream
from brorl_jax.rollout.dynamic_sampling import Candidates, RoundPlan
from brorl_jax.types import Prompts

FREE = step_time._Rates(0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0)


def prompts_of(some):
  index = np.array(some, np.int32)
  return Prompts(index[:, None], index[:, None] >= 0, index)


def sampled(lengths, program, places, rates=FREE, prompt=0):
  """A process that samples these rollouts of prompts that all pass."""
  count, n = lengths.shape
  plan, passes = RoundPlan((n,)), np.ones(count, bool)
  load = step_time._Load(
    lengths, passes, count, plan, program, prompt, 1, 1, places, rates
  )
  of = Candidates(prompts_of, range(count), count, plan)
  process = step_time._Process(load, of)
  while not process.over:
    process.judge(np.inf)
    process.turn()
  return process


@pytest.mark.parametrize(
  "lanes, slots, places", [(3, 5, 8), (1, 4, 2), (2, 16, 4)]
)
def test_devices_take_the_steps_of_the_programs(lanes, slots, places):
  told, how = [], spec(lanes=lanes, slots=slots)
  feed = Feed(numbered(11), most=100)
  made = stream.stream(how, RECALL, feed, KEY, places=places, watch=told.append)
  got = by_prompt(made)
  lengths = np.stack([got[p].mask[0].sum(axis=-1) for p in range(11)])
  process = sampled(lengths, how.program(places, streams=True), places)
  assert process.slot_steps == told[-1].slot_steps
  assert process.busy == lengths.sum() - lengths.size


def test_seconds_by_hand():
  """Rollouts of 5 and 3 tokens in one slot: 4 and 2 steps, behind a prompt."""
  program = spec(n=2, slots=1).program(1, streams=True)
  rates = step_time._Rates(0.5, 10.0, 100.0, 20.0, 50.0, 0.0, 3.0)
  process = sampled(np.array([[5, 3]]), program, 1, rates, prompt=7)
  # Weights take 2 s, more than one row's products; of keys a step reads those
  # of the prompt and of the tokens before.
  keys = 1.1 * 3 * (6 * 7 + 4 * 2 + 2 * 1) / 10
  assert process.clock == pytest.approx(7 * 50 / 100 + 6 * 2.5 + keys)


def test_lengths_have_the_mean_and_the_limit():
  lengths = step_time._lengths(Case(700, 1.0, 3), (400, 64), 1536)
  assert lengths.mean() == pytest.approx(700, rel=0.01)
  assert lengths.min() >= 1 and lengths.max() == 1536
  assert 0.3 < np.log(lengths).mean(axis=1).std() < 0.5  # of prompts


def test_a_step_of_a_run():
  job = runs_ahead.run(kl_weight=0.0)

  def at(chip, mean_tokens=3, pass_rate=1.0):
    case = Case(mean_tokens, pass_rate)
    return step_time.step_time(job.run, job.phase, chip, case)

  chip = Chip("h100", "gpu", 2**36, 3.35e12, 989e12)
  one = at(chip)
  assert one.drawn == 96 and one.surplus == 0 and one == at(chip)
  assert 0 < one.busy <= 1 and 0 <= one.padding < 1
  few = at(chip, pass_rate=0.3)
  assert few.drawn > 2 * 96 and few.rollouts > one.rollouts
  slow = at(dataclasses.replace(chip, flops=989e11))
  assert slow.update == pytest.approx(10 * one.update)
  job = runs_ahead.run(kl_weight=0.0, max_age=1)
  crossed = at(chip, pass_rate=0.3)
  assert crossed.surplus == 0 and crossed.busy > few.busy
  with refuses(ValueError, "--mean_tokens=6 ... --pass_rate=0 "):
    at(chip, 6, 0.0)
