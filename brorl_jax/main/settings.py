"""Checks of flags and config values, before anything is loaded.

What a single field of a config allows is in config/; what its sections must
meet together is here, as (field, whether it holds, what it must be).
"""

import contextlib
import difflib
import functools
import importlib.util
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from brorl_jax import config
from brorl_jax.config.sampling import Sampling
from brorl_jax.config.section import Rule
from brorl_jax.errors import UserError, first_line

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
  **dict.fromkeys(("num_generations", "rollout_n"), "sampling.n"),
  "max_completion_length": "sampling.max_new_tokens",
  "max_prompt_length": "data.prompt_tokens",
  "beta": "reference.kl_weight",
  "epsilon": "loss.clip_low",
  "epsilon_high": "loss.clip_high",
  "loss_type": "loss.kind",
  **dict.fromkeys(("model", "model_name_or_path"), "policy.checkpoint"),
  **dict.fromkeys(("dataset", "train_files"), "data.files"),
}
# How alike a name must be that is proposed; less misleads.
_ALIKE = 0.8


def parse_flags(argv: list[str]) -> list[str]:
  """absl's parser with errors in one line instead of a traceback."""
  try:
    return flags.FLAGS([argv[0], *_checked(argv[1:])])
  except SystemExit:  # of --help, with the status of a failure
    sys.exit(0)
  except UserError as e:
    line = str(e)
  except flags.UnrecognizedFlagError as e:
    field = _no_field(e.flagname, [*config.every_field()], "--config.")
    hint = _hint(e.flagname, [*flags.FLAGS], "--") or field[field.find(";") :]
    line = f"there is no --{e.flagname}{hint}"
  except Exception as e:
    line = first_line(e)
    for pattern, better in _BETTER.items():
      line = re.sub(pattern, better, line)
  print(f"error: {line}", file=sys.stderr)
  sys.exit(2)


def _checked(args: list[str]) -> list[str]:
  """The arguments, with the path of the package's file for --config=n512.

  Raises UserError for a config file or a field that does not exist, of which
  ml_collections would raise a traceback without a close match.
  """
  out, fields = list[str](), list[str]()
  given, rest = None, iter(args)
  for arg in rest:
    name, equals, value = arg.partition("=")
    if name in ("-config", "--config"):
      given = value if equals else next(rest, "")
      arg = f"--config={(path := _config_path(given))}"
      if path != given and "/" in given:
        print(f"{given} is not here: using {path}", file=sys.stderr)
    elif match := re.match(r"--?(?:no)?config\.([\w.]+)", name):
      fields.append(match[1])
    out.append(arg)
  if given is None:
    return out
  require_fields(fields, read(given), "--config.")
  return out


def require_fields(names: Iterable[str], c: ConfigDict, prefix: str) -> None:
  """Raises UserError, with the close match, for a field that is not there."""
  known = [*config.flat(c.to_dict())]
  for name in names:
    if name not in known:
      raise UserError(_no_field(name, known, prefix))


