"""Tests of brorl_jax/warmup.py and of the embedded policy."""

import collections
import functools
import json
import pathlib
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brorl_jax import hf, tokenizer, update, warmup
from brorl_jax.attention import Rope
from brorl_jax.policy import Policy
from brorl_jax.rl import losses
from brorl_jax.tasks import gym
from configs import base

ASSETS = pathlib.Path(hf.__file__).parent / "assets"
POLICY = Policy(
  vocab=512,
  width=16,
  layers=1,
  heads=2,
  kv_heads=1,
  head_size=8,
  mlp=32,
  rope=Rope(100.0),
  norm_eps=1e-6,
  tied=True,
  qkv_bias=True,
)


def families():
  return [
    gym.Family(name, f.settings.to_dict())
    for name, f in base.families().items()
  ]


@functools.cache
def text():
  return tokenizer.Tokenizer(ASSETS)


def puzzles(count):
  return [
    gym.puzzle(family, "warmup", i, seed=7)
    for family in families()
    for i in range(count)
  ]


def demonstrate(puzzles, right, seed=0, **changed):
  budget = dict(prompt_tokens=40, max_new_tokens=6) | changed
  return warmup.demonstrations(
    puzzles, text(), right=right, seed=seed, **budget
  )


def test_spoilt_answers_are_wrong_and_plausible():
  rng = random.Random(0)
  numbers = [int(warmup.spoil("7", rng)) for _ in range(1000)]
  count = collections.Counter(numbers)
  assert set(count) == {4, 5, 6, 8, 9, 10}
  assert 0.4 < (count[6] + count[8]) / 1000 < 0.6  # half of them off by one
  for word in ("rood", "aab", "noon"):
    wrong = {warmup.spoil(word, rng) for _ in range(50)}
    assert word not in wrong
    assert all(sorted(other) == sorted(word) for other in wrong)
  assert warmup.spoil("aa", rng) == "aaaa" and warmup.spoil("x", rng) == "xx"


def test_demonstrations_hold_prompt_answer_and_end():
  some = puzzles(3)
  data = demonstrate(some, {})
  for i, puzzle in enumerate(some):
    prompt = data.prompt[i][data.prompt_mask[i]].tolist()
    assert prompt == text().render(puzzle.messages)
    *answer, end = data.response[i][data.mask[i]].tolist()
    assert end in text().stop_ids
    assert text().decode([answer]) == [puzzle.entry["answer"]]


def test_share_of_right_answers_is_by_family():
  some = puzzles(400)
  data = demonstrate(some, {"gcd": 0.25, "spell_backward": 0.0})
  right = collections.defaultdict(list)
  for i, puzzle in enumerate(some):
    said = text().decode([data.response[i][data.mask[i]].tolist()])[0]
    right[puzzle.task].append(said == puzzle.entry["answer"])
  assert np.mean(right["gcd"]) == pytest.approx(0.25, abs=0.07)
  assert np.mean(right["spell_backward"]) == 0.0
  assert np.mean(right["leg_counting"]) == 1.0


@pytest.mark.parametrize("budget", ["prompt_tokens", "max_new_tokens"])
def test_what_does_not_fit_is_refused(budget):
  with pytest.raises(ValueError, match="budget"):
    demonstrate(puzzles(3), {}, **{budget: 2})


def test_training_lowers_the_loss_and_is_deterministic():
  data = demonstrate(puzzles(20), {})
  tx, _ = update.optimizer(
    lr=1e-2,
    warmup=5,
    total=60,
    b1=0.9,
    b2=0.95,
    eps=1e-8,
    weight_decay=0.0,
    max_grad_norm=1.0,
  )
  run = lambda steps, seed: warmup.train(
    POLICY.init(jax.random.key(0)),
    data,
    response_logp=POLICY.response_logp,
    tx=tx,
    steps=steps,
    batch=32,
    seed=seed,
    log=lambda i, loss: losses.append(loss),
  )
  losses = []
  one, two = run(60, 0), run(60, 0)
  jax.tree.map(np.testing.assert_array_equal, one, two)
  first, other = run(1, 0), run(1, 1)
  assert losses[0] == losses[1] < 0.6 * losses[2]
  assert not np.array_equal(
    first["embed"]["embedding"], other["embed"]["embedding"]
  )


def test_embedded_policy_is_within_its_promises():
  policy, params = hf.load(ASSETS)
  assert sum(x.size for x in jax.tree.leaves(params)) <= 3_000_000
  files = [f for f in ASSETS.iterdir() if f.is_file()]
  assert sum(f.stat().st_size for f in files) <= 8_000_000
  config = json.loads((ASSETS / "config.json").read_text())
  assert config["model_type"] == "qwen2"

  heldout = gym.heldout(families(), per_family=60, seed=0)
  data = demonstrate(heldout, {})
  logits = policy.response_logits(
    params,
    jnp.asarray(data.prompt),
    jnp.asarray(data.prompt_mask),
    jnp.asarray(data.response[:, None]),
  )
  logp, _ = losses.token_logp(logits, jnp.asarray(data.response[:, None]))
  # Exact pass@1 at temperature 1: the probability of the one right answer.
  right = np.exp(np.where(data.mask, logp[:, 0], 0.0).sum(axis=1))
  by_family = collections.defaultdict(list)
  for puzzle, probability in zip(heldout, right, strict=True):
    by_family[puzzle.task].append(probability)
  means = {name: np.mean(p) for name, p in by_family.items()}
  assert len(means) >= 8
  assert 0.15 < np.mean(list(means.values())) < 0.5
  assert all(0.02 < mean < 0.8 for mean in means.values()), means
