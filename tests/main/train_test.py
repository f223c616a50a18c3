"""--mode=train: the wiring, one of many processes; --mode=warmup."""

import json
import os
import pathlib
import signal
import sys
import types

import compiling
import configured
import hub_cache
import jax
import messages
import numpy as np
import pytest
import runs_for_tests as made
import tiers
from launchers import ran
from one_step import config, resolved

from brorl_jax import config as sections
from brorl_jax import train as loop
from brorl_jax.config import Warmup
from brorl_jax.configs import sft
from brorl_jax.data import dataset
from brorl_jax.errors import UserError
from brorl_jax.main import settings, train
from brorl_jax.many import processes
from brorl_jax.model import huggingface, tokenizer
from brorl_jax.model.policy import Policy
from brorl_jax.model.spec import Rope
from brorl_jax.plan import checkpoint_source, resolve
from brorl_jax.runs import checkpoints
from brorl_jax.types import RunState

ROOT = pathlib.Path(__file__).parents[2]
ASSETS = ROOT / "brorl_jax" / "assets"


@pytest.mark.ci
def test_a_run_records_the_files_and_the_commit_that_it_trains_on(
  tmp_path, monkeypatch
):
  (commit,) = hub_cache.made(tmp_path, monkeypatch, v2=ASSETS)
  path = made.problems(tmp_path / "a.jsonl", range(40))
  alone = {"data.files": (path,), "data.domains.gym.weight": 0.0}
  name = "maker/model@v2"
  this = resolved(config(prompt_tokens=80, checkpoint=name, **alone))
  parts = train._parts(this, tmp_path / "run", anew=False)
  parts.scorer.close()
  assert parts.entries["files"] == dataset.file_digests(path)
  assert parts.entries["began_with"] == str(commit)


@pytest.mark.ci
def test_a_phase_says_once_what_it_changes(tmp_path, monkeypatch, capsys):
  stages = []

  def loops(state, make_stages, *_, **__):
    stages.extend(make_stages(step) for step in range(1, 5))
    return state

  monkeypatch.setattr(loop, "train", loops)
  monkeypatch.setattr(train, "finish", lambda *_: None)
  two = {"optim.lr": 0.25}
  three = {"optim.lr": 0.5, "sampling.samples": 128}
  phases = ({"from_step": 2, **two}, {"from_step": 3, **three})
  this = resolved(config(phases=phases))
  train.run(this, tmp_path / "run", allow_change=False)
  assert [x.changed for x in stages] == [None, two, three, None]
  assert [x.target for x in stages] == [4, 4, 8, 8]
  assert list(stages[3].candidates(4, RunState())) == list(range(80))
  assert "\nfrom step 3: 8 prompts x 16 rollouts; " in capsys.readouterr().out


@pytest.mark.parametrize("step", [0, 3])
def test_a_step_that_is_not_of_the_run_has_no_trace(tmp_path, step):
  this = resolved(config(steps=2))
  with pytest.raises(UserError, match=f"--profile_step={step} .* 1 to 2"):
    train.run(this, tmp_path, allow_change=False, profile_step=step)
  assert not [*tmp_path.iterdir()]


@pytest.fixture
def refuses(failed, tmp_path):
  def line(**fields) -> str:
    said = failed(
      "--config=configs/smoke.py",
      f"--workdir={tmp_path / 'run'}",
      *(f"--config.{name}={value}" for name, value in fields.items()),
    )
    assert not (tmp_path / "run").exists()
    return said

  return line


@pytest.mark.parametrize(
  "fields, line",
  tiers.some(
    [
      ({"sampling.max_new_tokens": 40_000}, "sampling.max_new_tokens = 40040"),
      ({"policy.checkpoint": "nowhere"}, "checkpoint 'nowhere'"),
      ({"devices.mesh_tensor": 3}, "does not fill the 8 devices"),
      ({"data.prompt_tokens": 8}, "config.data.prompt_tokens = 8"),
      ({"data.families.gcd.settings.max_value": 0}, "gcd"),
    ],
    3,
  ),
)
def test_what_does_not_fit_the_policy_is_refused(refuses, fields, line):
  assert messages.mentions(refuses(**fields), line)


