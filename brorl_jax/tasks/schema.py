"""One record as an example, or the reason why it is none.

`dataset` documents the fields.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from brorl_jax.tasks.base import DOMAINS, Example
from brorl_jax.tasks.golds import Check
from brorl_jax.tasks.strict import Refused, kind, show

MAX_PROMPT = 100_000  # characters of all messages together
ROLES = ("system", "user", "assistant")
_COMMON = ("id", "domain", "prompt", "messages", "source")
# Beside the common ones: what the domain needs, and what it may have.
_NEEDED: Mapping[str, str] = {
  "math": "answer",
  "code": "tests",
  "stem": "answer",
  "gym": "entry",
  "instructions": "instructions",
}
_OPTIONAL: Mapping[str, tuple[str, ...]] = {
  "stem": ("choices",),
  "code": ("time_limit",),
}
_FIELDS = tuple(
  dict.fromkeys((*_COMMON, *_NEEDED.values(), *sum(_OPTIONAL.values(), ())))
)
MAX_TIME_LIMIT = 60.0  # CPU-seconds of one test

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
# What a reader does not see, or sees in another place than the policy: control
# characters but newline and tab; soft hyphen, zero-width space, direction and
# other format marks, tags. The joiners U+200C and U+200D stay: Persian, Hindi
# and emoji are spelt with them.
_HIDDEN = re.compile(
  "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f"
  "\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
# What tokenizers read as one of their own tokens: a prompt that holds one could
# end its turn and begin another. <|name|> covers most families, DeepSeek writes
# it with full-width bars; two characters at least, for |x| is mathematics.
_CONTROL = re.compile(
  r"<[|\uff5c][^\s<>|\uff5c]{2,64}[|\uff5c]>"
  r"|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\]"
  r"|<</?SYS>>|</s>|<(?:start|end)_of_turn>|<(?:bos|eos|pad|unk)>"
)


def example(
  record: Mapping[str, Any], *, source: str, check: Mapping[str, Check]
) -> Example:
  """The example that a record describes.

  Args:
    record: A JSON object, its numbers finite and its texts without surrogates.
    source: What it is counted under unless it says so itself.
    check: What becomes of the domain's own fields, see `golds.CHECKS`.

  Raises:
    Refused: The field that is wrong, what it is, and the remedy.
  """
  domain = _domain(record)
  name = _field_name(record, "id")
  messages = _messages(record)
  if domain == "gym" and "source" not in record:
    source = _task(record["entry"]) or source
  if "source" in record:
    source = _field_name(record, "source")
  own = _own_fields(domain, record, messages)
  try:
    entry = check[domain](own)
  except Refused:
    raise
  except ValueError as error:
    raise Refused(_NEEDED[domain], " ".join(str(error).split())) from error
  return Example(name, domain, source, messages, entry)


def _domain(record: Mapping[str, Any]) -> Any:
  """The domain, once every field is known and one that the domain has."""
  for field in record:
    if field not in _FIELDS:
      close = difflib.get_close_matches(field, _FIELDS, n=1)
      remedy = f"did you mean {close[0]}?" if close else "remove it"
      raise Refused(show(field)[1:-1], f"unknown; {remedy}")
  _need(record, "domain")
  domain = record["domain"]
  if domain not in DOMAINS:
    close = difflib.get_close_matches(str(domain), DOMAINS, n=1)
    one_of = f"use one of {', '.join(DOMAINS)}"
    remedy = f"did you mean {close[0]}?" if close else one_of
    raise Refused("domain", f"{show(domain)} is unknown; {remedy}")
  for field in record:
    own = (_NEEDED[domain], *_OPTIONAL.get(domain, ()))
    if field not in (*_COMMON, *own):
      raise Refused(
        field, f"not for domain {domain}, which has {', '.join(own)}; remove it"
      )
  _need(record, _NEEDED[domain])
  return domain


def _need(record: Mapping[str, Any], field: str) -> None:
  if field not in record:
    raise Refused(field, "missing; every example of this kind needs it")


def _field_name(record: Mapping[str, Any], field: str) -> str:
  _need(record, field)
  value = record[field]
  if not isinstance(value, str):
    raise Refused(field, f"{kind(value)}; write it as text")
  if not _NAME.fullmatch(value):
    raise Refused(
      field, f"{show(value)}; use 1 to 128 of the characters A-Za-z0-9._-"
    )
  return value


def _messages(record: Mapping[str, Any]) -> tuple[dict[str, str], ...]:
  if ("prompt" in record) == ("messages" in record):
    both = "prompt" in record
    why = "there beside messages; keep one" if both else "missing"
    raise Refused("prompt", why if both else f"{why}; give it, or messages")
  if "prompt" in record:
    text = _text(record["prompt"], "prompt")
    _refuse_length(len(text), "prompt")
    return ({"role": "user", "content": text},)
  messages = record["messages"]
  if not isinstance(messages, list) or not messages:
    raise Refused(
      "messages",
      f"{show(messages)}; it must be a list of"
      ' {"role": "user", "content": ...}',
    )
  out = tuple(_message(m, f"messages[{i}]") for i, m in enumerate(messages))
  if out[-1]["role"] != "user":
    raise Refused(
      f"messages[{len(out) - 1}].role",
      f"{show(out[-1]['role'])}; the last message must be the user's",
    )
  _refuse_length(sum(len(m["content"]) for m in out), "messages")
  return out


def _message(message: Any, field: str) -> dict[str, str]:
  if not isinstance(message, dict) or message.keys() != {"role", "content"}:
    raise Refused(
      field, f"{show(message)}; it must have role and content, nothing else"
    )
  role = message["role"]
  if role not in ROLES:
    raise Refused(
      f"{field}.role", f"{show(role)}; use one of {', '.join(ROLES)}"
    )
  return {
    "role": role,
    "content": _text(message["content"], f"{field}.content"),
  }


def _refuse_length(characters: int, field: str) -> None:
  if characters > MAX_PROMPT:
    raise Refused(
      field, f"{characters:,} characters; use at most {MAX_PROMPT:,}"
    )


def _text(value: Any, field: str) -> str:
  """A text that the policy reads."""
  if not isinstance(value, str):
    raise Refused(field, f"{kind(value)}; write it as text")
  if not value.strip():
    raise Refused(field, "empty; write what is asked")
  hidden = _HIDDEN.search(value)
  if hidden:
    raise Refused(
      field,
      f"character {hidden.start() + 1} is U+{ord(hidden[0]):04X}, which is not"
      " seen; remove it",
    )
  control = _CONTROL.search(value)
  if control:
    raise Refused(
      field,
      f"{show(control[0])} is a control token of chat templates; remove it",
    )
  return value


def _own_fields(
  domain: str,
  record: Mapping[str, Any],
  messages: Sequence[Mapping[str, str]],
) -> dict[str, Any]:
  """What only this domain has, with the types that its check relies on."""
  value = record[_NEEDED[domain]]
  if domain in ("math", "stem"):
    own: dict[str, Any] = {"answer": _answer(value)}
    if "choices" in record:
      own["choices"] = _choices(record["choices"], messages)
    return own
  if domain == "code":
    own = {"tests": _tests(value)}
    if "time_limit" in record:
      own["time_limit"] = _time_limit(record["time_limit"])
    return own
  if domain == "instructions":
    return {"instructions": _instructions(value)}
  return {"entry": _object(value, "entry")}


def _answer(value: Any) -> str:
  if isinstance(value, int) and not isinstance(value, bool):
    return str(value)
  if not isinstance(value, str):
    raise Refused("answer", f"{kind(value)}; write it as text")
  return _text(value, "answer")


def _choices(value: Any, messages: Sequence[Mapping[str, str]]) -> list[str]:
  if not isinstance(value, list):
    raise Refused("choices", f"{kind(value)}; write a list of texts")
  # They are for the verifier; the policy reads the messages alone.
  asked = " ".join(" ".join(m["content"] for m in messages).split())
  for i, choice in enumerate(value):
    if " ".join(_text(choice, f"choices[{i}]").split()) not in asked:
      raise Refused(
        f"choices[{i}]", f"{show(choice)} is not in the prompt; list it there"
      )
  return value


def _object(value: Any, field: str) -> dict[str, Any]:
  if not isinstance(value, dict):
    raise Refused(field, f"{show(value)}; it must be an object")
  return value


def _tests(value: Any) -> dict[str, Any]:
  """Tests in the form that the verifier takes; pairs are turned around."""
  if not isinstance(value, list):
    return _object(value, "tests")
  for i, pair in enumerate(value):
    if not isinstance(pair, dict) or pair.keys() != {"input", "output"}:
      raise Refused(
        f"tests[{i}]",
        f"{show(pair)}; it must have input and output, nothing else",
      )
  return {
    "inputs": [pair["input"] for pair in value],
    "outputs": [pair["output"] for pair in value],
  }


def _time_limit(value: Any) -> float:
  number = isinstance(value, (int, float)) and not isinstance(value, bool)
  if not number or not 0.01 <= value <= MAX_TIME_LIMIT:
    raise Refused(
      "time_limit",
      f"{show(value)}; write the CPU-seconds of one test, .01 to"
      f" {MAX_TIME_LIMIT:g}",
    )
  return float(value)


def _instructions(value: Any) -> list[dict[str, Any]]:
  if not isinstance(value, list) or not value:
    raise Refused(
      "instructions", f"{show(value)}; it must be a list with at least one"
    )
  for i, item in enumerate(value):
    field = f"instructions[{i}]"
    if not isinstance(item, dict) or item.keys() != {"id", "kwargs"}:
      raise Refused(
        field, f"{show(item)}; it must have id and kwargs, nothing else"
      )
    if not isinstance(item["id"], str):
      raise Refused(f"{field}.id", f"{kind(item['id'])}; write it as text")
    _object(item["kwargs"], f"{field}.kwargs")
  return value


def _task(entry: Any) -> str:
  metadata = entry.get("metadata") if isinstance(entry, dict) else None
  name = metadata.get("source_dataset") if isinstance(metadata, dict) else None
  return name if isinstance(name, str) and _NAME.fullmatch(name) else ""
