"""--mode=warmup: supervised training on pairs."""

import json
import os
import pathlib
import subprocess
import sys

import compiling
import jax
import numpy as np
import pytest
from messages import mentions

from brorl_jax.config import Warmup
from brorl_jax.configs import sft
from brorl_jax.errors import UserError
from brorl_jax.main import settings
from brorl_jax.main import train as warmup
from brorl_jax.model import huggingface, tokenizer
from brorl_jax.model.policy import Policy
from brorl_jax.model.spec import Rope
from brorl_jax.plan import checkpoint_source, resolve

ROOT = pathlib.Path(__file__).parents[2]
POLICY = Policy(
  vocab=512, width=32, layers=1, heads=8, kv_heads=8, head_size=4, mlp=64,
  rope=Rope(100.0), norm_eps=1e-6, tied=True, qkv_bias=True,
  max_positions=128,
)  # fmt: skip


def sums(count):
  """Lines that ask for a sum, and say it."""
  every = [(a, b) for a in range(20) for b in range(20)]
  some = np.random.default_rng(0).permutation(len(every))[:count]
  return [
    {"prompt": f"Calculate {a} + {b}.", "response": str(a + b)}
    for a, b in (every[i] for i in some)
  ]


def write(path, lines):
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  """A random model of somebody, with a tokenizer and a chat template."""
  path = tmp_path_factory.mktemp("models") / "mine"
  params = POLICY.init(jax.random.key(0))
  huggingface.save(path, POLICY, params, source=huggingface.ASSETS)
  (path / checkpoint_source.TRAINED_ON).write_text('{"starts": []}\n')
  return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  return write(tmp_path_factory.mktemp("data") / "pairs.jsonl", sums(200))


def config(model, files, **fields):
  c = sft.get_config()
  known = {
    "policy.checkpoint": str(model),
    "data.files": (files,),
    "optim.row_tokens": 48,
    "optim.rows": 8,
    "optim.microbatches": 1,
    "optim.lr": 0.01,
    "optim.epochs": 4,
    "devices.mesh_fsdp": 8,
  }
  c.update_from_flattened_dict(known | fields)
  return settings.typed(c, Warmup)


def resolved(c):
  return resolve.warmup(c, resolve.here(c.devices))


def train(c, out):
  warmup.warmup(resolved(c), out)


@pytest.fixture(scope="module")
def warm(model, files, tmp_path_factory):
  out = tmp_path_factory.mktemp("out") / "warm"
  held = write(out.with_name("held.jsonl"), sums(210)[200:])
  train(config(model, files, **{"data.heldout_files": (held,)}), out)
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


@pytest.mark.ci
def test_what_is_measured_is_held_out(model, files, tmp_path, monkeypatch):
  seen = {}

  class Called(ValueError):
    pass

  def stub(params, pairs, *, heldout, seed, **how):
    seen.update(pairs=pairs, heldout=heldout, seed=seed)
    raise Called("here")

  monkeypatch.setattr(warmup.supervised, "train", stub)
  with pytest.raises(UserError, match="here"):
    train(config(model, files, **{"optim.seed": 7}), tmp_path / "out")
  assert len(seen["pairs"]) + len(seen["heldout"]) == 200
  assert 3 <= len(seen["heldout"]) <= 20 and seen["seed"] == 7
  # No pair is on both sides.
  sides = [{str(pair) for pair in seen[k]} for k in ("pairs", "heldout")]
  assert not sides[0] & sides[1]


def test_it_writes_a_model_like_any_other(warm, model):
  policy, params = huggingface.load(warm)
  assert policy == huggingface.load(model)[0]
  before = huggingface.load(model)[1]
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
  c = config(model, files, **{"data.system": "Be brief."})
  learned, measured, lines = warmup.read_pairs(resolved(c))
  text = tokenizer.Tokenizer(model)
  line = sums(1)[0]
  asked = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": line["prompt"]},
  ]
  pair = (
    text.render(asked),
    [*text.encode(line["response"]), text.stop_ids[0]],
  )
  assert pair in learned + measured
  assert len(learned) + len(measured) == 200
  assert 3 <= len(measured) <= 20  # one in 20
  assert lines == [
    f"{len(learned)} pairs to train on",
    f"{len(measured)} pairs held out",
  ]


