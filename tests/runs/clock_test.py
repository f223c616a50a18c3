"""Tests of brorl_jax/runs/clock.py."""

import time
import types

import jax
import jax.numpy as jnp
import pytest
from jax._src import monitoring

from brorl_jax.runs import clock


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
  assert spent["time/cores"] == 2.5
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  spent = clock.since(begin)
  assert (spent["time/cpu_s"], spent["time/busy_s"]) == (18.0, 5.0)


def compile_something(size):
  many = lambda x: sum(jnp.sin(x * i) @ x for i in range(30))
  jax.jit(many).lower(jnp.ones((size, size))).compile()


def test_a_compilation_begins_where_its_lowering_ends(monkeypatch):
  at = lambda seconds: monkeypatch.setattr(
    clock.time, "process_time", lambda: seconds
  )
  compiler = types.SimpleNamespace(wall=0.0, process=0.0, lowered=0.0)
  monkeypatch.setattr(clock, "_compiler", compiler)
  at(3.0)  # 2 s of the processor for the lowering, then 5 s for the compilation
  clock._on_event("/jax/core/compile/jaxpr_to_mlir_module_duration", 2.5)
  at(8.0)
  clock._on_event("/jax/core/compile/backend_compile_duration", 4.0)
  assert (compiler.wall, compiler.process) == (4.0, 5.0)
  clock._on_event("/jax/core/compile/jaxpr_trace_duration", 1.0)
  assert (compiler.wall, compiler.process) == (4.0, 5.0)


def test_compiling_is_counted_once_and_only_where_it_is_asked_for():
  before = monitoring.get_event_duration_listeners()
  begin = clock.now()
  compile_something(8)
  assert clock.since(begin)["time/compile_s"] == 0.0
  with clock.counting():
    begin = clock.now()
    compile_something(7)
    end, spent = clock.now(), clock.since(begin)
    assert 0.0 < spent["time/compile_s"] <= spent["time/step_s"]
    # Of a program: its lowering is not compiling, and both took the processor.
    compiling = end.compiling_process - begin.compiling_process
    assert 0.0 < compiling < end.process - begin.process
    (listener,) = set(monitoring.get_event_duration_listeners()) - set(before)
    assert monitoring.get_event_duration_listeners().count(listener) == 1
  assert monitoring.get_event_duration_listeners() == before
  with pytest.raises(KeyError), clock.counting():
    raise KeyError
  assert monitoring.get_event_duration_listeners() == before
