"""Tests of brorl_jax/data/files.py: files, folders, the hub."""

import os
import pathlib

import pytest
from messages import refuses

from brorl_jax.data import files
from brorl_jax.data.files import DataError, File


@pytest.fixture
def folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)

  def make(*names):
    for name in names:
      path = pathlib.Path(name)
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text("{}\n")

  return make


def paths(*given):
  return [file.path for file in files.find(given)]


def refused(said, *given):
  with refuses(DataError, said):
    files.find(given)


def test_a_folder_is_all_files_in_it_sorted(folder):
  folder("mine/b.jsonl", "mine/a.parquet", "mine/deep/c.arrow", "mine/READ.md")
  # What tools keep beside them is no data.
  folder("mine/.cache/huggingface/d.jsonl", "mine/cache-12ab.arrow")
  found = files.find(["mine/"])
  want = ["mine/a.parquet", "mine/b.jsonl", "mine/deep/c.arrow"]
  assert [f.path for f in found] == want
  # .json is also the ending of what describes a set.
  folder("mine/x.json", "b/state.json", "b/x.json", "b/dataset_info.json")
  assert len(paths("mine")) == 3 and paths("b") == paths("b:x") == ["b/x.json"]
  # One data set, however many files it has.
  assert {f.source for f in found} == {"mine"}


def test_a_folder_of_several_splits_wants_one_of_them(folder):
  folder("set/data/train-00000-of-00002.parquet",
    "set/data/train-00001-of-00002.parquet",
    "set/data/train_sft-00000-of-00001.parquet",
    "set/data/test-00000-of-00001.parquet")  # fmt: skip
  refused("set:test", "set")
  assert paths("set:train") == ["set/data/train-00000-of-00002.parquet",
    "set/data/train-00001-of-00002.parquet"]  # fmt: skip
  assert paths("set:train_sft") == ["set/data/train_sft-00000-of-00001.parquet"]
  assert paths("set:data/test") == paths("set:test")
  refused("set:dev ... 'dev'", "set:dev")


@pytest.mark.parametrize(
  "name", ["train.jsonl", "train/0000.parquet", "train-0-of-1.arrow"]
)
def test_a_split_is_a_file_a_folder_or_the_beginning_of_a_name(folder, name):
  folder(f"set/{name}", "set/trained.jsonl", "set/no-train.jsonl")
  assert paths("set:train") == [f"set/{name}"]


def test_a_split_of_two_parts_of_a_data_set_wants_one_of_them(folder):
  folder("gsm8k/main/train-0.parquet", "gsm8k/socratic/train-0.parquet")
  says = "gsm8k:train: 'train' ... 'main/' ... 'socratic/' ... socratic/train"
  refused(says, "gsm8k:train")
  assert paths("gsm8k:main/train") == ["gsm8k/main/train-0.parquet"]
  folder("gsm8k/main/test-0.parquet")
  refused("gsm8k:main ... gsm8k:main/test", "gsm8k:main")
  folder("two/train.jsonl", "two/more/train.jsonl")
  refused("'train' ... './' ... 'more/'", "two:train")
  # Shards in folders of their own are one split.
  folder("big/train/1/train-0.parquet", "big/train/2/train-0.parquet")
  assert len(paths("big:train")) == 2


def test_a_name_with_a_colon_is_a_file_if_there_is_one(folder):
  name = "set:b.jsonl"
  folder("set/a.jsonl", name)
  assert files.find(name) == [File(name, "set-b", name)]


@pytest.mark.parametrize("given, says", [
  ((), "no data files ... at least one"),
  (("set", "set/a.jsonl"), "set/a.jsonl ... twice ... once"),
  (("bare",), "bare ... parquet"),
  (("openai/gsm8k",), "openai/gsm8k ... hub:openai/gsm8k"),
  (("data/b.jsonl",), "data/b.jsonl ... does not exist"),
  (("a.jsonl,b.jsonl",), "a.jsonl,b.jsonl ... 'a.jsonl','b.jsonl'"),
])  # fmt: skip
def test_files_that_are_not_there(folder, given, says):
  folder("set/a.jsonl", "bare/data.txt", "a,b.jsonl")
  refused(says, *given)
  assert paths("a,b.jsonl") == ["a,b.jsonl"]


