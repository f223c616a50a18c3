"""The command: refusals, what reaches a mode, and what its process sets up."""

import os
import pathlib
import platform
import subprocess
import sys

import compiling
import jax
import pytest
from launchers import ran
from messages import mentions

from brorl_jax import errors, main

ROOT = pathlib.Path(__file__).parents[2]
RUN = ("--config=configs/smoke.py", "--workdir={}/run")


def command(*args: str, code: str | None = None) -> subprocess.CompletedProcess:
  start = ["-c", code] if code else ["-m", "brorl_jax.main"]
  cpu = {**os.environ, "JAX_PLATFORMS": "cpu"}
  return ran(sys.executable, *start, *args, timeout=120, env=cpu)


def message(done: subprocess.CompletedProcess) -> str:
  assert (done.returncode, done.stdout) == (2, ""), done.stderr
  (line,) = done.stderr.splitlines()
  assert line.startswith("error: ")
  return line.removeprefix("error: ")


@pytest.mark.parametrize("args, line", [
  ((*RUN, "--config.clip_lwo=1"), "clip_lwo ... --config.loss.clip_low"),
  ((*RUN, "--config.xyzzy", "3"), "--config.xyzzy ... brorl_jax/config/"),
  ((*RUN, "--config.lr=1"), "--config.lr ... --config.optim.lr"),
  ((*RUN, "--config.families.gcd.weight=2"),
    "--config.families.gcd.weight ... --config.data.families.gcd.weight"),
  ((*RUN, "--config.optim.learning_rate=1"),
    "--config.optim.learning_rate ... --config.optim.lr here"),
  ((RUN[0], "--wrkdir={}/run"), "--wrkdir ... --workdir"),
  ((*RUN, "--steps=3"), "--steps; did you mean --config.run.steps?"),
  ((*RUN, "--learning_rate=3"), "--learning_rate; it is --config.optim.lr"),
  (("--config=configs/n521.py", RUN[1]),
    "configs/n521.py ... configs/n512.py"),
  ((*RUN, "--config"), "--config ... empty ... n512"),
  ((*RUN, "--config.optim.lr=fast"), "--config.optim.lr=fast: 'fast'"),
  ((*RUN, "--allow_config_change=x"), "--allow_config_change=x: 'x'"),
  ((*RUN, "--mode=trian"), "--mode=trian ... <train|evaluate|plan"),
  ((*RUN, "512"), "'512' ... --help"),
  # ml_collections reads what follows it too.
  ((*RUN, "--", "--config.xyzzy=3"), "no --config.xyzzy"),
  ((*RUN, "--", "512"), "'512' ... --help"),
  ((RUN[0],), "--workdir is missing"), ((RUN[1],), "--config is missing"),
  (("--mode=report", "--workdir="), "--workdir is missing"),
  (("--mode=report", "--workdir=a", RUN[0]), "--mode=report ... --config"),
  (("--mode=sample", RUN[0]), "--mode=sample ... --config"),
  (("--mode=serve", RUN[0]), "--mode=serve ... --config"),
  (("--mode=sample", "--port=1"), "--port ... --mode=serve"),
  ((*RUN, "--workdir=b"),
    "--workdir ... 2 ... --mode=train ... --mode=report"),
  ((*RUN, "--begin_again", "--from_step=0"), "--begin_again and --from_step"),
  ((*RUN, "--n=2"), "--n ... --mode=sample ... --mode=train"),
  ((*RUN, "--mode=export", "--begin_again"), "--begin_again ... =export"),
  ((*RUN, "--mode=plan", "--from_step=3"), "--from_step ... --mode=train"),
  ((*RUN, "--mode=evaluate", "--fast"), "--fast ... --mode=plan"),
  ((*RUN, "--mode=plan", "--processes=2"), "--processes ... --mode=train"),
  ((*RUN, "--coordinator=a:1"), "--coordinator, --processes ... together"),
])  # fmt: skip
def test_refuses_in_one_line_and_writes_nothing(tmp_path, refused, args, line):
  assert mentions(refused(*(arg.format(tmp_path) for arg in args)), line)
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("required", [0, 1])
def test_a_full_terminal_ends_only_what_is_printed(required):
  code = "from brorl_jax.verdicts.sandbox import process as p\n"
  code += f"p.outlast_terminal()\np.Output.required = {required}\nprint(1)"
  start = [sys.executable, "-c", code]
  with open("/dev/full", "w") as full:
    done = subprocess.run(start, stdout=full, stderr=subprocess.PIPE, text=True)
  assert done.returncode == required == ("standard output" in done.stderr)


