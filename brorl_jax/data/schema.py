"""Converts a record to an example. `dataset` documents the fields."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from brorl_jax.data import columns
from brorl_jax.data.columns import PLAIN, Form
from brorl_jax.verdicts import strict_json
from brorl_jax.verdicts.base import Domain, Example
from brorl_jax.verdicts.strict_json import Refused, kind, show

MAX_PROMPT = 100_000  # characters of all messages together
ROLES = ("system", "user", "assistant")
COMMON = ("id", "domain", "prompt", "messages", "source")

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


def known(domains: Mapping[str, Domain]) -> list[str]:
  """All fields that records of these domains may have."""
  own = (field for domain in domains.values() for field in domain.fields)
  return [*dict.fromkeys((*COMMON, *own))]


def example(
  record: Mapping[str, Any],
  *,
  source: str,
  domains: Mapping[str, Domain],
  form: Form = PLAIN,
  name: str = "",
) -> Example:
  """Converts a record to an example.

  Args:
    record: A JSON object with finite numbers and no lone surrogates.
    source: Default of its field "source".
    domains: The known domains, by name.
    form: Column names of fields, and the default domain.
    name: Default of its id; "": the id is required.

  Raises:
    Refused: With the wrong field, its value and the remedy.
  """
  try:
    return _example(record, source, domains, form, name)
  except Refused as refused:
    column = form.names.get(re.split(r"[.[]", refused.field)[0])
    if column is None:
      raise
    raise Refused(refused.field, f"{refused.why} (column {column!r})") from None


def _example(
  record: Mapping[str, Any],
  source: str,
  domains: Mapping[str, Domain],
  form: Form,
  name: str,
) -> Example:
  values, others = columns.renamed(record, form.names)
  domain = _domain({**others, **values}, domains, form)
  foreign = _is_foreign({**others, **values}, domains, form)
  for field in (*COMMON, *domain.fields):
    if field in others and field not in values:
      values[field] = others.pop(field)
  for field in _no_fields(values, form, foreign):
    others[field] = values.pop(field)
  if form.sole is None:
    # A renamed column that is no field of this domain keeps its new name.
    strange = values.keys() - {*COMMON, *domain.fields}
    others |= {field: values.pop(field) for field in sorted(strange)}
    _refuse_fields(domain, {} if foreign else domains, values, others)
  else:
    values, others = _every_column(record, values)
  if "id" in values or not name:
    name = _field_name(values, "id")
  messages = _messages(values, others)
  own = {
    field: how.read(values[field])
    for field, how in domain.fields.items()
    if field in values
  }
  for field in own:
    if domain.fields[field].in_prompt:
      _refuse_absent(own[field], field, messages)
  if "source" in values:
    source = _field_name(values, "source")
  elif _NAME.fullmatch(task := domain.task(own)):
    source = task
  try:
    entry = domain.check_reference(own)
  except Refused:
    raise
  except ValueError as error:
    reference = next(iter(domain.fields), "")
    raise Refused(reference, " ".join(str(error).split())) from error
  return Example(name, domain.name, source, messages, entry, others)


def _domain(
  record: Mapping[str, Any], domains: Mapping[str, Domain], form: Form
) -> Domain:
  """The domain that a record names, or the default domain."""
  if form.sole is not None:
    return form.sole
  if "domain" not in record and not form.domain:
    there = columns.there("domain", [c for c in record if c not in COMMON])
    raise Refused(
      "domain",
      f"missing; {there} Add 'domain' to each line, or set"
      " --config.data.domain=math for all",
    )
  name = record.get("domain", form.domain)
  if _is_foreign(record, domains, form):
    name = form.domain
  if not isinstance(name, str) or name not in domains:
    close = difflib.get_close_matches(str(name), domains, n=1)
    one_of = f"use one of {', '.join(domains)}"
    remedy = f"did you mean {close[0]}?" if close else one_of
    raise Refused("domain", f"{show(name)} is unknown; {remedy}")
  return domains[name]


def _is_foreign(
  record: Mapping[str, Any], domains: Mapping[str, Domain], form: Form
) -> bool:
  """Whether the domain comes from the config because the line names none.

  Such a line was not written for this format: unknown fields are columns.
  """
  if form.sole is not None or not form.domain:
    return False
  named = record.get("domain")
  return not difflib.get_close_matches(str(named), domains, n=1)


def _no_fields(
  values: Mapping[str, Any], form: Form, foreign: bool
) -> list[str]:
  """Entries that are named like a field but are ordinary columns."""
  out = []
  for one, other in (("prompt", "messages"), ("messages", "prompt")):
    if one in form.names and other in values and other not in form.names:
      out.append(other)
  if not foreign:
    return out
  nameless = lambda x: not (isinstance(x, str) and _NAME.fullmatch(x))
  return out + [
    field
    for field in ("id", "source", "domain")
    if field in values
    and field not in form.names
    and (field == "domain" or nameless(values[field]))
  ]


def _every_column(
  record: Mapping[str, Any], values: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
  """The fields, and all columns except the conversation.

  An invalid id or source is an ordinary column.
  """
  kept = {
    field: value
    for field, value in values.items()
    if field not in ("id", "source")
    or (isinstance(value, str) and _NAME.fullmatch(value))
  }
  every = {**record, **values}
  return kept, {c: every[c] for c in every if c not in ("prompt", "messages")}


def _refuse_fields(
  domain: Domain,
  domains: Mapping[str, Domain],
  values: Mapping[str, Any],
  others: Mapping[str, Any],
) -> None:
  """Refuses missing fields, misspelt ones, and those of other domains.

  Required fields of other domains may be ordinary columns. An optional field of
  another domain is refused, because it is probably a mistake. `domains` is
  empty for lines that were not written for this format.
  """
  for field, how in domain.fields.items():
    if not how.optional and field not in values:
      raise columns.missing(field, others)
  if domain.name not in domains:
    return
  optional = {f for f, how in domain.fields.items() if how.optional}
  for other in domains.values():
    for field, how in other.fields.items():
      if how.optional and field in others:
        raise Refused(
          field,
          f"not a field of domain {domain.name}, which has"
          f" {', '.join(domain.fields)}; remove or rename it",
        )
  absent = (optional | {"source", "domain"}) - values.keys()
  columns.refuse_slips(others, sorted(absent))


def _field_name(record: Mapping[str, Any], field: str) -> str:
  if field not in record:
    raise Refused(field, "missing; add it to every example")
  value = record[field]
  if not isinstance(value, str):
    raise Refused(field, f"{kind(value)}; write it as text")
  if not _NAME.fullmatch(value):
    raise Refused(
      field, f"{show(value)}; use 1 to 128 of the characters A-Za-z0-9._-"
    )
  return value


def _messages(
  record: Mapping[str, Any], others: Mapping[str, Any]
) -> tuple[dict[str, str], ...]:
  if "prompt" in record and "messages" in record:
    raise Refused("prompt", "given as well as messages; keep one")
  if "prompt" not in record and "messages" not in record:
    raise columns.missing("prompt", others)
  if "prompt" in record:
    if isinstance(record["prompt"], list):
      raise Refused(
        "prompt",
        "a list; write it as text, or for a conversation use"
        " --config.data.fields=messages:prompt",
      )
    text = strict_json.text(record["prompt"], "prompt")
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
      f"{show(out[-1]['role'])}; the last message must be from the user",
    )
  _refuse_length(sum(len(m["content"]) for m in out), "messages")
  return out


def _message(message: Any, field: str) -> dict[str, str]:
  if not isinstance(message, dict) or message.keys() != {"role", "content"}:
    raise Refused(
      field, f"{show(message)}; use an object with role and content only"
    )
  role = message["role"]
  if role not in ROLES:
    raise Refused(
      f"{field}.role", f"{show(role)}; use one of {', '.join(ROLES)}"
    )
  return {
    "role": role,
    "content": strict_json.text(message["content"], f"{field}.content"),
  }


def _refuse_absent(
  texts: Sequence[str], field: str, messages: Sequence[Mapping[str, str]]
) -> None:
  """Refuses texts that the prompt lacks: the policy reads nothing else."""
  words = " ".join(" ".join(m["content"] for m in messages).split())
  for i, text in enumerate(texts):
    if " ".join(text.split()) not in words:
      raise Refused(
        f"{field}[{i}]", f"{show(text)} is not in the prompt; add it there"
      )


def _refuse_length(characters: int, field: str) -> None:
  if characters > MAX_PROMPT:
    raise Refused(
      field, f"{characters:,} characters; use at most {MAX_PROMPT:,}"
    )
