"""Tests of configs/suite.py: rows of published sets, from a file and a hub."""

import base64
import json
import pickle
import shlex
import zlib

import hub_cache
import pytest
from messages import mentions, refuses

from brorl_jax.configs import suite, suite_rows
from brorl_jax.data import files
from brorl_jax.main import settings
from brorl_jax.stages import examples
from brorl_jax.verdicts import gym
from brorl_jax.verdicts.domains import DOMAINS
from brorl_jax.verdicts.strict_json import Refused

ADD = "a, b = map(int, input().split())\nprint(a + b)"
ADDED = {"input": ["1 2\n", "3 4\n"], "output": ["3\n", "7\n"]}
CASES = [{"input": "1 2\n", "output": "3\n"}, {"input": "3 4", "output": "7"}]
TEXT = json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})
CALLS = json.dumps({"fn_name": "f", "inputs": [[1, 2]], "outputs": [[3]]})


def fenced(program):
  return f"```python\n{program}\n```"


def packed(value):
  return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def cases(kind, *pairs):
  keys = ("input", "output")
  return [{**dict(zip(keys, p, strict=True)), "testtype": kind} for p in pairs]


def lcb(kind, public, private, **metadata):
  return {
    "question_title": "t", "question_content": "Add.", "platform": "atcoder",
    "question_id": "1", "contest_id": "c", "contest_date": "2025-01-04",
    "starter_code": "class Solution:\n  def f(self, a, b):" * bool(metadata),
    "difficulty": "easy", "metadata": json.dumps(metadata),
    "public_test_cases": json.dumps(cases(kind, *public)),
    "private_test_cases": packed(json.dumps(cases(kind, *private))),
  }  # fmt: skip


