"""Tests of launch/notebook.ipynb: its cells run one after the other."""

import json
import pathlib

import numpy as np
import pytest

NOTEBOOK = pathlib.Path(__file__).parents[2] / "launch" / "notebook.ipynb"


@pytest.mark.slow
def test_its_cells_run_in_an_empty_folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  book = json.loads(NOTEBOOK.read_text())
  text = lambda cell: "".join(cell["source"])
  code = [text(c) for c in book["cells"] if c["cell_type"] == "code"]
  assert not any(c.get("outputs") for c in book["cells"])
  names = {}
  for number, cell in enumerate(code):
    exec(compile(cell, f"cell {number}", "exec"), names)
  assert names["run"].metrics["step"].tolist() == [1, 2, 3]
  assert names["by_judge"].metrics["step"].tolist() == [1]
  assert "[reply] Lower?" in "".join(
    x["response"] for x in names["episodes"].samples
  )
  left = [names["unsampled"](n) for n in (16, 64, 512)]
  assert left == sorted(left, reverse=True) and left[-1] >= 0.0
  parts = names["balance"]
  total = parts.sampled_correct + parts.sampled_wrong + parts.unsampled
  np.testing.assert_allclose(total, parts.total, rtol=1e-5)
