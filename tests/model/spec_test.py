"""What an architecture is, and the machine for which programs are compiled."""

import dataclasses
import os

import jax
from small_policies import TINY

from brorl_jax.model import spec

GIB = 2**30


def test_this_machine():
  here = spec.here()
  assert (here.platform, here.devices) == ("cpu", 8)  # see conftest.py
  assert here.on_cpu and here.memory_bytes == spec.device_bytes()
  assert not spec.Target("gpu", 8, 80 * GIB).on_cpu


def test_memory_of_a_device(monkeypatch):
  class Device:
    def memory_stats(self):
      return {"bytes_limit": 7 * GIB}

  host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  assert 0 < spec.device_bytes() <= host // 8
  monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
  assert spec.device_bytes() == 7 * GIB


def test_a_container_may_have_less_than_its_machine(tmp_path, monkeypatch):
  limit, none = tmp_path / "limit", tmp_path / "none"
  limit.write_text(f"{8 * 10**6}\n")
  none.write_text("max\n")
  paths = (str(none), str(limit), str(tmp_path / "missing"))
  monkeypatch.setattr(spec, "_LIMITS", paths)
  assert spec.device_bytes() == 10**6


def test_equal_architectures_share_their_programs_wherever_they_were_read():
  assert TINY.attention_scale == 0.5
  assert dataclasses.replace(TINY, query_scale=0.7).attention_scale == 0.7
  same = dataclasses.replace(TINY, origin="{}")
  assert same == TINY and hash(same) == hash(TINY)
  assert dataclasses.replace(TINY, window=3) != TINY
