"""Tests of launch/embedded/tokenizer.py."""

import random
import types

import pytest

from brorl_jax.model.tokenizer import Tokenizer
from launch.embedded import tokenizer

SIZE = 380


def questions():
  rng = random.Random(0)
  pairs = [(rng.randrange(1000), rng.randrange(1000)) for _ in range(600)]
  letters = [chr(97 + a % 26) + chr(97 + b % 26) for a, b in pairs]
  return [
    *(f"Calculate the following sum: {a} + {b} = ?" for a, b in pairs),
    *(f"What is the greatest common divisor of {a} and {b}?" for a, b in pairs),
    *(f'How many times does the letter "{x}" appear?' for x in letters[::4]),
  ]


def build(path, *, merges=700, whole=()):
  return tokenizer.build(
    path, questions(), size=SIZE, merges=merges, whole=whole
  )


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
  path = tmp_path_factory.mktemp("tokenizer")
  build(path)
  return path


def test_a_whole_text_is_one_token(directory, tmp_path):
  tags = ("<answer>", "</answer>")
  text = build(tmp_path, whole=tags)
  ids = text.encode("<answer>12</answer>")
  assert text.decode([ids]) == ["<answer>12</answer>"]
  apart = Tokenizer(directory).encode("<answer>12</answer>")
  assert len(ids) == 4 < len(apart)


def test_more_merges_find_longer_phrases(tmp_path):
  of = lambda n: build(tmp_path, merges=n)
  few, many = (len(of(n).encode(questions()[0])) for n in (5, 700))
  assert many < few


def test_the_same_texts_build_the_same_files(directory, tmp_path):
  again = build(tmp_path)
  names = sorted(path.name for path in directory.iterdir())
  assert "tokenizer.json" in names
  assert names == sorted(path.name for path in tmp_path.iterdir())
  for name in names:
    assert (tmp_path / name).read_bytes() == (directory / name).read_bytes()
  assert again.size == SIZE


def test_phrases_of_the_questions_are_single_tokens(directory):
  built = Tokenizer(directory)
  for text, most in (
    ("Calculate the following sum: 1 + 2 = ?", 9),
    ("What is the greatest common divisor of 1 and 2?", 8),
  ):
    ids = built.encode(text)
    assert len(ids) <= most
    pieces = built.decode([i] for i in ids)
    assert "".join(pieces) == text
    assert max(len(piece.split()) for piece in pieces) >= 3
    assert not any(c.isdigit() and len(p) > 1 for p in pieces for c in p)


def test_no_phrase_is_a_part_of_another():
  texts = [f"one two three {i}" for i in range(300)] + ["four five"] * 2
  phrases = tokenizer._phrases(texts, 700)
  assert phrases == sorted(phrases)
  assert [p.strip() for p in phrases] == ["one two three"]


def test_a_phrase_with_an_accident_in_it_gives_way_to_its_parts(monkeypatch):
  pieces = ['find it "', '" here', 'find it "x" here', "x", "too rare"]

  class Merged:
    """What a BPE may have found in 200 texts; two of them are rare."""

    def encode_batch(self, texts):
      ids = [[0, 3, 1]] * 197 + [[2, 2]] * 2 + [[4, 4, 4]]
      return [
        types.SimpleNamespace(ids=i) for i, _ in zip(ids, texts, strict=True)
      ]

    def decode(self, ids):
      return "".join(pieces[i] for i in ids)

  monkeypatch.setattr(tokenizer, "_train_bpe", lambda *args: Merged())
  assert tokenizer._phrases(["text"] * 200, 700) == ['" here', 'find it "']
