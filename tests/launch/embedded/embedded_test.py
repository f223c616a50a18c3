"""Tests of launch/embedded: steps, demonstrations, tokenizer, teacher."""

import collections
import dataclasses
import functools
import hashlib
import itertools
import json
import random
import re
import types

import jax
import numpy as np
import pytest
from solved_by_hand import EXAMPLES, entry_of

pytest.importorskip("reasoning_gym")


from brorl_jax.configs import base
from brorl_jax.configs.dials import DIALS
from brorl_jax.model import huggingface
from brorl_jax.model.tokenizer import Tokenizer
from brorl_jax.verdicts import gym
from launch.embedded import __main__ as command
from launch.embedded import (
  demonstrations,
  steps,
  supervised,
  teacher,
  tokenizer,
)
from launch.embedded.recipes import RECIPES
from launch.embedded.steps import QUALITIES, TASKS, write
from launch.embedded.steps.merging import merge
from launch.embedded.supervised import PairLayout

CASES = [(task, side) for task in sorted(TASKS) for side in (0, 1)]


@functools.cache
def entries(task, side, count):
  family = gym.Family(task, dict(DIALS[task][side]))
  return [gym.puzzle(family, "train", i, seed=0).entry for i in range(count)]


def passes(response, entry):
  return gym.verify(response, entry).status == "pass"


@pytest.mark.parametrize("task, side", CASES)
def test_right_responses_pass_and_end_with_the_answer(task, side):
  for i, entry in enumerate(entries(task, side, 15)):
    careful, detour, direct, sloppy = texts = [
      write(entry, quality, random.Random(i))
      for quality in ("careful", "detour", "direct", "sloppy")
    ]
    for right in (careful, detour, direct):
      assert passes(right, entry), right
    assert careful.count("\n") >= 2 and " no\n" not in careful, careful
    assert detour.count(" no\n") in (1, 2), detour
    assert "\n" not in direct and " no\n" not in sloppy
    assert direct == careful.splitlines()[-1] == detour.splitlines()[-1]
    for text in texts:
      *lines, last = text.split("\n")
      assert re.fullmatch("<answer>[^<>]+</answer>", last)
      assert all(lines) and "<" not in "".join(lines), text
    if task == "countdown":  # the attempt fails, its arithmetic does not
      continue
    # What a detour takes back was wrong.
    lines = detour.split("\n")
    assert "\n".join(x for x in lines if not x.endswith(" no")) == careful
    for line, after in itertools.pairwise(lines):
      assert line != f"{after} no", lines


@pytest.mark.parametrize("task, side", CASES)
def test_a_quarter_of_the_sloppy_responses_pass(task, side):
  right = shorter = 0
  puzzles, draws = entries(task, side, 15), 12
  for i, entry in enumerate(puzzles):
    careful = write(entry, "careful", random.Random(0))
    for draw in range(draws):
      response = write(entry, "sloppy", random.Random(f"{i} {draw}"))
      assert response != careful
      passed = passes(response, entry)
      right += passed
      shorter += passed and response.count("\n") < careful.count("\n")
  assert 0.15 < right / (len(puzzles) * draws) < 0.37
  # Those that are right are only shorter, but for a rare slip without effect.
  assert shorter >= 0.98 * right


@pytest.mark.parametrize("task, side", CASES)
def test_only_slips_are_drawn(task, side):
  for entry in entries(task, side, 15)[:3]:
    before = repr(entry)
    for quality in QUALITIES:
      texts = {write(entry, quality, random.Random(i)) for i in range(9)}
      assert (len(texts) > 2) == (quality in ("detour", "sloppy")), texts
    assert repr(entry) == before


def test_demonstrations_are_those_that_the_embedded_policy_has_seen():
  """Whoever writes others makes another policy from the same recipe."""
  text = "\n".join(
    write(entry_of(task), quality, random.Random(seed)) for task in EXAMPLES
    for quality in QUALITIES for seed in range(60)
  )  # fmt: skip
  assert hashlib.sha256(text.encode()).hexdigest()[:16] == "f5dee60e5f468bf7"


def test_what_has_no_steps_is_refused():
  entry = entries("gcd", 0, 15)[0]
  with pytest.raises(ValueError, match="quality = 'good'"):
    write(entry, "good", random.Random(0))
  other = {**entry, "metadata": {"source_dataset": "maze"}}
  with pytest.raises(ValueError, match="'maze' has no steps"):
    write(other, "careful", random.Random(0))


