"""What can be refused before anything is loaded: flags and values."""

import collections.abc
import difflib
import functools
import itertools
import math
import operator
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from absl import flags
from ml_collections import config_flags

ASSETS = pathlib.Path(__file__).parents[1] / "assets"  # embedded policy
# A ConfigDict; its fields are typed when flags are parsed, not statically.
Config = Any
CHOICES = {
  "dtype": ("float32", "bfloat16"),
  "second_moment": ("full", "factored"),
  "remat": ("layer", "products", "nothing"),
  "offload": ("nothing", "reference", "moments"),
  "keep": ("differ", "mean", "solved", "all"),
  "advantage": ("tokens", "trajectories", "grpo", "centered"),
  "credit": ("equal", "distinct", "inverse"),
  "loss": ("ppo", "gspo"),
  "correction": ("none", "truncated", "banded", "sequence"),
  "lr_scaling": ("none", "samples", "prompts"),
}
# What a phase may change: the data, the policy, and what state is made of stay.
PHASED = frozenset(
  "n samples in_flight slots lanes max_new_tokens max_oversampling temperature "
  "minibatches rows blocks keep keep_above keep_below rest_after rest_steps "
  "advantage credit truncated_factor mask_truncated length_weight length_min "
  "length_max length_wrong length_on length_off overlong_weight "
  "overlong_buffer loss clip_low clip_high dual_clip entropy_weight kl_weight "
  "kl_clamp correction correction_cap correction_low correction_high "
  "sequence_low sequence_high reset_every reset_above_kl reset_stalled "
  "reset_optimizer lr lr_scaling lr_base warmup".split()
)
Rule = tuple[str, bool, str]  # field, whether it can work, what it must be

# What Python says of a value of the wrong type, and what it means.
_BETTER = {
  r"invalid literal for int\(\) with base 10: (.*)": r"\1 is not an integer",
  r"could not convert string to float: (.*)": r"\1 is not a number",
  r"\('Non-boolean argument to boolean flag', (.*)\)": r"\1 is not a boolean",
}


class UserError(Exception):
  """What the user can mend, in one line."""


def parse_flags(argv: list[str]) -> list[str]:
  """absl's parser, with one line instead of a traceback."""
  try:
    _check_overrides(argv[1:])
    return flags.FLAGS(argv)
  except UserError as e:
    line = str(e)
  except flags.UnrecognizedFlagError as e:
    known = [*flags.FLAGS]
    line = f"there is no --{e.flagname}{_hint(e.flagname, known, '--')}"
  except Exception as e:
    line = (str(e).strip() or type(e).__name__).splitlines()[0]
    for said, better in _BETTER.items():
      line = re.sub(said, better, line)
  print(f"error: {line}", file=sys.stderr)
  sys.exit(2)


