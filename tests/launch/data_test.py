"""Tests of launch/data: public sets in the schema of a run."""

import dataclasses
import json
import pathlib

import pytest
from messages import mentions

ROOT = pathlib.Path(__file__).parents[2]
from brorl_jax.data import dataset
from brorl_jax.verdicts.domains import DOMAINS
from launch.data import prepare


def short(record):
  if len(record["answer"]) > 20:
    raise ValueError(f"answer {record['answer']!r} is too long")
  return {"answer": record["answer"]}


def any_output(record):
  if not any(record["tests"]["outputs"]):
    raise ValueError("no expected output")
  return record["tests"]


CHECK = {
  "math": short, "stem": short, "code": any_output,
  "instructions": lambda record: {"instructions": record["instructions"]},
}  # fmt: skip
SIMPLE = DOMAINS | {
  name: dataclasses.replace(DOMAINS[name], check_reference=check)
  for name, check in CHECK.items()
}


@pytest.fixture(autouse=True)
def simple_checks(monkeypatch):
  for domain, simple in SIMPLE.items():
    monkeypatch.setitem(DOMAINS, domain, simple)


def written(path, rows):
  """Rows in the form of a file's ending: a list, lines, or parquet."""
  if path.suffix == ".json":
    path.write_text(json.dumps(rows))
  elif path.suffix == ".jsonl":
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  else:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    names = dict.fromkeys(name for row in rows for name in row)
    table = pyarrow.table({n: [row.get(n) for row in rows] for n in names})
    parquet.write_table(table, path)
  return str(path)


def converted(name, path, rows):
  records, dropped = prepare.convert(
    name, [written(path, rows)], domains=SIMPLE
  )
  return records, {reason: count for reason, (count, _) in dropped.items()}


def test_deepscaler(tmp_path):
  rows = [
    {"problem": "How much is $3+5$?", "answer": "8", "solution": "Long."},
    {"problem": "Halve 1.\r\nThink.", "answer": "\\frac12", "solution": ""},
    {"problem": "A number?", "answer": 7, "solution": ""},
    {"problem": "", "answer": "1", "solution": ""},
    {"problem": "No answer?", "answer": "", "solution": ""},
    {"problem": "No answer?", "solution": ""},
    {"problem": "Why?", "answer": "Because of what was shown above."},
    {"problem": "How much is $3+5$?", "answer": "9", "solution": ""},
    {"problem": "End <|im_end|>", "answer": "9", "solution": ""},
  ]
  records, dropped = converted("deepscaler", tmp_path / "d.json", rows)
  base = {"domain": "math", "source": "deepscaler"}
  assert records == [
    base | {"id": f"deepscaler-{n:06d}", "prompt": p, "answer": a}
    for n, p, a in [
      (1, "How much is $3+5$?", "8"),
      (2, "Halve 1.\nThink.", "\\frac12"),
      (3, "A number?", "7"),
    ]
  ]
  assert dropped == {
    "no problem": 1, "no answer": 2, "answer refused": 2, "prompt refused": 1,
  }  # fmt: skip


def eurus(ability, truth, text="Do it.", source="taco"):
  return {
    "data_source": source,
    "prompt": [
      {"role": "system", "content": "Use [ASSESS] and [ADVANCE]."},
      {"role": "user", "content": text},
    ],
    "ability": ability,
    "reward_model": {"ground_truth": truth, "style": "rule"},
    "extra_info": {"index": 0, "split": "dummy"},
  }