@pytest.mark.parametrize("task", EXAMPLES)
def test_careful_steps_by_hand(task):
  entry, answer, lines = entry_of(task), *EXAMPLES[task][2:]
  careful = write(entry, "careful", random.Random(0))
  assert careful == f"{lines}\n<answer>{answer}</answer>"
  direct = write(entry, "direct", random.Random(0))
  assert direct == f"<answer>{answer}</answer>"


def test_letters_above_nine_are_lower_case():
  metadata = {"source_dataset": "base_conversion", "source_base": 16,
    "target_base": 11, "source_repr": "ff", "decimal_value": 255}  # fmt: skip
  assert write({"metadata": metadata}, "careful", random.Random(0)) == (
    "0*16+15=15\n15*16+15=255\n255=23*11+2\n23=2*11+1\n2=0*11+2\n"
    "<answer>212</answer>"
  )


@pytest.mark.parametrize("numbers, target, steps, answer", [
  ([2, 3, 4], 20, "3+2=5\n5*4=20", "(3+2)*4"),
  ([50, 3, 2], 10, "3+2=5\n50/5=10", "50/(3+2)"),
  ([9, 4, 30], 17, "9+4=13\n30-13=17", "30-(9+4)"),
])  # fmt: skip
def test_an_expression_makes_the_target(numbers, target, steps, answer):
  metadata = {"numbers": numbers, "target": target}
  entry = {"metadata": metadata | {"source_dataset": "countdown"}}
  careful = write(entry, "careful", random.Random(0))
  assert careful == f"{steps}\n<answer>{answer}</answer>"


@pytest.mark.parametrize("first, second, both", [
  ("57+80=137", "137+7=144", "57+80+7=144"),
  ("15-40=-25", "-25-3=-28", "15-40-3=-28"),
  ("36*2=72", "84-72=12", "84-36*2=12"),
  ("60/20=3", "3*100=300", "60/20*100=300"),
  # These would need brackets.
  ("10+5=15", "28-15=13", None), ("10-5=5", "28+5=33", None),
  ("10+5=15", "15*3=45", None), ("4*3=12", "60/12=5", None),
  ("-5+20=15", "15+1=16", None),
  # The result is used twice, not at all, or is only a part of a number.
  ("36*2=72", "72-72=0", None), ("36*2=72", "84-12=72", None),
  ("36*2=72", "172-12=160", None),
])  # fmt: skip
def test_two_equations_in_one(first, second, both):
  assert merge(first, second) == both


ASSETS = huggingface.ASSETS


def families():
  return [gym.Family(name, some) for name, some in base.FAMILIES.items()]


@functools.cache
def text():
  return Tokenizer(ASSETS)


def puzzles(count):
  every = itertools.product(families(), range(count))
  return [gym.puzzle(family, "warmup", i, seed=7) for family, i in every]


def demonstrate(puzzles, **changed):
  budget = dict(prompt_tokens=40, max_new_tokens=6) | changed
  return demonstrations.pairs(
    puzzles, text(), demonstrations.answers({}), seed=0, **budget
  )


def test_demonstrations_hold_prompt_answer_and_end():
  some = puzzles(3)
  data = demonstrate(some)
  for (prompt, response), puzzle in zip(data, some, strict=True):
    assert prompt == text().render(puzzle.messages)
    *answer, end = response
    assert end in text().stop_ids
    assert text().decode([answer]) == [puzzle.entry["answer"]]


def test_solutions_are_written_in_the_shares_that_are_asked(monkeypatch):
  monkeypatch.setattr(
    steps, "write", lambda entry, quality, rng: f"{quality} {entry['answer']}"
  )
  qualities = {"careful": 3.0, "direct": 1.0, "sloppy": 0.0}
  respond = demonstrations.solutions(qualities)
  rng = random.Random(0)
  said = collections.Counter()
  for puzzle in puzzles(150):
    messages, response = respond(puzzle, rng)
    quality, answer = response.split()
    said[quality] += 1
    assert answer == puzzle.entry["answer"]
    (message,) = messages
    told = "\nAnswer at once." if quality == "direct" else ""
    assert message["content"] == puzzle.question + told
  assert set(said) == {"careful", "direct"}
  assert said["direct"] / said.total() == pytest.approx(0.25, abs=0.04)


@pytest.mark.parametrize("budget", ["prompt_tokens", "max_new_tokens"])
def test_what_does_not_fit_is_refused(budget):
  with pytest.raises(ValueError, match="budget"):
    demonstrate(puzzles(3), **{budget: 2})


