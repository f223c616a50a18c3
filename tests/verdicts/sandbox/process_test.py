"""Workers and their zygotes, both sides, on judges that misbehave."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import messages
import pytest
import tiers

from brorl_jax.verdicts.sandbox import library_calls, process
from brorl_jax.verdicts.sandbox.library_calls import LibraryWorker
from brorl_jax.verdicts.sandbox.process import Failed

TABLE = "library_calls_for_tests"
BARE = "unisolated_calls_for_tests"
LONG = 60.0  # a time-out that no test waits for


@pytest.fixture
def worker():
  it = LibraryWorker(TABLE)
  yield it
  it.close()


@pytest.fixture
def isolated():
  if why := library_calls.isolation_error(TABLE):
    pytest.skip(f"no walls on this machine: {why}")


def children(parent: int) -> list[int]:
  """Those that live: a zygote waits for its clones when it makes the next."""
  found = []
  for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
    with contextlib.suppress(OSError):
      fields = stat.read_text().rpartition(")")[2].split()
      if int(fields[1]) == parent and fields[0] != "Z":
        found.append(int(stat.parent.name))
  return sorted(found)


def only(pids: list[int], *, children_of: int) -> bool:
  for _ in range(500):
    if children(children_of) == pids:
      return True
    time.sleep(0.02)
  return False


def descriptors() -> int:
  return len(os.listdir("/proc/self/fd"))


def gone(pid: int) -> bool:
  """Whether it ends within some seconds; what init leaves unreaped counts."""
  for _ in range(500):
    try:
      stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
      return True
    if stat.rpartition(")")[2].split()[0] == "Z":
      return True
    time.sleep(0.02)
  return False


def test_values_come_back_as_json_holds_them(worker):
  values = [None, True, -1, 0.5, "é\ud800\u202e\0", [1, [2]], {"a": {"b": []}}]
  assert worker.ask("echo", *values, timeout=LONG) == values


def test_a_worker_is_a_child_of_a_clone_alone(worker):
  pid = worker.ask("pid", timeout=LONG)
  clones = children(library_calls.libraries(TABLE).pid)
  assert [pid] in [children(clone) for clone in clones]
  assert pid not in children(os.getpid())


@pytest.mark.parametrize(("call", "args", "message"), [
  ("crash", (0,), "the worker process died"),
  ("segfault", (), "the worker process died"),
  ("abort", (), "the worker process died"),
  ("recurse", (), "RecursionError: maximum recursion"),
  ("leave", (), "SystemExit: 0"),
  ("huge", (70_000,),
    r"ValueError: a reply of 70\d\d\d bytes; the limit is 65536"),
  ("unserialisable", (), "TypeError: Object of type object is not JSON"),
  # A length, and then too much, too little and what is no reply.
  ("say", (b"\2\0\0\0" + b"123",), "a malformed reply"),
  ("say", (b"\xff\xff\xff\x7f",), "a malformed reply of 2147483647 bytes"),
  ("say", (b"\2\0\0\0[]",), "a malformed reply"),
  ("say", (b"\2\0\0\0{}",), "a malformed reply"),
  ("say", (b"\3\0\0\0\xff\xff\xff",), r"a malformed reply \(Unicode"),
  ("say", (b"\x0b\0\0\0" + b'{"valve":1}',), "a malformed reply"),
  ("say", (b"\x10\xea\0\0" + b"[" * 59_920,), r"a malformed reply \(Rec"),
  ("nothing", (),
    "LookupError: unknown library call 'nothing'; use one of abort"),
])  # fmt: skip
def test_what_goes_wrong_is_said_in_a_line_and_the_next_is_answered(
  worker, call, args, message
):
  args = [a.hex() if isinstance(a, bytes) else a for a in args]
  before = worker.ask("pid", timeout=LONG)
  with pytest.raises(Failed, match=f"^{call}: {message}") as caught:
    worker.ask(call, *args, timeout=LONG)
  assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
  assert worker.ask("echo", 1, timeout=LONG) == [1]
  assert worker.ask("pid", timeout=LONG) != before and worker.failures == 1


@pytest.mark.parametrize(("call", "args"), tiers.some([
  ("sleep", ()), ("spin", ()), ("say", ("00",)), ("drip", ())
], 1))  # fmt: skip
def test_what_takes_too_long_is_killed(worker, call, args):
  pid = worker.ask("pid", timeout=LONG)
  start = time.monotonic()
  with pytest.raises(Failed, match=f"^{call}: late: no answer in 0.2 s$"):
    worker.ask(call, *args, timeout=0.2)
  assert 0.2 <= time.monotonic() - start < 0.2 * process.PATIENCE + 3
  assert not pathlib.Path(f"/proc/{pid}").exists()  # reaped, too
  assert worker.ask("echo", 1, timeout=LONG) == [1]


@pytest.mark.ci
def test_the_wait_for_a_cpu_does_not_count(worker):
  """Four processes on one CPU: a quarter of it each."""
  cpu = min(os.sched_getaffinity(0))
  rivals = [LibraryWorker(TABLE) for _ in range(3)]
  for it in (worker, *rivals):
    os.sched_setaffinity(it.ask("pid", timeout=LONG), {cpu})

  def spin(rival):
    with contextlib.suppress(Failed):
      rival.ask("spin", timeout=LONG)

  threads = [threading.Thread(target=spin, args=(r,)) for r in rivals]
  for thread in threads:
    thread.start()
  start = time.monotonic()
  assert worker.ask("work", 0.3, timeout=0.6) == 0.3
  wall = time.monotonic() - start
  for rival, thread in zip(rivals, threads, strict=True):
    rival.stop()
    thread.join()
    rival.close()
  assert wall > 0.6  # else the test shows nothing


def test_what_was_used_for_other_questions_does_not_count(worker):
  worker.ask("work", 0.4, timeout=LONG)
  assert worker.ask("slow_echo", "a", 0.1, timeout=0.35) == "a"


def test_one_that_was_killed_while_nothing_was_asked_is_replaced(worker):
  pid = worker.ask("pid", timeout=LONG)
  os.kill(pid, signal.SIGKILL)
  assert gone(pid)
  assert (worker.ask("echo", 1, timeout=LONG), worker.failures) == ([1], 0)


def test_a_zygote_waits_for_clones_that_ended(worker):
  def zombies():
    pids = pathlib.Path(f"/proc/{it}/task/{it}/children").read_text().split()
    stats = (pathlib.Path(f"/proc/{pid}/stat").read_text() for pid in pids)
    return sum(stat.rpartition(")")[2].split()[0] == "Z" for stat in stats)

  it = library_calls.libraries(TABLE).pid
  for _ in range(8):
    worker.ask("echo", timeout=LONG)
    worker.close()
  worker.ask("echo", timeout=LONG)
  assert zombies() <= 2


def test_a_question_has_a_largest_size(worker):
  text = "x" * (library_calls.MAX_QUESTION - 100)
  assert worker.ask("length", text, timeout=LONG) == len(text)
  with pytest.raises(Failed, match=r"^length: a question of 4194\d+ bytes; "):
    worker.ask("length", text + "x" * 100, timeout=LONG)
  # Surrogates and other characters take up to twelve bytes each.
  with pytest.raises(Failed, match="a question of"):
    worker.ask("length", "\U0001f600" * 400_000, timeout=LONG)


@pytest.mark.parametrize(("call", "args", "refusal"), [
  ("touch", ("PATH",), "PermissionError"),
  ("read", ("PATH",), "PermissionError"),
  ("read", ("/etc/passwd",), "PermissionError"),
  ("read", ("/proc/self/environ",), "PermissionError"),
  ("read", (__file__,), "PermissionError"),
  ("connect", ("PORT",), "PermissionError"), ("fork", (), "PermissionError"),
  ("run", ("/bin/true",), "PermissionError"),
  ("kill", (os.getpid(),), "PermissionError"),
  ("allocate", (), "Cannot allocate memory"),
])  # fmt: skip
def test_the_walls_hold(isolated, worker, tmp_path, call, args, refusal):
  path = tmp_path / "canary"
  if call == "read":
    path.write_text("secret")
  with socket.create_server(("127.0.0.1", 0)) as server:
    values = {"PATH": str(path), "PORT": server.getsockname()[1]}
    with pytest.raises(Failed, match=refusal):
      worker.ask(call, *[values.get(a, a) for a in args], timeout=LONG)
    server.settimeout(0)
    with pytest.raises(BlockingIOError):
      server.accept()
  assert call == "read" or not path.exists()
  assert only([], children_of=library_calls.libraries(TABLE).pid)


def test_the_walls_let_the_libraries_load(isolated, worker):
  assert worker.ask("imported", "xml.dom.minidom", timeout=LONG)
  assert worker.ask("imported", "pytest", timeout=LONG)


def test_a_worker_has_no_descriptor_or_environment_of_ours(worker, monkeypatch):
  monkeypatch.setenv("API_KEY", "secret")
  library_calls.libraries(TABLE).close()
  other = LibraryWorker(TABLE)
  other.ask("echo", timeout=LONG)
  assert worker.ask("descriptors", timeout=LONG) == [0, 1, 2, 3]
  environment = worker.ask("environment", timeout=LONG)
  assert "secret" not in environment.values()
  assert environment["PYTHONHASHSEED"] == "0"
  other.close()


def test_a_fresh_judge_leaves_nothing_behind(isolated, worker):
  assert worker.ask("remember", "a", timeout=LONG) == ["a"]
  assert worker.ask("remember", "b", timeout=LONG) == ["a", "b"]
  # It may find what others left, but nobody finds what it left.
  assert worker.ask("remember_afresh", "c", timeout=LONG) == ["a", "b", "c"]
  assert worker.ask("remember_afresh", "d", timeout=LONG) == ["d"]
  assert worker.ask("remember", "e", timeout=LONG) == ["e"]
  assert worker.failures == 0


def test_a_worker_is_replaced_when_it_is_old(worker, monkeypatch):
  monkeypatch.setattr(library_calls, "_QUESTIONS", 3)
  pids = [worker.ask("pid", timeout=LONG) for _ in range(7)]
  assert [pids.index(pid) for pid in pids] == [0, 0, 0, 3, 3, 3, 6]
  assert worker.failures == 0


def test_without_isolation_only_harmless_calls_answer():
  assert library_calls.isolation_error(BARE) == "OSError: this machine has none"
  worker = LibraryWorker(BARE)
  assert worker.ask("harmless", timeout=LONG) == 1
  message = (
    "^executing: PermissionError: 'executing' may execute model text, and this"
    " machine cannot isolate it$"
  )
  with pytest.raises(Failed, match=message):
    worker.ask("executing", timeout=LONG)
  assert worker.ask("harmless", timeout=LONG) == 1
  worker.close()
  library_calls.libraries(BARE).close()


def test_a_table_that_cannot_be_loaded_is_said():
  message = (
    "^echo: the verifier libraries do not load: ModuleNotFoundError: .*nowhere"
  )
  worker = LibraryWorker("nowhere_for_tests")
  with pytest.raises(Failed, match=message):
    worker.ask("echo", timeout=LONG)
  with pytest.raises(Failed, match="do not load"):
    library_calls.isolation_error("nowhere_for_tests")


def test_a_zygote_that_dies_is_replaced_and_its_workers_live():
  pair = [LibraryWorker(TABLE), LibraryWorker(TABLE)]
  pids = [worker.ask("pid", timeout=LONG) for worker in pair]
  before = library_calls.libraries(TABLE).pid
  os.kill(before, signal.SIGKILL)
  assert gone(before)
  assert [worker.ask("pid", timeout=LONG) for worker in pair] == pids
  pair[0].close()
  assert gone(pids[0]) and pair[0].ask("pid", timeout=LONG) not in pids
  assert library_calls.libraries(TABLE).pid != before
  assert before not in children(os.getpid())
  for worker in pair:
    worker.close()
  assert gone(pids[1])


def test_a_clone_that_is_not_made_is_tried_once_again(worker, monkeypatch):
  real, tried = LibraryWorker._begin, []

  def begin(self, patience_s):
    tried.append(self)
    if len(tried) < 2:
      self._zygote = library_calls.libraries(TABLE)
      raise Failed("no answer")
    return real(self, patience_s)

  monkeypatch.setattr(LibraryWorker, "_begin", begin)
  assert worker.ask("echo", 1, timeout=LONG) == [1]
  assert len(tried) == 2 and worker.failures == 0


def test_an_interrupt_of_the_terminal_is_not_for_the_zygotes(worker):
  pid = worker.ask("pid", timeout=LONG)
  it = library_calls.libraries(TABLE).pid
  assert os.getsid(it) != os.getsid(0)
  for each in (it, pid):
    os.kill(each, signal.SIGINT)
  assert worker.ask("pid", timeout=LONG) == pid
  assert library_calls.libraries(TABLE).pid == it


def test_an_interrupted_question_is_not_answered_later(worker):
  with messages.interrupted(0.2):
    worker.ask("slow_echo", "first", 0.4, timeout=LONG)
  assert worker.ask("slow_echo", "second", 0.4, timeout=LONG) == "second"


def test_stop_ends_a_question_from_another_thread(worker):
  worker.ask("echo", timeout=LONG)
  timer = threading.Timer(0.1, worker.stop)
  timer.start()
  with pytest.raises(Failed, match=r"^sleep: the worker process died$"):
    worker.ask("sleep", timeout=LONG)
  timer.join()
  with pytest.raises(Failed, match=r"^echo: stopped$"):
    worker.ask("echo", timeout=LONG)


def test_nothing_is_left_behind():
  assert only([], children_of=library_calls.libraries(TABLE).pid)
  fds, mine = descriptors(), children(os.getpid())
  made = [LibraryWorker(TABLE) for _ in range(5)]
  for worker in made:
    worker.ask("echo", timeout=LONG)
    with pytest.raises(Failed):
      worker.ask("crash", 0, timeout=LONG)
    worker.ask("echo", timeout=LONG)
  assert len(children(library_calls.libraries(TABLE).pid)) == 5
  made[0].close()
  del worker, made  # the others are let go without a word
  assert only([], children_of=library_calls.libraries(TABLE).pid)
  assert (descriptors(), children(os.getpid())) == (fds, mine)


def test_threads_share_a_zygote_and_start_one():
  library_calls.libraries(TABLE).close()
  found, barrier = [], threading.Barrier(4)

  def ask(number):
    worker = LibraryWorker(TABLE)
    barrier.wait()
    answers = [worker.ask("echo", number, i, timeout=LONG) for i in range(50)]
    found.append(answers == [[number, i] for i in range(50)])
    found.append(library_calls.libraries(TABLE).pid)
    worker.close()

  threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert found.count(True) == 4 and len(set(found)) == 2


def script(code: str) -> subprocess.Popen[str]:
  path = [str(pathlib.Path(__file__).parents[2]), *sys.path]
  code = (
    f"import os, sys, time; sys.path[:] = {path!r}\n"
    "from brorl_jax.verdicts.sandbox import library_calls\n"
    "from brorl_jax.verdicts.sandbox.library_calls import LibraryWorker\n"
    f"worker = LibraryWorker({TABLE!r})\n"
    "pid = lambda: worker.ask('pid', timeout=60.0)\n"
    f"print(library_calls.libraries({TABLE!r}).pid, pid(), flush=True)\n" + code
  )
  return subprocess.Popen(
    [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
  )


@pytest.mark.parametrize("which", ["worker", "guard", "zygote"])
def test_a_stopped_process_is_replaced_and_leaves_nothing(monkeypatch, which):
  """It takes no part in its end: it has to be killed."""
  monkeypatch.setattr(process, "_END_S", 0.3)
  worker = LibraryWorker(TABLE)
  pid = worker.ask("pid", timeout=LONG)
  guard, zygote = worker._guard.pid, library_calls.libraries(TABLE).pid
  stopped = {"worker": pid, "guard": guard, "zygote": zygote}[which]
  os.kill(stopped, signal.SIGSTOP)
  if which == "worker":
    with pytest.raises(Failed, match="late"):
      worker.ask("echo", timeout=0.2)
  worker.close()
  if which == "zygote":
    monkeypatch.setattr(library_calls, "_CLONE_S", 2.0)
  assert worker.ask("echo", 1, timeout=LONG) == [1]
  assert gone(pid) and gone(guard) and gone(stopped)
  assert (library_calls.libraries(TABLE).pid != zygote) == (which == "zygote")
  worker.close()


@pytest.mark.parametrize(("code", "status"), tiers.some([
  ("", 0), ("sys.exit(3)", 3), ("os._exit(4)", 4),
  ("os.kill(os.getpid(), 9)", -9), ("worker.stop(); raise SystemExit(5)", 5),
], 1))  # fmt: skip
def test_no_process_outlives_the_program(code, status):
  with script(code) as program:
    line = program.stdout.readline()
    program.communicate(timeout=60)
  assert program.returncode == status
  assert all(gone(int(pid)) for pid in line.split())


def test_a_fork_of_the_program_has_workers_of_its_own():
  code = ("child = os.fork()\n"
    "if child: os.waitpid(child, 0)\n" "print(pid(), flush=True)\n"
    "worker.close()\n" "if not child: os._exit(0)\n")  # fmt: skip
  with script(code) as program:
    out, _ = program.communicate(timeout=60)
  it, first, in_child, in_parent = map(int, out.split())
  assert in_parent == first  # not even ended
  assert len({it, first, in_child}) == 3


def test_what_a_worker_may_read_is_code():
  places = library_calls.readable()
  assert all(os.path.isdir(place) for place in places)
  assert any(json.__file__.startswith(place + "/") for place in places)
  assert any(pytest.__file__.startswith(place + "/") for place in places)
  assert not any(__file__.startswith(place + "/") for place in places)
  assert not {"/", "/etc", "/usr", "/tmp", str(pathlib.Path.home())} & {*places}
  assert not any(re.search(r"/(proc|sys|dev|home)$", p) for p in places)


# What processes use, on some that compute, sleep, fork and wait for a CPU.

SPIN = "while True: pass"
# A child and a grandchild that spin.
FORK = "import os\nos.fork()\n" + SPIN


@pytest.fixture
def start():
  """Starts a program as the grandchild of ours, whose parent's pid it gives."""
  parents = []

  def begin(code):
    parent = subprocess.Popen(
      ["sh", "-c", '"$0" -c "$1" & read _; kill -9 0', sys.executable, code],
      stdin=subprocess.PIPE,
      start_new_session=True,
    )
    parents.append(parent)
    wait_for(lambda: process.descendants(parent.pid))
    return parent.pid

  yield begin
  for parent in parents:
    parent.communicate(b"")


