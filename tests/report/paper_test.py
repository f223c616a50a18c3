"""Tests of --mode=report --paper: arms, tables by hand, published numbers."""

import json
import pathlib

import numpy as np
import pytest
import runs_for_tests as made
import scipy.stats

from brorl_jax.errors import UserError
from brorl_jax.main import report
from brorl_jax.report import paper

TASKS = [("math", "aime24"), ("code", "apps"), ("gym", "gcd"), ("gym", "maze")]
PROMPTS = {f"{t}/{i}": (d, t) for d, t in TASKS for i in range(4)}
NONE, HALF, BOTH = [0, 0], [1, 0], [1, 1]
START = [NONE, HALF] * 2 + [HALF, BOTH] * 2 + [HALF] * 4 + [BOTH] * 4
N16 = [HALF] * 4 + [NONE] * 4 + [HALF] * 3 + [BOTH] + [BOTH] * 4
N512 = [BOTH] * 4 + [BOTH, HALF] * 2 + [BOTH] * 4 + [HALF] * 4


def trained(path, *kinds, **config):
  starts = [{"machine": {"devices": x}} for x in kinds]
  began = {"began_with": str(path.parents[1] / "v2"), "earlier": starts[1:]}
  return made.told(made.run(path, **config), **starts[0], **began)


def measured(path, passes, run=None, step=3, prompts=PROMPTS, **config):
  """An evaluation that gives 1/4 to programs that do not pass."""
  made.evaluation(path, passes=passes, prompts=prompts, **config)
  records = made.records(0, passes, prompts)
  for one in records:
    one["score"] += 0.25 * (one["domain"] == "code" and not one["pass"])
  made.dump(path / "eval" / "records.jsonl", records)
  policy = {"source": str(path.parents[1] / "v2"), "run": run and str(run)}
  return made.told(path, evaluated={**policy, "step": step if run else None})


def shown(folders):
  report.run(folders, tables=True)
  return json.loads((folders[0] / "report" / "report.json").read_text())


@pytest.fixture
def folders(tmp_path):
  a = trained(tmp_path / "runs" / "n16", {"cpu": 2})
  b = trained(tmp_path / "runs" / "n512", {"H100": 64}, n=512, samples=1024)
  e = tmp_path / "evals"
  ends = measured(e / "n16", N16, a), measured(e / "n512", N512, b)
  return [a, b, *ends, measured(e / "v2", START)]


def test_tables_by_hand(folders, capsys):
  data, said = shown(folders), capsys.readouterr().out
  a, b, start, *_ = data["rows"]
  assert (a["n"], b["n"], b["prompts_per_step"]) == (4, 512, 2)
  assert (a["steps"], a["samples"], a["hours"]) == (3, 48, pytest.approx(4.2))
  hours = [a["device_hours"], b["device_hours"]]
  assert hours == pytest.approx([8.4, 64 * 4.2]) and "hours" not in start
  assert a["pass_rate"] == 0.375  # of steps 2 and 3, as in compare_test
  assert a["samples_per_s"] == pytest.approx(32 / 1800)
  apps = {"score": 25.0, "strict": 0.0, "tokens": 5.5}
  assert a["tasks"]["code/apps"] == apps
  assert a["means"]["code"] == apps | {"tasks": 1, "of": 4}
  assert a["means"]["gym"]["score"] == 81.25  # gcd has 5/8, maze 1
  pair, other = data["pairs"]
  names = [pair["first"], pair["other"], other["other"]]
  assert names == ["runs/n16, step 3", "runs/n512, step 3", start["name"]]
  # Programs of n512 score 1, 5/8, 1, 5/8, those of n16 1/4.
  d = np.array([3, 1.5, 3, 1.5]) / 4
  half = pytest.approx(100 * 1.959964 * d.std(ddof=1) / 2)
  counts = {"prompts": 4, "better": 4, "worse": 0}
  apps = {**counts, "difference": pytest.approx(56.25), "half": half}
  assert pair["tasks"]["code/apps"] == apps
  every = [0.5] * 4 + [*d] + [0.5] * 3 + [0.0] + [-0.5] * 4
  theirs = scipy.stats.ttest_1samp(every, 0)[0]
  assert pair["test"]["plain"]["t"] == pytest.approx(theirs)
  assert pair["test"]["by_task"]["clusters"] == 4
  rose, fell = ["math/aime24", "gym/gcd"], ["code/apps"]
  classes = {"one rose": rose, "1 fell": fell, "neither rose": ["gym/maze"]}
  assert pair["classes"] == classes and other["classes"] == {}
  page = (folders[0] / "report" / "index.html").read_text()
  for cell in ("81.25 (2 of 96)", "64 H100", "0.00 (1 of 4)"):
    assert cell in said and cell in page
  (row,) = [x for x in said.split("Dynamic")[0].splitlines() if "+191" in x]
  cells = "512 128 191 20,039,000 173.8 64 H100 11,123 63.03 54.20 - 63.09 - -"
  assert row.split()[3:] == cells.split()
  strict = said.split("Code by task, strict")[1].split("\n\n")[0]
  assert "46.40" in strict and "BroRL" not in strict


@pytest.mark.parametrize("family, size", [("math", 6), ("code", 4)])
def test_published_means_are_those_of_their_tasks(family, size):
  text = pathlib.Path(paper.__file__).with_name("published.json").read_text()
  for row in json.loads(text)["rows"]:
    assert row.get("device_hours", 0) >= round(64 * row.get("hours", 0))
    for kind, mean in row["means"].get(family, {}).items():
      tasks = [x for name, x in row["tasks"].items() if family in name]
      each = [x[kind] for x in tasks if kind in x][:size]
      assert len(each) < size or mean == pytest.approx(np.mean(each), abs=0.011)


@pytest.mark.parametrize("top_p, why", [(1.0, "0.95 and"), (0.95, "aime24")])
def test_other_settings_and_a_policy_twice_are_refused(folders, top_p, why):
  more = folders[3].with_name("b")
  measured(more, N512, folders[1], eval_top_p=top_p)
  with pytest.raises(UserError, match=f"b .*{why}.*; leave one"):
    shown([*folders, more])


def test_a_second_suite_other_devices_an_earlier_step_and_a_seed(folders):
  (run, *_), place = folders, folders[3].with_name
  amc, maze = {"amc/0": ("math", "amc")}, {"maze/heldout/0": ("gym", "maze")}
  ends = [measured(place("a"), [BOTH], run, prompts=amc)]
  ends += [measured(place("b"), [BOTH], run, prompts=maze)]
  c = trained(run.with_name("c"), {"cpu": 2}, {"cpu": 1})
  again = measured(place("c"), [BOTH], c, 1, maze, seed=1)
  data = shown([run, *ends, c, again])
  a, b = data["rows"][:2]
  assert {*a["tasks"]} == {"math/amc", "gym/maze"} and b["steps"] == 1
  assert (b["devices"], b["device_hours"], b["pass_rate"]) == ({}, None, None)
  assert b["hours"] == pytest.approx(2.0) and not data["pairs"][0]["tasks"]
