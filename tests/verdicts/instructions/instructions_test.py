import pytest
from messages import refuses

from brorl_jax.verdicts.instructions import MAX_SHOWN, check, verify
from brorl_jax.verdicts.sandbox import jail as jails

NO_COMMA = {"id": "punctuation:no_comma"}
TITLE = {"id": "detectable_format:title", "kwargs": {}}
TWO_WORDS = {
  "id": "length_constraints:number_words",
  "kwargs": {"num_words": 2, "relation": "at least", "keywords": None},
}
FRENCH = {"id": "language:response_language", "kwargs": {"language": "fr"}}


class Jail:
  """Answers what it is told to, and remembers what it was asked."""

  def __init__(self, answer):
    self.answer, self.asked = answer, []

  def ask(self, judge, *args):
    self.asked.append((judge, *args))
    if isinstance(self.answer, Exception):
      raise self.answer
    return self.answer


@pytest.mark.parametrize(
  "response, score, missed",
  [
    ("<<Two>> words", 1.0, []),
    ("<<Two>>, words", 2 / 3, ["punctuation:no_comma"]),
    ("two words", 2 / 3, ["detectable_format:title"]),
    ("<<two>>", 2 / 3, ["length_constraints:number_words"]),
    ("Two, words", 1 / 3, ["punctuation:no_comma", "detectable_format:title"]),
    ("<<a>> b" * MAX_SHOWN, 1.0, []),
    (",", 0.0, ["punctuation:no_comma", "detectable_format:title",
      "length_constraints:number_words"]),
  ],
)  # fmt: skip
def test_the_score_is_the_share_that_is_followed(response, score, missed):
  verdict = verify(response, [NO_COMMA, TITLE, TWO_WORDS])
  assert verdict.score == pytest.approx(score)
  assert verdict.status == ("fail" if missed else "pass")
  assert verdict.reason == (
    f"not followed: {', '.join(missed)}" if missed else ""
  )
  assert verdict.answer == response[:MAX_SHOWN]
  assert verdict.reward == float(not missed)


@pytest.mark.parametrize(
  "response", ["", "  \n", "a, b</think>", "</think>\n "]
)
def test_nothing_follows_no_instruction(response):
  verdict = verify(response, [NO_COMMA])
  assert (verdict.status, verdict.score) == ("fail", 0.0)
  assert verdict.reason == "empty response"


def test_only_what_follows_the_thinking_counts():
  assert verify("<think>a, b</think>\n\nNo more", [NO_COMMA]).status == "pass"
  assert verify("x</think>y</think>a, b", [NO_COMMA]).status == "fail"
  assert verify("<<a>></think>b", [TITLE]).status == "fail"
  assert verify("<think> <<a>>", [TITLE]).reason == "unfinished thinking"
  assert verify("a</think><think>b", [NO_COMMA]).score == 0.0
  # White space around the answer is no paragraph.
  first = {
    "id": "length_constraints:nth_paragraph_first_word",
    "kwargs": {"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "So"},
  }
  assert verify("...</think>\n\nSo it is.", [first]).status == "pass"


def test_the_library_is_asked_in_the_jail():
  jail = Jail(True)
  assert verify("Oui, oui", [FRENCH], jail=jail).status == "pass"
  assert jail.asked == [
    (
      "instruction",
      "language:response_language",
      {"language": "fr"},
      "Oui, oui",
    )
  ]
  verdict = verify("x,", [FRENCH, NO_COMMA], jail=Jail(False))
  assert verdict.reason.endswith("response_language, punctuation:no_comma")


def test_a_failed_jail_is_no_verdict_on_the_response():
  jail = Jail(jails.Failed("late after 3.0 s"))
  verdict = verify("Oui", [NO_COMMA, FRENCH], jail=jail)
  assert (verdict.status, verdict.score) == ("invalid", 0.0)
  assert verdict.reason == "verifier failed: late after 3.0 s"
  with pytest.raises(KeyError):  # a fault of ours is not hidden
    verify("Oui", [FRENCH], jail=Jail(KeyError("x")))


def test_nothing_is_asked_for_an_empty_response_or_a_built_in_kind():
  jail = Jail(AssertionError("asked"))
  assert verify("", [FRENCH], jail=jail).status == "fail"
  assert verify("a", [NO_COMMA], jail=jail).status == "pass"


@pytest.mark.parametrize(
  "instructions, message",
  [
    ([], "instructions ... empty ... at least one"),
    ("abc", "instructions ... list"),
    ({"id": "x"}, "instructions ... list"),
    (["abc"], "instructions[0] ... 'abc' ... \"id\""),
    ([NO_COMMA, {"kwargs": {}}],
      "instructions[1] ... {'kwargs': {}} ... \"id\""),
    ([{"id": "punctuation:nocomma"}],
      "'punctuation:nocomma' ... unknown ... 'punctuation:no_comma'"),
    ([{"id": "count:nubmers"}],
      "'count:nubmers' ... unknown ... 'count:numbers'"),
    ([{"id": "zzz"}],
      "'zzz' ... unknown ... instructions.BUILT_IN ... if_library.KINDS"),
    ([{"id": "punctuation:no_comma", "kwarg": {}}],
      "'punctuation:no_comma' ... 'kwarg' ... unknown"),
    ([{"id": "punctuation:no_comma", "kwargs": [1]}],
      "'punctuation:no_comma' ... [1]"),
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
  ],
)  # fmt: skip
def test_wrong_instructions_are_refused_in_one_line(instructions, message):
  for refuse in (check, lambda wrong: verify("text", wrong)):
    with refuses(ValueError, message):
      refuse(instructions)


def test_what_is_right_is_accepted():
  assert check([NO_COMMA, TITLE, TWO_WORDS]) is None
  assert check([{"id": "punctuation:no_comma", "kwargs": None}]) is None
  none = "detectable_format:number_bullet_lists"
  assert check([{"id": none, "kwargs": {"num_bullets": 0}}]) is None


def test_a_response_must_be_text():
  with refuses(ValueError, "response ... NoneType"):
    verify(None, [NO_COMMA])  # pyright: ignore
