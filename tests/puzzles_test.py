"""Tests of brorl_jax/main/puzzles.py."""

import functools
import pathlib

import jax
import numpy as np
import pytest

from brorl_jax import sampler, tokenizer, types
from brorl_jax.main import settings
from brorl_jax.main.puzzles import Puzzles, TooLong
from brorl_jax.tasks import gym
from configs import base

ASSETS = pathlib.Path(tokenizer.__file__).parent / "assets"


@functools.cache
def text():
  return tokenizer.Tokenizer(ASSETS)


def config(**changes):
  c = base.get_config()
  c.n, c.eval_prompts = 16, 4
  c.update(changes)
  return c


@functools.cache
def puzzles():
  return Puzzles(config(), text())


def test_every_candidate_is_a_training_puzzle_of_its_own_place():
  seen = set()
  for step in (1, 2):
    for numbers in (range(8), [8, 11, 9], range(12, 24)):
      prompts = puzzles().prompts(step, numbers)
      assert prompts.index.tolist() == list(numbers)
      for i, position in enumerate(prompts.index):
        puzzle = puzzles().puzzle(step, int(position))
        assert puzzle.id.split("/")[1] == "train"
        assert puzzle.id not in seen
        seen.add(puzzle.id)
        ids = prompts.tokens[i][prompts.mask[i]].tolist()
        assert ids == text().render(puzzle.question)
        assert prompts.mask[i, -1]


def test_an_instruction_follows_every_question():
  instruction = "Between <answer> and </answer>."
  told = Puzzles(config(instruction=instruction, prompt_tokens=80), text())
  prompts = told.prompts(1, range(8))
  for i, position in enumerate(prompts.index):
    question = puzzles().puzzle(1, int(position)).question
    ids = prompts.tokens[i][prompts.mask[i]].tolist()
    assert ids == text().render(f"{question}\n{instruction}")


def test_no_heldout_question_is_drawn():
  heldout = {p.question for p in puzzles().heldout()}
  assert len(heldout) == 8 * 4
  drawn = {puzzles().puzzle(s, p).question for s in range(9) for p in range(99)}
  assert not heldout & drawn


def test_families_are_drawn_by_weight():
  c = config()
  for name in c.families:
    c.families[name].weight = 3.0 if name == "gcd" else 0.0
  some = Puzzles(c, text())
  families = {some.puzzle(1, i).task for i in range(50)}
  assert families == {"gcd"}


def rollouts(responses, T=6):
  """Rollouts that say these texts, the first of each prompt cut short."""
  tokens = np.zeros((len(responses), len(responses[0]), T), np.int32)
  mask = np.zeros(tokens.shape, bool)
  for p, row in enumerate(responses):
    for n, said in enumerate(row):
      ids = [*text().encode(said), text().stop_ids[0]][:T]
      tokens[p, n, : len(ids)] = ids
      mask[p, n, : len(ids)] = True
  return types.Rollouts(
    tokens=tokens,
    logp=np.zeros(tokens.shape, np.float32),
    mask=mask,
    truncated=np.zeros(tokens.shape[:2], bool),
    slot_steps=np.ones(len(responses), np.float32),
  )


def test_scores_are_the_verifiers_word_for_word():
  prompts = puzzles().prompts(3, range(8))
  answers = [puzzles().puzzle(3, int(i)).entry["answer"] for i in prompts.index]
  said = [[a, "7", a, "no", a + "1", "7"] for a in answers]
  got, answer = puzzles().scores(3, prompts, rollouts(said))
  want = [
    [gym.verify(x, puzzles().puzzle(3, i).entry).reward for x in row]
    for i, row in enumerate(said)
  ]
  assert got.tolist() == want
  assert got[:, 0].tolist() == got[:, 2].tolist() == [1.0] * 8
  assert got[:, 4].tolist() == [0.0] * 8
  for row, numbers in zip(said, answer, strict=True):
    texts = dict(zip(numbers.tolist(), row, strict=True))
    assert [texts[n] for n in numbers.tolist()] == row
    assert len(set(numbers.tolist())) == len(set(row))


