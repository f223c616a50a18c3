"""The data that flows along the arrows of the figure: one struct per arrow."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, PyTree, Shaped

from brorl_jax.verdicts.base import Verdict

if TYPE_CHECKING:
  Array = Any
else:
  Array = jax.Array | np.ndarray  # on the devices, or copied to the host
_pytree = jax.tree_util.register_dataclass
# In place of the log-probability of a token that an environment wrote and not
# the policy. No rounding gives this number; in a sum it is a certainty's 0.
GIVEN = np.float32(1e-30)


@_pytree
@dataclasses.dataclass(frozen=True)
class Prompts:
  """Prompts for the sampler, left-padded: the last token is always real."""

  tokens: Int[Array, "P S"]
  mask: Bool[Array, "P S"]  # True on real tokens
  index: Int[Array, " P"]  # p in the keys of rollouts: candidate of the step
  # n of the first rollout that is made of each; None: 0.
  first: Int[Array, " P"] | None = None
  # Tokens that rollouts go on from, as `slots.pack` has them; None: nothing.
  begun: Int[Array, "P N T 2"] | None = None

  @property
  def chunk(self) -> "Chunk":
    """The rollouts that are made of the first of them."""
    first = 0 if self.first is None else int(self.first[0])
    return Chunk(int(self.index[0]), first)


def own_tokens(mask: Any, logp: Any) -> Any:
  """Which of these tokens the policy drew."""
  return mask & (logp != GIVEN)


@_pytree
@dataclasses.dataclass(frozen=True)
class Rollouts:
  """N responses per prompt, right-padded; empty places follow, see `drawn`."""

  tokens: Int[Array, "P N T"]  # 0 after the end
  logp: Float[Array, "P N T"]  # under the sampling distribution; 0 after
  mask: Bool[Array, "P N T"]  # True on tokens, the end token included
  truncated: Bool[Array, "P N"]  # cut at T tokens, without an end token
  # Slots times steps of the sampler's loop. Prompts that finish together share
  # the steps since the previous prompts finished.
  slot_steps: Float[Array, " P"]
  # Steps of the run since each token was drawn; None: 0.
  age: Int[Array, "P N T"] | None = None

  @property
  def drawn(self) -> Bool[Array, "P N"]:
    """Where there is a rollout: it has at least one token."""
    return self.mask[:, :, 0]

  @property
  def own(self) -> Bool[Array, "P N T"]:
    """Tokens that the policy drew: all but those of an environment."""
    return own_tokens(self.mask, self.logp)

  @property
  def own_length(self) -> Int[np.ndarray, "P N"]:
    # By prompt: 128 x 512 rollouts of 15,360 tokens at once would take 2 GB.
    return np.concatenate([one.own.sum(axis=2) for one in each(self)])

  @property
  def whole(self) -> Bool[Array, "P N"]:
    """Rollouts that have ended; one that has not may go on."""
    return ~self.truncated | self.mask[:, :, -1]

  def slot_occupancy(self) -> float:
    """Tokens per slot-step (the prefill wrote one); above 1 in shared rows."""
    written = self.mask.sum() - self.drawn.sum()
    return float(written / max(float(self.slot_steps.sum()), 1.0))

  def alike(self, p: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The distinct responses to prompt p and of empty places: first index of
    each, ascending, which of them every rollout is, and count of each."""
    tokens, length = np.asarray(self.tokens[p]), self.mask[p].sum(axis=1)
    # `np.unique` would sort the rows: .7 s for 512 of 15,360 tokens, not .02.
    number: dict[bytes, int] = {}
    of = [
      number.setdefault(row[:n].tobytes(), len(number))
      for row, n in zip(tokens, length, strict=True)
    ]
    _, first, count = np.unique(of, return_index=True, return_counts=True)
    return first, np.array(of), count

  def distinct(self, p: int) -> tuple[np.ndarray, np.ndarray]:
    """The distinct responses to prompt p: first index and count of each,
    ordered by first index, so that the order does not depend on token ids.
    """
    first, _, count = self.alike(p)
    drawn = self.drawn[p, first]
    return first[drawn], count[drawn]


