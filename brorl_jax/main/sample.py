"""--mode=sample, and text in, text out: a policy with its tokenizer.

    policy = load("runs/n512")
    policy.sample("Calculate 3 + 4 * 2.", n=512)

Programs are compiled per n, max_new_tokens, sampling parameters, and powers of
two of prompt tokens and prompts, so that most later calls reuse them.
"""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Key, PyTree

from brorl_jax.data import dataset, schema
from brorl_jax.errors import as_user_error, printable
from brorl_jax.model.policy import Policy
from brorl_jax.model.tokenizer import Tokenizer, left_pad
from brorl_jax.plan import checkpoint_source, memory
from brorl_jax.rollout import sampler
from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.stages import examples
from brorl_jax.types import Prompts
from brorl_jax.verdicts.base import Example, posed
from brorl_jax.verdicts.domains import DOMAINS
from brorl_jax.verdicts.pool import Job, Pool

# For models that are not runs: a run has its own limit.
_MAX_NEW_TOKENS = 256
# Rollouts that are sampled together; more are hardly faster.
TOGETHER = 512

Messages = Sequence[Mapping[str, str]]  # each with "role" and "content"


class Response(NamedTuple):
  """A response of a policy."""

  text: str  # without the end token
  tokens: list[int]  # with it
  logp: float  # of the tokens under the sampling distribution, in nats
  truncated: bool  # whether it was cut at the limit


# Tokens with the end token, log-probability of each, and whether it was cut.
Drawn = tuple[list[int], list[float], bool]

