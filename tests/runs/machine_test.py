"""Tests of brorl_jax/runs/machine.py."""

import os
import platform

from brorl_jax.runs import folder, machine


def test_what_may_change_the_bits_is_named_with_before_and_now(
  tmp_path, monkeypatch
):
  assert machine.differences(tmp_path) == {}
  monkeypatch.setenv("XLA_FLAGS", "--one")
  folder.write_config({"run": {"seed": 0}}, tmp_path)
  assert machine.differences(tmp_path) == {}
  here, versions = machine.here(), machine.versions()
  monkeypatch.setenv("XLA_FLAGS", "--two")
  changed = {"cpus": 96, "processor": "another", "devices": {"H100": 8}}
  flags = machine.here()["flags"]
  other = lambda: {**here, **changed, "flags": dict(flags)}
  monkeypatch.setattr(machine, "here", other)
  newer = {**versions, "jax": "9.9", "libtpu": "1.0"}
  gone = newer.pop("optax")
  monkeypatch.setattr(machine, "versions", lambda: newer)
  monkeypatch.setattr(machine, "PYTHON", "3.99")
  assert machine.differences(tmp_path) == {
    "cpus": (here["cpus"], 96),
    "processor": (here["processor"], "another"),
    "devices": (here["devices"], {"H100": 8}),
    "XLA_FLAGS": ("--one", "--two"),
    "Python": (platform.python_version(), "3.99"),
    "jax": (versions["jax"], "9.9"),
    "libtpu": (None, "1.0"),
    "optax": (gone, None),
  }


def test_cpus_are_those_that_this_process_may_use(monkeypatch):
  monkeypatch.setattr(
    os, "sched_getaffinity", lambda _: {3, 5, 7}, raising=False
  )
  assert machine.here()["cpus"] == 3


def test_a_processor_has_the_name_of_its_model(tmp_path, monkeypatch):
  lines = ["vendor_id\t: Maker", "model\t: 17", "model name\t: Chip 9 @ 2 GHz"]
  (tmp_path / "cpuinfo").write_text("\n".join(lines * 2))
  monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")
  assert machine.here()["processor"] == "Chip 9 @ 2 GHz"
  (tmp_path / "cpuinfo").write_text("CPU part\t: 0xd40\n")
  assert machine.here()["processor"] == "0xd40"
  monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "none")
  assert machine.here()["processor"] == platform.processor()
