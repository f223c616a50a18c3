"""N rollouts per prompt from one prefill, streamed through R slots.

A prompt is read once. All N first tokens come from its one distribution. Then
R slots decode in lock-step; a slot whose rollout ends takes the prompt's next
rollout in the same step, on the device, until none is left.

Rollout n of prompt p draws token i from `fold_in(fold_in(fold_in(key, p), n),
i)` and nothing else, so neither N nor the slots nor the devices change it.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from brorl_jax.types import Prompts, Rollouts


@runtime_checkable
class Decoder(Protocol):
  """What the sampler needs of a policy. Pure, hashable."""

  def prefill(self, params, tokens, mask) -> tuple[Array, Any]: ...
  def suffix(self, prompts, rows, columns) -> Any: ...
  def decode_step(
    self, params, prefix, suffix, token, length, column, mask
  ) -> tuple[Array, Any]: ...


@dataclasses.dataclass(frozen=True)
class Behaviour:
  """How logits become the distribution that is sampled and recorded.

  In this order: temperature, top-k, top-p, min-p; each works on the
  renormalised outcome of the one before.
  """

  temperature: float = 1.0  # 0 is greedy: all mass on the likeliest token
  top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
  top_p: float = 1.0  # keep the likeliest tokens that reach this mass
  min_p: float = 0.0  # keep tokens at least this times as likely as the best

  def __post_init__(self):
    for name, good in {
      "temperature": self.temperature >= 0.0,
      "top_k": self.top_k >= 0,
      "top_p": 0.0 < self.top_p <= 1.0,
      "min_p": 0.0 <= self.min_p <= 1.0,
    }.items():
      if not good:
        raise ValueError(f"{name} = {getattr(self, name)} is out of range")

  def logp(self, logits: Float[Array, "*axes V"]) -> Float[Array, "*axes V"]:
    """Log-probabilities of the behaviour distribution; -inf where cut."""
    logits = logits.astype(jnp.float32)
    if self.temperature == 0.0:
      best = jnp.argmax(logits, axis=-1, keepdims=True)
      tokens = jnp.arange(logits.shape[-1]).reshape(
        (1,) * (logits.ndim - 1) + (-1,)
      )
      return jnp.where(tokens == best, 0.0, -jnp.inf)
    logp = jax.nn.log_softmax(logits / self.temperature)
    if 0 < self.top_k < logp.shape[-1]:
      least = jax.lax.top_k(logp, self.top_k)[0][..., -1:]
      logp = jax.nn.log_softmax(jnp.where(logp >= least, logp, -jnp.inf))
    if self.top_p < 1.0:
      ordered = -jnp.sort(-logp, axis=-1)
      before = jnp.cumsum(jnp.exp(ordered), axis=-1) - jnp.exp(ordered)
      # The token that crosses the threshold is kept, so one always is.
      inside = jnp.where(before < self.top_p, ordered, jnp.inf)
      least = jnp.min(inside, axis=-1, keepdims=True)
      logp = jax.nn.log_softmax(jnp.where(logp >= least, logp, -jnp.inf))
    if self.min_p > 0.0:
      least = jnp.max(logp, axis=-1, keepdims=True) + np.log(self.min_p)
      logp = jax.nn.log_softmax(jnp.where(logp >= least, logp, -jnp.inf))
    return logp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
  """Everything the loop carries; nothing is hidden in an object.

  Columns of the cache are used in a circle: in step c every slot writes column
  c mod T, and what a slot sees is its last `length` columns.
  """

  step: Int[Array, ""]  # decode steps so far
  rollout: Int[Array, "P R"]  # n of each slot's rollout; N if the slot idles
  token: Int[Array, "P R"]  # its last token, not yet in the cache
  length: Int[Array, "P R"]  # its tokens so far
  started: Int[Array, " P"]  # how many of the queue have had a slot
  busy: Int[Array, " P"]  # slot-steps that wrote a token
  tokens: Int[Array, "P N T"]
  logp: Float[Array, "P N T"]
  lengths: Int[Array, "P N"]  # of finished rollouts
  suffix: Any  # the policy's, opaque here


def draw(
  logp: Float[Array, "*axes V"], uniform: Float[Array, "*axes"]
) -> Int[Array, "*axes"]:
  """The token whose share of the unit interval `uniform` falls into.

  One uniform per row instead of V: token = min{v : cdf[v] > uniform}. A token
  of probability 0 cannot be drawn, whatever the rounding of the sums.
  """
  prob = jnp.exp(logp)
  # Sums of a parallel scan need not increase, so the largest is the total.
  cdf = jnp.where(prob > 0.0, jnp.cumsum(prob, axis=-1), 0.0)
  total = jnp.max(cdf, axis=-1)
  above = cdf > (uniform * total)[..., None]
  return jnp.argmax(above, axis=-1).astype(jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Queue:
  """Rollouts whose first token did not end them, waiting for a slot."""

  order: Int[Array, "P N"]  # n of the waiting ones first, ascending
  waiting: Int[Array, " P"]  # how many there were at the start
  first: Int[Array, "P N"]  # first token of rollout n

  def take(
    self, place: Int[Array, "P R"]
  ) -> tuple[Int[Array, "P R"], Int[Array, "P R"]]:
    """n and first token at places of the queue; n is N beyond its end."""
    N = self.order.shape[1]
    at = lambda x, i: jnp.take_along_axis(x, jnp.minimum(i, N - 1), axis=1)
    n = jnp.where(place < self.waiting[:, None], at(self.order, place), N)
    return n, at(self.first, n)


def decode(
  policy: Decoder,
  params: PyTree,
  prompts: Prompts,
  key: Key[Array, ""],
  *,
  n: int,
  max_new_tokens: int,
  behaviour: Behaviour,
  stop_ids: tuple[int, ...],
  slots: int,
) -> Rollouts:
  """Traceable core of `rollouts`, on one device.

  Args:
    policy: Prefill and one decode step.
    params: Its parameters.
    prompts: P prompts and their indices p.
    key: Of this training step. Not consumed: only folded.
    n: N, rollouts per prompt.
    max_new_tokens: T.
    behaviour: The distribution that is sampled.
    stop_ids: A rollout ends with the first of them.
    slots: R, rollouts of a prompt that decode at the same time, at most N.
  """
  P, N, T, R = prompts.tokens.shape[0], n, max_new_tokens, slots
  ended = lambda token: jnp.isin(token, jnp.asarray(stop_ids, jnp.int32))
  fold = jnp.vectorize(jax.random.fold_in)
  key_P1 = fold(key, prompts.index)[:, None]
  uniform = lambda rollout, i: jnp.vectorize(jax.random.uniform)(
    fold(fold(key_P1, rollout), i)
  )

  logits, prefix = policy.prefill(params, prompts.tokens, prompts.mask)
  logp_PV = behaviour.logp(logits)
  # All first tokens from one cumulative distribution per prompt.
  first_uniform = uniform(jnp.arange(N)[None], 0)
  first = jax.vmap(jax.vmap(draw, (None, 0)))(logp_PV, first_uniform)
  over = ended(first) | (T == 1)
  order = jnp.argsort(over, axis=1, stable=True).astype(jnp.int32)
  queue = Queue(order, N - jnp.sum(over, axis=1, dtype=jnp.int32), first)

  def step(s: DecodeState) -> DecodeState:
    column = s.step % T
    age = (column - jnp.arange(T)) % T
    visible = age[None, None] < s.length[..., None]
    logits, suffix = policy.decode_step(
      params, prefix, s.suffix, s.token, s.length, column, visible
    )
    logp_PRV = behaviour.logp(logits)
    token = draw(logp_PRV, uniform(s.rollout, s.length))
    logp = jnp.take_along_axis(logp_PRV, token[..., None], axis=2)[..., 0]
    over = ended(token) | (s.length + 1 == T)
    return _advance(s, token, logp, over, queue, suffix)

  rollout, token = queue.take(jnp.broadcast_to(jnp.arange(R)[None], (P, R)))
  first_logp = jnp.take_along_axis(logp_PV, first, axis=1)
  start = DecodeState(
    step=jnp.int32(0),
    rollout=rollout,
    token=token,
    length=jnp.ones((P, R), jnp.int32),
    started=jnp.full((P,), R, jnp.int32),
    busy=jnp.zeros((P,), jnp.int32),
    tokens=jnp.zeros((P, N, T), jnp.int32).at[:, :, 0].set(first),
    logp=jnp.zeros((P, N, T), jnp.float32).at[:, :, 0].set(first_logp),
    lengths=jnp.ones((P, N), jnp.int32),
    suffix=policy.suffix(P, R, T),
  )
  last = jax.lax.while_loop(lambda s: jnp.any(s.rollout < N), step, start)
  final = jnp.take_along_axis(last.tokens, last.lengths[..., None] - 1, axis=2)
  return Rollouts(
    tokens=last.tokens,
    logp=last.logp,
    mask=jnp.arange(T)[None, None] < last.lengths[..., None],
    truncated=~ended(final[..., 0]),
    occupancy=last.busy / jnp.maximum(last.step * R, 1),
  )


def _advance(
  s: DecodeState,
  token: Int[Array, "P R"],
  logp: Float[Array, "P R"],
  over: Bool[Array, "P R"],
  queue: Queue,
  suffix: Any,
) -> DecodeState:
  """Writes one token per slot; a slot that is `over` takes the next rollout."""
  P, N = s.lengths.shape
  rows = jnp.arange(P)[:, None]
  # An idle slot's rollout is N: out of bounds, so nothing is written for it.
  active = s.rollout < N
  over = over & active
  length = s.length + 1
  at = (rows, s.rollout, s.length)
  done = (rows, jnp.where(over, s.rollout, N))
  place = s.started[:, None] + jnp.cumsum(over, axis=1) - 1
  fresh, fresh_token = queue.take(place)
  return DecodeState(
    step=s.step + 1,
    rollout=jnp.where(over, fresh, s.rollout),
    token=jnp.where(over, fresh_token, token),
    length=jnp.where(over | ~active, 1, length),
    started=s.started + jnp.sum(over, axis=1, dtype=jnp.int32),
    busy=s.busy + jnp.sum(active, axis=1, dtype=jnp.int32),
    tokens=s.tokens.at[at].set(token, mode="drop"),
    logp=s.logp.at[at].set(logp, mode="drop"),
    lengths=s.lengths.at[done].set(length, mode="drop"),
    suffix=suffix,
  )


_STATIC = (
  "policy",
  "n",
  "max_new_tokens",
  "behaviour",
  "stop_ids",
  "slots",
  "mesh",
)


@functools.partial(jax.jit, static_argnames=_STATIC)
def rollouts(
  policy: Decoder,
  params: PyTree,
  prompts: Prompts,
  key: Key[Array, ""],
  *,
  n: int,
  max_new_tokens: int,
  behaviour: Behaviour,
  stop_ids: tuple[int, ...],
  slots: int,
  mesh: Mesh | None = None,
) -> Rollouts:
  """`decode` as one program, the prompts spread over the mesh's data axis.

  Each device runs its own loop over its own prompts, so no token waits for
  another device. See `decode` for the arguments.
  """
  run = functools.partial(
    decode,
    policy,
    n=n,
    max_new_tokens=max_new_tokens,
    behaviour=behaviour,
    stop_ids=stop_ids,
    slots=slots,
  )
  if mesh is None:
    return run(params, prompts, key)
  spread = PartitionSpec("data")
  return jax.shard_map(
    run,
    mesh=mesh,
    in_specs=(PartitionSpec(), spread, PartitionSpec()),
    out_specs=spread,
    axis_names={"data"},
    check_vma=False,  # the loop's state starts equal on every device
  )(params, prompts, key)


def sample(
  policy: Decoder,
  params: PyTree,
  prompts: Sequence[Sequence[int]],
  key: Key[Array, ""],
  *,
  n: int,
  max_new_tokens: int,
  temperature: float = 1.0,
  top_k: int = 0,
  top_p: float = 1.0,
  min_p: float = 0.0,
  stop_ids: tuple[int, ...] = (),
  slots: int | None = None,
  mesh: Mesh | None = None,
) -> Rollouts:
  """N rollouts of each prompt.

  Args:
    policy: Prefill and one decode step.
    params: Its parameters.
    prompts: Token ids; any lengths from 1.
    key: Of this call. Rollout n of prompt p draws from (key, p, n) alone.
    n: N, rollouts per prompt.
    max_new_tokens: T.
    temperature: 0 is greedy.
    top_k: 0 keeps all tokens.
    top_p: 1 keeps all tokens.
    min_p: 0 keeps all tokens.
    stop_ids: A rollout ends with the first of them, which is part of it.
    slots: Rollouts of a prompt that decode at the same time; N if None.
    mesh: Devices with axes "data" and "model"; one device if None.

  Returns:
    Tokens, log-probabilities under the distribution that was sampled, and
    masks, each [P,N,T].

  Raises:
    ValueError: An argument is out of range; named with its value.
  """
  slots = n if slots is None else slots
  behaviour = Behaviour(temperature, top_k, top_p, min_p)
  for name, value, low, high in (
    ("prompts", len(prompts), 1, None),
    ("n", n, 1, None),
    ("max_new_tokens", max_new_tokens, 1, None),
    ("slots", slots, 1, n),
  ):
    if value < low or (high is not None and value > high):
      most = "" if high is None else f" and at most {high}"
      raise ValueError(f"{name} = {value} must be at least {low}{most}")
  if empty := [p for p, ids in enumerate(prompts) if not len(ids)]:
    raise ValueError(f"prompt {empty[0]} is empty")

  P = len(prompts)
  width = max(map(len, prompts))
  # Devices get equally many prompts; the spare ones repeat the first.
  spare = 0 if mesh is None else -P % mesh.shape["data"]
  tokens = np.zeros((P + spare, width), np.int32)
  mask = np.zeros((P + spare, width), bool)
  for row, ids in enumerate([*prompts, *[prompts[0]] * spare]):
    tokens[row, width - len(ids) :] = ids
    mask[row, width - len(ids) :] = True
  out = rollouts(
    policy,
    params,
    Prompts(tokens, mask, np.arange(P + spare, dtype=np.int32)),
    key,
    n=n,
    max_new_tokens=max_new_tokens,
    behaviour=behaviour,
    stop_ids=tuple(stop_ids),
    slots=slots,
    mesh=mesh,
  )
  return jax.tree.map(lambda x: x[:P], out)
