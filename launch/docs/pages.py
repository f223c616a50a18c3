"""The pages of the documentation: the READMEs, what they link to, docstrings.

  python launch/docs/pages.py FOLDER

writes them into an empty folder, under the paths that they have here, so that
links between documents stay. A link to a file that is no document leads to a
page with its text. Only the standard library is needed.
"""

import ast
import itertools
import pathlib
import re
import shutil
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[2]
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
_LANGUAGES = {"sbatch": "bash", "sh": "bash", "py": "python", "html": "html"}
# Below a paragraph GitHub begins a list, Markdown as mkdocs reads it does not.
_LIST = re.compile(r"(^(?![-|#\s]|\d+\. ).*\n)(?=- |1\. )", re.MULTILINE)


def documents() -> list[pathlib.Path]:
  """The documents, from the root; of one in two places that without links."""
  found = [*ROOT.glob("*.md")]
  for folder in ("brorl_jax", "configs", "launch", "third_party"):
    found += (ROOT / folder).rglob("*.md")
  return sorted({path.resolve().relative_to(ROOT) for path in found})


def page(document: pathlib.Path) -> tuple[str, set[pathlib.Path]]:
  """A document as mkdocs reads it, and the files and folders it links to."""
  linked: set[pathlib.Path] = set()

  def led(match: re.Match[str]) -> str:
    target, anchor = match[1], match[2] or ""
    path = (ROOT / document.parent / target).resolve()
    if ":" in target or path.suffix == ".md":
      return match[0]
    if (path / "README.md").exists():
      return f"]({target.rstrip('/')}/README.md{anchor})"
    linked.add(path.relative_to(ROOT))
    return match[0] if path.suffix == ".png" else f"]({target}.md)"

  parts = _FENCED.split((ROOT / document).read_text())
  parts[::2] = [_LIST.sub(r"\1\n", _LINK.sub(led, x)) for x in parts[::2]]
  return "".join(parts), linked


def source(path: pathlib.Path) -> str:
  """The page of a file, or of a folder: the files in it, one below another."""
  files = [path]
  if (ROOT / path).is_dir():
    inside = (ROOT / path).iterdir()
    files = sorted(x.relative_to(ROOT) for x in inside if x.is_file())
  text = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n"
  for file in files:
    heading = f"\n## {file.name}\n" if file != path else ""
    language = _LANGUAGES.get(file.suffix[1:], "text")
    text += f"{heading}\n````{language}\n{(ROOT / file).read_text()}\n````\n"
  return text


def entry_points() -> list[str]:
  """What `brorl_jax` loads when it is used, and what it is made of."""
  tree = ast.parse((ROOT / "brorl_jax" / "__init__.py").read_text())
  (where,) = (
    ast.literal_eval(x.value)
    for x in tree.body
    if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == "_WHERE"
  )
  more = "main.sample.TextPolicy model.huggingface.load model.huggingface.save"
  more = f"{more} data.dataset.read report.stats.paired_t".split()
  named = [f"{module}.{name}" for name, module in where.items()]
  return [*named, *(f"brorl_jax.{name}" for name in more)]


def modules(folder: str) -> list[str]:
  """The files of a folder of the package, by name."""
  files = sorted((ROOT / "brorl_jax" / folder).glob("[!_]*.py"))
  return [f"brorl_jax.{folder}.{path.stem}" for path in files]


def verdicts() -> list[str]:
  """What a user of verifiers calls or declares."""
  parts = "base domains own strict_json".split()
  calls = "math.verify code.verify stem.verify gym.verify instructions.verify"
  return [f"brorl_jax.verdicts.{name}" for name in (*calls.split(), *parts)]


def api() -> dict[str, str]:
  """Pages of docstrings: for mkdocstrings a name stands for its text."""
  pages = {
    "Entry points": entry_points(),
    "rl": modules("rl"),
    "verdicts": verdicts(),
  }
  label = lambda name: name.removeprefix("brorl_jax.")
  block = "\n\n::: {}\n    options:\n      toc_label: {}"
  listed = lambda names: "".join(block.format(x, label(x)) for x in names)
  return {
    f"api/{title.lower().replace(' ', '-')}.md": f"# {title}{listed(names)}\n"
    for title, names in pages.items()
  }


def write(folder: pathlib.Path) -> None:
  """Writes all pages, and the pictures that they show."""
  texts, linked = api(), set[pathlib.Path]()
  for document in documents():
    texts[str(document)], more = page(document)
    linked |= more
  pictures = {path for path in linked if path.suffix == ".png"}
  texts |= {f"{path}.md": source(path) for path in linked - pictures}
  for name, text in texts.items():
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
  for picture in pictures:
    (folder / picture).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / picture, folder / picture)
  for name in ("iframe-worker.js", "wide.css"):
    shutil.copy(pathlib.Path(__file__).with_name(name), folder)


def markdown(docstring: str) -> str:
  """A docstring with its formulas, lists and examples as blocks of code."""
  kind = lambda line: "text" if line.startswith("  ") else ""
  out: list[str] = []
  for block in re.split(r"\n\n+", docstring):
    lines = block.split("\n")
    if lines[0].startswith(">>> "):
      parts = [("pycon", lines)]
    elif lines[0] in ("Args:", "Raises:"):
      parts = [("", lines)]
    else:
      parts = [(name, [*run]) for name, run in itertools.groupby(lines, kind)]
    for name, part in parts:
      text = textwrap.dedent("\n".join(part))
      out.append(f"```{name}\n{text}\n```" if name else text)
  return "\n\n".join(out)


if __name__ == "__main__":
  write(pathlib.Path(sys.argv[1]))
