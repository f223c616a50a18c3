"""Tests of brorl_jax/hf.py."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from brorl_jax import hf, sharding
from brorl_jax.attention import Rope
from brorl_jax.policy import Policy

TINY = Policy(
  vocab=32, width=16, layers=2, heads=4, kv_heads=2, head_size=6, mlp=20,
  rope=Rope(1e4), norm_eps=1e-5, tied=False, qkv_bias=True,
)  # fmt: skip
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
Q = "model.layers.1.self_attn.q_proj.weight"


def random_params(policy=TINY):
  """No jitted init: what matters is that all numbers differ."""
  rng = np.random.default_rng(0)
  abstract = jax.eval_shape(policy.init, jax.random.key(0))
  return jax.tree.map(
    lambda a: jnp.asarray(rng.normal(size=a.shape), jnp.float32), abstract
  )


def same(got, want):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_array_equal(a, b)
    assert a.dtype == b.dtype


@pytest.fixture
def saved(tmp_path):
  hf.save(tmp_path / "model", TINY, random_params())
  return tmp_path / "model"


def edit(directory, **fields):
  """Changes fields of config.json; None takes one away."""
  path = directory / "config.json"
  config = json.loads(path.read_text()) | fields
  config = {k: v for k, v in config.items() if v is not None}
  path.write_text(json.dumps(config))


def rewrite(directory, change):
  tensors = safetensors.numpy.load_file(directory / WEIGHTS)
  change(tensors)
  safetensors.numpy.save_file(tensors, directory / WEIGHTS)


def split(directory, files=3):
  """The same weights in several files and an index."""
  tensors = safetensors.numpy.load_file(directory / WEIGHTS)
  (directory / WEIGHTS).unlink()
  where = {}
  for i in range(files):
    name = f"model-{i + 1:05}-of-{files:05}.safetensors"
    part = {k: tensors[k] for k in sorted(tensors)[i::files]}
    safetensors.numpy.save_file(part, directory / name)
    where |= dict.fromkeys(part, name)
  index = {"metadata": {"total_size": 0}, "weight_map": where}
  (directory / INDEX).write_text(json.dumps(index))
  return where


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_saved_is_loaded_bit_for_bit(tmp_path, tied):
  policy = dataclasses.replace(TINY, tied=tied)
  params = random_params(policy)
  hf.save(tmp_path / "a" / "b", policy, params)
  got, loaded = hf.load(str(tmp_path / "a" / "b"))
  assert got == policy
  same(loaded, params)
  assert {type(a) for a in jax.tree.leaves(loaded)} == {type(jnp.zeros(()))}
  hf.save(tmp_path / "again", got, loaded)
  for name in (WEIGHTS, "config.json"):
    a, b = (tmp_path / "a" / "b" / name, tmp_path / "again" / name)
    assert a.read_bytes() == b.read_bytes()


def test_a_tensor_there_is_a_matrix_from_input_to_output(saved):
  """Every name and layout, against torch's Linear: y = x W' + b."""
  params, tensors = (
    random_params(),
    safetensors.numpy.load_file(saved / WEIGHTS),
  )
  blocks = jax.tree.map(np.asarray, params["blocks"])
  x = np.random.default_rng(1).normal(size=16).astype(np.float32)
  for layer in range(2):
    name = f"model.layers.{layer}."
    for ours, theirs in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj")):
      ours = jax.tree.map(lambda a: a[layer], blocks[ours])
      want = np.einsum("d,dhk->hk", x, ours["kernel"]) + ours["bias"]
      weight = tensors[f"{name}self_attn.{theirs}.weight"]
      got = weight @ x + tensors[f"{name}self_attn.{theirs}.bias"]
      np.testing.assert_allclose(got, want.ravel(), atol=1e-5)
    y = np.random.default_rng(2).normal(size=(4, 6)).astype(np.float32)
    want = np.einsum("hk,hkd->d", y, blocks["o"]["kernel"][layer])
    got = tensors[f"{name}self_attn.o_proj.weight"] @ y.ravel()
    np.testing.assert_allclose(got, want, atol=1e-5)
    for ours in ("gate", "up", "down"):
      got = tensors[f"{name}mlp.{ours}_proj.weight"]
      np.testing.assert_array_equal(got.T, blocks[ours]["kernel"][layer])
    for ours, theirs in (
      ("ln_attn", "input_layernorm"),
      ("ln_mlp", "post_attention_layernorm"),
    ):
      got = tensors[f"{name}{theirs}.weight"]
      np.testing.assert_array_equal(got, blocks[ours]["scale"][layer])
  for name, want in {
    "model.embed_tokens.weight": params["embed"]["embedding"],
    "model.norm.weight": params["ln_final"]["scale"],
    "lm_head.weight": params["head"]["kernel"].T,
  }.items():
    np.testing.assert_array_equal(tensors[name], want)
  assert len(tensors) == 3 + 2 * 12


def test_on_a_mesh_the_values_are_the_same_and_lie_by_the_table(saved):
  mesh = sharding.make_mesh(data=4, model=2)
  policy, params = hf.load(saved, mesh=mesh)
  same(params, random_params())
  want = sharding.param_shardings(
    jax.eval_shape(policy.init, jax.random.key(0)), mesh
  )
  assert jax.tree.map(lambda a: a.sharding, params) == want
  hf.save(saved.parent / "again", policy, params)
  same(hf.load(saved.parent / "again")[1], random_params())


def test_a_mesh_that_does_not_fit_is_refused(saved):
  mesh = sharding.make_mesh(data=1, model=8)
  with pytest.raises(ValueError, match=r"blocks/down/kernel .* 8 devices"):
    hf.load(saved, mesh=mesh)


def test_several_files_with_an_index_are_one_checkpoint(saved):
  where = split(saved)
  assert len(set(where.values())) == 3
  policy, params = hf.load(saved)
  assert policy == TINY
  same(params, random_params())


def test_half_precision_weights_become_the_same_float32(tmp_path):
  params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), random_params())
  hf.save(tmp_path, TINY, params)
  config = json.loads((tmp_path / "config.json").read_text())
  assert config["dtype"] == config["torch_dtype"] == "bfloat16"
  policy, loaded = hf.load(tmp_path, dtype="bfloat16")
  assert policy.dtype == "bfloat16"
  same(loaded, jax.tree.map(lambda a: a.astype(jnp.float32), params))


def test_a_repeated_head_of_a_tied_policy_is_ignored(tmp_path):
  policy = dataclasses.replace(TINY, tied=True)
  hf.save(tmp_path, policy, random_params(policy))
  name = "model.embed_tokens.weight"
  rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t[name]}))
  same(hf.load(tmp_path)[1], random_params(policy))


@pytest.mark.parametrize(
  "fields",
  [
    {"rope_parameters": None},  # transformers 4
    {"rope_theta": None},  # transformers 5
    {"rope_theta": 5.0},  # rope_parameters is the newer field
    {"rope_parameters": None, "rope_scaling": {"rope_type": "default"}},
    {"rope_parameters": None, "rope_scaling": {"type": "default"}},
    {"torch_dtype": None},
    {"dtype": None, "torch_dtype": None},
    {"hidden_act": None, "use_sliding_window": None},
  ],
  ids=str,
)
def test_old_and_new_spellings_of_the_config(saved, fields):
  edit(saved, **fields)
  assert hf.read_policy(saved, dtype="float32") == TINY


def test_the_size_of_a_head_is_a_share_of_the_width_if_not_said(tmp_path):
  policy = dataclasses.replace(TINY, head_size=4)
  params = random_params(policy)
  hf.save(tmp_path, policy, params)
  edit(tmp_path, head_dim=None)
  got, loaded = hf.load(tmp_path)
  assert got == policy
  same(loaded, params)


def refused(directory, *parts):
  with pytest.raises(ValueError) as e:
    hf.load(directory)
  message = str(e.value)
  assert "\n" not in message, message
  for part in parts:
    assert str(part) in message, message


@pytest.mark.parametrize(
  "fields, message",
  [
    (
      {"model_type": "mamba"},
      "model_type 'mamba' is not supported, only 'qwen2'",
    ),
    ({"model_type": None}, "model_type None is not supported, only 'qwen2'"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ({"use_sliding_window": True}, "use_sliding_window True is not supported"),
    (
      {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}},
      "rope_type 'yarn' is not supported, only 'default'",
    ),
    (
      {"rope_parameters": None, "rope_scaling": {"rope_type": "linear"}},
      "rope_type 'linear' is not supported",
    ),
    (
      {"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 4}},
      "rope_type 'yarn' is not supported",
    ),
    *(
      ({field: None}, f"no field '{field}'")
      for field in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "rms_norm_eps",
      )
    ),
    *(
      ({field: value}, f"{field} {value!r} is not a positive integer")
      for field, value in (
        ("vocab_size", "many"),
        ("hidden_size", 0),
        ("num_attention_heads", 0),
        ("num_key_value_heads", -2),
        ("num_hidden_layers", 1.5),
        ("intermediate_size", [20]),
      )
    ),
    ({"rope_theta": None, "rope_parameters": None}, "no field 'rope_theta'"),
  ],
  ids=str,
)
def test_refuses_a_config_by_field_and_value(saved, fields, message):
  edit(saved, **fields)
  refused(saved, saved / "config.json", message)


def test_refuses_what_is_not_a_checkpoint(tmp_path, saved):
  refused(tmp_path / "nowhere", tmp_path / "nowhere", "is not a directory")
  refused(saved / WEIGHTS, saved / WEIGHTS, "is not a directory")
  (tmp_path / "empty").mkdir()
  refused(tmp_path / "empty", tmp_path / "empty" / "config.json")
  for text in ("{", "", "[1]", '"text"'):
    (saved / "config.json").write_text(text)
    refused(saved, saved / "config.json")


def test_refuses_a_directory_without_safetensors(saved):
  (saved / WEIGHTS).rename(saved / "pytorch_model.bin")
  refused(saved, saved / WEIGHTS, "is missing")


def damage_shape(t):
  t[Q] = t[Q][:-1]


def damage_nan(t):
  t[Q][3, 2] = np.nan


def damage_inf(t):
  t[Q][0, 0] = -np.inf


def damage_transposed(t):
  t[Q] = np.ascontiguousarray(t[Q].T)


@pytest.mark.parametrize(
  "change, message",
  [
    (lambda t: t.pop(Q), f"no tensor {Q}"),
    (lambda t: t.pop("lm_head.weight"), "no tensor lm_head.weight"),
    (
      lambda t: t.update({"b.x": t[Q], "a.y": t[Q]}),
      "unknown tensors a.y, b.x",
    ),
    (
      lambda t: t.update({Q.replace("1", "2", 1): t[Q]}),
      "unknown tensors model.layers.2.self_attn.q_proj.weight",
    ),
    (damage_shape, f"{Q} is (23, 16), not (24, 16)"),
    (damage_transposed, f"{Q} is (16, 24), not (24, 16)"),
    (damage_nan, f"{Q} holds values that are not finite"),
    (damage_inf, f"{Q} holds values that are not finite"),
  ],
)
def test_refuses_tensors_by_name(saved, change, message):
  rewrite(saved, change)
  refused(saved, saved, message)


def test_refuses_a_config_of_other_sizes(saved):
  edit(saved, num_hidden_layers=3)
  refused(saved, "no tensor model.layers.2.")
  edit(saved, num_hidden_layers=1)
  refused(saved, "unknown tensors model.layers.1.")
  edit(saved, num_hidden_layers=2, vocab_size=33)
  refused(saved, "model.embed_tokens.weight is (32, 16), not (33, 16)")


def test_refuses_damaged_bytes(saved):
  path = saved / WEIGHTS
  whole = path.read_bytes()
  for damaged in (
    whole[:-10],
    whole[: len(whole) // 2],
    whole[:20],
    whole[:4],
    b"",
    b"\xff" * 64 + whole[64:],
    whole[:8] + b"[" + whole[9:],
    whole[:8] + b"\xff\xfe\n" + whole[11:],
    b"<html>\nnot here\n</html>\n",
  ):
    path.write_bytes(damaged)
    refused(saved, path, "is damaged")


@pytest.mark.parametrize(
  "name", ["../x.safetensors", "/etc/passwd", "a/b", "..", ""]
)
def test_refuses_an_index_that_points_outside(saved, name):
  where = split(saved)
  outside = saved.parent / "x.safetensors"
  (saved / where[Q]).rename(outside)  # it exists, and is not read
  where = {k: name if v == where[Q] else v for k, v in where.items()}
  (saved / INDEX).write_text(json.dumps({"weight_map": where}))
  refused(saved, saved, repr(name) if name not in ("", "..") else "")


def test_refuses_an_index_that_is_not_whole(saved):
  where = split(saved)
  (saved / where[Q]).unlink()
  refused(saved, saved / where[Q], "is missing")
  texts = (
    "{",
    "[]",
    "{}",
    '{"weight_map": {}}',
    '{"weight_map": ["model.safetensors"]}',
    '{"weight_map": {"a": 1}}',
  )
  for text in texts:
    (saved / INDEX).write_text(text)
    refused(saved, saved / INDEX if text != texts[-1] else saved / "1")


def torch_model(directory, tied):
  """A random Qwen2 of transformers: no bias 0, no norm 1."""
  torch = pytest.importorskip("torch")
  from transformers import Qwen2Config, Qwen2ForCausalLM

  torch.manual_seed(0)
  config = Qwen2Config(
    vocab_size=320, hidden_size=64, intermediate_size=160, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
    rms_norm_eps=1e-5, rope=Rope(1e4), tie_word_embeddings=tied,
    pad_token_id=0, bos_token_id=None, eos_token_id=None,
  )  # fmt: skip
  model = Qwen2ForCausalLM(config).eval().float()
  with torch.no_grad():
    for name, p in model.named_parameters():
      by = 0.3 if "norm" in name or name.endswith("bias") else 0.2
      p.add_(by * torch.randn_like(p))
  model.save_pretrained(directory, max_shard_size="200KB")
  return torch, model


def torch_logits(torch, model, tokens, mask):
  position = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
  with torch.no_grad():
    out = model(
      torch.tensor(tokens),
      attention_mask=torch.tensor(mask.astype(np.int64)),
      position_ids=torch.tensor(position),
    )
  return out.logits.numpy()


@pytest.mark.parametrize("tied", [False, True])
def test_logits_and_greedy_tokens_are_those_of_transformers(tmp_path, tied):
  torch, model = torch_model(tmp_path / "theirs", tied)
  from transformers import AutoModelForCausalLM

  assert (tmp_path / "theirs" / INDEX).exists()
  policy, params = hf.load(tmp_path / "theirs")
  assert policy.tied == tied
  rng = np.random.default_rng(0)
  tokens = rng.integers(1, 320, (3, 24))
  mask = np.arange(24) >= np.asarray([[0], [7], [15]])
  want = torch_logits(torch, model, tokens, mask)
  apply = jax.jit(policy.logits)
  got = apply(params, jnp.asarray(tokens), jnp.asarray(mask))
  gap, scale = np.abs(got - want)[mask].max(), np.abs(want[mask]).max()
  print(f"tied {tied}: |jax - torch| {gap:.2e} of logits up to {scale:.2f}")
  assert gap <= 1e-5 * scale

  # Greedy, 32 tokens after a prompt of 8; one program for every length.
  prompt = tokens[:1, :8]
  with torch.no_grad():
    theirs = model.generate(
      torch.tensor(prompt), attention_mask=torch.ones(1, 8, dtype=torch.long),
      max_new_tokens=32, do_sample=False,
    )[0].tolist()  # fmt: skip
  ours = prompt[0].tolist()
  while len(ours) < 40:
    row = np.zeros((1, 40), np.int32)
    row[0, : len(ours)] = ours
    logits = apply(params, jnp.asarray(row), jnp.asarray(row > 0))
    ours.append(int(jnp.argmax(logits[0, len(ours) - 1])))
    if ours[-1] == 0:
      break
  assert len(set(ours[8:])) > 5
  assert ours == theirs[: len(ours)]

  # And back: what we write, transformers reads.
  hf.save(tmp_path / "ours", policy, params)
  back = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
  assert back.dtype == torch.float32
  original = dict(model.named_parameters())
  for name, value in back.named_parameters():
    assert torch.equal(value, original.pop(name)), name
  assert not original
  again = torch_logits(torch, back.eval(), tokens, mask)
  np.testing.assert_allclose(again[mask], want[mask], atol=1e-6 * scale)


def test_the_embedded_policy_is_a_directory_that_loads():
  assets = pathlib.Path(hf.__file__).parent / "assets"
  found = sorted(path.parent for path in assets.rglob("config.json"))
  if not found:
    pytest.skip("no embedded policy yet")
  for directory in found:
    policy, params = hf.load(directory)
    count = sum(a.size for a in jax.tree.leaves(params))
    assert 0 < count <= 3_000_000
    assert params["embed"]["embedding"].shape == (policy.vocab, policy.width)


@pytest.mark.parametrize(
  "field, value",
  [("rms_norm_eps", "x"), ("rms_norm_eps", -5), ("rope_theta", "y")],
)
def test_numbers_of_the_config_are_checked(tmp_path, field, value):
  policy, params = hf.load(pathlib.Path(hf.__file__).parent / "assets")
  hf.save(tmp_path, policy, params)
  path = tmp_path / "config.json"
  config = json.loads(path.read_text()) | {"rope_parameters": {}, field: value}
  path.write_text(json.dumps(config))
  with pytest.raises(ValueError, match=f"{field} {value!r} is not a positive"):
    hf.load(tmp_path)


def test_an_unknown_dtype_is_refused():
  with pytest.raises(ValueError, match="dtype 'int7'"):
    hf.load(pathlib.Path(hf.__file__).parent / "assets", dtype="int7")
