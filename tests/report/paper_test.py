"""Tests of --mode=report --paper: arms, tables by hand, published numbers."""

import json
import pathlib

import numpy as np
import pytest
import runs_for_tests as made
import scipy.stats
from messages import mentions

from brorl_jax.errors import UserError
from brorl_jax.main import report
from brorl_jax.report import paper

TASKS = [("math", "aime24"), ("code", "apps"), ("gym", "gcd"), ("gym", "maze")]
PROMPTS = {f"{t}/{i}": (d, t) for d, t in TASKS for i in range(4)}
NONE, HALF, BOTH = [0, 0], [1, 0], [1, 1]
START = [NONE, HALF] * 2 + [HALF, BOTH] * 2 + [HALF] * 4 + [BOTH] * 4
N16 = [HALF, HALF] * 2 + [NONE] * 4 + [HALF] * 3 + [BOTH] + [BOTH] * 4
N512 = [BOTH] * 4 + [BOTH, HALF] * 2 + [BOTH] * 4 + [HALF] * 4


def trained(path, *, machines=({"cpu": 2},), **config):
  run = made.run(path, **config)
  about = json.loads((run / "config.json").read_text())
  starts = [about | {"machine": {"devices": kinds}} for kinds in machines]
  about = {
    **starts[0],
    "earlier": starts[1:],
    "began_with": str(path.parents[1] / "v2"),
  }
  (run / "config.json").write_text(json.dumps(about))
  return run


def measured(path, passes, run=None, step=3, prompts=PROMPTS, **config):
  """An evaluation whose scores of programs are 1/4 above their passes."""
  made.evaluation(path, passes=passes, prompts=prompts, **config)
  records = made.records(0, passes, prompts)
  for one in records:
    one["score"] += 0.25 * (one["domain"] == "code" and not one["pass"])
  made.dump(path / "eval" / "records.jsonl", records)
  about = json.loads((path / "config.json").read_text())
  about["config"]["policy"] = {"checkpoint": "nvidia/Nemo@v2"}
  about["evaluated"] = {
    "source": str(path.parents[1] / "v2"),
    "run": None,
    "step": None,
  }
  about["evaluated"] |= {"run": str(run), "step": step} if run else {}
  (path / "config.json").write_text(json.dumps(about))
  return path


@pytest.fixture
def folders(tmp_path):
  a = trained(tmp_path / "runs" / "n16")
  kinds = {"NVIDIA H100 80GB HBM3": 64}
  b = trained(
    tmp_path / "runs" / "n512", n=512, samples=1024, machines=(kinds,)
  )
  e = tmp_path / "evals"
  return [
    *(a, b, measured(e / "n16", N16, a), measured(e / "n512", N512, b)),
    measured(e / "v2", START),
  ]


@pytest.fixture
def made_of(folders, capsys):
  report.run(folders, tables=True)
  data = json.loads((folders[0] / "report" / "report.json").read_text())
  page = (folders[0] / "report" / "index.html").read_text()
  return data, capsys.readouterr().out, page


def test_an_arm_has_the_cost_of_its_run_and_the_scores_of_its_evaluation(
  made_of,
):
  a, b, start, *_ = made_of[0]["rows"]
  assert [x["name"] for x in (a, b)] == [
    "runs/n16, step 3",
    "runs/n512, step 3",
  ]
  assert start["name"] == "nvidia/Nemo@v2" and "hours" not in start
  assert (a["n"], b["n"], b["prompts_per_step"]) == (4, 512, 2)
  assert (a["steps"], a["samples"], a["hours"]) == (3, 48, pytest.approx(4.2))
  assert a["devices"] == {"cpu": 2} and a["device_hours"] == pytest.approx(8.4)
  assert b["device_hours"] == pytest.approx(64 * 4.2)
  # Steps 2 and 3, as by hand in compare_test.
  assert a["pass_rate"] == pytest.approx(0.375)
  assert a["samples_per_s"] == pytest.approx(32 / 1800)
  apps = {"score": 25.0, "strict": 0.0, "tokens": 5.5}
  assert a["tasks"]["code/apps"] == apps
  assert a["means"]["code"] == apps | {"tasks": 1, "of": 4}
  # Of gcd 5/8 and of maze all.
  gym = {"score": 81.25, "strict": 81.25, "tokens": 5.5, "tasks": 2, "of": 96}
  assert a["means"]["gym"] == gym


