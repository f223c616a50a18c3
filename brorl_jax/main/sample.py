"""--mode=sample: a policy answers prompts of flags, a file, or standard input.

On a terminal the answers are text, and a single one is shown while it is
generated. Otherwise each answer is a line of JSON.
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
  from brorl_jax.data.schema import Form
  from brorl_jax.main.text_policy import Messages, Response, TextPolicy
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

    ran, form = (
      checkpoint_source.ran(checkpoint_source.locate(where)),
      schema.PLAIN,
    )
    if ran is not None:
      form = examples.file_form(ran.fields, ran.domain, own=ran.own)
    return dataset.read(
      path, form=_unjudged(path, form) or form, domains=DOMAINS
    ).examples
  try:
    lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
  except (OSError, ValueError) as e:
    why = getattr(e, "strerror", None) or e
    raise ValueError(f"--prompts={path} cannot be read: {why}") from None
  if not (lines := [line for line in lines if line.strip()]):
    raise ValueError(f"--prompts={path} has only blank lines; add prompts")
  return lines


def _unjudged(path: str, form: "Form") -> "Form | None":
  """How lines without golds are read; None if the first of them has one."""
  from brorl_jax.data import records, schema
  from brorl_jax.verdicts import domains

  record = next(iter(records.read(path)))[1]
  if not isinstance(record, dict):
    return None
  there = lambda field: form.names.get(field, field).split(".")[0] in record
  known = domains.DOMAINS.get(str(record.get("domain", form.domain)))
  if known is not None and any(
    there(field) for field, how in known.fields.items() if not how.optional
  ):
    return None
  names = {
    field: column for field, column in form.names.items() if there(field)
  }
  return schema.Form(names, sole=domains.OWN)


def _typed() -> Iterator[str]:
  """The prompts on standard input, one per line."""
  if sys.stdin.isatty():
    with contextlib.suppress(ImportError):
      import readline  # noqa: F401 (line editing for input())
  with contextlib.suppress(EOFError):
    while True:
      line = input("> " if sys.stdin.isatty() and sys.stdout.isatty() else "")
      if line.strip():
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
    temperature, most = _TEMPERATURE.value, _MAX_NEW_TOKENS.value
    posed = [self.policy.posed(question) for question in asked]
    if self._plain and _N.value == 1 and len(asked) == 1:
      response = _grown(
        self.policy.stream(
          posed[0], temperature=temperature, max_new_tokens=most, number=first
        )
      )
      self._tell(asked[0], posed[0], [response], shown=True)
      return
    each = self.policy.each(
      posed, _N.value, temperature=temperature, max_new_tokens=most, first=first
    )
    for question, messages, responses in zip(asked, posed, each, strict=True):
      self._tell(question, messages, responses)

  def _tell(
    self,
    question: "str | Example",
    messages: "Messages",
    responses: "Sequence[Response]",
    *,
    shown: bool = False,
  ) -> None:
    """Prints the responses to a prompt, scored if it has an answer."""
    verdicts: Sequence[Verdict | None] = [None] * len(responses)
    if not isinstance(question, str):
      verdicts = self._verdicts(question, responses) or verdicts
    asked = messages[-1]["content"]
    if self._plain and not shown:
      print(f"> {asked}")
    for n, (response, verdict) in enumerate(
      zip(responses, verdicts, strict=True)
    ):
      if not self._plain:
        line = {"prompt": asked, "sample": n, **_fields(response)}
        print(json.dumps(line | _judged(question, verdict), ensure_ascii=False))
      else:
        number = f"[{n + 1}] " if len(responses) > 1 else ""
        if not shown:
          print(f"{number}{response.text}")
        if response.truncated:
          print(f"[cut at {len(response.tokens)} tokens]")
        if verdict is not None:
          why = f": {verdict.reason}" if verdict.reason else ""
          print(f"[{verdict.status}{why}]")
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


def _grown(growing: "Iterator[Response]") -> "Response":
  """Prints a response as it is generated."""
  shown = 0
  response = None
  for response in growing:
    # A character of several tokens shows as U+FFFD until its last token.
    text = response.text.rstrip("\ufffd")
    print(text[shown:], end="", flush=True)
    shown = max(shown, len(text))
  assert response is not None
  print(response.text[shown:])
  return response


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
