"""Checkers for the instructions of IFEval that need no library.

IFEval (https://arxiv.org/abs/2311.07911) defines 25 kinds of instruction that a
program can check. 24 are here; language:response_language needs a language
detector. The rules are IFEval's, with these deliberate differences:

- Words and phrases of an instruction match literally. In IFEval they are
  regular expressions, so "C++" raises and "a.b" finds "axb". A forbidden phrase
  must end at a word boundary only if it has a letter, digit or "_" at that end.
- keywords:letter_frequency counts any character. IFEval replaces characters
  other than a to z by a random letter.
- The relations are "less than", "at least" and also "at most".
- length_constraints:number_sentences and change_case:capital_word_frequency
  split the text by rules; IFEval downloads a model. A sentence
  needs a letter or digit.
- change_case:english_capital and english_lowercase detect English by a rule.
  IFEval's language detector accepts any text that it cannot classify.
- detectable_format:constrained_response requires exactly one of the three
  answers. IFEval also accepts all three at once.
- detectable_format:number_bullet_lists: an asterisk alone on a line is not a
  bullet point. IFEval counts it and skips the next line's.
- detectable_format:json_format refuses JSON that nests too deep for Python's
  parser, where IFEval raises.

Responses may be hostile, so every check takes linear time.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

RELATIONS = ("less than", "at least", "at most")
CONSTRAINED_RESPONSES = (
  "My answer is yes.",
  "My answer is no.",
  "My answer is maybe.",
)
# A forbidden phrase is compared at every word: its length multiplies the time.
MAX_FORBIDDEN = 100


@dataclasses.dataclass(frozen=True)
class Checker:
  """One kind of instruction."""

  # Whether a text follows it; takes the arguments as keywords.
  followed: Callable[..., bool]
  # For each argument a function that reads the JSON value, or raises ValueError
  # with the required kind.
  arguments: Mapping[str, Callable[[Any], Any]]


# Arguments.


def whole(value: Any) -> int:
  """An integer >= 0; 3.0 counts as 3, because nullable columns hold floats."""
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
  """A non-empty text, stripped."""
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


# Sentences, capitals and English by rules instead of a trained model: nothing
# is downloaded, and a text gets the same verdict everywhere.

_CLOSING = r"[\"')\]}»”’*_]*+"  # noqa: RUF001
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
  + rf")|[.…](?<![.!?…][.…])[.…]*+(?={_CLOSING}\s+[a-z])"
)
_LIST_NUMBER = re.compile(r"^[ \t>*#-]*+\d{1,3}\.(?=\s)", re.MULTILINE)
# From a letter or digit up to the stop that ends the sentence.
_SENTENCE = re.compile(
  rf"[^\W_](?:[^.!?…。！？।]++|[.!?…]++(?!{_CLOSING}(?:\s|\Z)))*+"  # noqa: RUF001
)


def count_sentences(response: str) -> int:
  """The number of sentences in a text.

  A sentence ends at a run of . ! ? or ellipses before white space or the end of
  the text (closing quotes and brackets may come between), and at the full stops
  of Chinese, Japanese and Hindi. It does not end at the "." of a common
  abbreviation, of initials or of a list number, or at a run of full stops
  before a lowercase letter. The text after the last stop is a sentence. A
  sentence needs a letter or digit.
  """
  return len(_SENTENCE.findall(_NO_END.sub("", _LIST_NUMBER.sub("", response))))


def capital_words(response: str) -> list[str]:
  r"""The words in capitals.

  A word is a run of \w, or several joined by one - ' . / or &.
  """
  words = re.findall(r"\w+(?:[-'’./&]\w+)*", response)  # noqa: RUF001
  return [word for word in words if word.isupper()]


# Frequent in English texts and rare in other languages.
_COMMON = frozenset(
  """
  the of and to in is you that it he was for on are as with his they at be this
  have from or had by not but what all were we when your can said there an each
  which she do how their if will
  """.split()
)


def is_english(response: str) -> bool:
  """Whether a text looks like English.

  Nine letters in ten must be a to z. From 20 words on, one word in 20 must be
  among the 46 most common. A language detector would guess on short texts and
  on texts in capitals.
  """
  letters = sum(map(str.isalpha, response))
  words = re.findall(r"[a-z]+", response.lower())
  if not letters or 10 * sum(map(len, words)) < 9 * letters:
    return False
  common = sum(map(_COMMON.__contains__, words))
  return len(words) < 20 or 20 * common >= len(words)


# Checks.


BUILT_IN: dict[str, Checker] = {}


def _built_in(
  kind: str, **arguments: Callable[[Any], Any]
) -> Callable[[Callable[..., bool]], Callable[..., bool]]:
  """Lists a check of a text with its kind and the readers of its arguments."""

  def listed(followed: Callable[..., bool]) -> Callable[..., bool]:
    BUILT_IN[kind] = Checker(followed, arguments)
    return followed

  return listed


def _holds(count: int, relation: str, bound: int) -> bool:
  if relation == "less than":
    return count < bound
  return count >= bound if relation == "at least" else count <= bound


@_built_in("keywords:existence", keywords=_words)
def has_keywords(response: str, *, keywords: Sequence[str]) -> bool:
  """Contains every keyword, in any case, also inside longer words."""
  lower = response.lower()
  return all(keyword.lower() in lower for keyword in keywords)


@_built_in(
  "keywords:frequency", keyword=text, frequency=whole, relation=_relation
)
def has_keyword_often(
  response: str, *, keyword: str, frequency: int, relation: str
) -> bool:
  """Contains the keyword the given number of times, without overlap."""
  count = response.lower().count(keyword.lower())
  return _holds(count, relation, frequency)


@_built_in("keywords:forbidden_words", forbidden_words=_forbidden)
def lacks_words(response: str, *, forbidden_words: Sequence[str]) -> bool:
  """Contains no forbidden word, in any case, as a separate word."""
  lower = response.lower()
  return not any(
    re.search(_as_word(word.lower()), lower) for word in forbidden_words
  )


def _as_word(word: str) -> str:
  before = r"(?<!\w)" if re.match(r"\w", word[0]) else ""
  after = r"(?!\w)" if re.match(r"\w", word[-1]) else ""
  return before + re.escape(word) + after


@_built_in(
  "keywords:letter_frequency",
  letter=_character,
  let_frequency=whole,
  let_relation=_relation,
)
def has_letter_often(
  response: str, *, letter: str, let_frequency: int, let_relation: str
) -> bool:
  """Contains the letter the given number of times, in any case."""
  count = response.lower().count(letter.lower())
  return _holds(count, let_relation, let_frequency)


@_built_in(
  "length_constraints:number_words", num_words=whole, relation=_relation
)
def has_words(response: str, *, num_words: int, relation: str) -> bool:
  r"""Has the given number of words: runs of \w, so "don't" is two."""
  return _holds(len(re.findall(r"\w+", response)), relation, num_words)


@_built_in(
  "length_constraints:number_sentences", num_sentences=whole, relation=_relation
)
def has_sentences(response: str, *, num_sentences: int, relation: str) -> bool:
  """Has the given number of sentences."""
  return _holds(count_sentences(response), relation, num_sentences)


@_built_in("length_constraints:number_paragraphs", num_paragraphs=_positive)
def has_paragraphs(response: str, *, num_paragraphs: int) -> bool:
  """Has this many paragraphs divided by "***"; only outer ones may be empty."""
  parts = response.split("***")
  blank = [not part.strip() for part in parts]
  if any(blank[1:-1]):
    return False
  return len(parts) - sum(blank) == num_paragraphs


@_built_in(
  "length_constraints:nth_paragraph_first_word",
  num_paragraphs=_positive,
  nth_paragraph=_positive,
  first_word=_one_word,
)
def has_first_word(
  response: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
  """Has this many paragraphs, and the nth starts with the word."""
  parts = response.split("\n\n")
  written = sum(1 for part in parts if part.strip())
  if written != num_paragraphs or nth_paragraph > written:
    return False
  words = parts[nth_paragraph - 1].split(maxsplit=1)
  if not words:
    return False
  word = re.split(r"[.,?!'\"]", words[0].lstrip("'").lstrip('"'), maxsplit=1)
  return word[0].lower() == first_word.lower()


@_built_in("detectable_content:number_placeholders", num_placeholders=whole)
def has_placeholders(response: str, *, num_placeholders: int) -> bool:
  """Has at least this many [placeholders], each within a line."""
  count = 0
  for line in response.split("\n"):
    start = line.find("[")
    while start >= 0 and (end := line.find("]", start)) >= 0:
      count += 1
      start = line.find("[", end)
  return count >= num_placeholders


@_built_in("detectable_content:postscript", postscript_marker=text)
def has_postscript(response: str, *, postscript_marker: str) -> bool:
  """Contains the marker, in any case; P.S. and P.P.S may have spaces."""
  spaced = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
  marker = spaced.get(postscript_marker) or re.escape(postscript_marker.lower())
  return re.search(marker, response.lower()) is not None


@_built_in("detectable_format:number_bullet_lists", num_bullets=whole)
def has_bullets(response: str, *, num_bullets: int) -> bool:
  """Exactly this many lines start with "-", or with one "*" and more text."""
  bullets = re.findall(r"^[^\S\n]*+(?:-|\*[^*\n])", response, re.MULTILINE)
  return len(bullets) == num_bullets


@_built_in("detectable_format:constrained_response")
def has_constrained_response(response: str) -> bool:
  """Contains exactly one of the three answers."""
  return sum(answer in response for answer in CONSTRAINED_RESPONSES) == 1


@_built_in(
  "detectable_format:number_highlighted_sections", num_highlights=whole
)
def has_highlights(response: str, *, num_highlights: int) -> bool:
  """Has at least this many *highlights* or **highlights**, within a line."""
  single = re.findall(r"\*([^*\n]*)\*", response)
  double = re.findall(r"\*\*([^*\n]*)\*\*", response)
  count = sum(1 for inside in single + double if inside.strip())
  return count >= num_highlights


@_built_in(
  "detectable_format:multiple_sections",
  section_spliter=text,
  num_sections=whole,
)
def has_sections(
  response: str, *, section_spliter: str, num_sections: int
) -> bool:
  """Has at least this many section headings, such as "Section 1"."""
  headings = re.findall(re.escape(section_spliter) + r"\s?\d+", response)
  return len(headings) >= num_sections


@_built_in("detectable_format:json_format")
def is_json(response: str) -> bool:
  """Is JSON and nothing else, optionally fenced by ```."""
  inside = response.strip()
  for fence in ("```json", "```Json", "```JSON", "```"):
    inside = inside.removeprefix(fence)
  try:
    # Numbers stay texts: converting a million digits would take long.
    json.loads(
      inside.removesuffix("```").strip(), parse_int=str, parse_float=str
    )
  except (ValueError, RecursionError):
    return False
  return True


