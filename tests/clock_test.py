"""Tests of brorl_jax/clock.py."""

import time

import jax
import jax.numpy as jnp

from brorl_jax import clock


def test_time_since():
  begin = clock.now()
  end = time.process_time() + 0.1
  while time.process_time() < end:
    pass
  spent = clock.since(begin)
  assert 0.1 <= spent["time/cpu_s"] < 5.0
  assert spent["time/step_s"] >= 0.09 and spent["time/compile_s"] == 0.0


def test_busy_are_the_processor_or_the_wall(monkeypatch):
  monkeypatch.setattr(clock, "now", lambda: clock.Clock(9.0, 30.0, 5.0, 6.0))
  # 8 of the wall, 3 of them compiling; 20 of cores, 2 of them compiling.
  begin = clock.Clock(1.0, 10.0, 2.0, 4.0)
  spent = clock.since(begin)
  assert spent["time/cpu_s"] == spent["time/busy_s"] == 18.0
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  spent = clock.since(begin)
  assert (spent["time/cpu_s"], spent["time/busy_s"]) == (18.0, 5.0)


def test_compiling_is_told_apart():
  begin = clock.now()
  many = lambda x: sum(jnp.sin(x * i) @ x for i in range(30))
  jax.jit(many).lower(jnp.ones((7, 7))).compile()
  process = clock.now().process - begin.process
  spent = clock.since(begin)
  assert 0.0 < spent["time/compile_s"] <= spent["time/step_s"]
  assert spent["time/cpu_s"] <= max(process - spent["time/compile_s"], 0) + 0.1
