"""Instruction following, in the format of IFEval: constraints of a response.

24 kinds of IFEval are checked here; the others come from a library (if_library)
and run in the jail. Responses may be hostile: every check takes linear time.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from brorl_jax.verdicts import base, strict_json
from brorl_jax.verdicts.base import Domain, Field, Verdict, judged, require_text
from brorl_jax.verdicts.instructions import if_library
from brorl_jax.verdicts.math import expressions
from brorl_jax.verdicts.sandbox import jail as jails
from brorl_jax.verdicts.strict_json import Refused, did_you_mean, show
from brorl_jax.verdicts.strict_json import kind as type_of

MAX_SHOWN = 1_000  # characters of the response that a verdict keeps
RELATIONS = {  # IFEval lacks the last one
  "less than": int.__lt__,
  "at least": int.__ge__,
  "at most": int.__le__,
}
# A forbidden phrase is compared at every word: its length multiplies the time.
MAX_FORBIDDEN = 100
_CHOICES = ("yes", "no", "maybe")  # of a constrained response
_BULLET = re.compile(r"^[^\S\n]*+(?:-|\*[^*\n])", re.MULTILINE)


def verify(
  response: str, instructions: Sequence[Mapping[str, Any]], *, jail: Any = None
) -> Verdict:
  """Scores a response by the share of instructions that it follows.

    verify("Yes. " * 300, [
      {"id": "length_constraints:number_words",
       "kwargs": {"relation": "at least", "num_words": 300}},
      {"id": "punctuation:no_comma", "kwargs": {}}])

  Only the text after the thinking counts, stripped. If it is empty or the
  thinking is not closed, the response follows no instruction, not even "no
  comma". The library's checkers run in `jail` (default: this thread's); where
  one is late or dies, the verdict is invalid. Raises ValueError if the response
  is not a text, or an instruction is wrong.
  """
  require_text(response)
  wanted = _read_all(instructions)
  if not (text := base.after_thinking(response).strip()):
    thought = "nothing after the thinking" if response.strip() else ""
    return judged(thought or "empty response", "")
  shown = text[:MAX_SHOWN]
  missed = []
  for kind, kwargs in wanted:
    if kind in BUILT_IN:
      followed = BUILT_IN[kind].followed(text, **kwargs)
    else:
      try:
        followed = (jail or jails.mine()).ask("instruction", kind, kwargs, text)
      except jails.Failed as error:
        return Verdict("invalid", 0.0, f"verifier failed: {error}", shown)
    if not followed:
      missed.append(kind)
  if not missed:
    return judged("", shown)
  score = 1.0 - len(missed) / len(wanted)
  return Verdict("fail", score, f"not followed: {', '.join(missed)}", shown)


def check(instructions: Sequence[Mapping[str, Any]]) -> None:
  """Refuses instructions that could not be checked later, by ValueError."""
  for kind, kwargs in _read_all(instructions):
    if kind not in BUILT_IN:
      if_library.check(kind, kwargs)


def _read_all(given: Any) -> list[tuple[str, dict[str, Any]]]:
  return [_read(x["id"], x.get("kwargs") or {}) for x in _instructions(given)]


def _read(kind: str, kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
  where = f"instruction {kind!r}"
  given = {name: value for name, value in kwargs.items() if value is not None}
  if kind in BUILT_IN:
    return kind, _arguments(where, BUILT_IN[kind].arguments, given)
  known = [*BUILT_IN, *if_library.KINDS]
  if kind not in known:
    every = "use one of instructions.BUILT_IN or if_library.KINDS"
    remedy = did_you_mean(kind, known, every, repr)
    raise ValueError(f"{where} is unknown; {remedy}")
  return kind, given


def _arguments(
  where: str,
  wanted: Mapping[str, Callable[[Any], Any]],
  given: Mapping[str, Any],
) -> dict[str, Any]:
  for name, value in given.items():
    if name not in wanted:
      every = f"use {', '.join(wanted) or 'none'}"
      remedy = did_you_mean(name, wanted, every, repr)
      raise ValueError(f"{where}: kwarg {name} = {value!r}: unknown; {remedy}")
  arguments = {}
  for name, read in wanted.items():
    if name not in given:
      raise ValueError(f"{where}: kwarg {name} is missing; add it")
    try:
      arguments[name] = read(given[name])
    except ValueError as error:
      kwarg = f"{where}: kwarg {name} = {given[name]!r}"
      raise ValueError(f"{kwarg}; use {error}") from None
  nth = arguments.get("nth_paragraph", 0)
  count = arguments.get("num_paragraphs", 0)
  if nth > count:
    above = f"nth_paragraph = {nth} exceeds num_paragraphs = {count}"
    raise ValueError(f"{where}: {above}; lower it")
  return arguments


def whole(value: Any, least: int = 0) -> int:
  """An integer; 3.0 counts as 3, because nullable columns hold floats."""
  if isinstance(value, float) and value.is_integer():
    value = int(value)
  if isinstance(value, bool) or not isinstance(value, int) or value < least:
    raise ValueError(f"a whole number >= {least}")
  return value


_positive = functools.partial(whole, least=1)


def _text_that(must: str, good: Callable[[str], bool]) -> Callable[[Any], str]:
  """Reads a text that is good without its outer spaces."""

  def read(value: Any) -> str:
    if not isinstance(value, str) or not good(value.strip()):
      raise ValueError(must)
    return value.strip()

  return read


text = _text_that("a text that is not blank", bool)
_character = _text_that("one character", lambda x: len(x) == 1)
_one_word = _text_that("one word", lambda x: len(x.split()) == 1)
_KNOWN = ", ".join(map(repr, RELATIONS))
_relation = _text_that(f"one of {_KNOWN}", RELATIONS.__contains__)


def _words(value: Any) -> list[str]:
  if not isinstance(value, list) or not value:
    raise ValueError("a list of texts")
  return [text(word) for word in value]


def _forbidden(value: Any) -> list[str]:
  words = _words(value)
  if any(len(word) > MAX_FORBIDDEN for word in words):
    raise ValueError(f"a list of texts of at most {MAX_FORBIDDEN} characters")
  return words


# Sentences, capitals and English by rules instead of a trained model: nothing
# is downloaded, and a text gets the same verdict everywhere.

_AFTER_STOP = r"[\"')\]}»”’*_]*+"  # noqa: RUF001
_ABBREVIATIONS = (
  "Mr Ms Dr St Jr Sr Lt vs cf eq pp ch Mrs Drs Rev Gen Col Sgt vol fig eqs ref"
  " viz Inc Ltd Jan Feb Aug Sep Oct Nov Dec Prof Capt figs refs Corp Sept"
  " approx"
).split()
# Stops that do not end a sentence. Each alternative starts at a stop, which is
# fast to find, and looks behind with a fixed width, hence one alternative per
# length of abbreviation. Possessive "*+" and trying a run only from its first
# stop keep the time linear.
_NO_END = re.compile(
  r"\.(?=\s)(?:(?<=\b[A-Za-z]\.[A-Za-z]\.)|(?<=\b[A-Z]\.)"
  + "".join(
    rf"|(?<=\b(?i:{'|'.join(w for w in _ABBREVIATIONS if len(w) == n)})\.)"
    for n in sorted({len(word) for word in _ABBREVIATIONS})
  )
  + rf")|[.…](?<![.!?…][.…])[.…]*+(?={_AFTER_STOP}\s+[a-z])"
)
_LIST_NUMBER = re.compile(r"^[ \t>*#-]*+\d{1,3}\.(?=\s)", re.MULTILINE)
# From a letter or digit up to the stop that ends the sentence.
_SENTENCE = re.compile(
  rf"[^\W_](?:[^.!?…。！？।]++|[.!?…]++(?!{_AFTER_STOP}(?:\s|\Z)))*+"  # noqa: RUF001
)


def count_sentences(response: str) -> int:
  """The number of sentences, by rules where IFEval downloads a model.

  A sentence ends at a run of . ! ? or ellipses before white space or the end of
  the text (closing quotes and brackets may come between), and at the full stops
  of Chinese, Japanese and Hindi. It does not end at the "." of a common
  abbreviation, of initials or of a list number, or at a run of full stops
  before a lowercase letter. The text after the last stop is a sentence. A
  sentence needs a letter or digit.
  """
  return len(_SENTENCE.findall(_NO_END.sub("", _LIST_NUMBER.sub("", response))))


def capital_words(response: str) -> list[str]:
  r"""Words in capitals: runs of \w, or several joined by one - ' . / or &."""
  words = re.findall(r"\w+(?:[-'’./&]\w+)*", response)  # noqa: RUF001
  return [word for word in words if word.isupper()]