class Chunk(NamedTuple):
  """Rollouts first, first + 1, ... of prompt p."""

  p: int
  first: int


# What was sampled of a step: rollouts of one prompt, each chunk by itself.
Finished = dict[Chunk, Rollouts]


def by_chunk(prompts: Prompts, rollouts: Rollouts) -> Finished:
  """The rollouts of chunks, which `prompts` names."""
  both = zip(each(prompts), each(rollouts), strict=True)
  return {prompt.chunk: made for prompt, made in both}


def each(tree: Any) -> list[Any]:
  """What arrays, or structs of them, have of each prompt."""
  one = lambda i: jax.tree.map(lambda x: x[i : i + 1], tree)
  return [one(i) for i in range(len(jax.tree.leaves(tree)[0]))]


def behind(parts: Sequence[Any]) -> Any:
  """Structs of some prompts behind each other."""
  return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def without_padding(rollouts: Rollouts) -> dict[str, np.ndarray]:
  """Arrays for files and other processes: tokens of all behind each other."""
  out = jax.tree.map(np.asarray, rollouts)
  names = ["tokens", "logp"] + ["age"] * (out.age is not None)
  real = {name: getattr(out, name)[out.mask] for name in names}
  real |= {"length": out.mask.sum(axis=2), "truncated": out.truncated}
  return real | {"slot_steps": out.slot_steps}


def padded(real: Mapping[str, np.ndarray], T: int) -> Rollouts:
  """The rollouts of T places of which `without_padding` made this."""
  mask = np.arange(T) < real["length"][..., None]

  def whole(name: str) -> np.ndarray:
    out = np.zeros(mask.shape, (tokens := real[name]).dtype)
    out[mask] = tokens
    return out

  age = whole("age") if "age" in real else None
  more = mask, real["truncated"], real["slot_steps"], age
  return Rollouts(whole("tokens"), whole("logp"), *more)


class Interrupted(Exception):
  """A step that was asked to stop, with what its next start goes on from."""

  def __init__(self, finished: Finished):
    self.finished = finished


@dataclasses.dataclass(frozen=True, slots=True)
class ScoredResponse:
  """The verdict on one rollout."""

  task: str  # under which the prompt is counted
  verdict: Verdict
  seconds: float  # of the verifier

  @property
  def valid(self) -> bool:
    """False if the verifier itself failed, so that nothing is known."""
    return self.verdict.status != "invalid"


class Scores(NamedTuple):
  """Rewards and verdicts of rollouts, on the host; 0 where none is drawn."""

  reward: Float[np.ndarray, "P N"]  # raw; 0 where the verifier failed
  answer: Int[np.ndarray, "P N"]  # equal numbers mean equal answers
  valid: Bool[np.ndarray, "P N"]  # see ScoredResponse
  responses: Shaped[np.ndarray, "P N"]  # of ScoredResponse; None: not drawn


class Groups(NamedTuple):
  """Whole groups on the host: prompts with all their N rollouts."""

  prompts: Prompts
  rollouts: Rollouts
  scores: Scores

  @property
  def right(self) -> Bool[np.ndarray, "P N"]:
    """Rollouts of reward 1 or more, before any reward for their length."""
    return (self.scores.reward >= 1.0) & np.asarray(self.rollouts.drawn)


