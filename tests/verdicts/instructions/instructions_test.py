"""Every check by hand, by construction, and against IFEval's where it is."""

import importlib.util
import json
import pathlib
import random

import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import refuses

from brorl_jax.verdicts import instructions
from brorl_jax.verdicts.instructions import BUILT_IN, check, verify
from brorl_jax.verdicts.sandbox import jail as jails

few = settings(max_examples=30)

AT_LEAST, LESS = "at least", "less than"


def followed(kind, text, **kwargs):
  return BUILT_IN[kind].followed(text, **kwargs)


# A kind, its arguments, texts that follow it and texts that do not.
# Keywords are counted without overlap: aaa has one aa.
TABLE = pathlib.Path(__file__).parent / "by_hand.jsonl"
BY_HAND = [[*json.loads(x).values()] for x in TABLE.read_text().splitlines()]


@pytest.mark.parametrize("kind, kwargs, good, bad", BY_HAND)
def test_by_hand(kind, kwargs, good, bad):
  assert {
    text: followed(kind, text, **kwargs) for text in good
  } == dict.fromkeys(good, True)
  assert {
    text: followed(kind, text, **kwargs) for text in bad
  } == dict.fromkeys(bad, False)


def test_every_kind_is_tried_by_hand():
  assert {kind for kind, *_ in BY_HAND} == BUILT_IN.keys()
  assert len(BUILT_IN) == 24


@pytest.mark.parametrize("kind, kwargs, _good, _bad", BY_HAND)
def test_the_arguments_are_read_as_they_are(kind, kwargs, _good, _bad):
  readers = BUILT_IN[kind].arguments
  assert readers.keys() == kwargs.keys()
  assert {name: read(kwargs[name]) for name, read in readers.items()} == kwargs


@pytest.mark.parametrize("kind, name, values", [
  ("keywords:existence", "keywords", [[], "ab", None, [""], ["a", 3],
    {"a": 1}]),
  ("keywords:frequency", "keyword", ["", "  ", 3, ["a"]]),
  ("keywords:frequency", "frequency", [-1, 1.5, "3", True, None,
    float("nan")]),
  ("keywords:frequency", "relation", ["more than", "At least", "", 3, ["x"]]),
  ("keywords:letter_frequency", "letter", ["", "ab", " ", 1]),
  ("keywords:forbidden_words", "forbidden_words", [[],
    ["a" * (instructions.MAX_FORBIDDEN + 1)], "a"]),
  ("length_constraints:number_paragraphs", "num_paragraphs", [0, -1, "2"]),
  ("length_constraints:nth_paragraph_first_word", "first_word", ["two words",
    ""]),
])  # fmt: skip
def test_wrong_arguments_are_refused(kind, name, values):
  for value in values:
    with pytest.raises(ValueError, match=r"^(a|one|list)"):
      BUILT_IN[kind].arguments[name](value)


# By construction.

WORDS = st.lists(st.sampled_from("cell wall Atom ION wave".split()), max_size=9)


@few
@given(
  st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
  ),
  st.sampled_from(["{}", "```json\n{}\n```", "```{}```", "  {}\n"]),
)
def test_json_is_seen(value, fence):
  text = fence.replace("{}", json.dumps(value))
  assert followed("detectable_format:json_format", text)
  assert not followed("detectable_format:json_format", f"{text} and more")


@few
@given(st.text(alphabet="ab, .", max_size=20), WORDS.filter(bool))
def test_a_forbidden_word_is_found_wherever_it_stands(text, words):
  kind = "keywords:forbidden_words"
  assert followed(kind, text, forbidden_words=words)
  loud = f"{text} {words[-1].upper()}."
  assert not followed(kind, loud, forbidden_words=words)
  assert followed(kind, f"{text}x{words[-1]}x", forbidden_words=words)


# A response that is made to be slow.

HOSTILE = [
  "*", "[", "]", "#", "\n", "<", "<<", ">>", " ", "\t", "a", "a ", "***", "**a",
  "[a]", "<<a", "p. p.", "p.", "Part.", "Part.1", "{", '["', '{"a":', '"', "\\",
  "a\n\n", "'", "-\n", "*\n", "* a\n", "0", "9.", "1e", "1e9,", "-", "\r", "é",
  "\u2028", "My answer is ", "no  wa", "art_", "n.b. (", "```", "\u0130",
  # Sentences and capitals.
  ".", ". ", "\t.", "1. ", "\n1. ", "e.g. ", "a.", "A. ", "!)", "….", '."',
  "! ", "A-", "THE ", "…)", "_", "。",
]  # fmt: skip


