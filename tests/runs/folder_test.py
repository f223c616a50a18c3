"""Tests of brorl_jax/runs/folder.py: whose a run folder is, what ran."""

import functools
import json
import operator
import os
import pathlib
import platform
import subprocess
import sys

import pytest
from messages import refuses

from brorl_jax import config as sections
from brorl_jax.errors import UserError
from brorl_jax.runs import folder
from tests.main.settings_test import config, values


def check(workdir, *, allow_change=False, **changes):
  return folder.check(values(**changes), workdir, allow_change=allow_change)


def test_a_folder_is_not_a_run_before_its_config_is_written(tmp_path):
  check(tmp_path)  # empty
  check(tmp_path / "not" / "made")
  assert list(tmp_path.iterdir()) == []
  workdir = tmp_path / "deep" / "run"
  with folder.hold(workdir):
    check(workdir)
    folder.write_config(values(), workdir)
  check(workdir)
  assert sorted(p.name for p in workdir.iterdir()) == [".lock", "config.json"]


@pytest.mark.parametrize("name", ["x" * 300, "y" * 256 + "/b"])
def test_a_name_that_cannot_be_is_one_line(tmp_path, name):
  with refuses(UserError, "workdir "), folder.hold(tmp_path / name):
    pass
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["checkpoints", "metrics.jsonl"])
def test_a_run_without_its_config_is_told_the_way_back(tmp_path, name):
  (tmp_path / name).touch()
  way = "missing ... --begin_again ... another workdir"
  with refuses(UserError, f"{tmp_path}/config.json ... {way}"):
    check(tmp_path)


def test_the_identity_of_a_run_is_of_what_it_began_with():
  of = lambda data="d", **changes: folder.identity(values(**changes), data)
  assert of() == of(steps=7, save_every=3, keep_checkpoints=9) == of("d")
  assert len({of(), of("other"), of(lr=0.5), of(seed=9), of(eval_n=3)}) == 5


def test_set_aside_counts(tmp_path):
  assert folder.set_aside(tmp_path) is None
  for count in (1, 2, 3):
    (tmp_path / "metrics.jsonl").write_text(f"{count}")
    (tmp_path / ".lock").touch()
    assert folder.set_aside(tmp_path) == tmp_path / "set_aside" / f"{count}"
  assert {p.name for p in tmp_path.iterdir()} == {".lock", "set_aside"}
  for count in (1, 2, 3):
    path = tmp_path / "set_aside" / f"{count}" / "metrics.jsonl"
    assert path.read_text() == f"{count}"
  check(tmp_path)  # a folder in which a run may begin
  assert folder.begun(tmp_path) is None


def test_lines_are_moved_first_and_the_config_last(tmp_path, monkeypatch):
  for name in ("a", "checkpoints", "config.json", "metrics.jsonl"):
    (tmp_path / name).touch()
  moved = []
  monkeypatch.setattr(pathlib.Path, "rename", lambda p, _: moved.append(p.name))
  folder.set_aside(tmp_path)
  assert moved == ["metrics.jsonl", "a", "checkpoints", "config.json"]


def test_config_json_keeps_what_ran_before(tmp_path):
  folder.write_config(values(lr=0.5), tmp_path)
  folder.write_config(values(lr=0.5), tmp_path)
  read = lambda: json.loads((tmp_path / "config.json").read_text())
  assert "earlier" not in read()
  folder.write_config(values(lr=0.25), tmp_path)
  folder.write_config(values(lr=0.125), tmp_path)
  assert read()["config"]["optim"]["lr"] == 0.125
  assert [e["config"]["optim"]["lr"] for e in read()["earlier"]] == [0.5, 0.25]
  rates = [start["optim"]["lr"] for start in folder.configs(tmp_path)]
  assert rates == [0.125, 0.25, 0.5]  # the newest first


def test_a_run_that_was_killed_while_it_began_can_begin_again(tmp_path):
  (tmp_path / "config.json.part").write_text('{"conf')
  check(tmp_path)
  folder.write_config(values(), tmp_path)
  check(tmp_path)


def test_config_json_tells_what_ran(tmp_path):
  folder.write_config(values(lr=0.5), tmp_path)
  record = json.loads((tmp_path / "config.json").read_text())
  assert record["config"]["optim"]["lr"] == 0.5
  gcd = record["config"]["data"]["families"]["gcd"]
  assert gcd["settings"]["max_value"] == 40
  assert record["python"] == platform.python_version()
  assert record["versions"].keys() >= {"jax", "flax", "optax", "numpy"}
  import jax

  assert record["versions"]["jax"] == jax.__version__
  assert "git_commit" in record


def test_refuses_a_run_of_another_config(tmp_path):
  folder.write_config(values(), tmp_path)
  before = (tmp_path / "config.json").read_bytes()
  lr, dtype = "lr = 0.0003 (now 0.5)", "dtype = 'float32' (now 'bfloat16')"
  said = f"{tmp_path} ... optim.{lr}, policy.{dtype} ... --allow_config_change"
  with refuses(UserError, said):
    check(tmp_path, lr=0.5, dtype="bfloat16")
  with refuses(UserError, "data.families.gcd.weight = 1.0 (now 2.0);"):
    check(tmp_path, **{"data.families.gcd.weight": 2.0})
  check(tmp_path, lr=0.5, allow_change=True)
  with refuses(UserError, "policy.lora_rank = 0 (now 4); ... use these values"):
    check(tmp_path, lora_rank=4, reset_every=0, lr=0.5, allow_change=True)
  assert (tmp_path / "config.json").read_bytes() == before


FREE = """
  steps save_every max_samples keep_checkpoints keep_every
""".split()