LCB = lcb("stdin", [("1 2\n", "3\n")], [("3 4\n", "7\n")])
FORCES = {
  "id": "1/A", "title": "Sum", "description": "Add.", "input_format": "a, b",
  "output_format": "the sum", "examples": CASES[:1], "note": "Easy.",
  "time_limit": 12.0, "input_mode": "stdio", "official_tests": CASES,
  "official_tests_complete": True,
}  # fmt: skip
CONTESTS = {
  "name": "1_A. Sum", "description": "Add.", "public_tests": ADDED,
  "private_tests": {"input": [], "output": []}, "source": 2, "input_file": "",
  "generated_tests": {"input": ["5 5\n"], "output": ["10\n"]},
  "time_limit": {"seconds": 7, "nanos": 500000000},
}  # fmt: skip
HUMAN = {
  "task_id": "HumanEval/2", "entry_point": "half", "canonical_solution": "",
  "prompt": "def half(x: float):\n  '''Half of x.'''\n",
  "test": "import numpy as np\n\ndef is_floats(x):\n"
  "  return isinstance(x, float) or isinstance(x, np.ndarray)\n\n"
  "def check(candidate):\n  for i, e in [(3.0, 1.5), (0.2, 0.1 + 1e-9)]:\n"
  "    o = candidate(i)\n    assert is_floats(o)\n"
  "    assert o == e or np.allclose(o, e, rtol=1e-07, atol=1e-6)\n"
  "    assert np.allclose([o, (o,)], [e, (e,)], atol=1e-6)\n",
}  # fmt: skip
OLYMPIAD = {
  "id": 1, "question": "Find all n.", "final_answer": ["$69$,$84$"],
  "is_multiple_answer": True, "answer_type": "Numerical", "context": "Let n.",
  "unit": "cm", "subject": "Math",
}  # fmt: skip
GPQA = {
  "Question": "Which?", "Correct Answer": "alpha\n", "Subdomain": "x",
  "Incorrect Answer 1": "beta", "Incorrect Answer 2": "gamma",
  "Incorrect Answer 3": "delta",
}  # fmt: skip
IFEVAL = {
  "key": 1000, "prompt": "Write without commas, in two paragraphs.",
  "instruction_id_list": ["punctuation:no_comma",
    "length_constraints:number_paragraphs"],
  "kwargs": [{"num_paragraphs": None}, {"num_paragraphs": 2}],
}  # fmt: skip
PUZZLE = {
  "question": "gcd of 8, 12?", "answer": "4",
  "metadata": {"source_dataset": "gcd"},
}  # fmt: skip
ONE = {"problem": "What is 2 + 2?", "answer": "4"}
# Of each set: its columns, a right response and a wrong one.
ROWS = {
  "aime24": ({"id": 60, **ONE, "year": "2024", "answer": "204"}, r"\boxed{204}",
    r"\boxed{24}"),
  "aime25": ({**ONE, "problem": "2 + 2?", "id": "0"}, r"\boxed{4}", "4"),
  "amc": ({"id": 0, **ONE, "answer": 142.0, "url": "u"}, r"\boxed{142}",
    r"\boxed{141}"),
  "math500": ({**ONE, "solution": "s", "subject": "Algebra", "level": 2,
    "answer": r"\left( 3, \frac{\pi}{2} \right)"}, r"\boxed{(3, \pi/2)}",
    r"\boxed{(\pi/2, 3)}"),
  "minerva": ({"question": "Energy?", "answer": r"\hbar \omega / 2"},
    r"\boxed{\frac{\hbar\omega}{2}}", r"\boxed{\hbar\omega}"),
  "olympiadbench": (OLYMPIAD, r"\boxed{84, 69}", r"\boxed{69}"),
  "humanevalplus": (HUMAN, fenced("def half(x):\n  return x / 2"),
    fenced("def half(x):\n  return x // 2")),
  "livecodebench": (LCB, fenced(ADD), fenced("input()\nprint(3)")),
  "prime": ({"data_source": "taco", "ability": "code", "prompt": [
    {"role": "system", "content": "act"}, {"role": "user", "content": "Add."}],
    "reward_model": {"style": "rule", "ground_truth": TEXT}}, fenced(ADD),
    fenced("print(4)")),
  "apps": ({"question": "Add.", "starter_code": "", "input_output": CALLS},
    fenced("def f(a, b):\n  return a + b"), fenced("def f(a, b):\n  return 4")),
  "taco": ({"question": "Add.", "input_output": TEXT,
    "time_limit": "8.0 seconds"}, fenced(ADD), fenced("print(4)")),
  "codecontests": (CONTESTS, fenced(ADD), fenced("input()\nprint(3)")),
  "codeforces": (FORCES, fenced(ADD), fenced("input()\nprint(3)")),
  "gpqa_diamond": (GPQA, None, r"\boxed{alpha b}"),
  "ifeval": (IFEVAL, "one\n***\ntwo", "one, two"),
  "gym": ({"entry": PUZZLE}, "<answer>4</answer>", "<answer>5</answer>"),
}  # fmt: skip


def heldout(names, **changes):
  """Held-out examples of a suite, as an evaluation reads them."""
  c = suite.get_config(names)
  c.data.update(changes)
  return examples.read_files(settings.typed(c).data, own=False)[1]


def lines(path, *rows):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return path


def verdict(example, response):
  return DOMAINS[example.domain].verify(response, example.entry, None).status


def from_hub(name, row, folder, monkeypatch):
  """The same from a cache of the hub, in the file that the hub has."""
  where, _, revision = suite_rows.HUB[name].partition("@")
  repository, _, split = where.partition(":")
  lines(folder / "set" / f"{split}.jsonl", row)
  kept = f"datasets--{repository.replace('/', '--')}"
  revisions = {revision or "main": folder / "set"}
  hub_cache.made(folder, monkeypatch, kept, **revisions)
  files._downloaded.cache_clear()
  return heldout(name)


@pytest.mark.parametrize("name", ROWS)
def test_a_published_row_is_read_and_judged(name, tmp_path, monkeypatch):
  row, right, wrong = ROWS[name]
  lines(tmp_path / f"{name}.jsonl", row)
  (example,) = heldout(f"{name},{tmp_path}").examples
  assert example.task == {"gym": "gcd", "prime": "taco"}.get(name, name)
  if name != "gym":
    hub = from_hub(name, row, tmp_path / "hub", monkeypatch)
    assert [*hub.examples] == [example]
  answer = right or rf"\boxed{{{example.entry['answer']}}}"
  assert verdict(example, answer) == "pass"
  assert verdict(example, wrong) == "fail"


