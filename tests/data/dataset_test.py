"""Tests of brorl_jax/data/dataset.py: examples."""

import dataclasses
import datetime
import decimal
import json
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import mentions, refuses

from brorl_jax.data import dataset, schema
from brorl_jax.data.dataset import Data, DataError, digest, read
from brorl_jax.data.files import Place
from brorl_jax.data.schema import Form
from brorl_jax.verdicts import strict_json
from brorl_jax.verdicts.base import Example
from brorl_jax.verdicts.domains import DOMAINS
from brorl_jax.verdicts.strict_json import Refused

ROOT = pathlib.Path(__file__).parents[1]
HOSTILE = [
  json.loads(line)
  for line in (ROOT / "hostile/dataset_lines.jsonl").read_text().splitlines()
]


asked = lambda text: ({"role": "user", "content": text},)


def whole_number(record):
  if not record["answer"].strip("-").isdigit():
    raise ValueError(f"{record['answer']!r} cannot be read; write a number")
  return {"answer": record["answer"]}


def letter(record):
  return {"answer": record["answer"], "choices": record["choices"]}


def some_output(record):
  if not any(record["tests"]["outputs"]):
    raise ValueError("no expected output")
  return record["tests"]


# Simple ones, for what is tested here is how they are used.
CHECK = {
  "math": whole_number, "stem": letter, "code": some_output,
  "instructions": lambda record: {"instructions": record["instructions"]},
}  # fmt: skip
SIMPLE = {
  name: dataclasses.replace(
    domain, check_reference=CHECK.get(name, domain.check_reference)
  )
  for name, domain in DOMAINS.items()
}


def line(name="a-1", **fields):
  record = {"id": name, "domain": "math", "prompt": f"{name}?", "answer": "8"}
  record |= fields
  return json.dumps({k: v for k, v in record.items() if v is not None})


def write(path, *lines):
  path.write_text("".join(each + "\n" for each in lines))
  return str(path)


def raw(item) -> bytes:
  """The bytes that a line of the hostile corpus stands for."""
  if "hex" in item:
    return bytes.fromhex(item["hex"])
  if "parts" in item:
    return "".join(text * count for text, count in item["parts"]).encode()
  return item["line"].encode()


# What is not linear in the length takes minutes for some of them.
@pytest.mark.timeout(30)
@pytest.mark.parametrize("item", HOSTILE, ids=lambda item: item["why"])
def test_hostile_lines(tmp_path, item):
  path = tmp_path / "data.jsonl"
  path.write_bytes(line("first").encode() + b"\n" + raw(item))
  if item["expected"] == "ok":
    assert len(read(str(path), domains=SIMPLE).examples) == 2
    return
  # A pointer is the whole file, so it is seen where the file begins.
  at = 1 if "git-lfs" in item["why"] else 2
  if at == 1:
    path.write_bytes(raw(item))
  with pytest.raises(DataError) as error:
    read(str(path), domains=SIMPLE)
  field = f", field {item['field']!r}" if item["field"] else ""
  text = str(error.value)
  assert text.startswith(f"{path}, line {at}{field}: ")
  assert mentions(text, item["says"])
  assert "\n" not in text and len(text) < len(str(path)) + 250


def test_an_example_of_each_domain(tmp_path):
  puzzle = {
    "question": "Find the Greatest Common Divisor (GCD) of 8 and 12.",
    "answer": "4",
    "metadata": {"source_dataset": "gcd", "source_index": 0, "result": 4},
  }
  tests = {"inputs": ["1", "2"], "outputs": ["2", "4"]}
  pairs = [{"input": "1", "output": "2"}, {"input": "2", "output": "4"}]
  comma = [{"id": "punctuation:no_comma", "kwargs": {}}]
  chat = [{"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello."}]  # fmt: skip
  path = write(
    tmp_path / "my set.jsonl",
    line("m", answer=8),
    line("s", domain="stem", prompt="A) x B) y", choices=["x", "y"]),
    line("c", domain="code", tests=tests, answer=None, source="mine"),
    line("p", domain="code", tests=pairs, answer=None),
    line("i", domain="instructions", instructions=comma, answer=None),
    line("g", domain="gym", entry=puzzle, answer=None),
    line("t", prompt=None, messages=chat),
  )
  data = read(path, domains=SIMPLE)

  source, choice = "my-set", {"answer": "8", "choices": ["x", "y"]}
  assert data == Data([
    Example("m", "math", source, asked("m?"), {"answer": "8"}),
    Example("s", "stem", source, asked("A) x B) y"), choice),
    Example("c", "code", "mine", asked("c?"), tests),
    Example("p", "code", source, asked("p?"), tests),
    Example(
      "i", "instructions", source, asked("i?"), {"instructions": comma}
    ),
    Example("g", "gym", "gcd", asked("g?"), puzzle),
    Example("t", "math", source, tuple(chat), {"answer": "8"}),
  ], [Place(path, n) for n in range(1, 8)], [])  # fmt: skip


