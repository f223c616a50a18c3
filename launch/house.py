"""python -m launch.house: how large the package is, how much hangs on what."""

import ast
import functools
import pathlib
import re

from brorl_jax import config

ROOT = pathlib.Path(__file__).parents[1]
MOST = 34_000  # lines to which what is new may raise the first bound
BOUNDS = {  # of the numbers below; the others may only fall
  "lines of the package": 33_902,
  "lines of the tests": 41_000,
  "files of the package": 123,
  "files that main.settings loads": 8,
  "files that --mode=simulate loads": 19,
  "files that --mode=export loads": 31,
  "longest chain of imports": 14,
  "stays of a config in training": 13,
  "config fields": 93,
}


def texts(folder: str) -> dict[str, str]:
  """The Python files of a folder, by the name of the module."""
  name = lambda p: ".".join(p.relative_to(ROOT).with_suffix("").parts)
  found = (ROOT / folder).rglob("*.py")
  return {name(p).removesuffix(".__init__"): p.read_text() for p in found}


MODULES = {name: ast.parse(text) for name, text in texts("brorl_jax").items()}
RUN = (ROOT / "brorl_jax" / "plan" / "resolve.py").read_text()
KINDS = {*re.findall(r"class (\w+)", f"{texts('brorl_jax/config')}{RUN}")}
words = lambda node: set(re.findall(r"\w+", ast.unparse(node)))
FUNCTIONS = {  # and methods; a class stands for what makes its objects
  ".".join({module: 0, name: 0, x.name: 0}).removesuffix(".__init__"): x
  for module, tree in MODULES.items()
  for outer in tree.body
  if (name := getattr(outer, "name", ""))
  for x in (outer, *getattr(outer, "body", ()))
  if isinstance(x, ast.FunctionDef)
}


@functools.cache
def names(module: str, at_once: bool = False) -> dict[str, str]:
  """Imported names -> paths; with `at_once` not those that functions import."""
  tree = MODULES[module]
  every = tree.body if at_once else ast.walk(tree)
  every = [x for x in every if isinstance(x, ast.Import | ast.ImportFrom)]
  where = lambda x: f"{x.module}." if isinstance(x, ast.ImportFrom) else ""
  return {a.asname or a.name: where(x) + a.name for x in every for a in x.names}


def imported(module: str, at_once: bool = False) -> set[str]:
  """The files of the package that a file imports."""
  found = names(module, at_once).values()
  found = {x if x in MODULES else x.rpartition(".")[0] for x in found}
  return found & MODULES.keys() - {module}


def reach(*modules: str) -> int:
  """How many files loading these and calling their functions may load."""
  more = set[str]().union(*map(imported, modules)).difference(modules)
  return reach(*modules, *more) if more else len(modules)


@functools.cache
def chain(module: str) -> int:
  """Files of the longest chain of imports that begins with this one."""
  return 1 + max(map(chain, imported(module, at_once=True)), default=0)


def takes(path: str) -> dict[str, bool]:
  """The parameters of a function, and whether each is one of `KINDS`."""
  inside = ast.walk(FUNCTIONS[path].args) if path in FUNCTIONS else ()
  every = [x for x in inside if isinstance(x, ast.arg) and x.arg != "self"]
  return {x.arg: bool(words(x) & KINDS) for x in every}


def walk(path: str, known: set[str], seen: set[str]):
  """The files that a config enters, or what is made of it, call by call."""
  if not (known := known & {x for x, ours in takes(path).items() if ours}):
    return
  yield (module := max(m for m in MODULES if path.startswith(f"{m}.")))
  nodes = [*ast.walk(FUNCTIONS[path])] if path not in seen else []
  seen.add(path)
  for node in nodes:
    made = getattr(node, "targets", [getattr(node, "target", node)])
    value = getattr(node, "iter", getattr(node, "value", None)) or node
    if made != [node] and words(value) & known:
      known = known.union(*map(words, made))
  calls = [x for x in nodes if isinstance(x, ast.Call)]
  for node in sorted(calls, key=lambda x: (x.end_lineno, x.end_col_offset)):
    bound = ast.unparse(node.func) == "functools.partial"
    to, *args = [node.func, *node.args][bound:]
    first, dot, rest = ast.unparse(to).partition(".")
    to = names(module).get(first, f"{module}.{first}") + dot + rest
    given = {str(k.arg): k.value for k in node.keywords}
    given |= dict(zip(takes(to), args, strict=False))
    yield from walk(to, {x for x in given if words(given[x]) & known}, seen)


def numbers() -> dict[str, int]:
  """The numbers of the table."""
  lines = lambda of: sum(text.count("\n") for text in texts(of).values())
  path = lambda at, of: walk(f"brorl_jax.{at}", {of}, set())
  modes = ("settings", "simulate", "export")
  found = [lines("brorl_jax"), lines("tests"), len(MODULES)]
  found += [reach(f"brorl_jax.main.{name}") for name in modes]
  walked = [*path("plan.resolve.resolve", "c"), *path("main.train.run", "this")]
  stays = sum(a != b for a, b in zip(["", *walked], walked, strict=False))
  found += [max(map(chain, MODULES)), stays, len(config.every_field())]
  return dict(zip(BOUNDS, found, strict=True))


if __name__ == "__main__":
  for name, n in (found := numbers()).items():
    print(f"{name:36}{n:8,} of {BOUNDS[name]:7,}", "above" * (n > BOUNDS[name]))
  raise SystemExit(any(n > BOUNDS[name] for name, n in found.items()))