@pytest.mark.parametrize(
  "verifier, text, line",
  [
    ("{}/mine.py:nothing", "", "has no function 'nothing'"),
    ("{}/mine.py:score", "score = lambda answer: 1\n",
      "(answer) ... (response"),
    ("score", "", "must be functions such as ('mine.py:score'"),
    ("{}/mine.py:score", "def score(responses, example, step): ...\n",
      "sampling.rounds = (16, 512) ... takes all responses to a prompt"),
  ],
)  # fmt: skip
def test_what_is_no_reward_is_refused(refuses, tmp_path, verifier, text, line):
  (tmp_path / "mine.py").write_text(text)
  made.dump(tmp_path / "odd.jsonl", [{"question": f"{i}?"} for i in range(40)])
  fields = {
    "data.files": tmp_path / "odd.jsonl",
    "data.fields": "prompt:question",
    "reward.verifier": verifier.format(tmp_path),
  }
  where = "config.reward.verifier = ... "
  if "rounds" in line:
    where, fields["sampling.rounds"] = "", "(16, 512)"
  assert messages.mentions(refuses(**fields), where + line)


def test_only_a_closed_loop_is_not_printed(monkeypatch):
  said = []
  hook = lambda one: said.append(one.exc_value)
  monkeypatch.setattr(sys, "unraisablehook", hook)
  closed = RuntimeError("Event loop is closed")
  others = [RuntimeError("Event loop is open"), ValueError(str(closed))]
  tell = lambda e: sys.unraisablehook(types.SimpleNamespace(exc_value=e))
  with train.no_closed_loops():
    for error in (closed, *others):
      tell(error)
  tell(closed)
  assert said == [*others, closed]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_after_the_step_and_a_second_one_at_once(number):
  ended = []
  mine = lambda *_: ended.append(True)
  before = signal.signal(number, mine)
  try:
    with train.Stop() as stop:
      assert not stop()
      os.kill(os.getpid(), number)
      assert stop() and stop.asked and not ended
      last = signal.getsignal(number) == signal.SIG_DFL
      assert last == (number == signal.SIGTERM)  # SIGHUP may come twice
    assert signal.getsignal(number) is mine
    signal.signal(number, signal.SIG_IGN)
    with train.Stop():  # as nohup has it
      assert signal.getsignal(number) == signal.SIG_IGN
  finally:
    signal.signal(number, before)


def test_processes_agree_with_any_signal(monkeypatch):
  monkeypatch.setattr(processes, "gather", lambda asked: [asked, True])
  stop = train.Stop()
  assert stop() and stop.asked


@pytest.mark.parametrize("sees", [True, False])
def test_a_folder_that_some_do_not_see_is_refused(sees, monkeypatch, tmp_path):
  """Process 1 of 2; process 0 writes here, or in another folder."""
  monkeypatch.setattr(train, "_SEEN_S", 0.3)
  monkeypatch.setattr(processes, "alone", lambda: False)
  monkeypatch.setattr(processes, "leads", lambda: False)
  monkeypatch.setattr(processes, "first", lambda value: "token")
  there = tmp_path if sees else tmp_path / "other"

  def gather(value):
    if value is None:
      there.mkdir(exist_ok=True)
      (there / ".shared").write_text("token")
    return [True, value]

  monkeypatch.setattr(processes, "gather", gather)
  if sees:
    train.require_one_folder(tmp_path)
    return
  with pytest.raises(UserError, match=r"process 1 does not see .* all hosts"):
    train.require_one_folder(tmp_path)


def test_the_first_process_clears_what_it_wrote(monkeypatch, tmp_path):
  monkeypatch.setattr(processes, "alone", lambda: False)
  seen = []
  gather = lambda value: seen.append([*tmp_path.iterdir()]) or [value, value]
  monkeypatch.setattr(processes, "gather", gather)
  train.require_one_folder(tmp_path)
  assert [len(files) for files in seen[1:]] == [1, 1]
  assert not [*tmp_path.iterdir()]


def test_an_error_in_one_of_many_closes_nothing_shared(monkeypatch, tmp_path):
  called = []
  for name in ("close", "leave"):
    note = lambda _, name=name: called.append(name)
    monkeypatch.setattr(checkpoints.Store, name, note)
  store = checkpoints.Store(tmp_path, keep=1, run="mine")
  for alone in (True, False):
    monkeypatch.setattr(processes, "alone", lambda alone=alone: alone)
    with pytest.raises(OSError), train.closing(store):
      raise OSError
    with pytest.raises(loop.RunEnded), train.closing(store):
      raise loop.RunEnded(3, "all of them end, and the step is to be saved")
    with train.closing(store):
      pass
  assert called == ["close", "close", "close", "leave", "close", "close"]


