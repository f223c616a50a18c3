"""The code jail, by hostile programs and by hand."""

import dataclasses
import errno
import os
import pathlib
import signal
import subprocess
import threading
import time

import hostile_code
import pytest
import tiers

from brorl_jax.verdicts.sandbox import codec, jail_main, process, zygote
from brorl_jax.verdicts.sandbox import jail as jails
from brorl_jax.verdicts.sandbox.seccomp_landlock import Limits

# Both layers, and the walls alone, whichever this machine's own level is.
LEVELS = ["probed", pytest.param("inner", marks=pytest.mark.ci)]
# There is no place to write without namespaces, and threads are not started.
NOT_INNER = {"honest_temporary_file", "honest_threads", "honest_stdio_thread"}
# One for each way out, and some that are honest; CI runs all of them.
DESK = set(
  "abstract check_forged disk_full exit_at_import fork_forever forged_results "
  "honest_check honest_deep honest_stdio kills links memory_creeps mounts "
  "new_namespaces output_flood patched_builtins privileges reads_secrets tcp "
  "writes_outside".split()
)


def level_of(name):
  level = jails.require(allow_inner=True)
  if name == "inner":
    level = dataclasses.replace(level, name="inner", bubblewrap=None)
  return level


@pytest.fixture
def level(request):
  return level_of(request.param)


@pytest.fixture(scope="module", params=LEVELS)
def run(request):
  """All selected programs, four at a time, and what became of the host."""
  cases = [test.callspec.params for test in request.session.items
    if test.name.startswith("test_verdict[")]  # fmt: skip
  names = [case["name"] for case in cases if case["run"] == request.param]
  level = level_of(request.param)
  with hostile_code.Canaries() as canaries:
    reports = hostile_code.run_all(
      names or hostile_code.NAMES, level, canaries, at_once=4
    )
    return level, reports, canaries.complaints(), canaries.secret


@pytest.mark.parametrize("name", tiers.some([
  n if n in DESK else tiers.for_ci(n) for n in hostile_code.NAMES
], 1))  # fmt: skip
def test_verdict(run, name):
  level, reports, _, secret = run
  _, right = hostile_code.header(name)
  if level.name == "inner" and name in NOT_INNER:
    right = "fail"
  verdict = reports[name].verdict
  assert verdict.status == right, verdict.reason
  assert (verdict.score == 1.0) == (right == "pass")
  assert "\n" not in verdict.reason and verdict.reason.isprintable()
  assert secret.encode() not in reports[name].said
  assert reports[name].seconds < 30  # it ended; how fast is the machine's


def test_the_host_noticed_nothing(run):
  assert run[2] == []


@pytest.mark.ci
def test_the_canaries_are_alive(tmp_path):
  """They notice what a program without a jail does; harmless ones."""
  with hostile_code.Canaries() as canaries:
    others = hostile_code.children()  # of tests before, and the victim
    program = canaries.fill(
      "import socket, subprocess\n"
      "open('@FOLDER@/new', 'w').close()\n"
      "socket.create_connection(('127.0.0.1', @TCP@))\n"
      "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
      "s.sendto(b'leak', ('127.0.0.1', @UDP@))\n"
      "socket.socket(socket.AF_UNIX).connect('\\0@ABSTRACT@')\n"
      "subprocess.Popen(['sleep', '1'])\n"
    )
    command = ["python3", "-W", "ignore", "-c", program]
    subprocess.run(command, check=True, timeout=20)
    found = "\n".join(canaries.complaints())
    for pid in hostile_code.children() - others:
      os.waitpid(pid, 0)
  for word in ("files", "connection", "datagram", "process left"):
    assert word in found
  assert found.count("connection from") == 2


HONEST = "def f(x): return x + 1"


def run_calls(jail, program, times=1, **limits):
  """How the job that calls f(1) of a program ends."""
  job = {"mode": "call", "function": "f", "program": program}
  calls = [["l", 1]] * times
  return jail.run(job | {"calls": calls}, limits=Limits(**limits))


