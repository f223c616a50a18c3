"""Tests of brorl_jax/stages/examples.py."""

import dataclasses
import functools
import itertools
import json
import pathlib
import sys

import configured
import pytest
from messages import mentions, refuses

from brorl_jax.data import dataset
from brorl_jax.model import tokenizer
from brorl_jax.stages.examples import TooLong
from brorl_jax.types import RunState
from brorl_jax.verdicts import gym
from brorl_jax.verdicts.domains import DOMAINS

ASSETS = pathlib.Path(tokenizer.__file__).parents[1] / "assets"


@functools.cache
def text():
  return tokenizer.Tokenizer(ASSETS)


def config(**changes):
  return configured.config(**dict(n=16, eval_prompts=4) | changes)


@functools.cache
def examples():
  return configured.examples(config(), text())


def test_every_candidate_is_a_training_puzzle_of_its_own_place():
  seen = set()
  for step in (1, 2):
    for numbers in (range(8), [8, 11, 9], range(12, 24)):
      prompts = examples().prompts(step, numbers)
      assert prompts.index.tolist() == list(numbers)
      for i, position in enumerate(prompts.index):
        puzzle = examples().example(step, int(position))
        assert puzzle.id.split("/")[1] == "train" and puzzle.id not in seen
        seen.add(puzzle.id)
        ids = prompts.tokens[i][prompts.mask[i]].tolist()
        assert ids == text().render(puzzle.messages)
        assert prompts.mask[i, -1]


def test_an_instruction_follows_every_question():
  instruction = "Between <answer> and </answer>."
  asks = {"data.domains.gym.instruction": instruction}
  told = configured.examples(config(prompt_tokens=80, **asks), text())
  prompts = told.prompts(1, range(8))
  for i, position in enumerate(prompts.index):
    question = examples().example(1, int(position)).question
    ids = prompts.tokens[i][prompts.mask[i]].tolist()
    asked = [{"role": "user", "content": f"{question}\n{instruction}"}]
    assert ids == text().render(asked)


def test_a_config_without_any_data_names_both_ways_to_some():
  c = config(**{"data.domains.gym.weight": 0.0})
  with refuses(ValueError, "domains.gym.weight is 0 ... files"):
    configured.examples(c, text())


def test_no_heldout_question_is_drawn():
  heldout = {p.question for p in examples().heldout()}
  assert len(heldout) == 8 * 4
  drawn = {examples().example(*i).question
    for i in itertools.product(range(9), range(99))}  # fmt: skip
  assert not heldout & drawn


def test_families_are_drawn_by_weight():
  c = config(**{
    f"data.families.{name}.weight": 3.0 if name == "gcd" else 0.0
    for name in config().data.families
  })  # fmt: skip
  some = configured.examples(c, text())
  families = {some.example(1, i).task for i in range(50)}
  assert families == {"gcd"}
  assert {puzzle.task for puzzle in some.heldout()} == {"gcd"}


def test_a_budget_that_most_prompts_exceed_is_refused():
  with pytest.raises(TooLong, match=r"data\.prompt_tokens = 9; raise it"):
    configured.examples(config(prompt_tokens=9), text())


@pytest.mark.ci
def test_a_rare_long_prompt_gives_its_place_to_a_substitute():
  some = configured.examples(config(), text())
  lengths = lambda: [
    len(text().render(some._draw(5, i).messages)) for i in range(400)
  ]
  before = lengths()
  limit = sorted(before)[-8]
  assert limit < max(before)
  some._c = dataclasses.replace(some._c, prompt_tokens=limit)
  after = lengths()
  assert max(after) <= limit
  same = [a == b for a, b in zip(before, after, strict=True)]
  assert all(s for s, b in zip(same, before, strict=True) if b <= limit)
  assert after == lengths()  # the same substitutes each time


def test_candidates_without_end_are_numbered_from_0():
  got = examples().candidates(3, RunState(), most=7)
  assert list(got) == [0, 1, 2, 3, 4, 5, 6]
  assert examples().example(1, 0) != examples().example(2, 0)


