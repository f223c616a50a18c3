"""What flows along the arrows of the figure: one frozen struct per arrow."""

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, PyTree, Shaped

from brorl_jax.tasks.base import Verdict

if TYPE_CHECKING:
  Array = Any
else:
  Array = jax.Array | np.ndarray  # on the devices, or copied to the host
_pytree = jax.tree_util.register_dataclass


@_pytree
@dataclasses.dataclass(frozen=True)
class Prompts:
  """Prompts of one call of the sampler, left-padded: the last token is real."""

  tokens: Int[Array, "P S"]
  mask: Bool[Array, "P S"]  # True on real tokens
  index: Int[Array, " P"]  # p of the rollouts' keys: candidate of this step


@_pytree
@dataclasses.dataclass(frozen=True)
class Rollouts:
  """N responses to each prompt, right-padded."""

  tokens: Int[Array, "P N T"]  # 0 after the end
  logp: Float[Array, "P N T"]  # of the behaviour distribution, nats; 0 after
  mask: Bool[Array, "P N T"]  # True on sampled tokens, the end token included
  truncated: Bool[Array, "P N"]  # cut at T tokens, without an end token
  # Slots times steps of the sampler's loop; each prompt has an even share of
  # those since the last prompts were done.
  slot_steps: Float[Array, " P"]

  def slot_occupancy(self) -> float:
    """Share of slot-steps that wrote a token; the prefill wrote the first."""
    written = self.mask.sum() - self.truncated.size
    return float(written / max(float(self.slot_steps.sum()), 1.0))

  def distinct(self, p: int) -> tuple[np.ndarray, np.ndarray]:
    """The different responses to prompt p: index of the first, and how many.

    On the host. Ascending, so that nothing depends on token ids.
    """
    length = self.mask[p].sum(axis=1, keepdims=True)  # 0 may be a token too
    content = np.concatenate([self.tokens[p], length], axis=1)
    _, first, count = np.unique(
      content, axis=0, return_index=True, return_counts=True
    )
    order = np.argsort(first)
    return first[order], count[order]


@dataclasses.dataclass(frozen=True, slots=True)
class Judged:
  """What a verifier says of one rollout, to be read."""

  task: str  # that the prompt is counted under
  verdict: Verdict
  seconds: float  # that it took

  @property
  def valid(self) -> bool:
    """False if the verifier failed: then nothing is known."""
    return self.verdict.status != "invalid"


class Scores(NamedTuple):
  """What verifiers say of rollouts, on the host."""

  reward: Float[np.ndarray, "P N"]  # raw; 0 where the verifier failed
  answer: Int[np.ndarray, "P N"]  # equal numbers: equal answers to this prompt
  valid: Bool[np.ndarray, "P N"]  # see Judged
  judged: Shaped[np.ndarray, "P N"]  # of Judged


class Groups(NamedTuple):
  """Whole groups, on the host: of each prompt all N rollouts."""

  prompts: Prompts
  rollouts: Rollouts
  scores: Scores


@_pytree
@dataclasses.dataclass(frozen=True)
class Batch:
  """Part of a minibatch: C microbatches of P blocks of R rows of one prompt.

  A group of N rollouts is spread over as many blocks as it needs. Without the
  leading axis it is one microbatch.
  """

  prompt: Int[Array, "*C P S"]
  prompt_mask: Bool[Array, "*C P S"]
  response: Int[Array, "*C P R T"]
  mask: Bool[Array, "*C P R T"]
  logp_sampled: Float[Array, "*C P R T"]  # of the sampler
  advantage: Float[Array, "*C P R"]
  weight: Float[Array, "*C P R"]  # identical rollouts this row stands for
  used: Int[Array, ""]  # microbatches that hold any row, at most C
  # Of the policy that the loss compares with; None if that is the sampler.
  logp_old: Float[Array, "*C P R T"] | None = None
  # Of the KL term's reference; None without.
  logp_ref: Float[Array, "*C P R T"] | None = None


@_pytree
@dataclasses.dataclass(frozen=True)
class State:
  """All that a step changes, and all that a checkpoint holds."""

  step: Any  # int32 scalar; Any because abstract states and shardings have it
  params: PyTree
  opt: Any  # optax's
  reference: PyTree | None  # parameters of the KL term; None if its weight is 0
