import os
import signal
import threading

import pytest

from brorl_jax.verdicts.sandbox import codec, jail, workers
from brorl_jax.verdicts.sandbox.jail import Failed, Jail
from brorl_jax.verdicts.sandbox.protocol import Limits

TABLE = "library_calls_for_tests"


def test_a_jail_starts_nothing_until_it_is_asked(monkeypatch):
  started = []
  real = workers.libraries
  monkeypatch.setattr(
    workers, "libraries", lambda judges: started.append(judges) or real(judges)
  )
  it = Jail(TABLE)
  it.close()
  assert started == []
  assert it.ask("echo", 1) == [1]
  assert it.ask("echo", 2) == [2]
  assert started == [TABLE]
  it.close()
  assert it.ask("echo", 3) == [3]  # closed is not for ever
  assert started == [TABLE, TABLE]
  it.close()


def test_failures_are_counted():
  it = Jail(TABLE)
  assert it.failures == 0
  for count in (1, 2):
    with pytest.raises(Failed, match=r"^crash: the worker process died$"):
      it.ask("crash", 0)
    assert it.failures == count
  with pytest.raises(Failed, match=r"^sleep: late"):
    it.ask("sleep", timeout=0.1)
  assert it.failures == 3
  it.close()


def test_stop_is_for_good():
  it = Jail(TABLE)
  timer = threading.Timer(0.1, it.stop)
  timer.start()
  with pytest.raises(Failed):
    it.ask("sleep", timeout=60.0)
  timer.join()
  with pytest.raises(Failed, match=r"^echo: stopped$"):
    it.ask("echo")


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
    assert ended.reason == ""
    assert [codec.decode(codec.loads(f.payload)) for f in ended.frames] == [
      number
    ]
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
  dies = "import os\ndef f(): os.abort()"
  it.run(job(dies), limits=Limits())
  assert it.failures == 1
  it.close()


def test_a_machine_without_a_jail_runs_no_program(monkeypatch):
  def require(*, allow_inner):
    assert not allow_inner
    raise Failed("cannot sandbox programs: a test")

  monkeypatch.setattr(jail, "require", require)
  with pytest.raises(Failed, match="cannot sandbox programs"):
    Jail(TABLE).run(job("f = list"), limits=Limits())


def test_each_thread_has_one_of_its_own_and_it_ends_with_the_thread(
  monkeypatch,
):
  monkeypatch.setattr(workers.Worker.__init__, "__defaults__", (TABLE,))
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


def test_the_level_of_the_machine_is_asked_once():
  first = jail.isolation_error(TABLE)
  assert (
    first
    == workers.libraries(TABLE).hello["isolation_error"]
    == jail.isolation_error(TABLE)
  )