def answers(jail):
  return payloads(run_calls(jail, HONEST)) == [b"2"]


@pytest.fixture
def new_jail():
  jail = level_of("probed").zygote()
  yield jail
  jail.close()


@pytest.fixture(scope="module")
def jail():
  jail = level_of("probed").zygote()
  yield jail
  jail.close()


@pytest.fixture
def full_jail(new_jail):
  if not new_jail._bubblewrap:
    pytest.skip("no scratch, and threads are not started")
  return new_jail


def payloads(ended):
  assert ended.reason == ""
  return [frame.payload for frame in ended.frames]


def received(payload):
  return codec.decode(codec.loads(payload))


def pid_of(jail):
  return jail._process._popen.pid


@pytest.mark.ci
def test_jobs_share_an_interpreter_until_one_misbehaves(new_jail):
  assert answers(new_jail)
  first = pid_of(new_jail)
  ended = run_calls(new_jail, "def f(x): return y", 2)
  assert [f.why for f in ended.frames] == [b"runtime error: NameError"] * 2
  assert ended.reason == "" and pid_of(new_jail) == first
  crash = "import ctypes\ndef f(x): ctypes.string_at(0)"
  # What crashes leaves nothing behind; a new jail takes a tenth of a second.
  assert run_calls(new_jail, crash).reason == "killed: SIGSEGV"
  assert answers(new_jail) and pid_of(new_jail) == first
  late = "def f(x):\n  while True: pass"
  assert run_calls(new_jail, late, test_s=0.2).reason == "time-out"
  assert answers(new_jail) and pid_of(new_jail) != first


def test_an_interpreter_is_replaced_after_many_jobs(new_jail, monkeypatch):
  monkeypatch.setattr(zygote, "_JOBS", 2)
  pids = []
  for _ in range(4):
    assert answers(new_jail)
    pids.append(pid_of(new_jail))
  assert pids[0] == pids[1] != pids[2] == pids[3]


@pytest.mark.parametrize(
  "body, limits, reason",
  tiers.some([
    ("while True: pass", {"test_s": 0.3}, "time-out"),
    ("while True: pass", {"total_s": 0.3}, "time-out"),
    ("import time; time.sleep(99)", {"test_s": 0.3}, "time-out"),
    ("import time; time.sleep(99)", {"total_s": 0.3}, "time-out"),
    ("return 'x' * 5000", {"result_bytes": 1000}, "too much output"),
    ("import ctypes; ctypes.CDLL(None).unshare(0)", {},
      "forbidden system call"),
    ("import os; os._exit(7)", {}, "exit status: 7"),
    ("import os; os.closerange(0, 64)", {}, "exit status: 5"),
    (
      "import os\n  for fd in range(3, 64):\n    try: os.write(fd, b'x')\n"
      "    except OSError: pass\n  os._exit(0)",
      {}, "malformed results",
    ),
  ], 1),
)  # fmt: skip
def test_how_a_job_ends(jail, body, limits, reason):
  assert run_calls(jail, f"def f(x):\n  {body}", **limits).reason == reason
  assert (jail._process is None) == (not reason.startswith("exit status"))


def test_limits_are_those_of_the_job(jail):
  program = "def f(x):\n  return len(bytearray(300 << 20))"
  assert payloads(run_calls(jail, program)) == [b"314572800"]
  (frame,) = run_calls(jail, program, memory=1 << 28).frames
  assert frame.why == b"runtime error: MemoryError"


@pytest.mark.parametrize("level", ["probed", "inner"], indirect=True)
def test_what_a_program_finds(level):
  program = """
import os, sys
def f(x):
  names = "bin dev etc home lib proc root run sys tmp usr var".split()
  root = [name for name in names if os.path.exists("/" + name)]
  try:
    here = os.listdir(".")
  except PermissionError:
    here = "refused"
  return [root, os.getcwd(), list(os.environ), here, os.getuid(),
          sys.flags.hash_randomization]
"""
  jail = level.zygote()
  (payload,) = payloads(run_calls(jail, program))
  jail.close()
  root, cwd, environment, here, uid, hash_randomization = received(payload)
  assert not any("SECRET" in name or "TOKEN" in name for name in environment)
  assert uid == (zygote.NOBODY if os.geteuid() == 0 else os.getuid())
  assert hash_randomization == 0
  if level.name == "full":
    assert set(root) <= {"bin", "dev", "lib", "tmp", "usr"}
    assert (cwd, here) == ("/tmp", [])
  else:  # names of the host's folders can be probed, not listed
    assert (cwd, here) == ("/", "refused")


