"""Jails of a thread, and levels of the jail with a layer missing."""

import functools
import os
import platform
import signal
import subprocess
import sys
import threading

import hostile_code
import pytest
import tiers
from messages import refuses

from brorl_jax.verdicts.sandbox import (
  jail,
  library_calls,
  process,
  seccomp_landlock,
)
from brorl_jax.verdicts.sandbox.jail import Failed, Jail
from brorl_jax.verdicts.sandbox.seccomp_landlock import Limits

TABLE = "library_calls_for_tests"


def test_a_jail_starts_nothing_until_it_is_asked(monkeypatch):
  started = []
  real = library_calls.libraries
  monkeypatch.setattr(
    library_calls, "libraries", lambda name: started.append(name) or real(name)
  )
  it = Jail(TABLE)
  it.close()
  assert started == []
  assert (it.ask("echo", 1), it.ask("echo", 2)) == ([1], [2])
  assert started == [TABLE]
  it.close()
  assert it.ask("echo", 3) == [3]  # closed is not for ever
  assert started == [TABLE, TABLE]
  it.close()


@pytest.fixture
def level():
  level = jail.measure()
  if level.name == "none":
    pytest.skip(f"no jail for programs on this machine: {level.reason}")


def job(program):
  return {"mode": "call", "program": program, "function": "f", "calls": [["l"]]}


def test_a_jail_runs_programs_too(level):
  it = Jail(TABLE, allow_inner=True)
  for number in (1, 2):
    ended = it.run(job(f"def f(): return {number}"), limits=Limits())
    assert (ended.reason, ended.frames[0].payload) == ("", b"%d" % number)
  assert it.ask("echo", 1) == [1]
  it.close()
  assert it.run(job("f = list"), limits=Limits()).reason == ""
  it.close()
  it.stop()
  with pytest.raises(Failed, match=r"^stopped$"):
    it.run(job("f = list"), limits=Limits())


def test_a_jail_that_was_killed_is_counted_and_the_program_judged(level):
  it = Jail(TABLE, allow_inner=True)
  it.run(job("def f(): return 1"), limits=Limits())
  assert it._zygote is not None and it._zygote._process is not None
  os.kill(it._zygote._process.pid, signal.SIGKILL)
  assert it.run(job("def f(): return 1"), limits=Limits()).reason == ""
  assert it.failures == 1
  # What a program does to itself is no failure of the jail.
  it.run(job("import os\ndef f(): os.abort()"), limits=Limits())
  assert it.failures == 1
  it.close()


def test_a_machine_without_a_jail_runs_no_program(monkeypatch):
  def require(*, allow_inner):
    assert not allow_inner
    raise Failed("cannot sandbox programs: a test")

  monkeypatch.setattr(jail, "require", require)
  with pytest.raises(Failed, match="cannot sandbox programs"):
    Jail(TABLE).run(job("f = list"), limits=Limits())


def test_each_thread_has_its_own_which_ends_with_it(monkeypatch):
  made = library_calls.LibraryWorker.__init__
  monkeypatch.setattr(made, "__defaults__", (TABLE,))
  monkeypatch.setattr(Jail.__init__, "__defaults__", (TABLE,))
  monkeypatch.setattr(jail, "_local", threading.local())
  pids = []

  def work():
    assert jail.mine() is jail.mine()
    pids.append(jail.mine().ask("pid"))

  work()
  for _ in range(2):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
  work()
  assert pids[0] == pids[3] and len(set(pids)) == 3
  jail.mine().close()


@pytest.fixture
def fresh(monkeypatch):
  measure = functools.lru_cache(jail.measure.__wrapped__)
  monkeypatch.setattr(jail, "measure", measure)


def only_bwrap(tmp_path, monkeypatch, script):
  tmp_path.chmod(0o755)
  for parent in tmp_path.parents[:3]:  # of a worker of xdist, too
    if parent != parent.parent and os.access(parent, os.W_OK):
      parent.chmod(parent.stat().st_mode | 0o011)
  if script:
    path = tmp_path / "bwrap"
    # Written by another process: a fork of a zygote could inherit a descriptor
    # of ours that is open for writing, and a file that has one cannot start.
    subprocess.run(["tee", str(path)], input=script, text=True, check=True)
    path.chmod(0o755)
  monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.ci
def test_this_machine(fresh):
  level = jail.measure()
  assert level is jail.measure()  # found out once
  assert level is jail.require(allow_inner=True)
  assert level.name in ("full", "inner")
  assert (level.name == "full") == (level.reason == "")
  assert (level.name == "full") == (level.bubblewrap is not None)
  assert level.machine == platform.machine()
  if level.name == "full":
    assert jail.require(allow_inner=False) is level
    assert "full sandbox" in jail.describe(level)
  assert level.landlock_abi == seccomp_landlock.landlock_abi() >= 1
  assert os.path.isabs(level.interpreter)
  version = tuple(map(int, level.version.split(".")))
  assert version >= (3, 9)
  if level.interpreter == os.path.realpath(sys._base_executable):
    assert version == sys.version_info[:3]
  else:
    assert level.interpreter == "/usr/bin/python3"