@pytest.mark.parametrize(
  "name", ["prefix", "sampling.pefix", "reward.group", "warmth"]
)
def test_a_field_that_is_like_none_gets_no_misleading_hint(refused, name):
  line = refused(*RUN, f"--config.{name}=1")
  assert f"--config.{name}" in line and "did you mean" not in line


CONFIG = """
from brorl_jax.configs import base
def get_config():
  c = base.get_config()
  {}
  return c
"""


@pytest.mark.parametrize("text, line", [
  ("def get_config(:\n", "(c.py, line 1)"),
  ("def get_config():\n  return 1 / 0\n", "division by zero"),
  ("import sys\nsys.exit(0)\n", "0"),
  (CONFIG.format("c.lerning_rate = 1.0"), "c.lerning_rate"),
  (CONFIG.format("c.sampling.n = '512'"), "field 'n'"),
  (CONFIG.format("c.lr = 1e-4"), "c.lr ... c.optim.lr"),
  (CONFIG.format("c.optim.lrr = 1.0"), "c.lrr ... c.optim.lr"),
  (CONFIG.format("c = None"), "get_config"), ("", "get_config"),
])  # fmt: skip
def test_a_config_file_that_fails_is_one_line(tmp_path, refused, text, line):
  file = tmp_path / "a folder" / "c.py"
  file.parent.mkdir()
  file.write_text(text)
  said = refused(f"--config={file}", f"--workdir={tmp_path}/r")
  assert mentions(said, f"{file} ... {line}")


def test_overrides_are_typed_and_reach_the_run(arrived):
  c, workdir, how = arrived(*("--config=configs/n16.py", "--workdir=runs/a b"),
    *("--config.optim.lr=1", "--config.data.families.gcd.weight", "3"),
    "--config.policy.checkpoint=/a --config.b",
    "--config.run.phases=({'from_step': 3, 'sampling.n': 32},)",
    "--allow_config_change")  # fmt: skip
  assert (c.optim.lr, c.sampling.n, workdir) == (1.0, 16, "runs/a b")
  assert isinstance(c.optim.lr, float)
  assert c.data.families["gcd"].weight == 3.0
  assert c.policy.checkpoint == "/a --config.b"
  assert c.phases[1].config.sampling.n == 32
  assert how == {"allow_change": True,
    "begin_again": False, "from_step": None, "profile_step": None}  # fmt: skip


