import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st

from brorl_jax.verdicts.instructions.english import (
  capital_words,
  count_sentences,
  is_english,
)

PLAIN = (
  "The cell is the smallest unit of life. It was seen first in cork, and what"
  " was seen were only the walls of dead cells, for they are what is left."
)


@pytest.mark.parametrize(
  "text, count",
  [
    ("", 0),
    ("One", 1),
    ("One. Two", 2),
    ("One! Two? Three.", 3),
    ("Really?! Yes... No.", 3),
    ("Wait... what", 1),
    ("Version 1.2.3 costs 3.50 now. Good.", 2),
    ("Mr. Smith met Dr. A. B. Jones. They spoke.", 2),
    ("Use a stop, e.g. this one, or i.e. that. End", 2),
    ("He lives in the U.S. Now he left", 1),  # initials never end one
    ("MR. Bean laughed.", 1),
    ("1. First\n2. Second.\n   3. Third.", 2),
    ("It happened in 1999. Then it ended.", 2),
    ("He said \"Stop.\" Then 'Go!' (And left.) So.", 4),
    ("**Bold.** Next.", 2),
    ("no space.after a stop", 1),
    (". . . . . .", 0),
    ("! ! ! ?", 0),
    ("- - -\n* * *", 0),
    ("第一句。第二句！第三", 3),  # noqa: RUF001
    ("Line one\nline two\n\nline three", 1),
    ("Is it? yes", 2),
  ],
)
def test_sentences_by_hand(text, count):
  assert count_sentences(text) == count


SENTENCES = st.lists(
  st.sampled_from(
    [
      "The cell divides.", "Does it grow?", 'She said "yes" twice!',
      "Mr. Brown counted 3.5 of them.", "Some (e.g. yeast) bud...",
    ]
  ),
  max_size=12,
)  # fmt: skip


@given(SENTENCES, st.sampled_from([" ", "\n", "\n\n", "  "]))
def test_sentences_add_up(sentences, between):
  assert count_sentences(between.join(sentences)) == len(sentences)


@pytest.mark.parametrize(
  "text, words",
  [
    ("A NASA probe, NOT new", ["A", "NASA", "NOT"]),
    ("I DON'T", ["I", "DON'T"]),
    ("WELL-KNOWN AND/OR U.S. R&D", ["WELL-KNOWN", "AND/OR", "U.S", "R&D"]),
    ("YES...NO--MAYBE", ["YES", "NO", "MAYBE"]),
    ("3D 42 H2O", ["3D", "H2O"]),
    ("McDonald Well-KNOWN iPHONE", []),
  ],
)
def test_capital_words_by_hand(text, words):
  assert capital_words(text) == words


@given(st.lists(st.sampled_from(["AB", "Cd", "ef", "G", "7"])))
def test_capital_words_add_up(words):
  expected = [word for word in words if word in ("AB", "G")]
  assert capital_words(", ".join(words)) == expected


@pytest.mark.parametrize(
  "text, english",
  [
    (PLAIN, True),
    (PLAIN.upper(), True),
    ("Yes", True),
    ("", False),
    ("42 + 3!", False),
    ("это не по-английски", False),
    ("これは英語ではありません", False),
    ("lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod "
     "tempor incididunt ut labore et dolore magna aliqua enim minim", False),
    ("der Hund schläft, während die Katze auf dem Dach sitzt und wartet, bis "
     "sie endlich wieder von uns gefüttert werden kann oder springt", False),
    ("zzz " * 19, True),  # too short to tell
    ("zzz " * 20, False),
    ("zzz " * 19 + "the", True),
    ("a" * 9 + "é", True),
    ("a" * 8 + "é", False),
  ],
)  # fmt: skip
def test_english_by_hand(text, english):
  assert is_english(text) is english


@pytest.mark.timeout(60)  # the square of a million is hours
@pytest.mark.parametrize(
  "unit",
  tiers.some(
    [".", ". ", "\t.", "1. ", "\n1. ", "e.g. ", "a.", "A. ", "!)", "….", '."',
     "! ", "A-", "a ", "THE ", "é", " ", "\n", "…)", "_", "。"], 1, 8,
  ),
)  # fmt: skip
def test_a_million_characters_are_read_once(unit):
  text = unit * (1_000_000 // len(unit))
  count_sentences(text)
  capital_words(text)
  is_english(text)


@settings(max_examples=200)
@given(st.text(alphabet=".!?…。 \n\"')*ab1M-", max_size=60))
def test_no_text_has_more_sentences_than_stops_allow(text):
  stops = sum(text.count(stop) for stop in ".!?…。")
  count = count_sentences(text)
  assert 0 <= count <= stops + 1
  assert count == 0 or any(map(str.isalnum, text))
  # The number of a list's line is none.
  assert count > 0 or not any(map(str.isalpha, text))
