"""The whole program on the embedded policy, killed and resumed."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import chex
import compiling
import configured
import jax
import numpy as np
import pytest
import tiers
from launchers import ran

import brorl_jax
from brorl_jax import errors
from brorl_jax.errors import UserError
from brorl_jax.main import export
from brorl_jax.main.recorder import OF_PROCESS
from brorl_jax.model import huggingface, tokenizer
from brorl_jax.rollout import sampler
from brorl_jax.runs import intact, metrics

# A whole run at a desk is that of documents_test.
pytestmark = pytest.mark.ci
ROOT = pathlib.Path(__file__).parents[1]
# Everything as in configs/smoke.py, but small.
SMALL = {
  "n": 16, "samples": 64, "in_flight": 64, "steps": 6, "save_every": 3,
  "eval_every": 3, "eval_prompts": 2, "eval_n": 2, "rows": 8, "blocks": 2,
  # The reference is reset with steps 3 and 6; the last half has a length reward
  # in the first of every three steps.
  "reset_every": 3, "reset_to": "best",
  "phases": "({'from_step': 4, 'reward.length': 'cosine',"
    " 'reward.length_steps': (1, 2)},)",
}  # fmt: skip


def export_to(run, out):
  export.run(configured.config(checkpoint=str(run)).policy, out)


@pytest.fixture(scope="module")
def start():
  def start(workdir, *, mode="train", flags=(), before=(), **overrides):
    fields = {**SMALL, **overrides}
    command = [*before, sys.executable, "-m", "brorl_jax.main", *flags]
    command += [f"--mode={mode}"]
    command += ["--config=configs/smoke.py", f"--workdir={workdir}"]
    command += [
      f"--config.{configured.SHORT.get(k, k)}={v}" for k, v in fields.items()
    ]
    quick = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": compiling.QUICK}
    environment = os.environ | quick
    return subprocess.Popen(command, cwd=ROOT, env=environment,
      text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip

  return start


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("whole") / "run"
  process = start(workdir)
  out, err = process.communicate(timeout=240)
  assert process.returncode == 0, err
  return workdir, out, err


def digest(workdir):
  """SHA-256 of every array of the last checkpoint."""
  last = max((workdir / "checkpoints").iterdir(), key=lambda p: int(p.name))
  extra = json.loads((last / "extra" / "metadata").read_text())
  assert any(path.startswith("opt/") for path in extra["digest"])
  assert any(path.startswith("params/") for path in extra["digest"])
  return last.name, extra


def numbers(workdir):
  """Every line of the run's files, times and memory aside."""
  timed = ("time", "score/", "seconds",
    "rollout/tokens_per_s", "rollout/samples_per_s", "memory/")  # fmt: skip
  keep = lambda line: {k: v for k, v in line.items() if not k.startswith(timed)}
  files = ("metrics.jsonl", "samples.jsonl", "eval/curve.jsonl")
  files += ("eval/records.jsonl", "events.jsonl")
  return {name: [keep(line) for line in metrics.read_lines(workdir / name)
      if line.get("event") not in OF_PROCESS] for name in files}  # fmt: skip


def lines_of(workdir):
  path = workdir / "metrics.jsonl"
  return path.read_text().count("\n") if path.exists() else 0


def stop_after(process, workdir, lines, wait, how, saved=""):
  """Signals `wait` s after metrics.jsonl has so many lines, a step is saved."""
  deadline, there = time.monotonic() + 120, workdir / "checkpoints" / saved
  has = lambda: lines_of(workdir) >= lines and there.exists()
  while not has() and process.poll() is None:
    assert time.monotonic() < deadline
    time.sleep(0.01)
  time.sleep(wait)
  process.send_signal(how)
  return process.communicate(timeout=120)


