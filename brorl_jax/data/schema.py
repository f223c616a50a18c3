"""Converts a record to an example; `dataset` documents the fields."""

import dataclasses
import hashlib
import itertools
import json
import pathlib
import re
import string
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from brorl_jax.verdicts import own, strict_json
from brorl_jax.verdicts.base import Domain, Example, Values
from brorl_jax.verdicts.strict_json import Refused, did_you_mean, kind, show

Domains = Mapping[str, Domain]
_Messages = tuple[dict[str, str], ...]
MAX_PROMPT = 100_000  # characters of all messages together
ROLES = ("system", "user", "assistant")
COMMON = ("id", "domain", "prompt", "messages", "source")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
# A column of a wrong answer, as in GPQA and SciQ.
_WRONG = re.compile(r"(?i)(incorrect|wrong)[ _]answers?[ _]?\d*|distractor\d*")
_SHOWN = 100  # characters of column names in a message
_SHORT = 5  # letters; shorter names have too many near matches


@dataclasses.dataclass(frozen=True)
class Form:
  """How a config reads the lines of a file."""

  # Field -> column, see `parse`; other fields keep their names.
  names: Mapping[str, str] = dataclasses.field(default_factory=dict)
  # Domain of lines that name none; "": every line must name one.
  domain: str = ""
  # The domain of all lines, whatever they name; it gets every column.
  sole: Domain | None = None
  # Makes a record of a row, see `record`; then `names` is empty.
  function: Callable[[dict[str, Any]], Any] | None = None
  how: str = ""  # what the config says of them, a function's file absolute
  digest: str = ""  # of the function's file
  # Of entries of data.files and data.heldout_files, as written, with their own.
  entries: Mapping[str, "Form"] = dataclasses.field(default_factory=dict)


PLAIN = Form()  # fields under their own names, a domain in every line


def form(
  text: str, entries: Collection[str], fields: Collection[str], plain=PLAIN
) -> Form:
  """The form of files from `data.fields`: parts "[ENTRY=]HOW", divided by ";".

  ENTRY is one of `entries`; the HOW of a part without it is that of all others.
  HOW is what `parse` reads, or a function, "package.module:function" or
  "file.py:function". `plain` has the rest. ValueError quotes the wrong part.
  """
  hows: dict[str, str] = {}
  for part in filter(None, (part.strip() for part in text.split(";"))):
    meant = [e for e in entries if part.startswith(f"{e}=")]
    entry = max(meant, key=len, default="")
    if not entry and "=" in part:
      named = part.rpartition("=")[0]
      near = did_you_mean(named, entries, f"use one of {', '.join(entries)}")
      raise ValueError(f"{named!r} is no entry of the config's files; {near}")
    if entry in hows:
      both = f"{entry or 'all other files'}: {hows[entry]!r} and {part!r}"
      raise ValueError(f"{both} are given; keep one")
    hows[entry] = part.removeprefix(f"{entry}=").strip()
  of = lambda how: {"how": how, **_how(how, fields)}
  made = {k: dataclasses.replace(plain, **of(how)) for k, how in hows.items()}
  return dataclasses.replace(made.pop("", plain), entries=made)


def _how(how: str, fields: Collection[str]) -> dict[str, Any]:
  place, _, name = how.rpartition(":")
  if not re.fullmatch("[^:,]*[./][^:,]*", place):
    return {"names": parse(how, fields)}
  function, digest = own.find(how, {}, what="the function")
  if place.endswith(".py"):
    place = str(pathlib.Path(place).expanduser().absolute())
  return {"function": function, "digest": digest, "how": f"{place}:{name}"}


