"""Teaches an embedded policy: tokenizer, two stages of training, export."""

import pathlib
import sys

import jax

from brorl_jax.learner import state as states
from brorl_jax.model import huggingface
from brorl_jax.runs import folder
from brorl_jax.verdicts import gym
from brorl_jax.verdicts.base import Example
from launch.embedded import demonstrations, supervised, tokenizer
from launch.embedded.recipes import Recipe

_TOKENIZER_TEXTS = 1500  # per family


def teach(recipe: Recipe, workdir: pathlib.Path, *, seed: int) -> None:
  """Writes a Hugging Face directory to `workdir`."""
  folder.check_empty(workdir)
  puzzles = draw(recipe, seed)
  every = max(recipe.puzzles // _TOKENIZER_TEXTS, 1)
  text = tokenizer.build(
    workdir,
    [puzzle.question for puzzle in puzzles[::every]],
    size=recipe.policy.vocab,
    whole=recipe.whole,
    merges=recipe.merges,
  )
  params = recipe.policy.init(jax.random.key(seed))
  for number, stage in enumerate(recipe.stages):
    pairs = demonstrations.pairs(
      puzzles,
      text,
      stage.respond,
      prompt_tokens=recipe.prompt_tokens,
      max_new_tokens=recipe.max_new_tokens,
      seed=4 * seed + 2 * number + 1,
    )
    tx, _ = states.adamw(
      lr=stage.lr,
      warmup=50,
      total=stage.updates,
      b1=0.9,
      b2=0.95,
      eps=1e-8,
      weight_decay=0.0,
      max_grad_norm=1.0,
    )
    params = supervised.train(
      params,
      pairs,
      response_logp=recipe.policy.response_logp,
      tx=tx,
      layout=recipe.layout,
      count=stage.updates,
      seed=4 * seed + 2 * number + 2,
      look=lambda update, loss, stage=number + 1: print(
        f"stage {stage}, update {update}: {loss:.3f} nats per token",
        file=sys.stderr,
      ),
    )
  huggingface.save(workdir, recipe.policy, params)
  print(f"wrote {workdir}", file=sys.stderr)


def draw(recipe: Recipe, seed: int) -> list[Example]:
  """Puzzles of every family, from seeds that training never uses."""
  return [
    gym.puzzle(family, "warmup", i, seed=seed)
    for family in recipe.families
    for i in range(recipe.puzzles)
  ]
