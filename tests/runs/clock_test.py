"""Tests of brorl_jax/runs/clock.py."""

import os
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
  assert (spent["time/cores"], spent["time/cores_missed"]) == (2.5, 0.0)
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  spent = clock.since(begin)
  assert (spent["time/cpu_s"], spent["time/busy_s"]) == (18.0, 5.0)


@pytest.mark.parametrize(
  "cpu_s, waited, others_s, missed, warns",
  [
    # Of 10 s. Two threads share two cores with another program of one thread.
    (10.0, {"1": 5.0, "2": 5.0}, 10.0, 1.0, True),
    (14.0, {"1": 3.0, "2": 3.0}, 6.0, 0.6, False),  # .7 of 2
    (13.9, {"1": 3.0, "2": 3.1}, 6.1, 0.61, True),
    # One thread; the other program has the other core.
    (10.0, {"1": 0.1}, 10.0, 0.01, False),
    (1.0, {"1": 0.0}, 0.0, 0.0, False),  # it waits for a disk
    # Eight threads of ours on two cores.
    (20.0, {str(i): 7.5 for i in range(8)}, 0.0, 0.0, False),
    # A thread that was there before, and one that has ended since.
    (10.0, {"0": 3.0 + 4.0}, 9.0, 0.4, False),
    (0.1, {"1": 0.9}, 9.0, 0.09, False),  # less than a second is lost
  ],
)
def test_cores_that_others_had_by_hand(
  monkeypatch, cpu_s, waited, others_s, missed, warns
):
  end = clock.Clock(11.0, 5.0 + cpu_s, 0.0, 0.0, waited, 50.0 + others_s)
  monkeypatch.setattr(clock, "now", lambda: end)
  before = {"0": 3.0, "ended": 8.0}
  spent = clock.since(clock.Clock(1.0, 5.0, 0.0, 0.0, before, 50.0))
  assert spent["time/cores"] == pytest.approx(cpu_s / 10)
  assert spent["time/cores_missed"] == pytest.approx(missed)
  assert (clock.few_cores(spent) is not None) == warns
  assert clock.few_cores({}) is None
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  assert clock.few_cores(spent) is None


def test_what_others_had_leaves_out_our_processes(monkeypatch, tmp_path):
  """In ticks: two cores were busy for 700 and 300, of which 430 are ours."""
  rows = ["cpu 9 9 9 9 9 9 9 9", "cpu0 100 200 300 5000 60 10 20 70"]
  rows += ["cpu1 100 100 100 9 9 0 0 0", "cpu2 999 0 0 0 0 0 0 0"]
  (tmp_path / "stat").write_text("\n".join(rows))
  me = os.getpid()
  # Process, parent, and user, system, children's user, children's system time.
  for pid, parent, *ticks in (
    (me, 1, 100, 20, 3, 7), (me + 1, me, 200, 0, 0, 0), (1, 0, 5, 5, 90, 0),
    (me + 2, me + 1, 0, 100, 0, 0), (me + 3, 1, 500, 0, 0, 0),
  ):  # fmt: skip
    (tmp_path / str(pid)).mkdir()
    fields = ["S", str(parent), *["0"] * 9, *map(str, ticks), "0"]
    text = f"{pid} (a) b) {' '.join(fields)}"
    (tmp_path / str(pid) / "stat").write_text(text)
  (tmp_path / "77").mkdir()  # it has just ended
  monkeypatch.setattr(clock, "_PROC", tmp_path)
  monkeypatch.setattr(clock, "_HERTZ", 100)
  monkeypatch.setattr(clock, "_others_seen", [-100.0, 0.0])
  monkeypatch.setattr(clock, "cores", lambda: {0, 1})
  assert clock._others() == pytest.approx((1000 - 430) / 100)
  (tmp_path / "stat").write_text("")
  assert clock._others() == pytest.approx(5.7)  # it was read a moment ago
  monkeypatch.setattr(clock, "_PROC", tmp_path / "none")
  monkeypatch.setattr(clock, "_others_seen", [-100.0, 0.0])
  assert clock._others() == 0.0 and clock._waited() == {}


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
