"""Tensors of a directory: what is read of them, and what is refused."""

import json
import shutil

import numpy as np
import pytest
import safetensors.numpy
import tiers
from saved_models import (
  INDEX,
  WEIGHTS,
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
from brorl_jax.model import huggingface, weight_files


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

  opened = weight_files.open_all
  monkeypatch.setattr(
    weight_files,
    "open_all",
    lambda *a: {k: Slice(v) for k, v in opened(*a).items()},
  )
  huggingface.load(tmp_path / "model", mesh=mesh)
  # Matrices are spread over both axes, an expert's over "data" alone.
  whole = {got for got, of in read if got == of}
  assert max(whole) <= 24  # norms, biases, and nothing larger
  assert all(got * 2 <= of for got, of in read if of > 24)
  assert policy.experts == 8


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
  tiers.some(
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
      (damage_nan, f"{Q} ... finite"),
      (damage_inf, f"{Q} ... finite"),
    ],
    2,
  ),
)
def test_refuses_tensors_by_name(saved, change, message):
  rewrite(saved, change)
  refused(saved, saved, message)


@pytest.mark.ci
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
  "name", tiers.some(["../x.safetensors", "/etc/passwd", "a/b", "..", ""], 1)
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
    "{", "[]", "{}", '{"weight_map": {}}',
    '{"weight_map": ["model.safetensors"]}', '{"weight_map": {"a": 1}}',
  )  # fmt: skip
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


def test_a_type_that_is_not_a_weight_is_refused(saved):
  rewrite(saved, lambda t: t.update({Q: t[Q].astype(np.int8)}))
  refused(saved, f"{Q} ... I8 ... of F32, BF16, F16")


def test_a_pickle_is_never_read(saved):
  for name in ("pytorch_model.bin", "consolidated.00.pth", "model.gguf"):
    copy = saved.parent / name
    shutil.copytree(saved, copy)
    (copy / WEIGHTS).rename(copy / name)
    refused(copy, WEIGHTS, f"missing ... {name}")


def test_an_index_is_believed_only_if_it_is_right(saved):
  """Or another file's tensor of the same name would be taken."""
  where = split(saved)
  first, second = sorted(set(where.values()))[:2]
  tensors = safetensors.numpy.load_file(saved / first)
  again = {**tensors, Q: np.ones((24, 16), np.float32)}
  assert where[Q] != first
  safetensors.numpy.save_file(again, saved / first)
  refused(saved, saved / INDEX, f"right about {Q}")
  safetensors.numpy.save_file(tensors, saved / first)
  for wrong in (
    {**where, "nowhere": first},
    {k: v for k, v in where.items() if k != Q},
    {k: {first: second, second: first}.get(v, v) for k, v in where.items()},
  ):
    (saved / INDEX).write_text(json.dumps({"weight_map": wrong}))
    refused(saved, saved / INDEX, "is not right about")


def test_a_pointer_of_git_lfs_is_told_apart(saved):
  text = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
  (saved / WEIGHTS).write_text(text)
  refused(saved, WEIGHTS, "is a pointer; run git lfs pull")


def test_more_layers_than_anybody_has_are_refused_at_once(saved):
  edit(saved, num_hidden_layers=10_000)
  refused(saved, "120,003 ... 27")


def test_names_of_others_stay_in_their_line(saved):
  rewrite(saved, lambda t: t.update({"a\nb" + "c" * 999: t[Q]}))
  refused(saved, "unknown tensors 'a\\nbccc")


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