def test_a_run_leaves_what_it_promises(whole):
  workdir, out, err = whole
  config = json.loads((workdir / "config.json").read_text())
  assert config["config"]["sampling"]["n"] == 16 and "jax" in config["versions"]
  lines = metrics.read_lines(workdir / "metrics.jsonl")
  assert [line["step"] for line in lines] == list(range(1, 7))
  # Of the contract; documents_test compares all names with the glossary.
  promised = """reward/mean reward/std_within_group sampling/pass_rate
    sampling/degenerate_fraction rollout/tokens_per_s rollout/samples_per_s
    rollout/slot_occupancy rollout/length_mean rollout/truncated_fraction
    policy/entropy policy/kl_ref policy/clip_fraction policy/logp_gap_max
    policy/logp_gap_mean loss/total optim/lr optim/grad_norm
    theory/correct_mass time/rollout_s time/score_s time/update_s
    time/checkpoint_s memory/peak_bytes data/tokens_total data/samples_total"""
  assert set(promised.split()) <= lines[0].keys()
  assert all(line["policy/logp_gap_max"] < 1e-4 for line in lines)
  assert all(line["theory/correct_change_first_order"] for line in lines)
  assert [line["reward/length_active"] for line in lines] == [0] * 3 + [1, 0, 0]
  generated = np.diff([0, *(line["data/samples_total"] for line in lines)])
  for line, count in zip(lines, generated, strict=True):
    assert line["sampling/pass_rate"] * count == pytest.approx(64)
  changed = {"reward.length": "cosine", "reward.length_steps": [1, 2]}
  # Six steps learn too little to be better than the start.
  first = numbers(workdir)["eval/curve.jsonl"][0]["pass_at_1"]
  why = f"3 steps; back to step 0, of score {first:.3g}"
  reset = {"event": "reference reset", "why": why}
  assert numbers(workdir)["events.jsonl"] == [
    {"step": 3, **reset}, {"step": 4, "event": "phase", "changed": changed},
    {"step": 6, **reset},
  ]  # fmt: skip
  every = metrics.read_lines(workdir / "events.jsonl")
  assert (every[0]["event"], every[-1]["event"]) == ("start", "end")
  assert (every[-1]["why"], every[-1]["status"]) == ("done", 0)
  assert (workdir / "report" / "index.html").stat().st_size > 10_000
  assert list(workdir.glob("events.out.tfevents.*"))
  records = metrics.read_lines(workdir / "eval" / "records.jsonl")
  assert (
    len(records) == 3 * 8 * 2 * 2
  )  # evaluations, families, prompts, samples
  # Not a terminal: one plain line per step, no control characters.
  assert err.count("\nstep ") + err.startswith("step ") == 6 + 3 + 3
  assert "\x1b" not in err + out
  assert "held-out pass@1" in out


@pytest.mark.slow
def test_interrupt_and_resume_is_bit_identical(start, whole, tmp_path):
  workdir = tmp_path / "run"
  process = start(workdir)
  _, err = stop_after(process, workdir, 4, 0.02, signal.SIGINT)
  assert process.returncode == 130
  assert err.splitlines()[-1] == "interrupted; the same command resumes"
  end = metrics.read_lines(workdir / "events.jsonl")[-1]
  ended = {"event": "end", "why": "interrupted", "status": 130}
  assert end.items() >= ended.items()
  process = start(workdir)
  _, err = process.communicate(timeout=240)
  assert process.returncode == 0, err
  assert digest(workdir) == digest(whole[0])
  assert numbers(workdir) == numbers(whole[0])


@pytest.mark.parametrize(
  "seconds", tiers.some([0.05, 0.4, 0.9, 1.3, 1.7, 2.1], 2, 2)
)
def test_interrupt_while_it_starts_ends_at_once(start, tmp_path, seconds):
  process = start(tmp_path / "run", steps=1000)
  time.sleep(seconds)
  process.send_signal(signal.SIGINT)
  _, err = process.communicate(timeout=60)
  # Before the interpreter runs the first line of ours, Python decides.
  early = "Failed to import the site module" in err and process.returncode == 1
  assert early or process.returncode in (130, -signal.SIGINT), err
  if process.returncode == 130:
    assert err.splitlines()[-1] == "interrupted; the same command resumes"


REWARD = """
import sys
seen = []

def score(response, example):
  print("a word of", example["who"])
  assert "jax" not in sys.modules
  return (len(response) + example["level"]) % 3 / 2

def group(responses, example, step):
  return [responses.count(r) / len(responses) / 4 for r in responses]
"""


def odd_lines(path, count=40):
  rows = [
    {"question": f"{i} + {i}?", "level": i % 3, "who": ["a", i], "domain": 7}
    for i in range(count)
  ]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
