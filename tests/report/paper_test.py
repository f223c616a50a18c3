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


def tables(folders, capsys):
  report.run(folders, tables=True)
  said = capsys.readouterr().out
  data = json.loads((folders[0] / "report" / "report.json").read_text())
  page = (folders[0] / "report" / "index.html").read_text()
  return data, said, page
