"""Tests of brorl_jax/main/programs.py: what is kept, where, and what is not."""

import os
import pathlib
import platform
import subprocess
import sys

import compiling
import jax
import pytest

from brorl_jax import main as programs

ROOT = pathlib.Path(__file__).parents[2]
FIELDS = (
  "jax_enable_compilation_cache",
  "jax_compilation_cache_dir",
  "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture(autouse=True)
def as_before():
  """Nothing is compiled in these tests: jax looks at its folder only once."""
  before = {name: getattr(jax.config, name) for name in FIELDS}
  yield
  for name, value in before.items():
    jax.config.update(name, value)


@pytest.fixture
def home(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  for name in ("XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR", "NPROC"):
    monkeypatch.delenv(name, raising=False)
  return tmp_path


def kept():
  assert jax.config.jax_enable_compilation_cache
  folder = jax.config.jax_compilation_cache_dir
  assert pathlib.Path(folder).is_dir()
  return folder


def test_the_users_cache_folder_is_the_default(home):
  programs.keep_programs(None)
  machine = programs.machine_kind()
  assert kept() == f"{home}/.cache/brorl_jax/programs/{machine}"
  # What is found there is run.
  assert pathlib.Path(kept()).stat().st_mode & 0o077 == 0
  assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.0


def test_environment_and_flag_move_it(home, monkeypatch):
  machine = programs.machine_kind()
  monkeypatch.setenv("XDG_CACHE_HOME", f"{home}/xdg")
  programs.keep_programs(None)
  assert kept() == f"{home}/xdg/brorl_jax/programs/{machine}"
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", f"{home}/jax")
  programs.keep_programs(None)
  assert kept() == f"{home}/jax/{machine}"
  programs.keep_programs("~/mine")
  assert kept() == f"{home}/mine/{machine}"
  monkeypatch.chdir(home)
  programs.keep_programs("here")
  assert kept() == f"{home}/here/{machine}"


def test_off_keeps_nothing_whatever_the_environment_says(home, monkeypatch):
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", f"{home}/jax")
  programs.keep_programs("off")
  assert not jax.config.jax_enable_compilation_cache
  assert not jax.config.jax_enable_compilation_cache
  assert list(home.iterdir()) == []


def test_a_folder_that_cannot_be_used_is_a_warning(home, capsys):
  (home / "file").write_text("in the way")
  programs.keep_programs(f"{home}/file")
  (line,) = capsys.readouterr().err.splitlines()
  folder = f"{home}/file/{programs.machine_kind()}"
  assert line.startswith(
    f"warning: compiled programs cannot be kept in {folder}: "
  )
  assert line.endswith("; --compilation_cache=DIR names another folder")
  assert not jax.config.jax_enable_compilation_cache
  programs.keep_programs(f"{home}/other")  # not for good
  assert kept()


def test_a_user_without_a_home_is_a_warning(home, capsys):
  programs.keep_programs("~nobody-has-this-name/programs")
  (line,) = capsys.readouterr().err.splitlines()
  assert "cannot be kept in ~nobody-has-this-name/programs/" in line
  assert not jax.config.jax_enable_compilation_cache


# ----------------------------------------------------------- kinds of machines

CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Xeon
cpu MHz\t\t: 2100.0
flags\t\t: fpu avx avx2 avx512f
bugs\t\t: spectre_v1

processor\t: 1
vendor_id\t: GenuineIntel
flags\t\t: fpu avx avx2 avx512f
"""


@pytest.fixture
def machine(home, monkeypatch):
  """The name of a machine with that /proc/cpuinfo and so many processors."""

  def of(cpuinfo=CPUINFO, count=2):
    file = home / "cpuinfo"
    file.write_text(cpuinfo)
    monkeypatch.setattr(programs, "_CPUINFO", file)
    monkeypatch.setattr(
      os, "sched_getaffinity", lambda _: set(range(count)), raising=False
    )
    return programs.machine_kind()

  return of


def test_machine_code_stays_with_its_kind_of_machine(machine, monkeypatch):
  name = machine()
  assert name.startswith(f"{platform.machine()}-2cpu-")
  for a, b in (
    (" avx512f", ""),
    ("model\t\t: 143", "model\t\t: 106"),
    ("Xeon", "Xenon"),
    ("family\t: 6", "family\t: 7"),
    ("GenuineIntel", "AuthenticAMD"),
  ):
    assert machine(CPUINFO.replace(a, b)) != name, a
  assert machine(CPUINFO.replace("2100", "800")) == name  # a moment's
  assert machine(CPUINFO.replace("processor\t: 0", "processor\t: 9")) == name
  # XLA divides loops among as many as there are, or as NPROC says.
  assert machine(count=3) != name
  monkeypatch.setenv("NPROC", "1")
  assert machine() != name


# --------------------------------------------------------------- in a process

PROGRAM = """
import sys
from brorl_jax import main
main.keep_programs(sys.argv[1])
import hashlib
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
seen = []
jax.monitoring.register_event_listener(lambda name, **_: seen.append(name))
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
w = put(jax.random.normal(jax.random.key(0), (64, 64)), "data", "model")
x = put(jax.random.normal(jax.random.key(1), (16, 64)), "data")
def step(w, x):
  loss = lambda w: jnp.tanh(x @ w).sum()
  value, slope = jax.value_and_grad(loss)(w)
  return w - 0.1 * slope, value
step = jax.jit(step, donate_argnums=0)
old = w
for _ in range(3):
  w, value = step(w, x)
assert old.is_deleted()
digest = hashlib.sha256(np.asarray(w).tobytes()).hexdigest()
count = lambda what: sum(name.endswith(what) for name in seen)
print(digest, float(value), count("/cache_hits"), count("/cache_misses"))
"""


def ran(*args, warns=""):
  environment = os.environ | {
    "XLA_FLAGS": f"--xla_force_host_platform_device_count=4 {compiling.QUICK}",
    "JAX_PLATFORMS": "cpu",
  }
  done = subprocess.run(
    [sys.executable, "-c", PROGRAM, *map(str, args)],
    cwd=ROOT,
    env=environment,
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.returncode == 0 and warns in done.stderr, done.stderr
  assert warns or done.stderr == "", done.stderr
  *numbers, hits, misses = done.stdout.split()
  return numbers, int(hits), int(misses)


@pytest.mark.ci
def test_another_process_finds_all_programs_and_has_the_same_bytes(tmp_path):
  """Sharded over four devices, with a buffer that is donated."""
  plain, hits, misses = ran("off")
  assert hits == misses == 0
  first, hits, misses = ran(tmp_path)
  assert first == plain and misses > 3
  again, found, compiled = ran(tmp_path)
  assert again == plain
  assert compiled == 0 and found == hits + misses