@pytest.mark.timeout(60)  # the square of this is hours
@pytest.mark.parametrize("unit", tiers.some(HOSTILE, 1, 7))
def test_many_characters_are_read_once(unit):
  text = unit * (300_000 // len(unit))
  for kind, kwargs, _, _ in BY_HAND:
    # Numbers that are not reached, so that nothing ends early.
    large = {k: 10**7 if isinstance(v, int) else v for k, v in kwargs.items()}
    assert isinstance(followed(kind, text, **large), bool)


# IFEval's own, where it is installed.

# What it downloads a model for, or where the difference is on purpose.
OWN_RULES = {
  "length_constraints:number_sentences", "change_case:capital_word_frequency",
  "change_case:english_capital", "change_case:english_lowercase",
  "detectable_format:constrained_response",
}  # fmt: skip
PIECES = [
  *"art Cat E x yes 1 22 Section SECTION Part Then then".split(),
  *"* ** *** ****** [ ] [] << >> < > { } \" ' , . ! ? - -- ``` ```json".split(),
  *["\n", "\n", "\n\n", " ", " ", " ", "\t", "P.S.", "P. S.", "P.P.S", "p.s"],
  *["Section 1", "[a]", "*b*", "**c**", "* d", "- e", "{}", '{"a": 1}'], "Bye.",
]  # fmt: skip
COMPARED = [
  ("keywords:existence", {"keywords": ["cat", "x"]}),
  ("keywords:frequency", {"keyword": "x", "frequency": 2, "relation": LESS}),
  ("keywords:frequency", {"keyword": "a", "frequency": 2,
    "relation": AT_LEAST}),
  ("keywords:forbidden_words", {"forbidden_words": ["art", "cat"]}),
  ("keywords:letter_frequency", {"letter": "E", "let_frequency": 2,
    "let_relation": LESS}),
  ("length_constraints:number_words", {"num_words": 5, "relation": AT_LEAST}),
  ("length_constraints:number_paragraphs", {"num_paragraphs": 1}),
  ("length_constraints:number_paragraphs", {"num_paragraphs": 2}),
  ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2,
    "nth_paragraph": 2, "first_word": "Then"}),
  ("detectable_content:number_placeholders", {"num_placeholders": 2}),
  ("detectable_content:postscript", {"postscript_marker": "P.S."}),
  ("detectable_content:postscript", {"postscript_marker": "P.P.S"}),
  ("detectable_format:number_bullet_lists", {"num_bullets": 1}),
  ("detectable_format:number_bullet_lists", {"num_bullets": 2}),
  ("detectable_format:number_highlighted_sections", {"num_highlights": 2}),
  ("detectable_format:number_highlighted_sections", {"num_highlights": 1}),
  ("detectable_format:multiple_sections", {"section_spliter": "Section",
    "num_sections": 1}),
  ("detectable_format:json_format", {}), ("detectable_format:title", {}),
  ("combination:two_responses", {}),
  ("combination:repeat_prompt", {"prompt_to_repeat": "Cat"}),
  ("startend:end_checker", {"end_phrase": "Bye."}), ("startend:quotation", {}),
  ("punctuation:no_comma", {}),
]  # fmt: skip


def lone_asterisk(kind, text):
  return kind == "detectable_format:number_bullet_lists" and any(
    line.strip() == "*" for line in text.split("\n")
  )


@pytest.mark.skipif(importlib.util.find_spec("if_verifiable") is None,
  reason="needs if-verifiable")  # fmt: skip
@pytest.mark.parametrize("kind, kwargs", COMPARED)
def test_the_rules_are_ifevals(kind, kwargs):
  theirs = instructions.if_library._checker(kind)
  theirs.build_description(**kwargs)
  rng = random.Random(kind)
  seen = set()
  for _ in range(1_000):
    text = "".join(rng.choices(PIECES, k=rng.randint(1, 14)))
    if rng.random() < 0.1:
      text = rng.choice(['"{}"', "{}Bye.", "Cat{}"]).replace("{}", text)
    if lone_asterisk(kind, text):
      continue
    ours = followed(kind, text, **kwargs)
    assert ours == bool(theirs.check_following(text)), (text, ours)
    seen.add(ours)
  if kind != "detectable_format:json_format":
    assert seen == {True, False}


def test_all_others_are_compared():
  assert {kind for kind, _ in COMPARED} | OWN_RULES == BUILT_IN.keys()


PLAIN = (
  "The cell is the smallest unit of life. It was seen first in cork, and what"
  " was seen were only the walls of dead cells, for they are what is left."
)


