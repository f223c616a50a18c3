"""What an architecture is, and the machine for which programs are compiled."""

import dataclasses
import os

import jax
import pytest
from small_policies import TINY

from brorl_jax.model import spec

GIB = 2**30


def test_this_machine():
  here = spec.here()
  assert (here.platform, here.devices) == ("cpu", 8)  # see conftest.py
  assert here.on_cpu and here.memory_bytes > 0
  assert not spec.Target("gpu", 8, 80 * GIB).on_cpu


def test_memory_of_a_device(monkeypatch):
  class Device:
    def memory_stats(self):
      return {"bytes_limit": 7 * GIB}

  host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  assert 0 < spec.device_bytes() <= host // 8
  monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
  assert spec.device_bytes() == 7 * GIB


# Bytes of each file below /proc and /sys/fs/cgroup -> what is available.
MEMINFO = {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   8000 kB\nHuge: 0\n"}
NESTED = MEMINFO | {
  "proc/self/cgroup": "1:cpu:/x\n0::/user.slice/run\n",
  "cg/user.slice/memory.max": "7000000\n",
  "cg/user.slice/memory.current": "3000000\n",
  "cg/user.slice/memory.stat": "anon 9\ninactive_file 500000\n"
  "active_file 200000\nslab_reclaimable 100000\n",
  "cg/user.slice/memory.events": "oom 4\noom_kill 3\n",
  "cg/user.slice/run/memory.max": "max\n",
  "cg/user.slice/run/memory.current": "2000000\n",
}
OLD = MEMINFO | {
  "proc/self/cgroup": "4:cpu,memory:/docker/1\n2:cpuset:/\n",
  "cg/memory/memory.limit_in_bytes": "6000000\n",  # as a container sees it
  "cg/memory/memory.usage_in_bytes": "2500000\n",
  "cg/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 500000\n",
  "cg/memory/memory.oom_control": "oom_kill_disable 0\noom_kill 2\n",
}


@pytest.mark.parametrize("files, available, kills", [
  (MEMINFO | {"proc/vmstat": "oom_kill 5\n"}, 8192000, [5]),
  (NESTED, 7000000 - 2200000, [3]),
  (NESTED | {"cg/user.slice/run/memory.max": "2100000"}, 100000, [3]),
  (NESTED | {"cg/user.slice/run/memory.max": "1900000"}, 0, [3]),
  (NESTED | {"cg/user.slice/memory.max": "max"}, 8192000, [3]),
  (OLD, 6000000 - 2000000, [2]),
  (OLD | {"cg/memory/memory.limit_in_bytes": f"{2**63 - 4096}"}, 8192000, [2]),
  ({}, None, [0])  # another system: what is built in
])  # fmt: skip
def test_available_memory(tmp_path, monkeypatch, files, available, kills):
  for name, text in files.items():
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
  monkeypatch.setattr(spec, "_PROC", tmp_path / "proc")
  monkeypatch.setattr(spec, "_GROUPS", tmp_path / "cg")
  host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  available = host if available is None else available
  assert spec.available_bytes() == available
  assert [*spec.memory_kills().values()] == kills
  each, got = available // 8, spec.device_bytes()
  # Few values, so that equal starts compile equal programs.
  assert 0.8 * each <= got <= each and got % 2 ** max(len(bin(got)) - 5, 0) == 0


def test_equal_architectures_share_their_programs_wherever_they_were_read():
  assert TINY.attention_scale == 0.5
  assert dataclasses.replace(TINY, query_scale=0.7).attention_scale == 0.7
  same = dataclasses.replace(TINY, origin="{}")
  assert same == TINY and hash(same) == hash(TINY)
  assert dataclasses.replace(TINY, window=3) != TINY
