"""Directories in and out: what is read of them, what is refused."""

import dataclasses
import functools
import json
import os
import pathlib
import shutil

import hub_cache
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiers
from messages import refuses
from saved_models import (
  INDEX,
  TINY,
  WEIGHTS,
  WIDE,
  Q,
  edit,
  random_params,
  refused,
  rewrite,
  routed,
  same,
  split,
)

from brorl_jax.many import meshes
from brorl_jax.many.meshes import Axes
from brorl_jax.model import huggingface, sharding
from brorl_jax.model.huggingface import ASSETS
from brorl_jax.model.spec import Rope


@pytest.mark.ci
def test_what_is_saved_is_loaded_bit_for_bit(tmp_path):
  policy, params = TINY, random_params()
  huggingface.save(tmp_path / "a" / "b", policy, params)
  got, loaded = huggingface.load(str(tmp_path / "a" / "b"))
  assert got == policy
  same(loaded, params)
  assert {type(a) for a in jax.tree.leaves(loaded)} == {type(jnp.zeros(()))}
  huggingface.save(tmp_path / "again", got, loaded)
  for name in (WEIGHTS, "config.json"):
    a, b = (tmp_path / "a" / "b" / name, tmp_path / "again" / name)
    assert a.read_bytes() == b.read_bytes()


@pytest.mark.ci
@pytest.mark.parametrize(
  "fsdp, tensor", tiers.some([(8, 1), (1, 4), (4, 2)], 1, 1)
)
def test_files_come_to_any_mesh_as_the_same_values(tmp_path, fsdp, tensor):
  """FSDP, tensor, and both; of a dense and of a routed policy."""
  devices = jax.devices()[: fsdp * tensor]
  mesh = meshes.over([devices], Axes(fsdp=fsdp, tensor=tensor))
  dense = random_params(WIDE)
  huggingface.save(tmp_path / "dense", WIDE, dense, shard_bytes=7000)
  for name in ("dense", "routed"):
    directory = tmp_path / name
    want = routed(directory)[1] if name == "routed" else dense
    assert len(list(directory.glob("model-*.safetensors"))) >= 3
    policy, params = huggingface.load(directory, mesh=mesh)
    same(params, want)
    abstract = jax.eval_shape(policy.init, jax.random.key(0))
    places = sharding.param_shardings(abstract, mesh)
    assert jax.tree.map(lambda a: a.sharding, params) == places


@pytest.mark.ci
def test_parameters_may_stay_in_half_precision(tmp_path):
  half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), random_params())
  huggingface.save(tmp_path / "a", TINY, half)
  _, loaded = huggingface.load(tmp_path / "a", param_dtype="bfloat16")
  same(loaded, half)
  huggingface.save(tmp_path / "b", TINY, loaded)
  for name in (WEIGHTS, "config.json"):
    assert (tmp_path / "a" / name).read_bytes() == (
      tmp_path / "b" / name
    ).read_bytes()
  with pytest.raises(ValueError, match="param_dtype 'int8' is neither"):
    huggingface.load(tmp_path / "a", param_dtype="int8")


def test_a_mesh_that_does_not_fit_is_refused(saved):
  mesh = meshes.make_mesh(fsdp=1, tensor=8)
  with pytest.raises(ValueError, match=r"blocks/down/kernel .* 8 devices"):
    huggingface.load(saved, mesh=mesh)


def test_several_files_with_an_index_are_one_checkpoint(saved):
  assert len(set(split(saved).values())) == 3
  policy, params = huggingface.load(saved)
  assert policy == TINY
  same(params, random_params())


def test_a_repeated_head_of_a_tied_policy_is_ignored(tmp_path):
  policy = dataclasses.replace(TINY, tied=True)
  huggingface.save(tmp_path, policy, random_params(policy))
  name = "model.embed_tokens.weight"
  rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t[name]}))
  same(huggingface.load(tmp_path)[1], random_params(policy))


def test_refuses_what_is_not_a_checkpoint(tmp_path, saved):
  refused(tmp_path / "nowhere", tmp_path / "nowhere", "directory")
  refused(saved / WEIGHTS, saved / WEIGHTS, "directory")
  (tmp_path / "empty").mkdir()
  refused(tmp_path / "empty", tmp_path / "empty" / "config.json")
  for text in ("{", "", "[1]", '"text"'):
    (saved / "config.json").write_text(text)
    refused(saved, saved / "config.json")