@pytest.mark.parametrize("text, count", [
  ("", 0), ("One", 1), ("One. Two", 2), ("One! Two? Three.", 3),
  ("Really?! Yes... No.", 3), ("Wait... what", 1),
  ("Version 1.2.3 costs 3.50 now. Good.", 2),
  ("Mr. Smith met Dr. A. B. Jones. They spoke.", 2),
  ("Use a stop, e.g. this one, or i.e. that. End", 2),
  ("He lives in the U.S. Now he left", 1),  # initials never end one
  ("MR. Bean laughed.", 1), ("1. First\n2. Second.\n   3. Third.", 2),
  ("It happened in 1999. Then it ended.", 2),
  ("He said \"Stop.\" Then 'Go!' (And left.) So.", 4), ("**Bold.** Next.", 2),
  ("no space.after a stop", 1), (". . . . . .", 0), ("! ! ! ?", 0),
  ("- - -\n* * *", 0),
  ("第一句。第二句！第三", 3),  # noqa: RUF001
  ("Line one\nline two\n\nline three", 1), ("Is it? yes", 2),
])  # fmt: skip
def test_sentences_by_hand(text, count):
  assert instructions.count_sentences(text) == count


@pytest.mark.parametrize("text, words", [
  ("A NASA probe, NOT new", ["A", "NASA", "NOT"]), ("I DON'T", ["I", "DON'T"]),
  ("WELL-KNOWN AND/OR U.S. R&D", ["WELL-KNOWN", "AND/OR", "U.S", "R&D"]),
  ("YES...NO--MAYBE", ["YES", "NO", "MAYBE"]), ("3D 42 H2O", ["3D", "H2O"]),
  ("McDonald Well-KNOWN iPHONE", []),
])  # fmt: skip
def test_capital_words_by_hand(text, words):
  assert instructions.capital_words(text) == words


@pytest.mark.parametrize("text, english", [
  (PLAIN, True), (PLAIN.upper(), True), ("Yes", True), ("", False),
  ("42 + 3!", False), ("это не по-английски", False),
  ("これは英語ではありません", False),
  ("lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod "
   "tempor incididunt ut labore et dolore magna aliqua enim minim", False),
  ("der Hund schläft, während die Katze auf dem Dach sitzt und wartet, bis "
   "sie endlich wieder von uns gefüttert werden kann oder springt", False),
  ("zzz " * 19, True),  # too short to tell
  ("zzz " * 20, False), ("zzz " * 19 + "the", True),
  ("a" * 9 + "é", True), ("a" * 8 + "é", False),
])  # fmt: skip
def test_english_by_hand(text, english):
  assert instructions.is_english(text) is english


@settings(max_examples=100)
@given(st.text(alphabet=".!?…。 \n\"')*ab1M-", max_size=60))
def test_no_text_has_more_sentences_than_stops_allow(text):
  stops = sum(text.count(stop) for stop in ".!?…。")
  count = instructions.count_sentences(text)
  assert 0 <= count <= stops + 1 and (count == 0 or any(map(str.isalnum, text)))
  # The number of a list's line is none.
  assert count > 0 or not any(map(str.isalpha, text))


# Verdicts on several instructions.

