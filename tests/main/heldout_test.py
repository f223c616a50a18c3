"""Tests of brorl_jax/main/heldout.py: which prompts, key and sizes."""

import dataclasses

import jax
import numpy as np
import pytest
from one_step import config, resolved

from brorl_jax.main import heldout
from brorl_jax.stages import sampling


class Sampled(Exception):
  """Ends an evaluation where it samples."""


@pytest.fixture
def sampled(monkeypatch):
  """What the first chunk of an evaluation is sampled with."""

  def sample(this, c, how, params, prompts, key):
    raise Sampled(c, how, params, prompts, key)

  monkeypatch.setattr(sampling, "sample_heldout", sample)

  def of(chunks):
    with pytest.raises(Sampled) as e:
      next(chunks)
    return e.value.args

  return of


@pytest.mark.parametrize("first", [0, 3])
def test_a_prompt_draws_by_its_number_with_the_key_of_step_0(
  wired, sampled, first
):
  this, examples, scorer, *_ = wired
  c, how = this.config, this.phases[0].memory.heldout
  how = dataclasses.replace(how, prompts=5)
  prompts, params = examples.heldout(), {"w": np.arange(3.0)}
  told, fits, own, drawn, key = sampled(
    heldout.records(
      this, c, how, examples, scorer, params, prompts, first=first
    )
  )
  assert (told, fits) == (c, how)
  np.testing.assert_array_equal(own["w"], params["w"])
  index = np.arange(first, first + 5)
  np.testing.assert_array_equal(drawn.index, index)
  want = examples.pad(prompts[first : first + 5], index.astype(np.int32))
  np.testing.assert_array_equal(drawn.tokens, want.tokens)
  assert key == jax.random.fold_in(jax.random.key(c.run.seed), 0)


def test_a_step_is_evaluated_as_its_phase_samples(wired, sampled):
  this = resolved(
    config(
      phases=(
        {"from_step": 3, "sampling.max_new_tokens": 9},
        {"from_step": 5, "sampling.max_new_tokens": 5},
      )
    )
  )
  _, examples, scorer, *_ = wired
  sizes = {}
  for step in range(7):
    chunks = heldout.at_step(
      this, examples, scorer, step, {}, examples.heldout()
    )
    c, how, *_ = sampled(chunks)
    sizes[step] = c.sampling.max_new_tokens
    assert how in [p.memory.heldout for p in this.phases if p.config == c]
  assert [*sizes.values()] == [6, 6, 6, 9, 9, 5, 5]
