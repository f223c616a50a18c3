"""--mode=sample: a policy answers prompts of flags, a file, or standard input.

On a terminal the answers are text. Otherwise each answer is a line of JSON.
"""

import contextlib
import json
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from brorl_jax.errors import UserError

if TYPE_CHECKING:  # importing jax takes seconds: --help needs these flags
  from brorl_jax.main.text_policy import Response, TextPolicy
  from brorl_jax.verdicts.base import Example, Verdict

_PROMPT = flags.DEFINE_multi_string(
  "prompt", [], "--mode=sample: a prompt; may be given several times."
)
_PROMPTS = flags.DEFINE_string(
  "prompts",
  None,
  "--mode=sample: a file of prompts: .jsonl or .parquet as for training, whose "
  "responses are scored, or a text file with one prompt per line.",
)
_N = flags.DEFINE_integer("n", 1, "--mode=sample: responses per prompt.")
_TEMPERATURE = flags.DEFINE_float(
  "temperature", 1.0, "--mode=sample: temperature; 0 is greedy."
)
_MAX_NEW_TOKENS = flags.DEFINE_integer(
  "max_new_tokens",
  None,
  "--mode=sample: longest response in tokens; by default that of the run, or "
  "256 for a model that is not a run.",
)
_OWN = (_PROMPT, _PROMPTS, _N, _TEMPERATURE, _MAX_NEW_TOKENS)


def refuse_flags(mode: str) -> None:
  """Raises UserError if flags of this mode are given for another mode."""
  for flag in _OWN:
    if flag.present:
      raise UserError(
        f"--{flag.name} is for --mode=sample, not --mode={mode}; leave it out"
      )


def run(where: str) -> None:
  """Answers prompts with the policy `where`, see `text_policy.load`.

  Raises:
    UserError: A flag, a prompt or the policy is invalid.
  """
  from absl import logging

  from brorl_jax.main import text_policy

  logging.set_verbosity(logging.ERROR)  # orbax logs every file
  try:
    asked = _given(where)
    talk = _Talk(text_policy.load(where))
    step = talk.policy.step
    at = "" if step is None else f", step {step}"
    print(f"{where or 'the embedded policy'}{at}", file=sys.stderr)
    with contextlib.closing(talk):
      if asked is None:
        for number, text in enumerate(_typed()):
          talk.answer([text], first=number)
      else:
        talk.answer(asked)
  except ValueError as e:
    raise UserError(str(e)) from None
  except BrokenPipeError:  # the reader of standard output has stopped
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _given(where: str) -> "Sequence[str | Example] | None":
  """The prompts of the flags; None: read standard input.

  A file of examples is read with the settings of the run.

  Raises:
    ValueError: The prompts cannot be read.
  """
  path = _PROMPTS.value
  if path is None:
    return _PROMPT.value or None
  if _PROMPT.value:
    raise ValueError("--prompt and --prompts are both given; keep one")
  if path.endswith((".jsonl", ".parquet")):
    from brorl_jax.data import dataset, schema
    from brorl_jax.plan import checkpoint_source
    from brorl_jax.stages import examples
    from brorl_jax.verdicts.domains import DOMAINS

    form = schema.PLAIN
    if ran := checkpoint_source.ran(checkpoint_source.locate(where)):
      form = examples.file_form(ran.fields, ran.domain, own=ran.own)
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
  """The prompts on standard input, one per line."""
  ask = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
  with contextlib.suppress(EOFError):
    while True:
      if (line := input(ask)).strip():
        yield line


class _Talk:
  """A policy, its verifiers, and the output."""

  def __init__(self, policy: "TextPolicy"):
    self.policy = policy
    self._plain = sys.stdout.isatty()
    self._pool = None
    self._right = self._judged = 0

  def close(self) -> None:
    """Ends the verifiers and prints how many responses were right."""
    if self._pool is not None:
      self._pool.close()
      share = self._right / max(self._judged, 1)
      print(
        f"{self._right} of {self._judged} responses are right ({share:.1%})",
        file=sys.stderr,
      )

  def answer(self, asked: "Sequence[str | Example]", *, first: int = 0) -> None:
    """Prints the responses to prompts; `first` is the index of the first."""
    posed = [self.policy.posed(question) for question in asked]
    each = self.policy.each(
      posed,
      _N.value,
      temperature=_TEMPERATURE.value,
      max_new_tokens=_MAX_NEW_TOKENS.value,
      first=first,
    )
    several = len(asked) > 1 or _N.value > 1
    for question, messages, responses in zip(asked, posed, each, strict=True):
      text = messages[-1]["content"]
      if self._plain and several:
        print(f"> {text}")
      self._print(question, text, responses)

  def _print(
    self,
    question: "str | Example",
    asked: str,
    responses: "Sequence[Response]",
  ) -> None:
    """Prints the responses to a prompt, scored if it has an answer."""
    verdicts: Sequence[Verdict | None] = [None] * len(responses)
    if not isinstance(question, str):
      verdicts = self._verdicts(question, responses) or verdicts
    both = zip(responses, verdicts, strict=True)
    for n, (response, verdict) in enumerate(both):
      if not self._plain:
        line = {"prompt": asked, "sample": n, **_fields(response)}
        print(json.dumps(line | _judged(question, verdict), ensure_ascii=False))
        continue
      print(f"[{n + 1}] " * (len(responses) > 1) + response.text)
      if response.truncated:
        print(f"[cut at {len(response.tokens)} tokens]")
      if verdict is not None:
        reason = f": {verdict.reason}" if verdict.reason else ""
        print(f"[{verdict.status}{reason}]")
    sys.stdout.flush()

  def _verdicts(
    self, example: "Example", responses: "Sequence[Response]"
  ) -> "list[Verdict]":
    """Verdicts of the domain's verifier; none with the user's own rewards."""
    from brorl_jax.verdicts import domains, pool

    if example.domain not in domains.DOMAINS:
      return []
    if self._pool is None:
      verifiers = {name: one.verify for name, one in domains.DOMAINS.items()}
      self._pool = pool.Pool(verifiers)
    jobs = [pool.Job(example.domain, r.text, example.entry) for r in responses]
    verdicts = [one.verdict for one in self._pool.score(jobs)]
    self._judged += len(verdicts)
    self._right += sum(verdict.status == "pass" for verdict in verdicts)
    return verdicts


def _fields(response: "Response") -> dict[str, Any]:
  return {
    "response": response.text,
    "tokens": len(response.tokens),
    "logp": response.logp,
    "truncated": response.truncated,
  }


def _judged(
  question: "str | Example", verdict: "Verdict | None"
) -> dict[str, Any]:
  """The verdict in the form of samples.jsonl."""
  if isinstance(question, str) or verdict is None:
    return {}
  return {
    "id": question.id,
    "domain": question.domain,
    "task": question.task,
    "gold": question.entry.get("answer"),  # None for tests and constraints
    "answer": verdict.answer,
    "verdict": verdict.status,
    "reason": verdict.reason,
    "score": verdict.score,
  }
