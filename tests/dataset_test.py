import collections
import json
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brorl_jax.tasks import dataset, golds, strict
from brorl_jax.tasks.base import Example
from brorl_jax.tasks.dataset import Data, DataError, Skipped, digest, fit, read
from brorl_jax.tasks.records import Place
from brorl_jax.tasks.strict import Refused

ROOT = pathlib.Path(__file__).parent
HOSTILE = [
  json.loads(line)
  for line in (ROOT / "hostile/dataset_lines.jsonl").read_text().splitlines()
]


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
  **golds.CHECKS,
  "math": whole_number,
  "stem": letter,
  "code": some_output,
  "instructions": lambda record: {"instructions": record["instructions"]},
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
    assert len(read(str(path), check=CHECK).examples) == 2
    return
  # A pointer is the whole file, so it is seen where the file begins.
  at = 1 if "git-lfs" in item["why"] else 2
  if at == 1:
    path.write_bytes(raw(item))
  with pytest.raises(DataError) as error:
    read(str(path), check=CHECK)
  field = f", field {item['field']!r}" if item["field"] else ""
  text = str(error.value)
  assert text.startswith(f"{path}, line {at}{field}: ")
  assert item["says"] in text
  assert "\n" not in text and len(text) < len(str(path)) + 250


def test_the_corpus_has_both_kinds():
  counts = collections.Counter(item["expected"] for item in HOSTILE)
  assert counts["ok"] >= 10 and counts["refused"] >= 60
  assert [item["n"] for item in HOSTILE] == list(range(len(HOSTILE)))


def test_an_example_of_each_domain(tmp_path):
  puzzle = {
    "question": "Find the Greatest Common Divisor (GCD) of 8 and 12.",
    "answer": "4",
    "metadata": {"source_dataset": "gcd", "source_index": 0, "result": 4},
  }
  tests = {"inputs": ["1", "2"], "outputs": ["2", "4"]}
  pairs = [{"input": "1", "output": "2"}, {"input": "2", "output": "4"}]
  comma = [{"id": "punctuation:no_comma", "kwargs": {}}]
  chat = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello."},
  ]
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
  data = read(path, check=CHECK)

  def asked(text):
    return ({"role": "user", "content": text},)

  source, choice = "my-set", {"answer": "8", "choices": ["x", "y"]}
  assert data == Data(
    [
      Example("m", "math", source, asked("m?"), {"answer": "8"}),
      Example("s", "stem", source, asked("A) x B) y"), choice),
      Example("c", "code", "mine", asked("c?"), tests),
      Example("p", "code", source, asked("p?"), tests),
      Example(
        "i", "instructions", source, asked("i?"), {"instructions": comma}
      ),
      Example("g", "gym", "gcd", asked("g?"), puzzle),
      Example("t", "math", source, tuple(chat), {"answer": "8"}),
    ],
    [Place(path, n) for n in range(1, 8)],
    [],
  )


def test_a_puzzle_whose_answer_is_wrong_is_refused(tmp_path):
  metadata = {"source_dataset": "chain_sum"}
  entry = {"question": "1 + 1", "answer": "", "metadata": metadata}
  path = write(
    tmp_path / "a.jsonl", line(domain="gym", entry=entry, answer=None)
  )
  with pytest.raises(DataError, match="own answer does not pass: empty answer"):
    read(path)


def test_several_files_in_order_and_patterns_sorted(tmp_path):
  for name in ("b", "a", "c"):
    write(tmp_path / f"{name}.jsonl", line(name))
  paths = [str(tmp_path / "c.jsonl"), str(tmp_path / "[ab].jsonl")]
  data = read(paths, check=CHECK)
  assert [e.id for e in data.examples] == ["c", "a", "b"]
  assert [e.task for e in data.examples] == ["c", "a", "b"]


def test_what_was_read_is_not_held_twice(tmp_path):
  """The end of a line, and of the file, are no matter."""
  one = tmp_path / "a.jsonl"
  one.write_bytes(line("a").encode() + b"\r\n" + line("b").encode())
  assert [p.line for p in read(str(one), check=CHECK).places] == [1, 2]


