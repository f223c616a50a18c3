"""Tests of brorl_jax/main/examples.py."""

import functools
import pathlib

import pytest

from brorl_jax import tokenizer
from brorl_jax.ledger import Ledger
from brorl_jax.main.examples import Examples, TooLong
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
def examples():
  return Examples(config(), text())


def test_every_candidate_is_a_training_puzzle_of_its_own_place():
  seen = set()
  for step in (1, 2):
    for numbers in (range(8), [8, 11, 9], range(12, 24)):
      prompts = examples().prompts(step, numbers)
      assert prompts.index.tolist() == list(numbers)
      for i, position in enumerate(prompts.index):
        puzzle = examples().example(step, int(position))
        assert puzzle.id.split("/")[1] == "train"
        assert puzzle.id not in seen
        seen.add(puzzle.id)
        ids = prompts.tokens[i][prompts.mask[i]].tolist()
        assert ids == text().render(puzzle.messages)
        assert prompts.mask[i, -1]


def test_an_instruction_follows_every_question():
  instruction = "Between <answer> and </answer>."
  c = config(prompt_tokens=80)
  c.domains.gym.instruction = instruction
  told = Examples(c, text())
  prompts = told.prompts(1, range(8))
  for i, position in enumerate(prompts.index):
    question = examples().example(1, int(position)).question
    ids = prompts.tokens[i][prompts.mask[i]].tolist()
    asked = [{"role": "user", "content": f"{question}\n{instruction}"}]
    assert ids == text().render(asked)


def test_no_heldout_question_is_drawn():
  heldout = {p.question for p in examples().heldout()}
  assert len(heldout) == 8 * 4
  drawn = {
    examples().example(s, p).question for s in range(9) for p in range(99)
  }
  assert not heldout & drawn


def test_families_are_drawn_by_weight():
  c = config()
  for name in c.families:
    c.families[name].weight = 3.0 if name == "gcd" else 0.0
  some = Examples(c, text())
  families = {some.example(1, i).task for i in range(50)}
  assert families == {"gcd"}


def test_a_budget_that_most_prompts_exceed_is_refused():
  with pytest.raises(TooLong, match=r"config\.prompt_tokens = 9: raise it"):
    Examples(config(prompt_tokens=9), text())


def test_a_rare_long_prompt_gives_its_place_to_a_substitute():
  c = config()
  some = Examples(c, text())
  lengths = lambda: [
    len(text().render(some._draw(5, i).messages)) for i in range(400)
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


def test_candidates_without_end_are_numbered_from_0():
  got = examples().candidates(3, Ledger(), most=7)
  assert list(got) == [0, 1, 2, 3, 4, 5, 6]
  assert examples().example(1, 0) != examples().example(2, 0)


def test_a_run_of_so_many_prompts_draws_each_once_in_a_step():
  some = Examples(config(distinct_prompts=12), text())
  orders = [some.candidates(step, Ledger(), most=99) for step in (1, 2, 1)]
  assert all(sorted(order) == list(range(12)) for order in orders)
  assert orders[0] == orders[2] != orders[1]
  # Some are left out, the order of the others is the same.
  resting = Ledger(rests={3: 9, 5: 9})
  rest = some.candidates(1, resting, most=99)
  assert rest == [p for p in orders[0] if p not in {3, 5}]
  assert some.candidates(1, resting, most=4) == rest[:4]
  # A number names the same prompt in every step.
  for p in range(12):
    assert some.example(1, p) == some.example(2, p)
  assert len({some.example(9, p).id for p in range(12)}) == 12
  other = Examples(config(distinct_prompts=12, seed=1), text())
  assert other.candidates(1, Ledger(), most=99) != orders[0]