def test_answers_are_numbered_by_what_verifiers_read():
  """Two responses that say the same differ in words, not in the answer."""
  prompts = puzzles().prompts(3, [0])
  said = [["7", "<answer>7</answer>", "8", "7", "9"]]
  told = rollouts(said, T=24)
  answer = puzzles().scores(3, prompts, told).answer
  assert answer.tolist() == [[0, 0, 1, 0, 2]]


def test_equal_responses_are_judged_once(monkeypatch):
  calls = []
  monkeypatch.setattr(
    gym, "verify", lambda *a, verify=gym.verify: calls.append(a) or verify(*a)
  )
  some = [puzzles().puzzle(3, 0)]
  puzzles().verdicts(some, rollouts([["1", "2", "1", "1", "2", "3"]]))
  assert len(calls) == 3


def test_a_broken_verifier_stops_the_run(monkeypatch):
  broken = gym.Verdict("invalid", 0.0, "it raised", "")
  monkeypatch.setattr(gym, "verify", lambda *_: broken)
  with pytest.raises(settings.UserError, match=r"step 3: .*/train/.*raised"):
    puzzles().scores(
      3, puzzles().prompts(3, range(8)), rollouts([["1"] * 2] * 8)
    )


def test_a_budget_that_most_prompts_exceed_is_refused():
  with pytest.raises(TooLong, match=r"config\.prompt_tokens = 9: raise it"):
    Puzzles(config(prompt_tokens=9), text())


def test_a_rare_long_prompt_gives_its_place_to_a_substitute():
  c = config()
  some = Puzzles(c, text())
  lengths = lambda: [
    len(text().render(some._draw(5, i).question)) for i in range(400)
  ]
  before = lengths()
  limit = sorted(before)[-8]
  assert limit < max(before)
  with c.unlocked():
    c.prompt_tokens = limit
  after = lengths()
  assert max(after) <= limit
  same = [a == b for a, b in zip(before, after, strict=True)]
  assert all(s for s, b in zip(same, before, strict=True) if b <= limit)
  assert after == lengths()  # the same substitutes each time


def test_rollouts_of_the_embedded_policy_are_judged():
  from brorl_jax import hf

  policy, params = hf.load(ASSETS)
  prompts = puzzles().prompts(1, range(8))
  out = sampler.rollouts(
    policy,
    params,
    prompts,
    jax.random.key(0),
    n=16,
    max_new_tokens=6,
    behaviour=sampler.Behaviour(),
    stop_ids=text().stop_ids,
    slots=8,
  )
  reward, _ = puzzles().scores(1, prompts, jax.device_get(out))
  assert 0.02 < reward.mean() < 0.7


def test_candidates_without_end_are_numbered_from_0():
  got = puzzles().candidates(3, frozenset(), most=7)
  assert list(got) == [0, 1, 2, 3, 4, 5, 6]
  assert puzzles().puzzle(1, 0) != puzzles().puzzle(2, 0)


def test_a_run_of_so_many_prompts_draws_each_once_in_a_step():
  some = Puzzles(config(distinct_prompts=12), text())
  orders = [some.candidates(step, frozenset(), most=99) for step in (1, 2, 1)]
  assert all(sorted(order) == list(range(12)) for order in orders)
  assert orders[0] == orders[2] != orders[1]
  # Some are left out, the order of the others is the same.
  rest = some.candidates(1, frozenset({3, 5}), most=99)
  assert rest == [p for p in orders[0] if p not in {3, 5}]
  assert some.candidates(1, frozenset({3, 5}), most=4) == rest[:4]
  # A number names the same prompt in every step.
  for p in range(12):
    assert some.puzzle(1, p) == some.puzzle(2, p)
  assert len({some.puzzle(9, p).id for p in range(12)}) == 12
  other = Puzzles(config(distinct_prompts=12, seed=1), text())
  assert other.candidates(1, frozenset(), most=99) != orders[0]