# What a job leaves, and what it could count, in one value.
_COUNTS = """
import fcntl, glob, os, struct, tempfile, threading
def f(x):
  found = [os.getpid(), os.getppid(), os.getcwd(), threading.get_native_id()]
  found += glob.glob("/tmp/*") + [os.stat(".").st_ino]
  with open("note", "w") as file:
    found.append(os.fstat(file.fileno()).st_ino)
    lock = struct.pack("hhqqi", 1, 0, 0, 0, 0)
    fcntl.fcntl(file, fcntl.F_SETLK, lock)
    try:
      found.append(fcntl.fcntl(file, fcntl.F_GETLK, lock))
    except PermissionError:
      pass
  os.makedirs("a/b")
  os.mkdir("closed", 0)
  for made in range(x):
    tempfile.mkstemp(dir=".")
  try:
    open("../note", "w").close()
    found.append("written")
  except OSError:
    return found
"""
_STREAMS = (
  "import os\nprint(os.getpid(), *(os.fstat(n).st_ino for n in (0, 1)))"
)


def test_no_job_can_count_others(full_jail):
  """Numbers of processes and files, and what lies in /tmp, begin anew."""
  counts = lambda n: _COUNTS.replace("range(x)", f"range({n})")
  found = [[*payloads(run_calls(full_jail, counts(n)))] for n in (0, 30, 1)]
  assert found[0] == found[1] == found[2] and b"written" not in found[0][0]
  assert received(found[0][0])[:4] == [1, 0, "/tmp", 1]
  job = {"mode": "stdio", "program": _STREAMS, "together": 2}
  one, nine = (
    payloads(full_jail.run(job | {"inputs": ["1"] * n}, limits=Limits()))
    for n in (1, 9)
  )
  assert one == nine[:1]


def value(jail, body, head=""):
  """What a function of x = 1 returns in the jail."""
  program = f"{head}\ndef f(x):\n" + "".join(
    f"  {line}\n" for line in body.strip().split("\n")
  )
  (payload,) = payloads(run_calls(jail, program))
  return received(payload)


@pytest.mark.parametrize(
  "command, allowed", [(0, 1), (9, 1), (1, 0), (3, 0), (10, 0), (129, 1)]
)
def test_no_jail_wakes_another(jail, command, allowed):
  """A futex in a file of the host; 128: among the threads of a process."""
  body = f"""
import ctypes, platform
number = 202 if platform.machine() == "x86_64" else 98
code = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value
libc, at = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p(code & ~3)
ctypes.set_errno(0)
libc.syscall(number, at, {command}, 0, ctypes.c_void_p(), None, 0)
return ctypes.get_errno()
"""
  assert (value(jail, body) != errno.EPERM) == allowed


def test_scratch_is_limited_and_each_job_has_all_of_it(full_jail):
  fill = """
import os
made = 0
try:
  for made in range(40):
    with open(str(made), "wb") as file:
      file.write(bytes(6 << 20))
except OSError:
  pass
return made
"""
  assert [value(full_jail, fill) for _ in range(3)] == [16, 16, 16]  # 96 MB
  many = """
import os
for made in range(10_000):
  try:
    os.mkdir(str(made))
  except OSError:
    return made
"""
  for _ in range(2):
    assert 4_000 < value(full_jail, many) < 4_096


def test_threads_are_limited(full_jail):
  body = """
import threading, time
threading.stack_size(32_768)
for made in range(1_000):
  try:
    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
  except RuntimeError:
    return made
"""
  assert 50 < value(full_jail, body) < 64