def test_a_puzzle_whose_answer_is_wrong_is_refused(tmp_path):
  metadata = {"source_dataset": "chain_sum"}
  entry = {"question": "1 + 1", "answer": "", "metadata": metadata}
  bad = line(domain="gym", entry=entry, answer=None)
  path = write(tmp_path / "a.jsonl", bad)
  with pytest.raises(DataError, match=r"empty.*answer"):
    read(path, domains=DOMAINS)


@pytest.mark.parametrize("names, said", [
  ([], "no data files"), (["none.jsonl"], "none.jsonl ... does not exist"),
  (["no*.jsonl"], "no*.jsonl ... pattern"),
  (["a.jsonl", "a.jsonl"], "a.jsonl ... twice"),
  (["a.jsonl", "*.jsonl"], "a.jsonl ... twice"),
  (["folder"], "folder ... .parquet"), (["list.json"], "list.json: not JSON: "),
  (["a.jsonl.gz"], "a.jsonl.gz ... .gz"),
  (["a.txt"], "a.txt ... .txt ... .jsonl ... .parquet"),
  (["empty.jsonl"], "empty.jsonl ... no records"), (["a.parquet"], "a.parquet"),
])  # fmt: skip
def test_files_that_cannot_be_read(tmp_path, monkeypatch, names, said):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "folder").mkdir()
  (tmp_path / "empty.jsonl").touch()
  (tmp_path / "list.json").write_text('[{"id": ')
  for name in ("a.jsonl", "a.jsonl.gz", "a.txt", "a.parquet"):
    write(tmp_path / name, line())
  for skip_bad in (False, True):
    with refuses(DataError, said):
      read(names, domains=SIMPLE, skip_bad=skip_bad)


def test_a_function_makes_records_of_rows(tmp_path):
  (tmp_path / "mine.py").write_text("""def row(row):
  if "q" not in row: raise ValueError("no q")
  return {"prompt": row["q"], "answer": row["a"]}""")
  rows = [{"q": "1 + 1?", "a": "2"}, {"n": 1}, {"n": 2}]
  path = tmp_path / "x.json"
  path.write_text(json.dumps([*rows, {"q": "x" * 2_000_000, "a": "2"}, 3]))
  how = f"{path}={tmp_path / 'mine.py'}:row"
  form = schema.form(how, [str(path)], (), Form(domain="math"))
  with refuses(DataError, f"{path}, row 2: no q"):
    read(str(path), form=form, domains=DOMAINS)
  data = read(str(path), form=form, domains=DOMAINS, skip_bad=True)
  assert [e.question for e in data.examples] == ["1 + 1?"]
  assert dataset.by_reason(data.skipped) == [
    f"2: no q; the first: {path}, row 2: no q",
    f"1: prompt refused; the first: {data.skipped[2]}",
    f"1: 3, not a JSON object; the first: {data.skipped[3]}",
  ]
  assert "2,000,000 characters" in str(data.skipped[2])
  path.write_text('{"q": "3?", "a": "3"}\n{"q": "4?"}')  # lines
  with refuses(DataError, f"{path}, row 2: ... :row, line 3: KeyError: 'a'"):
    read(str(path), form=form, domains=DOMAINS, skip_bad=True)


def test_an_id_is_taken_once_over_all_files(tmp_path):
  a = write(tmp_path / "a.jsonl", line("x"), line("y"))
  b = write(tmp_path / "b.jsonl", line("z"), line("y", prompt="other"))
  with refuses(DataError, f"{b}, line 2, field 'id': 'y' ... {a}, line 2"):
    read([a, b], domains=SIMPLE)