NO_COMMA = {"id": "punctuation:no_comma"}
TITLE = {"id": "detectable_format:title", "kwargs": {}}
TWO_WORDS = {
  "id": "length_constraints:number_words",
  "kwargs": {"num_words": 2, "relation": "at least", "keywords": None},
}
FIRST = {
  "id": "length_constraints:nth_paragraph_first_word",
  "kwargs": {"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "So"},
}
FRENCH = {"id": "language:response_language", "kwargs": {"language": "fr"}}


class Jail:
  def __init__(self, answer):
    self.answer, self.asked = answer, []

  def ask(self, judge, *args):
    self.asked.append((judge, *args))
    if isinstance(self.answer, Exception):
      raise self.answer
    return self.answer


@pytest.mark.parametrize("response, score, missed", [
  ("<<Two>> words", 1.0, []),
  ("<<Two>>, words", 2 / 3, ["punctuation:no_comma"]),
  ("two words", 2 / 3, ["detectable_format:title"]),
  ("<<two>>", 2 / 3, ["length_constraints:number_words"]),
  ("Two, words", 1 / 3, ["punctuation:no_comma", "detectable_format:title"]),
  ("<<a>> b" * instructions.MAX_SHOWN, 1.0, []),
  (",", 0.0, ["punctuation:no_comma", "detectable_format:title",
    "length_constraints:number_words"]),
])  # fmt: skip
def test_the_score_is_the_share_that_is_followed(response, score, missed):
  verdict = verify(response, [NO_COMMA, TITLE, TWO_WORDS])
  assert verdict.score == pytest.approx(score)
  assert verdict.status == ("fail" if missed else "pass")
  said = f"not followed: {', '.join(missed)}" if missed else ""
  assert verdict.reason == said
  assert verdict.answer == response[: instructions.MAX_SHOWN]
  assert verdict.reward == float(not missed)


@pytest.mark.parametrize("response, instruction, reason", [
  ("", NO_COMMA, "empty response"), ("  \n", NO_COMMA, "empty response"),
  ("a, b</think>", NO_COMMA, "nothing after the thinking"),
  ("<think> <<a>>", TITLE, "nothing after the thinking"),
  # White space around the answer is no paragraph.
  ("...</think>\n\nSo it is.", FIRST, ""),
])  # fmt: skip
def test_only_what_follows_the_thinking_counts(response, instruction, reason):
  jail = Jail(AssertionError("asked"))
  verdict = verify(response, [instruction], jail=jail)
  assert verdict.status == ("fail" if reason else "pass")
  assert (verdict.reason, verdict.score) == (reason, not reason)
  if response == "":
    assert verify(response, [FRENCH], jail=jail).reason == reason


def test_the_library_is_asked_in_the_jail():
  jail = Jail(True)
  assert verify("Oui, oui", [FRENCH], jail=jail).status == "pass"
  assert jail.asked == [
    ("instruction", "language:response_language", {"language": "fr"},
      "Oui, oui")
  ]  # fmt: skip
  verdict = verify("x,", [FRENCH, NO_COMMA], jail=Jail(False))
  assert verdict.reason.endswith("response_language, punctuation:no_comma")


def test_a_failed_jail_is_no_verdict_on_the_response():
  jail = Jail(jails.Failed("late after 3.0 s"))
  verdict = verify("Oui", [NO_COMMA, FRENCH], jail=jail)
  assert (verdict.status, verdict.score) == ("invalid", 0.0)
  assert verdict.reason == "verifier failed: late after 3.0 s"
  with pytest.raises(KeyError):  # a fault of ours is not hidden
    verify("Oui", [FRENCH], jail=Jail(KeyError("x")))


@pytest.mark.parametrize("given, message", [
  ([], "instructions: [] ... list ... at least one"),
  ("abc", "instructions ... list"), ({"id": "x"}, "instructions ... list"),
  (["abc"], "instructions[0] ... 'abc' ... object with id and kwargs"),
  ([NO_COMMA, {"kwargs": {}}],
    "instructions[1] ... {'kwargs': {}} ... object with id and kwargs"),
  ([{"id": "punctuation:nocomma"}],
    "'punctuation:nocomma' ... unknown ... 'punctuation:no_comma'"),
  ([{"id": "count:nubmers"}],
    "'count:nubmers' ... unknown ... 'count:numbers'"),
  ([{"id": "zzz"}],
    "'zzz' ... unknown ... instructions.BUILT_IN ... if_library.KINDS"),
  ([{"id": "punctuation:no_comma", "kwarg": {}}],
    "'punctuation:no_comma' ... 'kwarg' ... id and kwargs only"),
  ([{"id": "punctuation:no_comma", "kwargs": [1]}],
    "instructions[0].kwargs: [1] ... object"),
  ([{"id": "punctuation:no_comma", "kwargs": {"x": 1}}],
    "'punctuation:no_comma' ... x = 1 ... unknown"),
  ([{"id": "startend:end_checker", "kwargs": {"end_phrse": "a"}}],
    "'startend:end_checker' ... end_phrse = 'a' ... unknown ... end_phrase"),
  ([{"id": "startend:end_checker", "kwargs": {"end_phrase": None}}],
    "'startend:end_checker' ... end_phrase"),
  ([{"id": "startend:end_checker", "kwargs": {"end_phrase": " "}}],
    "'startend:end_checker' ... end_phrase = ' '"),
  ([{"id": "length_constraints:number_words", "kwargs": {"num_words": 3,
    "relation": "more than"}}],
    "'length_constraints:number_words' ... relation = 'more "
    "than' ... of 'less than', 'at least', 'at most'"),
  ([{"id": "length_constraints:nth_paragraph_first_word",
    "kwargs": {"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "a"}}],
    "'length_constraints:nth_paragraph_first_word': "
    "nth_paragraph = 3 ... num_paragraphs = 2"),
])  # fmt: skip
def test_wrong_instructions_are_refused_in_one_line(given, message):
  for refuse in (check, lambda wrong: verify("text", wrong)):
    with refuses(ValueError, message):
      refuse(given)


def test_what_is_right_is_accepted():
  none = {"id": "detectable_format:number_bullet_lists"}
  none["kwargs"] = {"num_bullets": 0.0}  # of a nullable column
  without = {"id": "punctuation:no_comma", "kwargs": None}
  assert check([NO_COMMA, TITLE, TWO_WORDS, without, none]) is None
  assert verify("No bullet", [none]).status == "pass"
  with refuses(ValueError, "response ... NoneType"):
    verify(None, [NO_COMMA])  # pyright: ignore
