"""Rollouts and scores of which only some numbers matter."""

import numpy as np

from brorl_jax.types import Rollouts, ScoredResponse, Scores
from brorl_jax.verdicts.base import Verdict


def scores(reward, answer=None, valid=None, task="some") -> Scores:
  """Of [P, N] rewards: 1 is a pass, anything else a fail."""
  reward = np.asarray(reward, np.float32)
  if answer is None:
    answer = np.zeros(reward.shape)
  if valid is None:
    valid = np.ones(reward.shape, bool)
  valid = np.asarray(valid, bool)
  judged = np.empty(reward.shape, object)
  for at in np.ndindex(reward.shape):
    status = "pass" if reward[at] >= 1 else "fail"
    status = status if valid[at] else "invalid"
    verdict = Verdict(status, float(reward[at]), "", str(np.array(answer)[at]))
    judged[at] = ScoredResponse(task, verdict, 0.001)
  return Scores(reward, np.asarray(answer, np.int32), valid, judged)


def rollouts(tokens, mask=True, logp=0.0, truncated=False) -> Rollouts:
  """Of [P, N, T] tokens; 0 where `mask` says that there is none."""
  mask = np.array(np.broadcast_to(mask, tokens.shape))
  return Rollouts(tokens=np.where(mask, tokens, 0).astype(np.int32),
    logp=np.where(mask, logp, 0.0).astype(np.float32),
    mask=mask, truncated=np.array(np.broadcast_to(truncated, tokens.shape[:2])),
    slot_steps=np.ones(len(tokens), np.float32))  # fmt: skip
