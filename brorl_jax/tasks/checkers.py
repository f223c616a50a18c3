"""Checks of the instructions of IFEval that need no library.

IFEval (https://arxiv.org/abs/2311.07911) names 25 kinds of instruction that a
program can check. Here are 24; the other, language:response_language, needs a
language detector. The rules are IFEval's, with these differences, each on
purpose:

- Words and phrases of an instruction are taken as they are written. There they
  are regular expressions, so that "C++" raises and "a.b" finds "axb". For a
  forbidden phrase the end of a word matters only where the phrase has a letter,
  digit or "_" at that end.
- keywords:letter_frequency counts any one character. There, other than a to z,
  the letter is drawn at random.
- Relations are "less than", "at least" and also "at most".
- length_constraints:number_sentences and change_case:capital_word_frequency
  split the text by the rules of `english`; there a model is downloaded. A
  sentence without a letter or digit is none.
- change_case:english_capital and english_lowercase call a text English by the
  rule of `english`; there by a language detector, which takes a text that it
  can make nothing of for English.
- detectable_format:constrained_response wants exactly one of the three answers.
  There all three at once will do.
- detectable_format:number_bullet_lists: an asterisk alone on a line is no
  bullet point. There it is, and swallows the next line's.
- detectable_format:json_format refuses what nests too deeply for Python's
  parser. There it raises.

A response may be hostile, so every check takes time linear in its length.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from brorl_jax.tasks import english

RELATIONS = ("less than", "at least", "at most")
CONSTRAINED_RESPONSES = (
  "My answer is yes.",
  "My answer is no.",
  "My answer is maybe.",
)
# A forbidden phrase is compared at every word: linear in the response, and
# this is the factor.
MAX_FORBIDDEN = 100


@dataclasses.dataclass(frozen=True)
class Checker:
  """One kind of instruction.

  Attributes:
    followed: Whether a text follows it; the arguments are keywords.
    arguments: Name -> the function that reads the argument from what JSON
      holds, or raises ValueError with what it must be.
  """

  followed: Callable[..., bool]
  arguments: Mapping[str, Callable[[Any], Any]]


# Arguments.


def whole(value: Any) -> int:
  """A whole number from 0; 3.0 is 3, as nullable columns of a table hold it."""
  if isinstance(value, float) and value.is_integer():
    value = int(value)
  if isinstance(value, bool) or not isinstance(value, int) or value < 0:
    raise ValueError("a whole number >= 0")
  return value


def _positive(value: Any) -> int:
  try:
    number = whole(value)
  except ValueError:
    number = 0
  if not number:
    raise ValueError("a whole number >= 1")
  return number


def text(value: Any) -> str:
  """A text with something in it, stripped."""
  if not isinstance(value, str) or not value.strip():
    raise ValueError("a text that is not blank")
  return value.strip()


def _words(value: Any) -> list[str]:
  if not isinstance(value, list) or not value:
    raise ValueError("a list of texts")
  return [text(word) for word in value]


def _forbidden(value: Any) -> list[str]:
  words = _words(value)
  if any(len(word) > MAX_FORBIDDEN for word in words):
    raise ValueError(f"a list of texts of at most {MAX_FORBIDDEN} characters")
  return words


def _relation(value: Any) -> str:
  if value not in RELATIONS:
    raise ValueError("one of " + ", ".join(map(repr, RELATIONS)))
  return value


def _character(value: Any) -> str:
  if not isinstance(value, str) or len(value.strip()) != 1:
    raise ValueError("one character")
  return value.strip()


def _one_word(value: Any) -> str:
  word = text(value)
  if len(word.split()) > 1:
    raise ValueError("one word")
  return word


# Checks.


def _holds(count: int, relation: str, bound: int) -> bool:
  if relation == "less than":
    return count < bound
  return count >= bound if relation == "at least" else count <= bound


def has_keywords(response: str, *, keywords: Sequence[str]) -> bool:
  """Every keyword is there, in any case, also inside a longer word."""
  lower = response.lower()
  return all(keyword.lower() in lower for keyword in keywords)


def has_keyword_often(
  response: str, *, keyword: str, frequency: int, relation: str
) -> bool:
  """The keyword is there so many times, without overlap."""
  count = response.lower().count(keyword.lower())
  return _holds(count, relation, frequency)


def lacks_words(response: str, *, forbidden_words: Sequence[str]) -> bool:
  """No forbidden word is there, in any case, as a word of its own."""
  lower = response.lower()
  return not any(
    re.search(_as_word(word.lower()), lower) for word in forbidden_words
  )


def _as_word(word: str) -> str:
  before = r"(?<!\w)" if re.match(r"\w", word[0]) else ""
  after = r"(?!\w)" if re.match(r"\w", word[-1]) else ""
  return before + re.escape(word) + after


def has_letter_often(
  response: str, *, letter: str, let_frequency: int, let_relation: str
) -> bool:
  """The letter is there so many times, in any case."""
  count = response.lower().count(letter.lower())
  return _holds(count, let_relation, let_frequency)


def has_words(response: str, *, num_words: int, relation: str) -> bool:
  r"""It has so many words: runs of \w, so that "don't" is two."""
  return _holds(len(re.findall(r"\w+", response)), relation, num_words)


def has_sentences(response: str, *, num_sentences: int, relation: str) -> bool:
  """It has so many sentences."""
  return _holds(english.count_sentences(response), relation, num_sentences)


def has_paragraphs(response: str, *, num_paragraphs: int) -> bool:
  """Exactly so many, divided by "***", none empty but before or after all."""
  parts = response.split("***")
  blank = [not part.strip() for part in parts]
  if any(blank[1:-1]):
    return False
  return len(parts) - sum(blank) == num_paragraphs


def has_first_word(
  response: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
  """So many paragraphs between blank lines, the nth starting with the word."""
  parts = response.split("\n\n")
  written = sum(1 for part in parts if part.strip())
  if written != num_paragraphs or nth_paragraph > written:
    return False
  words = parts[nth_paragraph - 1].split(maxsplit=1)
  if not words:
    return False
  word = re.split(r"[.,?!'\"]", words[0].lstrip("'").lstrip('"'), maxsplit=1)
  return word[0].lower() == first_word.lower()


def has_placeholders(response: str, *, num_placeholders: int) -> bool:
  """At least so many [placeholders], each within a line."""
  count = 0
  for line in response.split("\n"):
    start = line.find("[")
    while start >= 0 and (end := line.find("]", start)) >= 0:
      count += 1
      start = line.find("[", end)
  return count >= num_placeholders


def has_postscript(response: str, *, postscript_marker: str) -> bool:
  """The marker is there, in any case; P.S. and P.P.S may be spaced."""
  lower = response.lower()
  if postscript_marker == "P.P.S":
    return re.search(r"p\.\s?p\.\s?s", lower) is not None
  if postscript_marker == "P.S.":
    return re.search(r"p\.\s?s\.", lower) is not None
  return postscript_marker.lower() in lower


def has_bullets(response: str, *, num_bullets: int) -> bool:
  """Exactly so many lines start with "-", or with one "*" and more."""
  bullets = re.findall(r"^[^\S\n]*+(?:-|\*[^*\n])", response, re.MULTILINE)
  return len(bullets) == num_bullets


def has_constrained_response(response: str) -> bool:
  """Exactly one of the three answers is there."""
  return sum(answer in response for answer in CONSTRAINED_RESPONSES) == 1


def has_highlights(response: str, *, num_highlights: int) -> bool:
  """At least so many *highlights* or **highlights**, each within a line."""
  single = re.findall(r"\*([^*\n]*)\*", response)
  double = re.findall(r"\*\*([^*\n]*)\*\*", response)
  count = sum(1 for inside in single + double if inside.strip())
  return count >= num_highlights


def has_sections(
  response: str, *, section_spliter: str, num_sections: int
) -> bool:
  """At least so many sections begin, such as "Section 1"."""
  return (
    len(re.findall(re.escape(section_spliter) + r"\s?\d+", response))
    >= num_sections
  )


def is_json(response: str) -> bool:
  """It is JSON and nothing else, except a fence of ``` around it."""
  inside = response.strip()
  for fence in ("```json", "```Json", "```JSON", "```"):
    inside = inside.removeprefix(fence)
  try:
    # As texts: the value of a number of a million digits is not asked for.
    json.loads(
      inside.removesuffix("```").strip(), parse_int=str, parse_float=str
    )
  except (ValueError, RecursionError):
    return False
  return True


