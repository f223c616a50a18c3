"""Tests of the files that start runs: what they pass on, and when they go on.

Other machines are played by short scripts: what stands for srun or gcloud
writes down its arguments and ends as it was told.
"""

import json
import math
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tarfile

import pytest
import yaml
from launchers import LAUNCH, SECONDS, ended, lines, program, ran, start

ROOT = LAUNCH.parent
SCRIPTS = [*sorted(LAUNCH.rglob("*.sh")), LAUNCH / "slurm.sbatch"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_shellcheck(script):
  own = pathlib.Path(sys.executable).with_name("shellcheck")
  shellcheck = str(own) if own.exists() else shutil.which("shellcheck")
  if shellcheck is None:
    pytest.skip("shellcheck is not installed")
  done = ran(shellcheck, "--external-sources", script.relative_to(ROOT))
  assert done.returncode == 0, done.stdout


def test_the_readme_names_every_file():
  text = (LAUNCH / "README.md").read_text()
  files = {str(p.relative_to(LAUNCH))
    for p in (*LAUNCH.iterdir(), *(LAUNCH / "docker").iterdir())
    if p.is_file() and p.name not in ("README.md", "__init__.py")}  # fmt: skip
  assert "docker/Dockerfile.gpu" in files
  assert {name for name in files if f"]({name})" not in text} == set()


BRORL = """TIMES = ("checkpoint", "compile", "step")
import json, pathlib, signal, sys, time

flags = dict(f[2:].split("=", 1) for f in sys.argv[3:] if "=" in f)
run, here = pathlib.Path(flags["workdir"]), pathlib.Path(__file__).parent
with open(here / "calls", "a") as f:
  print(flags.get("mode", "train"), run.name, file=f)
if "mode" not in flags:
  if (here / "fails").exists():
    sys.exit(2)
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
  run.mkdir(parents=True)
  step = {f"time/{name}_s": 9 * (name == "step") for name in TIMES}
  (run / "metrics.jsonl").write_text(json.dumps(step | {"step": 1}) + "\\n")
  time.sleep(60)
"""


@pytest.mark.ci
@pytest.mark.parametrize("fails", [False, True])
def test_compare_ends_both_arms_or_with_the_status_of_one(tmp_path, fails):
  brorl = program(tmp_path / "bin" / "brorl", BRORL)
  (tmp_path / "bin" / "fails").touch() if fails else None
  python = tmp_path / "bin" / "python"
  python.write_text(
    f'#!/bin/bash\n[[ "$2" != brorl_jax.main ]] || exec "{brorl}" "$@"\n'
    f'exec "{sys.executable}" "$@"\n'
  )
  python.chmod(0o755)
  stamps = tmp_path / ".brorl_jax.stamps"
  stamped = f"source {LAUNCH}/environment.sh; python={python}; mkdir {stamps}"
  stamped += f"; stamp requirements.txt >{stamps}/requirements.txt"
  assert ran("bash", "-c", stamped).returncode == 0
  env = {"VENV": f"{tmp_path}", "WORKDIR": f"{tmp_path}/w", "HOURS": ".002"}
  env = os.environ | env | {"DATA": ""}
  done = ran("bash", LAUNCH / "paper" / "compare.sh", env=env)
  assert done.returncode == 2 * fails, done.stderr
  calls = (brorl.parent / "calls").read_text().splitlines()
  every = "evaluate start,train n16,train n512,evaluate n16-step-1,"
  every = f"{every}evaluate n512-step-1,report n512-step-1".split(",")
  assert calls == every[: 2 if fails else None]


WRITE = """
import json, os, pathlib, sys

folder = pathlib.Path(__file__).parent
with open(folder / "calls", "a") as f:
  name, ids = os.path.basename(__file__), os.environ.get("JAX_LOCAL_DEVICE_IDS")
  print(json.dumps([name, sys.argv[1:], ids]), file=f)
"""


@pytest.mark.parametrize("gpus, there, status", [
  ("4", 9, 2), ("gpu:h100:4", 9, 75), ("", 4, 2), ("", 0, 2), ("n/a", 4, 2),
])  # fmt: skip
def test_slurm(tmp_path, gpus, there, status):
  program(tmp_path / "srun", f"{WRITE}\nsys.exit({status})")
  program(tmp_path / "scontrol", WRITE)
  program(tmp_path / "nvidia-smi", f"print('GPU\\n' * {there}, end='')")
  env = {"SLURM_JOB_ID": "41"} | ({"SLURM_GPUS_ON_NODE": gpus} if gpus else {})
  flags = ["--config=n512", "--workdir=a b"]
  end, _, said = ended(start("slurm.sbatch", *flags, path=tmp_path, **env))
  (name, args, ids), *after = lines(tmp_path / "calls")
  known = there and gpus != "n/a"
  assert end == status and ("set JAX_LOCAL_DEVICE_IDS" in said) == (not known)
  assert name == "srun" and ids == ("0,1,2,3" if known else None)
  assert args[0] == "--kill-on-bad-exit=1"
  assert args[2:] == ["-m", "brorl_jax.main", "--distributed", *flags]
  requeued = [[name, args] for name, args, _ in after]
  assert requeued == ([["scontrol", ["requeue", "41"]]] if status == 75 else [])


@pytest.mark.parametrize("name, value", [("HOURS", "2h"), ("DATA", "no")])
def test_compare_refuses_before_it_installs(name, value):
  status, _, said = ended(start("paper/compare.sh", **{name: value}))
  assert status == 1 and said.count(f"{name}=") == 2  # and the remedy


def test_directives_of_slurm():
  text = (LAUNCH / "slurm.sbatch").read_text()
  # Slurm reads no directive behind the first command.
  head, rest = text.split("\nset -euo")
  assert "#SBATCH" not in rest
  found = re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", head, re.MULTILINE)
  assert len(found) == head.count("\n#SBATCH")
  # A process per node; the early signal goes to the processes (no "B:").
  wanted = {"ntasks-per-node": "1", "signal": "TERM@120", "requeue": ""}
  assert dict(found).items() >= (wanted | {"open-mode": "append"}).items()


# Trains with the statuses of the file "train", one after the other.
GCLOUD = f"""{WRITE}
import shutil
if sys.argv[4] == "scp":
  shutil.copy(sys.argv[5], folder)
command = sys.argv[-1]
if command.startswith("--command=") and "brorl_jax.main" in command:
  status, *rest = (folder / "train").read_text().split()
  (folder / "train").write_text(" ".join(rest))
  sys.exit(int(status))
sys.exit(int((folder / "install").read_text()) if sys.argv[4] == "ssh" else 0)
"""

in_git = pytest.mark.skipif(
  not (ROOT / ".git").exists(), reason="no git repository"
)


def tpu(tmp_path, train: str, *flags, install: str = "0") -> tuple[int, list]:
  program(tmp_path / "gcloud", GCLOUD)
  (tmp_path / "train").write_text(train)
  (tmp_path / "install").write_text(install)
  env = {"TPU": "slice", "ZONE": "here", "TMPDIR": str(tmp_path)}
  status, _, _ = ended(start("tpu_vm.sh", *flags, path=tmp_path, **env))
  return status, [args for _, args, _ in lines(tmp_path / "calls")]


@in_git
@pytest.mark.parametrize(
  "train, want, trained", [("75 75 0", 0, 3), ("75 1", 1, 2)]
)
def test_tpu_trains_until_it_is_not_preempted(tmp_path, train, want, trained):
  flags = ["--config=n512", "--workdir=/a b", "--x=$HOME;'"]
  status, calls = tpu(tmp_path, train, *flags)
  assert status == want
  copy, install, *runs = calls
  assert len(runs) == trained
  for call in calls:
    assert call[:3] == ["compute", "tpus", "tpu-vm"]
    assert {"--zone=here", "--worker=all"} <= {*call}
  with tarfile.open(tmp_path / "brorl.tar.gz") as sent:
    assert {"pyproject.toml", "brorl_jax/configs"} <= {*sent.getnames()}
  assert copy[3] == "scp" and copy[5] == "slice:"
  assert {call[3] for call in (install, *runs)} == {"ssh"}
  assert {call[4] for call in (install, *runs)} == {"slice"}
  # What a shell there makes of the command.
  words = shlex.split(runs[0][-1].removeprefix("--command="))
  main = words.index("brorl_jax.main")
  assert words[main + 1 :] == ["--distributed", *flags]
  assert all(run == runs[0] for run in runs)


JOBSET = yaml.safe_load((LAUNCH / "gke_jobset.yaml").read_text())
JOB = JOBSET["spec"]["replicatedJobs"][0]["template"]["spec"]
POD = JOB["template"]["spec"]


def test_the_fields_of_the_jobset():
  assert JOBSET["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
  assert JOBSET["kind"] == "JobSet"
  # Every host has a pod at the same time, and knows its number.
  assert JOB["completionMode"] == "Indexed"
  assert JOB["completions"] == JOB["parallelism"]
  # podFailurePolicy is refused with any other policy.
  assert POD["restartPolicy"] == "Never" and JOB["backoffLimit"] == 0
  assert POD["terminationGracePeriodSeconds"] >= 120
  (container,) = POD["containers"]
  assert container["args"][0] == "--distributed"
  chips = int(container["resources"]["limits"]["google.com/tpu"])
  sides = POD["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
  assert math.prod(map(int, sides)) == chips * JOB["parallelism"]
  mounted = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
  assert {*mounted} == {v["name"] for v in POD["volumes"]}
  (workdir,) = (a for a in container["args"] if a.startswith("--workdir="))
  assert workdir.startswith(f"--workdir={mounted['shared']}/")


def action(status: int | None) -> str:
  """What happens after a pod ended with a status, or with its node (None).

  As Kubernetes and JobSet document it: the first rule that matches, and the
  text of the condition that the Job's controller writes.
  """
  reason, message = "BackoffLimitExceeded", "Job has reached its limit"
  for i, rule in enumerate(JOB["podFailurePolicy"]["rules"]):
    codes = rule.get("onExitCodes")
    if codes and codes["operator"] == "In" and status in codes["values"]:
      what = f"Container {codes['containerName']} for pod a/b failed with exit"
      what += f" code {status}"
    elif status is None and rule.get("onPodConditions"):
      (condition,) = rule["onPodConditions"]
      what = f"Pod a/b has condition {condition['type']}"
    else:
      continue
    assert rule["action"] == "FailJob"
    reason = "PodFailurePolicy"
    message = f"{what} matching FailJob rule at index {i}"
    break
  for rule in JOBSET["spec"]["failurePolicy"]["rules"]:
    patterns = rule.get("onJobFailureMessagePatterns", [""])
    if reason in rule["onJobFailureReasons"] and any(
      re.search(p, message) for p in patterns
    ):
      return rule["action"]
  return "RestartJobSet"  # what JobSet does where no rule matches


def test_the_jobset_after_each_status():
  free = "RestartJobSetAndIgnoreMaxRestarts"
  want = {2: "FailJobSet", 3: "FailJobSet", 75: free, None: free}
  want |= dict.fromkeys((1, 20, 137), "RestartJobSet")
  assert {status: action(status) for status in want} == want
  assert JOBSET["spec"]["failurePolicy"]["maxRestarts"] > 0
  named = JOB["podFailurePolicy"]["rules"][0]["onExitCodes"]["containerName"]
  assert named == POD["containers"][0]["name"]


def test_skypilot_gives_each_node_its_flags(tmp_path):
  task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
  program(tmp_path / ".venv" / "bin" / "python", WRITE)
  env = {"NODE_RANK": "1", "NODE_IPS": "10.0.0.5\n10.0.0.6", "NUM_NODES": "2"}
  env = task["envs"] | {f"SKYPILOT_{k}": v for k, v in env.items()}
  command = ["bash", "-c", task["run"]]
  env = os.environ | env
  subprocess.run(command, cwd=tmp_path, env=env, timeout=SECONDS, check=True)
  ((_, args, _),) = lines(tmp_path / ".venv" / "bin" / "calls")
  assert args[:3] == ["-m", "brorl_jax.main", "--config=n512:1p5b"]
  assert args[-3:] == [
    "--coordinator=10.0.0.5:8476", "--processes=2", "--process_id=1",
  ]  # fmt: skip
  (workdir,) = (a for a in args if a.startswith("--workdir="))
  assert workdir.removeprefix("--workdir=").startswith((*task["volumes"],))
  assert task["num_nodes"] == 2
  assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]


@pytest.mark.parametrize("kind, extra", [("gpu", "cuda12"), ("tpu", "tpu")])
def test_an_image(kind, extra):
  text = (LAUNCH / "docker" / f"Dockerfile.{kind}").read_text()
  text = text.replace("\\\n", "")
  steps = re.findall(r"^([A-Z]+) (.*)$", text, re.MULTILINE)
  (lock,) = re.findall(r"--require-hashes +-r (\S+)", text)
  release = re.search(r"py3(\d+)", lock)[1]
  bases = [rest.split()[0] for step, rest in steps if step == "FROM"]
  assert bases == [f"python:3.{release}-slim"] * 2
  # The package's own requirements are in the lock: see locks_test.
  assert (ROOT / lock).exists() and lock.endswith(f"/{extra}-py3{release}.txt")
  assert re.search(r"pip install \S+ --no-deps \.$", text, re.MULTILINE)
  for step, rest in steps:
    *sources, _ = rest.split()
    if step == "COPY" and "--from=build" not in sources:
      assert all((ROOT / source).exists() for source in sources)
  last = dict(steps)  # of each kind of step the last
  assert "bubblewrap" in last["RUN"]
  assert re.search(r"useradd .*\b" + last["USER"] + "$", last["RUN"].strip())
  assert json.loads(last["ENTRYPOINT"]) == ["python", "-m", "brorl_jax.main"]