def test_refuses_a_config_of_other_sizes(saved):
  edit(saved, num_hidden_layers=3)
  refused(saved, "no tensor model.layers.2.")
  edit(saved, num_hidden_layers=1)
  refused(saved, "unknown tensors model.layers.1.")
  edit(saved, num_hidden_layers=2, vocab_size=33)
  refused(saved, "model.embed_tokens.weight is (32, 16), not (33, 16)")
  edit(saved, num_hidden_layers=10_000)  # at once
  refused(saved, "120,003 ... 27")


def test_a_type_that_cannot_be_stored_is_refused(tmp_path):
  with pytest.raises(ValueError, match=r"'int4'.*of float32"):
    huggingface.save(tmp_path, TINY, random_params(), dtype="int4")


def test_an_interrupted_save_leaves_no_model(tmp_path, monkeypatch):
  """Over an older one, which is gone first: never half of each."""
  huggingface.save(tmp_path, TINY, random_params(), shard_bytes=4000)
  written = []
  write = safetensors.numpy.save_file

  def stops(tensors, path, metadata):
    written.append(path)
    if len(written) == 2:
      raise KeyboardInterrupt
    write(tensors, path, metadata)

  monkeypatch.setattr(safetensors.numpy, "save_file", stops)
  with pytest.raises(KeyboardInterrupt):
    huggingface.save(tmp_path, TINY, random_params(), shard_bytes=5000)
  refused(tmp_path, "config.json ... read")
  assert len(list(tmp_path.glob("model*"))) == 1
  monkeypatch.undo()
  huggingface.save(tmp_path, TINY, random_params())
  same(huggingface.load(tmp_path)[1], random_params())
  assert not (tmp_path / INDEX).exists()


def test_the_index_says_where_every_tensor_is(tmp_path):
  huggingface.save(tmp_path, TINY, random_params(), shard_bytes=4000)
  index = json.loads((tmp_path / INDEX).read_text())
  size = 0
  for path in tmp_path.glob("model-*.safetensors"):
    tensors = safetensors.numpy.load_file(path)
    of_file = sum(t.nbytes for t in tensors.values())
    assert of_file <= 4000 or len(tensors) == 1
    size += of_file
    assert {index["weight_map"].pop(name) for name in tensors} == {path.name}
    assert path.stat().st_mode & 0o777 == 0o644
  assert not index["weight_map"] and index["metadata"]["total_size"] == size


def test_a_policy_that_its_config_does_not_describe_is_not_saved(tmp_path):
  odd = dataclasses.replace(TINY, qk_norm=True)
  with pytest.raises(ValueError, match="qk_norm = False"):
    huggingface.save(tmp_path / "odd", odd, random_params(odd))
  huggingface.save(tmp_path / "model", TINY, random_params())
  policy, params = huggingface.load(tmp_path / "model")
  changed = dataclasses.replace(policy, rope=Rope(7.0))
  with pytest.raises(ValueError, match="changed after"):
    huggingface.save(tmp_path / "odd", changed, params)
  assert not list((tmp_path / "odd").iterdir())


def test_a_tokenizer_goes_with_the_weights_it_belongs_to(tmp_path):
  assets = pathlib.Path(huggingface.__file__).parents[1] / "assets"
  policy, params = huggingface.load(assets)
  huggingface.save(tmp_path, policy, params, source=assets)
  names = {path.name for path in assets.glob("*.*")} - {"README.md"}
  assert {path.name for path in tmp_path.iterdir()} == names
  for name in names - {"config.json"}:
    assert (tmp_path / name).read_bytes() == (assets / name).read_bytes()


def test_a_name_of_the_hub_is_downloaded(tmp_path, monkeypatch):
  asked = []

  def download(name, *, revision, allow_patterns, local_files_only):
    asked.append((name, revision))
    assert {"config.json", "model*.safetensors", INDEX} < set(allow_patterns)
    assert not any(p.endswith((".bin", ".py")) for p in allow_patterns)
    assert not local_files_only
    return str(tmp_path)

  hub = huggingface.huggingface_hub
  monkeypatch.setattr(hub, "snapshot_download", download)
  for name in ("config.json", WEIGHTS):
    (tmp_path / name).touch()
  assert huggingface.locate("maker/model-1.5B") == tmp_path
  assert huggingface.locate("maker/model-1.5B@refs/pr/1") == tmp_path
  assert huggingface.locate(str(tmp_path)) == tmp_path  # is not asked for
  for wrong in ("/no/where", "model", "a/b/c", "a/b@", "a/b@c@d", "a/b@/c"):
    with pytest.raises(ValueError, match="directory"):
      huggingface.locate(wrong)
  name = "maker/model-1.5B"
  assert asked == [(name, None), (name, "refs/pr/1")]