@pytest.mark.parametrize("name", ["n16", "configs/n16.py"])
def test_a_packaged_config_runs_anywhere(
  arrived, tmp_path, monkeypatch, capsys, name
):
  """By their names, and by the paths that they have in the repository."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("HOME", "/home/me")
  for flags in ([f"--config={name}:tiny"], ["--config", f"{name}:tiny"]):
    c, workdir, _ = arrived(*flags, "--workdir=~/w", "--config.optim.lr=2")
    assert (c.optim.lr, c.sampling.n) == (2.0, 16)
    assert (c.policy.checkpoint, workdir) == ("", "/home/me/w")
  # A file that is there comes before the package.
  (tmp_path / "configs").mkdir()
  (tmp_path / "configs" / "n16.py").write_text(
    "from brorl_jax.configs import n512\nget_config = n512.get_config\n"
  )
  said = capsys.readouterr().err
  assert ("configs/n16.py:tiny is not here: using " in said) == ("/" in name)
  c, *_ = arrived(f"--config={name}", "--workdir=w")
  assert c.sampling.n == (16 if name == "n16" else 512)


def test_status_of_a_run_that_ends_early(arrived, monkeypatch, capsys):
  def full(devices):
    raise OSError(28, "No space left on device", "run/a")

  monkeypatch.setattr("brorl_jax.plan.resolve.here", full)
  with pytest.raises(SystemExit) as e:
    arrived("--config=n16", "--workdir=w")
  assert e.value.code == errors.STORAGE
  assert capsys.readouterr().err == "error: run/a: No space left on device\n"


WAITS = """
import runpy, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
runpy.run_module("brorl_jax.main", run_name="__main__", alter_sys=True)
"""


def test_a_refusal_does_not_wait_for_threads():
  """Of a save that failed, which wait for minutes."""
  assert "--config is missing" in message(command(code=WAITS))


@pytest.fixture(autouse=True)
def as_before():
  """Nothing is compiled in these tests: jax looks at its folder only once."""
  names = [name for name in jax.config.values if "compilation_cache" in name]
  names.append("jax_persistent_cache_min_compile_time_secs")
  before = {name: getattr(jax.config, name) for name in names}
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
  folder = pathlib.Path(jax.config.jax_compilation_cache_dir)
  # What is found there is run.
  assert folder.is_dir() and folder.stat().st_mode & 0o077 == 0
  assert folder.name == main.machine_kind()
  return folder.parent


def test_the_flag_and_the_environment_say_where_programs_are(home, monkeypatch):
  monkeypatch.chdir(home)
  main.keep_programs(None)
  assert kept() == home / ".cache" / "brorl_jax" / "programs"
  assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.0
  monkeypatch.setenv("XDG_CACHE_HOME", f"{home}/xdg")
  main.keep_programs(None)
  assert kept() == home / "xdg" / "brorl_jax" / "programs"
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", f"{home}/jax")
  for given, where in ((None, "jax"), ("~/mine", "mine"), ("here", "here")):
    main.keep_programs(given)
    assert kept() == home / where
  main.keep_programs("off")
  assert not jax.config.jax_enable_compilation_cache


def test_a_folder_that_cannot_be_used_is_a_warning(home, capsys):
  (home / "file").write_text("in the way")
  for given in (f"{home}/file", "~no-user-has-this-name/programs"):
    main.keep_programs(given)
    (line,) = capsys.readouterr().err.splitlines()
    assert mentions(line, f"warning: ... {given}/{main.machine_kind()}: ")
    assert not jax.config.jax_enable_compilation_cache
  main.keep_programs(f"{home}/other")  # not for good
  assert kept()


CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Xeon
cpu MHz\t\t: 2100.0
flags\t\t: fpu avx avx2 avx512f

processor\t: 1
vendor_id\t: GenuineIntel
flags\t\t: fpu avx avx2 avx512f
"""


def test_machine_code_stays_with_its_kind_of_machine(home, monkeypatch):
  def machine(cpuinfo=CPUINFO, count=2):
    (home / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(main, "_CPUINFO", home / "cpuinfo")
    cpus = lambda _: set(range(count))
    monkeypatch.setattr(os, "sched_getaffinity", cpus, raising=False)
    return main.machine_kind()

  name = machine()
  assert name.startswith(f"{platform.machine()}-2cpu-")
  for a, b in (
    (" avx512f", ""), ("model\t\t: 143", "model\t\t: 106"), ("Xeon", "Xenon"),
    ("family\t: 6", "family\t: 7"), ("GenuineIntel", "AuthenticAMD"),
  ):  # fmt: skip
    assert machine(CPUINFO.replace(a, b)) != name, a
  assert machine(CPUINFO.replace("2100", "800")) == name  # a moment's
  assert machine(CPUINFO.replace("processor\t: 0", "processor\t: 9")) == name
  # XLA divides loops among as many as there are, or as NPROC says.
  assert machine(count=3) != name
  monkeypatch.setenv("NPROC", "1")
  assert machine() != name


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
step = jax.jit(lambda w, x: w - 0.1 * jax.grad(
  lambda w: jnp.tanh(x @ w).sum())(w), donate_argnums=0)
for _ in range(3):
  w = step(w, x)
digest = hashlib.sha256(np.asarray(w).tobytes()).hexdigest()
count = lambda what: sum(name.endswith(what) for name in seen)
print(digest, count("/cache_hits"), count("/cache_misses"))
"""


@pytest.mark.ci
def test_another_process_finds_all_programs_and_has_the_same_bytes(tmp_path):
  """Sharded over four devices, with a buffer that is donated."""

  def found(where):
    flags = f"--xla_force_host_platform_device_count=4 {compiling.QUICK}"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = ran(sys.executable, "-c", PROGRAM, str(where), env=env)
    assert (done.returncode, done.stderr) == (0, "")
    digest, hits, misses = done.stdout.split()
    return digest, int(hits), int(misses)

  first, hits, misses = found(tmp_path)
  assert misses > 3
  assert found(tmp_path) == (first, hits + misses, 0)