def wait_for(happens, seconds=60.0):
  end = time.monotonic() + seconds
  while not happens():
    assert time.monotonic() < end
    time.sleep(0.01)


def cpu_s(pid):
  return sum(one.cpu_s for one in process.descendants(pid).values())


# Clocks, by hand: the time of the wall, and what the processes have used.


@pytest.fixture
def clock(monkeypatch):
  """clock(limits) -> late(wall, {pid: (cpu_s, waited_s)}), and the clock."""
  now, found = [0.0], [{}]
  monkeypatch.setattr(process.time, "monotonic", lambda: now[0])
  monkeypatch.setattr(process, "descendants", lambda pid: found[0])

  def make(**limits):
    clock = process.JobClock(0, **limits)

    def late(wall, used):
      now[0] = wall
      found[0] = {pid: process.Usage(*both) for pid, both in used.items()}
      return clock.late()

    return late, clock

  return make


@pytest.mark.parametrize("limits", [(0.4, 600.0), (600.0, 0.4)])
def test_what_computes_or_sleeps_too_long_is_late(clock, limits):
  test_s, total_s = limits
  late, _ = clock(test_s=test_s, total_s=total_s)
  assert not late(0.4, {1: (0.39, 0.0)}) and late(0.6, {1: (0.41, 0.0)})
  late, _ = clock(test_s=test_s, total_s=total_s)
  late(1.0, {1: (0.0, 0.0)})
  assert not late(1.39, {1: (0.0, 0.0)}) and late(1.6, {1: (0.0, 0.0)})


