"""Checks of flags and config values, before anything is loaded.

What a single field of a training config allows is in config/; what its sections
must meet together is here, as (field, whether it holds, what it must be).
"""

import difflib
import functools
import importlib.util
import itertools
import math
import operator
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from brorl_jax import config
from brorl_jax.config.sampling import Sampling
from brorl_jax.config.section import Rule
from brorl_jax.errors import UserError

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"

# Messages of Python for a value of the wrong type, in plain English.
_BETTER = {
  r"invalid literal for int\(\) with base 10: (.*)": r"\1 is not an integer",
  r"could not convert string to float: (.*)": r"\1 is not a number",
  r"\('Non-boolean argument to boolean flag', (.*)\)": r"\1 is not a boolean",
}
# Names of fields in other trainers.
_ELSEWHERE = {
  "learning_rate": "optim.lr",
  "num_generations": "sampling.n",
  "rollout_n": "sampling.n",
  "max_completion_length": "sampling.max_new_tokens",
  "max_prompt_length": "data.prompt_tokens",
  "beta": "reference.kl_weight",
  "epsilon": "loss.clip_low",
  "epsilon_high": "loss.clip_high",
  "loss_type": "loss.kind",
  "model": "policy.checkpoint",
  "model_name_or_path": "policy.checkpoint",
  "dataset": "data.files",
  "train_files": "data.files",
}


def parse_flags(argv: list[str]) -> list[str]:
  """absl's parser with errors in one line instead of a traceback."""
  try:
    argv = [argv[0], *_found_configs(argv[1:])]
    _check_overrides(argv[1:])
    return flags.FLAGS(argv)
  except UserError as e:
    line = str(e)
  except flags.UnrecognizedFlagError as e:
    known = [*flags.FLAGS]
    line = f"there is no --{e.flagname}{_hint(e.flagname, known, '--')}"
  except Exception as e:
    line = (str(e).strip() or type(e).__name__).splitlines()[0]
    for pattern, better in _BETTER.items():
      line = re.sub(pattern, better, line)
  print(f"error: {line}", file=sys.stderr)
  sys.exit(2)


def _found_configs(args: list[str]) -> list[str]:
  """The arguments with --config=n512:1p5b replaced by a file of the package."""
  out, value = [], False
  for arg in args:
    name, equals, given = arg.partition("=")
    if value:
      out.append(_config_path(arg))
    elif name in ("-config", "--config") and equals:
      out.append(f"{name}={_config_path(given)}")
    else:
      out.append(arg)
    value = arg in ("-config", "--config")
  return out


def _config_path(given: str) -> str:
  """A path as given, or the package's file for a name without a suffix.

  Outside the repository configs/n512.py also means the package's file, if there
  is no such file.
  """
  file, colon, rest = given.partition(":")
  path = pathlib.PurePath(file)
  if path.suffix == "" and len(path.parts) == 1:
    packaged = CONFIGS / f"{file}.py"
  elif path.parts[:-1] == ("configs",) and not pathlib.Path(file).exists():
    packaged = CONFIGS / path.name
  else:
    return given
  return f"{packaged}{colon}{rest}" if packaged.is_file() else given


def _check_overrides(args: list[str]) -> None:
  """Checks that the config file and the fields on the command line exist.

  ml_collections would raise a traceback without a close match.
  """
  file, given = None, []
  for arg, after in itertools.pairwise([*args, ""]):
    if arg == "--":
      break
    name, equals, value = arg.partition("=")
    if name in ("-config", "--config"):
      file = value if equals else after
    elif match := re.match(r"--?(?:no)?config\.([\w.]+)", name):
      given.append(match[1])
  if file is None:
    return
  if not file:
    raise UserError(
      "--config is empty; give a file, or the name of a packaged config: n512"
    )
  path = pathlib.Path(file.partition(":")[0])
  if not path.is_file():
    near = [str(p) for p in path.parent.glob("[!_]*.py")]
    near += (
      [p.stem for p in CONFIGS.glob("[!_]*.py")] if not path.suffix else []
    )
    raise UserError(
      f"config file {path} does not exist{_hint(str(path), near)}"
    )
  holder = flags.FlagValues()
  argv = ["", f"--config={file}"]
  config_flags.DEFINE_config_file("config", flag_values=holder, sys_argv=argv)
  try:
    holder(argv)
    fields = list(config.flat(holder.config.to_dict()))
  except (Exception, SystemExit) as e:  # a config is code: any error
    raise UserError(f"config file {path}: {_first_line(e)}") from None
  for name in given:
    if name not in fields:
      raise UserError(_no_field(name, fields))


