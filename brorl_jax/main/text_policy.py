"""Text in, text out: a policy with its parameters and its tokenizer.

    policy = load("runs/n512")
    policy.sample("Calculate 3 + 4 * 2.", n=512)

Programs are compiled per n, max_new_tokens, sampling parameters, and powers of
two of prompt tokens and prompts, so that most later calls reuse them.
"""

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from brorl_jax.model import architectures
from brorl_jax.model.policy import Policy
from brorl_jax.model.tokenizer import Tokenizer, left_pad
from brorl_jax.plan import checkpoint_source, memory
from brorl_jax.rollout import sampler
from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.types import Prompts, Rollouts
from brorl_jax.verdicts.base import Example, posed

# For models that are not runs: a run has its own limit.
_MAX_NEW_TOKENS = 256
# Rollouts that are sampled together; more are hardly faster.
_TOGETHER = 512

Messages = Sequence[Mapping[str, str]]  # each with "role" and "content"


class Response(NamedTuple):
  """A response of a policy."""

  text: str  # without the end token
  tokens: list[int]  # with it
  logp: float  # of the tokens under the sampling distribution, in nats
  truncated: bool  # whether it was cut at the limit


@dataclasses.dataclass(frozen=True, eq=False)
class TextPolicy:
  """A policy with text as input and output."""

  policy: Policy  # shapes and constants, with `logits`
  params: PyTree = dataclasses.field(repr=False)  # on one device
  tokenizer: Tokenizer = dataclasses.field(repr=False)
  step: int | None = None  # of the run that trained it
  max_new_tokens: int = _MAX_NEW_TOKENS  # of a response, if nothing is said
  system: str = ""  # message of the run's prompts
  # By domain, the text after each question.
  instructions: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def sample(self, prompts: Any, n: int = 1, **how: Any) -> Any:
    """N responses to a prompt, or to each of several.

    Args:
      prompts: A question, which is completed as `posed` does; a conversation
        (messages with "role" and "content"), which is not changed; or a list of
        either.
      n: Responses per prompt.
      **how: See `each`.

    Returns:
      A list of n `Response` for one prompt; a list of such lists for several.

    Raises:
      ValueError: Names an argument that is out of range or does not fit.
    """
    if isinstance(prompts, Mapping):
      raise ValueError(
        "prompts is one message; a conversation is a list: use [message]"
      )
    if not isinstance(prompts, str):
      prompts = list(prompts)
    is_single = isinstance(prompts, str) or any(
      isinstance(m, Mapping) for m in prompts
    )
    responses = [*self.each([prompts] if is_single else prompts, n, **how)]
    return responses[0] if is_single else responses

  def each(
    self,
    prompts: Sequence[Any],
    n: int = 1,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    max_new_tokens: int | None = None,
    seed: int = 0,
    first: int = 0,
  ) -> Iterator[list[Response]]:
    """The responses to each prompt, as soon as they are finished.

    Response i to prompt p depends on (seed, p, i) alone: with a larger n the
    first responses stay the same. Rounding can change a token, because batches
    of other shapes add in another order.

    Args:
      prompts: Questions or conversations.
      n: Responses per prompt.
      temperature: 0 is greedy.
      top_k: Keeps the k most probable tokens; 0 keeps all.
      top_p: Keeps the most probable tokens up to this mass.
      min_p: Keeps tokens with at least this fraction of the largest
        probability.
      max_new_tokens: Longest response; None: the policy's default.
      first: Index p of the first prompt.
    """
    for name, value in (("n", n), ("top_k", top_k), ("seed", seed)):
      if type(value) is not int or not 0 <= value < 2**31:
        raise ValueError(f"{name} = {value!r} must be an integer below 2**31")
    sampling = SamplingParams(temperature, top_k, top_p, min_p)
    limit = self.max_new_tokens if max_new_tokens is None else max_new_tokens
    ids = self._rendered(prompts, n, limit)
    if not ids:
      return
    width = sampler.prompt_width(max(map(len, ids)))
    fits = self._fitted(len(ids), n, width, limit, sampling)
    done = 0
    while done < len(ids):
      count = min(fits.load.prompts, _power_of_two(len(ids) - done))
      part = ids[done : done + count]
      index = np.arange(first + done, first + done + count, dtype=np.int32)
      out = sampler.rollouts(
        fits.spec(sampling, self.tokenizer.stop_ids),
        self.params,
        Prompts(*left_pad(part, width), index),
        jax.random.key(seed),
      )
      yield from self._responses(out)
      done += count

  def posed(self, question: str | Example, domain: str = "") -> Messages:
    """A question in the form of the run's prompts; unchanged without a run.

    The instruction of `domain`, or of the example's, follows it.
    """
    if isinstance(question, str):
      user = {"role": "user", "content": question}
      question = Example("", domain, "", [user], {})
    return posed(
      question,
      system=self.system,
      instruction=self.instructions.get(question.domain, ""),
    )

  def _rendered(
    self, prompts: Sequence[str | Messages], n: int, limit: int
  ) -> list[list[int]]:
    """Token ids of prompts; raises ValueError if one is invalid or too long."""
    for name, value in {"n": n, "max_new_tokens": limit}.items():
      if value < 1:
        raise ValueError(f"{name} = {value} must be at least 1")
    out, most = [], self.policy.max_positions
    for number, prompt in enumerate(prompts):
      messages = self.posed(prompt) if isinstance(prompt, str) else prompt
      if not all(map(_is_message, messages)):
        raise ValueError(
          f"prompt {number} must be a text or a list of messages, each with "
          "'role' and 'content' as text"
        )
      try:
        ids = self.tokenizer.render(messages)
      except Exception as e:  # a template is code and may raise anything
        reason = " ".join(str(e).split()) or type(e).__name__
        raise ValueError(
          f"prompt {number}: the chat template fails: {reason}"
        ) from e
      if len(ids) + limit > most:
        raise ValueError(
          f"prompt {number} has {len(ids)} tokens; with max_new_tokens = "
          f"{limit} that is above the policy's {most} positions; shorten one"
        )
      out.append(ids)
    return out

  def _fitted(
    self, prompts: int, n: int, width: int, limit: int, sampling: Any
  ) -> memory.RolloutPlan:
    """As many prompts as fit at one time; raises ValueError if none does."""
    resident = sum(x.nbytes for x in jax.tree.leaves(self.params))
    count = min(_power_of_two(prompts), _power_of_two(max(_TOGETHER // n, 1)))
    load = memory.Load(
      self.policy,
      resident,
      n=n,
      prompts=count,
      prompt_tokens=width,
      max_new_tokens=limit,
      cut=sampling.top_p < 1.0 or sampling.top_k > 0,
    )
    while True:
      try:
        return memory.rollouts(load, self.policy.target.memory_bytes)
      except memory.TooLarge:
        if load.prompts == 1:
          raise
        load = dataclasses.replace(load, prompts=load.prompts // 2)

  def _responses(self, out: Rollouts) -> Iterator[list[Response]]:
    """The responses to each prompt."""
    host = jax.device_get(out)
    for tokens, mask, logp, truncated in zip(
      host.tokens, host.mask, host.logp, host.truncated, strict=True
    ):
      ids = [row[keep].tolist() for row, keep in zip(tokens, mask, strict=True)]
      total = logp.sum(axis=1, dtype=np.float64)  # 0 after the end
      yield [
        Response(*one)
        for one in zip(
          self.tokenizer.decode(ids),
          ids,
          total.tolist(),
          truncated.tolist(),
          strict=True,
        )
      ]


def _is_message(value: Any) -> bool:
  text = lambda name: isinstance(value.get(name), str)
  return isinstance(value, Mapping) and text("role") and text("content")


def _power_of_two(most: int) -> int:
  """The largest power of two that is at most `most`."""
  return 1 << (most.bit_length() - 1)


def load(
  where: str | os.PathLike[str] = "",
  *,
  step: int | None = None,
  dtype: str | None = None,
) -> TextPolicy:
  """Loads a policy onto the first device.

  Args:
    where: The folder of a run, one of its checkpoints such as
      runs/n512/checkpoints/60, a Hugging Face directory, the name of a model on
      the hub, or "" for the policy that comes with this package.
    step: Step of the run; None: the newest checkpoint.
    dtype: Dtype of parameters and activations, "float32" or "bfloat16"; None:
      that of the run, or float32.

  Raises:
    ValueError: In one line: there is no such policy, or it cannot be read.
  """
  place = os.fspath(where)
  which = checkpoint_source.locate(
    str(pathlib.Path(place).expanduser()) if place else ""
  )
  if step is not None:
    if which.run is None or which.step is not None:
      raise ValueError(
        f"step = {step} needs the folder of a run; {place!r} is not one"
      )
    which = which._replace(step=step)
  ran = checkpoint_source.ran(which)
  dtype = dtype or (ran.dtype if ran else "float32")
  policy = architectures.read_policy(which.source, dtype=dtype)
  text = checkpoint_source.read_tokenizer(which)
  checkpoint_source.check_vocabulary(which.source, text, policy)
  policy, params, step = checkpoint_source.load(
    which, None, dtype=dtype, param_dtype=dtype
  )
  if ran is None:
    return TextPolicy(policy, params, text)
  limit, system, after = ran.max_new_tokens, ran.system, ran.instructions
  return TextPolicy(policy, params, text, step, limit, system, after)