# Frequent in English texts and rare in other languages.
_COMMON = frozenset(expressions.table("english.txt").split())


def is_english(response: str) -> bool:
  """Whether a text looks like English.

  Nine letters in ten must be a to z. From 20 words on, one word in 20 must be
  among the 46 most common. A detector would guess on short texts and capitals.
  """
  letters = sum(map(str.isalpha, response))
  words = re.findall(r"[a-z]+", response.lower())
  if not letters or 10 * sum(map(len, words)) < 9 * letters:
    return False
  common = sum(map(_COMMON.__contains__, words))
  return len(words) < 20 or 20 * common >= len(words)


def _has_keywords(response: str, *, keywords: Sequence[str]) -> bool:
  lower = response.lower()
  return all(keyword.lower() in lower for keyword in keywords)


def _lacks_words(response: str, *, forbidden_words: Sequence[str]) -> bool:
  lower = response.lower()
  # Unlike IFEval's a word has a boundary only where it has a letter or digit.
  words = (rf"(?!\B\w){re.escape(w.lower())}(?<!\w\B)" for w in forbidden_words)
  return not any(re.search(word, lower) for word in words)


def _has_paragraphs(response: str, *, num_paragraphs: int) -> bool:
  """Divided by "***"; only outer ones may be empty."""
  parts = response.split("***")
  blank = [not part.strip() for part in parts]
  if any(blank[1:-1]):
    return False
  return len(parts) - sum(blank) == num_paragraphs