def _no_field(name: str, fields: list[str]) -> str:
  """The error for an unknown --config.NAME, with the name that was meant."""
  unknown = f"there is no --config.{name}"
  if (meant := _ELSEWHERE.get(name.rpartition(".")[2])) in fields:
    return f"{unknown}; it is --config.{meant} here"
  same = [f for f in fields if f.endswith(f".{name}")]
  if len(same) == 1:
    return f"{unknown}; did you mean --config.{same[0]}?"
  # Also finds a misspelt field that is given without its section.
  ends = {f.rpartition(".")[2]: f for f in fields}
  close = difflib.get_close_matches(name, ends, 1, cutoff=0.7)
  if "." not in name and close:
    return f"{unknown}; did you mean --config.{ends[close[0]]}?"
  return unknown + _hint(name, fields, "--config.")


def _first_line(error: BaseException) -> str:
  """The cause of an error, without the words that ml_collections adds."""
  messages: list[str] = []
  cause: BaseException | None = error
  while cause is not None:
    messages += [line for line in str(cause).splitlines() if line.strip()][:1]
    cause = cause.__cause__ or cause.__context__
  useful = [line for line in messages if "whilst parsing" not in line]
  text = (useful or [type(error).__name__])[0].strip()
  quoted = text[:1] in "\"'" and text[-1:] == text[:1]
  return _plain(text[1:-1] if quoted and len(text) > 1 else text)


def _plain(text: str) -> str:
  """An error of a config file in plain English."""
  unknown = re.match(r"Key \W*([\w.]+)\W* does not exist", text)
  known = [*config.every_field()]
  if unknown:
    return _no_field(unknown[1], known).replace("--config.", "c.")
  if "No module named 'configs" in text:
    return (
      "there is no module configs; write `from brorl_jax.configs import ...`"
    )
  if "has no attribute 'get_config" in text:
    return "the function get_config is missing"
  if "NoneType' object has no attribute 'to_dict" in text:
    return "get_config returns nothing; end it with `return c`"
  return text.partition(" Did you mean")[0].partition("Other fields")[0].strip()


def _hint(given: str, known: list[str], prefix: str = "") -> str:
  close = difflib.get_close_matches(given, known, 1, cutoff=0.5)
  if close:
    return f"; did you mean {prefix}{close[0]}?"
  return "; brorl_jax/config/ lists all fields" if "config" in prefix else ""


def typed(
  c: ConfigDict, kind: type[config.Made] = config.Config
) -> config.Made:
  """A parsed config as typed sections; raises UserError for a wrong value."""
  try:
    return config.of(c.to_dict(), kind)
  except config.Wrong as e:
    raise UserError(f"config.{e}") from None
  except KeyError as e:
    raise _missing(e) from None


def training(c: ConfigDict) -> config.Config:
  """A parsed config of a run, of which all phases work.

  Raises:
    UserError: A value is wrong, or sections do not go together in some phase.
  """
  out = typed(c)
  if out.run.wandb and importlib.util.find_spec("wandb") is None:
    raise UserError(
      f"config.run.wandb = {out.run.wandb!r} needs the package wandb; pip "
      "install 'brorl_jax[wandb]'"
    )
  try:
    phases = out.phases
  except config.Wrong as e:
    raise UserError(f"config.{e}") from None
  for phase in phases:
    _check(phase.config, training_rules, phase.where)
  return out


def training_rules(c: config.Config) -> Iterator[Rule]:
  """Conditions between fields of different sections."""
  for field in ("heldout_files", "fields", "domain"):
    holds = not getattr(c.data, field) or bool(c.data.files)
    yield f"data.{field}", holds, "empty without data.files"
  yield from _sampling_rules(c.sampling)
  prompts, pool = c.sampling.prompts, c.data.distinct_prompts
  yield (
    "loss.mean",
    not c.sampling.rounds or c.loss.mean != "prompt",
    "another one with sampling.rounds, where prompts have equal weight",
  )
  yield (
    "optim.minibatches",
    prompts % c.optim.minibatches == 0,
    f"a divisor of samples / n = {prompts} prompts",
  )
  every_one = pool == prompts and c.filter.keep == "all"
  yield (
    "data.distinct_prompts",
    pool == 0 or pool > prompts or every_one,
    f"0, or more than the {prompts} prompts of a step: some are rejected",
  )
  most = c.sampling.max_new_tokens
  yield (
    "reward.overlong_buffer",
    1 <= c.reward.overlong_buffer <= most or not c.reward.overlong_weight,
    f"1 to max_new_tokens = {most}",
  )
  yield from _count_rules(c)
  yield (
    "loss.correction",
    not c.run.pipeline or c.loss.correction != "none",
    "other than 'none' with run.pipeline: rollouts then come from the policy "
    "before the last update",
  )


