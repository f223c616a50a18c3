"""Demonstrations that make an embedded policy, which RL can improve.

Two stages. In the first the demonstrations are right, and the policy learns
what it can. In the second a share of them is wrong on purpose, by family: the
policy keeps its skill but is often wrong, like a language model at the start of
RL. After right demonstrations alone RL has nothing to improve: it then moved
held-out pass@1 by less than 0.001.
"""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence

from brorl_jax.model.tokenizer import Tokenizer
from brorl_jax.verdicts.base import Example, posed
from launch.embedded import steps
from launch.embedded.supervised import Pair

Messages = Sequence[Mapping[str, str]]
Respond = Callable[[Example, random.Random], tuple[Messages, str]]


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


def answers(right: Mapping[str, float]) -> Respond:
  """The answer of a puzzle alone, or a wrong one for some share of them.

  Args:
    right: Share of right answers by family, in [0, 1]; 1 where not named.
  """

  def respond(puzzle: Example, rng: random.Random) -> tuple[Messages, str]:
    answer = puzzle.entry["answer"]
    if rng.random() >= right.get(puzzle.task, 1.0):
      answer = spoil(answer, rng)
    return puzzle.messages, answer

  return respond


def solutions(
  qualities: Mapping[str, float], at_once: str = "Answer at once."
) -> Respond:
  """The steps to the answer of a puzzle, and the answer.

  Args:
    qualities: Relative share of each quality; "direct" is the answer alone.
    at_once: Instruction of the prompts that are answered without steps.
  """
  names, weights = [*qualities], [*qualities.values()]

  def respond(puzzle: Example, rng: random.Random) -> tuple[Messages, str]:
    (quality,) = rng.choices(names, weights)
    told = at_once if quality == "direct" else ""
    asked = posed(puzzle, instruction=told)
    return asked, steps.write(puzzle.entry, quality, rng)

  return respond


def pairs(
  puzzles: Sequence[Example],
  tokenizer: Tokenizer,
  respond: Respond,
  *,
  prompt_tokens: int,
  max_new_tokens: int,
  seed: int,
) -> list[Pair]:
  """Puzzles with responses.

  Args:
    puzzles: What is demonstrated.
    tokenizer: Of the policy.
    respond: Poses a puzzle and responds to it.
    prompt_tokens: Most of a prompt.
    max_new_tokens: Most of a response, its end included.
    seed: Decides what the responses are.

  Raises:
    ValueError: A prompt or a response is longer than its budget.
  """
  rng = random.Random(seed)
  out = []
  for puzzle in puzzles:
    asked, response = respond(puzzle, rng)
    ids = [*tokenizer.encode(response), tokenizer.stop_ids[0]]
    if len(ids) > max_new_tokens:
      raise ValueError(
        f"{puzzle.id}: response {response!r} has {len(ids)} tokens; the budget "
        f"max_new_tokens is {max_new_tokens}"
      )
    prompt = tokenizer.render(asked)
    if len(prompt) > prompt_tokens:
      raise ValueError(
        f"{puzzle.id}: the prompt has {len(prompt)} tokens; the budget "
        f"prompt_tokens is {prompt_tokens}"
      )
    out.append(Pair(prompt, ids))
  return out
