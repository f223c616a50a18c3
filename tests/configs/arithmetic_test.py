"""Arithmetic for a small language model: its files, its sides, its reward."""

import itertools
import json

import pytest

from brorl_jax.configs import arithmetic, presets


def test_the_files_are_what_the_generator_writes(tmp_path):
  arithmetic.main(tmp_path)
  names = sorted(path.name for path in tmp_path.iterdir())
  assert names == ["harder.jsonl", "heldout.jsonl", "train.jsonl"]
  for name in names:
    kept = (presets.ARITHMETIC / name).read_bytes()
    assert (tmp_path / name).read_bytes() == kept


def test_no_numbers_are_on_both_sides():
  text = lambda name: (presets.ARITHMETIC / f"{name}.jsonl").read_text()
  read = lambda name: [*map(json.loads, text(name).splitlines())]
  numbers = lambda line: tuple(arithmetic._NUMBER.findall(line["prompt"]))
  train, heldout, harder = map(read, ("train", "heldout", "harder"))
  assert [len(side) for side in (train, heldout, harder)] == [500, 64, 64]
  seen = {numbers(line) for line in train}
  assert seen.isdisjoint(map(numbers, heldout + harder))
  for line in train + heldout + harder:
    a, b, *c = map(int, numbers(line)[:3])
    by_task = {"sums": a + b, "differences": a - b, "products": a * b}
    want = by_task.get(line["source"], a * b + sum(c))
    assert line["answer"] == str(want) and want >= 0


def test_a_task_ends_when_it_has_no_more_problems():
  made = [*arithmetic.problems("products", 2, 3, heldout=False)]
  prompts = {line["prompt"] for line in made}
  assert len(prompts) == len(made) <= 6  # of three pairs, said in two ways
  story = arithmetic.problems("sums", 2, 9, heldout=False, story=True)
  assert all("apples" in line["prompt"] for line in itertools.islice(story, 9))


@pytest.mark.parametrize("response, right", [
  ("124", True), ("64 + 60 = 124", True), ("124.", True), ("0124", False),
  ("It is 1,24", True), ("124 - 60 = 64", False), ("1240", False),
  ("-124", False), ("", False), ("no number", False), ("12 4", False),
])  # fmt: skip
def test_the_last_number_counts(response, right):
  assert arithmetic.score(response, {"answer": "124"}) == right