def test_without_bubblewrap(fresh, tmp_path, monkeypatch):
  only_bwrap(tmp_path, monkeypatch, None)
  said = "temporary files ... threads ... bwrap is not installed"
  said += " ... --config.reward.allow_inner=True"
  with refuses(process.Failed, said):
    jail.require(allow_inner=False)
  level = jail.require(allow_inner=True)
  assert "weaker sandbox" in jail.describe(level)
  assert "start threads" in jail.describe(level)
  assert (level.name, level.bubblewrap) == ("inner", None)
  assert "bwrap is not installed" in level.reason
  assert "apt install bubblewrap" in level.reason


@pytest.mark.ci
@pytest.mark.parametrize(
  "script, why",
  tiers.some([
    ("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\n"
      "exit 1\n", "No permissions to create new namespace"),
    ("#!/bin/sh\nexit 0\n", "no answer"), ("#!/nowhere\n", "cannot start"),
  ], 1, 1),
)  # fmt: skip
def test_if_namespaces_are_refused(fresh, tmp_path, monkeypatch, script, why):
  only_bwrap(tmp_path, monkeypatch, script)
  level = jail.require(allow_inner=True)
  assert level.name == "inner" and why in level.reason
  assert "seccomp=unconfined" in level.reason
  assert "seccompProfile" in level.reason and "label=disable" in level.reason
  assert "\n" not in level.reason


def refused(named):
  level = jail.measure()
  assert level.name == "none" and level.bubblewrap is None
  with pytest.raises(process.Failed) as error:
    jail.require(allow_inner=True)
  said = f"this machine cannot sandbox programs: {level.reason}"
  assert str(error.value) == said
  assert named in level.reason and "\n" not in level.reason


def test_without_landlock_or_linux(fresh, monkeypatch):
  monkeypatch.setattr(seccomp_landlock, "landlock_abi", lambda: 0)
  refused("no Landlock; use Linux 5.13")
  jail.measure.cache_clear()
  monkeypatch.setattr(platform, "system", lambda: "Darwin")
  refused("it needs Linux, not Darwin")


def test_on_an_unknown_machine(fresh, monkeypatch):
  monkeypatch.setattr(platform, "machine", lambda: "riscv64")
  refused("'riscv64', only for x86_64 and aarch64; leave domain 'code' out")


def test_without_an_interpreter(fresh, monkeypatch):
  monkeypatch.setattr(jail, "_SYSTEM_PYTHON", "/nowhere/python3")
  monkeypatch.setattr(sys, "_base_executable", "/bin/false", raising=False)
  refused("install one: apt install python3")


def test_an_old_interpreter_is_none(fresh, monkeypatch):
  monkeypatch.setattr(jail, "_OLDEST", (99, 0))
  refused("99.0 or later; install one")


@pytest.mark.ci
def test_a_private_interpreter_is_passed_over(fresh, monkeypatch, tmp_path):
  own = tmp_path / "python3"
  own.write_text('#!/bin/sh\nexec /usr/bin/python3 "$@"\n')
  own.chmod(0o600)
  monkeypatch.setattr(sys, "_base_executable", str(own), raising=False)
  assert jail.measure().interpreter == "/usr/bin/python3"


# A wall that is missing is noticed from inside: each hole gives the lower level
# or none.


@pytest.mark.ci
@pytest.mark.parametrize("call, hole", tiers.some([
  ("clone:56:220", "a program could fork"),
  ("socket:41:198", "a program could open a socket"),
], 1, 1))  # fmt: skip
def test_a_hole_in_the_filter_is_refused(fresh, monkeypatch, call, hole):
  row = "read:0:63"
  hostile_code.change_source(monkeypatch, row, f"{row} {call}")
  refused(hole)


@pytest.mark.parametrize("line, hole", tiers.some([
  ("_restrict_files(readable, writable)", "read outside, write outside"),
  ("_set_limits(limits)", "take too much memory"),
  ("calls_filter(forks, limits.threads > 0)()", "fork"),
], 1))  # fmt: skip
def test_a_wall_that_is_missing_is_noticed(fresh, monkeypatch, line, hole):
  hostile_code.change_source(monkeypatch, line, "pass")
  monkeypatch.setenv("PATH", "")
  refused(hole)


@pytest.mark.ci
def test_a_jail_in_which_nothing_runs_is_refused(fresh, monkeypatch):
  monkeypatch.setattr(jail, "_ATTEMPTS", "def attempts(*a): return []")
  monkeypatch.setenv("PATH", "")
  refused("an honest program failed: no function: honest")


@pytest.mark.ci
def test_a_jail_without_an_end_is_refused(fresh, monkeypatch):
  program = jail._ATTEMPTS.replace("while True:\n    pass", "return 1")
  assert program != jail._ATTEMPTS
  monkeypatch.setattr(jail, "_ATTEMPTS", program)
  monkeypatch.setenv("PATH", "")
  refused("an endless program was not ended: 1")