def test_what_decides_the_numbers_is_named(tmp_path):
  c = configured.config(n=16)
  decide = lambda: train.decisions(
    c, {"train": "d1"}, {"my.py:f": "f1"}, tmp_path
  )
  for file in ("config.json", "model.safetensors"):
    (tmp_path / file).write_text("1")
  of = decide()
  named = {"data train": "d1", "function my.py:f": "f1"}
  assert of.items() >= {**named, "config.sampling.n": 16}.items()
  fields = sections.flat(sections.as_dict(c))
  assert {f"config.{name}" for name in fields} <= of.keys()
  assert {"jax", "Python", "the code of brorl_jax (a hash)"} <= of.keys()
  assert decide() == of
  for file, text in (("config.json", "2"), ("model.safetensors", "12")):
    (tmp_path / file).write_text(text)
    changed, of = of, decide()
    differ = {k for k in of if of[k] != changed[k]}
    assert differ == {"the policy's files (a hash)"}


POLICY = Policy(
  vocab=512, width=32, layers=1, heads=8, kv_heads=8, head_size=4, mlp=64,
  rope=Rope(100.0), norm_eps=1e-6, tied=True, qkv_bias=True,
  max_positions=128,
)  # fmt: skip


def sums(count):
  every = [(a, b) for a in range(20) for b in range(20)]
  some = np.random.default_rng(0).permutation(len(every))[:count]
  return [
    {"prompt": f"Calculate {a} + {b}.", "response": str(a + b)}
    for a, b in (every[i] for i in some)
  ]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  path = tmp_path_factory.mktemp("models") / "mine"
  params = POLICY.init(jax.random.key(0))
  huggingface.save(path, POLICY, params, source=huggingface.ASSETS)
  (path / checkpoint_source.TRAINED_ON).write_text('{"starts": []}\n')
  return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
  made.dump(path, sums(200))
  return str(path)


def on_pairs(model, files, **fields):
  c = sft.get_config()
  known = {
    "policy.checkpoint": str(model), "data.files": (files,),
    "optim.row_tokens": 48, "optim.rows": 8, "optim.microbatches": 1,
    "optim.lr": 0.01, "optim.epochs": 4, "devices.mesh_fsdp": 8,
  }  # fmt: skip
  c.update_from_flattened_dict(known | fields)
  c = settings.typed(c, Warmup)
  return resolve.warmup(c, resolve.here(c.devices))


@pytest.fixture(scope="module")
def warm(model, files, tmp_path_factory):
  out = tmp_path_factory.mktemp("out") / "warm"
  held = out.with_name("held.jsonl")
  made.dump(held, sums(210)[200:])
  train.warmup(
    on_pairs(model, files, **{"data.heldout_files": (str(held),)}), out
  )
  return out


@pytest.mark.ci
def test_it_lowers_the_held_out_loss(warm):
  record = json.loads((warm / "warmup.json").read_text())
  looks = record["losses"]
  assert looks[0]["update"] == 0 and looks[0]["loss"] is None
  assert looks[-1]["heldout"] < 0.6 * looks[0]["heldout"]
  assert looks[-1]["epochs"] == pytest.approx(4.0)
  # A random policy is as good as a guess among all tokens.
  assert looks[0]["heldout"] == pytest.approx(np.log(512), abs=0.1)
  # Of the pairs to train on, and of those held out.
  one, other = record["files"].values()
  assert len(one) == len(other) == 32 and one != other
  assert record["config"]["optim"]["lr"] == 0.01


def test_what_is_measured_is_held_out(model, files, tmp_path, monkeypatch):
  seen = {}

  def stub(params, pairs, *, heldout, seed, **how):
    seen.update(pairs=pairs, heldout=heldout, seed=seed)
    raise ValueError("here")

  monkeypatch.setattr(train.supervised, "train", stub)
  with pytest.raises(UserError, match="here"):
    train.warmup(on_pairs(model, files, **{"optim.seed": 7}), tmp_path / "out")
  assert len(seen["pairs"]) + len(seen["heldout"]) == 200
  assert 3 <= len(seen["heldout"]) <= 20 and seen["seed"] == 7  # one in 20
  sides = [{str(pair) for pair in seen[k]} for k in ("pairs", "heldout")]
  assert not sides[0] & sides[1]