def test_a_reward_of_a_user_trains_and_is_part_of_the_run(start, tmp_path):
  """Killed and resumed bit for bit; its file changed: refused by name."""
  file, data = tmp_path / "mine.py", tmp_path / "odd.jsonl"
  file.write_text(REWARD)
  odd_lines(data)
  small = dict(steps=4, save_every=2, eval_every=2, phases="()", kl_weight=0.0)
  small |= {"data.files": data, "data.fields": "prompt:question",
    "reset_to": "latest", "data.heldout_one_in": 4,
    "reward.verifier": f"('{file}:score', '{file}:group')"}  # fmt: skip
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  process = start(whole, **small)
  out, err = process.communicate(timeout=240)
  assert process.returncode == 0, err
  assert f"rewards: {file}:score, {file}:group" in out
  assert "prompts: own 100%; none are generated" in out
  assert "a word of ['a'," in err and "a word of" not in out
  said = json.loads((whole / "config.json").read_text())["functions"]
  assert said["reward.verifier[0]"]["name"] == f"{file}:score"
  assert len(said["reward.verifier[1]"]["digest"]) == 32
  lines = metrics.read_lines(whole / "metrics.jsonl")
  assert len(lines) == 4 and all(x["optim/grad_norm"] > 0 for x in lines)
  shown = metrics.read_lines(whole / "samples.jsonl")
  assert {one["domain"] for one in shown} == {"own"}
  for one in shown:  # the text, and not what its tokens would say
    assert one["reward"] - 0.25 <= 1.0
  process = start(killed, **small)
  stop_after(process, killed, 3, 0.0, signal.SIGKILL, "2")
  process = start(killed, **small)
  out, err = process.communicate(timeout=240)
  assert process.returncode == 0, err
  assert "resumes after step 2" in out
  assert (digest(killed), numbers(killed)) == (digest(whole), numbers(whole))
  file.write_text(REWARD + "# another\n")
  process = start(killed, **small | {"steps": 6})
  _, err = process.communicate(timeout=120)
  assert process.returncode == 2 and err.count("\n") == 1
  line = f"config.reward.verifier[0] = '{file}:score': {file} was changed since"
  assert line in err