@pytest.mark.parametrize(
  "names, said",
  [
    ([], "no data files are named"),
    (["none.jsonl"], "none.jsonl: there is no such file"),
    (["no*.jsonl"], "no*.jsonl: no file matches this pattern"),
    (["a.jsonl", "a.jsonl"], "a.jsonl: the file is named twice"),
    (["a.jsonl", "*.jsonl"], "a.jsonl: the file is named twice"),
    (["folder"], "folder: not a file; name the files"),
    (["a.json"], "a.json: .json is not read; write one object per line"),
    (["a.jsonl.gz"], "a.jsonl.gz: .gz is not read; unpack it"),
    (["a.txt"], "a.txt: .txt is not read; use .jsonl or .parquet"),
    (["empty.jsonl"], "empty.jsonl: the file has no records"),
    (["a.parquet"], "a.parquet"),
  ],
)
def test_files_that_cannot_be_read(tmp_path, monkeypatch, names, said):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "folder").mkdir()
  (tmp_path / "empty.jsonl").touch()
  for name in ("a.jsonl", "a.json", "a.jsonl.gz", "a.txt", "a.parquet"):
    write(tmp_path / name, line())
  for skip_bad in (False, True):
    with pytest.raises(DataError) as error:
      read(names, check=CHECK, skip_bad=skip_bad)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_an_id_is_taken_once_over_all_files(tmp_path):
  a = write(tmp_path / "a.jsonl", line("x"), line("y"))
  b = write(tmp_path / "b.jsonl", line("z"), line("y", prompt="other"))
  with pytest.raises(DataError) as error:
    read([a, b], check=CHECK)
  assert str(error.value) == (
    f"{b}, line 2, field 'id': 'y' is also in {a}, line 2; ids must be unique"
  )


def test_repeats_are_counted_and_contradictions_refused(tmp_path):
  path = write(
    tmp_path / "a.jsonl",
    line("a", prompt="3 + 5?"),
    line("b", prompt="3  +\n5?"),
    line("c", prompt="3 + 6?", answer="9"),
    line("d", prompt="3 + 5?"),
  )
  assert read(path, check=CHECK).repeats == 2
  other = write(tmp_path / "b.jsonl", line("e", prompt="3 + 5?", answer="7"))
  with pytest.raises(DataError) as error:
    read([path, other], check=CHECK)
  assert str(error.value) == (
    f"{other}, line 1, field 'answer': '7', but {path}, line 1 has the same"
    " prompt and '8'; keep one"
  )


def test_the_same_task_may_have_other_tests(tmp_path):
  path = write(
    tmp_path / "a.jsonl",
    *(
      line(
        name,
        domain="code",
        prompt="p",
        answer=None,
        tests={"inputs": [name], "outputs": [name]},
      )
      for name in "ab"
    ),
  )
  assert read(path, check=CHECK).repeats == 1


def test_other_questions_may_have_other_answers(tmp_path):
  def chat(*roles):
    return [{"role": role, "content": "The same."} for role in roles]

  path = write(
    tmp_path / "a.jsonl",
    line("a", prompt="What is g?", answer="8"),
    line("b", prompt="What is g?", domain="stem", choices=["g"], answer="9"),
    line("c", prompt=None, messages=chat("user", "user"), answer="1"),
    line("d", prompt=None, messages=chat("system", "user"), answer="2"),
  )
  data = read(path, check=CHECK)
  assert len(data.examples) == 4
  assert data.repeats == 1  # b asks what a asks, of another verifier


def test_skipping_says_what_was_skipped(tmp_path):
  path = write(
    tmp_path / "a.jsonl",
    line("a"),
    "{",
    line("a", prompt="other"),
    line("b", answer="eight"),
    line("c"),
  )
  seen = []
  data = read(path, check=CHECK, skip_bad=True, progress=seen.append)
  assert [e.id for e in data.examples] == ["a", "c"]
  assert data.places == [Place(path, 1), Place(path, 5)]
  assert [(s.place.line, s.field) for s in data.skipped] == [
    (2, ""),
    (3, "id"),
    (4, "answer"),
  ]
  assert data.skipped[2] == Skipped(
    Place(path, 4), "answer", "'eight' cannot be read; write a number"
  )
  assert str(data.skipped[2]) == (
    f"{path}, line 4, field 'answer': 'eight' cannot be read; write a number"
  )
  assert seen == [1, 2]


def test_something_must_be_left(tmp_path):
  path = write(tmp_path / "a.jsonl", "{", "[]")
  with pytest.raises(DataError, match="none of the 2 records can be used; the"):
    read(path, check=CHECK, skip_bad=True)


def test_a_missing_library_is_not_the_lines_fault(tmp_path):
  def absent(record):
    raise ImportError("puzzles need reasoning-gym; pip install reasoning-gym")

  path = write(tmp_path / "a.jsonl", line())
  with pytest.raises(
    DataError, match="line 1: cannot be checked: puzzles need"
  ):
    read(path, check={"math": absent}, skip_bad=True)