def _has_first_word(
  response: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
  written = [part for part in response.split("\n\n") if part.strip()]
  if len(written) != num_paragraphs or nth_paragraph > num_paragraphs:
    return False
  first = written[nth_paragraph - 1].split(maxsplit=1)[0]
  word = re.split(r"[.,?!'\"]", first.lstrip("'").lstrip('"'), maxsplit=1)
  return word[0].lower() == first_word.lower()


def _count_placeholders(response: str) -> int:
  """[Placeholders], each within a line."""
  count = 0
  for line in response.split("\n"):
    start = line.find("[")
    while start >= 0 and (end := line.find("]", start)) >= 0:
      count += 1
      start = line.find("[", end)
  return count


def _has_postscript(response: str, *, postscript_marker: str) -> bool:
  """P.S. and P.P.S may have spaces."""
  spaced = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
  marker = spaced.get(postscript_marker) or re.escape(postscript_marker.lower())
  return re.search(marker, response.lower()) is not None


def _count_highlights(response: str) -> int:
  """*Highlights* and **highlights**, each within a line."""
  single = re.findall(r"\*([^*\n]*)\*", response)
  double = re.findall(r"\*\*([^*\n]*)\*\*", response)
  return sum(1 for inside in single + double if inside.strip())


def _is_json(response: str) -> bool:
  """Is JSON and nothing else, optionally fenced by ```."""
  bare = response.strip()
  for fence in ("```json", "```Json", "```JSON", "```"):
    bare = bare.removeprefix(fence)
  try:
    # Numbers stay texts: converting a million digits would take long.
    json.loads(bare.removesuffix("```").strip(), parse_int=str, parse_float=str)
  except (ValueError, RecursionError):  # too deep, where IFEval raises
    return False
  return True


def _has_title(response: str) -> bool:
  start = response.find("<<")
  while start >= 0:
    end = response.find("\n", start)
    end = len(response) if end < 0 else end
    last = response.rfind(">>", start, end)
    if response[start : max(start, last)].lstrip("<").rstrip(">").strip():
      return True
    start = response.find("<<", end)
  return False


def _has_two_responses(response: str) -> bool:
  parts = [part.strip() for part in response.split("******")]
  written = [part for part in parts if part]
  return all(parts[1:-1]) and len(written) == 2 and len(set(written)) == 2


def _is_quoted(response: str) -> bool:
  inside = response.strip()
  return len(inside) > 1 and inside[0] == inside[-1] == '"'


class Checker(NamedTuple):
  # Whether a text follows it; takes the arguments as keywords.
  followed: Callable[..., bool]
  # Reads the JSON value of each argument; ValueError with the required kind.
  arguments: Mapping[str, Callable[[Any], Any]]


def _kind(followed: Callable[..., bool], **arguments: Any) -> Checker:
  return Checker(followed, arguments)


def _number(
  count: Callable[..., int], bound: str, relation: str, **arguments: Any
) -> Checker:
  """A count and a bound in the relation that an argument names, or in this."""
  if relation not in RELATIONS:
    arguments[relation] = _relation

  def followed(response: str, **given: Any) -> bool:
    right, limit = given.pop(relation, relation), given.pop(bound)
    return RELATIONS[right](count(response, **given), limit)

  return Checker(followed, {**arguments, bound: whole})


# IFEval's rules (https://arxiv.org/abs/2311.07911), with differences. Words and
# phrases match literally, in any case: as regular expressions "C++" raises. A
# letter may be any character; IFEval replaces others than a to z at random. An
# asterisk alone on a line is no bullet; it counts it and skips the next line's.
# Only one constrained response may be there; it accepts all three at once.
BUILT_IN: dict[str, Checker] = {
  "keywords:existence": _kind(_has_keywords, keywords=_words),
  "keywords:frequency": _number(
    lambda response, keyword: response.lower().count(keyword.lower()),
    "frequency", "relation", keyword=text,
  ),
  "keywords:forbidden_words": _kind(_lacks_words, forbidden_words=_forbidden),
  "keywords:letter_frequency": _number(
    lambda response, letter: response.lower().count(letter.lower()),
    "let_frequency", "let_relation", letter=_character,
  ),
  "length_constraints:number_words":
    _number(lambda x: len(re.findall(r"\w+", x)), "num_words", "relation"),
  "length_constraints:number_sentences":
    _number(count_sentences, "num_sentences", "relation"),
  "length_constraints:number_paragraphs":
    _kind(_has_paragraphs, num_paragraphs=_positive),
  "length_constraints:nth_paragraph_first_word": _kind(
    _has_first_word, num_paragraphs=_positive, nth_paragraph=_positive,
    first_word=_one_word,
  ),
  "detectable_content:number_placeholders":
    _number(_count_placeholders, "num_placeholders", "at least"),
  "detectable_content:postscript":
    _kind(_has_postscript, postscript_marker=text),
  "detectable_format:number_bullet_lists": _kind(
    lambda response, num_bullets: num_bullets == len(_BULLET.findall(response)),
    num_bullets=whole,
  ),
  "detectable_format:constrained_response":
    _kind(lambda x: 1 == sum(f"My answer is {y}." in x for y in _CHOICES)),
  "detectable_format:number_highlighted_sections":
    _number(_count_highlights, "num_highlights", "at least"),
  "detectable_format:multiple_sections": _number(
    lambda x, section_spliter:
      len(re.findall(re.escape(section_spliter) + r"\s?\d+", x)),
    "num_sections", "at least", section_spliter=text,
  ),
  "detectable_format:json_format": _kind(_is_json),
  "detectable_format:title": _kind(_has_title),
  "combination:two_responses": _kind(_has_two_responses),
  "combination:repeat_prompt": _kind(
    lambda x, prompt_to_repeat:
      x.strip().lower().startswith(prompt_to_repeat.lower()),
    prompt_to_repeat=text,
  ),
  "startend:end_checker": _kind(
    lambda x, end_phrase:
      x.strip().strip('"').lower().endswith(end_phrase.lower()),
    end_phrase=text,
  ),
  "startend:quotation": _kind(_is_quoted),
  "change_case:capital_word_frequency": _number(
    lambda response: len(capital_words(response)),
    "capital_frequency", "capital_relation",
  ),
  "change_case:english_capital": _kind(lambda x: x.isupper() and is_english(x)),
  "change_case:english_lowercase":
    _kind(lambda x: x.islower() and is_english(x)),
  "punctuation:no_comma": _kind(lambda response: "," not in response),
}  # fmt: skip


def _instructions(value: Any) -> list[dict[str, Any]]:
  if not isinstance(value, list) or not value:
    must = "use a list with at least one"
    raise Refused("instructions", f"{show(value)}; {must}")
  for i, item in enumerate(value):
    at = f"instructions[{i}]"
    if not isinstance(item, dict) or {*item, "kwargs"} != {"id", "kwargs"}:
      raise Refused(at, f"{show(item)}; use an object with id and kwargs only")
    if not isinstance(item["id"], str):
      raise Refused(f"{at}.id", f"{type_of(item['id'])}; write it as text")
    if item.get("kwargs") is not None:
      strict_json.mapping(item["kwargs"], f"{at}.kwargs")
  return value


DOMAIN = Domain(
  name="instructions",
  verify=lambda response, entry, jail: verify(response, **entry, jail=jail),
  fields={"instructions": Field(_instructions)},
  check_reference=lambda record: check(record["instructions"]) or record,
  needs_jail="libraries",
)
