"""Tests of brorl_jax/main/examples.py."""

import functools
import json
import pathlib

import pytest

from brorl_jax import order, tokenizer
from brorl_jax.ledger import Ledger
from brorl_jax.main.examples import Examples, TooLong
from brorl_jax.tasks import dataset, gym
from configs import base

ASSETS = pathlib.Path(tokenizer.__file__).parent / "assets"


@functools.cache
def text():
  return tokenizer.Tokenizer(ASSETS)


def config(**changes):
  c = base.get_config()
  c.n, c.eval_prompts = 16, 4
  c.update(changes)
  return c


@functools.cache
def examples():
  return Examples(config(), text())


def test_every_candidate_is_a_training_puzzle_of_its_own_place():
  seen = set()
  for step in (1, 2):
    for numbers in (range(8), [8, 11, 9], range(12, 24)):
      prompts = examples().prompts(step, numbers)
      assert prompts.index.tolist() == list(numbers)
      for i, position in enumerate(prompts.index):
        puzzle = examples().example(step, int(position))
        assert puzzle.id.split("/")[1] == "train"
        assert puzzle.id not in seen
        seen.add(puzzle.id)
        ids = prompts.tokens[i][prompts.mask[i]].tolist()
        assert ids == text().render(puzzle.messages)
        assert prompts.mask[i, -1]


def test_an_instruction_follows_every_question():
  instruction = "Between <answer> and </answer>."
  c = config(prompt_tokens=80)
  c.domains.gym.instruction = instruction
  told = Examples(c, text())
  prompts = told.prompts(1, range(8))
  for i, position in enumerate(prompts.index):
    question = examples().example(1, int(position)).question
    ids = prompts.tokens[i][prompts.mask[i]].tolist()
    asked = [{"role": "user", "content": f"{question}\n{instruction}"}]
    assert ids == text().render(asked)


def test_a_config_without_any_data_names_both_ways_to_some():
  c = config()
  c.domains.gym.weight = 0.0
  with pytest.raises(
    ValueError, match=r"domains\.gym\.weight is 0, and .*files"
  ):
    Examples(c, text())


def test_no_heldout_question_is_drawn():
  heldout = {p.question for p in examples().heldout()}
  assert len(heldout) == 8 * 4
  drawn = {
    examples().example(s, p).question for s in range(9) for p in range(99)
  }
  assert not heldout & drawn


def test_families_are_drawn_by_weight():
  c = config()
  for name in c.families:
    c.families[name].weight = 3.0 if name == "gcd" else 0.0
  some = Examples(c, text())
  families = {some.example(1, i).task for i in range(50)}
  assert families == {"gcd"}
  assert {puzzle.task for puzzle in some.heldout()} == {"gcd"}


def test_a_budget_that_most_prompts_exceed_is_refused():
  with pytest.raises(TooLong, match=r"config\.prompt_tokens = 9: raise it"):
    Examples(config(prompt_tokens=9), text())


def test_a_rare_long_prompt_gives_its_place_to_a_substitute():
  c = config()
  some = Examples(c, text())
  lengths = lambda: [
    len(text().render(some._draw(5, i).messages)) for i in range(400)
  ]
  before = lengths()
  limit = sorted(before)[-8]
  assert limit < max(before)
  with c.unlocked():
    c.prompt_tokens = limit
  after = lengths()
  assert max(after) <= limit
  same = [a == b for a, b in zip(before, after, strict=True)]
  assert all(s for s, b in zip(same, before, strict=True) if b <= limit)
  assert after == lengths()  # the same substitutes each time


def test_candidates_without_end_are_numbered_from_0():
  got = examples().candidates(3, Ledger(), most=7)
  assert list(got) == [0, 1, 2, 3, 4, 5, 6]
  assert examples().example(1, 0) != examples().example(2, 0)


