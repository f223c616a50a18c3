"""Tests of launch/house.py: the size of the package and what hangs on what."""

import ast
import subprocess

import pytest

from launch import house


def test_every_number_is_within_its_bound():
  found = house.numbers()
  assert {k: n for k, n in found.items() if n > house.BOUNDS[k]} == {}


def test_bounds_only_fall():
  """Those of the commit before the newest change of the file are no lower, but
  that of the package's lines, which what is new may raise to `MOST`.
  """
  assert house.BOUNDS["lines of the package"] <= house.MOST == 34_000
  path = "launch/house.py"
  log = ["git", "log", "--format=%h", "-n", "20", "--", path]
  run = lambda *args: subprocess.run(
    args, cwd=house.ROOT, capture_output=True, text=True
  )
  for commit in run(*log).stdout.split():
    text = run("git", "show", f"{commit}:{path}").stdout
    before = next(
      ast.literal_eval(node.value) for node in ast.parse(text).body
      if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "BOUNDS"
    )  # fmt: skip
    for name in before.keys() & house.BOUNDS.keys() - {"lines of the package"}:
      assert house.BOUNDS[name] <= before[name], (commit, name)


FILES = {
  "a": "from brorl_jax import b\nfrom brorl_jax.c import f, K\n"
  "def enter(v: Run, w: Run):\n  x = f(v)\n  b.g(x.part)\n  b.g(w)\n"
  "  b.plain(v)\n  for y in [1]:\n    b.g(y)\n"
  "  return [K(z) for z in b.h(k=x)], functools.partial(b.g, v)\n",
  "b": "def g(v: Run):\n  return v\ndef plain(n: int):\n  return g(n)\n"
  "def h(k: Run | None):\n  import brorl_jax.d\n  return g(k)\n",
  "c": "from brorl_jax import b\n"
  "class K:\n  def __init__(self, v: Run):\n    b.g(v)\n"
  "def f(v: Run):\n  v = v.more\n  return b.g(1)\n", "d": "",
}  # fmt: skip


@pytest.fixture
def small(monkeypatch):
  modules = {f"brorl_jax.{k}": ast.parse(text) for k, text in FILES.items()}
  code = {f"brorl_jax.{k}.{x.name}": x
    for k in FILES for x in modules[f"brorl_jax.{k}"].body if isinstance(x,
      ast.FunctionDef)}  # fmt: skip
  code["brorl_jax.c.K"] = modules["brorl_jax.c"].body[1].body[0]
  monkeypatch.setattr(house, "MODULES", modules)
  monkeypatch.setattr(house, "FUNCTIONS", code)
  caches = house.names, house.chain
  for cache in caches:
    cache.cache_clear()
  yield
  for cache in caches:
    cache.cache_clear()


def test_imports_by_hand(small):
  of = lambda *names: {f"brorl_jax.{name}" for name in names}
  assert house.imported("brorl_jax.a") == of("b", "c")
  # Loading b imports nothing, calling its functions imports d.
  assert house.imported("brorl_jax.b") == of("d")
  assert house.imported("brorl_jax.b", at_once=True) == set()
  assert house.reach("brorl_jax.a") == 4 and house.reach("brorl_jax.d") == 1
  assert [house.chain(f"brorl_jax.{k}") for k in "abcd"] == [3, 1, 2, 1]


def test_a_walk_by_hand(small):
  """v goes into c.f, what f makes of it into b.g and b.h, and each z into K.

  A number made of v is not followed, what a partial binds is.
  """
  walk = lambda name: [
    path[-1] for path in house.walk("brorl_jax.a.enter", {name}, set())
  ]
  assert walk("v") == ["a", "c", "b", "c", "b", "b", "b", "b"]
  assert walk("w") == ["a", "b"]  # straight to b
  assert walk("") == []


def test_a_config_is_followed_from_the_two_commands():
  """A config is resolved in one file; a run then enters others."""
  path = lambda at, of: {*house.walk(f"brorl_jax.{at}", {of}, set())}
  assert path("plan.resolve.resolve", "c") == {"brorl_jax.plan.resolve"}
  assert path("main.train.run", "this") > {"brorl_jax.main.train"}
