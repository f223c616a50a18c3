import importlib.util
import random
import sys

import pytest
from messages import refuses

from brorl_jax.verdicts import instructions
from brorl_jax.verdicts.instructions import BUILT_IN, if_library

installed = pytest.mark.skipif(
  importlib.util.find_spec("if_verifiable") is None,
  reason="needs if-verifiable",
)
LANGUAGE = "language:response_language"
ENGLISH = "The cat sat on the mat, and nobody knew what it was waiting for."
FRENCH = "Le chat dort sur le tapis et personne ne sait ce qu'il attend."
# The names of what each kind is given, for those that are given anything.
KWARGS = {
  LANGUAGE: {"language": "en"}, "count:conjunctions": {"small_n": 2},
  "count:keywords_multiple": {f"keyword{i}": f"w{i}" for i in range(1, 6)},
  "count:numbers": {"N": 2}, "count:person_names": {"N": 1},
  "count:pronouns": {"N": 2}, "count:unique_word_count": {"N": 3},
  "count:word_count_range": {"min_words": 2, "max_words": 4},
  "count:words_japanese": {"N": 3}, "format:list": {"sep": "!?!?"},
  "format:options": {"options": "yes/no"},
  "ratio:overlap": {"reference_text": "a b c d", "percentage": 50},
  "ratio:stop_words": {"percentage": 10},
  "repeat:repeat_change": {"prompt_to_repeat": "Say it now"},
  "repeat:repeat_span": {"prompt_to_repeat": "Say it now", "n_start": 1,
    "n_end": 2},
  "sentence:increment": {"small_n": 1},
  "sentence:keyword": {"word": "cat", "N": 2},
  "words:keywords_specific_position": {"keyword": "cat", "n": 1, "m": 2},
  "words:repeats": {"small_n": 2}, "words:words_position": {"keyword": "cat"},
}  # fmt: skip
NLTK_DATA = {  # without it these are refused
  "format:title_case",
  "ratio:stop_words",
  "words:keywords_specific_position",
  "words:start_verb",
  "words:words_position",
}


def test_the_kinds_are_those_that_are_not_built_in():
  assert not if_library.KINDS & BUILT_IN.keys() and len(if_library.KINDS) == 59


@installed
def test_the_table_of_kinds_is_the_librarys():
  assert if_library._registry().keys() == if_library.KINDS | BUILT_IN.keys()


@installed
@pytest.mark.parametrize("kind", sorted(if_library.KINDS))
def test_every_kind_can_be_used_or_says_what_it_needs(kind):
  wanted = [{"id": kind, "kwargs": KWARGS.get(kind, {})}]
  try:
    instructions.check(wanted)
  except ValueError as error:
    assert kind in NLTK_DATA
    assert "python -m nltk.downloader" in str(error)
    with pytest.raises(LookupError):
      if_library.checked(kind, KWARGS.get(kind, {}), "A text. And more.")
    return
  state = random.getstate()
  for text in ("", "a", ENGLISH, "*\n" * 50):
    assert if_library.checked(kind, KWARGS.get(kind, {}), text) in (True, False)
  assert random.getstate() == state  # nothing is drawn


@installed
@pytest.mark.parametrize("kind, kwargs, good, bad", [
  (LANGUAGE, {"language": "en"}, ENGLISH, FRENCH),
  (LANGUAGE, {"language": "fr"}, FRENCH, ENGLISH),
  (LANGUAGE, {"language": "en"}, ENGLISH, "1 2 3 !?"),
  ("count:numbers", {"N": 2}, "1 and 2", "1 and two"),
  ("count:word_count_range", {"min_words": 2, "max_words": 4}, "a b c",
    "a b c d e"),
  ("format:no_whitespace", {}, "abc", "a b"),
  ("words:palindrome", {}, "level " * 10, "table " * 10),
  ("words:palindrome", {}, "level " * 10, "level " * if_library.MAX_RESPONSE),
])  # fmt: skip
def test_verdicts_by_hand(kind, kwargs, good, bad):
  assert if_library.checked(kind, kwargs, good) is True
  assert if_library.checked(kind, kwargs, bad) is False


@installed
def test_the_language_does_not_depend_on_chance():
  # Without a seed this is Finnish or Norwegian.
  seen = {
    if_library.checked(LANGUAGE, {"language": "fi"}, "Hello") for _ in range(40)
  }
  assert len(seen) == 1


@installed
@pytest.mark.parametrize("kind, kwargs, message", [
  ("count:numbers", {}, "N ... missing"),
  ("count:numbers", {"n": 1}, "n = 1 ... N"),
  ("words:palindrome", {"N": 1}, "N = 1 ... none"),
  ("count:numbers", {"N": -1}, "{'N': -1} ... random"),
  ("repeat:repeat_span", {"prompt_to_repeat": "Say it now", "n_start": 0,
    "n_end": 2}, "'n_start': 0 ... random"),
  ("count:numbers", {"N": "3"}, "{'N': '3'} ... TypeError"),
  (LANGUAGE, {"language": "xx"}, "{'language': 'xx'} ... KeyError"),
  ("count:nothing", {}, "if-verifiable ... pip install"),
])  # fmt: skip
def test_wrong_arguments_are_refused_in_one_line(kind, kwargs, message):
  with refuses(ValueError, f"instruction {kind!r} ... {message}"):
    if_library.check(kind, kwargs)


@installed
def test_a_checker_that_raises_is_not_followed():
  class Raises:
    def build_description(self):
      pass

    def check_following(self, text):
      raise IndexError(text)

  if_library._registry()["test:raises"] = lambda kind: Raises()
  try:
    assert if_library.checked("test:raises", {}, "a") is False
  finally:
    del if_library._registry()["test:raises"]


@installed
def test_the_library_comes_without_what_fetches_data():
  if_library._registry()
  assert not getattr(sys.modules["if_verifiable"], "__all__", None)
  assert "if_verifiable.api" not in sys.modules


def test_without_the_library_the_remedy_is_named(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  monkeypatch.delitem(sys.modules, "if_verifiable", raising=False)
  if_library._registry.cache_clear()
  needed = "'count:numbers' ... if-verifiable ... pip install"
  with refuses(ImportError, needed):
    instructions.check([{"id": "count:numbers", "kwargs": {"N": 1}}])
  with refuses(ImportError, "if-verifiable"):
    if_library.checked("count:numbers", {"N": 1}, "1")
  if_library._registry.cache_clear()
