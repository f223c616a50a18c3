"""Demonstrations that make the embedded policy, which RL can improve.

Two stages. In the first the demonstrations are right, and the policy learns
what it can. In the second a share of them is wrong on purpose, by family: the
policy keeps its skill but is often wrong, like a language model at the start of
RL. After right demonstrations alone RL has nothing to improve: it then moved
held-out pass@1 by less than 0.001.
"""

import itertools
import random
from collections.abc import Mapping, Sequence

from brorl_jax.learner.pair_packing import Pair
from brorl_jax.model.tokenizer import Tokenizer
from brorl_jax.tasks.base import Example


def spoil(answer: str, rng: random.Random) -> str:
  """A plausible wrong answer: a number near by, or letters out of order."""
  try:
    number = int(answer)
  except ValueError:
    letters = list(answer)
    pairs = enumerate(itertools.pairwise(letters))
    places = [i for i, (a, b) in pairs if a != b]
    if not places:  # "aa" has no other order
      return answer + answer
    i = rng.choice(places)
    letters[i : i + 2] = letters[i : i + 2][::-1]
    return "".join(letters)
  return str(number + rng.choice((-1, 1, -1, 1, -3, -2, 2, 3)))


def demonstrations(
  puzzles: Sequence[Example],
  tokenizer: Tokenizer,
  *,
  right: Mapping[str, float],
  prompt_tokens: int,
  max_new_tokens: int,
  seed: int,
) -> list[Pair]:
  """Puzzles with their answers, or with wrong ones for some share of them.

  Args:
    puzzles: What is demonstrated.
    tokenizer: Of the policy.
    right: Share of right answers by family, in [0, 1]; 1 where not named.
    prompt_tokens: Most of a prompt.
    max_new_tokens: Most of an answer, its end included.
    seed: Decides which answers are spoilt, and how.

  Raises:
    ValueError: A prompt or an answer is longer than its budget.
  """
  rng = random.Random(seed)
  out = []
  for puzzle in puzzles:
    answer = puzzle.entry["answer"]
    if rng.random() >= right.get(puzzle.task, 1.0):
      answer = spoil(answer, rng)
    ids = [*tokenizer.encode(answer), tokenizer.stop_ids[0]]
    if len(ids) > max_new_tokens:
      raise ValueError(
        f"{puzzle.id}: answer {answer!r} has {len(ids)} tokens; the budget "
        f"max_new_tokens is {max_new_tokens}"
      )
    prompt = tokenizer.render(puzzle.messages)
    if len(prompt) > prompt_tokens:
      raise ValueError(
        f"{puzzle.id}: the prompt has {len(prompt)} tokens; the budget "
        f"prompt_tokens is {prompt_tokens}"
      )
    out.append(Pair(prompt, ids))
  return out