def record(row: Values | Refused, form: Form) -> Values:
  """The record that a form's function makes of a row; the row without one.

  A ValueError of the function means that the row has no example: it is raised
  as Refused. RuntimeError, in one line, for what else the function raises.
  """
  if isinstance(row, Refused):
    raise row
  if form.function is None:
    return row
  row = {k: v for k, v in row.items() if not isinstance(v, Refused)}
  try:
    # Through text, so that it is what a line could hold, and a copy.
    return strict_json.parse(json.dumps(form.function(row)).encode())
  except Refused:
    raise
  except ValueError as error:
    why = " ".join(str(error).split()) or type(error).__name__
    raise Refused("", why) from None
  except (Exception, SystemExit) as error:
    why = own.failure(form.how, form.function, error)
    raise RuntimeError(f"{why}; mend the function") from None


def parse(text: str, known: Collection[str]) -> dict[str, str]:
  """The column of each field that is named differently in the files.

  `text` is "field:column,field:column"; "column.inner" reads inside an object.
  Raises ValueError that quotes the wrong part.
  """
  out: dict[str, str] = {}
  for pair in filter(None, (part.strip() for part in text.split(","))):
    field, colon, column = (part.strip() for part in pair.partition(":"))
    if not colon or not column:
      why = "not of the form field:column; write prompt:question"
      raise ValueError(f"{pair!r}: {why}")
    if field not in known:
      remedy = did_you_mean(field, known, f"use {', '.join(known)}")
      raise ValueError(f"{pair!r}: unknown field {field!r}; {remedy}")
    if field in out:
      raise ValueError(f"{pair!r}: {field} already has column {out[field]}")
    out[field] = column
  return out


def known(domains: Domains) -> list[str]:
  """All fields that records of these domains may have."""
  own = (field for domain in domains.values() for field in domain.fields)
  return [*dict.fromkeys((*COMMON, *own))]