def has_title(response: str) -> bool:
  """A line has a <<title>>."""
  start = response.find("<<")
  while start >= 0:
    end = response.find("\n", start)
    end = len(response) if end < 0 else end
    last = response.rfind(">>", start, end)
    if response[start : max(start, last)].lstrip("<").rstrip(">").strip():
      return True
    start = response.find("<<", end)
  return False


def has_two_responses(response: str) -> bool:
  """Two different responses, divided by "******" and no more of it."""
  parts = [part.strip() for part in response.split("******")]
  written = [part for part in parts if part]
  return all(parts[1:-1]) and len(written) == 2 and len(set(written)) == 2


def repeats_prompt(response: str, *, prompt_to_repeat: str) -> bool:
  """It starts with the request, in any case."""
  return response.strip().lower().startswith(prompt_to_repeat.lower())


def ends_with(response: str, *, end_phrase: str) -> bool:
  """It ends with the phrase, in any case; a quote may follow."""
  return response.strip().strip('"').lower().endswith(end_phrase.lower())


def is_quoted(response: str) -> bool:
  """All of it is in double quotes."""
  inside = response.strip()
  return len(inside) > 1 and inside[0] == inside[-1] == '"'


def has_capital_words(
  response: str, *, capital_frequency: int, capital_relation: str
) -> bool:
  """So many words are all capitals."""
  count = len(english.capital_words(response))
  return _holds(count, capital_relation, capital_frequency)