@dataclasses.dataclass(frozen=True)
class RunState:
  """Counters after a step: what a checkpoint holds beside the arrays, as JSON.

  The functions of runs/run_state.py return new ones.
  """

  tokens: int = 0  # generated so far, including those of rejected prompts
  samples: int = 0
  drawn: int = 0  # candidates so far: the next position in the files
  passed: float = 1.0  # share of the last step's candidates
  shaped: int = 0  # steps counted by the schedule of the length reward
  # State of the reference policy.
  since_reset: int = 0  # steps since the policy became the reference
  resets: int = 0
  best: float | None = None  # best held-out score since the reset
  stalled: int = 0  # evaluations in a row without a better score
  # State of the guards.
  bad: int = 0  # steps in a row that were starved or skipped an update
  grad_norms: tuple[float, ...] = ()  # of the last updates that were applied
  usual: Mapping[str, tuple[int, float]] = dataclasses.field(
    default_factory=dict
  )  # metric -> first steps, and its mean over them
  # guard -> steps in a row beyond its bound
  beyond: Mapping[str, int] = dataclasses.field(default_factory=dict)
  reward: float | None = None  # moving average of the mean reward
  score: float | None = None  # held-out, of the last evaluation
  peak: float | None = None  # the best of the whole run
  peak_reward: float | None = None  # `reward` at that time

  def to_json(self) -> dict[str, Any]:
    return dataclasses.asdict(self)


class Credit(NamedTuple):
  """Advantages of the kept groups."""

  advantage: Float[np.ndarray, "P N"]
  counts: Bool[np.ndarray, "P N"]  # False: left out of the loss
  progress: RunState
  metrics: dict[str, float | None]


class Updated(NamedTuple):
  """What the updates of a step did, beside the new state."""

  metrics: dict[str, Any]
  norms: tuple[float, ...] = ()  # of the gradients that were applied
  skipped: tuple[str, ...] = ()  # why each of the other updates was not


class Judgement(NamedTuple):
  """What the guards say of a step."""

  scalars: dict[str, Any]  # metrics as they are written: no NaN, no infinity
  events: list[dict[str, Any]]
  end: str | None  # why the run ends with this step, None if it does not


class Trees(NamedTuple):
  """Rows of trees (learner/packing.py): token i sees j if j <= i < end[j]."""

  token: Int[Array, "*C P Q"]
  # One behind the last descendant of a token; 0 marks padding.
  end: Int[Array, "*C P Q"]
  parent: Int[Array, "*C P E"]  # the token from which a target is predicted
  target: Int[Array, "*C P E"]  # tokens that are predicted
  at: Int[Array, "*C P M T"]  # target of each response token


@_pytree
@dataclasses.dataclass(frozen=True)
class Batch:
  """Part of a minibatch: C microbatches of P blocks of M rows of one prompt.

  A group of N rollouts takes as many blocks as it needs; with `trees` a block
  has rollouts of several prompts. Without axis C it is one microbatch.
  """

  prompt: Int[Array, "*C P S"]  # S = 0 if the prompts are in `trees`
  prompt_mask: Bool[Array, "*C P S"]
  response: Int[Array, "*C P M T"]
  mask: Bool[Array, "*C P M T"]
  logp_sampled: Float[Array, "*C P M T"]  # of the sampler
  advantage: Float[Array, "*C P M"]
  weight: Float[Array, "*C P M"]  # number of identical rollouts in this row
  used: Int[Array, ""]  # microbatches that are not empty, at most C
  # Tokens drawn in an earlier step; None without a max_age.
  old: Bool[Array, "*C P M T"] | None = None
  # Factor on the policy loss of each row; None: 1.
  scale: Float[Array, "*C P M"] | None = None
  # Of the old policy of the ratio; None: the sampler's log-probabilities.
  logp_old: Float[Array, "*C P M T"] | None = None
  # Of the reference policy; None without a KL term.
  logp_ref: Float[Array, "*C P M T"] | None = None
  # Read in place of prompts and responses; None: those are read.
  trees: Trees | None = None


@_pytree
@dataclasses.dataclass(frozen=True)
class State:
  """The arrays that a step changes and a checkpoint holds."""

  step: Any  # int32 scalar, or its shape or sharding
  params: PyTree
  opt: Any  # optimizer state of optax
  reference: PyTree | None  # reference parameters; None without a KL term
