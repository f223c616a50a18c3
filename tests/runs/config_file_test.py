"""Tests of brorl_jax/runs/config_file.py."""

import copy

import pytest

from brorl_jax.configs import n512
from brorl_jax.runs import config_file, sections

CONFIG = sections.as_dict(sections.Config())
GOOD = {
  "config": CONFIG,
  "run": "0123",
  "data": {"held out": "abc"},
  "functions": {"loss.kind": {"name": "a.py:f", "digest": "0"}},
  "files": {"/a.jsonl": "0"},
  "earlier": [{"config": CONFIG}],
}


def test_what_a_run_writes_is_right():
  assert config_file.wrong(GOOD) is None
  assert config_file.wrong({"config": {}}) is None  # an older one has less
  assert config_file.wrong({**GOOD, "data": None, "earlier": None}) is None
  values = n512.get_config().to_dict()
  assert config_file.wrong({"config": values}) is None


@pytest.mark.parametrize(
  "change, field",
  [
    ({"config": None}, "config"),
    ({"run": 3}, "run"),
    ({"data": ["a"]}, "data"),
    ({"data": []}, "data"),
    ({"versions": None}, "versions"),
    ({"mode": 0}, "mode"),
    ({"data": {"held out": 3}}, "data"),
    ({"functions": {"loss.kind": {"name": "a.py:f"}}}, "functions"),
    ({"files": {"a": None}}, "files"),
    ({"evaluated": {"source": "x", "step": "3"}}, "evaluated.step"),
    ({"evaluated": {"source": 3}}, "evaluated.source"),
    ({"earlier": [3]}, "earlier"),
    ({"earlier": [{}]}, "earlier"),
  ],
)
def test_the_first_entry_that_no_run_writes_is_named(change, field):
  assert config_file.wrong({**GOOD, **change}) == field


@pytest.mark.parametrize(
  "name, value",
  [
    ("optim.lr", "x"),
    ("optim.lr", True),
    ("sampling.n", 4.0),
    ("run.pipeline", 1),
    ("policy.dtype", 16),
    ("data.files", "a.jsonl"),
    ("data.families", []),
    ("run.phases", [{"sampling.n": 3}]),
    ("data.families.gcd.weight", "1"),
    ("data.families.gcd", 1.0),
    ("eval", 3),
  ],
)
def test_a_field_of_a_wrong_type_is_named(name, value):
  values = copy.deepcopy(CONFIG)
  place = values
  *above, last = name.split(".")
  for part in above:
    place = place[part]
  place[last] = value
  earlier = {"config": CONFIG, "earlier": [{"config": values}]}
  assert config_file.wrong({"config": values}) == f"config.{name}"
  assert config_file.wrong(earlier) == "earlier"


def test_a_choice_of_before_is_no_error():
  values = copy.deepcopy(CONFIG)
  values["advantage"]["credit"] = "rare"
  values["optim"]["lr"] = 1  # JSON has one kind of number
  values["eval"]["every"] = -3  # rules are of today
  values["eval"]["top_p"] = None  # not recorded
  assert config_file.wrong({"config": values}) is None
