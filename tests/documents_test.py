"""The documents agree with the code: links, field tables, glossary, sizes."""

import json
import os
import pathlib
import re
import sys

import compiling
import pytest
from launchers import lines, ran

import brorl_jax
from brorl_jax import evaluate
from brorl_jax.data import dataset
from launch import fields

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENTS = sorted(
  path.relative_to(ROOT)
  for pattern in ("*.md", "brorl_jax/**/*.md", "configs/*.md", "launch/**/*.md")
  for path in ROOT.glob(pattern)
) + sorted(p.relative_to(ROOT) for p in ROOT.glob("third_party/**/*.md"))
CONFIGS = ROOT / "configs" / "README.md"


def prose(path: pathlib.Path) -> str:
  return re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)


def anchors(path: pathlib.Path) -> set[str]:
  headings = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
  return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    for heading in headings}  # fmt: skip


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_relative_link_exists(document):
  broken = []
  for link in re.findall(r"\]\(([^)\s]+)\)", prose(ROOT / document)):
    if re.match(r"[a-z]+:", link):
      continue
    name, _, anchor = link.partition("#")
    target = (ROOT / document).parent / name if name else ROOT / document
    if not target.exists():
      broken.append(link)
    elif anchor:
      page = target / "README.md" if target.is_dir() else target
      if anchor not in anchors(page):
        broken.append(link)
  assert not broken, f"{document} links to {broken}"


def test_the_tests_that_show_what_security_promises_exist():
  text = (ROOT / "SECURITY.md").read_text()
  named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
  assert len(named) > 9
  for file, function in named:
    assert f"def {function}" in (ROOT / file).read_text(), (file, function)
  assert text.count("\n") <= 100


@pytest.mark.parametrize(
  "folder",
  [d.parent.name for d in DOCUMENTS if d.match("brorl_jax/*/README.md")],
)
def test_a_folder_names_its_files(folder):
  path = ROOT / "brorl_jax" / folder
  text = (path / "README.md").read_text()
  files = {p.name for p in path.glob("*.py")} - {"__init__.py"}
  missing = {name for name in files if f"]({name})" not in text}
  assert not missing, f"brorl_jax/{folder}/README.md lacks {sorted(missing)}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_file_that_is_named_exists(document):
  """Paths in backticks: from the root, the package, or the document."""
  text = (ROOT / document).read_text()
  named = re.findall(
    r"`([\w./-]+/[\w.-]+\.(?:py|sh|md|yaml))(?:::?\w+)?`", text
  )
  places = (ROOT, ROOT / "brorl_jax", (ROOT / document).parent)
  gone = [
    name
    for name in named
    if not any((place / name).exists() for place in places)
    and not re.search("[A-Z]{4}", name)  # NAME.py stands for any
  ]
  assert not gone, f"{document} names {gone}"


def test_the_five_values_pass_through_files_that_exist():
  text = (ROOT / "WORKSPACE.md").read_text()
  walk = text.split("## How five values")[1].split("```")[1]
  walk = walk.replace("verdicts/DOMAIN", "")
  files = re.findall(r"\b[a-z_]+/[a-z_/]+\b", walk)
  package = ROOT / "brorl_jax"
  gone = [f for f in files if not (package / f"{f}.py").exists()]
  assert len(files) > 20 and not gone


@pytest.mark.parametrize(
  "name, lines, words", [("README.md", 180, 900), ("WORKSPACE.md", 200, 2200)]
)
def test_the_two_pages_stay_short(name, lines, words):
  text = (ROOT / name).read_text()
  assert text.count("\n") <= lines and len(text.split()) <= words


def test_all_documents_together_stay_short():
  pages = {(ROOT / document).resolve() for document in DOCUMENTS}
  assert sum(len(page.read_text().split()) for page in pages) <= 20_000


def test_the_folders_of_the_readme_exist():
  text = (ROOT / "README.md").read_text()
  section = text.split("## Folders")[1].split("\n## ")[0]
  rows = [line for line in section.splitlines() if line.startswith("| `")]
  named = re.findall(r"`([^`]+)`", " ".join(row.split("|")[1] for row in rows))
  assert named and not [name for name in named if not (ROOT / name).exists()]
  folders = {f"brorl_jax/{x.parts[-2]}/" for x in ROOT.glob("brorl_jax/*/*.py")}
  assert folders - {"brorl_jax/configs/", "brorl_jax/assets/"} <= {*named}


