"""Tests of brorl_jax/verdicts/own/named.py."""

import pytest
from messages import mentions

from brorl_jax.verdicts.own import named

TABLE = {"ppo": 1, "gspo": 2}


def refused(name):
  with pytest.raises(ValueError) as error:
    named.find(name, TABLE, what="config.loss.kind")
  text = str(error.value)
  assert "\n" not in text and text.startswith("config.loss.kind = ")
  return text


def test_a_name_of_the_table():
  assert named.find("gspo", TABLE, what="x") == ("gspo", 2, "")


def test_a_function_of_a_package():
  found = named.find("os.path:join", TABLE, what="x")
  assert found.value("a", "b") == "a/b" and len(found.digest) == 32


def test_a_function_of_a_file_with_a_neighbour(tmp_path):
  (tmp_path / "neighbour_of_mine.py").write_text("HALF = 0.5\n")
  file = tmp_path / "mine.py"
  text = "from neighbour_of_mine import HALF\ndef f(x):\n  return x * HALF\n"
  file.write_text(text)
  found = named.find(f"{file}:f", TABLE, what="x")
  assert found.value(3.0) == 1.5
  other = tmp_path / "other.py"
  other.write_text(text + "\n")
  assert named.find(f"{other}:f", TABLE, what="x").digest != found.digest


def test_a_file_may_define_a_dataclass(tmp_path):
  file = tmp_path / "mine.py"
  file.write_text(
    "from __future__ import annotations\nimport dataclasses\n"
    "@dataclasses.dataclass\nclass A:\n  x: int = 1\n"
  )
  assert named.find(f"{file}:A", TABLE, what="x").value().x == 1


def test_a_misspelt_name_gets_the_near_match():
  assert mentions(
    refused("gpso"), "'gpso' ... ppo, gspo ... did you mean gspo?"
  )
  assert mentions(refused("xyzzy"), "'file.py:function'")


def test_what_is_wrong_with_a_file_is_one_line_with_its_place(tmp_path):
  file = tmp_path / "mine.py"
  assert mentions(refused(f"{file}:f"), "mine.py does not exist")
  file.write_text("def score(): pass\n")
  assert mentions(refused(f"{file}:scoer"), "function 'scoer' ... score")
  bad = tmp_path / "bad.py"
  bad.write_text("x = 1\n\nraise RuntimeError('two\\nlines')\n")
  assert mentions(refused(f"{bad}:f"), "line 3: RuntimeError: two lines")
  bad = tmp_path / "exits.py"
  bad.write_text("import sys\nsys.exit(3)\n")
  assert "line 2: SystemExit: 3" in refused(f"{bad}:f")
  bad = tmp_path / "torn.py"
  bad.write_text("def f(:\n")
  assert "SyntaxError: invalid syntax" in refused(f"{bad}:f")
  missing = tmp_path / "mien.py"
  assert mentions(refused(f"{missing}:f"), "did you mean mine.py")


def test_what_is_wrong_with_a_package_is_one_line():
  assert mentions(
    refused("no_such_module:f"), "no_such_module ... ModuleNotFoundError"
  )
  assert mentions(refused("a b:f"), "'a b' ... module")
