"""Tests of brorl_jax/config/: fields, their metadata, plain values."""

import dataclasses
import pathlib
import re
import subprocess
import sys
import typing
from collections.abc import Mapping

import pytest
from messages import mentions

from brorl_jax import config
from brorl_jax.config.section import Section, Wrong, setting
from brorl_jax.configs import base

FOLDER = pathlib.Path(config.__file__).parent


@dataclasses.dataclass(frozen=True)
class Small(Section):
  kind: typing.Literal["a", "b"] = setting("a", "Why a.")
  rate: float = setting(0.5, "Why a half.", unit="per step", phased=True)
  table: Mapping[str, int] = setting({"x": 1}, "A table.")
  count: int = setting(2**53 - 1, "The largest.")
  on: bool = setting(True, "On.")
  name: str = setting("", "A name.")
  names: tuple[str, ...] = setting((), "Names.")

  def rules(self):
    yield "rate", self.rate > 0.0, "positive"


LONG = "a number of thousands of digits"


@pytest.mark.parametrize("values, line", [
  ({"kind": "c"}, "kind = 'c'"),
  ({"rate": float("nan")}, "rate = nan ... finite"),
  ({"rate": float("inf")}, "rate = inf ... finite"),
  ({"rate": -1.0}, "rate = -1.0 ... positive"),
  ({"kind": []}, "kind = [] must be one of a, b"),
  ({"rate": "1"}, "rate = '1' must be a number"),
  ({"rate": True}, "rate = True must be a number"),
  ({"rate": 10**400}, f"rate = {10**199}... must be below 2**53"),
  ({"rate": 10**5000},
    "rate = a number of thousands of digits must be below 2**53"),
  ({"table": "x"}, "table = 'x' must be a dict"),
  ({"count": 2.0}, "count = 2.0 must be an integer"),
  ({"count": False}, "count = False must be an integer"),
  ({"count": 2**53}, "count = 9007199254740992 must be below 2**53"),
  ({"on": 1}, "on = 1 must be True or False"),
  ({"name": None}, "name = None must be text in UTF-8"),
  ({"name": "\udcff"}, r"name = '\udcff' must be text in UTF-8"),
  ({"names": "ab"}, "names = 'ab' must be a tuple"),
  ({"rate": "x" * 999}, f"rate = '{'x' * 199}... must be a number"),
])  # fmt: skip
def test_a_section_checks_itself(values, line):
  with pytest.raises(Wrong) as e:
    Small(**values)
  assert len(str(e.value)) < 300 and mentions(str(e.value), line)
  assert mentions(str(e.value.below("optim")), f"optim.{line}")


def test_a_mapping_is_no_ones_default():
  Small().table["x"] = 9
  assert Small().table == {"x": 1}


def test_plain_values_make_the_same_config_again():
  c = config.of(base.get_config().to_dict())
  values = config.as_dict(c)
  assert config.of(values) == c
  values["optim"]["lr"] = 0.25
  values["data"]["families"]["gcd"]["settings"]["max_value"] = 9
  values["data"]["files"] = ["a.jsonl"]  # as JSON has it
  made = config.of(values)
  assert made.optim == dataclasses.replace(c.optim, lr=0.25)
  assert made.data.families["gcd"].settings["max_value"] == 9
  assert made.data.files == ("a.jsonl",)
  assert c.data.families["gcd"].settings["max_value"] == 40


def test_what_is_wrong_below_a_name_is_told_with_all_of_it():
  values = base.get_config().to_dict()
  values["data"]["domains"]["math"]["weight"] = -1.0
  with pytest.raises(Wrong, match=r"^data\.domains\.math\.weight = -1\.0 must"):
    config.of(values)
  del values["eval"]["top_p"]
  values["data"]["domains"]["math"]["weight"] = 1.0
  with pytest.raises(KeyError, match=r"eval\.top_p"):
    config.of(values)


def test_flat_by_hand():
  assert config.flat({"a": 1, "b": {"c": [2], "d": {"e": {}}}}) == {"a": 1,
    "b.c": [2]}  # fmt: skip


def test_every_field_says_what_it_means():
  for name, about in config.every_field().items():
    assert about.why.endswith("."), name
    assert re.match(r"[A-Z0-9'`>]|lr ", about.why) or name == "x", name
  assert len(config.every_field()) > 85


def test_sections_load_nothing_but_the_standard_library():
  code = ("import sys; before = {*sys.modules}; import brorl_jax.config\n"
    "tops = {m.split('.')[0] for m in {*sys.modules} - before}\n"
    "print(tops - {*sys.stdlib_module_names})")  # fmt: skip
  out = subprocess.check_output([sys.executable, "-c", code], text=True)
  assert out == "{'brorl_jax'}\n"
