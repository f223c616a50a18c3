"""A small transformer that has seen demonstrations, and nothing else."""

import pathlib
from collections.abc import Sequence

import jax
import numpy as np

from brorl_jax.learner import state as states
from brorl_jax.learner import supervised
from brorl_jax.model import huggingface, tokenizer
from brorl_jax.model.policy import Policy
from brorl_jax.model.spec import Rope
from launch.embedded.tokenizer import build
from launch.frontier import machine
from launch.frontier.problems import Problem

_RATE = 3e-3


def demonstrations(
  some: Sequence[Problem], text: tokenizer.Tokenizer, *, each: int, seed: int
) -> list[supervised.Pair]:
  """`each` answers to every problem, drawn by their odds."""
  rng = np.random.default_rng(seed)
  out = []
  for one in some:
    question = text.render([{"role": "user", "content": one.question}])
    drawn = rng.choice(len(one.said), size=each, p=one.odds / one.odds.sum())
    tokens = {
      k: [*text.encode(str(one.said[k])), text.stop_ids[0]] for k in set(drawn)
    }
    out += [supervised.Pair(question, tokens[k]) for k in drawn]
  return out


def teach(
  directory: pathlib.Path,
  some: Sequence[Problem],
  *,
  seed: int,
  width: int,
  layers: int,
  steps: int,
) -> None:
  """Writes a policy as a Hugging Face directory.

  Characters are tokens, so that an answer has one spelling.
  """
  texts = [text for p in some for text in (p.question, *p.right)]
  text = build(directory, texts, size=259, merges=0)
  policy = Policy(
    vocab=text.size,
    width=width,
    layers=layers,
    heads=4,
    kv_heads=4,
    head_size=width // 4,
    mlp=4 * width,
    rope=Rope(100.0),
    norm_eps=1e-6,
    tied=True,
    qkv_bias=True,
  )
  tx, _ = states.adamw(
    lr=_RATE,
    warmup=50,
    total=steps,
    b1=0.9,
    b2=0.95,
    eps=1e-8,
    weight_decay=0.0,
    max_grad_norm=1.0,
  )
  # 400 to 600 demonstrations in an update.
  layout = supervised.PairLayout(tokens=256, rows=24, microbatches=1)
  each = max(600 * steps // len(some), 1)
  params = supervised.train(
    policy.init(jax.random.key(seed)),
    demonstrations(some, text, each=each, seed=seed),
    packed_logp=policy.packed_logp,
    tx=tx,
    layout=layout,
    count=steps,
    seed=seed,
    look=lambda now: machine.say(
      f"warm-up {now.update}/{steps}: {now.loss or 0.0:.3f} nats per token"
    ),
  )
  huggingface.save(directory, policy, params)