def test_a_run_of_so_many_prompts_draws_each_once_in_a_step():
  some = Examples(config(distinct_prompts=12), text())
  orders = [some.candidates(step, Ledger(), most=99) for step in (1, 2, 1)]
  assert all(sorted(order) == list(range(12)) for order in orders)
  assert orders[0] == orders[2] != orders[1]
  # Some are left out, the order of the others is the same.
  resting = Ledger(rests={3: 9, 5: 9})
  rest = some.candidates(1, resting, most=99)
  assert rest == [p for p in orders[0] if p not in {3, 5}]
  assert some.candidates(1, resting, most=4) == rest[:4]
  # A number names the same prompt in every step.
  for p in range(12):
    assert some.example(1, p) == some.example(2, p)
  assert len({some.example(9, p).id for p in range(12)}) == 12
  other = Examples(config(distinct_prompts=12, seed=1), text())
  assert other.candidates(1, Ledger(), most=99) != orders[0]


def lines(count=60):
  """Puzzles as a file holds them."""
  family = gym.Family("chain_sum", {"min_digits": 1, "max_digits": 1})
  return [
    {
      "id": f"sum-{i}",
      "domain": "gym",
      "prompt": puzzle.question,
      "entry": puzzle.entry,
    }
    for i in range(count)
    for puzzle in [gym.puzzle(family, "train", i, seed=0)]
  ]


def from_file(path, records, **changes):
  path.write_text("".join(json.dumps(record) + "\n" for record in records))
  c = config()
  c.prompt_tokens = 80
  c.data.files = (str(path),)
  c.update_from_flattened_dict(changes)
  return Examples(c, text())


def test_a_file_is_gone_through_in_an_order_of_its_own(tmp_path):
  some = from_file(tmp_path / "sums.jsonl", lines())
  heldout = {e.question for e in some._heldout}
  questions = {record["prompt"] for record in lines()} - heldout
  assert {e.question for e in some.heldout()} <= heldout
  assert heldout and some.domains == ["gym"] and not some.families
  epoch = len(some._train["gym"])
  asked = [some.example(1, p).question for p in range(2 * epoch)]
  assert set(asked) == questions
  first, second = asked[:epoch], asked[epoch:]
  assert sorted(first) == sorted(second) and first != second
  assert first != [e.question for e in some._train["gym"]]
  # A number names the same example in every step.
  assert all(some.example(9, p).question == asked[p] for p in range(epoch))


def test_a_step_goes_on_where_the_one_before_ended(tmp_path):
  some = from_file(tmp_path / "sums.jsonl", lines())
  assert list(some.candidates(1, Ledger(), most=3)) == [0, 1, 2]
  later = Ledger(drawn=70)
  assert list(some.candidates(2, later, most=3)) == [70, 71, 72]


def test_shares_of_domains_mix_files_and_puzzles(tmp_path, monkeypatch):
  monkeypatch.setattr(
    dataset,
    "read",
    functools.partial(
      dataset.read, check={"math": lambda r: {"answer": r["answer"]}}
    ),
  )
  records = [
    {"id": f"m{i}", "domain": "math", "prompt": f"{i} + 1?", "answer": str(i)}
    for i in range(40)
  ]
  weights = {"domains.math.weight": 3.0, "domains.gym.weight": 1.0}
  some = from_file(tmp_path / "sums.jsonl", records, **weights)
  drawn = [some.example(1, p) for p in range(80)]
  assert [e.domain for e in drawn].count("math") == 60
  made = [e.id for e in drawn if e.domain == "gym"]
  assert len(set(made)) == 20
  assert {e.domain for e in some.heldout()} == {"math", "gym"}
  asked = some._ids(next(e for e in drawn if e.domain == "math"))
  assert text().decode([asked])[0].endswith("the answer into \\boxed{}.")
  none = from_file(tmp_path / "b.jsonl", records, **{"domains.gym.weight": 0.0})
  assert {none.example(1, p).domain for p in range(50)} == {"math"}
  assert {e.domain for e in none.heldout()} == {"math"}


