"""What a config must meet, in all its phases."""

import dataclasses
import math
import re
import typing

import configured
import pytest
from messages import mentions, refuses

from brorl_jax import config as sections
from brorl_jax.configs import base, harder, n16, n512, presets, simulate, smoke
from brorl_jax.errors import UserError
from brorl_jax.main import settings
from brorl_jax.stages import examples
from brorl_jax.verdicts import gym
from brorl_jax.verdicts.base import DEFAULTS

BASE = dict(n=512, samples=16384, in_flight=8192, minibatches=2, slots=64)
BASE |= dict(rows=32, blocks=16, lr=3e-4, dtype="float32")


def config(**changes):
  """The base config, but that its defaults may be tuned without these tests."""
  return configured.config(**BASE | changes)


def training(**changes):
  return settings.training(
    configured.changed(base.get_config(), **BASE | changes)
  )


def values(**changes):
  """As they are written to config.json."""
  return sections.as_dict(config(**changes))


@pytest.mark.parametrize("get", [base, harder, n16, n512, smoke])
def test_accepts_the_configs_of_the_repository(get):
  settings.training(get.get_config())


STOP = {"rounds": (16, 64, 256, 512)}
GOOD = [
  {"rounds": (16, 32, 512)},
  {"rounds": (512,), "stop_right": 512}, {"stop_right": 513},  # not read
  {"mean_tokens": 6}, {"warmup": 0}, {"betas": (0.0, 0)}, {"dtype": "auto"},
  {"theory_prompts": 0},  # not measured
  {"minibatches": 32}, {"seed": 2**31 - 1},
  {"truncated_factor": 0.0, "mask_truncated": True},
  {"length": "cosine", "length_range": (0, 0), "length_steps": (1, 0)},
  {"length": "replace", "length_range": (0.0, 0.5), "dual_clip": 1.1},
  {"length": "overlong", "length_buffer": 6, "repeat_penalty": (1, 1)},
  {"length_buffer": 7},  # off: not read
  {"reset_to": "best", "reset_every": 10},
  {"reset_to": "best", "eval_every": 20, "reset_every": 0, "reset_stalled": 1},
  {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
  {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
  {"advantage": "centered", "mean": "constant"},
  {"advantage": "maxrl", "length": "cosine", "length_range": (0.0, 1.0)},
  {"advantage": "pass_at_k:128"}, {"code_s": (2, 2.0)},
  {"correction": "none"}, {"correction_range": (0, 1)},
  {"correction": "banded", "correction_range": (1.0, 1.1)},
  {"correction": "sequence"},
  {"eval_temperature": 0.0, "eval_top_p": 1.0},
]  # fmt: skip


@pytest.mark.parametrize("changes", GOOD, ids=str)
def test_accepts_the_edge_of_what_works(changes):
  training(**changes)


COUNTS = """steps samples max_oversampling prompt_tokens max_new_tokens
  minibatches save_every keep_checkpoints eval_every eval_n
  mesh_data mesh_tensor mesh_expert stop_right length_buffer""".split()
NOT_NEGATIVE = """guard.kl guard.end_after kl_weight warmup
  lr_samples weight_decay boost entropy_weight""".split()
OR_ZERO = """optim.spike slots lanes memory_bytes in_flight rows blocks
  run.max_samples theory_prompts reset_every reset_stalled eval_prompts
  eval_max_new_tokens""".split()
POSITIVE = """temperature clip_high lr max_grad_norm
  reward.timeout_s""".split()
FLOATS = "guard.kl kl_weight weight_decay boost entropy_weight optim.spike"
negative = lambda name: -1.0 if name in FLOATS.split() else -1
# What a field must be, and values that it must not have.
ALONE: list[tuple[str, dict]] = [
  ("at least 1", dict.fromkeys(COUNTS, 0)),
  ("0 or positive", {name: negative(name) for name in NOT_NEGATIVE}),
  ("positive ... 0", {name: negative(name) for name in OR_ZERO}),
  ("positive", dict.fromkeys(POSITIVE, 0.0)),
  ("positive ... 0", {"eval_temperature": -0.1}),
  ("positive, or -1", {"mesh_fsdp": 0}),
  ("at least 0 and below 1", {"guard.entropy_low": -1.0}),
  *(
    ("two numbers of at least 0 and below 1", {"betas": betas})
    for betas in ((0.9,), (0.9, 1.0), (-0.1, 0.9), (0.9, "1"))
  ),
  ("0 to 1", {"guard.truncated": -1.0, "guard.score_drop": -1.0}),
  ("between 0 and 1", {"truncated_factor": 1.5}),
  *(
    ("between 0 and 1, tokens of an n-gram", {"repeat_penalty": given})
    for given in ((1.1, 40), (-0.1, 40), (0.1, 0), (0.1, 4.0), ("0", 4), (0.1,))
  ),
  *(
    ("two ascending numbers of at most 1e6 in size", {"length_range": ends})
    for ends in ((), (0.5,), (0.5, 0.4), (0.0, 1e7), (-1e39, 0.0), (0.0, "1"))
  ),
  ("above 1 ... or 0, no bound", {"dual_clip": 1.0, "loss.dual_clip": -10.0}),
  ("one of , cosine, replace, overlong", {"length": "linear"}),
  ("above 0 and at most 1", {"clip_low": 0.0, "eval_top_p": 0.0}),
  ("above 0 and at most 1", {"clip_low": 1.1}),
  ("finite", {"temperature": math.inf}), ("0 to 2", {"seed": -1}),
  ("0 to 2", {"seed": 2**31}),
  ("0 or a multiple of save_every = 10", {"keep_every": 15}),
  ("at least 2", {"n": 1, "data.heldout_one_in": 1}),
  ("multiple of n = 512", {"samples": 16385, "in_flight": 8000}),
  ("positive whole numbers, ascending", {"rounds": (16, 16, 512)}),
  ("positive whole numbers, ascending", {"rounds": (0, 16)}),
  ("the last of them n = 512", {"rounds": (16, 256)}),
  ("multiples of the first, 24", {"rounds": (24, 512)}),
  ("at least 2 in the first round", {"rounds": (1, 512)}),
  ("divisor ... samples / n = 32", {"minibatches": 3}),
  ("0 to max_new_tokens = 6", {"mean_tokens": 7}),
  ("one of float32, bfloat16, auto", {"dtype": "float16"}),
  ("one of layer, products, nothing", {"remat": "all"}),
  ("one of nothing, reference, moments", {"offload": "opt"}),
  ("one of token, sequence, prompt, constant", {"mean": "tokens"}),
  ("one of none, truncated, banded, sequence", {"correction": "tis"}),
  *(
    ("the second at least the first", {"code_s": limits})
    for limits in ((5.0, 4.0), (0.0, 4.0), (5.0,), ("5", 9.0))
  ),
  *(
    ("such as 'pass_at_k:4'", {"advantage": f"pass_at_k{k}"})
    for k in ("", ":", ":0", ":k")
  ),
  *(
    ("the first at least 1", {"length_steps": steps})
    for steps in ((), (1,), (0, 5), (5, -1), (1, 0.5), (1, 2, 3))
  ),
  *(
    (must, {f"data.domains.{name}.{field}": value})
    for name in DEFAULTS
    for must, field, value in (
      ("0 or positive", "weight", -0.1),
      ("pass, score", "reward", "half"),
    )
  ),
  ("functions", {"reward.verifier": ("f",)}),
  ("different functions", {"reward.verifier": ("a:f",) * 2}),
  (r"a name without any of / \ # ? % :", {"wandb": "me/mine"}),
  (r"a name without any of / \ # ? % :", {"wandb": "mine?"}),
  ("paths", {"data.files": (3,), "data.heldout_files": ("",)}),
  ("paths", {"data.files": ("",)}),
  ("empty without data", {"data.heldout_files": ("a",)}),
  ("empty without data", {"data.fields": "prompt:q", "data.domain": "math"}),
  ("positive, or 0: all parameters are trained", {"lora_rank": -1}),
  ("positive", {"lora_alpha": 0.0}), ("0 to 100", {"max_age": -1}),
  *(
    ("different ones of q, k, v, o, gate", {"lora_layers": layers})
    for layers in ((), ("q", "q"), ("q_proj",))
  ),
]  # fmt: skip
LENGTH = "another kind ... length"
BAD = [(k, {k: x}, must) for must, fields in ALONE for k, x in fields.items()]
BAD += [  # with other fields
  ("stop_right", {**STOP, "stop_right": 513}, "at most n = 512"),
  ("in_flight", {**STOP, "in_flight": 8200}, "multiple of rounds[0] = 16"),
  ("max_age", {**STOP, "max_age": 1}, "0 with sampling.rounds"),
  ("mean", {**STOP, "mean": "prompt"}, "another"),
  ("length_buffer", {"length_buffer": 7, "length": "overlong"},
    "1 to max_new_tokens = 6"),
  *(
    ("length_range", {"length": "replace", "length_range": ends}, "(-0.5, 1.0)")
    for ends in ((0.1, 1.0), (-1.0, 0.49))
  ),
  ("advantage", {"advantage": "pass_at_k:129"}, "at most n / 4 = 128"),
  ("advantage", {"advantage": "maxrl", "length": "cosine"}, LENGTH),
  ("advantage", {"advantage": "maxrl", "repeat_penalty": (0.1, 40)}, LENGTH),
  *(
    (field, {"reset_to": "best", **how}, must)
    for field, how, must in (
      ("reset_to", {"kl_weight": 0.0}, "'latest' without kl_weight"),
      ("reset_to", {"reset_every": 0}, "or without reset_every"),
      ("eval_every", {"eval_every": 25}, "multiple of run.save_every = 10"),
      ("reset_every", {"reset_every": 9}, "at least eval.every = 10"),
    )
  ),
  ("advantage", {**STOP, "advantage": "pass_at_k:5"},
    "at most rounds[0] / 4 = 4"),
  ("advantage", {"advantage": "pass_at_k:4", "length": "cosine"}, LENGTH),
  ("lora_rank", {"lora_rank": 0, "lora_alpha": 8.0}, "at least 1"),
  *(
    (field, {"lora_rank": 8, "reset_every": 0, field: value}, must)
    for field, value, must in (
      ("reset_every", 300, "0 with policy.lora_rank"),
      ("reset_stalled", 3, "the policy without LoRA"),
      ("offload", "reference", "'nothing' or 'moments' with policy.lora_rank"),
    )
  ),
  *(
    ("correction_range", {"correction": kind, "correction_range": ratios}, must)
    for kind, ratios, must in (
      ("banded", (1.0,), "two numbers"),
      ("banded", (0.5, math.inf), "two numbers"),
      ("banded", (-0.1, 5.0), "of 0 to 1"), ("banded", (6.0, 7.0), "of 0 to 1"),
      ("banded", (0.5, 0.4), "at least 1"),
      ("sequence", (1.0, 1.0), "a larger one"),
      ("truncated", (0.5, 2.0), "(0, largest)"),
    )
  ),
]  # fmt: skip


@pytest.mark.parametrize("field, changes, must", BAD, ids=str)
def test_refuses_a_value_and_says_what_it_must_be(field, changes, must):
  with pytest.raises(UserError) as e:
    training(**changes)
  line = str(e.value)
  name = configured.SHORT.get(field, field)
  assert line.startswith(f"config.{name} = {changes[field]!r} must be ")
  assert mentions(line, must) and "\n" not in line


def test_a_section_may_be_alone_in_what_only_training_compares():
  """An evaluation samples with a config that could not train."""
  config(n=1, samples=3, minibatches=2, in_flight=5)
  config(**{"data.heldout_files": ("a",)})


def test_wandb_that_is_not_installed_is_refused(monkeypatch):
  training(wandb="mine")
  monkeypatch.setattr(settings.importlib.util, "find_spec", lambda name: None)
  training()
  with refuses(UserError, "config.run.wandb = 'mine' ... 'brorl_jax[wandb]'"):
    training(wandb="mine")


def broken_by_bad() -> set[str]:
  return {configured.SHORT.get(field, field) for field, _, _ in BAD}


def test_every_rule_has_a_value_that_breaks_it():
  c = config()
  fields = {field for field, _, _ in settings.training_rules(c)}
  for section in dataclasses.fields(c):
    name, values = section.name, getattr(c, section.name)
    fields |= {f"{name}.{field}" for field, _, _ in values.rules()}
    fields |= {f"{name}.{field.name}" for field in dataclasses.fields(values)
      if typing.get_origin(field.type) is typing.Literal}  # fmt: skip
  domains = {f"data.domains.{name}.{field}"
    for name in c.data.domains for field in ("weight", "reward")}  # fmt: skip
  assert fields | domains == broken_by_bad()


def test_every_number_must_be_finite():
  for name, value in sections.flat(values()).items():
    if type(value) is float:
      with pytest.raises(UserError, match=f"config.{name} = nan must"):
        config(**{name: math.nan})


@pytest.mark.parametrize("of", [n512, n16])
@pytest.mark.parametrize("preset", presets.NAMES)
def test_every_preset_is_a_config_that_works(of, preset):
  c = settings.training(of.get_config(preset))
  assert c.sampling.n == (512 if of is n512 else 16)
  # On 1 to 8 rows of devices, with a context of 32,768 tokens.
  assert c.sampling.in_flight % (8 * c.sampling.chunk) == 0
  assert c.optim.blocks % 8 == 0
  assert c.data.prompt_tokens + c.sampling.max_new_tokens <= 32768
  assert bool(c.policy.checkpoint) == (preset != "tiny")
  families = examples.families(c.data.families)
  of_others = {"hard": 8, "steps": 10, "tiny": 8, "smollm2": 8}
  assert len(families) == of_others.get(preset, 24)
  # A prompt beyond the budget would stop the run before it begins. Their
  # tokenizers are not here: a number, a word or a sign is at least a token.
  for family in families if preset in ("1p5b", "8b") else ():
    for i in range(20):
      question = gym.puzzle(family, "train", i, seed=0).question
      pieces = re.findall(r"\d|[^\W\d]+|[^\w\s]|\n", question)
      assert len(pieces) < 0.8 * c.data.prompt_tokens, family.name


def test_an_unknown_preset_is_refused(refused, tmp_path):
  line = refused("--config=configs/n512.py:70b", f"--workdir={tmp_path}/run")
  assert mentions(line, "configs/n512.py ... '70b' ... 1p5b, 8b")


def test_a_config_of_another_mode_is_refused():
  with pytest.raises(UserError, match=r"config\.run is missing; .* --mode"):
    settings.typed(simulate.get_config())
  c = base.get_config().unlock()
  del c.sampling.samples
  with pytest.raises(
    UserError, match=r"config\.sampling.samples is missing; .* --mode"
  ):
    settings.typed(c)


def phases_refused(said, *changes):
  with refuses(UserError, said):
    training(phases=changes)


def test_phases_add_up():
  changes = ({"from_step": 3, "sampling.n": 256, "optim.lr": 1},
    {"from_step": 7, "sampling.n": 128,
      "reward.length": "replace", "reward.length_range": (-0.5, 1.0),
      "reward.mask_truncated": True})  # fmt: skip
  c = training(phases=changes)
  (first, one, none), (second, two, what), (third, three, _) = c.phases
  assert (first, second, third) == (1, 3, 7)
  assert one == c and none is None
  assert what == {"sampling.n": 256, "optim.lr": 1}
  of = lambda c: (c.sampling.n, c.optim.lr, c.reward.length)
  assert of(two) == (256, 1.0, "") and isinstance(two.optim.lr, float)
  assert of(three) == (128, 1.0, "replace")
  assert three.reward.mask_truncated is True
  assert three.sampling.samples == c.sampling.samples
  assert of(c) == (512, 3e-4, "")  # as it was
  assert config().phases == [(1, config(), None)]


@pytest.mark.parametrize("change", [3, "n=3", ("from_step", 3)])
def test_a_phase_is_a_dict(change):
  want = f"= {change!r} ... {{'from_step': 31, 'sampling.n': 512}}"
  phases_refused(f"config.run.phases[0] {want}", change)


@pytest.mark.parametrize("since", [None, 1, 0, -3, 3.0, "3", True])
def test_a_phase_begins_after_the_one_before(since):
  change = {"sampling.n": 256}
  if since is not None:
    change["from_step"] = since
  where = "config.run.phases[{}]['from_step'] = {} ... {}".format
  phases_refused(where(0, repr(since), 1), change)
  first = {"from_step": 5, "sampling.n": 256}
  for again in (5, 4):
    second = {"from_step": again, "sampling.n": 128}
    phases_refused(where(1, again, 5), first, second)


@pytest.mark.parametrize("change, line", [
  ({"loss.clip_lwo": 0.1}, "'loss.clip_low'"), ({"xyzzy": 1}, "no such field"),
  ({"run.seed": 1}, "cannot change"), ({"run.steps": 9}, "cannot change"),
  ({"run.phases": ()}, "cannot change"), ({4: 1}, "no such field"),
  ({"optim.lr": None}, "of type float"), ({"sampling.n": "256"}, "of type int"),
  ({"sampling.n": 256.5}, "of type int"), ({"sampling.n": True}, "of type int"),
  ({"optim.lr": "1"}, "of type float"),
  ({"reward.mask_truncated": 1}, "of type bool"),
  ({"optim.lr": -1.0}, "positive"),
  ({"loss.mean": "all"}, "one of token, sequence"),
])  # fmt: skip
def test_a_phase_changes_fields_that_may_change(change, line):
  ((name, value),) = change.items()
  said = f"config.run.phases[0][{name!r}] = {value!r} ... {line}"
  phases_refused(said, {"from_step": 7} | change)


def test_the_config_of_every_phase_is_checked():
  said = "step 7: config.sampling.samples = 16384 ... multiple of n = 500"
  phases_refused(said, {"from_step": 7, "sampling.n": 500})
  # What an earlier phase changed counts.
  phases_refused(
    "config.run.phases[1]['sampling.mean_tokens'] = 5 ... max_new_tokens = 4",
    {"from_step": 3, "sampling.max_new_tokens": 4},
    {"from_step": 9, "sampling.mean_tokens": 5},
  )


def test_what_makes_the_data_or_the_state_does_not_change_in_a_phase():
  known = sections.every_field()
  assert not any(
    about.phased for name, about in known.items()
    if name.partition(".")[0] in ("run", "policy", "data", "devices", "eval")
  )  # fmt: skip
  assert known["sampling.n"].phased and known["optim.lr"].phased
  assert not known["optim.betas"].phased  # moments are made with it
