"""The sampling stage passes on what was planned."""

import dataclasses

import configured
import numpy as np
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
  some = dict(n=64, rounds=(4, 16, 64), samples=512)
  return config(**some | changes).sampling


def test_chunks_decode_in_as_many_rows_as_prompts_would():
  assert stop(slots=64, lanes=2).chunk_lanes == 2 * 64 // 4
  assert stop(slots=2, lanes=3).chunk_lanes == 3
  assert stop(slots=64, lanes=0).chunk_lanes == 0  # as many as fit
  assert config(n=64, slots=32, lanes=2).sampling.chunk_lanes == 2


def test_the_plan_has_the_rounds_of_the_config():
  plan = sampling.plan_of(stop(stop_right=1))
  assert plan == ((4, 16, 64), 1, 4) and (plan.chunk, plan.most) == (4, 64)
  assert sampling.plan_of(config(n=64).sampling).after == (64,)
