"""Tests of brorl_jax/runs/lines.py."""

import errno
import os
import shutil

import pytest

from brorl_jax.runs import lines


@pytest.fixture
def path(tmp_path):
  return tmp_path / "deep" / "lines.jsonl"


def fill(path, *some, after=-1):
  file = lines.JsonLines(path, after=after)
  file.write(*some)
  file.close()


def test_lines_are_on_disk_as_soon_as_they_are_written(path):
  file = lines.JsonLines(path, after=-1)
  file.write({"step": 1, "x": 0.1}, {"step": 1, "x": None})
  file.write({"step": 2, "x": "\n"})
  assert path.read_text() == (
    '{"step": 1, "x": 0.1}\n{"step": 1, "x": null}\n{"step": 2, "x": "\\n"}\n'
  )
  file.close()


def test_continues_byte_for_byte_and_drops_what_came_after(path):
  numbers = [1 / 3, 1e-30, 1e300, -0.0, 2**60, 5]
  fill(path, *({"step": i, "x": x, "s": "é"} for i, x in enumerate(numbers)))
  before = path.read_bytes().splitlines(keepends=True)
  fill(path, {"step": 4, "new": True}, after=3)
  after = path.read_bytes().splitlines(keepends=True)
  assert (after[:4], after[4:]) == (before[:4], [b'{"step": 4, "new": true}\n'])


@pytest.mark.parametrize("cut", [1, 5, 12])
def test_continues_after_a_last_line_that_was_cut_short(path, cut):
  fill(path, {"step": 1}, {"step": 2, "x": 0.5})
  path.write_bytes(path.read_bytes()[:-cut])
  assert lines.read_lines(path) == [{"step": 1}]
  fill(path, {"step": 2, "x": 0.25}, after=5)
  assert lines.read_lines(path) == [{"step": 1}, {"step": 2, "x": 0.25}]


def test_some_lines_stay_whatever_was_done(path):
  fill(path, {"step": 1}, {"step": 5, "stays": 1}, {"step": 4}, {"step": 2})
  for after in (2, -1):
    keep = lambda line: "stays" in line
    lines.JsonLines(path, after=after, keep=keep).close()
    some = {2: [1, 5, 2], -1: [5]}[after]
    assert [line["step"] for line in lines.read_lines(path)] == some


def test_a_bad_line_is_an_error_or_left_out_and_told(path):
  fill(path, {"step": 1}, {"step": 2}, {"step": 3})
  first, second, third = path.read_bytes().splitlines(keepends=True)
  for bad in (b"[]", b"{}", b"3", b'{"step": true}', b'{"step": 1.0}', b"\0"):
    path.write_bytes(first + bad + b"\n" + second + third)
    with pytest.raises(lines.Damaged, match=r"lines\.jsonl, line 2: "):
      lines.JsonLines(path, after=2)
    assert path.read_bytes() == first + bad + b"\n" + second + third
    said = []
    lines.JsonLines(path, after=2, warn=said.append).close()
    assert path.read_bytes() == first + second
    assert len(said) == 1 and said[0].startswith(f"{path}, line 2: ")


def test_lines_end_where_nothing_whole_follows(path):
  fill(path, {"step": 1}, {"step": 2})
  whole = path.read_bytes()
  for tail in (b"", b"\0\0\n", b"{\n[]\n", b'{"step": 3}'):
    path.write_bytes(whole + tail)
    assert list(lines._whole(path)) == [{"step": 1}, {"step": 2}]
  path.write_bytes(whole + b'{\n{"step": 4}\n')
  with pytest.raises(lines.Damaged, match="line 3: "):
    list(lines._whole(path))


def on_disk(monkeypatch):
  """What was handed to fsync so far, as paths."""
  seen, fsync = [], os.fsync

  def spy(at):
    seen.append(os.readlink(f"/proc/self/fd/{at}"))
    fsync(at)

  monkeypatch.setattr(os, "fsync", spy)
  return seen


def test_sync_reaches_the_file_and_its_folder(path, monkeypatch):
  file = lines.JsonLines(path, after=-1)
  file.write({"step": 1})
  seen = on_disk(monkeypatch)
  file.sync()
  file.close()
  assert seen == [str(path), str(path.parent)]


def test_a_file_is_replaced_only_by_one_that_is_on_disk(path, monkeypatch):
  fill(path, {"step": 1})
  seen, moved, write_whole = on_disk(monkeypatch), [], os.replace

  def spy(part, to):
    moved.append((list(seen), str(to)))
    write_whole(part, to)

  monkeypatch.setattr(os, "replace", spy)
  lines.write_whole(path, "new")
  assert (path.read_text(), moved) == ("new", [([f"{path}.part"], str(path))])
  assert seen[1:] == [str(path.parent)]


def test_a_full_disk_names_the_file(path):
  file = lines.JsonLines(path, after=-1)
  full = os.open("/dev/full", os.O_WRONLY)
  os.dup2(full, file._file.fileno())
  os.close(full)
  with pytest.raises(OSError, match="No space left on device") as e:
    file.write({"step": 1})
  file.close()  # nothing waits in a buffer
  assert (e.value.errno, e.value.filename) == (errno.ENOSPC, str(path))


def test_a_write_that_is_cut_short_goes_on(path):
  file = lines.JsonLines(path, after=-1)
  real = file._file

  class Short:
    def write(self, data):
      return real.write(data[:3])

  file._file = Short()
  file.write({"step": 1, "x": "yes"}, {"step": 2})
  real.close()
  assert lines.read_lines(path) == [{"step": 1, "x": "yes"}, {"step": 2}]


@pytest.mark.parametrize("how", ["removed", "moved"])
def test_a_file_that_is_gone_is_not_written(path, how):
  file = lines.JsonLines(path, after=-1)
  if how == "removed":
    shutil.rmtree(path.parent)
  else:
    path.rename(path.with_name("other"))
  with pytest.raises(FileNotFoundError, match="was removed") as e:
    file.write({"step": 1})
  file.close()
  assert e.value.filename == str(path) and not path.exists()