def test_a_job_has_its_own_descriptors_and_no_others(jail):
  body = """
import os
found = []
for fd in range(256):
  try:
    found.append([fd, os.fstat(fd).st_rdev])
  except OSError:
    pass
return found
"""
  found = value(jail, body)
  assert [fd for fd, _ in found[:3]] == [0, 1, 2]
  assert {device for _, device in found[:3]} == {os.makedev(1, 3)}
  assert len(found) == 4  # and where results go


def test_a_program_inherits_no_future_statement(jail):
  head = "def g(y: int): 0"
  assert value(jail, "return g.__annotations__['y'] is int", head)


@pytest.mark.parametrize(
  "program, pids",
  tiers.some([
    ("print(os.getpid())", [2, 2, 2, 3, 3]),
    ("import threading\nprint(os.getpid())", [2, 3, 4, 5, 6]),
    ("print(os.getpid(), flush=True)\nos._exit(0)", [2, 3, 4, 5, 6]),
    ("print(os.getpid(), flush=True)\nif input() == '1': os._exit(0)",
      [2, 2, 3, 3, 3]),
  ], 1),
)  # fmt: skip
def test_tests_that_share_a_process(full_jail, program, pids):
  job = {"mode": "stdio", "inputs": [f"{i}\n" for i in range(5)], "together": 3}
  for _ in range(2):  # the numbers of another job begin anew
    ends = job | {"program": f"import os\n{program}"}
    ended = full_jail.run(ends, limits=Limits())
    assert [int(p) for p in payloads(ended)] == pids
    assert {frame.status for frame in ended.frames} == {0}


@pytest.mark.ci
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_process_is_replaced(new_jail, monkeypatch, number):
  monkeypatch.setattr(process, "_END_S", 0.3)
  assert answers(new_jail)
  first, outer = new_jail._process.pid, pid_of(new_jail)
  os.kill(first, number)
  assert payloads(run_calls(new_jail, HONEST, test_s=0.5)) == [b"2"]
  assert pid_of(new_jail) != outer
  assert not pathlib.Path(f"/proc/{outer}").exists()


@pytest.mark.ci
def test_a_program_that_takes_the_jail_along_fails(new_jail, monkeypatch):
  """Unless the jail dies with an honest program, too."""
  real, deaths = zygote._collect, [zygote.Died] * 2

  def collect(*args):
    if deaths:
      raise deaths.pop()
    return real(*args)

  monkeypatch.setattr(zygote, "_collect", collect)
  assert run_calls(new_jail, HONEST).reason == "killed: the jail"
  deaths += [zygote.Died] * 3
  with pytest.raises(process.Failed, match="ends with every program"):
    run_calls(new_jail, HONEST)


@pytest.mark.parametrize(
  "path", tiers.some(["/nowhere/python", "/bin/false", "/bin/cat"], 1)
)
@pytest.mark.parametrize("level", ["probed", "inner"], indirect=True)
def test_no_interpreter(path, level):
  jail = zygote.Zygote(path, bubblewrap=level.bubblewrap)
  with pytest.raises(process.Failed) as error:
    run_calls(jail, HONEST)
  assert str(error.value).startswith(("the jail did not start", "cannot start"))
  assert "\n" not in str(error.value)


@pytest.mark.ci
def test_what_the_jail_does_wrong_is_tried_again(new_jail, monkeypatch):
  """Its process ends before the program's first line."""
  change = "os.write(fds[1], BEGUN)", "if broken: raise OSError"
  with monkeypatch.context() as patch:
    hostile_code.change_source(patch, *change)
    with pytest.raises(process.Failed, match="failed twice in a row"):
      run_calls(new_jail, HONEST)
  failed = new_jail.failures
  sources = hostile_code.change_source(monkeypatch, *change, times=1)
  assert answers(new_jail)
  assert len(sources) == 2
  # Both that failed in a row, and the first of these two.
  assert (failed, new_jail.failures) == (2, 3)