def renamed(
  record: Values, names: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
  """The fields that `names` maps to columns, and the other columns.

  An object that holds a field stays among the columns as a whole.
  """
  read = set(names.values())
  others = {k: v for k, v in record.items() if k not in read}
  at = lambda column, field: (
    record[column] if column in record else _at(record, column, field, others)
  )
  return {field: at(column, field) for field, column in names.items()}, others


def _at(record: Values, column: str, field: str, others: Values) -> Any:
  """A value inside of objects; only `others` are offered as its column."""
  value: Any = record
  for part in column.split("."):
    if isinstance(value, Refused):
      raise value
    if not isinstance(value, Mapping) or part not in value:
      inside = value if isinstance(value, Mapping) else {}
      inside = others if inside is record else inside
      why = f"missing, but config.data.fields reads {field} from it"
      raise Refused(column, f"{why}; {_near(part, inside)}")
    value = value[part]
  return value


def missing(field: str, columns: Iterable[str]) -> Refused:
  """The error for a missing field."""
  columns = list(columns)
  if not columns:
    return Refused(field, "missing; add it to every example")
  close = strict_json.alike(field, columns)
  column = show(close[0])[1:-1] if close else "COLUMN"
  add = f"Add it, or name its column: --config.data.fields={field}:{column}"
  return Refused(field, f"missing; {_near(field, columns)} {add}")


def _near(name: str, columns: Iterable[str]) -> str:
  listed = ", ".join(show(column)[1:-1] for column in columns)
  cut = listed if len(listed) <= _SHOWN else f"{listed[:_SHOWN]}..."
  if not listed:
    return "add it, or leave such lines out with config.data.skip_bad"
  return did_you_mean(name, columns, f"columns: {cut}.", show)


def refuse_slips(columns: Iterable[str], optional: Iterable[str]) -> None:
  """Refuses a column that looks like a misspelt optional field.

  Otherwise the column would pass through and the field would count as missing.
  """
  fields = [field for field in optional if len(field) >= _SHORT]
  for column, field in itertools.product(columns, fields):
    if _slip(column.lower(), field):
      why = f"did you mean {field}? If not, rename the column"
      raise Refused(show(column)[1:-1], why)


def _slip(a: str, b: str) -> bool:
  """Whether they differ by one letter missing, added, wrong or swapped."""
  both = zip(a, b, strict=False)
  same = sum(1 for _ in itertools.takewhile(lambda p: p[0] == p[1], both))
  rest, other = a[same:], b[same:]
  swapped = rest[:2] == other[:2][::-1] and rest[2:] == other[2:]
  return swapped or rest[1:] in (other, other[1:]) or rest == other[1:]


def with_column(refused: Refused, form: Form) -> Refused:
  """An error that also names the column of its field, if that is another."""
  column = form.names.get(re.split(r"[.[]", refused.field)[0])
  if column is None:
    return refused
  return Refused(refused.field, f"{refused.why} (column {column!r})")


def example(
  record: Values, source: str, name: str, domains: Domains, form: Form
) -> Example:
  """A record's example, or Refused; `source`, `name` are default source, id."""
  values, others = renamed(record, form.names)
  domain, foreign = _domain({**others, **values}, domains, form)
  for field in (*COMMON, *domain.fields):
    if field in others and field not in values:
      values[field] = others.pop(field)
  for field in _no_fields(values, form, foreign):
    others[field] = values.pop(field)
  if form.sole is None:
    # A renamed column that is no field of this domain keeps its new name.
    strange = values.keys() - {*COMMON, *domain.fields}
    others |= {field: values.pop(field) for field in sorted(strange)}
    for field, how in domain.fields.items():
      if not how.optional and field not in values:
        raise missing(field, others)
    if not foreign:
      _refuse_columns(domain, domains, values, others)
  else:  # all columns but the conversation; a bad id or source is a column
    every = {**record, **values}
    others = {c: every[c] for c in every if c not in ("prompt", "messages")}
    for field in ("id", "source"):
      if not _is_name(values.get(field)):
        values.pop(field, None)
  if bad := next((v for v in values.values() if isinstance(v, Refused)), None):
    raise bad
  others = {k: v for k, v in others.items() if not isinstance(v, Refused)}
  if "id" in values:
    name = _field_name(values, "id")
  messages = _messages(values, others)
  wrong = {c: others[c] for c in others if _WRONG.fullmatch(c)}
  if wrong and "choices" in domain.fields and "choices" not in values:
    messages = _with_choices(messages, values, wrong)
  given = [field for field in domain.fields if field in values]
  own = {field: domain.fields[field].read(values[field]) for field in given}
  if "prompt" in domain.fields:
    own["prompt"] = messages[-1]["content"]
  for field in own:
    if domain.fields[field].in_prompt:
      _refuse_absent(own[field], field, messages)
  if "source" in values:
    source = _field_name(values, "source")
  elif _is_name(task := domain.task(own)):
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
  record: Values, domains: Domains, form: Form
) -> tuple[Domain, bool]:
  """The domain of a record, and whether it is the config's default.

  Unknown fields of a line that names none of ours are columns.
  """
  if form.sole is not None:
    return form.sole, False
  if "domain" not in record and not form.domain:
    near = _near("domain", [c for c in record if c not in COMMON])
    add = "Add 'domain' to each line, or set --config.data.domain=math for all"
    raise Refused("domain", f"missing; {near} {add}")
  name = record.get("domain")
  near = strict_json.alike(str(name), domains)
  foreign = bool(form.domain) and not near
  name = form.domain if foreign else name
  if not isinstance(name, str) or name not in domains:
    remedy = did_you_mean(name, domains, f"use one of {', '.join(domains)}")
    raise Refused("domain", f"{show(name)} is unknown; {remedy}")
  return domains[name], foreign


def _no_fields(values: Mapping, form: Form, foreign: bool) -> list[str]:
  """Entries that are named like a field but are ordinary columns."""
  ours = values.keys() - form.names.keys()  # under their own names
  other = {"prompt": "messages", "messages": "prompt"}
  out = [x for x in other if x in ours and other[x] in form.names]
  if foreign:
    odd = [x for x in ("id", "source") if not _is_name(values.get(x))]
    out += [x for x in (*odd, "domain") if x in ours]
  return out