def test_a_revision_is_found_in_the_cache_of_the_hub(tmp_path, monkeypatch):
  one, other = hub_cache.made(tmp_path, monkeypatch, v1=ASSETS, v2=ASSETS)
  for plan in (False, True):
    locate = functools.partial(huggingface.locate, plan=plan)
    assert (locate("maker/model@v1"), locate("maker/model@v2")) == (one, other)
    assert locate(f"maker/model@{one.name}") == one
  # A directory of that name comes first.
  (tmp_path / "maker" / "model@v2").mkdir(parents=True)
  monkeypatch.chdir(tmp_path)
  assert str(huggingface.locate("maker/model@v2")) == "maker/model@v2"


def test_what_the_cache_lacks_is_downloaded_by_the_command_told(
  tmp_path, monkeypatch
):
  one, other = hub_cache.made(tmp_path, monkeypatch, v1=ASSETS, v2=ASSETS)
  (one / WEIGHTS).unlink()
  shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
  (other / INDEX).write_text(json.dumps({"weight_map": shards}))
  (other / "model-1.safetensors").touch()
  for revision, lacks in ("v1", WEIGHTS), ("v2", "model-2.safetensors"):
    name = f"maker/model@{revision}"
    command = f"'hf download maker/model --revision {revision}'"
    with refuses(ValueError, f"'{name}' ... {lacks} ... {command}"):
      huggingface.locate(name)
    huggingface.locate(name, plan=True)  # needs no weights
  with refuses(ValueError, "'hf download maker/model' ... --local-dir model"):
    huggingface.locate("maker/model")
  (one / "config.json").unlink()
  command = "'hf download maker/model config.json --revision v1'"
  with refuses(ValueError, f"a plan needs only ... {command}"):
    huggingface.locate("maker/model@v1", plan=True)
  (other / INDEX).unlink()
  (other / WEIGHTS).unlink()
  (other / "pytorch_model.bin").touch()  # no command brings other weights
  with refuses(ValueError, "pytorch_model.bin may be a pickle"):
    huggingface.load(huggingface.locate("maker/model@v2"))


@pytest.mark.parametrize("name", huggingface.EMBEDDED)
def test_an_embedded_policy_is_a_directory_that_loads(name):
  policy, params = huggingface.load(huggingface.locate(name))
  count = sum(a.size for a in jax.tree.leaves(params))
  assert 0 < count <= 3_000_000
  assert params["embed"]["embedding"].shape == (policy.vocab, policy.width)


def test_a_device_reads_its_own_part_of_one_layer(tmp_path, monkeypatch):
  policy, _ = routed(tmp_path / "model")
  mesh = meshes.make_mesh(fsdp=2, tensor=4)
  read = []

  class Slice:
    def __init__(self, inner):
      self.inner, self.get_shape = inner, inner.get_shape
      self.get_dtype = inner.get_dtype

    def __getitem__(self, index):
      got = self.inner[index]
      read.append((got.size, int(np.prod(self.get_shape()))))
      return got

  opened = huggingface.open_tensors
  monkeypatch.setattr(huggingface, "open_tensors",
    lambda *a: {k: Slice(v) for k, v in opened(*a).items()})  # fmt: skip
  huggingface.load(tmp_path / "model", mesh=mesh)
  # Matrices are spread over both axes, an expert's over "data" alone.
  whole = {got for got, of in read if got == of}
  assert max(whole) <= 24  # norms, biases, and nothing larger
  assert all(got * 2 <= of for got, of in read if of > 24)
  assert policy.experts == 8


def damage_shape(t):
  t[Q] = t[Q][:-1]


def damage_type(t):
  t[Q] = t[Q].astype(np.int8)


def damage_nan(t):
  t[Q][3, 2] = np.nan


@pytest.mark.parametrize("change, message", tiers.some([
  (lambda t: t.pop(Q), f"no tensor {Q}"),
  (lambda t: t.update({"b.x": t[Q], "a.y": t[Q]}), "unknown tensors a.y, b.x"),
  (damage_shape, f"{Q} is (23, 16), not (24, 16)"),
  (damage_nan, f"{Q} ... finite"),
  (damage_type, f"{Q} ... I8 ... of F32, BF16, F16"),
], 2))  # fmt: skip
def test_refuses_tensors_by_name(saved, change, message):
  rewrite(saved, change)
  refused(saved, saved, message)