def test_repeats_are_counted_and_contradictions_refused(tmp_path):
  path = write(tmp_path / "a.jsonl", line("a", prompt="3 + 5?"),
    line("b", prompt="3  +\n5?"), line("c", prompt="3 + 6?", answer="9"),
    line("d", prompt="3 + 5?"))  # fmt: skip
  assert read(path, domains=SIMPLE).repeats == 2
  other = write(tmp_path / "b.jsonl", line("e", prompt="3 + 5?", answer="7"))
  said = f"{other}, line 1, field 'answer': '7' ... {path}, line 1 ... '8'"
  with refuses(DataError, said):
    read([path, other], domains=SIMPLE)


def test_other_questions_may_have_other_answers(tmp_path):
  def chat(*roles):
    return [{"role": role, "content": "The same."} for role in roles]

  path = write(tmp_path / "a.jsonl", line("a", prompt="What is g?", answer="8"),
    line("b", prompt="What is g?", domain="stem", choices=["g"], answer="9"),
    line("c", prompt=None, messages=chat("user", "user"), answer="1"), line("d",
      prompt=None, messages=chat("system", "user"), answer="2"))  # fmt: skip
  data = read(path, domains=SIMPLE)
  assert len(data.examples) == 4
  assert data.repeats == 1  # b asks what a asks, of another verifier


def test_skipping_says_what_was_skipped(tmp_path):
  path = write(tmp_path / "a.jsonl", line("a"), "{", line("a", prompt="other"),
    line("b", answer="eight"), line("c"))  # fmt: skip
  data = read(path, domains=SIMPLE, skip_bad=True)
  assert [e.id for e in data.examples] == ["a", "c"]
  assert data.places == [Place(path, 1), Place(path, 5)]
  skipped = [*map(str, data.skipped)]
  assert skipped[0].startswith(f"{path}, line 2: ")
  assert skipped[1].startswith(f"{path}, line 3, field 'id': ")
  why = "'eight' cannot be read; write a number"
  assert skipped[2:] == [f"{path}, line 4, field 'answer': {why}"]


def test_something_must_be_left(tmp_path):
  path = write(tmp_path / "a.jsonl", "{", "[]")
  with pytest.raises(DataError, match="all 2 records are unusable; the first"):
    read(path, domains=SIMPLE, skip_bad=True)


def test_a_missing_library_is_not_the_lines_fault(tmp_path):
  def absent(record):
    raise ImportError("puzzles need reasoning-gym")

  path = write(tmp_path / "a.jsonl", line())
  math = dataclasses.replace(DOMAINS["math"], check_reference=absent)
  with refuses(DataError, "line 1: cannot be checked ... reasoning-gym"):
    read(path, domains={"math": math}, skip_bad=True)


def test_the_digest_notices_every_change():
  one = Example("a", "math", "s", asked("q"), {"answer": "8"})
  two = dataclasses.replace(one, id="b")
  changed = [
    {"task": "t"}, {"messages": asked("r")}, {"entry": {"answer": "9"}},
    {"columns": {"level": 1}}, {"columns": {"level": 2}},
  ]  # fmt: skip
  others = [[dataclasses.replace(one, **x), two] for x in changed]
  others += [[one], [two, one], []]
  # Recorded once; a change here refuses to resume every run.
  assert digest([one, two]) == "80c531739f53819f4190cfc5e8faaa96"
  assert len({*map(digest, ([one, two], *others))}) == len(others) + 1


# Lines, strictly.


JSON = st.recursive(
  st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.text()
  | st.floats(allow_nan=False, allow_infinity=False),
  lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
  max_leaves=20,
)  # fmt: skip


@pytest.mark.ci
@settings(deadline=None, max_examples=20)
@given(st.dictionaries(st.text(), JSON), st.booleans())
def test_what_json_writes_is_read_back(record, plain):
  text = json.dumps(record, ensure_ascii=plain)
  assert strict_json.parse(text.encode()) == record


@pytest.mark.parametrize("depth, fits", [(16, True), (17, False)])
def test_sixteen_levels_fit(depth, fits):
  inner = "[" * (depth - 1) + "]" * (depth - 1)
  texts, lists = "[" * 90, "[]," * 90 + "1"
  # Brackets of texts do not count, nor those beside one another.
  text = f'{{"a": {inner}, "b": "{texts}", "c": [{lists}]}}'
  if fits:
    assert strict_json.parse(text.encode())["b"] == "[" * 90
  else:
    with pytest.raises(Refused, match="deeper than 16"):
      strict_json.parse(text.encode())