def _refuse_columns(
  domain: Domain, domains: Domains, values: Values, others: Values
) -> None:
  """Refuses misspelt optional fields, and optional ones of other domains."""
  for other in domains.values():
    for field, how in other.fields.items():
      if how.optional and field in others and field not in COMMON:
        has = f"{domain.name}, which has {', '.join(domain.fields)}"
        why = f"not a field of domain {has}; remove or rename it"
        raise Refused(field, why)
  optional = {field for field, how in domain.fields.items() if how.optional}
  optional -= {*COMMON}
  refuse_slips(others, sorted((optional | {"source", "domain"}) - {*values}))


def _is_name(value: Any) -> bool:
  return isinstance(value, str) and bool(_NAME.fullmatch(value))


def _field_name(record: Values, field: str) -> str:
  value = record[field]
  if not isinstance(value, str):
    raise Refused(field, f"{kind(value)}; write it as text")
  if not _is_name(value):
    must = "use 1 to 128 of the characters A-Za-z0-9._-"
    raise Refused(field, f"{show(value)}; {must}")
  return value


def _messages(record: Values, others: Values) -> _Messages:
  if "prompt" in record and "messages" in record:
    raise Refused("prompt", "given as well as messages; keep one")
  if "prompt" not in record and "messages" not in record:
    raise missing("prompt", others)
  field = "prompt" if "prompt" in record else "messages"
  messages = record[field]
  if field == "prompt":
    if isinstance(messages, list):
      use = "for a conversation use --config.data.fields=messages:prompt"
      raise Refused("prompt", f"a list; write it as text, or {use}")
    text = strict_json.text(messages, "prompt")
    out = ({"role": "user", "content": text},)
  elif not isinstance(messages, list) or not messages:
    must = 'it must be a list of {"role": "user", "content": ...}'
    raise Refused("messages", f"{show(messages)}; {must}")
  else:
    out = tuple(_message(m, f"messages[{i}]") for i, m in enumerate(messages))
  if (role := out[-1]["role"]) != "user":
    why = f"{show(role)}; the last message must be from the user"
    raise Refused(f"messages[{len(out) - 1}].role", why)
  size = sum(len(m["content"]) for m in out)
  if size > MAX_PROMPT:
    raise Refused(field, f"{size:,} characters; use at most {MAX_PROMPT:,}")
  return out


def _with_choices(
  messages: _Messages, values: dict[str, Any], wrong: Values
) -> _Messages:
  """Adds to a question the choices that stand in columns of their own.

  A hash of the question shuffles them; `values` get choices and letter.
  """
  question = messages[-1]["content"]
  right = strict_json.answer(values["answer"])
  texts = [strict_json.answer(value, name) for name, value in wrong.items()]
  if len(right) == 1 and all(text in question for text in texts):
    return messages  # has choices, and a letter
  place = lambda text: hashlib.sha256(f"{question}\0{text}".encode()).digest()
  choices = sorted((right, *texts), key=place)
  letters = dict(zip(choices, string.ascii_uppercase, strict=False))
  values |= {"choices": choices, "answer": letters.get(right, right)}
  lines = (f"{letter}) {text}" for text, letter in letters.items())
  asked = "\n".join((f"{question}\n", *lines))
  return (*messages[:-1], {**messages[-1], "content": asked})


def _message(m: Any, field: str) -> dict[str, str]:
  if not isinstance(m, dict) or m.keys() != {"role", "content"}:
    raise Refused(field, f"{show(m)}; use an object with role and content only")
  role, content = m["role"], m["content"]
  if role not in ROLES:
    one_of = f"use one of {', '.join(ROLES)}"
    raise Refused(f"{field}.role", f"{show(role)}; {one_of}")
  text = strict_json.text(content, f"{field}.content")
  return {"role": role, "content": text}


def _refuse_absent(
  texts: Sequence[str], field: str, messages: Sequence[Mapping[str, str]]
) -> None:
  """Refuses texts that the prompt lacks: the policy reads nothing else."""
  words = " ".join(" ".join(m["content"] for m in messages).split())
  for i, text in enumerate(texts):
    if " ".join(text.split()) not in words:
      why = f"{show(text)} is not in the prompt; add it there"
      raise Refused(f"{field}[{i}]", why)
