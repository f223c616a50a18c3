"""Lines of samples.jsonl and visits.jsonl, from what a step drew."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from brorl_jax import types
from brorl_jax.rollout.dynamic_sampling import SampledGroups
from brorl_jax.stages.examples import Examples

_SHOWN = 4  # rollouts of a step


def samples(
  step: int, kept: types.Groups, examples: Examples
) -> Iterator[dict[str, Any]]:
  """A response to each of the first prompts, right and wrong ones in turn."""
  reward = kept.scores.reward
  for p in range(min(_SHOWN, len(reward))):
    example = examples.example(step, int(kept.prompts.index[p]))
    # Right and wrong responses alternate: a kept group has both.
    value = reward[p] if p % 2 == 0 else -reward[p]
    n = int(np.where(kept.rollouts.drawn[p], value, -np.inf).argmax())
    ids = kept.rollouts.tokens[p, n][kept.rollouts.mask[p, n]].tolist()
    scored = kept.scores.responses[p, n]
    verdict = scored.verdict
    yield {
      "step": step,
      "id": example.id,
      "domain": example.domain,
      "task": example.task,
      "prompt": examples.asked(example),
      "response": examples.decode([ids])[0],
      "gold": example.entry.get("answer"),  # None for tests and constraints
      "answer": verdict.answer,
      "verdict": verdict.status,
      "reason": verdict.reason,
      "score": verdict.score,
      "reward": float(reward[p, n]),
      "seconds": round(scored.seconds, 6),  # of the verifier
      "tokens": len(ids),
      "truncated": bool(kept.rollouts.truncated[p, n]),
    }


def visits(
  step: int, sampled: SampledGroups, examples: Examples
) -> Iterator[dict[str, Any]]:
  """What each prompt that was drawn got, in candidate order."""
  prompts, rollouts, scores = sampled.groups
  right = sampled.groups.right
  invalid = ~scores.valid & rollouts.drawn
  for i, p in enumerate(prompts.index.tolist()):
    example = examples.example(step, p)
    yield {
      "step": step,
      "id": example.id,
      "task": example.task,
      "drawn": int(rollouts.drawn[i].sum()),
      "right": int(right[i].sum()),
      "invalid": int(invalid[i].sum()),
      "tokens": int(rollouts.mask[i].sum()),
      "kept": bool(sampled.kept[i]),
    }