def names(*given):
  found = files.names(File(path, "") for path in given)
  return {os.path.relpath(path): name for path, name in found.items()}


def test_names_are_as_short_as_they_can_be(folder):
  assert names("x/a.jsonl", "x/b c.jsonl") == {
    "x/a.jsonl": "a", "x/b c.jsonl": "b-c"
  }  # fmt: skip
  assert names("x/a.jsonl", "x/a.parquet", "x/b.jsonl") == {
    "x/a.jsonl": "a.jsonl", "x/a.parquet": "a.parquet", "x/b.jsonl": "b"
  }  # fmt: skip
  assert names("x/train.jsonl", "y/train.jsonl", "y/z/train.jsonl") == {
    "x/train.jsonl": "x/train.jsonl", "y/train.jsonl": "y/train.jsonl",
    "y/z/train.jsonl": "z/train.jsonl",
  }  # fmt: skip
  some = ["a/x/t.jsonl", "b/x/t.jsonl", "t.jsonl"]
  assert names(*some)["a/x/t.jsonl"] == "a/x/t.jsonl"
  assert names(*some) == names(*reversed(some)) == names(*some, *some)
  # Told apart by nothing that a name may have: the ids will clash, and say so.
  both = names("a b.jsonl", "a-b.jsonl")
  assert len(both) == 2 and len(set(both.values())) == 1


@pytest.fixture
def hub(tmp_path, monkeypatch):
  import huggingface_hub

  asked = []
  place = tmp_path / "cache"

  def download(name, *, repo_type, revision, allow_patterns):
    import fnmatch

    assert repo_type == "dataset"
    asked.append((name, revision))
    kept = place / str(len(asked))
    kept.mkdir(parents=True)
    for path in there[name]:
      if any(fnmatch.fnmatch(path, pattern) for pattern in allow_patterns):
        (kept / path).parent.mkdir(parents=True, exist_ok=True)
        (kept / path).write_text("{}\n")
    return str(kept)

  there = {}
  monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
  files._downloaded.cache_clear()
  yield there, asked
  files._downloaded.cache_clear()


GSM8K = ["README.md", "main/test-00000-of-00001.parquet",
  "main/train-00000-of-00001.parquet", "socratic/test-00000-of-00001.parquet",
  "socratic/train-00000-of-00001.parquet"]  # fmt: skip


def below(found):
  return ["/".join(pathlib.Path(f.path).parts[-2:]) for f in found]


def test_a_data_set_of_the_hub_is_downloaded_once(hub):
  there, asked = hub
  there["openai/gsm8k"] = GSM8K
  for _ in range(2):
    found = files.find("hub:openai/gsm8k:main/train")
    assert below(found) == ["main/train-00000-of-00001.parquet"]
    assert [f.source for f in found] == ["gsm8k"]
  assert asked == [("openai/gsm8k", None)]
  # No more than the split is asked for.
  folder = pathlib.Path(found[0].path).parents[1]
  assert [p.name for p in folder.rglob("*.parquet")] == [
    "train-00000-of-00001.parquet"
  ]


def test_a_split_that_the_hub_has_twice_wants_more(hub):
  hub[0]["openai/gsm8k"] = GSM8K
  refused("'train' ... 'main/' ... 'socratic/'", "hub:openai/gsm8k:train")
  refused(
    "hub:openai/gsm8k@abc ... hub:openai/gsm8k:test@abc", "hub:openai/gsm8k@abc"
  )


def test_a_revision_may_be_a_branch_with_slashes(hub):
  there, asked = hub
  there["squad"] = ["plain/train/0000.parquet"]
  found = files.find("hub:squad:train@refs/convert/parquet")
  assert below(found) == ["train/0000.parquet"]
  assert asked == [("squad", "refs/convert/parquet")]
  files.find("hub:squad@refs/convert/parquet")
  assert len(asked) == 2  # all of it is another download


