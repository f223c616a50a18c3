"""Tests of brorl_jax/runs/sums.py."""

import json

import pytest

from brorl_jax.runs import lines, sums

NAMES = ("metrics.jsonl", "samples.jsonl", "visits.jsonl", "eval/curve.jsonl")
NAMES += ("eval/records.jsonl",)


def some(step):
  return {"step": step, "x": 0.1 * step, "é": None}


@pytest.fixture
def run(tmp_path):
  """A folder with four lines per file, whose first three are summed."""
  files = {name: lines.JsonLines(tmp_path / name, after=-1) for name in NAMES}
  for file in files.values():
    file.write(some(1), some(2))
    file.write(some(3))
  sums.write(tmp_path, {name: file.sum for name, file in files.items()})
  for file in files.values():
    file.write(some(4))
    file.close()
  return tmp_path


def test_sums_by_hand(tmp_path):
  """printf '{"step": 1}\\n{"step": 2}\\n' | sha256sum"""
  file = lines.JsonLines(tmp_path / "a.jsonl", after=-1)
  file.write({"step": 1})
  file.write({"step": 2})
  file.close()
  half = "44e3c179fe43fea2dfc048e00fc73c34", "dee08416454c30c6a7f3294adb26557b"
  want = {"lines": 2, "sha256": "".join(half)}
  assert file.sum == sums.of([{"step": 1}, {"step": 2}]) == want
  assert sums.of([{"step": 2}, {"step": 1}])["sha256"] != want["sha256"]
  again = lines.JsonLines(tmp_path / "a.jsonl", after=1)
  assert again.sum == sums.of([{"step": 1}])
  again.close()


def test_lines_as_they_were_written(run):
  sums.check(run)
  for name in NAMES:  # behind those that are summed
    (run / name).write_text(
      (run / name).read_text().replace('"step": 4', '"step": 5')
    )
  sums.check(run)


def test_blanks_are_no_other_line(run):
  path = run / "metrics.jsonl"
  path.write_text(path.read_text().replace(": ", ":"))
  sums.check(run)


@pytest.mark.parametrize("name", NAMES)
def test_one_digit_that_changed(run, name):
  text = (run / name).read_text()
  (run / name).write_text(text.replace("0.2", "0.3"))
  before = sorted((p, p.stat().st_mtime_ns) for p in run.rglob("*"))
  why = f"{name} has others than the 3 lines .* remove .*sums.json"
  with pytest.raises(lines.Damaged, match=why):
    sums.check(run)
  assert sorted((p, p.stat().st_mtime_ns) for p in run.rglob("*")) == before
  (run / sums.NAME).unlink()
  sums.check(run)


def test_events_of_training_alone(tmp_path):
  said = [
    {"step": 3, "event": "reference reset", "why": "3 steps"},
    {"step": 3, "event": "resume"},
    {"step": 7, "event": "phase", "changed": {}},
  ]
  file = lines.JsonLines(tmp_path / "events.jsonl", after=-1)
  file.write(*said)
  nothing = dict.fromkeys(NAMES, sums.of([]))
  sums.write(tmp_path, nothing)
  assert json.loads((tmp_path / sums.NAME).read_text())["events.jsonl"] == (
    sums.of([said[0], said[2]])
  )
  file.write({"step": 8, "event": "warning", "why": "late"})
  file.close()
  sums.check(tmp_path)
  path = tmp_path / "events.jsonl"
  whole = path.read_text()
  path.write_text(whole.replace("3 steps", "2 steps"))
  with pytest.raises(lines.Damaged, match="has others than the 2 lines"):
    sums.check(tmp_path)
  path.write_text(whole[:10])
  with pytest.raises(lines.Damaged, match="has 0 of the 2 lines"):
    sums.check(tmp_path)
  path.write_text(whole)
  sums.shorten(tmp_path, 3)
  lines.JsonLines(path, after=3).close()
  sums.check(tmp_path)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("left", [0, 2])
def test_missing_lines(run, name, left):
  """Of samples nobody else knows how many there were."""
  text = (run / name).read_text().splitlines(keepends=True)
  (run / name).write_text("".join(text[:left]))
  if name in ("samples.jsonl", "visits.jsonl"):
    with pytest.raises(lines.Damaged, match=f"has {left} of the 3 lines"):
      sums.check(run)
  else:
    sums.check(run)


def test_a_bad_line_more_is_of_no_matter_in_samples_alone(run):
  for name in NAMES[1], NAMES[0]:
    (run / name).write_text("{\n" + (run / name).read_text())
    if name == "samples.jsonl":
      sums.check(run)
  with pytest.raises(lines.Damaged, match=r"metrics\.jsonl, line 1"):
    sums.check(run)


def test_sums_that_lack_a_file(run):
  path = run / sums.NAME
  known = json.loads(path.read_text())
  del known["samples.jsonl"]
  path.write_text(json.dumps(known))
  with pytest.raises(lines.Damaged, match="cannot be read"):
    sums.check(run)


def test_a_run_that_was_cut_back_as_a_whole(run):
  for name in NAMES:
    lines.JsonLines(run / name, after=2).close()
  sums.check(run)


def test_sums_are_shortened_before_the_lines(run):
  sums.shorten(run, 2)
  assert json.loads((run / sums.NAME).read_text())["samples.jsonl"] == (
    sums.of([some(1), some(2)])
  )
  sums.check(run)
  for name in NAMES:
    lines.JsonLines(run / name, after=2).close()
    sums.check(run)


def test_a_folder_without_sums_gets_none(run):
  (run / sums.NAME).unlink()
  sums.shorten(run, 2)
  assert not (run / sums.NAME).exists()


@pytest.mark.parametrize(
  "text", ["", "{", "[]", "{}", '{"metrics.jsonl": 3}', "null", "3"]
)
def test_sums_that_cannot_be_read(run, text):
  (run / sums.NAME).write_text(text)
  with pytest.raises(lines.Damaged, match=r"sums\.json cannot be read \("):
    sums.check(run)