def test_a_machine_that_stalls_before_a_program_begins_is_not_late(
  new_jail, monkeypatch
):
  line = "os.write(fds[1], BEGUN)"
  hostile_code.change_source(monkeypatch, line, f"time.sleep(1.0); {line}")
  ended = run_calls(new_jail, HONEST, test_s=0.3, total_s=0.5)
  assert payloads(ended) == [b"2"] and not new_jail.failures


@pytest.mark.parametrize("line, job", [
  ("texts, most = job",
    {"mode": "stdio", "program": "1", "inputs": [""], "together": 1}),
  ("answered, answer = os.pipe()",
    {"mode": "check", "program": "def f(): 0", "function": "f"}),
])  # fmt: skip
def test_a_fork_that_fails_is_the_jails_fault(new_jail, monkeypatch, line, job):
  broken = f"raise BlockingIOError; {line}"
  hostile_code.change_source(monkeypatch, line, broken)
  tests = b"def check(c): c()" if job["mode"] == "check" else b""
  with pytest.raises(process.Failed, match="failed twice in a row"):
    new_jail.run(job, limits=Limits(), tests=tests)


@pytest.mark.parametrize("mode", ["call", "stdio"])
def test_no_program_can_say_that_the_jail_failed(jail, mode):
  program = "import os\ndef f(x): os._exit(5)\nif __name__ == '__main__': f(1)"
  if mode == "call":
    assert run_calls(jail, program).reason == "exit status: 5"
    return
  job = {"mode": mode, "program": program, "inputs": ["1"], "together": 1}
  ended = jail.run(job, limits=Limits())
  assert [frame.status for frame in ended.frames] == [5 << 8]


@pytest.mark.ci
def test_seconds_are_counted_by_who_waits_for_it(jail):
  body = "end = time.process_time() + 0.3\n  while time.process_time() < end: 0"
  program = f"import time\ndef f(x):\n  {body}"
  ended = run_calls(jail, program, 2)
  assert ended.reason == "" and 0.6 <= ended.cpu_s < 2.0
  assert all(0.3 <= frame.cpu_s < 1.0 for frame in ended.frames)
  # Those that it says it took may be forged; those it has had may not.
  forged = program.replace("process", "thread").replace(
    "def f", "time.process_time = lambda: 0.0\ndef f"
  )
  ended = run_calls(jail, forged, 2, test_s=0.5, total_s=0.5)
  assert ended.reason == "time-out"


@pytest.mark.parametrize(
  "limits", [{"test_s": 0.04, "total_s": 9.0}, {"test_s": 9.0, "total_s": 0.04}]
)
def test_what_took_too_long_is_late_if_nobody_looked(jail, monkeypatch, limits):
  monkeypatch.setattr(process.JobClock, "late", lambda clock: False)
  body = "while time.process_time() < x / 20: 0"
  program = f"import time\ndef f(x):\n  x += 20 * time.process_time()\n  {body}"
  assert run_calls(jail, program).reason == ""
  assert run_calls(jail, program, **limits).reason == "time-out"


def test_a_program_cannot_end_a_process_without_a_test(jail):
  """It says that it is not in a test, before its first has ended."""
  program = """
import os, stat
for fd in range(3, 64):
  try:
    if stat.S_ISFIFO(os.fstat(fd).st_mode):
      os.write(fd, b".")
  except OSError:
    pass
os._exit(3)
"""
  job = {"mode": "stdio", "program": program, "inputs": ["", ""], "together": 2}
  ended = jail.run(job, limits=Limits(test_s=1.0, total_s=2.0))
  assert [frame.status for frame in ended.frames] == [3 << 8] * 2


def test_bytes_that_are_no_result_begin_no_test(jail, monkeypatch):
  """A program that writes a little all the time has no more time for it."""
  program = """
import os, stat, time
def fifo(fd):
  try:
    return stat.S_ISFIFO(os.fstat(fd).st_mode)
  except OSError:
    return False
def f(x):
  (fd,) = filter(fifo, range(3, 64))
  while True:
    end = time.process_time() + 0.1
    while time.process_time() < end: pass
    os.write(fd, b"\\0")
"""
  reads, real = [], os.read
  counted = lambda *args: reads.append(1) or real(*args)
  monkeypatch.setattr(zygote.os, "read", counted)
  # Each byte is less than a frame: 27 of them would be one.
  assert run_calls(jail, program, test_s=0.4, total_s=20.0).reason == "time-out"
  assert len(reads) < 15