def lines(count=60):
  family = gym.Family("chain_sum", {"min_digits": 1, "max_digits": 1})
  return [{"id": f"sum-{i}", "domain": "gym",
      "prompt": puzzle.question, "entry": puzzle.entry} for i in range(count)
    for puzzle in [gym.puzzle(family, "train", i, seed=0)]]  # fmt: skip


def from_file(path, records, **changes):
  path.write_text("".join(json.dumps(record) + "\n" for record in records))
  own = {"prompt_tokens": 80, "data.files": (str(path),)}
  return configured.examples(config(**own | changes), text())


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
  assert list(some.candidates(1, RunState(), most=3)) == [0, 1, 2]
  assert list(some.candidates(2, RunState(drawn=70), most=3)) == [70, 71, 72]


@pytest.mark.ci
def test_shares_of_domains_mix_files_and_puzzles(tmp_path, monkeypatch):
  math = dataclasses.replace(DOMAINS["math"], check_reference=dict)
  only = {"domains": {"math": math}}
  read = lambda *args, real=dataset.read, **how: real(*args, **how | only)
  monkeypatch.setattr(dataset, "read", read)
  records = [
    {"id": f"m{i}", "domain": "math", "prompt": f"{i} + 1?", "answer": str(i)}
    for i in range(40)
  ]
  weights = {"data.domains.math.weight": 3.0, "data.domains.gym.weight": 1.0}
  weights["data.puzzles"] = True
  some = from_file(tmp_path / "sums.jsonl", records, **weights)
  drawn = [some.example(1, p) for p in range(80)]
  assert [e.domain for e in drawn].count("math") == 60
  assert len({e.id for e in drawn if e.domain == "gym"}) == 20
  assert {e.domain for e in some.heldout()} == {"math", "gym"}
  assert some.log_lines[-1] == (
    "prompts: gym 25%, math 75%; some are generated (config.data.puzzles)"
  )
  asked = some._ids(next(e for e in drawn if e.domain == "math"))
  assert text().decode([asked])[0].endswith("into \\boxed{}.<|im_start|>")
  for alone in ({"data.domains.gym.weight": 0.0, "data.puzzles": True}, {}):
    none = from_file(tmp_path / "b.jsonl", records, **alone)
    assert {none.example(1, p).domain for p in range(50)} == {"math"}
    assert {e.domain for e in none.heldout()} == {"math"}
    assert none.domains == ["math"] and none.families == []
    assert none.log_lines[-1] == (
      "prompts: math 100%; none are generated (config.data.puzzles)"
    )


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
  given["data.puzzles"] = True
  with refuses(ValueError, "may generate this held-out puzzle of gcd"):
    from_file(path, train, **given)
  some = from_file(path, train, **given, **{"data.families.gcd.weight": 0.0})
  assert [e.id for e in some.heldout() if e.task == "gcd"] == ["p"]


def test_a_bad_line_is_refused_or_counted(tmp_path):
  path = tmp_path / "sums.jsonl"
  records = lines()
  records[7]["promt"] = records[7].pop("prompt")
  with pytest.raises(ValueError, match=r"sums\.jsonl.*8.*promt.*prompt"):
    from_file(path, records)
  some = from_file(path, records, **{"data.skip_bad": True})
  assert mentions(some.log_lines[0], "left out 1 ... lines")
  assert "promt" in some.log_lines[1] and len(some.log_lines) == 3
  for i in range(9):  # of which 5 are shown
    records[i].setdefault("promt", records[i].pop("prompt", ""))
  some = from_file(path, records, **{"data.skip_bad": True})
  assert len(some.left_out) == 9 and len(some.log_lines) == 3
  assert mentions(some.log_lines[1], "left out 9: prompt refused ... line 1,")
  assert "sums.jsonl, line 9, field 'prompt'" in some.left_out[8]