@pytest.mark.parametrize("extra, fits", [(0, True), (1, False)])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_line_of_a_megabyte_fits(tmp_path, extra, fits, end):
  def with_output(text):
    tests = {"inputs": ["1"], "outputs": [text]}
    return line("a", domain="code", tests=tests, answer=None)

  long = with_output("x" * (1_000_000 - len(with_output("")) + extra))
  assert len(long) == 1_000_000 + extra
  path = tmp_path / "a.jsonl"
  path.write_bytes((long + end + line("b") + end).encode())
  data = read(str(path), domains=SIMPLE, skip_bad=True)
  assert [p.line for p in data.places] == ([1, 2] if fits else [2])
  assert len(data.skipped) == (not fits)
  assert all(mentions(str(s), "1,000,000 bytes") for s in data.skipped)


# Parquet.


@pytest.fixture
def parquet(tmp_path):
  pyarrow = pytest.importorskip("pyarrow")
  from pyarrow import parquet

  def write(rows, name="a.parquet"):
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    table = pyarrow.table(columns)
    parquet.write_table(table, tmp_path / name)
    return str(tmp_path / name)

  return write


def test_a_program_may_have_a_time_limit_of_its_own(tmp_path):
  tests = {"inputs": ["1"], "outputs": ["2"]}
  code = {"domain": "code", "answer": None, "tests": tests}
  path = write(tmp_path / "a.jsonl", line("a", **code, time_limit=2))
  (example,) = read(path, domains=DOMAINS).examples
  assert example.entry == {"tests": tests, "time_limit": 2.0}
  for bad in (0, -1, 0.001, 60.5, "2", True, [2]):
    path = write(tmp_path / "b.jsonl", line("b", **code, time_limit=bad))
    with pytest.raises(DataError, match=r"time_limit.*\.01 to 60") as error:
      read(path, domains=DOMAINS)
    assert "\n" not in str(error.value)
  path = write(tmp_path / "c.jsonl", line("c", time_limit=2))
  with pytest.raises(DataError, match=r"time_limit.*not a field of .* math"):
    read(path, domains=DOMAINS)


def test_parquet_holds_the_same_records(tmp_path, parquet):
  of = lambda name, domain, **more: {"id": name, "domain": domain, **more}
  chat = [{"role": "user", "content": "Double."}]
  tests = {"inputs": ["1"], "outputs": ["2"]}
  ask = lambda **kwargs: [{"id": "x:y", "kwargs": kwargs}]
  rows = [
    of("m", "math", prompt="3 + 5?", answer="8"),
    of("c", "code", messages=chat, tests=tests),
    of("i", "instructions", prompt="Write.", instructions=ask(a=1)),
    of("j", "instructions", prompt="More.", instructions=ask(b=["z"])),
  ]
  as_lines = write(tmp_path / "a.jsonl", *map(json.dumps, rows))
  ours = read(parquet(rows), domains=SIMPLE)
  assert ours.examples == read(as_lines, domains=SIMPLE).examples
  assert str(ours.places[2]).endswith("a.parquet, row 3")


@pytest.mark.parametrize("column, field, said", [
  ({"answer": [0.5]}, "answer", "0.5 ... text"),
  ({"answer": [float("nan")]}, "answer", "NaN ... finite number"),
  ({"answer": [b"8"]}, "answer", "not JSON"),
  ({"answer": [datetime.date(2026, 1, 5)]}, "answer", "date ... not JSON"),
  ({"answer": [decimal.Decimal("8.0")]}, "answer", "not JSON"),
  ({"prompt": [b"\xff"]}, "prompt", "not JSON"),
  ({"answer": [True]}, "answer", "true ... text"),
  ({"answer": [None]}, "answer", "missing"),
  ({"anwser": ["8"]}, "answer", "missing ... 'anwser'"),
  ({"prompt": ["3 \x00 5"]}, "prompt", "character 3 ... U+0000"),
  ({"prompt": ["x" * 1_000_000]}, "", "longer ... 1,000,000 bytes"),
])  # fmt: skip
def test_rows_are_checked_as_lines_are(parquet, column, field, said):
  good = {"id": "a", "domain": "math", "prompt": "3 + 5?", "answer": "8"}
  name, [value] = column.popitem()
  row = {**good, name: value}
  if name not in good:
    del row["answer"]
  path = parquet([row])
  named = f", field '{field}'" if field else ""
  with pytest.raises(DataError, match=f"a.parquet, row 1{named}: ") as error:
    read(path, domains=SIMPLE)
  assert mentions(str(error.value), said)


