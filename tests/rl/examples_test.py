"""The examples in the docstrings of brorl_jax/rl: each runs, and all are there.

A test of its own: pytest's finds no example of a function that jax.jit wraps.
"""

import ast
import doctest
import importlib
import pathlib
import re

import pytest

from brorl_jax import rl

FILES = sorted(pathlib.Path(rl.__path__[0]).glob("[!_]*.py"))
FLAGS = doctest.ELLIPSIS | doctest.REPORT_NDIFF


def examples(path: pathlib.Path) -> list[doctest.DocTest]:
  """Those of each docstring of a file, which see the names of the file."""
  names = vars(importlib.import_module(f"brorl_jax.rl.{path.stem}"))
  get = doctest.DocTestParser().get_doctest
  nodes = [*ast.walk(ast.parse(path.read_text()))]
  nodes = [x for x in nodes if isinstance(x, ast.FunctionDef | ast.ClassDef)]
  texts = [(x, ast.get_docstring(x, clean=False) or "") for x in nodes]
  return [get(text, names, x.name, path.name, x.lineno) for x, text in texts]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_public_function_has_an_example_that_is_right(path):
  said, runner = [], doctest.DocTestRunner(optionflags=FLAGS)
  tests = examples(path)
  for test in tests:
    runner.run(test, out=said.append)
  assert not said, "".join(said)
  shown = "".join(x.source for test in tests for x in test.examples)
  nodes = ast.parse(path.read_text()).body
  named = {x.name for x in nodes if isinstance(x, ast.FunctionDef)}
  public = {name for name in named if name[0] != "_"}
  assert public and public - {*re.findall(r"(\w+)\(", shown)} == set()


def test_a_wrong_example_is_seen(tmp_path):
  path = tmp_path / "lr_scaling.py"
  path.write_text('def f():\n  """One.\n\n  >>> f()\n  4\n  """\n')
  (test,) = examples(path)
  test.globs["f"] = lambda: 3
  assert doctest.DocTestRunner().run(test, out=[].append).failed == 1
