import pytest
from messages import refuses

from brorl_jax.data import dataset
from brorl_jax.data.dataset import DataError, refuse_overlap, split
from brorl_jax.data.files import Place
from brorl_jax.verdicts import gym
from brorl_jax.verdicts.base import Example


def example(name, text, system=None):
  messages = [{"role": "user", "content": text}]
  if system:
    messages.insert(0, {"role": "system", "content": system})
  return Example(name, "math", "s", tuple(messages), {"answer": "8"})


def data(*examples, file="a.jsonl", skipped=()):
  places = [Place(file, i + 1) for i in range(len(examples))]
  return dataset.Data(list(examples), places, skipped)


HELD = (31, 1287, 1371, 1537, 1865, 1944, 2196, 2729)
MANY = data(*(example(f"q-{i}", f"How much is {i} + 5?") for i in range(3_000)))


def test_prompts_that_are_left_out_join_the_bad_records():
  every = data(example("a", "A b."), example("b", "c"), skipped=["bad"])
  left = dataset.without(every, {dataset.worded(example("x", "a  B."))})
  assert [e.id for e in left.examples] == ["b"] and len(left.places) == 1
  assert left.skipped[0] == "bad" and "a.jsonl, line 1" in str(left.skipped[1])


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


@pytest.mark.parametrize("one, other, same", [
  ("What is 81-35?", "what is 81 - 35 ?", True),
  ("f( x ) = { 3 , 4 }", "f(x)={3,\n4}", True),
  ("3 4", "34", False), ("3 4", "3  4", True), ("a_b c", "a_bc", False),
  ("- 3", "-3", True), ("日 本", "日本", False),
])  # fmt: skip
def test_blanks_that_part_no_words_do_not_count(one, other, same):
  pair = data(example("a", one)), data(example("b", other), file="b.jsonl")
  if not same:
    return refuse_overlap(*pair)
  with pytest.raises(DataError, match=r"a\.jsonl, line 1"):
    refuse_overlap(*pair)


def test_repeats_and_skips_are_those_of_the_side():
  skipped = ["a.jsonl, line 9: blank"]
  twice = data(*MANY.examples[:100], *MANY.examples[:100], skipped=skipped)
  train, heldout = split(twice, one_in=4)
  assert train.repeats == len(train.examples) // 2 > 50
  assert heldout.repeats == len(heldout.examples) // 2 > 5
  assert (train.skipped, heldout.skipped) == (skipped, ())


def test_both_sides_must_have_examples():
  few = data(*MANY.examples[:3])
  with refuses(DataError, "1000000 ... none of 3 ... held out"):
    split(few, one_in=10**6)
  _, heldout = split(MANY, one_in=300)
  with pytest.raises(DataError, match="for training"):
    split(data(*heldout.examples), one_in=300)
  with pytest.raises(DataError, match=r"heldout_one_in = 1: use at least 2"):
    split(MANY, one_in=1)


@pytest.mark.parametrize("other, said", [
  (example("b", "6 + 6?"), "h.jsonl, line 2 ... id 'b' ... a.jsonl, line 2"),
  (example("z", " 3 +\n5 PLEASE?", system="Be brief."),
    "h.jsonl, line 2 ... a.jsonl, line 1"),
])  # fmt: skip
def test_an_example_on_both_sides_is_refused(other, said):
  train = data(example("a", "3 + 5 please?"), example("b", "3 + 6?"))
  fine = example("c", "3 + 7?")
  refuse_overlap(train, data(fine, file="h.jsonl"))
  with refuses(DataError, said):
    refuse_overlap(train, data(fine, other, file="h.jsonl"))


@pytest.mark.parametrize("one_in", [2, 300])
def test_the_training_side_is_that_of_the_split(one_in):
  train, _ = split(MANY, one_in=one_in)
  assert dataset.trained_on(MANY, one_in=one_in) == train
  _, heldout = split(MANY, one_in=300)
  assert dataset.trained_on(heldout, one_in=300).examples == []


def test_a_generator_never_draws_what_another_seed_holds_out():
  """By the text of the question; ids do not meet those of any file either."""
  family = gym.Family("gcd", {"min_value": 1, "max_value": 30})
  other = gym.Family("gcd", {"min_value": 1, "max_value": 12})
  held = gym.heldout([family], per_family=20, seed=977)
  asked = {puzzle.question for puzzle in held}
  for one, seed in ((family, 977), (family, 978), (other, 5)):
    drawn = [gym.puzzle(one, "train", i, seed=seed) for i in range(300)]
    assert asked.isdisjoint(p.question for p in drawn)
  assert all("/" in puzzle.id for puzzle in held)  # which no file may have
  dataset.refuse_drawn(data(*held), ["gcd"])


def test_a_stored_puzzle_that_may_be_drawn_is_refused():
  family = gym.Family("gcd", {"min_value": 1, "max_value": 30})
  drawn = gym.puzzle(family, "train", 0, seed=3)
  stored = Example("p-1", "gym", "my-set", drawn.messages, drawn.entry)
  (fine,) = gym.heldout([family], per_family=1, seed=0)
  both = data(fine, stored, file="h.jsonl")
  dataset.refuse_drawn(both, ["lcm"])
  dataset.refuse_drawn(data(example("a", "3 + 5?")), ["gcd"])
  with refuses(DataError, "h.jsonl, line 2 ... gcd ... held-out"):
    dataset.refuse_drawn(both, ["lcm", "gcd"])


def shown(text, puzzle, **entry):
  asked = ({"role": "user", "content": text},)
  return Example("p", "gym", "s", asked, {**puzzle.entry, **entry})


def test_what_a_stored_puzzle_shows_counts_beside_its_question():
  family = gym.Family("gcd", {"min_value": 1, "max_value": 30})
  drawn = gym.puzzle(family, "train", 0, seed=3)
  (fine,) = gym.heldout([family], per_family=1, seed=0)
  for leak in (shown(drawn.question, fine),
    shown(fine.question, drawn), shown(f"Be brief. {drawn.question}", drawn),
    shown(drawn.question, drawn, question=None)):  # fmt: skip
    with pytest.raises(DataError, match="held-out puzzle of gcd"):
      dataset.refuse_drawn(data(leak), ["gcd"])
  # The hash of a text around a question tells nothing: nine in ten of these
  # would be on the side of training.
  for i in range(50):
    around = f"Puzzle {i}.\n {fine.question}  \nAnswer in a box."
    dataset.refuse_drawn(data(shown(around, fine)), ["gcd"])
  dataset.refuse_drawn(data(shown(fine.question, fine, question=None)), ["gcd"])
  # To a generator these are other questions, of the side of training.
  for other in (f"{fine.question}6", fine.question.lower()):
    assert not gym.is_heldout("gcd", other)
    with pytest.raises(DataError, match="held-out puzzle of gcd"):
      dataset.refuse_drawn(data(shown(other, fine)), ["gcd"])


def test_ids_that_name_a_line_say_nothing_of_another_file():
  train = data(example("test/1", "3 + 5?"))
  refuse_overlap(train, data(example("test/1", "3 + 6?"), file="b.jsonl"))
  with pytest.raises(DataError, match="held-out prompt is also"):
    refuse_overlap(train, data(example("test/1", "3 + 5?"), file="b.jsonl"))