def test_fit_by_hand():
  examples = [
    Example(str(n), "math", "", ({"role": "user", "content": "x" * n},), {})
    for n in (3, 5, 4, 6)
  ]
  kept, dropped = fit(examples, lambda e: len(e.question), 4)
  assert [e.id for e in kept] == ["3", "4"]
  assert [e.id for e in dropped] == ["5", "6"]
  with pytest.raises(ValueError, match="limit is 0 tokens"):
    fit(examples, lambda e: 1, 0)


def test_the_digest_notices_every_change():
  def example(**changed):
    fields = {
      "id": "a",
      "domain": "math",
      "task": "s",
      "messages": ({"role": "user", "content": "q"},),
      "entry": {"answer": "8"},
    }
    return Example(**(fields | changed))

  base = [example(), example(id="b")]
  others = [
    base[:1],
    base[::-1],
    [example(task="t"), base[1]],
    [example(messages=({"role": "user", "content": "r"},)), base[1]],
    [example(entry={"answer": "9"}), base[1]],
    [],
  ]
  assert digest(base) == digest([example(), example(id="b")])
  # Recorded once; a change here refuses to resume every run.
  assert digest(base) == "80c531739f53819f4190cfc5e8faaa96"
  assert len({digest(each) for each in (base, *others)}) == len(others) + 1


# Lines, strictly.


JSON = st.recursive(
  st.none()
  | st.booleans()
  | st.integers(-(10**30), 10**30)
  | st.floats(allow_nan=False, allow_infinity=False)
  | st.text(),
  lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
  max_leaves=20,
)


@settings(deadline=None)
@given(st.dictionaries(st.text(), JSON), st.booleans())
def test_what_json_writes_is_read_back(record, plain):
  text = json.dumps(record, ensure_ascii=plain)
  assert strict.parse(text.encode()) == record


@settings(deadline=None)
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes_are_an_object_or_refused(data):
  try:
    assert isinstance(strict.parse(data), dict)
  except Refused as refused:
    assert "\n" not in str(refused)


@pytest.mark.parametrize("depth, fits", [(16, True), (17, False)])
def test_sixteen_levels_fit(depth, fits):
  inner = "[" * (depth - 1) + "]" * (depth - 1)
  texts, lists = "[" * 90, "[]," * 90 + "1"
  # Brackets of texts do not count, nor those beside one another.
  text = f'{{"a": {inner}, "b": "{texts}", "c": [{lists}]}}'
  if fits:
    assert strict.parse(text.encode())["b"] == "[" * 90
  else:
    with pytest.raises(Refused, match="deeper than 16"):
      strict.parse(text.encode())


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
  data = read(str(path), check=CHECK, skip_bad=True)
  assert [p.line for p in data.places] == ([1, 2] if fits else [2])
  assert [s.why[:27] for s in data.skipped] == (
    [] if fits else ["longer than 1,000,000 bytes"]
  )


def test_what_follows_a_long_line_keeps_its_number(tmp_path):
  path = write(tmp_path / "a.jsonl", "x" * 3_000_000, line("a"), "{")
  data = read(path, check=CHECK, skip_bad=True)
  assert data.places == [Place(path, 2)]
  assert [s.place.line for s in data.skipped] == [1, 3]


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
  (example,) = read(path).examples
  assert example.entry == {"tests": tests, "time_limit": 2.0}
  for bad in (0, -1, 0.001, 60.5, "2", True, [2]):
    path = write(tmp_path / "b.jsonl", line("b", **code, time_limit=bad))
    with pytest.raises(DataError, match=r"time_limit.*\.01 to 60") as error:
      read(path)
    assert "\n" not in str(error.value)
  path = write(tmp_path / "c.jsonl", line("c", time_limit=2))
  with pytest.raises(DataError, match=r"time_limit.*not for domain math"):
    read(path)


def test_parquet_holds_the_same_records(tmp_path, parquet):
  rows = [
    {"id": "m", "domain": "math", "prompt": "3 + 5?", "answer": "8"},
    {
      "id": "c",
      "domain": "code",
      "messages": [{"role": "user", "content": "Double."}],
      "tests": {"inputs": ["1"], "outputs": ["2"]},
    },
    {
      "id": "i",
      "domain": "instructions",
      "prompt": "Write.",
      "instructions": [{"id": "x:y", "kwargs": {"a": 1}}],
    },
    {
      "id": "j",
      "domain": "instructions",
      "prompt": "Write more.",
      "instructions": [{"id": "x:y", "kwargs": {"b": ["z"]}}],
    },
  ]
  as_lines = write(tmp_path / "a.jsonl", *map(json.dumps, rows))
  ours = read(parquet(rows), check=CHECK)
  theirs = read(as_lines, check=CHECK)
  assert ours.examples == theirs.examples
  assert str(ours.places[2]).endswith("a.parquet, row 3")