def test_what_a_prompt_and_an_entry_say(tmp_path):
  one = lambda name, row=None: getattr(suite_rows, name)(row or ROWS[name][0])
  assert one("olympiadbench")["prompt"] == (
    "Let n.\n\nFind all n.\n\nThere are several answers; separate them by "
    "commas.\n\nGive the answer in this unit: cm"
  )
  assert one("codeforces")["time_limit"] == 12.0
  assert one("codecontests")["time_limit"] == 7.5
  assert one("taco")["time_limit"] == 8.0
  assert "Example:\n1 2\n\nOutput:\n3\n" in one("codeforces")["prompt"]
  calls = lcb("functional", [("1\n2", "3")], [("3\n4", "7")], func_name="f")
  record = one("livecodebench", calls)
  assert record["tests"]["fn_name"] == "f"
  assert record["prompt"].endswith("def f(self, a, b):\n```")
  private = json.dumps(cases("stdin", ("5 5", "10")))
  plain = {**LCB, "private_test_cases": private}
  assert one("livecodebench", plain)["tests"]["outputs"] == ["3\n", "10"]
  lines(tmp_path / "gpqa_diamond.jsonl", GPQA)
  (example,) = heldout(f"stem,{tmp_path}").examples
  letter = "ABCD".index(example.entry["answer"])
  assert example.entry["choices"][letter] == "alpha"


class Run:
  def __reduce__(self):
    return (print, ("run",))


@pytest.mark.parametrize(
  "name, changes, field, named",
  [
    ("aime24", {"answer": ...}, "answer", "missing; found id, problem, year"),
    ("aime24", {"answer": ["4"]}, "answer", "['4'] ... it is a text"),
    ("math500", {"problem": " "}, "problem", "empty; as published"),
    ("olympiadbench", {"final_answer": []}, "final_answer", "list of texts"),
    ("olympiadbench", {"error": "1e-2"}, "error", "tolerance; leave this"),
    ("livecodebench", {"private_test_cases": packed(Run())},
      "private_test_cases", "pickle with the operation ... published file"),
    ("livecodebench", {"private_test_cases": packed("[]")[:-8]},
      "private_test_cases", "cut short"),
    ("livecodebench", {"private_test_cases": "?"}, "private_test_cases", ""),
    ("livecodebench", {"public_test_cases": "[{}]"}, "test cases", "published"),
    ("livecodebench", {"public_test_cases": "{"}, "public_test_cases", "JSON"),
    ("livecodebench", {"public_test_cases": json.dumps(cases("graph", "xy"))},
      "testtype", "['graph', 'stdin'] ... leave this row out"),
    ("livecodebench", lcb("functional", ["12"], ["12"]), "func_name", "empty"),
    ("apps", {"input_output": "{}"}, "input_output", "leave this row out"),
    ("codecontests", {"input_file": "in.txt"}, "input_file", "use files"),
    ("codeforces", {"generated_checker": "def"}, "generated_checker", "may be"),
    ("codeforces", {"interaction_format": "i"}, "interaction_format", "judge"),
    ("codeforces", {"input_mode": "file"}, "input_mode", "reads a file"),
    ("codeforces", {"official_tests_complete": False},
      "official_tests_complete", "tests are missing; leave this row out"),
    ("codeforces", {"official_tests": [3]}, "", "TypeError ... use its file"),
    ("prime", {"data_source": "numina_olympiads"}, "data_source", "no program"),
    ("gpqa_diamond", {"Incorrect Answer 3": ...}, "Incorrect Answer 3",
      "found"),
    ("ifeval", {"kwargs": []}, "kwargs", "0 for 2 ids; use the published"),
    ("gym", {"entry": {"question": "?"}}, "metadata", "missing; found"),
  ],
)  # fmt: skip
def test_another_row_is_refused(name, changes, field, named, capsys):
  row = {k: v for k, v in {**ROWS[name][0], **changes}.items() if v is not ...}
  with pytest.raises(Refused) as refused:
    getattr(suite_rows, name)(row)
  assert refused.value.field == field and mentions(refused.value.why, named)
  assert capsys.readouterr().out == ""  # nothing of a pickle ran