@_built_in("detectable_format:title")
def has_title(response: str) -> bool:
  """Has a line with a <<title>>."""
  start = response.find("<<")
  while start >= 0:
    end = response.find("\n", start)
    end = len(response) if end < 0 else end
    last = response.rfind(">>", start, end)
    if response[start : max(start, last)].lstrip("<").rstrip(">").strip():
      return True
    start = response.find("<<", end)
  return False


@_built_in("combination:two_responses")
def has_two_responses(response: str) -> bool:
  """Has exactly two different responses, divided by "******"."""
  parts = [part.strip() for part in response.split("******")]
  written = [part for part in parts if part]
  return all(parts[1:-1]) and len(written) == 2 and len(set(written)) == 2


@_built_in("combination:repeat_prompt", prompt_to_repeat=text)
def repeats_prompt(response: str, *, prompt_to_repeat: str) -> bool:
  """Starts with the request, in any case."""
  return response.strip().lower().startswith(prompt_to_repeat.lower())


@_built_in("startend:end_checker", end_phrase=text)
def ends_with(response: str, *, end_phrase: str) -> bool:
  """Ends with the phrase, in any case; a quote may follow."""
  return response.strip().strip('"').lower().endswith(end_phrase.lower())


@_built_in("startend:quotation")
def is_quoted(response: str) -> bool:
  """Is enclosed in double quotes."""
  inside = response.strip()
  return len(inside) > 1 and inside[0] == inside[-1] == '"'


@_built_in(
  "change_case:capital_word_frequency",
  capital_frequency=whole,
  capital_relation=_relation,
)
def has_capital_words(
  response: str, *, capital_frequency: int, capital_relation: str
) -> bool:
  """Has the given number of all-capital words."""
  count = len(capital_words(response))
  return _holds(count, capital_relation, capital_frequency)


@_built_in("change_case:english_capital")
def is_english_capital(response: str) -> bool:
  """Is English without lowercase letters."""
  return response.isupper() and is_english(response)


@_built_in("change_case:english_lowercase")
def is_english_lowercase(response: str) -> bool:
  """Is English without capitals."""
  return response.islower() and is_english(response)


@_built_in("punctuation:no_comma")
def has_no_comma(response: str) -> bool:
  """Has no comma."""
  return "," not in response