def test_a_held_out_puzzle_of_a_family_without_weight_may_be_any(tmp_path):
  drawn = gym.puzzle(gym.Family("gcd"), "train", 0, seed=1)
  record = {"id": "p", "domain": "gym", "prompt": drawn.question}
  held = tmp_path / "held.jsonl"
  held.write_text(json.dumps(record | {"entry": drawn.entry}) + "\n")
  train = [
    {"id": f"m{i}", "domain": "math", "prompt": f"{i} + 1?", "answer": str(i)}
    for i in range(4)
  ]
  path, given = tmp_path / "m.jsonl", {"data.heldout_files": (str(held),)}
  with pytest.raises(ValueError, match="asks what gcd, which is generated"):
    from_file(path, train, **given)
  some = from_file(path, train, **given, **{"families.gcd.weight": 0.0})
  assert [e.id for e in some.heldout() if e.task == "gcd"] == ["p"]


def test_a_bad_line_is_refused_or_counted(tmp_path):
  path = tmp_path / "sums.jsonl"
  records = lines()
  records[7]["promt"] = records[7].pop("prompt")
  with pytest.raises(ValueError, match=r"sums\.jsonl.*8.*promt.*prompt"):
    from_file(path, records)
  some = from_file(path, records, **{"data.skip_bad": True})
  assert "left out 1 bad lines" in some.says[0]
  assert "promt" in some.says[1] and len(some.says) == 2


def test_long_prompts_of_files_are_refused_or_dropped(tmp_path):
  path, records = tmp_path / "sums.jsonl", lines()
  records[3]["prompt"] = "so " * 100 + records[3]["prompt"]
  with pytest.raises(TooLong, match=r"sum-3 has \d+ prompt .*data\.drop_long"):
    from_file(path, records)
  some = from_file(path, records, **{"data.drop_long": True})
  assert any("left out 1 prompts of more than 80" in s for s in some.says)
  assert all(e.id != "sum-3" for e in [*some._train["gym"], *some.heldout()])


def test_heldout_files_must_not_be_trained_on(tmp_path):
  other = tmp_path / "held.jsonl"
  records = lines()
  other.write_text("".join(json.dumps(r) + "\n" for r in records[50:]))
  held = {"data.heldout_files": (str(other),)}
  some = from_file(tmp_path / "sums.jsonl", records[:50], **held)
  assert some.files == dataset.file_digests(str(tmp_path / "sums.jsonl"))
  assert len(some._train["gym"]) == 50
  assert [e.id for e in some.heldout()] == [f"sum-{i}" for i in range(50, 54)]
  with pytest.raises(ValueError, match=r"held\.jsonl.*sum-5\d.*sums\.jsonl"):
    from_file(tmp_path / "sums.jsonl", records[:51], **held)


def test_a_run_that_goes_on_needs_the_same_examples(tmp_path):
  path, records = tmp_path / "sums.jsonl", lines()
  before = from_file(path, records).fingerprint
  order.refuse_changes(before, from_file(path, records).fingerprint)
  records[20]["prompt"] += " "
  with pytest.raises(ValueError, match="data has changed: source gym was 5"):
    order.refuse_changes(before, from_file(path, records).fingerprint)
  made = examples().fingerprint
  with pytest.raises(ValueError, match=r"(source gym|held out) was "):
    order.refuse_changes(made, before)


def test_other_heldout_examples_are_refused_too(tmp_path):
  path, records = tmp_path / "sums.jsonl", lines()
  some = from_file(path, records)
  held = some._heldout[0].id
  (record,) = [r for r in records if r["id"] == held]
  record["source"] = "elsewhere"
  with pytest.raises(ValueError, match="data has changed: held out was"):
    from_file(path, records).refuse_changes(some.fingerprint)
  some.refuse_changes(None)  # a run that begins


def test_a_domain_of_long_prompts_alone_is_refused(tmp_path):
  path = tmp_path / "sums.jsonl"
  with pytest.raises(TooLong, match=r"no gym prompt has at most .* = 3 tokens"):
    from_file(path, lines(), prompt_tokens=3, **{"data.drop_long": True})


def test_what_was_left_out_is_kept_word_for_word(tmp_path):
  records = lines()
  for i in range(9):
    records[i]["promt"] = records[i].pop("prompt")
  some = from_file(tmp_path / "a.jsonl", records, **{"data.skip_bad": True})
  assert len(some.left_out) == 9 and len(some.says) == 6
  assert "a.jsonl, line 9, field 'promt'" in some.left_out[8]
