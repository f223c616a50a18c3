import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brorl_jax.tasks.base import Example
from brorl_jax.tasks.dataset import Data, DataError, Skipped
from brorl_jax.tasks.heldout import refuse_overlap, split
from brorl_jax.tasks.records import Place


def example(name, text, system=None):
  messages = [{"role": "user", "content": text}]
  if system:
    messages.insert(0, {"role": "system", "content": system})
  return Example(name, "math", "s", tuple(messages), {"answer": "8"})


def data(*examples, file="a.jsonl", skipped=()):
  places = [Place(file, i + 1) for i in range(len(examples))]
  return Data(list(examples), places, skipped)


HELD = (403, 611, 643, 1248, 1575, 1771, 1942, 2072, 2105, 2238, 2504)
MANY = data(*(example(f"q-{i}", f"How much is {i} + 5?") for i in range(3_000)))


@pytest.mark.parametrize("one_in", [2, 10, 20])
def test_a_part_is_held_out(one_in):
  train, heldout = split(MANY, one_in=one_in)
  assert len(train.examples) + len(heldout.examples) == 3_000
  expected = 3_000 / one_in
  # Five standard deviations of a binomial count.
  assert abs(len(heldout.examples) - expected) < 5 * expected**0.5
  for side in (train, heldout):
    numbers = [int(e.id.split("-")[1]) for e in side.examples]
    assert numbers == sorted(numbers)
    assert [p.line for p in side.places] == [n + 1 for n in numbers]
  refuse_overlap(train, heldout)


def test_which_part_never_changes():
  # Recorded once. A change here trains on what was held out.
  _, heldout = split(MANY, one_in=300)
  assert [e.id for e in heldout.examples] == [f"q-{i}" for i in HELD]


def test_a_side_does_not_depend_on_the_other_examples():
  _, heldout = split(MANY, one_in=10)
  mine = data(*MANY.examples[500:900][::-1])
  _, again = split(mine, one_in=10)
  ids = {e.id for e in heldout.examples}
  assert {e.id for e in again.examples} == ids & {e.id for e in mine.examples}


@settings(deadline=None)
@given(st.integers(0, 2_999), st.sampled_from(["upper", "lower", "spaced"]))
def test_wording_apart_the_side_is_the_same(i, how):
  text = f"How much is {i} + 5?"
  other = {
    "upper": text.upper(),
    "lower": text.lower(),
    "spaced": f"  {text.replace(' ', chr(10) + chr(9))} ",
  }[how]
  both = data(
    example("a", text),
    example("b", other, system="Be brief."),
    *MANY.examples[:50],
  )
  train, _ = split(both, one_in=3)
  assert len({"a", "b"} & {e.id for e in train.examples}) in (0, 2)


def test_repeats_and_skips_are_those_of_the_side():
  skipped = [Skipped(Place("a.jsonl", 9), "", "blank")]
  twice = data(*MANY.examples[:100], *MANY.examples[:100], skipped=skipped)
  train, heldout = split(twice, one_in=4)
  assert train.repeats == len(train.examples) // 2 > 50
  assert heldout.repeats == len(heldout.examples) // 2 > 5
  assert (train.skipped, heldout.skipped) == (skipped, ())


def test_both_sides_must_have_examples():
  few = data(*MANY.examples[:3])
  with pytest.raises(DataError) as error:
    split(few, one_in=10**6)
  assert str(error.value).startswith(
    "3 examples, one in 1000000 held out: no held-out example is left; change"
  )
  _, heldout = split(MANY, one_in=300)
  with pytest.raises(DataError, match="no training example is left"):
    split(data(*heldout.examples), one_in=300)
  with pytest.raises(DataError, match="one in 1: use at least 2"):
    split(MANY, one_in=1)


@pytest.mark.parametrize(
  "other, said",
  [
    (
      example("b", "6 + 6?"),
      "h.jsonl, line 2, held out: id 'b' is also in a.jsonl, line 2, trained"
      " on; remove it from one",
    ),
    (
      example("z", " 3 +\n5 PLEASE?", system="Be brief."),
      "h.jsonl, line 2, held out: asks the same as a.jsonl, line 1, trained"
      " on; remove it from one",
    ),
  ],
)
def test_an_example_on_both_sides_is_refused(other, said):
  train = data(example("a", "3 + 5 please?"), example("b", "3 + 6?"))
  fine = example("c", "3 + 7?")
  refuse_overlap(train, data(fine, file="h.jsonl"))
  with pytest.raises(DataError) as error:
    refuse_overlap(train, data(fine, other, file="h.jsonl"))
  assert str(error.value) == said