def test_a_column_that_nobody_reads_may_hold_anything(parquet):
  day, nan = datetime.datetime(2026, 1, 5, 7), float("nan")
  values = [
    b"\x89PNG", nan, -float("inf"), decimal.Decimal("1.5"), day, day.date(),
  ]  # fmt: skip
  values += [day.time(), day - day, [1.0, nan], {"bytes": b"\xff"}]
  row = {"id": "a", "domain": "math", "prompt": "3 + 5?", "answer": "8"}
  odd = {f"odd{i}": value for i, value in enumerate(values)}
  path = parquet([{**row, **odd, "kept": 1}])
  own = dataclasses.replace(SIMPLE["math"], fields={}, check_reference=dict)
  for sole in (None, own):
    (one,) = read(path, domains=SIMPLE, form=Form(sole=sole)).examples
    assert one.columns.keys() - row.keys() == {"kept"}
  for name in (*odd, "odd0.inner"):
    with pytest.raises(DataError, match=rf"row 1, field '{name[:4]}.*': "):
      read(path, domains=SIMPLE, form=Form({"answer": name}))


def test_columns_that_are_no_text_or_there_twice_are_refused(tmp_path):
  pyarrow = pytest.importorskip("pyarrow")
  from pyarrow import parquet

  one, path = pyarrow.array(["a"]), tmp_path / "b.parquet"
  broken = pyarrow.array([b"3 \xff 5"]).view(pyarrow.string())
  for columns, names, said in (
    ([one, broken], ["answer", "prompt"], r"b.parquet, row 1.*(UTF|utf)"),
    ([one] * 3, ["id", "domain", "id"], r"column 'id'.*twice"),
  ):
    parquet.write_table(pyarrow.Table.from_arrays(columns, names=names), path)
    with pytest.raises(DataError, match=said):
      read(str(path), domains=SIMPLE, form=Form(domain="math"))