def test_waiting_for_a_cpu_is_not_sleep(clock):
  """A process that ran for a tenth of the time and waited else."""
  late, it = clock(test_s=1.0, total_s=2.0)
  assert not late(1.0, {1: (0.1, 0.9)})  # another set of processes than before
  assert not late(5.0, {1: (0.5, 4.5)}) and not late(9.0, {1: (0.9, 8.1)})
  assert late(10.1, {1: (0.91, 9.19)})  # ten times the limit: no more patience
  it.tested()
  assert not late(12.0, {1: (1.1, 10.9)})
  it.tested()
  assert not late(13.0, {1: (1.2, 10.9)})  # .9 s of sleep
  assert late(13.2, {1: (1.2, 10.9)})  # 1.1 s


def test_the_next_test_begins_with_nothing_used(clock):
  late, it = clock(test_s=0.5, total_s=600.0)
  it.tested()
  assert not late(1.0, {1: (9.0, 0.0)})  # it begins to count here
  assert not late(1.4, {1: (9.4, 0.0)}) and late(1.6, {1: (9.6, 0.0)})
  it.tested()
  assert not late(2.0, {1: (9.6, 0.0)})  # .4 s of sleep
  it.tested()
  assert not late(2.4, {1: (9.6, 0.0)})  # before it, sleep is another test's
  assert late(2.6, {1: (9.6, 0.0)})