@pytest.mark.ci
def test_embedded_policy_is_within_its_promises():
  policy, params = huggingface.load(ASSETS)
  assert sum(x.size for x in jax.tree.leaves(params)) <= 3_000_000
  files = [f for f in ASSETS.iterdir() if f.is_file()]
  assert sum(f.stat().st_size for f in files) <= 8_000_000
  config = json.loads((ASSETS / "config.json").read_text())
  assert config["model_type"] == "qwen2"

  heldout = gym.heldout(families(), per_family=20, seed=0)
  data = demonstrate(heldout)
  layout = supervised.PairLayout(tokens=128, rows=1, microbatches=len(data))
  (rows,) = supervised.epoch(
    [len(x.prompt) + len(x.response) for x in data], layout, range(len(data))
  )
  packed = supervised.pack(data, rows, layout)
  used = slice(len(rows))
  tokens, end = packed.tokens[used, 0], packed.end[used, 0]
  logp_of = jax.jit(supervised.logp_of, static_argnames="response_logp")
  logp = logp_of(params, tokens, end, response_logp=policy.response_logp)
  # Exact pass@1 at temperature 1: the probability of the one right answer.
  right = np.zeros(len(data))
  counted = packed.counts[used, 0]
  for row, said, counts, ends in zip(rows, logp, counted, end, strict=True):
    last = np.cumsum([sum(map(len, data[pair])) for pair in row])
    for pair, at in zip(row, last, strict=True):
      right[pair] = np.exp(said[(counts & (ends == at))[1:]].sum())
  by_family = collections.defaultdict(list)
  for puzzle, probability in zip(heldout, right, strict=True):
    by_family[puzzle.task].append(probability)
  means = {name: np.mean(p) for name, p in by_family.items()}
  assert len(means) >= 8
  assert 0.15 < np.mean(list(means.values())) < 0.5
  assert all(0.02 < mean < 0.8 for mean in means.values()), means


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


def small(name):
  recipe = RECIPES[name]
  policy = dataclasses.replace(recipe.policy, vocab=420,
    width=16, layers=1, heads=2, kv_heads=1, head_size=8, mlp=16)  # fmt: skip
  stages = [stage._replace(updates=count)
    for stage, count in zip(recipe.stages, (2, 1), strict=True)]  # fmt: skip
  known = dict(families=recipe.families[:2], puzzles=40, stages=stages)
  layout = PairLayout(recipe.layout.tokens, 1, 2)
  return dataclasses.replace(recipe, policy=policy, layout=layout, **known)


@pytest.mark.ci
def test_the_same_recipe_makes_the_same_bytes(tmp_path, monkeypatch):
  """Each stage has its own demonstrations and seed, of no puzzle for RL."""
  seen = []
  pairs = demonstrations.pairs

  def spy(puzzles, text, respond, **how):
    splits = {x.id.split("/")[1] for x in puzzles}
    seen.append((splits, respond, how["seed"]))
    return pairs(puzzles, text, respond, **how)

  monkeypatch.setattr(demonstrations, "pairs", spy)
  folders = tmp_path / "a", tmp_path / "b"
  recipe = small("steps")
  for folder in folders:
    teacher.teach(recipe, folder, seed=3)
  first, again = (
    {f.name: f.read_bytes() for f in folder.iterdir()} for folder in folders
  )
  assert first == again
  assert {"config.json", "tokenizer.json", "model.safetensors"} < first.keys()
  direct, mixed = (stage.respond for stage in recipe.stages)
  assert seen[:2] == [({"warmup"}, direct, 13), ({"warmup"}, mixed, 15)]
  assert direct is not mixed


def test_the_recipes_are_of_the_shipped_policies():
  for name, recipe in RECIPES.items():
    shipped = huggingface.ASSETS / ("steps" if name == "steps" else "")
    assert huggingface.load(shipped)[0] == recipe.policy
    assert Tokenizer(shipped).size == recipe.policy.vocab
    gym.check(recipe.families)
  assert {f.name for f in RECIPES["steps"].families} == TASKS == {*DIALS}


@pytest.mark.parametrize("flags, says", [
  (["steps", "--workdir=x", "--seed=-1"], "--seed=-1 must be 0 to"),
  (["all", "--workdir=x"], "invalid choice: 'all'"),
  (["steps", "--workdir=."], "error: "),
])  # fmt: skip
def test_refuses(flags, says, monkeypatch, capsys):
  monkeypatch.setattr("sys.argv", ["embedded", *flags])
  with pytest.raises(SystemExit) as e:
    command.main()
  assert says in capsys.readouterr().err + str(e.value)
