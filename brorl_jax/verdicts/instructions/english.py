"""Counts sentences and capital words, and detects English, by rules.

Rules instead of a trained model: nothing is downloaded, and a text gets the
same verdict everywhere. Each function takes linear time.
"""

from __future__ import annotations

import re

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