def test_cpu_never_grows_less(clock):
  """A look that missed a process does not begin a test at nothing."""
  late, it = clock(test_s=5.0, total_s=60.0)
  assert not late(1.0, {1: (1.0, 0.0)}) and not late(4.0, {1: (4.0, 0.0)})
  it.tested()
  assert not late(4.2, {})
  assert not late(6.0, {1: (6.0, 0.0)})  # two seconds of five


def test_waits_of_threads_and_processes_that_ended_are_no_sleep(clock):
  late, _ = clock(test_s=2.5, total_s=60.0)
  assert not late(0.1, {1: (0.0, 5.0)}) and not late(2.1, {1: (2.0, 0.0)})
  late, _ = clock(test_s=1.0, total_s=2.0)
  for wall in (3.5, 5.0, 6.5):  # how long others waited cannot be known
    assert not late(wall, {wall: (0.0, 0.0)})


def test_all_tests_together_end_when_patience_does(clock):
  late, it = clock(test_s=1.0, total_s=2.0)
  for wall in (6.0, 12.0, 18.0):
    it.tested()
    assert not late(wall, {1: (0.0, wall)})
  assert late(20.1, {1: (0.0, 20.1)})


def test_what_the_kernel_does_not_list_is_sleep(clock):
  late, _ = clock(test_s=1.0, total_s=2.0)
  assert not late(0.9, {}) and late(1.1, {})