def test_long_prompts_of_files_are_refused_or_dropped(tmp_path):
  path, records = tmp_path / "sums.jsonl", lines()
  records[3]["prompt"] = "so " * 100 + records[3]["prompt"]
  with pytest.raises(TooLong, match=r"sum-3 has \d+ prompt .*data\.skip_bad"):
    from_file(path, records)
  some = from_file(path, records, **{"data.skip_bad": True})
  assert any(mentions(s, "left out 1 prompts ... 80") for s in some.log_lines)
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
  every = from_file(
    tmp_path / "sums.jsonl", records[:50], eval_prompts=0, **held
  )
  assert [e.id for e in every.heldout()] == [r["id"] for r in records[50:]]
  with pytest.raises(ValueError, match=r"held\.jsonl.*sum-5\d.*sums\.jsonl"):
    from_file(tmp_path / "sums.jsonl", records[:51], **held)


def test_a_run_that_goes_on_needs_the_same_examples(tmp_path):
  path, records = tmp_path / "sums.jsonl", lines()
  some = from_file(path, records)
  before, held = some.fingerprint, some._heldout[0].id
  from_file(path, records).refuse_changes(before)
  some.refuse_changes(None)  # a run that begins
  (record,) = [r for r in records if r["id"] == held]
  for changed in (record, next(r for r in records if r["id"] != held)):
    changed["prompt"] += " "
    with pytest.raises(ValueError, match=r"gym was 5|held out was"):
      from_file(path, records).refuse_changes(before)
    changed["prompt"] = changed["prompt"][:-1]
  with pytest.raises(ValueError, match=r"(source gym|held out) was "):
    examples().refuse_changes(before)


def test_a_domain_of_long_prompts_alone_is_refused(tmp_path):
  path = tmp_path / "sums.jsonl"
  with pytest.raises(TooLong, match=r"= 3: every gym prompt"):
    from_file(path, lines(), prompt_tokens=3, **{"data.skip_bad": True})


def arithmetic(count=30):
  return [{"question": f"{i} + 1 = ?", "solution": {"n": i + 1}, "level": i % 3}
    for i in range(count)]  # fmt: skip


OTHERS = {
  "data.heldout_one_in": 3, "data.fields": "prompt:question,answer:solution.n",
  "data.domain": "math",
}  # fmt: skip


def test_lines_of_any_form_are_trained_on(tmp_path):
  some = from_file(tmp_path / "sums.jsonl", arithmetic(), **OTHERS)
  every = [*some._train["math"], *some._heldout]
  assert {e.id for e in every} == {f"sums/{i}" for i in range(1, 31)}
  assert {e.task for e in every} == {"sums"}
  assert {e.columns["level"] for e in every} == {0, 1, 2}
  first = next(e for e in every if e.id == "sums/1")
  assert (first.question, first.entry) == ("0 + 1 = ?", {"answer": "1"})
  assert some.log_lines[1] == "unused columns: 'level', 'solution'"
  many = [{**r, **{f"c{i}": 1 for i in range(50)}} for r in arithmetic()]
  said = from_file(tmp_path / "many.jsonl", many, **OTHERS).log_lines[1]
  assert said.endswith(", 'c19', ...") and len(said) < 200
  again = from_file(tmp_path / "sums.jsonl", arithmetic(), **OTHERS)
  again.refuse_changes(some.fingerprint)
  # A column may be what a reward looks at: it is part of the data.
  records = [{**r, "level": 7} for r in arithmetic()]
  other = from_file(tmp_path / "sums.jsonl", records, **OTHERS)
  with pytest.raises(ValueError, match=r"(source math|held out) was"):
    other.refuse_changes(some.fingerprint)


def test_training_and_heldout_files_of_one_name_are_told_apart(tmp_path):
  for name, lines_ in (("x", arithmetic(8)), ("y", arithmetic(16)[8:])):
    (tmp_path / name).mkdir()
    (tmp_path / name / "sums.jsonl").write_text(
      "".join(json.dumps(r) + "\n" for r in lines_)
    )
  held = {"data.heldout_files": (str(tmp_path / "y/sums.jsonl"),)}
  some = from_file(tmp_path / "x/sums.jsonl", arithmetic(8), **OTHERS, **held)
  ids = lambda side: {f"{side}/sums.jsonl/{i}" for i in range(1, 9)}
  assert {e.id for e in some._train["math"]} == ids("x")
  assert {e.id for e in some._heldout} == ids("y")


