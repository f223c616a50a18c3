"""Tests of launch/embedded/teacher.py, and of its recipes."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
import tiers

from brorl_jax.configs.dials import DIALS
from brorl_jax.learner.supervised import PairLayout
from brorl_jax.model import huggingface, tokenizer
from brorl_jax.verdicts import gym
from launch.embedded import __main__ as command
from launch.embedded import demonstrations, teacher
from launch.embedded.recipes import RECIPES, Stage
from launch.embedded.steps import TASKS


def small(name, *, updates=(4, 2), **changed):
  recipe = RECIPES[name]
  policy = dataclasses.replace(
    recipe.policy, vocab=420, width=16, layers=1, heads=2, kv_heads=1,
    head_size=8, mlp=16,
  )  # fmt: skip
  stages = [
    stage._replace(updates=count)
    for stage, count in zip(recipe.stages, updates, strict=True)
  ]
  known = dict(families=recipe.families[:2], puzzles=40, stages=stages)
  layout = PairLayout(recipe.layout.tokens, 1, 2)
  return dataclasses.replace(
    recipe, policy=policy, layout=layout, **known | changed
  )


@pytest.mark.ci
@pytest.mark.parametrize("name", [tiers.at_night("at_once"), "steps"])
def test_the_same_recipe_makes_the_same_bytes(name, tmp_path):
  seeds = (0, 0, 1)
  for number, seed in enumerate(seeds):
    teacher.teach(small(name), tmp_path / f"{number}", seed=seed)
  first, again, other = (
    {f.name: f.read_bytes() for f in (tmp_path / f"{i}").iterdir()}
    for i in range(3)
  )
  assert first == again
  assert first["model.safetensors"] != other["model.safetensors"]
  assert {"config.json", "tokenizer.json"} < first.keys()


@pytest.mark.ci
def test_each_stage_has_its_own_demonstrations_and_seed(tmp_path, monkeypatch):
  """None of a puzzle that is trained or tested on."""
  seen = []
  pairs = demonstrations.pairs

  def spy(puzzles, text, respond, **how):
    splits = {x.id.split("/")[1] for x in puzzles}
    seen.append((splits, respond, how["seed"]))
    return pairs(puzzles, text, respond, **how)

  monkeypatch.setattr(demonstrations, "pairs", spy)
  recipe = small("steps", updates=(1, 1))
  teacher.teach(recipe, tmp_path / "policy", seed=3)
  first, mixed = (stage.respond for stage in recipe.stages)
  assert seen == [({"warmup"}, first, 13), ({"warmup"}, mixed, 15)]
  assert first is not mixed


@pytest.mark.slow
def test_the_second_stage_changes_what_the_policy_prefers(tmp_path):
  """Steps after the first stage, none after a second of direct answers."""
  shares = {
    "steps": {"careful": 1.0, "direct": 0.0},
    "none": {"careful": 0.0, "direct": 1.0},
  }
  preferred = {}
  for name, mixed in shares.items():
    right = demonstrations.solutions({"careful": 1.0}, at_once="")
    then = demonstrations.solutions(mixed, at_once="")
    recipe = small(
      "steps", stages=[Stage(60, 1e-2, right), Stage(60, 1e-2, then)]
    )
    teacher.teach(recipe, tmp_path / name, seed=0)
    policy, params = huggingface.load(tmp_path / name)
    text = tokenizer.Tokenizer(tmp_path / name)
    first = []
    for puzzle in itertools.islice(teacher.draw(recipe, 0), 10):
      prompt = text.render(puzzle.messages)
      (tag,) = text.encode("<answer>")
      ids = np.array([[*prompt, tag]])
      logp = jax.jit(policy.packed_logp)(params, ids, np.ones_like(ids))
      first.append(float(np.asarray(logp)[0].ravel()[-1]))
    preferred[name] = np.mean(first)
  assert preferred["none"] > preferred["steps"] + 1.0


def test_the_recipes_are_of_the_shipped_policies():
  for name, recipe in RECIPES.items():
    shipped = huggingface.ASSETS / ("steps" if name == "steps" else "")
    assert huggingface.load(shipped)[0] == recipe.policy
    assert tokenizer.Tokenizer(shipped).size == recipe.policy.vocab
    gym.check(recipe.families)
  assert {f.name for f in RECIPES["steps"].families} == TASKS == {*DIALS}


@pytest.mark.parametrize(
  "flags, says",
  [
    (["steps", "--workdir=x", "--seed=-1"], "--seed=-1 must be 0 to"),
    (["all", "--workdir=x"], "invalid choice: 'all'"),
    (["steps", "--workdir=."], "error: "),
  ],
)
def test_refuses(flags, says, monkeypatch, capsys):
  monkeypatch.setattr("sys.argv", ["embedded", *flags])
  with pytest.raises(SystemExit) as e:
    command.main()
  assert says in capsys.readouterr().err + str(e.value)
