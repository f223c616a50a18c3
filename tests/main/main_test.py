"""The command as a whole: arguments, config files, exit status."""

import os
import pathlib
import subprocess
import sys

import pytest
import tiers
from messages import mentions

ROOT = pathlib.Path(__file__).parents[2]
RUN = ("--config=configs/smoke.py", "--workdir={}/run")


def command(*args: str, code: str | None = None) -> subprocess.CompletedProcess:
  start = ["-c", code] if code else ["-m", "brorl_jax.main"]
  return subprocess.run(
    [sys.executable, *start, *args],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=120,
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
  )


def message(done: subprocess.CompletedProcess) -> str:
  """The one line of a refusal."""
  assert done.returncode == 2, done.stderr
  assert done.stdout == ""
  (line,) = done.stderr.splitlines()
  assert line.startswith("error: ")
  return line.removeprefix("error: ")


@pytest.mark.parametrize(
  "args, line",
  [
    (
      (*RUN, "--config.clip_lwo=0.1"),
      "--config.clip_lwo ... --config.loss.clip_low",
    ),
    ((*RUN, "--config.xyzzy", "3"), "--config.xyzzy ... brorl_jax/config/"),
    ((*RUN, "--config.lr=1"), "--config.lr ... --config.optim.lr"),
    (
      (*RUN, "--config.families.gcd.weight=2"),
      "--config.families.gcd.weight ... --config.data.families.gcd.weight",
    ),
    (
      (*RUN, "--config.optim.learning_rate=1"),
      "--config.optim.learning_rate ... --config.optim.lr here",
    ),
    ((RUN[0], "--wrkdir={}/run"), "--wrkdir ... --workdir"),
    (
      ("--config=configs/n521.py", RUN[1]),
      "configs/n521.py ... configs/n512.py",
    ),
    ((*RUN, "--config"), "--config ... empty ... n512"),
    ((*RUN, "--config.optim.lr=fast"), "--config.optim.lr=fast: 'fast'"),
    (
      (*RUN, "--allow_config_change=perhaps"),
      "--allow_config_change=perhaps: 'perhaps'",
    ),
    (
      (*RUN, "--mode=trian"),
      "--mode=trian ... "
      "<train|evaluate|plan|warmup|simulate|export|report|sample>",
    ),
    ((*RUN, "512"), "'512' ... --help"),
    ((RUN[0],), "--workdir is missing; see --help"),
    ((RUN[1],), "--config is missing; see --help"),
  ],
)
def test_refuses_in_one_line_and_writes_nothing(tmp_path, refused, args, line):
  assert mentions(refused(*(arg.format(tmp_path) for arg in args)), line)
  assert list(tmp_path.iterdir()) == []


CONFIG = """
from brorl_jax.configs import base
def get_config():
  c = base.get_config()
  {}
  return c
"""


@pytest.mark.parametrize(
  "text, line",
  [
    ("def get_config(:\n", "(c.py, line 1)"),
    ("def get_config():\n  return 1 / 0\n", "division by zero"),
    ("import sys\nsys.exit(0)\n", "0"),
    (CONFIG.format("c.lerning_rate = 1.0"), "c.lerning_rate"),
    (CONFIG.format("c.sampling.n = '512'"), "field 'n'"),
    (CONFIG.format("c.lr = 1e-4"), "c.lr ... c.optim.lr"),
    (CONFIG.format("c.optim.lrr = 1.0"), "c.lrr ... c.optim.lr"),
    (CONFIG.format("c = None"), "get_config"),
  ],
)
def test_a_config_file_that_does_not_run_is_one_line(
  tmp_path, refused, text, line
):
  file = tmp_path / "a folder" / "c.py"
  file.parent.mkdir()
  file.write_text(text)
  said = refused(f"--config={file}", f"--workdir={tmp_path}/r")
  assert mentions(said, f"{file} ... {line}")


# Stands in for training: says which config arrived.
STUB = """
import sys, types
from absl import app
from brorl_jax import config
training = types.ModuleType("brorl_jax.main.train")
resolve = types.ModuleType("brorl_jax.plan.resolve")
resolve.here = lambda devices: None
resolve.resolve = lambda c, machine, workdir: c
def run(c, workdir, *, allow_change, begin_again, from_step, profile_step):
  print(c.optim.lr, c.sampling.n, c.data.families["gcd"].weight, end=" ")
  print(c.policy.checkpoint, workdir, allow_change)
  FAILS
training.run = run
sys.modules |= {m.__name__: m for m in (training, resolve)}
from brorl_jax.main import __main__ as command, settings
app.run(command.main, flags_parser=settings.parse_flags)
"""