def _count_rules(c: config.Config) -> Iterator[Rule]:
  """Of advantages that follow from the numbers of right and wrong rollouts."""
  shaped = c.reward.length_weight and c.reward.length_min < 0.0
  yield (
    "advantage.kind",
    c.advantage.kind not in ("maxrl", "pass_at_k")
    or not (shaped or c.reward.overlong_weight),
    "another kind if the reward depends on the length: it takes the mean "
    "reward for the share of right rollouts",
  )
  name, fewest = _fewest(c.sampling)
  yield (
    "advantage.k",
    c.advantage.kind != "pass_at_k" or c.advantage.k <= fewest // 4,
    f"at most {name} / 4 = {fewest // 4}: other groups hold too few wrong ones",
  )


def _fewest(c: Sampling) -> tuple[str, int]:
  """The fewest rollouts of a prompt: the field, and its value."""
  return ("rounds[0]" if c.rounds else "n"), c.chunk


def _sampling_rules(c: Sampling) -> Iterator[Rule]:
  """How many rollouts a prompt may get."""
  n, (name, chunk) = c.n, _fewest(c)
  must = "at least 2: a rollout is compared with the mean of its group"
  yield "sampling.n", n >= 2, must
  yield "sampling.samples", c.samples % n == 0, f"a multiple of n = {n}"
  if c.rounds:
    yield "sampling.rounds", chunk >= 2, "at least 2 in the first round"
    yield (
      "sampling.rounds",
      c.rounds[-1] == n and all(m % chunk == 0 for m in c.rounds),
      f"multiples of the first, {chunk}, the last of them n = {n}",
    )
    yield (
      "sampling.stop_right",
      c.stop_right + c.stop_wrong <= n,
      f"at most n - stop_wrong = {n - c.stop_wrong}: else no prompt stops",
    )
  must = f"a multiple of {name} = {chunk}"
  yield "sampling.in_flight", c.in_flight % chunk == 0, must


def simulation_rules(c: Any, surrogates: tuple[str, ...]) -> Iterator[Rule]:
  """Of the token simulator."""
  for field in ("seeds", "steps", "vocab"):
    yield field, c[field] >= 1, "at least 1"
  for field in ("n", "dense_n"):
    whole = all(isinstance(n, int) and n >= 1 for n in c[field])
    yield field, whole, "integers of at least 1"
  yield "n", len(c.n) >= 1, "at least one number"
  yield "seed", 0 <= c.seed < 2**31, "0 to 2**31 - 1"
  must = f"1 to vocab - 1 = {c.vocab - 1}"
  yield "correct", 1 <= c.correct < c.vocab, must
  must = f"one of {', '.join(surrogates)}"
  yield "surrogate", c.surrogate in surrogates, must
  for field in ("lr", "eps", "sgd_lr"):
    yield field, 0.0 < c[field] < math.inf, "positive"
  for field in ("b1", "b2"):
    yield field, 0.0 <= c[field] < 1.0, "at least 0 and below 1"
  yield "weight_decay", 0.0 <= c.weight_decay < math.inf, "0 or positive"
  yield "seeding", math.isfinite(c.seeding), "finite"
  holds = c.anchor is None or math.isfinite(c.anchor)
  yield "anchor", holds, "finite, or None"


def check_simulation(c: ConfigDict, surrogates: tuple[str, ...]) -> None:
  """Raises UserError for the first invalid value."""
  _check(c, functools.partial(simulation_rules, surrogates=surrogates))


def _check(
  c: Any, conditions: Callable[[Any], Iterator[Rule]], where: str = ""
) -> None:
  try:
    for field, holds, must in conditions(c):
      if not holds:
        value = functools.reduce(_get, field.split("."), c)
        raise UserError(f"{where}config.{field} = {value!r} must be {must}")
  except (AttributeError, KeyError) as e:
    raise _missing(e) from None


def _missing(error: Exception) -> UserError:
  field = str(error.args[0]).splitlines()[0].strip("\"'")
  return UserError(f"config.{field} is missing; use a config of this --mode")


def _get(c: Any, name: str) -> Any:
  return (
    operator.getitem(c, name) if isinstance(c, ConfigDict) else getattr(c, name)
  )