def test_pairs_are_of_the_same_prompts(made_of):
  pair, other = made_of[0]["pairs"]
  assert (pair["first"], pair["other"]) == (
    "runs/n16, step 3",
    "runs/n512, step 3",
  )
  assert other["other"] == "nvidia/Nemo@v2" and other["classes"] == {}
  # Programs of n512 score 1, 5/8, 1, 5/8, less 1/4 each.
  d = np.array([3, 1.5, 3, 1.5]) / 4
  half = 1.959964 * d.std(ddof=1) / 2
  assert pair["tasks"]["code/apps"] == {
    "prompts": 4, "difference": pytest.approx(56.25),
    "half": pytest.approx(100 * half), "better": 4, "worse": 0,
  }  # fmt: skip
  assert pair["tasks"]["gym/maze"]["worse"] == 4
  every = [0.5] * 4 + [*d] + [0.5] * 3 + [0.0] + [-0.5] * 4
  theirs = scipy.stats.ttest_1samp(every, 0)
  assert pair["test"]["plain"]["t"] == pytest.approx(theirs.statistic)
  assert pair["test"]["by_task"]["clusters"] == 4
  # From the start: aime24 .25 up or by chance, apps down, and so on.
  assert pair["classes"] == {
    "one rose": ["math/aime24", "gym/gcd"],
    "1 fell": ["code/apps"], "neither rose": ["gym/maze"],
  }  # fmt: skip


def test_tables_are_on_the_terminal_and_on_the_page(made_of, folders):
  _, said, page = made_of
  for shown in (
    "50.00 (1 of 6)",
    "64 NVIDIA H100",
    "0.00 (1 of 4)",
    "published:",
  ):
    assert shown in said and shown in page
  row = next(x for x in said.splitlines() if "published: BroRL, +191" in x)
  cells = "512 128 191 20,039,000 173.8 64 H100 11,123 63.03 54.20 - 63.09 - -"
  assert row.split()[3:] == cells.split()
  strict = said.split("Code by task, strict")[1].split("\n\n")[0]
  assert "46.40" in strict and "BroRL" not in strict
  assert mentions(said, "runs/n512, step 3 against runs/n16, step 3 ... 16")
  assert said.splitlines()[-1] == f"  {folders[0] / 'report' / 'index.html'}"


def test_published_means_are_those_of_their_tasks():
  data = json.loads(
    pathlib.Path(paper.__file__).with_name("published.json").read_text()
  )
  checked = 0
  for row in data["rows"]:
    assert row["name"] and row["source"]
    for family, of in data["families"].items():
      for kind, mean in row["means"].get(family, {}).items():
        each = [row["tasks"].get(f"{family}/{t}", {}).get(kind) for t in of]
        if None not in each:
          assert mean == pytest.approx(np.mean(each), abs=0.011), row["name"]
          checked += 1
    if row.get("devices") and "hours" in row:
      assert row["device_hours"] == pytest.approx(64 * row["hours"], abs=1)
  assert checked >= 14


OTHER = {k.replace("apps/3", "apps/9"): v for k, v in PROMPTS.items()}


@pytest.mark.parametrize(
  "how, why",
  [
    (
      {"prompts": OTHER},
      "n512b cannot be compared: ... (apps/9); leave one out",
    ),
    (
      {"eval_top_p": 1.0},
      "cannot be compared: eval.top_p is 0.95 and 1.0; leave",
    ),
    ({}, "n512b measured runs/n512, step 3 on math/aime24 ... leave one"),
  ],
)
def test_what_was_measured_otherwise_or_twice_is_refused(folders, how, why):
  more = measured(folders[3].with_name("n512b"), N512, folders[1], **how)
  with pytest.raises(UserError) as error:
    report.run([*folders, more], tables=True)
  assert mentions(str(error.value), why)


def test_evaluations_of_other_tasks_go_together_and_may_lack(folders, tmp_path):
  """A second suite of n16; other devices at a resume; another seed."""
  amc = {"amc/0": ("math", "amc"), "amc/1": ("math", "amc")}
  suite = measured(tmp_path / "amc", [BOTH, NONE], folders[0], prompts=amc)
  c = trained(tmp_path / "runs" / "c", machines=({"cpu": 2}, {"cpu": 1}))
  early = measured(tmp_path / "evals" / "c1", N16, c, step=1)
  report.run([*folders[::2], suite, c, early], tables=True)
  data = json.loads((folders[0] / "report" / "report.json").read_text())
  first, _, late = data["rows"][:3]
  assert first["means"]["math"]["tasks"] == 2 and late["steps"] == 1
  assert (late["devices"], late["device_hours"]) == ({}, None)
  assert late["hours"] == pytest.approx(2.0) and late["pass_rate"] is None
  assert set(data["pairs"][1]["tasks"]) == {*map("/".join, TASKS)}