_likeliest = jax.jit(Policy.likeliest, static_argnums=0)


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
    """A list of N responses to a prompt; a list of such lists for several.

    A prompt is a question, which is completed as `posed` does, or a
    conversation (messages with "role" and "content"), which is not changed.
    `how` is what `each` takes. Raises ValueError, which names an argument that
    is out of range or does not fit.
    """
    if isinstance(prompts, Mapping):
      must = "a conversation is a list: use [message]"
      raise ValueError(f"prompts is one message; {must}")
    prompts = prompts if isinstance(prompts, str) else [*prompts]
    is_single = isinstance(prompts, str)
    is_single = is_single or any(isinstance(m, Mapping) for m in prompts)
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
      temperature: 0 is greedy.
      top_k: Keeps the k most probable tokens; 0 keeps all.
      top_p: Keeps the most probable tokens up to this mass.
      min_p: Keeps tokens with at least this fraction of the largest
        probability.
      max_new_tokens: Longest response; None: the policy's default.
      first: Index p of the first prompt.
    """
    limit = self.max_new_tokens if max_new_tokens is None else max_new_tokens
    counts = {"n": (n, 1), "max_new_tokens": (limit, 1), "seed": (seed, 0)}
    for name, (value, least) in {**counts, "top_k": (top_k, 0)}.items():
      if type(value) is not int or not least <= value < 2**31:
        must = f"an integer of at least {least} and below 2**31"
        raise ValueError(f"{name} = {value!r} must be {must}")
    sampling = SamplingParams(temperature, top_k, top_p, min_p)
    ids = [self._rendered(i, one, limit) for i, one in enumerate(prompts)]
    if not ids:
      return
    index, key = range(first, first + len(ids)), jax.random.key(seed)
    for drawn in self.drawn(ids, index, key, n, limit, sampling):
      text = self.tokenizer.decode([tokens for tokens, *_ in drawn])
      yield [
        Response(said, tokens, math.fsum(logp), cut)
        for said, (tokens, logp, cut) in zip(text, drawn, strict=True)
      ]

  def drawn(
    self,
    ids: Sequence[Sequence[int]],
    index: Sequence[int],
    key: Key[Array, ""],
    n: int,
    limit: int,
    sampling: SamplingParams,
  ) -> Iterator[list[Drawn]]:
    """Tokens in, tokens out, as soon as they are finished: what `n` responses
    of at most `limit` tokens are depends on (key, index of the prompt) alone.
    """
    width = sampler.prompt_width(max(map(len, ids)))
    fits = self._fitted(len(ids), n, width, limit, sampling)
    spec = fits.spec(sampling, self.tokenizer.stop_ids)
    done = 0
    while done < len(ids):
      count = min(fits.load.prompts, power_of_two(len(ids) - done))
      part = slice(done, done + count)
      numbers = np.array(index[part], np.int32)
      asked = Prompts(*left_pad(ids[part], width), numbers)
      host = jax.device_get(sampler.rollouts(spec, self.params, asked, key))
      for p in range(count):
        rows = zip(host.tokens[p], host.logp[p], host.mask[p], strict=True)
        pairs = [(of[keep].tolist(), x[keep].tolist()) for of, x, keep in rows]
        cut = host.truncated[p].tolist()
        yield [(*two, end) for two, end in zip(pairs, cut, strict=True)]
      done += count

  def likeliest(self, ids: Sequence[int]) -> list[tuple[float, int, float]]:
    """`Policy.likeliest` of a prompt, token by token."""
    room = sampler.prompt_width(len(ids)) - len(ids)
    padded = np.pad(np.array(ids, np.int32), (0, room))
    found = jax.device_get(_likeliest(self.policy, self.params, padded))
    return [*zip(*(x[: len(ids) - 1].tolist() for x in found), strict=True)]

  def posed(self, question: str | Example, domain: str = "") -> Messages:
    """A question in the form of the run's prompts, followed by the instruction
    of `domain`, or of the example's; unchanged without a run.
    """
    if isinstance(question, str):
      user = {"role": "user", "content": question}
      question = Example("", domain, "", [user], {})
    after = self.instructions.get(question.domain, "")
    return posed(question, system=self.system, instruction=after)

  def _rendered(self, number: int, prompt: Any, limit: int) -> list[int]:
    """Token ids of a prompt; raises ValueError if it is invalid or too long."""
    messages = self.posed(prompt) if isinstance(prompt, str) else prompt
    text = lambda m: isinstance(m.get("role"), str) and m.get("content")
    good = lambda m: isinstance(m, Mapping) and isinstance(text(m), str)
    if not all(map(good, messages)):
      each = "each with 'role' and 'content' as text"
      must = f"a text or a list of messages, {each}"
      raise ValueError(f"prompt {number} must be {must}")
    try:
      ids = self.tokenizer.render(messages)
    except ValueError as e:
      raise ValueError(f"prompt {number}: {e}") from e
    if len(ids) + limit > (most := self.policy.max_positions):
      raise ValueError(
        f"prompt {number} has {len(ids)} tokens; with max_new_tokens = "
        f"{limit} that is above the policy's {most} positions; shorten one"
      )
    return ids

  def _fitted(
    self, prompts: int, n: int, width: int, limit: int, how: SamplingParams
  ) -> memory.RolloutPlan:
    """As many prompts as fit at one time; raises ValueError if none does."""
    load = memory.Load(
      self.policy, sum(x.nbytes for x in jax.tree.leaves(self.params)), n=n,
      prompts=power_of_two(min(prompts, max(TOGETHER // n, 1))),
      prompt_tokens=width, max_new_tokens=limit,
      cut=how.top_p < 1.0 or how.top_k > 0,
    )  # fmt: skip
    while True:
      try:
        return memory.rollouts(load, self.policy.target.memory_bytes)
      except memory.TooLarge:
        if load.prompts == 1:
          raise
        load = dataclasses.replace(load, prompts=load.prompts // 2)


def power_of_two(most: int) -> int:
  """The largest power of two that is at most `most`."""
  return 1 << (most.bit_length() - 1)


def load(
  where: str | os.PathLike[str] = "",
  *,
  step: int | None = None,
  dtype: str | None = None,
) -> TextPolicy:
  """Loads a policy onto the first device; ValueError if it cannot be read.

  Args:
    where: The folder of a run, one of its checkpoints such as
      runs/n512/checkpoints/60, a Hugging Face directory, a model of the hub,
      NAME or NAME@revision, or "" for the policy that comes with this package.
    step: Step of the run; None: the newest checkpoint.
    dtype: Dtype of parameters and activations, "float32" or "bfloat16"; None:
      that of the run, or float32.
  """
  place = os.path.expanduser(where)
  which = checkpoint_source.locate(place)
  if step is not None:
    if which.run is None or which.step is not None:
      needs = f"step = {step} needs the folder of a run"
      raise ValueError(f"{needs}; {place!r} is not one")
    which = which._replace(step=step)
  ran = checkpoint_source.ran(which)
  dtype = dtype or (ran.dtype if ran else "float32")
  how = {"dtype": dtype, "param_dtype": dtype}
  policy, params, step = checkpoint_source.load(which, None, **how)
  text = checkpoint_source.read_tokenizer(which)
  checkpoint_source.check_vocabulary(which.source, text, policy)
  if ran is None:
    return TextPolicy(policy, params, text)
  limit, system, after = ran.max_new_tokens, ran.system, ran.instructions
  return TextPolicy(policy, params, text, step, limit, system, after)


@as_user_error(ValueError)
def run(
  where: str, *, prompt: Sequence[str], prompts: str | None, **how: Any
) -> None:
  """Answers prompts of flags, a file, or standard input with a policy: as text
  on a terminal, otherwise each answer as a line of JSON.
  """
  if prompt and prompts is not None:
    raise ValueError("--prompt and --prompts are both given; keep one")
  asked = prompt if prompts is None else _read(prompts, where)
  policy = load(where)
  at = "" if policy.step is None else f", step {policy.step}"
  print(f"{where or 'the embedded policy'}{at}", file=sys.stderr)
  judges = contextlib.nullcontext()
  # The user's own rewards are no domain, and judge nothing here.
  if {getattr(one, "domain", "") for one in asked} & DOMAINS.keys():
    verifiers = {name: domain.verify for name, domain in DOMAINS.items()}
    judges = contextlib.closing(Pool(verifiers))
  with judges as pool:
    parts = [asked] if asked else ([line] for line in _typed())
    for first, part in enumerate(parts):
      _answer(policy, part, pool, {**how, "first": first})


def _read(path: str, where: str) -> Sequence[str | Example]:
  """The prompts of a file; examples are read with the settings of the run."""
  if path.endswith((".jsonl", ".parquet")):
    form = schema.PLAIN
    if ran := checkpoint_source.ran(checkpoint_source.locate(where)):
      how: Any = dict(own=ran.own, entries=[*ran.entries, path])
      form = examples.file_form(ran.fields, ran.domain, **how)
    return dataset.read(path, form=form, domains=DOMAINS).examples
  try:
    lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
  except (OSError, ValueError) as e:
    why = getattr(e, "strerror", None) or e
    raise ValueError(f"--prompts={path} cannot be read: {why}") from None
  if not (lines := [line for line in lines if line.strip()]):
    raise ValueError(f"--prompts={path} has only blank lines; add prompts")
  return lines


def _typed() -> Iterator[str]:
  ask = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
  with contextlib.suppress(EOFError):
    while True:
      if (line := input(ask)).strip():
        yield line


def _answer(
  policy: TextPolicy,
  asked: Sequence[str | Example],
  judges: Pool | None,
  how: Mapping[str, Any],
) -> None:
  posed = [policy.posed(question) for question in asked]
  plain, right, count = sys.stdout.isatty(), 0, 0
  each = policy.each(posed, **how)
  for question, messages, responses in zip(asked, posed, each, strict=True):
    text = messages[-1]["content"]
    if plain and len(asked) * len(responses) > 1:
      print(f"> {printable(text)}")
    verdicts: list[Any] = [None] * len(responses)
    if judges is not None and isinstance(question, Example):
      domain, entry = question.domain, question.entry
      jobs = [Job(domain, one.text, entry) for one in responses]
      verdicts = [scored.verdict for scored in judges.score(jobs)]
      right += sum(verdict.status == "pass" for verdict in verdicts)
      count += len(verdicts)
    for n, (one, verdict) in enumerate(zip(responses, verdicts, strict=True)):
      if plain:
        _show(f"[{n + 1}] " * (len(responses) > 1), one, verdict)
        continue
      line = _as_json(n, text, question, one, verdict)
      print(json.dumps(line, ensure_ascii=False))
    sys.stdout.flush()
  if count:
    share = f"{right} of {count} responses are right ({right / count:.1%})"
    print(share, file=sys.stderr)


def _show(number: str, response: Response, verdict: Any) -> None:
  print(f"{number}{printable(response.text)}")
  if response.truncated:
    print(f"[cut at {len(response.tokens)} tokens]")
  if verdict is not None:
    reason = f": {verdict.reason}" if verdict.reason else ""
    print(f"[{verdict.status}{printable(reason)}]")


def _as_json(
  n: int, text: str, question: Any, response: Response, verdict: Any
) -> dict[str, Any]:
  """With its verdict in the form of samples.jsonl."""
  line = {"prompt": text, "sample": n, "response": response.text}
  line |= {"tokens": len(response.tokens), "logp": response.logp}
  line |= {"truncated": response.truncated}
  if verdict is None:
    return line
  line |= {k: getattr(question, k) for k in ("id", "domain", "task")}
  line["gold"] = question.entry.get("answer")  # None for tests and constraints
  line |= {"answer": verdict.answer, "verdict": verdict.status}
  return line | {"reason": verdict.reason, "score": verdict.score}