@pytest.mark.ci
def test_overrides_are_typed_and_reach_the_run():
  done = command(
    "--config=configs/n16.py",
    "--workdir=runs/a b",
    "--config.optim.lr=1",
    "--config.data.families.gcd.weight",
    "3",
    "--config.policy.checkpoint=/a --config.b",
    "--allow_config_change",
    code=STUB.replace("FAILS", ""),
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout == "1.0 16 3.0 /a --config.b runs/a b True\n"


@pytest.mark.ci
def test_phases_are_read_from_the_command_line():
  done = command(
    "--config=configs/n512.py",
    "--workdir=w",
    "--config.run.phases=({'from_step': 3, 'sampling.n': 32},)",
    code=STUB.replace(
      "FAILS", "print(c.phases[1].config.sampling.n, c.run.phases)"
    ),
  )
  assert done.returncode == 0, done.stderr
  assert (
    done.stdout.splitlines()[1] == "32 ({'from_step': 3, 'sampling.n': 32},)"
  )


@pytest.mark.ci
@pytest.mark.parametrize(
  "given",
  tiers.some(
    ["n16", "n16:tiny", "configs/n16.py", "configs/n16.py:tiny"], 2, 2
  ),
)
def test_configs_of_the_package_run_from_anywhere(tmp_path, given):
  """By their names, and by the paths that they have in the repository."""
  code = f"import os; os.chdir({str(tmp_path)!r})\n" + STUB
  code = code.replace("FAILS", "")
  for flags in ([f"--config={given}"], ["--config", given]):
    done = command(*flags, "--workdir=w", "--config.optim.lr=2", code=code)
    assert done.returncode == 0, done.stderr
    policy = "" if given.endswith(":tiny") else "embedded:steps"
    assert done.stdout == f"2.0 16 1.0 {policy} w False\n"


@pytest.mark.ci
def test_a_file_that_is_there_comes_before_the_package(tmp_path):
  (tmp_path / "configs").mkdir()
  (tmp_path / "configs" / "n16.py").write_text(
    "from brorl_jax.configs import n512\nget_config = n512.get_config\n"
  )
  code = f"import os; os.chdir({str(tmp_path)!r})\n" + STUB
  code = code.replace("FAILS", "")
  done = command("--config=configs/n16.py:tiny", "--workdir=w", code=code)
  assert done.stdout == "0.0003 512 1.0  w False\n", done.stderr


@pytest.mark.ci
@pytest.mark.parametrize("off", [False, True])
def test_the_flag_says_where_compiled_programs_are_kept(tmp_path, off):
  shown = "import jax; print({n: x for n, x in jax.config.values.items()"
  shown += " if 'compilation_cache' in n})"
  where = "off" if off else tmp_path
  done = command(
    "--config=configs/n16.py",
    "--workdir=w",
    f"--compilation_cache={where}",
    code=STUB.replace("FAILS", shown),
  )
  assert done.returncode == 0, done.stderr
  said = done.stdout.splitlines()[1]
  assert f"'jax_enable_compilation_cache': {not off}" in said
  assert (f"'jax_compilation_cache_dir': '{tmp_path}/" in said) == (not off)


@pytest.mark.ci
@pytest.mark.parametrize(
  "fails, status, line",
  [
    (
      "from brorl_jax.errors import UserError; raise UserError('no')",
      2,
      "error: no",
    ),
    ("raise KeyboardInterrupt", 130, "interrupted; the same command resumes"),
  ],
)
def test_status_of_a_run_that_ends_early(fails, status, line):
  done = command(
    "--config=configs/n16.py", "--workdir=w", code=STUB.replace("FAILS", fails)
  )
  assert done.returncode == status
  assert done.stderr.splitlines() == [line]


@pytest.mark.ci
def test_refuses_a_foreign_workdir_by_the_whole_command(tmp_path):
  (tmp_path / "thesis.tex").write_text("precious")
  done = command(RUN[0], f"--workdir={tmp_path}")
  assert mentions(message(done), f"{tmp_path}")
  assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("mode", ["evaluate", "plan", "export", "report"])
def test_only_training_begins_again(refused, mode):
  config = [] if mode == "report" else ["--config=configs/n16.py"]
  flags = [*config, "--workdir=w", f"--mode={mode}"]
  for flag in ("--begin_again", "--from_step=3", "--profile_step=3"):
    name = flag.partition("=")[0]
    assert mentions(refused(*flags, flag), f"{name} ... --mode={mode}")


def test_a_run_does_not_go_back_and_begin_again(refused):
  said = refused(*RUN, "--begin_again", "--from_step=0")
  assert mentions(said, "--begin_again and --from_step ... leave out one")


WAITS = """
import runpy, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
runpy.run_module("brorl_jax.main", run_name="__main__", alter_sys=True)
"""


def test_a_refusal_does_not_wait_for_threads():
  """Those of a save that failed wait for minutes."""
  assert "--config is missing" in message(command(code=WAITS))
