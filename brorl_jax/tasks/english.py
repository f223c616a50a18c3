"""Sentences, words in capitals, and whether a text is English.

By rules instead of a trained model, so that nothing is downloaded and one text
has one verdict everywhere. Each takes time linear in the text.
"""

from __future__ import annotations

import re

_CLOSING = r"[\"')\]}»”’*_]*+"  # noqa: RUF001
_ABBREVIATIONS = (
  "Mr Ms Dr St Jr Sr Lt vs cf eq pp ch Mrs Drs Rev Gen Col Sgt vol fig eqs ref"
  " viz Inc Ltd Jan Feb Aug Sep Oct Nov Dec Prof Capt figs refs Corp Sept"
  " approx"
).split()
# Stops that end no sentence. Each alternative starts with a stop, which a
# search finds fast, and looks behind from there: of fixed width, so one for
# each length of abbreviation. Nothing is given back ("*+"), and a run is tried
# from its first stop alone: a run that fails is not read again from each stop.
_NO_END = re.compile(
  r"\.(?=\s)(?:(?<=\b[A-Za-z]\.[A-Za-z]\.)|(?<=\b[A-Z]\.)"
  + "".join(
    rf"|(?<=\b(?i:{'|'.join(w for w in _ABBREVIATIONS if len(w) == n)})\.)"
    for n in sorted({len(word) for word in _ABBREVIATIONS})
  )
  + rf")|[.…](?<![.!?…][.…])[.…]*+(?={_CLOSING}\s+[a-z])"
)
_LIST_NUMBER = re.compile(r"^[ \t>*#-]*+\d{1,3}\.(?=\s)", re.MULTILINE)
# From a letter or digit to before the stop that ends the sentence.
_SENTENCE = re.compile(
  rf"[^\W_](?:[^.!?…。！？।]++|[.!?…]++(?!{_CLOSING}(?:\s|\Z)))*+"  # noqa: RUF001
)


def count_sentences(response: str) -> int:
  """How many sentences a text has.

  A sentence ends at a run of . ! ? or ellipses that space or the end of the
  text follows (closing quotes and brackets may stand between), and at the full
  stops of Chinese, Japanese and Hindi. No sentence ends at the "." of a common
  abbreviation, of initials or of the number that starts a list's line, or at a
  run of full stops before one of a to z. What follows the last stop is a
  sentence, what has no letter or digit is none.
  """
  return len(_SENTENCE.findall(_NO_END.sub("", _LIST_NUMBER.sub("", response))))


def capital_words(response: str) -> list[str]:
  r"""The words without a small letter and with a capital.

  A word is a run of \w, or several joined by one - ' . / or &.
  """
  words = re.findall(r"\w+(?:[-'’./&]\w+)*", response)  # noqa: RUF001
  return [word for word in words if word.isupper()]


# Each is in most English texts of 20 words, and few are words elsewhere.
_COMMON = frozenset(
  """
  the of and to in is you that it he was for on are as with his they at be this
  have from or had by not but what all were we when your can said there an each
  which she do how their if will
  """.split()
)


def is_english(response: str) -> bool:
  """Whether a text passes for English.

  Nine letters of ten are a to z and, from 20 words on, one word of 20 is among
  the 46 commonest. A detector of languages guesses at short texts, and at texts
  in capitals.
  """
  letters = sum(map(str.isalpha, response))
  words = re.findall(r"[a-z]+", response.lower())
  if not letters or 10 * sum(map(len, words)) < 9 * letters:
    return False
  common = sum(map(_COMMON.__contains__, words))
  return len(words) < 20 or 20 * common >= len(words)