def test_a_pair_that_just_fits_is_kept(model, files):
  skip = {"data.skip_bad": True}
  every = lambda n: warmup.read_pairs(
    resolved(config(model, files, **skip, **{"optim.row_tokens": n}))
  )
  learned, measured, _ = every(128)
  longest = max(sum(map(len, pair)) for pair in learned + measured)
  counts = [sum(map(len, every(n)[:2])) for n in (longest, longest - 1)]
  assert counts[0] == 200 > counts[1]


def test_long_and_wrong_ones_are_left_out_if_asked(model, tmp_path):
  lines = sums(40)
  lines[3]["response"] = "7 " * 60
  lines[5]["response"] = 7
  path = write(tmp_path / "a.jsonl", lines)
  fields = {"data.skip_bad": True, "data.heldout_one_in": 4}
  _, _, lines = warmup.read_pairs(resolved(config(model, path, **fields)))
  says = ", ".join(lines)
  assert "1 wrong lines left out" in says and "1 too long ones" in says


@pytest.mark.parametrize(
  "fields, says",
  [
    ({"data.fields": "respons:a"}, "config.data.fields: 'respons:a'"),
    (
      {"optim.rows": 4},
      "config.optim.rows = 4 ... 8 ... mesh_data x mesh_fsdp",
    ),
    (
      {"optim.row_tokens": 129},
      "config.optim.row_tokens = 129 ... at most 128",
    ),
    ({"optim.row_tokens": 8}, "line 1 ... prompt and response"),
    ({"devices.mesh_fsdp": 3}, "mesh (data=1, fsdp=3, tensor=1, expert=1)"),
    ({"policy.checkpoint": "nowhere"}, "'nowhere'"),
    ({"policy.chat_template": "gone.jinja"}, "chat template gone.jinja"),
  ],
)
def test_what_cannot_work_is_one_line(model, files, tmp_path, fields, says):
  with pytest.raises(UserError) as e:
    train(config(model, files, **fields), tmp_path / "out")
  assert mentions(str(e.value), says) and "\n" not in str(e.value)
  assert not (tmp_path / "out").exists()


def test_a_start_without_pairs_is_refused(refused):
  flags = ("--mode=warmup", "--config=configs/sft.py", "--workdir=x")
  assert mentions(refused(*flags), "config.data.files ... empty")


@pytest.mark.ci
def test_a_loss_that_is_not_finite_is_one_line(model, files, tmp_path):
  fields = {"optim.lr": 1e30, "optim.warmup": 0, "optim.max_grad_norm": 1e30}
  with pytest.raises(UserError, match="lower the learning rate"):
    train(config(model, files, **fields), tmp_path / "out")
  assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_rl_goes_on_and_transformers_generates_with_it(warm, tmp_path):
  torch = pytest.importorskip("torch")
  import transformers

  def command(mode, workdir, **fields):
    words = [f"--config.{name}={value}" for name, value in fields.items()]
    subprocess.run(
      [
        *(sys.executable, "-m", "brorl_jax.main", f"--mode={mode}"),
        *("--config=configs/smoke.py", f"--workdir={workdir}", *words),
      ],
      cwd=ROOT,
      env={**os.environ, "XLA_FLAGS": compiling.QUICK, "JAX_PLATFORMS": "cpu"},
      check=True,
      timeout=280,
    )

  small = {
    "sampling.n": 16, "sampling.samples": 64, "sampling.in_flight": 64,
    "run.steps": 2, "eval.prompts": 2, "eval.n": 2, "optim.rows": 8,
    "optim.blocks": 4, "filter.keep": "all", "optim.minibatches": 1,
  }  # fmt: skip
  run, out = tmp_path / "run", tmp_path / "out"
  command("train", run, **{"policy.checkpoint": warm}, **small)
  assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
  command("export", out, **{"policy.checkpoint": run})
  text = transformers.AutoTokenizer.from_pretrained(out)
  model = transformers.AutoModelForCausalLM.from_pretrained(out)
  prompt = tokenizer.Tokenizer(out).render(
    [{"role": "user", "content": "Calculate 3 + 4."}]
  )
  ids = model.generate(
    torch.tensor([prompt]),
    attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
    max_new_tokens=12,
    do_sample=False,
  )
  said = ids[0, len(prompt) :].tolist()
  assert said[-1] == text.eos_token_id and len(said) <= 4  # a sum, and the end