def test_a_bomb_is_not_unpacked():
  data = packed("0" * 5000)
  assert suite_rows.packed_text(data, 6000) == "0" * 5000
  with refuses(Refused, "private_test_cases: ... more than 4,000 bytes"):
    suite_rows.packed_text(data, 4000)


def test_bad_rows_are_counted_and_others_read(tmp_path):
  good, bad = FORCES, {**FORCES, "input_mode": "file"}
  lines(tmp_path / "codeforces.jsonl", bad, good, bad)
  data = heldout(f"codeforces,{tmp_path}")
  assert len(data.examples) == 1
  said = "codeforces.jsonl, line {}, field 'input_mode': 'file'"
  for line, skipped in zip((1, 3), data.skipped, strict=True):
    assert said.format(line) in str(skipped)
  lines(tmp_path / "aime24.jsonl", {"problem": "?"})
  said = "aime24.jsonl, line 1, field 'answer': missing; found problem; use"
  with refuses(files.DataError, said):
    heldout(f"aime24,{tmp_path}")


@pytest.mark.parametrize(
  "names, said",
  [
    ("maths", "'maths' does not exist; choose math, code ... aime24"),
    ("prime+apps", "prime has problems of apps; name one"),
    ("aime24,{}", "'aime24' is not in {} ... 'hf download HuggingFaceH4/"
      "aime_2024 --repo-type dataset --include \"*train*\""),
    ("stem,{}", "Idavidrein/gpqa --repo-type dataset --revision refs/convert"),
    ("gym,{}", "python -m brorl_jax.configs.suite_puzzles {}/gym.jsonl"),
  ],
)  # fmt: skip
def test_what_is_missing_is_named_with_the_command(names, said, tmp_path):
  with refuses(ValueError, said.replace("{}", str(tmp_path))):
    suite.get_config(names.replace("{}", str(tmp_path)))


def test_folders_as_downloads_leave_them(tmp_path):
  lines(tmp_path / "aime24" / "data" / "train-0-of-1.jsonl", ROWS["aime24"][0])
  lines(tmp_path / "aime25" / "copied.jsonl", ROWS["aime25"][0])
  ends = [str(tmp_path / "aime24:train"), str(tmp_path / "aime25")]
  c = suite.get_config(f"aime24+aime25,{tmp_path}")
  assert [*c.data.heldout_files] == ends
  assert len(heldout(f"aime24+aime25,{tmp_path}").examples) == 2
  said = suite.download("aime24", tmp_path)
  assert shlex.split(said)[1:3] == ["download", "HuggingFaceH4/aime_2024"]


def test_the_96_tasks_are_in_one_of_three_groups():
  groups = (suite.GENERATED, suite.FROM_FILE, suite.LEFT_OUT)
  assert [len(some) for some in groups] == [70, 17, 9]
  assert len({task for some in groups for task in some}) == 96
  assert gym.ALLOWED >= {*suite.GENERATED}
  assert {*suite.FROM_FILE} <= gym.STORED.keys() | {"rearc"}
  assert {*suite.LEFT_OUT} <= gym.REFUSED.keys()
  assert mentions(suite.coverage(""), "70 of 96 ... 17 need ... 9 are left out")
  assert mentions(suite.coverage("DIR"), "at most 87 of 96 ... word_ladder")


def test_all_is_every_suite_and_the_sampling_is_published():
  c = settings.typed(suite.get_config())
  assert len(c.data.heldout_files) == 11 and c.data.puzzles
  assert c.data.fields.count(suite.ROWS) == 11
  got = (c.eval.n, c.eval.temperature, c.eval.top_p, c.heldout_tokens)
  assert got == (16, 0.6, 0.95, 32768)
  assert (c.eval.prompts, c.data.prompt_tokens) == (0, 8192)
  assert settings.typed(suite.get_config("math")).data.prompt_tokens == 2048