def test_files_that_are_not_read_have_a_remedy(hub):
  hub[0]["some/set"] = ["train.json.gz", "train.csv"]
  refused("hub:some/set ... hub:some/set@refs/convert/parquet", "hub:some/set")
  refused(".arrow", "hub:some/set@main")


@pytest.mark.parametrize(
  "name", ["hub:", "hub:a b", "hub:a/b/c", "hub:a/b:", "hub:a/b:x@", "hub:/b"]
)
def test_what_is_no_name_of_the_hub_is_refused(name):
  refused(f"{name}: malformed; write hub:organisation/name", name)


def test_without_a_network_the_command_that_helps_is_told(hub, monkeypatch):
  import huggingface_hub

  why = ["no network\nand much more"]

  def fails(*args, **kwargs):
    raise OSError(*why)

  monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
  refused("hub:openai/gsm8k ... 'hf ... openai/gsm8k --repo-type "
    '... --revision v1 --include "*main/train[-./]*"\' ... --local-dir gsm8k',
    "hub:openai/gsm8k:main/train@v1")  # fmt: skip
  refused(
    "hub:x ... 'hf download x --repo-type dataset' ... --local-dir x", "hub:x"
  )
  why.clear()
  refused("hub:x ... (OSError)", "hub:x")


def test_what_is_held_of_a_line_is_bounded(tmp_path, monkeypatch):
  monkeypatch.setattr(files, "_MAX_HELD", 64)
  path = tmp_path / "a.jsonl"
  path.write_text('{"a": 1}\n' + "x" * 300 + '\n{"a": 2}')
  read = {n: str(found) for n, found in files.read(str(path), most=50)}
  long = "longer than 50 bytes; shorten the example"
  assert read == {1: "{'a': 1}", 2: long, 3: "{'a': 2}"}


def test_an_arrow_stream_holds_the_same_records(tmp_path):
  pyarrow = pytest.importorskip("pyarrow")
  rows = [{"id": f"a-{i}", "answer": None if i == 70 else i} for i in range(90)]
  table = pyarrow.Table.from_pylist(rows)
  path = tmp_path / "train" / "data-00000-of-00001.arrow"
  path.parent.mkdir()
  with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
    stream.write_table(table, max_chunksize=40)
  [file] = files.find(f"{tmp_path}:train")
  read = [*files.read(file.path)]
  assert [number for number, _ in read] == [*range(1, 91)]
  assert [r for _, r in read] == [
    {k: v for k, v in row.items() if v is not None} for row in rows
  ]
  assert str(files.Place(file.path, 3)).endswith(".arrow, row 3")
  path.write_bytes(path.read_bytes()[:100])
  with pytest.raises(DataError, match=r"\.arrow: not arrow: "):
    [*files.read(str(path))]


def test_rows_of_a_csv_file_are_records_of_texts(folder):
  path = pathlib.Path("a.csv")
  text = (
    '\ufeffprompt,answer,note\r\n"1, 2\r\nor 3?",2,\r\n\r\né,"a ""b""",x\r\n'
  )
  path.write_bytes(text.encode())
  assert [*files.read("a.csv")] == [
    (3, {"prompt": "1, 2\r\nor 3?", "answer": "2"}),
    (5, {"prompt": "é", "answer": 'a "b"', "note": "x"}),
  ]
  assert paths("a.csv") == ["a.csv"]


@pytest.mark.parametrize("text, says", [
  (b"a,b\n1,2\n3\n", "a.csv, line 3: 1 values for 2 columns"),
  (b"a,a\n1,2\n", "two columns"), (b"a\n\xff\n", "a.csv, line ... utf-8"),
  (b'a\n"1\n', "a.csv, line ... cannot be read"), (b"a\n", "no records"),
  (b"", "no records"),
])  # fmt: skip
def test_a_csv_file_that_is_none_is_refused(folder, text, says):
  pathlib.Path("a.csv").write_bytes(text)
  with refuses(DataError, says):
    [*files.read("a.csv")]