def _check_overrides(args: list[str]) -> None:
  """Config file and fields on the command line exist.

  ml_collections would say so too, in a traceback and without a close match.
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
    raise UserError("--config is empty; name a file of configs/")
  path = pathlib.Path(file.partition(":")[0])
  if not path.is_file():
    near = [str(p) for p in path.parent.glob("[!_]*.py")]
    raise UserError(f"config file {path} is missing{_hint(str(path), near)}")
  holder = flags.FlagValues()
  one = ["", f"--config={file}"]
  config_flags.DEFINE_config_file("config", flag_values=holder, sys_argv=one)
  try:
    holder(one)
    fields = list(flatten(holder.config.to_dict()))
  except (Exception, SystemExit) as e:  # it is code and may raise anything
    raise UserError(f"config file {path}: {_first_line(e)}") from None
  for name in given:
    if name not in fields:
      raise UserError(
        f"there is no --config.{name}{_hint(name, fields, '--config.')}"
      )


def _first_line(error: BaseException) -> str:
  """What went wrong, without the words that ml_collections puts around it."""
  said: list[str] = []
  cause: BaseException | None = error
  while cause is not None:
    said += [line for line in str(cause).splitlines() if line.strip()][:1]
    cause = cause.__cause__ or cause.__context__
  useful = [line for line in said if "whilst parsing" not in line]
  return useful[0].strip("\"' ") if useful else type(error).__name__


def _hint(given: str, known: list[str], prefix: str = "") -> str:
  close = difflib.get_close_matches(given, known, 1, cutoff=0.5)
  if close:
    return f"; did you mean {prefix}{close[0]}?"
  return "; configs/base.py lists all fields" if "config" in prefix else ""


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
  """Nested dict -> {"a.b": value}."""
  out = {}
  for key, value in values.items():
    if isinstance(value, dict):
      out |= flatten(value, f"{prefix}{key}.")
    else:
      out[prefix + key] = value
  return out


def check_training(c: Config) -> None:
  """Raises UserError at the first value that cannot work."""
  _check(c, _training_rules)

  def rules(c: Config) -> Iterator[Rule]:
    good = not c.data.heldout_files or bool(c.data.files)
    yield "data.heldout_files", good, "empty without data.files"

  _check(c, rules)
  for since, phase in phases(c)[1:]:
    _check(phase, _training_rules, f"phase from step {since}: ")


def check_evaluation(c: Config) -> None:
  """Raises UserError at the first value that cannot work; trains nothing.

  So what only training needs may be anything.
  """
  _check(c, _evaluation_rules)


def phases(c: Config) -> list[tuple[int, Config]]:
  """First step and config of each phase of a run; the first is c from step 1.

  Raises:
    UserError: A phase is not a dict of fields that may change, or out of order.
  """
  out = [(1, c)]
  for number, change in enumerate(c.phases):
    name = f"config.phases[{number}]"
    if not isinstance(change, collections.abc.Mapping):
      raise UserError(
        f"{name} = {change!r} must be a dict of fields; write "
        "({'from_step': 31, 'n': 512},)"
      )
    change = dict(change)
    since = change.pop("from_step", None)
    if not isinstance(since, int) or since <= out[-1][0]:
      raise UserError(
        f"{name}: from_step = {since!r} must be a step after {out[-1][0]}, "
        "where the phase before begins"
      )
    for field, value in change.items():
      if field not in PHASED:
        hint = "" if field in c else _hint(str(field), [*PHASED])
        raise UserError(f"{name}: {field} cannot change during a run{hint}")
      if value is None:  # which takes the place of any type
        raise UserError(f"{name}: {field} = None must be a value")
    phase = out[-1][1].copy_and_resolve_references()
    for field, value in change.items():
      try:
        phase[field] = value
      except (TypeError, ValueError):
        kind = type(phase[field]).__name__
        raise UserError(f"{name}: {field} = {value!r} must be {kind}") from None
    out.append((since, phase))
  return out


def check_warmup(c: Config) -> None:
  """Raises UserError at the first value that cannot work."""
  _check(c, _warmup_rules)


def check_simulation(c: Config, surrogates: tuple[str, ...]) -> None:
  """Raises UserError at the first value that cannot work."""

  def rules(c: Config) -> Iterator[Rule]:
    for field in ("seeds", "steps", "vocab"):
      yield field, c[field] >= 1, "at least 1"
    for field in ("n", "dense_n"):
      good = all(isinstance(n, int) and n >= 1 for n in c[field])
      yield field, good, "integers of at least 1"
    yield "n", len(c.n) >= 1, "one number or more"
    yield "seed", 0 <= c.seed < 2**31, "0 to 2**31 - 1"
    good = 1 <= c.correct < c.vocab
    yield "correct", good, f"1 to vocab - 1 = {c.vocab - 1}"
    good = c.surrogate in surrogates
    yield "surrogate", good, f"one of {', '.join(surrogates)}"
    for field in ("lr", "eps", "sgd_lr"):
      yield field, 0.0 < c[field] < math.inf, "positive"
    for field in ("b1", "b2"):
      yield field, 0.0 <= c[field] < 1.0, "at least 0 and below 1"
    yield "weight_decay", 0.0 <= c.weight_decay < math.inf, "0 or positive"
    yield "seeding", math.isfinite(c.seeding), "finite"
    good = c.anchor is None or math.isfinite(c.anchor)
    yield "anchor", good, "finite, or None"

  _check(c, rules)


def _check(
  c: Config, rules: Callable[[Config], Iterator[Rule]], where: str = ""
) -> None:
  try:
    for field, good, must in rules(c):
      if not good:
        value = functools.reduce(operator.getitem, field.split("."), c)
        raise UserError(f"{where}config.{field} = {value!r} must be {must}")
  except (AttributeError, KeyError) as e:
    field = str(e.args[0]).splitlines()[0].strip("\"'")
    raise UserError(
      f"config.{field} is missing; is this config for another --mode?"
    ) from None


def _warmup_rules(c: Config) -> Iterator[Rule]:
  counts = (
    "puzzles prompt_tokens max_new_tokens vocab width layers heads kv_heads "
    "mlp batch steps mixed_steps"
  )
  for field in counts.split():
    yield field, c[field] >= 1, "at least 1"
  yield "seed", 0 <= c.seed < 2**29, "0 to 2**29 - 1"
  good = c.width % (2 * c.heads) == 0
  yield "width", good, f"an even multiple of heads = {c.heads}"
  good = c.heads % c.kv_heads == 0
  yield "kv_heads", good, f"a divisor of heads = {c.heads}"
  for field in ("lr", "mixed_lr", "max_grad_norm", "rope_theta"):
    yield field, 0.0 < c[field] < math.inf, "positive"
  yield "b2", 0.0 <= c.b2 < 1.0, "at least 0 and below 1"
  good = all(0.0 <= share <= 1.0 for share in c.right.values())
  yield "right", good, "shares between 0 and 1"


def _evaluation_rules(c: Config) -> Iterator[Rule]:
  counts = "in_flight prompt_tokens max_new_tokens eval_prompts eval_n"
  for field in (*counts.split(), "mesh_model"):
    yield field, c[field] >= 1, "at least 1"
  for field, value in c.items():
    if isinstance(value, float):
      yield field, math.isfinite(value), "finite"
  yield "seed", 0 <= c.seed < 2**31, "0 to 2**31 - 1"
  for field in ("slots", "lanes", "memory_bytes"):
    yield field, c[field] >= 0, "positive, or 0: as much as there is"
  good = c.eval_temperature >= 0.0
  yield "eval_temperature", good, "positive, or 0: the likeliest token"
  good = 0.0 < c.eval_top_p <= 1.0
  yield "eval_top_p", good, "above 0 and at most 1, where nothing is cut"
  yield from _data_rules(c)
  for field, known in CHOICES.items():
    yield field, c[field] in known, f"one of {', '.join(known)}"
  yield "mesh_data", c.mesh_data >= 1 or c.mesh_data == -1, "positive, or -1"


def _training_rules(c: Config) -> Iterator[Rule]:
  yield from _evaluation_rules(c)
  counts = (
    "steps samples max_oversampling minibatches rows blocks save_every "
    "keep_checkpoints eval_every theory_responses theory_tokens lr_base "
    "length_on rest_steps"
  )
  for field in counts.split():
    yield field, c[field] >= 1, "at least 1"
  yield "n", c.n >= 2, "at least 2: a group is compared with its own mean"
  for field in ("samples", "in_flight"):
    good = c[field] % c.n == 0
    yield field, good, f"a multiple of n = {c.n}"
  prompts = c.samples // c.n
  good = prompts % c.minibatches == 0
  yield "minibatches", good, f"a divisor of samples / n = {prompts} prompts"
  yield from _sampling_rules(c)
  yield from _loss_rules(c)
  yield from _optimizer_rules(c)
  yield "max_busy_s", c.max_busy_s >= 0.0, "positive, or 0: no bound"
  yield "samples_shown", c.samples_shown >= 0, "0 or positive"
  good = c.theory_prompts >= 0
  yield "theory_prompts", good, "positive, or 0: the theorem is not measured"


def _data_rules(c: Config) -> Iterator[Rule]:
  """Where prompts come from."""
  for name, domain in c.domains.items():
    good = 0.0 <= domain.weight < math.inf
    yield f"domains.{name}.weight", good, "0 or positive"
    good = domain.reward in ("pass", "score")
    yield f"domains.{name}.reward", good, "one of pass, score"
  for field in ("files", "heldout_files"):
    good = all(isinstance(path, str) and path for path in c.data[field])
    yield f"data.{field}", good, "paths, as in ('a.jsonl', 'b.parquet')"
  yield (
    "code_test_s",
    c.code_test_s > 0.0,
    "positive; it is the CPU-seconds of a test",
  )
  good = c.code_total_s >= c.code_test_s
  yield "code_total_s", good, f"at least code_test_s = {c.code_test_s:g}"
  good = c.data.heldout_one_in >= 2
  yield "data.heldout_one_in", good, "at least 2"


def _sampling_rules(c: Config) -> Iterator[Rule]:
  """Which groups are trained on, and what reward they get."""
  yield "temperature", c.temperature > 0.0, "positive; greedy cannot explore"
  good = 0.0 <= c.keep_above < c.keep_below
  yield "keep_above", good, f"at least 0 and below keep_below = {c.keep_below}"
  yield "keep_below", c.keep_below <= 1.0, "at most 1"
  prompts, pool = c.samples // c.n, c.distinct_prompts
  good = pool == 0 or pool > prompts or (pool == prompts and c.keep == "all")
  must = f"0, or more than the {prompts} of a step, of which some are rejected"
  yield "distinct_prompts", good, must
  yield "rest_after", c.rest_after >= 0, "0 or positive"
  good = c.rest_after == 0 or pool > 0
  yield "rest_after", good, "0 unless distinct_prompts is set: none comes again"
  good = 0.0 <= c.truncated_factor <= 1.0
  yield "truncated_factor", good, "between 0 and 1"
  good = c.length_min <= c.length_max
  yield "length_min", good, f"at most length_max = {c.length_max}"
  for field in ("length_weight", "overlong_weight"):
    yield field, c[field] >= 0.0, "0 or positive"
  yield "length_off", c.length_off >= 0, "positive, or 0: always on"
  good = 1 <= c.overlong_buffer <= c.max_new_tokens or not c.overlong_weight
  most = c.max_new_tokens
  yield "overlong_buffer", good, f"1 to max_new_tokens = {most}"


def _loss_rules(c: Config) -> Iterator[Rule]:
  yield "clip_low", 0.0 < c.clip_low < 1.0, "between 0 and 1"
  yield "clip_high", c.clip_high > 0.0, "positive"
  yield "kl_weight", c.kl_weight >= 0.0, "0 or positive"
  yield "kl_clamp", c.kl_clamp > 0.0, "positive"
  good = c.dual_clip == 0.0 or c.dual_clip > 1.0
  yield "dual_clip", good, "above 1, or 0: without"
  good = c.dual_clip == 0.0 or c.loss == "ppo"
  yield "dual_clip", good, "0 with loss = 'gspo', which has none"
  yield "entropy_weight", c.entropy_weight >= 0.0, "0 or positive"
  yield "correction_cap", c.correction_cap >= 1.0, "at least 1"
  for low, high in (
    ("correction_low", "correction_high"),
    ("sequence_low", "sequence_high"),
  ):
    yield low, 0.0 <= c[low] <= 1.0, "between 0 and 1, the ratio at rest"
    yield high, c[high] >= 1.0, "at least 1, the ratio at rest"
    yield low, c[low] < c[high], f"below {high} = {c[high]}"
  good = not c.pipeline or c.correction != "none"
  yield (
    "correction",
    good,
    "other than 'none' with pipeline, which samples a step behind",
  )
  for field in ("reset_every", "reset_stalled", "reset_above_kl"):
    yield field, c[field] >= 0, "positive, or 0: not for that"


def _optimizer_rules(c: Config) -> Iterator[Rule]:
  yield "lr", c.lr > 0.0, "positive"
  yield "warmup", c.warmup >= 0, "0 or positive"
  for field in ("b1", "b2"):
    yield field, 0.0 <= c[field] < 1.0, "at least 0 and below 1"
  yield "eps", c.eps > 0.0, "positive"
  yield "weight_decay", c.weight_decay >= 0.0, "0 or positive"
  yield "max_grad_norm", c.max_grad_norm > 0.0, "positive"


def check_mesh(c: Config, data: int) -> None:
  """Raises UserError if work does not spread evenly over the data axis."""
  prompts = c.in_flight // c.n
  if prompts % data:
    raise UserError(
      f"config.in_flight = {c.in_flight} is {prompts} prompts of "
      f"{c.n}, which do not spread over {data} devices; config.mesh_data must "
      "divide them"
    )
  if c.blocks % data:
    raise UserError(
      f"config.blocks = {c.blocks} do not spread over {data} devices; "
      "config.mesh_data must divide them"
    )


def check_lengths(c: Config, max_positions: int) -> None:
  """Raises UserError if a rollout may go beyond the policy's positions."""
  longest = c.prompt_tokens + c.max_new_tokens
  if longest > max_positions:
    raise UserError(
      f"config.prompt_tokens + max_new_tokens = {longest} must be at most "
      f"{max_positions}, the positions of this checkpoint"
    )
