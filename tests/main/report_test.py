"""Tests of --mode=report: what it reads, writes and refuses."""

import errno
import json
import os
import pathlib

import pytest
import runs_for_tests as made
import tiers
from messages import mentions

from brorl_jax.errors import StorageError, UserError
from brorl_jax.main import report
from brorl_jax.report import compare, page


def refusal(*workdirs):
  with pytest.raises(UserError) as error:
    report.run([pathlib.Path(one) for one in workdirs])
  (line,) = str(error.value).splitlines()
  return line


def test_the_report_of_two_runs_and_an_evaluation(tmp_path, capsys):
  a = made.run(tmp_path / "runs" / "a")
  b = made.run(tmp_path / "runs" / "b", n=2, samples=16)
  c = made.evaluation(tmp_path / "c", passes=made.PASSES[1])
  report.run([a, b, c])
  said = capsys.readouterr()
  assert "folder 3/3  c" in said.err and "s left" in said.err
  assert said.out.splitlines() == [
    "  a: held-out pass@1 12.5 -> 62.5 %, gain +50.0 +- 40.0 points",
    "  b: held-out pass@1 12.5 -> 62.5 %, gain +50.0 +- 40.0 points",
    "  c: held-out pass@1 25.0 %", f"  {a / 'report' / 'index.html'}",
  ]  # fmt: skip
  data = json.loads((a / "report" / "report.json").read_text())
  assert [run["name"] for run in data["runs"]] == ["a", "b", "c"]
  assert [run["n"] for run in data["runs"]] == [4, 2, None]
  assert data["runs"][2]["evaluated"] == "n512, step 60"
  assert data["sampling"] == {"temperature": 0.6, "top_p": 0.95}
  assert data["differences"] == [{"field": "sampling.n", "values": [4, 2]},
    {"field": "sampling.samples", "values": [8, 16]}]  # fmt: skip
  assert data["prompts"] == 4 and data["samples_per_prompt"] == 2
  assert not (b / "report").exists() and not (c / "report").exists()


def test_a_folder_twice_is_refused(tmp_path):
  a = made.run(tmp_path / "a")
  assert mentions(refusal(a, tmp_path / "." / "a"), f"{a} ... once")


OTHER = {**made.PROMPTS}
OTHER["gcd/heldout/5"] = OTHER.pop("gcd/heldout/1")
TASK = {k: (d, t.replace("aime", "amc")) for k, (d, t) in made.PROMPTS.items()}
MOVED = {**made.PROMPTS, "gcd/heldout/0": ("gym", "syllogism")}
THREE = {k: [[*row, 1] for row in rows] for k, rows in made.PASSES.items()}


@pytest.mark.parametrize(
  "changes, difference",
  tiers.some([
    ({"passes": THREE}, "2 and 3 samples"),
    ({"eval_temperature": 1.0}, "eval.temperature is 0.6 and 1.0"),
    ({"eval_top_p": None}, "eval.top_p ... 0.95"),
    ({"prompts": TASK}, "1 of 3 ... (math/aime), 1 of 3 ... (math/amc)"),
    ({"prompts": OTHER},
      "1 of 4 ... (gcd/heldout/1), 1 of 4 ... (gcd/heldout/5)"),
    ({"prompts": MOVED}, "gcd/heldout/0 ... gym/gcd ... gym/syllogism"),
    ({"data__families__gcd__settings__max_value": 50},
      "data.families.gcd.settings.max_value is 40 and 50"),
    ({"data__domains__math__instruction": "Think."},
      "data.domains.math.instruction is 'Box it.' and 'Think.'"),
    ({"data__system": "Be brief."}, "data.system is '' and 'Be brief.'"),
    ({"held": "def"}, "held-out ... 'abc' ... 'def'"),
  ], 3),
)  # fmt: skip
def test_runs_measured_otherwise_are_refused(tmp_path, changes, difference):
  a = made.run(tmp_path / "a")
  b = made.run(tmp_path / "b", **changes)
  assert mentions(refusal(a, b), f"{difference}")
  assert not (a / "report").exists()


def test_other_puzzles_of_another_seed_may_be_compared(tmp_path):
  """Those of files have to be the same."""
  a = made.run(tmp_path / "a")
  report.run([a, made.run(tmp_path / "b", prompts=OTHER, seed=1)])
  data = json.loads((a / "report" / "report.json").read_text())
  assert [arm["runs"] for arm in data["arms"]] == [[0, 1]]
  file = {k.replace("aime/7", "aime/8"): v for k, v in OTHER.items()}
  c = made.run(tmp_path / "c", prompts=file, seed=1)
  assert mentions(refusal(a, c), "1 of 1 ... (aime/7), 1 of 1 ... (aime/8)")


@pytest.mark.parametrize("entries, difference", [
  ({"versions": {"reasoning-gym": "0.1.24"}}, "'0.1.25' ... '0.1.24'"),
  ({"data": {"held out": "abc", "chat template": "77f8"}},
    "chat template ... '77f8'"),
])  # fmt: skip
def test_other_puzzles_and_templates_are_refused(tmp_path, entries, difference):
  a = made.run(tmp_path / "a")
  b = made.told(made.run(tmp_path / "b"), **entries)
  assert mentions(refusal(a, b), difference)


@pytest.mark.parametrize("both", [False, True])
def test_runs_with_other_rewards_of_a_user_are_refused(tmp_path, both):
  loss = lambda digest: {"loss.kind": {"name": "x.py:f", "digest": digest}}
  mine = lambda x: {"reward.verifier": {"name": "mine.py:score", "digest": x}}
  first = loss("0") | (mine("a") if both else {})
  a = made.told(made.run(tmp_path / "a"), functions=first)
  other = loss("1") | mine("b")
  b = made.told(made.run(tmp_path / "b"), functions=other)
  said = "mine.py:score (digest a)" if both else "the verifiers"
  assert mentions(refusal(a, b), f"{said} ... mine.py:score")


def test_a_seed_may_differ_where_no_puzzle_is_made(tmp_path):
  prompts = {f"aime/{i}": ("math", "aime") for i in range(4)}
  a = made.run(tmp_path / "a", prompts=prompts)
  report.run([a, made.run(tmp_path / "b", prompts=prompts, seed=1)])


@pytest.mark.parametrize(
  "number, kind", [(errno.EROFS, StorageError), (errno.EACCES, UserError)]
)
def test_a_report_that_cannot_be_written_says_what_to_do(
  tmp_path, monkeypatch, number, kind
):
  def fails(*_):
    raise OSError(number, os.strerror(number), "report/x.png")

  monkeypatch.setattr(page, "page", fails)
  monkeypatch.setattr(compare, "numbers", dict)
  with pytest.raises(kind, match=r"cannot be written: report/x\.png: .* again"):
    report.publish([], tmp_path)