def test_a_job_can_be_stopped_from_another_thread(new_jail):
  assert answers(new_jail)
  timer = threading.Timer(0.3, new_jail.stop)
  timer.start()
  with pytest.raises(process.Failed, match=r"^stopped$"):
    run_calls(new_jail, "def f(x):\n  while True: 0", test_s=60.0, total_s=60.0)
  timer.join()
  with pytest.raises(process.Failed, match=r"^stopped$"):
    run_calls(new_jail, HONEST)


_HOG = """
import threading, time
threading.stack_size(32_768)
def f(x):
  made = 0
  try:
    while True:
      threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
      made += 1
  except RuntimeError:
    pass
  time.sleep(x)
  return made
"""
_POOLED = """
import concurrent.futures
def f(x):
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    return pool.submit(lambda: x + 1).result()
"""


@pytest.mark.ci
@pytest.mark.parametrize("level", ["probed", "inner"], indirect=True)
def test_threads_of_one_program_are_not_missed_by_another(level):
  """As many as it can start, while others run beside it."""
  hog, other = level.zygote(), level.zygote()
  found = []
  thread = threading.Thread(target=lambda: found.append(run_calls(hog, _HOG)))
  thread.start()
  time.sleep(0.5)
  stdio = {"mode": "stdio", "program": "print(1)", "inputs": ["", ""]}
  for _ in range(5):
    assert answers(other)
    ended = other.run(stdio | {"together": 1}, limits=Limits())
    assert ended.reason == "" and not any(f.why for f in ended.frames)
    (frame,) = run_calls(other, _POOLED).frames
    assert (frame.payload == b"2") == (level.name == "full")
  thread.join()
  (made,) = payloads(found[0])
  assert (received(made) == 0) == (level.name == "inner")
  hog.close()
  other.close()


def frame(index, payload=b"", why=b"", status=0, cpu_s=0.5):
  sizes = len(payload), len(why)
  return jail_main.FRAME.pack(index, status, cpu_s, *sizes) + payload + why


def frames(data):
  """The whole frames of some bytes, and the bytes that they take."""
  at, found = 0, []
  while more := zygote._next_frame(bytearray(data), at):
    at = more[1]
    found.append(more[0])
  return found, at


def test_frames_by_hand():
  data = frame(0, b"ab") + frame(1, why=b"c", status=256)
  found = [
    zygote.Frame(0, 0, 0.5, b"ab", b""), zygote.Frame(1, 256, 0.5, b"", b"c")
  ]  # fmt: skip
  assert (frames(data), zygote._expected(found)) == ((found, len(data)), found)
  (before,), _ = frames(frame(-1))
  assert before.index == -1 and zygote._expected([before]) == [before]


@pytest.mark.parametrize("indexes", [[1], [0, 0], [0, 2], [-2]])
def test_frames_out_of_order_are_left_out(indexes):
  found, _ = frames(b"".join(map(frame, indexes)))
  assert [f.index for f in found] == indexes
  assert zygote._expected(found) == found[:-1]


@pytest.mark.parametrize("data", [
  b"x", frame(0, b"abc")[:-1],
  jail_main.FRAME.pack(0, 0, 0.0, 2**32 - 1, 2**32 - 1),
])  # fmt: skip
def test_frames_that_are_none(data):
  assert frames(data) == ([], 0)


def test_why():
  assert zygote.why(None) == zygote.why(0) == ""
  assert zygote.why(3 << 8) == "exit status: 3"
  assert zygote.why(signal.SIGSYS) == "forbidden system call"
  assert zygote.why(signal.SIGXCPU) == "time-out"
  assert zygote.why(signal.SIGKILL) == "killed: SIGKILL"
  assert zygote.why(40) == "killed: signal 40"