# The command, in which a program that is traced more often than this fails. A
# step with a shape of its own would trace all of them in every step.
BOUNDED = """
import functools, runpy, sys
import chex, jax
from brorl_jax.learner import update
from brorl_jax.rollout import programs, stream

# A row for each: traces, and how it is compiled.
PROGRAMS = {
  # One length of responses.
  (update, "_add"): (1, {"static_argnames": ("response_logp", "objective"),
                         "donate_argnames": "sums"}),
  (update, "_apply"): (1, {"static_argnames": "tx",
                           "donate_argnames": "state"}),
  # Of training and of evaluations, and with a first page that is not there yet.
  (programs, "segment"): (3, {"static_argnames": "spec",
                              "donate_argnames": ("newest", "state")}),
  (stream, "_admit"): (1, {"static_argnames": "spec",
                           "donate_argnames": ("queue", "state")}),
}
for (module, name), (traces, how) in PROGRAMS.items():
  plain = getattr(module, name).__wrapped__
  bounded = chex.assert_max_traces(plain, n=traces + int(sys.argv[1]))
  setattr(module, name, jax.jit(functools.wraps(plain)(bounded), **how))
sys.argv[:2] = ["brorl_jax.main"]
runpy.run_module("brorl_jax.main", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
  "spare, fails", [(0, False), tiers.at_night((-1, True))]
)
def test_a_run_traces_its_programs_once(tmp_path, spare, fails):
  """And the bound is tight: with one trace less it does not run."""
  fields = {**SMALL, "phases": "()", "steps": 4, "eval_every": 3}
  command = [sys.executable, "-c", BOUNDED, str(spare)]
  command += ["--config=configs/smoke.py", f"--workdir={tmp_path / 'run'}"]
  command += [f"--config.{configured.SHORT[k]}={v}" for k, v in fields.items()]
  quick = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": compiling.QUICK}
  done = ran(*command, env=os.environ | quick)
  if fails:
    assert done.returncode != 0 and "traced" in done.stderr
  else:
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def exported(whole, tmp_path_factory):
  out = tmp_path_factory.mktemp("export") / "exported"
  export_to(whole[0], out)
  return out


def test_a_run_is_exported_as_it_is(whole, exported):
  assert exported.stat().st_mode & 0o777 == 0o755  # others may read it
  policy, params = huggingface.load(exported)
  _, extra = digest(whole[0])
  for path, value in intact.digest({"params": params}).items():
    assert value == extra["digest"][path], path
  assert policy == huggingface.load(ROOT / "brorl_jax" / "assets")[0]


def test_one_step_of_a_run_is_exported(whole, tmp_path, capsys):
  run, out = whole[0], tmp_path / "out"
  export_to(run / "checkpoints" / "3", out)
  assert capsys.readouterr().out == f"wrote step 3 of {run} to {out}, float32\n"
  with pytest.raises(UserError, match="there is no checkpoint 99 in"):
    export_to(run / "checkpoints" / "99", tmp_path / "none")
  assert not (tmp_path / "none").exists()


def test_transformers_generates_with_an_exported_run(exported):
  torch = pytest.importorskip("torch")
  import transformers

  assert (exported / "trained_on.json").exists()  # does not disturb
  text = transformers.AutoTokenizer.from_pretrained(exported)
  model = transformers.AutoModelForCausalLM.from_pretrained(exported)
  policy, params = huggingface.load(exported)
  render = tokenizer.Tokenizer(exported).render
  prompts = [
    render([{"role": "user", "content": question}])
    for question in ("Calculate 3 + 4 * 2.", "Spell this word backward: cat")
  ]
  ours = sampler.sample(
    policy, params, prompts, jax.random.key(0), n=1, max_new_tokens=12,
    temperature=0.0, stop_ids=(text.eos_token_id,),
  )  # fmt: skip
  for p, prompt in enumerate(prompts):
    ids = model.generate(torch.tensor([prompt]),
      attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
      max_new_tokens=12, do_sample=False)  # fmt: skip
    theirs = ids[0, len(prompt) :].tolist()
    assert theirs == ours.tokens[p, 0][ours.mask[p, 0]].tolist()
    assert theirs[-1] == text.eos_token_id  # it knows where to stop


def test_a_run_of_lora_resumes_and_is_exported(start, tmp_path):
  """Killed and resumed bit for bit; what is exported is what samples."""
  base, whole, killed = (tmp_path / x for x in ("base", "whole", "killed"))
  shutil.copytree(huggingface.ASSETS, base)
  small = dict(
    steps=4, save_every=2, eval_every=2, phases="()", minibatches=1, lr=3e-3,
    lora_rank=4, reset_every=0, reset_to="latest", checkpoint=base,
  )  # fmt: skip
  for workdir in (whole, killed):
    process = start(workdir, **small)
    if workdir == killed:
      stop_after(process, workdir, 3, 0.0, signal.SIGKILL, "2")
      process = start(workdir, **small)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
  assert "resumes after step 2" in out
  assert digest(killed) == digest(whole) and numbers(killed) == numbers(whole)
  saved = [x for x in digest(whole)[1]["digest"] if x.startswith("params")]
  assert len(saved) == 14 and all("/lora_" in path for path in saved)
  first, *kl = (x["policy/kl_ref"] for x in numbers(whole)["metrics.jsonl"])
  assert abs(first) < 1e-9 and min(kl) > 1e-5
  export_to(whole, tmp_path / "out")
  policy, params = huggingface.load(tmp_path / "out")
  loaded = brorl_jax.load(str(whole))
  assert loaded.policy == policy and loaded.step == 4
  chex.assert_trees_all_close(loaded.params, params, atol=1e-7)  # two merges
  moved = params["blocks"]["q"]["kernel"]
  path = base / "model.safetensors"
  before = huggingface.load(base)[1]["blocks"]["q"]["kernel"]
  assert 1e-4 < np.abs(moved - before).max() < 0.1
  shutil.copyfile(tmp_path / "out" / "model.safetensors", path)
  with pytest.raises(ValueError, match="has changed since this run began"):
    brorl_jax.load(str(whole))
  for more in ((), ("--allow_config_change",)):
    another = start(whole, flags=more, **small | {"steps": 6})
    _, err = another.communicate(timeout=120)
    assert err.count("\n") == 1 and "restore the directory" in err


@pytest.mark.slow
def test_a_run_that_diverges_ends_and_keeps_its_best_step(start, tmp_path):
  workdir = tmp_path / "run"
  changes = dict(lr=1e38, max_grad_norm=1e38, save_every=1, keep_checkpoints=1)
  process = start(workdir, **changes)
  _, err = process.communicate(timeout=120)
  assert process.returncode == errors.NUMBERS
  last = err.splitlines()[-1]
  assert last.startswith("error: step 5: 5 bad steps in a row, the last: ")
  lines = (workdir / "events.jsonl").read_text().splitlines()
  told = [json.loads(line) for line in lines]
  # The first update made parameters of which the second has no gradient.
  events = [(e["step"], e["event"]) for e in told[:2]]
  assert events == [(0, "start"), (1, "skip")]
  assert (told[-1]["event"], told[-1]["status"]) == ("end", errors.NUMBERS)
  saved = [p.name for p in (workdir / "checkpoints").glob("[0-9]*")]
  assert sorted(saved) == ["0", "5"]
  assert (workdir / "stopped" / "step_5.npz").exists()