@pytest.mark.parametrize("field", FREE)
def test_some_fields_may_change(tmp_path, field):
  folder.write_config(values(), tmp_path)
  check(tmp_path, **{field: type(getattr(config().run, field))(20)})


@pytest.mark.parametrize("how", [{"reset_stalled": 3}, {"reset_to": "best"}])
def test_the_end_is_fixed_where_it_decides_what_comes_before(tmp_path, how):
  folder.write_config(values(**how), tmp_path)
  with pytest.raises(UserError, match=r"run\.steps"):
    check(tmp_path, **how, steps=20)


def test_the_other_fields_may_not(tmp_path):
  folder.write_config(values(), tmp_path)
  before = sections.flat(values())
  numbers = {
    k: v for k, v in before.items() if isinstance(v, (int, float))
    and k.removeprefix("run.") not in FREE
    and not k.startswith(("guard.", "policy.lora_")) and "settings" not in k
  }  # fmt: skip
  assert len(numbers) > 60
  nested = sections.as_dict(config())
  for field, value in numbers.items():
    *at, last = field.split(".")
    other = not value if isinstance(value, bool) else value + 1
    functools.reduce(operator.getitem, at, nested)[last] = other
  changed = folder.check(nested, tmp_path, allow_change=True)
  assert changed.keys() == numbers.keys()


@pytest.mark.parametrize(
  "was, now", [("train", "evaluate"), ("evaluate", "train")]
)
def test_refuses_a_folder_of_another_mode(tmp_path, was, now):
  mode = {"mode": was} if now == "train" else {}
  folder.write_config(values(), tmp_path, **mode)
  for allow in (False, True):
    with refuses(UserError, f"{tmp_path} ... --mode={was} ... --mode={now}"):
      folder.check(values(), tmp_path, allow_change=allow, mode=now)
  folder.check(values(), tmp_path, allow_change=False, mode=was)


def test_refuses_a_folder_of_something_else(tmp_path):
  (tmp_path / "thesis.tex").touch()
  for allow in (False, True):
    with refuses(UserError, "do not belong to a run"):
      check(tmp_path, allow_change=allow)


def test_refuses_a_file(tmp_path):
  file = tmp_path / "file"
  file.touch()
  for workdir in (file, file / "run", file / "a" / "b"):
    with pytest.raises(UserError, match=rf"{file} is not a folder that"):
      check(workdir)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_refuses_what_it_may_not_write(tmp_path):
  for mode in (0o500, 0o300, 0o600):
    tmp_path.chmod(mode)
    for workdir in (tmp_path, tmp_path / "run"):
      with pytest.raises(UserError, match="can be read and"):
        check(workdir)
  tmp_path.chmod(0o700)


@pytest.mark.parametrize("text", ['{"config": ', "[]", "{}", '{"config": 3}'])
def test_refuses_a_config_json_that_cannot_be_read(tmp_path, text):
  (tmp_path / "config.json").write_text(text)
  with refuses(UserError, "config.json cannot be read"):
    check(tmp_path, allow_change=True)


HOLD = """
import pathlib, sys
from brorl_jax.runs import folder
with folder.hold(pathlib.Path(sys.argv[1])):
  print("held", flush=True)
  sys.stdin.read()
"""


def test_two_processes_do_not_share_a_folder(tmp_path):
  workdir = tmp_path / "runs" / "run"
  other = subprocess.Popen([sys.executable, "-c", HOLD, workdir],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
  assert other.stdout.readline() == "held\n"
  in_use = pytest.raises(UserError, match=f"in use by process {other.pid};")
  with in_use, folder.hold(workdir):
    pass
  other.kill()  # a lock ends with its process, however it ends
  other.communicate()
  with folder.hold(workdir):
    pass


def test_what_may_change_bits_is_named_before_and_now(tmp_path, monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", "--one")
  folder.write_config({"run": {"seed": 0}}, tmp_path)
  assert folder.differences(tmp_path) == {}
  here, versions = folder.here(), folder.versions()
  monkeypatch.setenv("XLA_FLAGS", "--two")
  changed = {"cpus": 96, "processor": "another", "devices": {"H100": 8}}
  flags = folder.here()["flags"]
  other = lambda: {**here, **changed, "flags": dict(flags)}
  monkeypatch.setattr(folder, "here", other)
  newer = {**versions, "jax": "9.9", "libtpu": "1.0"}
  gone = newer.pop("optax")
  monkeypatch.setattr(folder, "versions", lambda: newer)
  monkeypatch.setattr(folder, "_PYTHON", "3.99")
  assert folder.differences(tmp_path) == {
    "cpus": (here["cpus"], 96), "processor": (here["processor"], "another"),
    "devices": (here["devices"], {"H100": 8}), "XLA_FLAGS": ("--one", "--two"),
    "Python": (platform.python_version(), "3.99"),
    "jax": (versions["jax"], "9.9"), "libtpu": (None, "1.0"),
    "optax": (gone, None),
  }  # fmt: skip


def test_a_processor_has_the_name_of_its_model(tmp_path, monkeypatch):
  lines = ["vendor_id\t: Maker", "model\t: 17", "model name\t: Chip 9 @ 2 GHz"]
  (tmp_path / "cpuinfo").write_text("\n".join(lines * 2))
  monkeypatch.setattr(folder, "_CPUINFO", tmp_path / "cpuinfo")
  assert folder.here()["processor"] == "Chip 9 @ 2 GHz"
  (tmp_path / "cpuinfo").write_text("CPU part\t: 0xd40\n")
  assert folder.here()["processor"] == "0xd40"
  monkeypatch.setattr(folder, "_CPUINFO", tmp_path / "none")
  assert folder.here()["processor"] == platform.processor()