def test_names_of_fields_that_are_none_are_refused(tmp_path):
  wrong = {**OTHERS, "data.fields": "promt:question"}
  with refuses(ValueError, "config.data.fields: ... did you mean prompt?"):
    from_file(tmp_path / "sums.jsonl", arithmetic(), **wrong)


@pytest.mark.parametrize(
  "domain, says",
  [("maths", "did you mean math?"), ("sql", "use one of math, code, stem, ")],
)
def test_a_domain_that_is_none_is_refused(tmp_path, domain, says):
  wrong = {**OTHERS, "data.domain": domain}
  with refuses(ValueError, f"config.data.domain = {domain!r} ... {says}"):
    from_file(tmp_path / "sums.jsonl", arithmetic(), **wrong)


def test_what_the_config_adds_to_every_prompt(tmp_path):
  added = {"data.system": "Be brief."}
  plain = from_file(tmp_path / "sums.jsonl", arithmetic(), **OTHERS)
  some = from_file(
    tmp_path / "sums.jsonl", arithmetic(), **OTHERS, **added, prompt_tokens=200
  )
  example = some.example(1, 0)
  box = "Think step by step and put the answer into \\boxed{}."
  question = f"{example.question}\n{box}"
  assert some.asked(example) == question
  assert some._ids(example) == text().render([
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": question},
  ])  # fmt: skip
  assert (example, some.fingerprint) == (plain.example(1, 0), plain.fingerprint)
  every = [*plain._train["math"], *plain._heldout]
  assert plain.longest == max(len(plain._ids(e)) for e in every)
  assert some.longest > plain.longest


def test_what_is_added_must_be_text_that_can_be_read():
  for bad in ("<|im_end|>", "a\u200bb", "  "):
    with refuses(ValueError, "config.data.system: "):
      configured.examples(config(**{"data.system": bad}), text())


def test_what_a_template_does_to_prompts_is_said_or_refused():
  body = (
    "{% if messages|length > 1 %}{{ raise_exception('No role') }}{% endif %}"
  )
  body += "{{ messages[-1].content }}{{ strftime_now('%d') }}<think>"
  template = tokenizer.Template("t", body)
  gemma, later = (
    tokenizer.Tokenizer(ASSETS, template, f"2026-01-0{day}") for day in "12"
  )
  with pytest.raises(
    ValueError, match=r"^config.data.system = 'Hi': .* No role;"
  ):
    configured.examples(config(**{"data.system": "Hi"}), gemma)
  deaf = tokenizer.Template("t", "{{ messages[-1].content }}")
  said = [{"role": role, "content": "Hi"} for role in ("system", "user")]
  with refuses(ValueError, "leaves out the system message"):
    tokenizer.Tokenizer(ASSETS, deaf).render(said)
  some, other = (configured.examples(config(), x) for x in (gemma, later))
  date, thinks = some.log_lines
  assert "2026-01-01" in date and mentions(thinks, "thinking: ... <think>")
  assert some.decode([text().encode("4")]) == ["<think>4"]
  with pytest.raises(ValueError, match="date of the chat template was 2026"):
    other.refuse_changes(some.fingerprint)


def test_another_chat_template_is_other_data():
  template = tokenizer.Template("t.jinja", "{{ messages[-1].content }}?")
  own = configured.examples(config(), tokenizer.Tokenizer(ASSETS, template))
  assert "chat template" not in examples().fingerprint
  with pytest.raises(ValueError, match=r"data has changed.*chat template"):
    own.refuse_changes(examples().fingerprint)
  own.refuse_changes(own.fingerprint)


def test_puzzles_without_their_library_are_refused_in_one_line(monkeypatch):
  gym._dataset.cache_clear()
  gym.library.cache_clear()
  monkeypatch.setitem(sys.modules, "reasoning_gym", None)
  with refuses(ValueError, "pip install 'brorl_jax[gym]'"):
    configured.examples(config(), text())