def test_a_deadline_is_of_the_wall(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(process.time, "monotonic", lambda: now[0])
  deadline = process.Deadline(2.0)
  assert (deadline.seconds, deadline.wait_s) == (2.0, 2.0)
  now[0] = 1.5
  assert deadline.wait_s == 0.5 and not deadline.late()
  now[0] = 2.0
  assert deadline.wait_s > 0 and deadline.late()


# What real processes use.


def test_nobody_has_no_descendants():
  assert process.descendants(2**30) == {}


def test_descendants_of_descendants_count(start):
  pid = start(FORK)
  wait_for(lambda: len(process.descendants(pid)) == 2)
  wait_for(lambda: cpu_s(pid) > 0.2)


def test_children_that_were_waited_for_count(start):
  code = ("import os, time\n"
    "if os.fork() == 0:\n" "  while time.process_time() < 0.2: pass\n"
    "  os._exit(0)\n" "os.wait()\n" "time.sleep(600)")  # fmt: skip
  pid = start(code)
  wait_for(lambda: len(process.descendants(pid)) == 2)
  wait_for(lambda: len(process.descendants(pid)) == 1)
  # Counted in ticks of 10 ms, cut off for user and system.
  assert cpu_s(pid) >= 0.18


@pytest.mark.ci
def test_the_wait_for_a_cpu_is_told(start):
  """Two that spin on one CPU wait for each other."""
  pid = start(FORK)
  wait_for(lambda: len(process.descendants(pid)) == 2)
  cpu = min(os.sched_getaffinity(0))
  for child in process.descendants(pid):
    os.sched_setaffinity(child, {cpu})
  before, begin = process.descendants(pid), time.monotonic()
  now = lambda: process.descendants(pid).items()
  waited = lambda: [x.waited_s - before[child].waited_s for child, x in now()]
  wait_for(lambda: min(waited()) > 0.3)
  assert max(waited()) < time.monotonic() - begin
