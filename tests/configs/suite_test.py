"""Tests of configs/suite.py: rows of published sets, from a file and a hub."""

import base64
import json
import pathlib
import pickle
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

# Of each set its columns, a right response and a wrong one; and changes of one
# that are refused: null takes a column away.
KNOWN = json.loads(pathlib.Path(__file__).with_suffix(".json").read_text())
ROWS = KNOWN["rows"]


def heldout(names, **changes):
  """Held-out examples of a suite, as an evaluation reads them."""
  c = suite.get_config(names)
  c.data.update(changes)
  return examples.read_files(settings.typed(c).data, own=False)[1]


def lines(path, *rows):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return path


def from_hub(name, row, folder, monkeypatch):
  """The same from a cache of the hub, in the file that the hub has."""
  where, _, revision = suite_rows.HUB[name].partition("@")
  repository, _, split = where.partition(":")
  lines(folder / "set" / f"{split}.jsonl", row)
  kept = f"datasets--{repository.replace('/', '--')}"
  revisions = {revision or "main": folder / "set"}
  hub_cache.made(folder, monkeypatch, of=kept, **revisions)
  files._downloaded.cache_clear()
  return heldout(name)


@pytest.mark.parametrize("name", ROWS)
def test_a_published_row_is_read_and_judged(name, tmp_path, monkeypatch):
  row, right, wrong = ROWS[name].values()
  lines(tmp_path / f"{name}.jsonl", row)
  (example,) = heldout(f"{name},{tmp_path}").examples
  assert example.task == {"gym": "gcd", "prime": "taco"}.get(name, name)
  if name != "gym":
    hub = from_hub(name, row, tmp_path / "hub", monkeypatch)
    assert [*hub.examples] == [example]
  answer = right or rf"\boxed{{{example.entry['answer']}}}"
  judged = DOMAINS[example.domain].verify
  assert judged(answer, example.entry, None).status == "pass"
  assert judged(wrong, example.entry, None).status == "fail"


@pytest.mark.parametrize("name, changes, field, value", KNOWN["made"])
def test_what_is_made_of_a_row(name, changes, field, value):
  assert getattr(suite_rows, name)(ROWS[name]["row"] | changes)[field] == value


@pytest.mark.parametrize("name, changes, field, named", KNOWN["refused"])
def test_another_row_is_refused(name, changes, field, named, capsys):
  row = ROWS[name]["row"] | changes
  row = {k: v for k, v in row.items() if v is not None}
  with pytest.raises(Refused) as refused:
    getattr(suite_rows, name)(row)
  assert refused.value.field == field and mentions(refused.value.why, named)
  assert capsys.readouterr().out == ""  # nothing of a pickle ran


def test_a_bomb_is_not_unpacked():
  data = base64.b64encode(zlib.compress(pickle.dumps("0" * 5000))).decode()
  assert suite_rows.packed_text(data, 6000) == "0" * 5000
  with refuses(Refused, "private_test_cases: ... more than 4,000 bytes"):
    suite_rows.packed_text(data, 4000)


def test_bad_rows_are_counted_and_others_read(tmp_path):
  good = ROWS["codeforces"]["row"]
  bad = good | {"input_mode": "file"}
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


@pytest.mark.parametrize("names, said", KNOWN["missing"])
def test_what_is_missing_is_named_with_the_command(names, said, tmp_path):
  with refuses(ValueError, said.replace("{}", str(tmp_path))):
    suite.get_config(names.replace("{}", str(tmp_path)))


def test_folders_as_downloads_leave_them(tmp_path):
  lines(
    tmp_path / "aime24" / "data" / "train-0-of-1.jsonl", ROWS["aime24"]["row"]
  )
  lines(tmp_path / "aime25" / "copied.jsonl", ROWS["aime25"]["row"])
  ends = [str(tmp_path / "aime24:train"), str(tmp_path / "aime25")]
  c = suite.get_config(f"aime24+aime25,{tmp_path}")
  assert [*c.data.heldout_files] == ends
  assert len(heldout(f"aime24+aime25,{tmp_path}").examples) == 2


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
  got = (c.eval.n, c.eval.temperature, c.eval.top_p, c.eval.prompts)
  assert got == (16, 0.6, 0.95, 0)
  assert (c.heldout_tokens, c.data.prompt_tokens) == (32768, 8192)
  assert settings.typed(suite.get_config("math")).data.prompt_tokens == 2048
