"""Checks of flags and config values, before anything is loaded."""

import difflib
import functools
import importlib.util
import itertools
import operator
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from brorl_jax import config
from brorl_jax.config.section import Rule
from brorl_jax.errors import UserError
from brorl_jax.main import rules

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
    _check(phase.config, rules.training, phase.where)
  return out


def check_simulation(c: ConfigDict, surrogates: tuple[str, ...]) -> None:
  """Raises UserError for the first invalid value."""
  _check(c, functools.partial(rules.simulation, surrogates=surrogates))


def _check(
  c: Any, conditions: Callable[[Any], Iterator[Rule]], where: str = ""
) -> None:
  try:
    for field, good, must in conditions(c):
      if not good:
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