@pytest.mark.ci
def test_it_writes_a_model_like_any_other(warm, model):
  policy, params = huggingface.load(warm)
  same, before = huggingface.load(model)
  assert policy == same
  moved = jax.tree.map(lambda a, b: float(abs(a - b).max()), params, before)
  assert all(x > 0.0 for x in jax.tree.leaves(moved))
  one, other = (tokenizer.Tokenizer(path) for path in (warm, model))
  ask = [{"role": "user", "content": "1 + 1?"}]
  assert one.render(ask) == other.render(ask)
  ids = json.loads((warm / "generation_config.json").read_text())
  assert ids["eos_token_id"] in (list(other.stop_ids), other.stop_ids[0])
  # What runs trained the model on before is still known.
  assert (warm / checkpoint_source.TRAINED_ON).read_text() == '{"starts": []}\n'


def test_pairs_are_posed_as_runs_pose_prompts(model, files):
  this = on_pairs(model, files, **{"data.system": "Be brief."})
  learned, measured, _ = train.read_pairs(this)
  text, line = tokenizer.Tokenizer(model), sums(1)[0]
  asked = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": line["prompt"]},
  ]
  response = [*text.encode(line["response"]), text.stop_ids[0]]
  assert (text.render(asked), response) in learned + measured


def test_long_and_wrong_ones_are_left_out_if_asked(model, tmp_path):
  lines: list[dict] = [*sums(40)]
  lines[3]["response"] = "7 " * 60
  lines[5]["response"] = 7
  made.dump(tmp_path / "a.jsonl", lines)
  fields = {"data.skip_bad": True, "data.heldout_one_in": 4}
  this = on_pairs(model, str(tmp_path / "a.jsonl"), **fields)
  learned, measured, said = train.read_pairs(this)
  assert len(learned) + len(measured) == 38
  assert messages.mentions(", ".join(said), "1 wrong ... 1 too long")


def test_a_pair_that_just_fits_is_kept(model, files):
  every = lambda n: train.read_pairs(
    on_pairs(model, files, **{"data.skip_bad": True, "optim.row_tokens": n})
  )
  learned, measured, _ = every(128)
  longest = max(sum(map(len, pair)) for pair in learned + measured)
  counts = [sum(map(len, every(n)[:2])) for n in (longest, longest - 1)]
  assert counts[0] == 200 > counts[1]


@pytest.mark.parametrize(
  "fields, says",
  [
    ({"data.fields": "respons:a"}, "config.data.fields: 'respons:a'"),
    ({"optim.rows": 4}, "config.optim.rows = 4 ... mesh_data x mesh_fsdp"),
    ({"optim.row_tokens": 129}, "config.optim.row_tokens = 129 ... most 128"),
    ({"optim.row_tokens": 8}, "line 1 ... prompt and response"),
    ({"devices.mesh_fsdp": 3}, "mesh (data=1, fsdp=3, tensor=1, expert=1)"),
    ({"policy.checkpoint": "nowhere"}, "'nowhere'"),
    ({"policy.chat_template": "gone.jinja"}, "chat template gone.jinja"),
  ],
)
def test_what_cannot_work_is_one_line(model, files, tmp_path, fields, says):
  with messages.refuses(UserError, says):
    train.warmup(on_pairs(model, files, **fields), tmp_path / "out")
  assert not (tmp_path / "out").exists()


@pytest.mark.ci
def test_a_loss_that_is_not_finite_is_one_line(model, files, tmp_path):
  fields = {"optim.lr": 1e30, "optim.warmup": 0, "optim.max_grad_norm": 1e30}
  with pytest.raises(UserError, match="lower the learning rate"):
    train.warmup(on_pairs(model, files, **fields), tmp_path / "out")
  assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_rl_continues_with_it(warm, tmp_path):
  small = {
    "policy.checkpoint": warm, "sampling.n": 16, "sampling.samples": 64,
    "sampling.in_flight": 64, "run.steps": 2, "eval.prompts": 2, "eval.n": 2,
    "optim.rows": 8, "optim.blocks": 4, "filter.keep": "all",
    "optim.minibatches": 1,
  }  # fmt: skip
  words = [f"--config.{name}={value}" for name, value in small.items()]
  words += [f"--workdir={tmp_path / 'run'}", "--config=configs/smoke.py"]
  env = {**os.environ, "XLA_FLAGS": compiling.QUICK, "JAX_PLATFORMS": "cpu"}
  ran(sys.executable, "-m", "brorl_jax.main", *words, env=env, check=True)
  assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
