"""Tests of launch/embedded/demonstrations.py and of the embedded policy."""

import collections
import functools
import json
import random

import jax
import numpy as np
import pytest

from brorl_jax.config import Config
from brorl_jax.learner import supervised
from brorl_jax.model import huggingface, tokenizer
from brorl_jax.verdicts import gym
from launch.embedded import demonstrations, steps

ASSETS = huggingface.ASSETS


def families():
  return [
    gym.Family(name, dict(f.settings))
    for name, f in Config().data.families.items()
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
  return demonstrations.pairs(
    puzzles, text(), demonstrations.answers(right), seed=seed, **budget
  )


def test_spoilt_answers_are_wrong_and_plausible():
  rng = random.Random(0)
  numbers = [int(demonstrations.spoil("7", rng)) for _ in range(1000)]
  count = collections.Counter(numbers)
  assert set(count) == {4, 5, 6, 8, 9, 10}
  assert 0.4 < (count[6] + count[8]) / 1000 < 0.6  # half of them off by one
  for word in ("rood", "aab", "noon"):
    wrong = {demonstrations.spoil(word, rng) for _ in range(50)}
    assert word not in wrong
    assert all(sorted(other) == sorted(word) for other in wrong)
  assert (
    demonstrations.spoil("aa", rng) == "aaaa"
    and demonstrations.spoil("x", rng) == "xx"
  )


def test_demonstrations_hold_prompt_answer_and_end():
  some = puzzles(3)
  data = demonstrate(some, {})
  for (prompt, response), puzzle in zip(data, some, strict=True):
    assert prompt == text().render(puzzle.messages)
    *answer, end = response
    assert end in text().stop_ids
    assert text().decode([answer]) == [puzzle.entry["answer"]]


@pytest.mark.ci
def test_share_of_right_answers_is_by_family():
  some = puzzles(400)
  data = demonstrate(some, {"gcd": 0.25, "spell_backward": 0.0})
  right = collections.defaultdict(list)
  for (_, response), puzzle in zip(data, some, strict=True):
    said = text().decode([response])[0]
    right[puzzle.task].append(said == puzzle.entry["answer"])
  assert np.mean(right["gcd"]) == pytest.approx(0.25, abs=0.07)
  assert np.mean(right["spell_backward"]) == 0.0
  assert np.mean(right["leg_counting"]) == 1.0


def test_solutions_are_written_in_the_shares_that_are_asked(monkeypatch):
  monkeypatch.setattr(
    steps, "write", lambda entry, quality, rng: f"{quality} {entry['answer']}"
  )
  qualities = {"careful": 3.0, "direct": 1.0, "sloppy": 0.0}
  respond = demonstrations.solutions(qualities)
  rng = random.Random(0)
  said = collections.Counter()
  for puzzle in puzzles(150):
    messages, response = respond(puzzle, rng)
    quality, answer = response.split()
    said[quality] += 1
    assert answer == puzzle.entry["answer"]
    (message,) = messages
    told = "\nAnswer at once." if quality == "direct" else ""
    assert message["content"] == puzzle.question + told
  assert set(said) == {"careful", "direct"}
  assert said["direct"] / said.total() == pytest.approx(0.25, abs=0.04)


@pytest.mark.parametrize("budget", ["prompt_tokens", "max_new_tokens"])
def test_what_does_not_fit_is_refused(budget):
  with pytest.raises(ValueError, match="budget"):
    demonstrate(puzzles(3), {}, **{budget: 2})


@pytest.mark.ci
def test_embedded_policy_is_within_its_promises():
  policy, params = huggingface.load(ASSETS)
  assert sum(x.size for x in jax.tree.leaves(params)) <= 3_000_000
  files = [f for f in ASSETS.iterdir() if f.is_file()]
  assert sum(f.stat().st_size for f in files) <= 8_000_000
  config = json.loads((ASSETS / "config.json").read_text())
  assert config["model_type"] == "qwen2"

  heldout = gym.heldout(families(), per_family=60, seed=0)
  data = demonstrate(heldout, {})
  layout = supervised.PairLayout(tokens=128, rows=1, microbatches=len(data))
  (rows,) = supervised.epoch(
    [len(x.prompt) + len(x.response) for x in data], layout, range(len(data))
  )
  packed = supervised.pack(data, rows, layout)
  used = slice(len(rows))
  logp = jax.jit(policy.packed_logp)(
    params, packed.tokens[used, 0], packed.segment[used, 0]
  )
  # Exact pass@1 at temperature 1: the probability of the one right answer.
  right = np.zeros(len(data))
  for row, said, counts, segment in zip(
    rows, logp, packed.counts[used, 0], packed.segment[used, 0], strict=True
  ):
    for number, pair in enumerate(row, 1):
      right[pair] = np.exp(said[counts & (segment == number)].sum())
  by_family = collections.defaultdict(list)
  for puzzle, probability in zip(heldout, right, strict=True):
    by_family[puzzle.task].append(probability)
  means = {name: np.mean(p) for name, p in by_family.items()}
  assert len(means) >= 8
  assert 0.15 < np.mean(list(means.values())) < 0.5
  assert all(0.02 < mean < 0.8 for mean in means.values()), means