@pytest.mark.ci
def test_refuses_damaged_bytes(saved):
  path = saved / WEIGHTS
  whole = path.read_bytes()
  for damaged in (whole[:-10], whole[:20], b"",
      whole[:8] + b"\xff\xfe\n" + whole[11:],
      b"<html>\nnot here\n</html>\n"):  # fmt: skip
    path.write_bytes(damaged)
    refused(saved, path, "is damaged")


@pytest.mark.parametrize(
  "name", tiers.some(["../x.safetensors", "/etc/passwd", ""], 1)
)
def test_refuses_an_index_that_points_outside(saved, name):
  where = split(saved)
  outside = saved.parent / "x.safetensors"
  (saved / where[Q]).rename(outside)  # it exists, and is not read
  where = {k: name if v == where[Q] else v for k, v in where.items()}
  (saved / INDEX).write_text(json.dumps({"weight_map": where}))
  refused(saved, saved, repr(name) if name else "")


def test_refuses_an_index_that_is_not_whole(saved):
  where = split(saved)
  (saved / where[Q]).unlink()
  refused(saved, saved / where[Q], "is missing")
  texts = ("{", "[]", "{}", '{"weight_map": {}}',
    '{"weight_map": ["model.safetensors"]}',
    '{"weight_map": {"a": 1}}')  # fmt: skip
  for text in texts:
    (saved / INDEX).write_text(text)
    refused(saved, saved / INDEX)


def test_what_is_missing_or_too_much_is_listed_up_to_eight(saved):
  def shorten(t):
    for name in [name for name in t if "layers.1." in name]:
      del t[name]

  rewrite(saved, shorten)
  with pytest.raises(ValueError) as e:
    huggingface.load(saved)
  assert str(e.value).count("model.layers.1.") == 8
  assert str(e.value).endswith(" and 4 more")


@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_only_files_of_the_folder_are_read(saved, name):
  repo = saved.parent / "models--a--b"
  cached = repo / "snapshots" / "c"
  shutil.copytree(saved, cached)
  (repo / "blobs").mkdir()
  (cached / "config.json").rename(repo / "blobs" / "1")
  (cached / "config.json").symlink_to("../../blobs/1")
  huggingface.load(cached)  # so the hub's cache is made
  (path := saved / name).unlink(missing_ok=True)
  os.mkfifo(path)
  refused(saved, path, "is not a regular file")
  path.unlink()
  path.symlink_to(cached / WEIGHTS)
  refused(saved, path, "is a link out of its folder")


def test_a_pickle_is_never_read(saved):
  (saved / WEIGHTS).rename(saved / "pytorch_model.bin")
  refused(saved, WEIGHTS, "missing ... pytorch_model.bin")


def test_an_index_is_believed_only_if_it_is_right(saved):
  """Or another file's tensor of the same name would be taken."""
  where = split(saved)
  first, second = sorted(set(where.values()))[:2]
  tensors = safetensors.numpy.load_file(saved / first)
  again = {**tensors, Q: np.ones((24, 16), np.float32)}
  assert where[Q] != first
  safetensors.numpy.save_file(again, saved / first)
  refused(saved, saved / INDEX, f"{first} ... {Q}")
  safetensors.numpy.save_file(tensors, saved / first)
  for wrong in (
    {**where, "nowhere": first},
    {k: v for k, v in where.items() if k != Q},
    {k: {first: second, second: first}.get(v, v) for k, v in where.items()},
  ):
    (saved / INDEX).write_text(json.dumps({"weight_map": wrong}))
    refused(saved, saved / INDEX, "does not match")


def test_a_pointer_of_git_lfs_is_told_apart(saved):
  text = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
  (saved / WEIGHTS).write_text(text)
  refused(saved, WEIGHTS, "is a pointer; run git lfs pull")


def test_rotary_frequencies_of_old_files_are_not_weights(saved):
  name = "model.layers.0.self_attn.rotary_emb.inv_freq"
  rewrite(saved, lambda t: t.update({name: np.ones(3, np.float32)}))
  same(huggingface.load(saved)[1], random_params())


def test_a_layer_that_is_not_finite_is_named_with_its_expert(tmp_path):
  directory = tmp_path / "model"
  routed(directory)
  bad = "model.layers.1.mlp.experts.5.up_proj.weight"
  where = json.loads((directory / INDEX).read_text())["weight_map"]
  path = directory / where[bad]
  tensors = safetensors.numpy.load_file(path)
  tensors[bad][2, 3] = np.nan
  safetensors.numpy.save_file(tensors, path)
  refused(directory, f"{bad} ... finite")