@pytest.mark.parametrize("damage", ["cut", "junk", "empty", "middle"])
def test_damaged_parquet_is_refused(parquet, damage):
  record = {"domain": "math", "answer": "8"}
  rows = [record | {"id": f"a-{n}", "prompt": f"{n}?"} for n in range(100)]
  path = pathlib.Path(parquet(rows))
  data = path.read_bytes()
  path.write_bytes({
    "cut": data[: len(data) // 2], "junk": b"PAR1" + b"\xff" * 100 + b"PAR1",
    "empty": b"", "middle": data[:20] + b"\xff" * 200 + data[220:],
  }[damage])  # fmt: skip
  with refuses(DataError, "a.parquet"):
    read(str(path), domains=SIMPLE)


def test_without_pyarrow_the_remedy_is_named(tmp_path, monkeypatch):
  monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
  path = write(tmp_path / "a.parquet", line())
  with pytest.raises(DataError, match=r"pyarrow .*'brorl_jax\[parquet\]'"):
    read(path, domains=SIMPLE)


def test_file_digests_change_with_any_byte(tmp_path, monkeypatch):
  one, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
  one.write_bytes(b"x\n")
  other.write_bytes(b"x\n")
  monkeypatch.chdir(tmp_path)
  before = dataset.file_digests("*.jsonl")
  assert list(before) == [str(one), str(other)]
  assert len({*before.values()}) == 1
  other.write_bytes(b"x \n")
  after = dataset.file_digests(["a.jsonl", str(other)])
  assert after[str(one)] == before[str(one)]
  assert after[str(other)] != before[str(other)]
  other.unlink()
  with pytest.raises(DataError, match=r"b\.jsonl"):
    dataset.file_digests(str(other))


# Columns of other names, and further ones.


GSM8K = Form({"prompt": "question", "answer": "answer"}, "math")


def plain(path, *records):
  return write(path, *map(json.dumps, records))


def test_files_of_others_are_read_by_the_names_they_have(tmp_path):
  path = plain(tmp_path / "train.jsonl",
    {"question": "3 + 5?", "answer": "8", "level": 2, "tags": ["easy", None]},
    {"question": "3 + 6?", "answer": 9})  # fmt: skip
  data = read(path, form=GSM8K, domains=DOMAINS)

  def example(line, text, answer, **columns):
    how = asked(text), {"answer": answer}, columns
    return Example(f"train/{line}", "math", "train", *how)

  assert data.examples == [
    example(1, "3 + 5?", "8", level=2, tags=["easy", None]),
    example(2, "3 + 6?", "9"),
  ]
  assert data.columns == ("level", "tags")


def test_wrong_answers_in_columns_are_choices(tmp_path):
  """As in GPQA; the order is that of a hash, and no letter is preferred."""
  form = Form({"prompt": "Question", "answer": "Correct Answer"}, "stem")

  def row(question="Which?", right="3 eV", wrong=("4 eV", "5 eV"), **more):
    columns = {f"Incorrect Answer {i}": x for i, x in enumerate(wrong, 1)}
    revised = {"Pre-Revision Incorrect Answer 1": "6 eV"}
    return {"Question": question, "Correct Answer": right} | columns | revised

  def examples(*rows):
    path = plain(tmp_path / "gpqa.jsonl", *rows)
    return read(path, form=form, domains=DOMAINS).examples

  texts = [f"Which energy, {i}?" for i in range(30)]
  found = examples(*map(row, texts))
  for question, example in zip(texts, found, strict=True):
    choices, letter = example.entry["choices"], example.entry["answer"]
    assert sorted(choices) == ["3 eV", "4 eV", "5 eV"]
    assert choices["ABC".index(letter)] == "3 eV"
    a, b, c = choices
    assert example.question == f"{question}\n\nA) {a}\nB) {b}\nC) {c}"
  assert {example.entry["answer"] for example in found} == {*"ABC"}
  turned = examples(*(row(x, wrong=("5 eV", "4 eV")) for x in texts))
  assert [x.entry for x in turned] == [x.entry for x in found]
  # What has choices and a letter already.
  text = "Which?\nA) 4 eV\nB) 5 eV\nC) 3 eV"
  (whole,) = examples(row(text, "C"))
  assert (whole.question, whole.entry) == (text, {"answer": "C"})
  with refuses(DataError, "choices ... both '3 eV'; drop the question"):
    examples(row(wrong=("4 eV", "3 eV")))
  with refuses(DataError, "'Incorrect Answer 2' ... null; write it as text"):
    examples(row(wrong=("4 eV", None)))


def test_whole_numbers_are_answers_of_mathematics(tmp_path):
  for value in (142.0, [142.0], 142):
    path = plain(tmp_path / "amc.jsonl", {"question": "?", "answer": value})
    (example,) = read(path, form=GSM8K, domains=DOMAINS).examples
    assert example.entry == {"answer": "142"}
  for value in (0.5, 1e300, True):
    path = plain(tmp_path / "amc.jsonl", {"question": "?", "answer": value})
    with refuses(DataError, "answer ... write it as text"):
      read(path, form=GSM8K, domains=DOMAINS)


def test_what_is_inside_of_an_object_is_read_too(tmp_path, parquet):
  row = {
    "data_source": "gsm8k", "prompt": [{"role": "user", "content": "3 + 5?"}],
    "ability": "math", "reward_model": {"style": "rule", "ground_truth": "8"},
  }  # fmt: skip
  names = {"messages": "prompt", "answer": "reward_model.ground_truth"}
  names |= {"source": "data_source", "domain": "ability"}
  for path in (parquet([row]), plain(tmp_path / "a.jsonl", row)):
    [example] = read(path, form=Form(names), domains=DOMAINS).examples
    assert (example.id, example.domain) == ("a/1", "math")
    assert (example.task, example.question) == ("gsm8k", "3 + 5?")
    assert example.entry == {"answer": "8"}
    # The object is passed on as a whole.
    assert example.columns == {"reward_model": row["reward_model"]}


@pytest.mark.parametrize("changed, field, says", [
  ({"question": None, "qestion": "3 + 5?"}, "question",
    "missing ... config.data.fields ... 'qestion'"),
  ({"answer": None}, "answer", "missing ... config.data.fields"),
  ({"soruce": "mine", "domain": "math"}, "soruce", "did you mean source?"),
  ({"time_limit": 2, "domain": "math"}, "time_limit", "domain ... answer"),
  ({"domain": "maths"}, "domain", "'maths' ... unknown"),
  ({"id": 3, "domain": "math"}, "id", "3 ... text"),
  # Of lines that say nothing of ours, what could be no field is a column.
  ({"choises": ["8"]}, "", ""), ({"soruce": "mine"}, "", ""),
  ({"data_source": "mine"}, "", ""), ({"id": 3}, "", ""),
  ({"time_limit": 2, "choices": [1], "sources": "a"}, "", ""),
  ({"tests": {}, "entry": {}, "instructions": []}, "", ""),
  ({"id": "gsm8k/7", "source": "AIME 2024"}, "", ""),
  ({"domain": "algebra"}, "", ""),
  ({"messages": [{"role": "user", "content": "3 + 5?"}]}, "", ""),
])  # fmt: skip
def test_columns_pass_through_but_slips_do_not(tmp_path, changed, field, says):
  record = {"question": "3 + 5?", "answer": "8", "level": 2} | changed
  record = {k: v for k, v in record.items() if v is not None}
  path = plain(tmp_path / "a.jsonl", record)
  if not says:
    [example] = read(path, form=GSM8K, domains=DOMAINS).examples
    assert example.columns == {"level": 2, **changed}
    return
  with refuses(DataError, f"a.jsonl, line 1, field {field!r} ... {says}"):
    read(path, form=GSM8K, domains=DOMAINS)


@pytest.mark.parametrize("form, record, says", [
  (Form(), {"question": "q", "answer": "8", "domain": "math"},
    "'prompt': missing ... --config.data.fields=prompt:COLUMN"),
  (Form(), {"answer": "8", "prompt": "p"},
    "'domain': missing ... answer ... --config.data.domain=math"),
  (GSM8K, {"question": "", "answer": "8"}, "'prompt': empty ... 'question'"),
])  # fmt: skip
def test_the_column_and_the_remedy_are_named(tmp_path, form, record, says):
  path = plain(tmp_path / "a.jsonl", record)
  with refuses(DataError, f"{path}, line 1, field {says}"):
    read(path, form=form, domains=DOMAINS)


def test_a_line_may_have_another_domain_than_the_rest(tmp_path):
  path = plain(tmp_path / "a.jsonl", {"prompt": "3 + 5?", "answer": "8"},
    {"prompt": "A) x B) y", "answer": "A", "domain": "stem"})  # fmt: skip
  data = read(path, form=Form(domain="math"), domains=DOMAINS)
  assert [e.domain for e in data.examples] == ["math", "stem"]
  with pytest.raises(DataError, match=r"'sql'.*unknown"):
    read(path, form=Form(domain="sql"), domains=DOMAINS)


def test_lines_without_an_id_are_named_by_file_and_line(tmp_path):
  for folder in ("x", "y"):
    (tmp_path / folder).mkdir()
  texts = iter("abcdef")

  def make(name):
    rows = [{"prompt": next(texts), "answer": "8"} for _ in range(2)]
    return plain(tmp_path / name, {**rows[0], "id": "own-" + name[0]}, rows[1])

  form = Form(domain="math")
  one, other, held = map(make, ("x/train.jsonl", "y/train.jsonl", "z.jsonl"))
  ids = lambda *a, **k: [
    e.id for e in read(*a, form=form, domains=DOMAINS, **k).examples
  ]
  assert ids(one) == ["own-x", "train/2"]
  both = ["own-x", "x/train.jsonl/2", "own-y", "y/train.jsonl/2"]
  assert (ids([one, other]), ids([other, one])) == (both, both[2:] + both[:2])
  # Of a run's training and held-out files, no two have one id.
  assert ids(one, beside=[other]) == both[:2]
  assert ids(other, beside=[one]) == both[2:]
  assert ids(held, beside=[one]) == ["own-z", "z/2"]
  # An id of a line's own cannot look like one.
  ours = {"id": "b/1", "domain": "math", "prompt": "p", "answer": "8"}
  path = plain(tmp_path / "b.jsonl", ours)
  with pytest.raises(DataError, match=r"field 'id': 'b/1'.*1.*128"):
    ids(path)


def test_a_renamed_field_that_a_domain_has_not_is_a_column(tmp_path):
  tests = {"inputs": ["1"], "outputs": ["2"]}
  record = {"prompt": "Double.", "cases": tests, "gold": "print(2 * x)"}
  form = Form({"tests": "cases", "answer": "gold"}, "code")
  [example] = read(
    plain(tmp_path / "a.jsonl", record), form=form, domains=DOMAINS
  ).examples
  assert example.entry == {"tests": tests}
  assert example.columns == {"answer": "print(2 * x)"}