def _config_path(given: str) -> str:
  """A path as given, or the package's file: for a name without a suffix, and
  for configs/n512.py where there is no such file.
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


def read(file: str) -> ConfigDict:
  """The config that a file makes; raises UserError if it does not run."""
  file = _config_path(file)
  if not file:
    must = "give a file, or the name of a packaged config: n512"
    raise UserError(f"--config is empty; {must}")
  path = pathlib.Path(file.partition(":")[0])
  if not path.is_file():
    near = [str(p) for p in path.parent.glob("[!_]*.py")]
    near += [p.stem for p in CONFIGS.glob("[!_]*.py")]
    raise UserError(f"config file {path} is missing{_hint(str(path), near)}")
  holder = flags.FlagValues()
  argv = ["", f"--config={file}"]
  config_flags.DEFINE_config_file("config", flag_values=holder, sys_argv=argv)
  try:
    holder(argv)
    if holder.config is None:
      raise ValueError("get_config returns nothing; end it with `return c`")
    return holder.config
  except (Exception, SystemExit) as e:  # a config is code: any error
    raise UserError(f"config file {path}: {_cause(e)}") from None


def _cause(error: BaseException) -> str:
  """Why a config file does not run, without the words of ml_collections."""
  cause: BaseException | None = error
  text = type(error).__name__
  while cause is not None:
    if (line := str(cause).strip()) and "whilst parsing" not in line:
      text = line.splitlines()[0].strip()
      break
    cause = cause.__cause__ or cause.__context__
  if unknown := re.match(r"\W*Key \W*([\w.]+)\W* does not exist", text):
    return _no_field(unknown[1], [*config.every_field()], "c.")
  text = text.partition(" Did you mean")[0].partition("Other fields")[0]
  quoted = text[:1] in "\"'" and text[:1] == text[-1:]
  return text[quoted : len(text) - quoted].strip()


def _no_field(name: str, fields: list[str], prefix: str) -> str:
  unknown = f"there is no {prefix}{name}"
  if (meant := _ELSEWHERE.get(name.rpartition(".")[2])) in fields:
    return f"{unknown}; it is {prefix}{meant} here"
  # Of the same section, or of all for a name without one: the shortest.
  section, _, last = name.rpartition(".")
  near = {
    field.rpartition(".")[2]: field
    for field in sorted(fields, key=len, reverse=True)
    if not section or field.rpartition(".")[0] == section
  }
  if close := difflib.get_close_matches(last, near, 1, cutoff=_ALIKE):
    return f"{unknown}; did you mean {prefix}{near[close[0]]}?"
  hint = "" if near else _hint(name, fields, prefix)
  return unknown + (hint or "; brorl_jax/config/ lists all fields")


def _hint(given: str, known: list[str], prefix: str = "") -> str:
  close = difflib.get_close_matches(given, known, 1, cutoff=_ALIKE)
  return f"; did you mean {prefix}{close[0]}?" if close else ""


@contextlib.contextmanager
def _as_user_error() -> Iterator[None]:
  """A wrong or missing field ends the command."""
  try:
    yield
  except config.Wrong as e:
    raise UserError(f"config.{e}") from None
  except (AttributeError, KeyError) as e:
    field = str(e.args[0]).splitlines()[0].strip("\"'")
    must = "use a config of this --mode"
    raise UserError(f"config.{field} is missing; {must}") from None


@_as_user_error()
def typed(c: ConfigDict) -> config.Config:
  """A parsed config as typed sections; raises UserError for a wrong value."""
  return config.of(c.to_dict())


@_as_user_error()
def training(c: ConfigDict) -> config.Config:
  """A parsed config of a run; raises UserError if a phase of it cannot work."""
  out = typed(c)
  if out.run.wandb and importlib.util.find_spec("wandb") is None:
    needs = f"config.run.wandb = {out.run.wandb!r} needs the package wandb"
    raise UserError(f"{needs}; pip install 'brorl_jax[wandb]'")
  for phase in out.phases:
    check(phase.config, training_rules, phase.where)
  return out


@_as_user_error()
def check(c: Any, rules: Callable[[Any], Iterator[Rule]], where="") -> None:
  """Raises UserError for the first rule that a config breaks."""
  for field, holds, must in rules(c):
    if not holds:
      value = functools.reduce(getattr, field.split("."), c)
      raise UserError(f"{where}config.{field} = {value!r} must be {must}")


def training_rules(c: config.Config) -> Iterator[Rule]:
  """Conditions between fields of different sections."""
  for field in ("heldout_files", "fields", "domain"):
    holds = not getattr(c.data, field) or bool(c.data.files)
    yield f"data.{field}", holds, "empty without data.files"
  yield from _sampling_rules(c.sampling)
  prompts = c.sampling.prompts
  must = "another one with sampling.rounds, where prompts weigh the same"
  yield "loss.mean", not c.sampling.rounds or c.loss.mean != "prompt", must
  must = f"a divisor of samples / n = {prompts} prompts"
  yield "optim.minibatches", prompts % c.optim.minibatches == 0, must
  (low, high), most = c.reward.length_range, c.sampling.max_new_tokens
  holds = (low <= 0.0 and high >= 0.5) or c.reward.length != "replace"
  must = "such as (-0.5, 1.0) with length = 'replace': at the limit 0 and 0.5"
  yield "reward.length_range", holds, must
  holds = c.reward.length_buffer <= most or c.reward.length != "overlong"
  yield "reward.length_buffer", holds, f"1 to max_new_tokens = {most}"
  if c.reference.reset_to == "best":
    yield from _best_rules(c)
  must = "0 with sampling.rounds, which follow from verdicts"
  yield "run.max_age", not (c.run.max_age and c.sampling.rounds), must
  if c.policy.lora_rank:
    must = "0 with policy.lora_rank: the reference is the policy without LoRA"
    for field in ("reset_every", "reset_stalled"):
      resets = c.reference.kl_weight and getattr(c.reference, field)
      yield f"reference.{field}", not resets, must
    must = "'nothing' or 'moments' with policy.lora_rank: no reference is kept"
    yield "devices.offload", c.devices.offload != "reference", must
  # Of advantages that follow from the numbers of right and wrong rollouts.
  counts = c.advantage.k or c.advantage.kind == "maxrl"
  shaped = (c.reward.length and low < 0.0) or c.reward.repeat_penalty[0]
  must = "another kind if the reward depends on the length: it takes the mean "
  must += "reward for the share of right rollouts"
  yield "advantage.kind", not (counts and shaped), must
  name = "rounds[0]" if c.sampling.rounds else "n"
  most = c.sampling.chunk // 4
  must = f"'pass_at_k:K' with K of at most {name} / 4 = {most}: other groups "
  must += "hold too few wrong ones"
  yield "advantage.kind", c.advantage.k <= most, must


def _best_rules(c: config.Config) -> Iterator[Rule]:
  """That the policy can go back to the best of the evaluations so far."""
  r, every, save = c.reference, c.eval.every, c.run.save_every
  must = "'latest' without kl_weight, or without reset_every and reset_stalled"
  resets = bool(r.kl_weight and (r.reset_every or r.reset_stalled))
  yield "reference.reset_to", resets, must
  must = f"a multiple of run.save_every = {save} with reset_to = 'best'"
  yield "eval.every", every % save == 0, must
  must = f"at least eval.every = {every} with reset_to = 'best'"
  yield "reference.reset_every", not 0 < r.reset_every < every, must


def _sampling_rules(c: Sampling) -> Iterator[Rule]:
  n, chunk = c.n, c.chunk
  must = "at least 2: a rollout is compared with the mean of its group"
  yield "sampling.n", n >= 2, must
  yield "sampling.samples", c.samples % n == 0, f"a multiple of n = {n}"
  if c.rounds:
    yield "sampling.rounds", chunk >= 2, "at least 2 in the first round"
    holds = c.rounds[-1] == n and all(m % chunk == 0 for m in c.rounds)
    must = f"multiples of the first, {chunk}, the last of them n = {n}"
    yield "sampling.rounds", holds, must
    must = f"at most n = {n}: else no prompt stops"
    yield "sampling.stop_right", c.stop_right <= n, must
  name = "rounds[0]" if c.rounds else "n"
  must = f"a multiple of {name} = {chunk}"
  yield "sampling.in_flight", c.in_flight % chunk == 0, must
