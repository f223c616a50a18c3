"""Any value for any field of the config: it is legal, or one line names it."""

import contextlib
import functools
import io
import json

import fuzzing
import ml_collections
import pytest
from absl.testing import flagsaver
from hypothesis import strategies as st

from brorl_jax import config as sections
from brorl_jax.configs import n512
from brorl_jax.errors import UserError
from brorl_jax.main import __main__ as command
from brorl_jax.main import settings
from brorl_jax.stages import examples

pytestmark = pytest.mark.ci

_FIELDS = sorted(sections.every_field())
# Those below a domain and a family too.
_FIELDS += sorted(name for name in sections.flat(n512.get_config().to_dict())
  if name.startswith(("data.domains.math.", "data.families.gcd.")))  # fmt: skip
_FLAGS = st.one_of(
  fuzzing.TEXTS,
  fuzzing.NUMBERS.map(lambda x: f"{x:.3g}" if isinstance(x, float) else hex(x)),
  fuzzing.JSON.map(lambda x: ascii(x)[:2000]),
  st.text(max_size=12),
  st.text(alphabet="()[]{},'\"0123456789.eE-+:_ \\nNaif#", max_size=20),
  st.sampled_from(["9" * 5000, "[" * 5000, "(" * 5000, "1," * 3000, "()", "'"]),
)


def refused_or_usable(c, field):
  """What a command does with a config before it loads anything.

  Raises:
    UserError: In one line.
  """
  c = settings.training(c)
  if field.startswith("data.families"):
    try:
      examples.families(c.data.families)
    except ValueError as e:
      raise UserError(str(e)) from None
  # What is legal can be written to config.json, and is then the same config.
  values = json.loads(json.dumps(sections.as_dict(c), allow_nan=False))
  assert sections.of(values) == c
  json.dumps(values, ensure_ascii=False).encode()


def names(line, field):
  """Whether a line names the field, or another that it does not go with."""
  last = field.rpartition(".")[2]
  parts = field.split(".")
  names = (field, last, parts[0], f"family {parts[-1]}")
  return any(name in line for name in names)


def check_flag(field, text):
  said = io.StringIO()
  given = ["brorl", "--config=n512", f"--config.{field}={text}"]
  command.flags.FLAGS.unparse_flags()
  # Other tests of the process parse flags too.
  with flagsaver.flagsaver(), contextlib.redirect_stderr(said):
    try:
      settings.parse_flags(given)
      config = command._CONFIG.value
    except SystemExit as e:
      assert e.code == 2
      line = said.getvalue().removesuffix("\n")
      assert line.startswith("error: ") and names(line, field), line
      fuzzing.one_line(ValueError(line), longest=len(text) + 500)
      return
  try:
    refused_or_usable(config, field)
  except UserError as e:
    assert names(fuzzing.one_line(e), field), e


test_flags, test_many_flags = fuzzing.tiers(
  st.sampled_from(_FIELDS), _FLAGS, few=12, many=3_000
)(check_flag)


class Given(ml_collections.ConfigDict):
  """A config with values that its own checks might refuse."""

  def __init__(self, values):
    super().__init__()
    object.__setattr__(self, "values", values)

  def to_dict(self):
    return object.__getattribute__(self, "values")


def check_value(field, value):
  values = sections.as_dict(settings.typed(n512.get_config()))
  *above, last = field.split(".")
  functools.reduce(dict.__getitem__, above, values)[last] = value
  try:
    refused_or_usable(Given(values), field)
  except UserError as e:
    assert names(fuzzing.one_line(e), field), e


# A config file is a program: it can give a field any value.
_SECTIONS = ["run", "data", "optim", "data.domains", "data.domains.math"]
test_values, test_many_values = fuzzing.tiers(
  st.sampled_from([*_FIELDS, *_SECTIONS]), fuzzing.JSON, few=100, many=20_000
)(check_value)