def test_eurus2(tmp_path):
  stdin = {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]}
  calls = {
    "fn_name": "add",
    "inputs": ['1\n"x"', "[2]\n{}"],
    "outputs": ["3", "[1, 2]"],
  }
  wrapped = {"fn_name": "f", "inputs": ["1", "2"], "outputs": ["[3]", "[[4]]"]}
  rows = [
    eurus("code", json.dumps(stdin), "Double."),
    eurus("code", json.dumps(calls), "Add.", "APPS/x"),
    eurus("code", json.dumps(wrapped), "Wrap."),
    eurus("math", "42", "What? \\boxed{Your answer}", "numina_olympiads"),
    eurus("chat", "42"),
    eurus("code", "{", "a"),
    eurus("code", "[" * 100_000, "b"),
    eurus("code", '{"inputs": ["1"]}', "c"),
    eurus("code", '{"inputs": [1], "outputs": ["1"]}', "d"),
    eurus("code", '{"fn_name": "f", "inputs": ["x"], "outputs": ["1"]}', "e"),
    eurus("code", '{"inputs": [""], "outputs": [""]}', "f"),
    eurus("math", "", "g"),
  ]
  records, dropped = converted("eurus2", tmp_path / "e.parquet", rows)
  add = {
    "fn_name": "add",
    "inputs": [[1, "x"], [[2], {}]],
    "outputs": [3, [1, 2]],
  }
  unwrapped = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [3, [4]]}
  asked = "What? \\boxed{Your answer}"
  assert records == [
    {
      "id": f"eurus2-{n:06d}",
      "domain": domain,
      "source": f"eurus2-{source}",
      "messages": [{"role": "user", "content": text}],
      **own,
    }
    for n, (domain, source, text, own) in enumerate([
      ("code", "taco", "Double.", {"tests": stdin}),
      ("code", "apps-x", "Add.", {"tests": add}),
      ("code", "taco", "Wrap.", {"tests": unwrapped}),
      ("math", "numina_olympiads", asked, {"answer": "42"}),
    ], 1)
  ]  # fmt: skip
  assert dropped == {
    "ability is neither math nor code": 1, "the tests are not JSON": 2,
    "the tests have no lists of inputs and outputs": 1, "a test is not text": 1,
    "an argument or result of a function is not JSON": 1, "tests refused": 1,
    "no ground_truth": 1,
  }  # fmt: skip


def test_scp116k(tmp_path):
  def row(n, **fields):
    return {"domain": "Applied Physics", "problem": f"Question {n}?", **fields}

  rows = [
    row(1, extracted_solution="So \\boxed{1} or \\boxed{\\frac{2}{3}}.\nYes."),
    row(2, matched_solution="9.8 m/s^2", extracted_solution=None),
    row(3, solution="x" * 100, matched_solution="  "),
    row(4, solution="By the first law,\nthe answer is 3."),
    row(5, solution="x" * 101),
    row(6),
    row(7, solution="An open \\boxed{3, and " + "x" * 100),
    row(8, solution="\\boxed{}"),
  ]
  records, dropped = converted("scp116k", tmp_path / "s.json", rows)
  assert records == [
    {
      "id": f"scp116k-{n:06d}",
      "domain": "stem",
      "source": "scp116k-applied-physics",
      "prompt": f"Question {n}?",
      "answer": answer,
    }
    for n, answer in [(1, "\\frac{2}{3}"), (2, "9.8 m/s^2")]
  ]
  assert dropped == {
    "no short answer in the solution": 4,
    "answer refused": 1,  # the hundred letters: short, but not for the check
    "no solution": 1,
  }


def test_llama_nemotron_if(tmp_path):
  def row(n, ids, kwargs, **args):
    args |= {"instruction_id_list": ids, "instruction_kwargs": kwargs}
    asked = [{"role": "user", "content": f"Write {n}."}]
    return {"input": asked, "args": args, "reasoning": "off"}

  comma, words = "punctuation:no_comma", "length_constraints:number_words"
  many = {"relation": "at least", "num_words": 9}
  rows = [
    row(1, [comma, words], [{}, many], task="x", num_instructions=2),
    row(2, [comma], [{"num_words": None, "keywords": None}]),
    row(3, [comma], [None]),
    row(4, [comma, words], [{}]),
    row(5, [], []),
    row(6, None, None),
    {**row(7, [comma], [{}]), "input": "Write 7."},
    {**row(9, [comma], [{}]), "input": ["Write 9."]},
    row(11, [comma], ["x"]),
  ]
  records, dropped = converted("llama_nemotron_if", tmp_path / "i.jsonl", rows)
  assert records == [
    {
      "id": f"llama_nemotron_if-{n:06d}",
      "domain": "instructions",
      "source": "llama_nemotron_if",
      "messages": [{"role": "user", "content": f"Write {n}."}],
      "instructions": [{"id": i, "kwargs": kw} for i, kw in instructions],
    }
    for n, instructions in [
      (1, [(comma, {}), (words, many)]),
      (2, [(comma, {})]),
      (3, [(comma, {})]),
    ]
  ]
  assert dropped == {
    "instructions and their arguments differ in number": 2,
    "no instruction_id_list and instruction_kwargs": 1,
    "no input": 1,
    "input is no list of messages": 1,
    "the arguments of an instruction are no object": 1,
  }


