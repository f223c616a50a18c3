"""Tests of two_process.sh: flags, signals, and what ends whom.

A short script stands for Python and does as a flag says.
"""

import json
import pathlib
import re
import signal
import subprocess
import time

import pytest
from launchers import SECONDS, ended, program, start

# --ends=A,B: what process 0, process 1 does once all have started: a status;
# "term": ends with 75 on SIGTERM and 130 on SIGINT; "deaf": never ends;
# "later": ends with 0 once the others are gone.
PYTHON = """
import json, os, pathlib, signal, sys, time

flags = dict(a.split("=", 1) for a in sys.argv[1:] if "=" in a)
me, folder = int(flags["--process_id"]), pathlib.Path(flags["--folder"])
end = flags["--ends"].split(",")[me]
signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
signal.signal(signal.SIGINT, lambda *_: os._exit(130))
if end == "deaf":
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(json.dumps([sys.argv[1:], os.environ["JAX_PLATFORMS"]]), flush=True)
(folder / f"{me}.new").write_text(str(os.getpid()))
(folder / f"{me}.new").rename(folder / f"{me}.pid")
pids = lambda: [int(p.read_text()) for p in folder.glob("*.pid")]
while len(pids()) < int(flags["--processes"]):
  time.sleep(.01)
if end == "later":
  for pid in {*pids()} - {os.getpid()}:
    while os.path.exists(f"/proc/{pid}"):
      time.sleep(.01)
  time.sleep(.5)  # in which it would be ended if it had no time
  print("later")
  sys.exit(0)
while end in ("term", "deaf"):
  time.sleep(.01)
sys.exit(int(end))
"""


def two(tmp_path, ends, *flags, **env) -> subprocess.Popen:
  python = program(tmp_path / "python", PYTHON)
  env = {"PROCESSES": str(len(ends.split(","))),
    "TMPDIR": str(tmp_path), "JAX_PLATFORMS": "tpu"} | env  # fmt: skip
  flags = (f"--folder={tmp_path}", f"--ends={ends}", *flags)
  return start("two_process.sh", *flags, PYTHON=str(python), **env)


def pids(tmp_path, count: int) -> list[int]:
  end = time.monotonic() + SECONDS
  while len(files := [*tmp_path.glob("*.pid")]) < count:
    assert time.monotonic() < end, "a process did not start"
    time.sleep(0.01)
  return [int(p.read_text()) for p in files]


def test_each_process_gets_all_flags_and_its_own(tmp_path):
  status, out, err = ended(two(tmp_path, "0,0,0", "--workdir=a b", "--x"))
  assert (status, err) == (0, "")
  where, first = out.splitlines()  # nothing else, and nothing in front
  logs = pathlib.Path(re.fullmatch(r".* (/\S+)/process_I\.log", where)[1])
  texts = [first, *((logs / f"process_{i}.log").read_text() for i in (1, 2))]
  addresses = set()
  for i, text in enumerate(texts):
    (*given, coordinator, processes, process_id), platforms = json.loads(text)
    assert given[:2] == ["-m", "brorl_jax.main"]
    assert given[3:] == ["--ends=0,0,0", "--workdir=a b", "--x"]
    assert processes == "--processes=3" and process_id == f"--process_id={i}"
    assert platforms == "cpu"
    addresses.add(coordinator)
  (address,) = addresses
  assert re.fullmatch(r"--coordinator=127\.0\.0\.1:2\d{4}", address)


@pytest.mark.parametrize("ends, want", [("0,75", 75), ("75,3", 3), ("2,75", 2)])
def test_the_exit_status(tmp_path, ends, want):
  assert ended(two(tmp_path, ends))[0] == want


def test_others_end_by_themselves_after_one_died(tmp_path):
  status, out, _ = ended(two(tmp_path, "later,3"))
  assert status == 3 and "later" in out.splitlines()


def test_others_are_ended_after_one_died(tmp_path):
  process = two(tmp_path, "3,deaf", GRACE="0")
  started = pids(tmp_path, 2)
  assert ended(process)[0] == 3
  assert not [p for p in started if pathlib.Path(f"/proc/{p}").exists()]


@pytest.mark.parametrize(
  "number, want", [(signal.SIGTERM, 75), (signal.SIGINT, 130)]
)
def test_a_signal_reaches_all(tmp_path, number, want):
  process = two(tmp_path, "term,term,term")
  pids(tmp_path, 3)
  process.send_signal(number)
  status, out, _ = ended(process)
  assert status == want
  assert out.count(f"ended with status {want}") == 3