def is_english_capital(response: str) -> bool:
  """English without a small letter."""
  return response.isupper() and english.is_english(response)


def is_english_lowercase(response: str) -> bool:
  """English without a capital."""
  return response.islower() and english.is_english(response)


def has_no_comma(response: str) -> bool:
  """No comma."""
  return "," not in response


BUILT_IN: Mapping[str, Checker] = {
  "keywords:existence": Checker(has_keywords, {"keywords": _words}),
  "keywords:frequency": Checker(
    has_keyword_often,
    {"keyword": text, "frequency": whole, "relation": _relation},
  ),
  "keywords:forbidden_words": Checker(
    lacks_words, {"forbidden_words": _forbidden}
  ),
  "keywords:letter_frequency": Checker(
    has_letter_often,
    {
      "letter": _character,
      "let_frequency": whole,
      "let_relation": _relation,
    },
  ),
  "length_constraints:number_words": Checker(
    has_words, {"num_words": whole, "relation": _relation}
  ),
  "length_constraints:number_sentences": Checker(
    has_sentences, {"num_sentences": whole, "relation": _relation}
  ),
  "length_constraints:number_paragraphs": Checker(
    has_paragraphs, {"num_paragraphs": _positive}
  ),
  "length_constraints:nth_paragraph_first_word": Checker(
    has_first_word,
    {
      "num_paragraphs": _positive,
      "nth_paragraph": _positive,
      "first_word": _one_word,
    },
  ),
  "detectable_content:number_placeholders": Checker(
    has_placeholders, {"num_placeholders": whole}
  ),
  "detectable_content:postscript": Checker(
    has_postscript, {"postscript_marker": text}
  ),
  "detectable_format:number_bullet_lists": Checker(
    has_bullets, {"num_bullets": whole}
  ),
  "detectable_format:constrained_response": Checker(
    has_constrained_response, {}
  ),
  "detectable_format:number_highlighted_sections": Checker(
    has_highlights, {"num_highlights": whole}
  ),
  "detectable_format:multiple_sections": Checker(
    has_sections, {"section_spliter": text, "num_sections": whole}
  ),
  "detectable_format:json_format": Checker(is_json, {}),
  "detectable_format:title": Checker(has_title, {}),
  "combination:two_responses": Checker(has_two_responses, {}),
  "combination:repeat_prompt": Checker(
    repeats_prompt, {"prompt_to_repeat": text}
  ),
  "startend:end_checker": Checker(ends_with, {"end_phrase": text}),
  "startend:quotation": Checker(is_quoted, {}),
  "change_case:capital_word_frequency": Checker(
    has_capital_words,
    {"capital_frequency": whole, "capital_relation": _relation},
  ),
  "change_case:english_capital": Checker(is_english_capital, {}),
  "change_case:english_lowercase": Checker(is_english_lowercase, {}),
  "punctuation:no_comma": Checker(has_no_comma, {}),
}