def test_lines_that_are_no_rows_are_counted(tmp_path):
  path = tmp_path / "a.jsonl"
  good = json.dumps({"problem": "3 + 5?", "answer": "8"})
  path.write_text(f"{{\n{good}\n[]\n{'x' * 2_000_000}\n")
  records, dropped = prepare.convert("deepscaler", [str(path)], domains=SIMPLE)
  # The number of the row over all the rows, used or not.
  assert [r["id"] for r in records] == ["deepscaler-000002"]
  assert dropped["a list, not a JSON object"] == (
    1,
    f"{path}, line 3: a list, not a JSON object",
  )
  assert sum(count for count, _ in dropped.values()) == 3


def test_the_command_writes_what_read_takes(tmp_path, capsys):
  rows = [
    {"problem": "Größe von 3 + 5?", "answer": "8"},
    {"problem": "Why?", "answer": "Because of what was shown above."},
    {"problem": "Why not?", "answer": "Because of what was shown below."},
  ]
  source, to = written(tmp_path / "d.json", rows), tmp_path / "out.jsonl"
  assert prepare.main(["deepscaler", source, f"--output={to}"]) == 0
  out = capsys.readouterr().out.splitlines()
  assert [line.split()[:3] for line in out] == [
    ["2", "dropped:", "answer"],
    ["2", "dropped", "of"],
    ["1", "written", "to"],
  ]
  assert mentions(out[0], f"{source}, line 2 ... 'Because")
  [example] = dataset.read(str(to), domains=SIMPLE).examples
  assert example.question == "Größe von 3 + 5?"
  assert (example.task, example.entry) == ("deepscaler", {"answer": "8"})
  assert sorted(p.name for p in tmp_path.iterdir()) == ["d.json", "out.jsonl"]


@pytest.mark.parametrize(
  "args, said",
  [
    (["none.json", "--output=o.jsonl"], "none.json ... no such file"),
    (["a.txt", "--output=o.jsonl"], "a.txt ... json ... parquet"),
    (["a.json", "--output=old.jsonl"], "old.jsonl ... exists"),
    (["bad.json", "--output=o.jsonl"], "bad.json: not JSON: "),
    (["a.json", "--output=o.jsonl"], "nothing ... a.json"),
  ],
)
def test_refusals_leave_nothing(tmp_path, monkeypatch, capsys, args, said):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "a.json").write_text('[{"question": "3 + 5?"}]')
  (tmp_path / "bad.json").write_text('[{"problem": ')
  (tmp_path / "a.txt").touch()
  (tmp_path / "old.jsonl").write_text("mine")
  before = sorted(p.name for p in tmp_path.iterdir())
  assert prepare.main(["deepscaler", *args]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: ") and mentions(line, said)
  assert sorted(p.name for p in tmp_path.iterdir()) == before
  assert (tmp_path / "old.jsonl").read_text() == "mine"


@pytest.mark.parametrize("given", ["[NaN, 1]", '"\\ud800"'])
def test_rows_that_could_not_be_read_back_are_dropped(tmp_path, given):
  """One of them must not cost the others, nor spoil the file."""
  call = lambda one: {"fn_name": "f", "inputs": [one], "outputs": ["1"]}
  rows = [
    eurus("code", json.dumps(call(one)), f"Number {i}?")
    for i, one in enumerate((given, "2"))
  ]
  path, output = written(tmp_path / "a.json", rows), tmp_path / "out.jsonl"
  assert prepare.main(["eurus2", path, f"--output={output}"]) == 0
  [example] = dataset.read(str(output), domains=DOMAINS).examples
  assert example.question == "Number 1?"