def test_the_field_tables_are_those_of_the_code():
  text = CONFIGS.read_text()
  assert fields.written(text) == text, "run: python -m launch.fields"


def test_the_domain_of_the_recipe_reads_and_judges(tmp_path):
  text = (ROOT / "brorl_jax" / "verdicts" / "README.md").read_text()
  (code,) = re.findall(r"```python\n# domain.py\n(.*?)```", text, re.DOTALL)
  names: dict = {}
  exec(code, names)
  echo = names["DOMAIN"]
  file = tmp_path / "echo.jsonl"
  line = {"domain": "echo", "prompt": "Say 4.", "answer": "4"}
  file.write_text(json.dumps(line) + "\n")
  (example,) = dataset.read([str(file)], domains={"echo": echo}).examples
  for response, status in ((" 4\n", "pass"), ("5", "fail")):
    assert echo.verify(response, example.entry, None).status == status
  file.write_text(json.dumps({**line, "answer": " "}) + "\n")
  with pytest.raises(dataset.DataError, match=r"echo\.jsonl.*answer"):
    dataset.read([str(file)], domains={"echo": echo})


def glossary(heading: str) -> list[str]:
  """The names that a section of configs/README.md explains."""
  section = CONFIGS.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
  return re.findall(r"^- `([^`]+)` \(", section, re.MULTILINE)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp("glossary") / "run"
  sums = [{"domain": "math", "prompt": f"{i} + 5?", "answer": f"{i + 5}"}
    for i in range(40)]  # fmt: skip
  file = folder.with_name("sums.jsonl")
  file.write_text("".join(json.dumps(line) + "\n" for line in sums))
  words = """--config.run.steps=1 --config.sampling.n=4
    --config.sampling.samples=16 --config.sampling.in_flight=16
    --config.sampling.max_new_tokens=2 --config.filter.keep=all
    --config.optim.rows=4 --config.optim.blocks=4 --config.optim.minibatches=1
    --config.eval.prompts=1 --config.eval.n=1 --config.theory.prompts=0"""
  done = ran(
    *(sys.executable, "-m", "brorl_jax.main", "--config=smoke"),
    *(f"--workdir={folder}", f"--config.data.files={file}", *words.split()),
    env=os.environ | {"XLA_FLAGS": compiling.QUICK, "USE_TORCH": "0"},
  )
  assert done.returncode == 0, done.stderr
  return folder


def test_the_glossary_has_every_metric_and_no_other(run):
  line = lines(run / "metrics.jsonl")[0]
  names = glossary("Metrics")
  assert len(set(names)) == len(names)
  # One row stands for the metrics of all tasks, and of all bins.
  written = {re.sub("^(reward/by_task/).*", r"\1", k) for k in line}
  one = {"reward/by_task/": "TASK"}
  written = {name + one.get(name, "") for name in written}
  written.add("time/rollout_s/PROCESS")  # of several
  missing, gone = written - set(names), set(names) - written
  assert not missing, f"not in the glossary of {CONFIGS}: {sorted(missing)}"
  assert not gone, (
    f"in the glossary of {CONFIGS}, but not written: {sorted(gone)}"
  )


def test_the_glossary_has_every_value_of_an_evaluation():
  record = {"id": "a", "domain": "gym",
    "task": "gcd", "sample": 0, "tokens": 3, "truncated": False, "score": 1.0,
    "pass": True, "status": "pass", "reason": "", "answer": "4"}  # fmt: skip
  values = evaluate.summary([record])["all"]
  assert glossary("Evaluation summary") == list(values)


def test_the_table_of_samples_and_records_has_their_fields(run):
  text = CONFIGS.read_text().split("## Samples and records\n")[1]
  written = {"samples": set(lines(run / "samples.jsonl")[0]),
    "records": set().union(*lines(run / "eval" / "records.jsonl"))}  # fmt: skip
  documented = {name: set() for name in written}
  for names, where in re.findall(r"^\| (`.+?`) \| (\w+) \|", text, re.M):
    for name in documented if where == "both" else [where]:
      documented[name] |= set(re.findall(r"`(\w+)`", names))
  assert documented == written


def test_the_version_is_the_same_in_every_place():
  changes = (ROOT / "CHANGELOG.md").read_text()
  (version, date), *_ = re.findall(r"## \[(\d+\.\d+\.\d+)\] - (.*)", changes)
  assert version == brorl_jax.__version__
  cited = f"version: {version}\ndate-released: {date}\n"
  assert cited in (ROOT / "CITATION.cff").read_text()
