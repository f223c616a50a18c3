"""Tests of brorl_jax/main/settings.py and of the arguments of the command."""

import json
import math
import os
import pathlib
import re
import subprocess
import sys
import time

import pytest

from brorl_jax.main import examples, folder, lock, settings
from brorl_jax.tasks import gym
from brorl_jax.tasks.base import DOMAINS
from configs import base, n16, n512

ROOT = pathlib.Path(__file__).parents[1]
RUN = ("--config=configs/n512.py", "--workdir={}/run")


def command(*args: str, code: str | None = None) -> subprocess.CompletedProcess:
  start = ["-c", code] if code else ["-m", "brorl_jax.main"]
  return subprocess.run(
    [sys.executable, *start, *args],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=120,
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
  )


def message(done: subprocess.CompletedProcess) -> str:
  """The one line of a refusal."""
  assert done.returncode == 2, done.stderr
  assert done.stdout == ""
  (line,) = done.stderr.splitlines()
  assert line.startswith("error: ")
  return line.removeprefix("error: ")


# ------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
  "args, line",
  [
    (
      (*RUN, "--config.clip_lwo=0.1"),
      "there is no --config.clip_lwo; did you mean --config.clip_low?",
    ),
    (
      (*RUN, "--config.families.gcd.settings.max_valu=3"),
      "there is no --config.families.gcd.settings.max_valu; did you mean "
      "--config.families.gcd.settings.max_value?",
    ),
    (
      (*RUN, "--config.xyzzy", "3"),
      "there is no --config.xyzzy; configs/base.py lists all fields",
    ),
    (
      (*RUN, "--noconfig.shuffel"),
      "there is no --config.shuffel; configs/base.py lists all fields",
    ),
    (
      (RUN[0], "--wrkdir={}/run"),
      "there is no --wrkdir; did you mean --workdir?",
    ),
    (
      ("--config=configs/n521.py", RUN[1]),
      "config file configs/n521.py is missing; did you mean configs/n512.py?",
    ),
    (
      ("--config", "no folder/n512.py", RUN[1]),
      "config file no folder/n512.py is missing",
    ),
    ((*RUN, "--config"), "--config is empty; name a file of configs/"),
    (
      (*RUN, "--config.lr=fast"),
      "flag --config.lr=fast: 'fast' is not a number",
    ),
    (
      (*RUN, "--config.n=1.5"),
      "flag --config.n=1.5: '1.5' is not an integer",
    ),
    (
      (*RUN, "--config.families.gcd.settings.max_value=many"),
      "flag --config.families.gcd.settings.max_value=many: 'many' is not an "
      "integer",
    ),
    (
      (*RUN, "--allow_config_change=perhaps"),
      "flag --allow_config_change=perhaps: 'perhaps' is not a boolean",
    ),
    (
      (*RUN, "--mode=trian"),
      "flag --mode=trian: value should be one of "
      "<train|evaluate|plan|warmup|simulate|export|report>",
    ),
    ((*RUN, "512"), "'512' is not a flag; see --help"),
    ((RUN[0],), "--workdir is missing; see --help"),
    ((RUN[1],), "--config is missing; see --help"),
  ],
)
def test_refuses_in_one_line_and_writes_nothing(tmp_path, args, line):
  done = command(*(arg.format(tmp_path) for arg in args))
  assert message(done) == line
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
  "text, line",
  [
    ("def get_config(:\n", "invalid syntax (c.py, line 1)"),
    ("def get_config():\n  return 1 / 0\n", "division by zero"),
    ("import sys\nsys.exit(0)\n", "0"),
    (
      "from configs import base\n"
      "def get_config():\n  c = base.get_config()\n  c.lerning_rate = 1.0\n",
      'Key "lerning_rate" does not exist and cannot be added since the config',
    ),
    (
      "from configs import base\n"
      "def get_config():\n  c = base.get_config()\n  c.n = '512'\n",
      "Could not override field 'n' (",
    ),
  ],
)
def test_a_config_file_that_does_not_run_is_one_line(tmp_path, text, line):
  file = tmp_path / "a folder" / "c.py"
  file.parent.mkdir()
  file.write_text(text)
  said = message(command(f"--config={file}", f"--workdir={tmp_path}/r"))
  assert said.startswith(f"config file {file}: {line}")


# Stands in for training: says which config arrived.
STUB = """
import sys, types
from absl import app
training = types.ModuleType("brorl_jax.main.training")
def run(c, workdir, *, allow_change, begin_again):
  print(c.lr, c.n, c.families.gcd.weight, c.checkpoint, workdir, allow_change)
  FAILS
training.run = run
sys.modules["brorl_jax.main.training"] = training
from brorl_jax.main import __main__ as command, settings
app.run(command.main, flags_parser=settings.parse_flags)
"""