@pytest.mark.parametrize(
  "column, field, said",
  [
    ({"answer": [0.5]}, "answer", "0.5; write it as text"),
    ({"answer": [float("nan")]}, "answer", "NaN, no finite number"),
    ({"answer": [b"8"]}, "answer", "no JSON: .* bytes is not JSON"),
    ({"answer": [True]}, "answer", "true; write it as text"),
    ({"answer": [None]}, "answer", "missing"),
    ({"anwser": ["8"]}, "anwser", "unknown; did you mean answer?"),
    ({"prompt": ["3 \x00 5"]}, "prompt", r"character 3 is U\+0000"),
    ({"prompt": ["x" * 1_000_000]}, "", "longer than 1,000,000 bytes"),
  ],
)
def test_rows_are_checked_as_lines_are(parquet, column, field, said):
  good = {"id": "a", "domain": "math", "prompt": "3 + 5?", "answer": "8"}
  name, [value] = column.popitem()
  row = {**good, name: value}
  if name not in good:
    del row["answer"]
  path = parquet([row])
  named = f", field '{field}'" if field else ""
  with pytest.raises(DataError, match=f"a.parquet, row 1{named}: {said}"):
    read(path, check=CHECK)


def test_rows_are_counted_over_batches(parquet):
  rows = [
    {"id": f"a-{n}", "domain": "math", "prompt": f"{n}?", "answer": str(n)}
    for n in range(200)
  ]
  rows[150]["answer"] = "x"
  with pytest.raises(DataError, match="row 151, field 'answer'"):
    read(parquet(rows), check=CHECK)
  assert len(read(parquet(rows), check=CHECK, skip_bad=True).examples) == 199


def test_text_that_is_no_text_is_named(tmp_path, parquet):
  pyarrow = pytest.importorskip("pyarrow")
  from pyarrow import parquet

  broken = pyarrow.array([b"3 \xff 5"]).view(pyarrow.string())
  columns = {"id": ["a"], "domain": ["math"], "prompt": broken, "answer": ["8"]}
  path = tmp_path / "b.parquet"
  parquet.write_table(pyarrow.table(columns), path)
  with pytest.raises(DataError, match=r"b.parquet, row 1.*(UTF|utf)"):
    read(str(path), check=CHECK)


def test_a_column_there_twice_is_refused(tmp_path):
  pyarrow = pytest.importorskip("pyarrow")
  from pyarrow import parquet

  columns = [pyarrow.array(["a"])] * 3
  names = ["id", "domain", "id"]
  path = tmp_path / "b.parquet"
  parquet.write_table(pyarrow.Table.from_arrays(columns, names=names), path)
  with pytest.raises(DataError, match="column 'id' is there twice"):
    read(str(path), check=CHECK)


@pytest.mark.parametrize("damage", ["cut", "junk", "empty", "middle"])
def test_damaged_parquet_is_refused(tmp_path, parquet, damage):
  path = pathlib.Path(
    parquet(
      [
        {"id": f"a-{n}", "domain": "math", "prompt": f"{n}?", "answer": "8"}
        for n in range(100)
      ]
    )
  )
  data = path.read_bytes()
  path.write_bytes(
    {
      "cut": data[: len(data) // 2],
      "junk": b"PAR1" + b"\xff" * 100 + b"PAR1",
      "empty": b"",
      "middle": data[:20] + b"\xff" * 200 + data[220:],
    }[damage]
  )
  with pytest.raises(DataError, match=r"a\.parquet") as error:
    read(str(path), check=CHECK)
  assert "\n" not in str(error.value)


def test_without_pyarrow_the_remedy_is_named(tmp_path, monkeypatch):
  monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
  path = write(tmp_path / "a.parquet", line())
  with pytest.raises(DataError, match=r"needs pyarrow .*; pip install pyarrow"):
    read(path, check=CHECK)


def test_the_documented_limits_are_the_enforced_ones():
  text = " ".join((dataset.__doc__ or "").split())
  assert "at most 1 MB and 16 levels" in text
  assert (strict.MAX_LINE, strict.MAX_DEPTH) == (10**6, 16)


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
  with pytest.raises(DataError, match=r"b\.jsonl: there is no such file"):
    dataset.file_digests(str(other))
