"""Tests of the configs of the repository: what they say they are."""

import ast
import pathlib
import random
import re

import configured
import pytest

from brorl_jax import config
from brorl_jax.configs import (
  base,
  harder,
  n16,
  n512,
  n512_equal_samples,
  need,
  presets,
  prorl_v1,
  prorl_v2,
  simulate,
  sweep,
)
from brorl_jax.main import settings
from brorl_jax.model import huggingface, tokenizer
from brorl_jax.plan import resolve
from brorl_jax.stages import examples
from brorl_jax.verdicts import gym
from brorl_jax.verdicts.base import posed
from launch.embedded import steps

CONFIGS = pathlib.Path(base.__file__).parent
FILES = (n512, n16, n512_equal_samples, prorl_v1)
SHOWN = {"eval.every", "run.save_every"}  # seven times in a run
STEPS = 16  # times fewer samples with the preset `steps`

# Written down from the sources, not from the files. Of BroRL, ProRL and ProRL
# v2, and of what is taken for a launch script of its authors.
ANYWHERE = {"entropy_weight": 0.0, "clip_low": 0.2, "eval_n": 16}
ANYWHERE |= {"eval_temperature": 0.6, "eval_top_p": 0.95}
ANYWHERE |= {"correction_range": (), "length_steps": (100, 500)}
V2 = {"clip_high": 0.28, "advantage": "tokens"}
V2 |= {"correction": "truncated", "keep": "differ", "loss": "ppo"}
STATED = {
  n512: V2 | {"n": 512, "samples": 65_536},  # 128 prompts
  n16: V2 | {"n": 16, "samples": 8_192},  # 512 prompts
  n512_equal_samples: V2 | {"n": 512, "samples": 8_192},
  prorl_v1: {
    "n": 16, "samples": 4_096,  # 256 prompts
    "minibatches": 4,  # of 64 prompts
    "temperature": 1.2, "clip_high": 0.4, "advantage": "grpo",
    "correction": "none", "truncated_factor": 1.0,
    # When validation stalls, with the optimizer, and not for its age.
    "reset_every": 0, "reset_stalled": 2, "reset_to": "anew",
  },
}  # fmt: skip
# Only those of a language model. A context of 16,384, and the root of samples.
MODEL = {"prompt_tokens": 1_024, "max_new_tokens": 15_360, "lr": 1e-6}
MODEL |= {"lr_samples": 8_192, "reset_every": 200, "code_s": (5.0, 5.0)}
CHECKPOINT = {"checkpoint": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"}
SCRIPT = {"truncated_factor": 0.1, "minibatches": 8, "kl_weight": 5e-4}
SCRIPT |= {"dual_clip": 10.0, "boost": 0.1}
MODEL |= SCRIPT
OF_MODELS = {n512: MODEL, n16: MODEL, n512_equal_samples: MODEL
  | {"minibatches": 1}, prorl_v1: {"lr": 2e-6, "lr_samples": 0, "steps": 2_000,
    "prompt_tokens": 1_024, "max_new_tokens": 7_168}}  # fmt: skip
SIMULATED = {"vocab": 128_000, "correct": 10_000, "centred": True}
SIMULATED |= {"lr": 1e-3, "steps": 1_000, "n": (4, 8, 16, 512, 51_200)}
SIMULATED |= {"seeding": 3.0, "anchor": 5.0, "surrogate": "probability"}


def values(c, fields) -> dict:
  flat = config.flat(config.as_dict(c))
  return {field: flat[configured.SHORT[field]] for field in fields}


@pytest.mark.parametrize("of, preset", [
  (of, preset)
  for of in FILES
  for preset in presets.NAMES
  if preset not in ("hard", "smollm2")
  if (of, preset) != (prorl_v1, "steps")
], ids=lambda x: getattr(x, "__name__", x))  # fmt: skip
def test_a_preset_has_every_value_that_its_source_states(of, preset):
  c = settings.training(of.get_config(preset))
  want = ANYWHERE | STATED[of]
  if preset == "steps":
    want |= {"samples": want["samples"] // STEPS}
  elif preset != "tiny":
    want |= OF_MODELS[of]
  assert values(c, want) == want
  # On 1 to 8 rows of devices.
  assert c.sampling.in_flight % (8 * c.sampling.chunk) == 0
  assert c.optim.blocks % 8 == 0


@pytest.mark.parametrize("preset", ["tiny", "1p5b", "8b"])
def test_the_phases_of_prorl_are_its_runs(preset):
  c = settings.typed(prorl_v1.get_config(preset))
  longest = 8 if preset == "tiny" else 15_360
  phases = c.phases
  found = [phase.config for phase in phases]
  assert [phase.sampling.n for phase in found] == [16, 16, 32, 16]
  assert {phase.sampling.prompts for phase in found} == {256}
  assert {phase.optim.minibatches for phase in found} == {4}
  # From run 4 on a response without an end earns nothing.
  factors = [phase.reward.truncated_factor for phase in found]
  assert factors == [1.0, 0.0, 0.0, 0.0]
  lengths = [phase.sampling.max_new_tokens for phase in found]
  assert lengths == [*[c.sampling.max_new_tokens] * 3, longest]
  if preset != "tiny":
    # A context of 8k, then of 16k for the last 200 steps.
    assert c.data.prompt_tokens + c.sampling.max_new_tokens == 8_192
    assert c.data.prompt_tokens + longest == 16_384
    assert c.run.steps - phases[3].since + 1 == 200


def test_prorl_v2_is_the_script_where_it_says_something():
  c = settings.training(prorl_v2.get_config())
  want = SCRIPT | {"n": 16, "samples": 8_192, "clip_low": 0.2, "clip_high": 0.3}
  want |= {"length": "replace", "repeat_penalty": (0.001, 40), "lr": 1e-6}
  want |= {"prompt_tokens": 1_024, "max_new_tokens": 8_192, "eval_n": 4}
  want |= {"eval_every": 5, "save_every": 5, "temperature": 1.0, "steps": 3_000}
  want |= {"eval_max_new_tokens": 32_768}
  want |= {"reset_to": "best", "reset_every": 300, "length_steps": (100, 500)}
  assert values(c, want | CHECKPOINT) == want | CHECKPOINT
  assert stated(CONFIGS / "prorl_v2.py") <= named(want, CHECKPOINT)
  v1 = settings.typed(prorl_v1.get_config("1p5b"))
  assert values(v1, CHECKPOINT) == CHECKPOINT
  # BroRL goes on from where that ended.
  assert n512.get_config("1p5b").policy.checkpoint.endswith("-1.5B@v2")


def test_domains_have_the_weights_and_the_rewards_of_the_paper():
  domains = settings.typed(n512.get_config("1p5b")).data.domains
  want = {"math": 29, "code": 18, "stem": 18, "gym": 27, "instructions": 7}
  # Of 136 thousand prompts.
  assert {k: round(domains[k].weight / 1.36) for k in want} == want
  scored = {k for k in want if domains[k].reward == "score"}
  assert scored == {"code", "gym", "instructions"}


def test_the_simulation_is_that_of_the_paper():
  c = simulate.get_config()
  assert {field: c[field] for field in SIMULATED} == SIMULATED


def test_the_rate_grows_with_the_root_of_samples():
  rate = lambda of: resolve.scaled_lr(settings.typed(of.get_config("1p5b")))
  assert rate(n16) == rate(n512_equal_samples) == pytest.approx(1e-6)
  assert rate(n512) == pytest.approx(2.828e-6, rel=1e-3)
  assert rate(prorl_v1) == pytest.approx(2e-6)


@pytest.mark.parametrize("of", FILES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("preset", ["1p5b", "8b"])
def test_updates_and_resets_of_a_language_model(of, preset):
  """16 prompts to an update; the reference is reset while it is of use."""
  c = settings.typed(of.get_config(preset))
  for _, now, _ in c.phases:
    assert now.sampling.prompts // now.optim.minibatches >= 16
  if of is not prorl_v1:
    assert 200 <= c.reference.reset_every <= 500  # ProRL v2
    assert 1 < (c.run.steps - 1) // c.reference.reset_every
    assert c.reference.kl_weight > 0.0


def test_by_need_is_n512_in_rounds_with_advantages_that_weigh_by_counts():
  fixed, by_need = (
    config.flat(x.get_config("1p5b").to_dict()) for x in (n512, need)
  )
  found = {k for k in fixed if fixed[k] != by_need[k]}
  assert found == {"sampling.rounds", "advantage.kind", "advantage.boost"}
  c = settings.training(need.get_config())
  assert c.sampling.prompts == 16 and c.advantage.kind == "maxrl"
  assert c.sampling.stop_right == 4


def test_only_what_tells_them_apart_differs_between_the_arms():
  fields = lambda c: config.flat(c.to_dict())
  together = {"sampling.slots", "sampling.lanes"}  # as many decode
  own = {
    "steps": together, "smollm2": together,
    "hard": {"optim.lr", "run.steps", *SHOWN},  # each at its best
  }  # fmt: skip
  for preset in presets.NAMES:
    few, many, control = (
      fields(of.get_config(preset)) for of in (n16, n512, n512_equal_samples)
    )
    allowed = {"sampling.n", *own.get(preset, ())}
    shorter = {"run.steps"} if preset in ("tiny", "steps") else set()
    differ = {k for k in few if few[k] != many[k]}
    assert differ <= allowed | shorter | {"sampling.samples"}
    rate = {"optim.lr"} if preset == "steps" else set()
    differ = {k for k in few if few[k] != control[k]}
    assert differ <= allowed | rate | {"optim.minibatches"}
    same = preset in ("hard", "tiny", "steps", "smollm2")
    assert (few["optim.minibatches"] == control["optim.minibatches"]) == same


@pytest.mark.parametrize("of", [n512, harder])
def test_prompts_and_right_steps_fit_the_embedded_policy(of):
  c = settings.typed(of.get_config(*["steps"] * (of is n512)))
  text = tokenizer.Tokenizer(huggingface.locate(c.policy.checkpoint))
  rng = random.Random(0)
  longest = 0
  for family in examples.families(c.data.families):
    for puzzle in gym.heldout([family], per_family=30, seed=5):
      asked = posed(puzzle, instruction="Answer at once.")
      assert len(text.render(asked)) <= c.data.prompt_tokens, puzzle.id
      said = steps.write(puzzle.entry, "careful", rng)
      longest = max(longest, len(text.encode(said)) + 1)
  # With room for a detour, and not so much that nothing is ever cut.
  assert 0.6 * c.sampling.max_new_tokens < longest
  assert longest < c.sampling.max_new_tokens


def stated(path: pathlib.Path) -> set[str]:
  """Fields whose comment, behind or above, calls their value stated."""
  text = path.read_text()
  lines, found = text.splitlines(), set()
  for node in ast.walk(ast.parse(text)):
    if not isinstance(node, ast.Assign):
      continue
    field = re.fullmatch(r"c\.(\w+\.\w+)", ast.unparse(node.targets[0]))
    above = node.lineno - 1
    while lines[above - 1].lstrip().startswith("#"):
      above -= 1
    behind = lines[(node.end_lineno or 0) - 1].partition("#")[2]
    said = " ".join([*lines[above : node.lineno - 1], behind]).lower()
    if field and re.search(r"(?<!not )\bstated\b", said):
      found.add(field[1])
  return found


def named(*fields: dict) -> set[str]:
  return {configured.SHORT[field] for some in fields for field in some}


def test_no_value_is_called_stated_that_is_not_compared_here():
  some = {"optim.minibatches", "loss.clip_high", "run.steps"}
  assert stated(CONFIGS / "prorl_v1.py") > some
  for of in FILES:
    found = stated(CONFIGS / f"{of.__name__.rpartition('.')[2]}.py")
    assert found <= named(STATED[of], OF_MODELS[of]), of


def test_no_default_is_called_stated_that_is_not_compared_here():
  known = config.every_field()
  found = {name for name, about in known.items() if about.source == "stated"}
  assert "sampling.n" in found
  assert found <= named(ANYWHERE, *STATED.values(), *OF_MODELS.values())
  # And a default that no source states does not say so.
  assert known["optim.lr"].source == known["loss.correction_range"].source
  assert known["optim.lr"].source == "unknown"
  found = stated(CONFIGS / "presets.py")
  assert "reference.reset_every" in found <= named(MODEL, CHECKPOINT)
  for of in (simulate, sweep, base):
    assert not stated(CONFIGS / f"{of.__name__.rpartition('.')[2]}.py")


# What makes a puzzle harder, in the settings of the library: the harder side's
# least is not below the run's most.
HARDER = {"chain_sum": "terms", "products": "digits",
  "gcd": "value", "lcm": "value", "simple_equations": "terms",
  "letter_counting": "words", "leg_counting": "animals", "count_bits": "n",
  "prime_factorization": "value", "countdown": "numbers"}  # fmt: skip


def test_the_run_has_ten_tasks_and_the_harder_side_the_same_with_more_steps():
  run = n512.get_config("steps").data.families
  side = harder.get_config().data.families
  assert set(run) == set(side) == set(HARDER)
  assert run.chain_sum.settings.max_terms == 4
  assert run.countdown.settings.max_numbers == 3
  for task, dial in HARDER.items():
    most, least = run[task].settings[f"max_{dial}"], side[task].settings
    assert least[f"min_{dial}"] >= most, task
  strict = {"chain_sum", "products", "letter_counting", "leg_counting"}
  for task in strict | {"count_bits", "prime_factorization", "countdown"}:
    dial = HARDER[task]
    most = run[task].settings[f"max_{dial}"]
    assert side[task].settings[f"min_{dial}"] > most, task