def test_overrides_are_typed_and_reach_the_run():
  done = command(
    "--config=configs/n16.py",
    "--workdir=runs/a b",
    "--config.lr=1",
    "--config.families.gcd.weight",
    "3",
    "--config.checkpoint=/a --config.b",
    "--allow_config_change",
    code=STUB.replace("FAILS", ""),
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout == "1.0 16 3.0 /a --config.b runs/a b True\n"


def test_phases_are_read_from_the_command_line():
  done = command(
    "--config=configs/n512.py",
    "--workdir=w",
    "--config.phases=({'from_step': 3, 'n': 32},)",
    code=STUB.replace("FAILS", "print(settings.phases(c)[1][1].n, c.phases)"),
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines()[1] == "32 ({'from_step': 3, 'n': 32},)"


def test_a_config_file_may_lie_in_a_folder_with_spaces(tmp_path):
  file = tmp_path / "a folder" / "mine.py"
  file.parent.mkdir()
  file.write_text("from configs.n16 import get_config\n")
  done = command(
    f"--config={file}",
    "--workdir=w",
    "--config.lr=2",
    code=STUB.replace("FAILS", ""),
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout == "2.0 16 1.0  w False\n"


def test_the_flag_says_where_compiled_programs_are_kept(tmp_path):
  code = STUB.replace(
    "FAILS", "from brorl_jax.main import programs; print(programs.says())"
  )
  flags = ("--config=configs/n16.py", "--workdir=w")
  for where in (tmp_path, "off"):
    done = command(*flags, f"--compilation_cache={where}", code=code)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()[1]
    if where == "off":
      assert said == "compiled programs are not kept"
    else:
      assert said.startswith(f"compiled programs are kept in {tmp_path}/")
  done = command(*flags, "--compilation_cache=", code=code)
  assert message(done).startswith("--compilation_cache='' names no folder")


@pytest.mark.parametrize(
  "fails, status, line",
  [
    ("raise settings.UserError('no')", 2, "error: no"),
    ("raise KeyboardInterrupt", 130, "interrupted; the same command resumes"),
  ],
)
def test_status_of_a_run_that_ends_early(fails, status, line):
  done = command(
    "--config=configs/n16.py", "--workdir=w", code=STUB.replace("FAILS", fails)
  )
  assert done.returncode == status
  assert done.stderr.splitlines() == [line]


def test_help_does_not_wait_for_jax():
  start = time.monotonic()
  done = command("--help")
  assert time.monotonic() - start < 30.0  # a hang; the speed is below
  for flag in ("--config", "--workdir", "--mode", "allow_config_change"):
    assert flag in done.stdout
  assert "Traceback" not in done.stderr
  code = (
    "import sys, brorl_jax.main.__main__\n"
    "slow = {'jax', 'flax', 'transformers', 'orbax', 'matplotlib'}\n"
    "print(slow & set(sys.modules))"
  )
  assert command(code=code).stdout == "set()\n"


def test_refuses_a_foreign_workdir_by_the_whole_command(tmp_path):
  (tmp_path / "thesis.tex").write_text("precious")
  done = command(RUN[0], f"--workdir={tmp_path}")
  assert message(done) == (
    f"workdir {tmp_path} holds files that are no run; choose another"
  )
  assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


# --------------------------------------------------------------------- values


def config(**changes):
  """The base config, but that its defaults may be tuned without these tests."""
  c = base.get_config().unlock()
  c.update(n=512, samples=16384, in_flight=8192, minibatches=2)
  c.update(slots=64, rows=32, blocks=16, lr=3e-4, dtype="float32")
  c.update({k: v for k, v in changes.items() if "." not in k})
  c.update_from_flattened_dict({k: v for k, v in changes.items() if "." in k})
  return c


@pytest.mark.parametrize("get", [base, n16, n512])
def test_accepts_the_configs_of_the_repository(get):
  settings.check_training(get.get_config())


GOOD = [
  {"n": 2},
  {"slots": 1},
  {"slots": 0, "lanes": 0, "memory_bytes": 0},
  {
    "lanes": 3,
    "memory_bytes": 10**9,
    "int8_cache": True,
    "decode_kernel": True,
  },
  {"kl_weight": 0.0},
  {"reset_every": 0, "reset_above_kl": 0.1, "reset_stalled": 3},
  {"warmup": 0},
  {"b1": 0.0},
  {"weight_decay": 0.1},
  {"mesh_data": 4},
  {"dtype": "bfloat16"},
  {"samples_shown": 0},
  {"theory_prompts": 0},  # not measured
  {"minibatches": 32},
  {"seed": 2**31 - 1},
  {"n": 16, "samples": 8192},  # the paper's own arm
  {"keep": "solved", "keep_above": 0.05, "keep_below": 0.95},
  {"distinct_prompts": 33, "rest_after": 2, "rest_steps": 1},
  {"distinct_prompts": 32, "keep": "all"},
  {"truncated_factor": 0.0, "mask_truncated": True},
  {"length_weight": 1.0, "length_min": 0.0, "length_max": 0.0},
  {"length_weight": 1.0, "length_off": 0},  # always on
  {"overlong_weight": 1.0, "overlong_buffer": 6},
  {"overlong_buffer": 7},  # off: not read
  {"dual_clip": 3.0},
  {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
  {"correction": "none"},
  {"correction": "banded", "correction_low": 1.0, "correction_high": 1.1},
  {"correction": "sequence", "pipeline": True},
  {"lr_scaling": "prompts", "lr_base": 1},
  {"eval_temperature": 0.0, "eval_top_p": 1.0},
]


@pytest.mark.parametrize("changes", GOOD, ids=str)
def test_accepts_the_edge_of_what_works(changes):
  settings.check_training(config(**changes))


COUNTS = (
  "steps samples in_flight max_oversampling prompt_tokens max_new_tokens "
  "minibatches rows blocks save_every keep_checkpoints eval_every "
  "eval_prompts eval_n mesh_model lr_base length_on rest_steps"
).split()
BAD = [
  *((field, {field: 0}, "at least 1") for field in COUNTS),
  ("steps", {"steps": -3}, "at least 1"),
  ("seed", {"seed": -1}, "0 to 2"),
  ("seed", {"seed": 2**31}, "0 to 2"),
  ("n", {"n": 1}, "at least 2"),
  ("n", {"n": 0}, "at least 2"),
  ("n", {"n": -512}, "at least 2"),
  ("samples", {"samples": 16385}, "a multiple of n = 512"),
  ("samples", {"samples": 256}, "a multiple of n = 512"),
  ("in_flight", {"in_flight": 8000}, "a multiple of n = 512"),
  ("minibatches", {"minibatches": 3}, "a divisor of samples / n = 32"),
  *((f, {f: -1}, "positive, or 0") for f in ("slots", "lanes", "memory_bytes")),
  ("temperature", {"temperature": 0.0}, "positive"),
  ("temperature", {"temperature": float("inf")}, "finite"),
  ("temperature", {"temperature": float("nan")}, "finite"),
  ("clip_low", {"clip_low": -0.2}, "between 0 and 1"),
  ("clip_low", {"clip_low": 0.0}, "between 0 and 1"),
  ("clip_low", {"clip_low": 1.0}, "between 0 and 1"),
  ("clip_high", {"clip_high": -0.28}, "positive"),
  ("clip_high", {"clip_high": 0.0}, "positive"),
  ("clip_high", {"clip_high": float("inf")}, "finite"),
  ("kl_weight", {"kl_weight": -1e-4}, "0 or positive"),
  ("kl_clamp", {"kl_clamp": 0.0}, "positive"),
  ("lr", {"lr": 0.0}, "positive"),
  ("lr", {"lr": -1e-3}, "positive"),
  ("lr", {"lr": float("nan")}, "finite"),
  ("warmup", {"warmup": -1}, "0 or positive"),
  ("b1", {"b1": 1.0}, "below 1"),
  ("b2", {"b2": -0.1}, "at least 0"),
  ("b2", {"b2": 1.0}, "below 1"),
  ("eps", {"eps": 0.0}, "positive"),
  ("weight_decay", {"weight_decay": -0.1}, "0 or positive"),
  ("max_grad_norm", {"max_grad_norm": 0.0}, "positive"),
  ("dtype", {"dtype": "float16"}, "one of float32, bfloat16"),
  ("second_moment", {"second_moment": ""}, "one of full, factored"),
  ("remat", {"remat": "all"}, "one of layer, products, nothing"),
  ("offload", {"offload": "opt"}, "one of nothing, reference, moments"),
  ("mesh_data", {"mesh_data": 0}, "positive, or -1"),
  ("mesh_data", {"mesh_data": -2}, "positive, or -1"),
  ("samples_shown", {"samples_shown": -1}, "0 or positive"),
  (
    "code_test_s",
    {"code_test_s": 0.0},
    "positive; it is the CPU-seconds of a test",
  ),
  ("code_total_s", {"code_total_s": 4.0}, "at least code_test_s = 5"),
  ("theory_prompts", {"theory_prompts": -1}, "positive, or 0: the theorem is"),
  ("theory_tokens", {"theory_tokens": 0}, "at least 1"),
  ("theory_responses", {"theory_responses": 0}, "at least 1"),
  # Which groups are trained on, and what reward they get.
  ("keep", {"keep": "some"}, "one of differ, mean, solved"),
  ("keep_above", {"keep_above": 0.5, "keep_below": 0.5}, "below keep_below"),
  ("keep_above", {"keep_above": 0.9, "keep_below": 0.1}, "below keep_below"),
  ("keep_above", {"keep_above": -0.1}, "at least 0"),
  ("keep_below", {"keep_below": 1.1}, "at most 1"),
  ("distinct_prompts", {"distinct_prompts": 32}, "some are rejected"),
  (
    "distinct_prompts",
    {"distinct_prompts": 31},
    "0, or more than the 32 of a step",
  ),
  (
    "distinct_prompts",
    {"distinct_prompts": -1},
    "0, or more than the 32 of a step",
  ),
  ("rest_after", {"rest_after": 1}, "0 unless distinct_prompts is set"),
  ("rest_after", {"rest_after": -1, "distinct_prompts": 99}, "0 or positive"),
  ("truncated_factor", {"truncated_factor": 1.5}, "between 0 and 1"),
  ("truncated_factor", {"truncated_factor": -0.5}, "between 0 and 1"),
  ("length_weight", {"length_weight": -1.0}, "0 or positive"),
  ("length_off", {"length_off": -1}, "positive, or 0: always on"),
  ("length_min", {"length_min": 0.5}, "at most length_max = 0.0"),
  ("overlong_weight", {"overlong_weight": -1.0}, "0 or positive"),
  (
    "overlong_buffer",
    {"overlong_buffer": 7, "overlong_weight": 1.0},
    "1 to max_new_tokens = 6",
  ),
  (
    "overlong_buffer",
    {"overlong_buffer": 0, "overlong_weight": 0.1},
    "1 to max_new_tokens = 6",
  ),
  ("advantage", {"advantage": "token"}, "one of tokens, trajectories, grpo, c"),
  ("credit", {"credit": "unequal"}, "one of equal, distinct, inverse"),
  # The loss.
  ("loss", {"loss": "grpo"}, "one of ppo, gspo"),
  ("dual_clip", {"dual_clip": 0.5}, "above 1, or 0: without"),
  ("dual_clip", {"dual_clip": 1.0}, "above 1, or 0: without"),
  ("dual_clip", {"dual_clip": 3.0, "loss": "gspo"}, "0 with loss = 'gspo'"),
  ("entropy_weight", {"entropy_weight": -0.1}, "0 or positive"),
  ("correction", {"correction": "tis"}, "one of none, truncated, banded, seq"),
  (
    "correction",
    {"correction": "none", "pipeline": True},
    "other than 'none' with pipeline, which samples a step behind",
  ),
  ("correction_cap", {"correction_cap": 0.5}, "at least 1"),
  ("correction_low", {"correction_low": 6.0}, "between 0 and 1"),
  ("correction_high", {"correction_high": 0.4}, "at least 1"),
  (
    "correction_low",
    {"correction_low": 1.0, "correction_high": 1.0},
    "below correction_high = 1.0",
  ),
  ("sequence_low", {"sequence_low": 1.001}, "between 0 and 1"),
  ("sequence_high", {"sequence_high": 0.999}, "at least 1"),
  *(
    (field, {field: value}, "positive, or 0: not for that")
    for field, value in (
      ("reset_every", -1),
      ("reset_stalled", -1),
      ("reset_above_kl", -0.5),
    )
  ),
  ("lr_scaling", {"lr_scaling": "sample"}, "one of none, samples, prompts"),
  *(
    (f"domains.{name}.weight", {f"domains.{name}.weight": value}, "0 or posi")
    for name, value in zip(
      DOMAINS, [-1.0, math.nan, math.inf, -0.5, -9.0], strict=True
    )
  ),
  *(
    (f"domains.{name}.reward", {f"domains.{name}.reward": "half"}, "pass, sc")
    for name in DOMAINS
  ),
  ("data.files", {"data.files": (3,)}, "paths, as in ('a.jsonl'"),
  ("data.files", {"data.files": ("",)}, "paths, as in ('a.jsonl'"),
  ("data.heldout_files", {"data.heldout_files": ("",)}, "paths, as in"),
  ("data.heldout_files", {"data.heldout_files": ("a",)}, "empty without data"),
  ("data.heldout_one_in", {"data.heldout_one_in": 1}, "at least 2"),
  ("eval_temperature", {"eval_temperature": -0.1}, "positive, or 0: the like"),
  ("eval_top_p", {"eval_top_p": 0.0}, "above 0 and at most 1"),
  ("eval_top_p", {"eval_top_p": 1.1}, "above 0 and at most 1"),
]


@pytest.mark.parametrize("field, changes, must", BAD, ids=str)
def test_refuses_a_value_and_says_what_it_must_be(field, changes, must):
  with pytest.raises(settings.UserError) as e:
    settings.check_training(config(**changes))
  line = str(e.value)
  assert line.startswith(f"config.{field} = {changes[field]!r} must be ")
  assert must in line and "\n" not in line


def test_an_evaluation_is_not_refused_for_what_only_training_needs():
  settings.check_evaluation(config(n=1, samples=3, minibatches=2, in_flight=5))
  settings.check_evaluation(config(**{"data.heldout_files": ("a",)}))
  for field in ("in_flight", "eval_n", "prompt_tokens", "mesh_data"):
    with pytest.raises(settings.UserError, match=f"config.{field} = 0 must be"):
      settings.check_evaluation(config(**{field: 0}))


def test_every_rule_has_a_value_that_breaks_it():
  rules = {field for field, _, _ in settings._training_rules(config())}
  floats = {k for k, v in config().items() if isinstance(v, float)}
  assert rules == {field for field, _, _ in BAD} | floats


@pytest.mark.parametrize("of", [n512, n16])
@pytest.mark.parametrize("preset", ["tiny", "1p5b", "8b"])
def test_every_preset_is_a_config_that_works(of, preset):
  c = of.get_config(preset)
  settings.check_training(c)
  assert c.n == (512 if of is n512 else 16)
  assert set(c) == set(base.get_config())  # every field is in base.py
  for data in (1, 4, 8):
    settings.check_mesh(c, data)
  settings.check_lengths(c, 32768)
  assert bool(c.checkpoint) == (preset != "tiny")
  families = examples.families(c)
  assert len(families) == (8 if preset == "tiny" else 24)
  # A prompt beyond the budget would stop the run before it begins. Their
  # tokenizers are not here: a number, a word or a sign is at least a token.
  for family in families if preset != "tiny" else ():
    for i in range(20):
      question = gym.puzzle(family, "train", i, seed=0).question
      pieces = re.findall(r"\d|[^\W\d]+|[^\w\s]|\n", question)
      assert len(pieces) < 0.8 * c.prompt_tokens, family.name


def test_an_unknown_preset_is_refused(tmp_path):
  done = command("--config=configs/n512.py:70b", f"--workdir={tmp_path}/run")
  assert message(done) == (
    "config file configs/n512.py: there is no preset '70b'; there are tiny, "
    "1p5b, 8b"
  )


def test_a_large_preset_without_its_checkpoint_says_what_to_download(tmp_path):
  done = subprocess.run(
    [sys.executable, "-m", "brorl_jax.main", "--config=configs/n512.py:8b",
     f"--workdir={tmp_path}/run"],
    cwd=ROOT, capture_output=True, text=True, timeout=120,
    env={
      **os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1",
      "HF_HOME": str(tmp_path / "cache"),
    },
  )  # fmt: skip
  line = message(done)
  name = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"
  assert f"checkpoint '{name}' is not a directory here" in line
  assert f"'hf download {name} --local-dir DeepSeek-R1-Distill-Llama" in line
  assert "then give --config.checkpoint=DeepSeek-R1-Distill-Llama-8B" in line
  assert not (tmp_path / "run").exists()


def test_a_rollout_stays_within_the_positions_of_the_policy():
  c = config(prompt_tokens=100, max_new_tokens=28)
  settings.check_lengths(c, 128)
  with pytest.raises(
    settings.UserError, match=r"max_new_tokens = 128 must be at most 127"
  ):
    settings.check_lengths(c, 127)


def test_a_config_of_another_mode_is_refused():
  c = config()
  del c.samples
  with pytest.raises(
    settings.UserError, match=r"config\.samples is missing; .* --mode"
  ):
    settings.check_training(c)


def test_work_spreads_evenly_over_the_mesh():
  settings.check_mesh(config(), 8)
  with pytest.raises(
    settings.UserError, match=r"in_flight = 8192 is 16 prompts .* 3 devices"
  ):
    settings.check_mesh(config(), 3)
  with pytest.raises(settings.UserError, match=r"blocks = 6 do not .* 4 dev"):
    settings.check_mesh(config(blocks=6), 4)


# --------------------------------------------------------------------- phases


def refusal(*changes, **fields):
  with pytest.raises(settings.UserError) as e:
    settings.check_training(config(phases=changes, **fields))
  line = str(e.value)
  assert "\n" not in line
  return line


def test_phases_add_up():
  changes = (
    {"from_step": 3, "n": 256, "lr": 1},
    {"from_step": 7, "n": 128, "length_weight": 0.5, "length_wrong": True},
  )
  c = config(phases=changes)
  settings.check_training(c)
  (first, one), (second, two), (third, three) = settings.phases(c)
  assert (first, second, third) == (1, 3, 7)
  assert one == c
  assert (two.n, two.lr, two.length_weight) == (256, 1.0, 0.0)
  assert isinstance(two.lr, float)
  assert (three.n, three.lr, three.length_weight) == (128, 1.0, 0.5)
  assert three.length_wrong is True and three.samples == c.samples
  assert (c.n, c.lr) == (512, 3e-4)  # as it was
  assert settings.phases(config()) == [(1, config())]


@pytest.mark.parametrize("change", [3, "n=3", ("from_step", 3)])
def test_a_phase_is_a_dict(change):
  want = (
    f"config.phases[0] = {change!r} must be a dict of fields; write "
    "({'from_step': 31, 'n': 512},)"
  )
  assert refusal(change) == want


@pytest.mark.parametrize("since", [None, 1, 0, -3, 3.0, "3", True])
def test_a_phase_begins_after_the_one_before(since):
  change = {"n": 256} if since is None else {"from_step": since, "n": 256}
  assert refusal(change) == (
    f"config.phases[0]: from_step = {since!r} must be a step after 1, where "
    "the phase before begins"
  )
  for again in (5, 4):
    line = refusal({"from_step": 5, "n": 256}, {"from_step": again, "n": 128})
    assert line == (
      f"config.phases[1]: from_step = {again} must be a step after 5, where "
      "the phase before begins"
    )


@pytest.mark.parametrize(
  "change, line",
  [
    ({"clip_lwo": 0.1}, "clip_lwo cannot change during a run; did you mean "
     "clip_low?"),
    ({"xyzzy": 1}, "xyzzy cannot change during a run"),
    ({"seed": 1}, "seed cannot change during a run"),
    ({"steps": 9}, "steps cannot change during a run"),
    ({"phases": ()}, "phases cannot change during a run"),
    ({4: 1}, "4 cannot change during a run"),
    ({"lr": None}, "lr = None must be a value"),
  ],
)  # fmt: skip
def test_a_phase_changes_fields_that_may_change(change, line):
  assert refusal({"from_step": 7} | change) == f"config.phases[0]: {line}"


@pytest.mark.parametrize(
  "field, value", [("n", "256"), ("n", 256.5), ("lr", "1"), ("length_wrong", 1)]
)
def test_a_phase_has_values_of_the_right_type(field, value):
  line = refusal({"from_step": 7, field: value})
  kind = {"n": "int", "lr": "float", "length_wrong": "bool"}[field]
  assert line == f"config.phases[0]: {field} = {value!r} must be {kind}"


def test_the_config_of_every_phase_is_checked():
  assert refusal({"from_step": 7, "n": 500}) == (
    "phase from step 7: config.samples = 16384 must be a multiple of n = 500"
  )
  # What an earlier phase changed counts.
  line = refusal(
    {"from_step": 3, "dual_clip": 3.0}, {"from_step": 9, "loss": "gspo"}
  )
  assert line == (
    "phase from step 9: config.dual_clip = 3.0 must be 0 with loss = 'gspo', "
    "which has none"
  )


def test_every_field_of_a_phase_is_a_field():
  assert set(config()) >= settings.PHASED


# -------------------------------------------------------------------- folders


def check(workdir, *, allow_change=False, **changes):
  return folder.check(config(**changes), workdir, allow_change=allow_change)


def test_a_folder_is_not_a_run_before_its_config_is_written(tmp_path):
  check(tmp_path)  # empty
  check(tmp_path / "not" / "made")
  assert list(tmp_path.iterdir()) == []
  workdir = tmp_path / "deep" / "run"
  with lock.hold(workdir):
    check(workdir)
    folder.write_config(config(), workdir)
  check(workdir)
  names = sorted(p.name for p in workdir.iterdir())
  assert names == [".lock", "config.json"]


def test_one_process_at_a_time(tmp_path):
  with (
    lock.hold(tmp_path),
    pytest.raises(settings.UserError, match=f"by process {os.getpid()}$"),
  ):
    lock.hold(tmp_path)
  lock.hold(tmp_path).close()  # free again


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(settings.UserError, match="cannot be written"):
    lock.hold(tmp_path / "file" / "run")


def test_a_start_that_is_refused_leaves_the_lock_as_it_was(tmp_path):
  workdir = tmp_path / "run"
  with lock.hold(workdir) as held:
    held.undo()
  assert list(workdir.iterdir()) == []
  (workdir / ".lock").write_text("12345\n")
  with lock.hold(workdir) as held:
    assert (workdir / ".lock").read_text() == f"{os.getpid()}\n"
    held.undo()
  assert (workdir / ".lock").read_text() == "12345\n"


@pytest.mark.parametrize("name", ["x" * 300, "y" * 256 + "/b", "a\0b"])
def test_a_name_that_cannot_be_is_one_line(tmp_path, name):
  for refuse in (
    check,
    folder.check_again,
    folder.check_empty,
    lambda workdir: folder.check(config(), workdir, allow_change=True),
  ):
    with pytest.raises(settings.UserError) as e:
      refuse(tmp_path / name)
    assert str(e.value).startswith("workdir '") and "\n" not in str(e.value)
  assert list(tmp_path.iterdir()) == []


def test_a_workdir_may_begin_with_the_home_folder(tmp_path):
  run = "app.run(command.main, flags_parser=settings.parse_flags)"
  at_home = f"import os; os.environ['HOME'] = {str(tmp_path)!r}\n{run}"
  code = STUB.replace("FAILS", "").replace(run, at_home)
  config = "--config=configs/n16.py"
  done = command(config, "--workdir=~/a b", code=code)
  assert done.stdout == f"0.0003 16 1.0  {tmp_path}/a b False\n", done.stderr
  said = message(command(config, "--workdir=~nobody-has-it/x", code=code))
  assert said.startswith("workdir ~nobody-has-it/x: ")


def test_what_the_system_refuses_is_one_line():
  fails = "raise OSError(28, 'No space left on device', '/a/b')"
  code = STUB.replace("FAILS", fails)
  done = command("--config=configs/n16.py", "--workdir=w", code=code)
  assert done.returncode == 2
  assert done.stderr == "error: /a/b: No space left on device\n"


@pytest.mark.parametrize("mode", ["evaluate", "plan", "export", "report"])
def test_only_training_begins_again(mode):
  config = [] if mode == "report" else ["--config=configs/n16.py"]
  flags = [*config, "--workdir=w", f"--mode={mode}", "--begin_again"]
  assert message(command(*flags)) == f"--begin_again is not for --mode={mode}"


@pytest.mark.parametrize(
  "field, value",
  [
    ("data", ["seed"]),
    ("data", "seed"),
    ("run", 3),
    ("machine", "a"),
    ("earlier", {}),
    ("earlier", [3]),
    ("earlier", [{"config": []}]),
  ],
)
def test_a_field_of_config_json_that_no_run_writes_is_one_line(
  tmp_path, field, value
):
  path = tmp_path / "config.json"
  folder.write_config(config(), tmp_path)
  path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
  with pytest.raises(settings.UserError) as e:
    check(tmp_path, allow_change=True)
  start = (
    f"{path}: {field!r} is not as a run writes it; bring back what is missing"
  )
  assert str(e.value).startswith(start) and "\n" not in str(e.value)


@pytest.mark.parametrize("name", ["checkpoints", "metrics.jsonl"])
def test_a_run_without_its_config_is_told_the_way_back(tmp_path, name):
  (tmp_path / name).touch()
  with pytest.raises(settings.UserError) as e:
    check(tmp_path)
  said = str(e.value)
  assert said.startswith(
    f"{tmp_path}/config.json is gone; bring back what is missing"
  )
  assert "--begin_again" in said and "on another workdir writes it" in said


def test_the_identity_of_a_run_is_of_what_it_began_with():
  of = lambda data="d", **changes: folder.identity(config(**changes), data)
  assert of() == of(steps=7, save_every=3, keep_checkpoints=9) == of("d")
  assert len({of(), of("other"), of(lr=0.5), of(seed=9), of(eval_n=3)}) == 5


def test_set_aside_counts(tmp_path):
  assert folder.set_aside(tmp_path) is None
  for count in (1, 2, 3):
    (tmp_path / "metrics.jsonl").write_text(f"{count}")
    (tmp_path / ".lock").touch()
    assert folder.set_aside(tmp_path) == tmp_path / "set_aside" / f"{count}"
  left = {p.name for p in tmp_path.iterdir()}
  assert left == {".lock", "set_aside"}
  for count in (1, 2, 3):
    path = tmp_path / "set_aside" / f"{count}" / "metrics.jsonl"
    assert path.read_text() == f"{count}"
  check(tmp_path)  # a folder in which a run may begin
  assert folder.begun(tmp_path) is None


def test_config_json_keeps_what_ran_before(tmp_path):
  folder.write_config(config(lr=0.5), tmp_path)
  folder.write_config(config(lr=0.5), tmp_path)
  read = lambda: json.loads((tmp_path / "config.json").read_text())
  assert "earlier" not in read()
  folder.write_config(config(lr=0.25), tmp_path)
  folder.write_config(config(lr=0.125), tmp_path)
  assert read()["config"]["lr"] == 0.125
  assert [e["config"]["lr"] for e in read()["earlier"]] == [0.5, 0.25]


def test_a_run_that_was_killed_while_it_began_can_begin_again(tmp_path):
  (tmp_path / "config.json.part").write_text('{"conf')
  check(tmp_path)
  folder.write_config(config(), tmp_path)
  check(tmp_path)


def test_config_json_tells_what_ran(tmp_path):
  folder.write_config(config(lr=0.5), tmp_path)
  record = json.loads((tmp_path / "config.json").read_text())
  assert record["config"]["lr"] == 0.5
  assert record["config"]["families"]["gcd"]["settings"]["max_value"] == 40
  assert record["python"] == ".".join(map(str, sys.version_info[:3]))
  assert record["versions"].keys() >= {"jax", "flax", "optax", "numpy"}
  import jax

  assert record["versions"]["jax"] == jax.__version__
  assert "git_commit" in record


def test_names_the_commit(tmp_path, monkeypatch):
  answer = subprocess.CompletedProcess([], 0, stdout="abc-dirty\n")
  monkeypatch.setattr(folder.subprocess, "run", lambda *_, **__: answer)
  folder.write_config(config(), tmp_path)
  path = tmp_path / "config.json"
  assert json.loads(path.read_text())["git_commit"] == "abc-dirty"

  def no_git(*_, **__):
    raise FileNotFoundError("git")

  monkeypatch.setattr(folder.subprocess, "run", no_git)
  folder.write_config(config(), tmp_path)
  assert json.loads(path.read_text())["git_commit"] is None


def test_refuses_a_run_of_another_config(tmp_path):
  folder.write_config(config(), tmp_path)
  before = (tmp_path / "config.json").read_bytes()
  with pytest.raises(settings.UserError) as e:
    check(tmp_path, lr=0.5, dtype="bfloat16")
  assert str(e.value) == (
    f"workdir {tmp_path} belongs to a run with dtype = 'float32' (now "
    "'bfloat16'), lr = 0.0003 (now 0.5); choose another, or pass "
    "--allow_config_change"
  )
  changed = {"families": {"gcd": {"weight": 2.0}}}
  with pytest.raises(
    settings.UserError, match=r"families\.gcd\.weight = 1\.0 \(now 2\.0\);"
  ):
    check(tmp_path, **changed)
  check(tmp_path, lr=0.5, allow_change=True)
  assert (tmp_path / "config.json").read_bytes() == before


def test_phases_belong_to_a_run(tmp_path):
  phases = ({"from_step": 3, "n": 256}, {"from_step": 7, "lr": 1e-4})
  folder.write_config(config(phases=phases), tmp_path)
  check(tmp_path, phases=phases)
  with pytest.raises(settings.UserError, match=r"phases = .*'n': 256"):
    check(tmp_path, phases=phases[1:])


def test_names_a_field_that_only_one_of_them_has(tmp_path):
  older = config()
  older.gone = 7
  del older.rows
  folder.write_config(older, tmp_path)
  with pytest.raises(
    settings.UserError,
    match=r"gone = 7 \(now None\), rows = None \(now 32\);",
  ):
    check(tmp_path)


@pytest.mark.parametrize(
  "field",
  ["steps", "save_every", "max_busy_s", "keep_checkpoints", "samples_shown"],
)
def test_some_fields_may_change(tmp_path, field):
  folder.write_config(config(), tmp_path)
  check(tmp_path, **{field: type(config()[field])(7)})


def test_the_other_fields_may_not(tmp_path):
  folder.write_config(config(), tmp_path)
  free = {"steps", "save_every", "max_busy_s", "keep_checkpoints"}
  free |= {"samples_shown"}
  numbers = {
    k: v
    for k, v in config().items()
    if isinstance(v, (int, float)) and k not in free
  }
  assert len(numbers) > 20
  for field, value in numbers.items():
    other = not value if isinstance(value, bool) else value + 1
    with pytest.raises(settings.UserError, match=rf" {field} = "):
      check(tmp_path, **{field: other})


@pytest.mark.parametrize(
  "was, now", [("train", "evaluate"), ("evaluate", "train")]
)
def test_refuses_a_folder_of_another_mode(tmp_path, was, now):
  folder.write_config(
    config(), tmp_path, **{"mode": was} if now == "train" else {}
  )
  for allow in (False, True):
    with pytest.raises(settings.UserError) as e:
      folder.check(config(), tmp_path, allow_change=allow, mode=now)
    assert str(e.value) == (
      f"workdir {tmp_path} belongs to --mode={was}, this is --mode={now}; "
      "choose another"
    )
  folder.check(config(), tmp_path, allow_change=False, mode=was)


def test_refuses_a_folder_of_something_else(tmp_path):
  (tmp_path / "thesis.tex").touch()
  with pytest.raises(settings.UserError, match="holds files that are no run"):
    check(tmp_path)
  with pytest.raises(settings.UserError, match="holds files that are no run"):
    check(tmp_path, allow_change=True)


def test_refuses_a_file(tmp_path):
  file = tmp_path / "file"
  file.touch()
  for workdir in (file, file / "run", file / "a" / "b"):
    with pytest.raises(settings.UserError, match=rf"{file} is not a folder"):
      check(workdir)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_refuses_what_it_may_not_write(tmp_path):
  for mode in (0o500, 0o300, 0o600):
    tmp_path.chmod(mode)
    for workdir in (tmp_path, tmp_path / "run"):
      with pytest.raises(settings.UserError, match="cannot be read and"):
        check(workdir)
  tmp_path.chmod(0o700)


def test_asks_the_system_whether_it_may_write(tmp_path, monkeypatch):
  asked = []
  monkeypatch.setattr(folder.os, "access", lambda *a: asked.append(a))
  with pytest.raises(
    settings.UserError,
    match=rf"workdir .*: {tmp_path} cannot be read and written",
  ):
    check(tmp_path / "a" / "b")
  assert asked == [(tmp_path, os.R_OK | os.W_OK | os.X_OK)]


@pytest.mark.parametrize(
  "text", ["", '{"config": ', "[]", "{}", '{"config": 3}', "null", "\x00"]
)
def test_refuses_a_config_json_that_cannot_be_read(tmp_path, text):
  (tmp_path / "config.json").write_text(text)
  with pytest.raises(
    settings.UserError, match=r"config\.json cannot be read: "
  ) as e:
    check(tmp_path, allow_change=True)
  assert "\n" not in str(e.value)


def test_refuses_a_config_json_that_is_a_folder(tmp_path):
  (tmp_path / "config.json").mkdir()
  with pytest.raises(settings.UserError, match="cannot be read"):
    check(tmp_path)


def test_flatten_by_hand():
  assert settings.flatten({"a": 1, "b": {"c": [2], "d": {"e": {}}}}) == {
    "a": 1,
    "b.c": [2],
  }
