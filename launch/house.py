"""python -m launch.house: how large the package is, how much hangs on what."""

import ast
import functools
import itertools
import pathlib

from brorl_jax import config

ROOT = pathlib.Path(__file__).parents[1]
BOUNDS = {  # of the numbers below; they may only fall
  "lines of the package": 41_000,
  "lines of the tests": 53_000,
  "files of the package": 241,
  "files that main.settings loads": 12,
  "files that --mode=simulate loads": 30,
  "files that --mode=export loads": 51,
  "longest chain of imports": 16,
  "stays of a config until it is a Run": 40,
  "stays of a Run in training": 50,
  "config fields": 95,
}


def texts(folder: str) -> dict[str, str]:
  """The Python files of a folder, by the name of the module."""
  name = lambda p: ".".join(p.relative_to(ROOT).with_suffix("").parts)
  found = (ROOT / folder).rglob("*.py")
  return {name(p).removesuffix(".__init__"): p.read_text() for p in found}


MODULES = {name: ast.parse(text) for name, text in texts("brorl_jax").items()}
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
  tree, out = MODULES[module], {}
  for node in tree.body if at_once else ast.walk(tree):
    if isinstance(node, ast.ImportFrom | ast.Import):
      where = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
      out |= {a.asname or a.name: where + a.name for a in node.names}
  return out


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


def holds(node: ast.AST, known: set[str]) -> bool:
  """Whether an expression is a known value, a part of one, or made of one."""
  if isinstance(node, ast.Call | ast.Tuple | ast.keyword | ast.Attribute):
    return any(holds(x, known) for x in ast.iter_child_nodes(node))
  return isinstance(node, ast.Name) and node.id in known


def walk(path: str, known: set[str], seen: set[str]):
  """The files that a value enters, with what is made of it, call by call."""
  if path not in FUNCTIONS or not known:
    return
  yield (module := max(m for m in MODULES if path.startswith(f"{m}.")))
  nodes = [*ast.walk(FUNCTIONS[path])] if path not in seen else []
  seen.add(path)
  for node in nodes:
    made = getattr(node, "targets", [getattr(node, "target", node)])
    value = getattr(node, "iter", getattr(node, "value", node))
    if made != [node] and holds(value, known):
      inside = (x for y in made for x in ast.walk(y))
      known |= {x.id for x in inside if isinstance(x, ast.Name)}
  calls = [x for x in nodes if isinstance(x, ast.Call)]
  for node in sorted(calls, key=lambda x: (x.end_lineno, x.end_col_offset)):
    first, dot, rest = ast.unparse(node.func).partition(".")
    to = names(module).get(first, f"{module}.{first}") + dot + rest
    takes = FUNCTIONS[to].args.args if to in FUNCTIONS else []
    takes = [x.arg for x in takes if x.arg not in ("self", "cls")]
    given = [*zip(takes, node.args, strict=False)]
    given += [(str(k.arg), k.value) for k in node.keywords]
    yield from walk(to, {x for x, y in given if holds(y, known)}, seen)


def numbers() -> dict[str, int]:
  """The numbers of the table."""
  lines = lambda of: sum(text.count("\n") for text in texts(of).values())
  path = lambda name, of: walk(f"brorl_jax.main.{name}", {of}, set())
  stays = lambda *start: len([*itertools.groupby(path(*start))])
  modes = ("settings", "commands.simulate", "commands.export")
  found = [lines("brorl_jax"), lines("tests"), len(MODULES)]
  found += [reach(f"brorl_jax.main.{name}") for name in modes]
  found += [max(map(chain, MODULES)), stays("resolve.resolve", "c")]
  found += [stays("commands.train.run", "this"), len(config.every_field())]
  return dict(zip(BOUNDS, found, strict=True))


if __name__ == "__main__":
  for name, n in (found := numbers()).items():
    print(f"{name:36}{n:8,} of {BOUNDS[name]:7,}", "above" * (n > BOUNDS[name]))
  raise SystemExit(any(n > BOUNDS[name] for name, n in found.items()))
