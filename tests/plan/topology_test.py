"""Tests of brorl_jax/plan/topology.py: names, and what is missing."""

import importlib.util
import os
from types import SimpleNamespace

import jax
import pytest
import runs_ahead as made
from messages import mentions

from brorl_jax.errors import UserError
from brorl_jax.many import meshes
from brorl_jax.many.meshes import Axes
from brorl_jax.model.spec import Target
from brorl_jax.plan import topology
from brorl_jax.plan.topology import CHIPS, Name


@pytest.fixture
def told(monkeypatch):
  fields = {}
  monkeypatch.setattr(jax.config, "update", fields.__setitem__)
  return fields


@pytest.fixture
def environment(monkeypatch):
  """Variables that may be changed, without pytest's own."""

  class Variables(dict):
    def __setitem__(self, name, value):
      if not name.startswith("PYTEST"):
        super().__setitem__(name, value)

  monkeypatch.setattr(os, "environ", Variables(XLA_FLAGS="--some"))
  yield os.environ
  monkeypatch.undo()


@pytest.fixture
def installed(monkeypatch):
  """The modules that are found: name -> folder."""
  folders = {}

  def find(name):
    if name.split(".")[0] == "nvidia" and not folders:
      raise ModuleNotFoundError(name)
    folder = folders.get(name)
    return folder and SimpleNamespace(submodule_search_locations=[folder])

  monkeypatch.setattr(importlib.util, "find_spec", find)
  return folders


def refusal(call, *args):
  with pytest.raises(UserError) as e:
    call(*args)
  (line,) = str(e.value).splitlines()
  return line


@pytest.mark.parametrize("text, kind, shape, platform, devices", [
  ("h100:1x8", "h100", (1, 8), "gpu", 8),
  ("h200:8x8", "h200", (8, 8), "gpu", 64),
  ("v5p:2x2x3", "v5p", (2, 2, 3), "tpu", 12),
  ("cpu:65", "cpu", (65,), "cpu", 65), ("here", "here", (), "here", 1),
])  # fmt: skip
def test_names(text, kind, shape, platform, devices):
  name = topology.parse(text)
  assert name == Name(kind, shape)
  assert (name.platform, name.devices, str(name)) == (platform, devices, text)


@pytest.mark.parametrize("text, says", [
  ("", "KIND:SHAPE ... h100:1x8 ... here"),
  ("h100", "KIND:SHAPE ... h100:1x8 ... here"), ("h100:", "KIND:SHAPE"),
  ("h100:1x", "KIND:SHAPE"), ("here:8", "'here' is unknown"),
  ("tpu:8", "'tpu' is unknown ... h100, h200, v5p, v5e, v6e, cpu, here"),
  ("h100:8", "hosts x GPUs of each ... h100:1x8"),
  ("h100:0x8", "hosts x GPUs of each"),
  ("v5p:8", "chips along each axis ... v5p:2x2x2"),
  ("cpu:2x2x2", "processes x devices of each ... cpu:64 ... cpu:8x8"),
  ("cpu:0", "processes x devices of each ... cpu:64"),
])  # fmt: skip
def test_a_wrong_name_is_refused_with_one_that_is_right(text, says):
  line = refusal(topology.parse, text)
  assert line.startswith(f"--topology={text}: ") and mentions(line, says), line


@pytest.mark.parametrize("text, found, missing, extra", [
  ("h100:1x8", [], "jax_cuda12_plugin", "aot-cuda"),
  ("h200:1x8", ["jax_cuda12_plugin"], "nvidia.cuda_nvcc", "aot-cuda"),
  ("v5p:2x2x2", ["jax_cuda12_plugin"], "libtpu", "aot-tpu"),
])  # fmt: skip
def test_a_compiler_that_is_missing_is_named(
  told, environment, installed, text, found, missing, extra
):
  installed |= dict.fromkeys(found, "/somewhere")
  line = refusal(topology.prepare, topology.parse(text))
  says = f"--topology={text} ... {missing} ... pip install ... [{extra}]"
  assert mentions(line, says), line


def test_a_gpu_that_is_not_here_is_compiled_for(told, environment, installed):
  installed["jax_cuda12_plugin"] = "/plugin"
  installed["nvidia.cuda_nvcc"] = "/nvcc"
  topology.prepare(topology.parse("h100:1x8"))
  # No GPU is looked for, and no program is kept that cannot be read back.
  assert told == {"jax_enable_compilation_cache": False, "jax_platforms": "cpu"}
  assert environment == {"XLA_FLAGS": "--some --xla_gpu_cuda_data_dir=/nvcc",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}  # fmt: skip


def test_a_tpu_that_is_not_here_is_compiled_for(told, environment, installed):
  installed["libtpu"] = "/libtpu"
  environment["TPU_WORKER_HOSTNAMES"] = "mine"
  topology.prepare(topology.parse("v5e:4x4"))
  assert told["jax_platforms"] == "cpu"
  assert environment == {
    "XLA_FLAGS": "--some", "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "mine", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  }  # fmt: skip


def test_cpu_devices_are_made_and_this_machine_is_as_it_is(told, environment):
  topology.prepare(Name("here"))
  assert told == {}
  topology.prepare(Name("cpu", (5,)))
  assert told == {"jax_enable_compilation_cache": False,
    "jax_platforms": "cpu", "jax_num_cpu_devices": 5}  # fmt: skip
  assert environment == {"XLA_FLAGS": "--some"}


@pytest.mark.parametrize("text, fraction, pool, options", [
  # A GPU's pool is a share of its memory; other programs than those that
  # were tried on a device are not chosen.
  ("h100:1x8", ".5", 42_471_489_536, ["xla_gpu_enable_triton_gemm"]),
  ("v5e:2x4", ".5", 16_911_433_728, []),
])  # fmt: skip
def test_what_xla_may_use(monkeypatch, text, fraction, pool, options):
  monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", fraction)
  eight = SimpleNamespace(devices=jax.devices())
  monkeypatch.setattr(topology, "_described", lambda *_: eight)
  name = topology.parse(text)
  where = topology.describe(name)
  assert where.target == Target(name.platform, 8, pool)
  assert [*where.options][:1] == options


def test_xla_is_told_of_the_gpu(monkeypatch):
  asked = {}
  describe = lambda **x: asked.update(x)
  monkeypatch.setattr(topology.topologies, "get_topology_desc", describe)
  topology._described(Name("h200", (3, 8)), CHIPS["h200"])
  assert asked["topology"] == asked["topology_name"] == "1x3x8"
  config = asked["target_config"]
  assert "device_memory_size: 150754820096" in config
  assert "memory_bandwidth: 4800000000000" in config
  assert 'device_description_str: "NVIDIA H200 SXM"' in config
  assert "cuda_compute_capability { major: 9" in config
  assert config.count("{") == config.count("}") == 3
  topology._described(Name("v5p", (2, 2, 2)), CHIPS["v5p"])
  assert asked["platform"] == "tpu" and asked["topology_name"] == "v5p:2x2x2"


def test_a_shape_that_xla_does_not_know_is_refused_in_one_line(monkeypatch):
  def describe(**_):
    raise RuntimeError("INVALID_ARGUMENT: no such thing\nmore of it")

  monkeypatch.setattr(topology.topologies, "get_topology_desc", describe)
  line = refusal(topology.describe, Name("v5p", (3, 5, 7)))
  assert mentions(line, "--topology=v5p:3x5x7 ... no such thing"), line


@pytest.mark.parametrize("axes", [Axes(fsdp=8), Axes(2, 2, 2)])
def test_a_mesh_has_the_devices_in_their_order(axes):
  mesh = made.topology(processes=4).mesh(axes)
  assert (meshes.of(mesh), [*mesh.devices.flat]) == (axes, jax.devices())


def test_a_mesh_of_a_tpu_has_its_hosts_one_after_the_other(monkeypatch):
  chip = lambda i: SimpleNamespace(
    id=i, process_index=i % 2, slice_index=0, platform="tpu"
  )
  where = topology.Topology(Name("v5e", (2, 4)), [*map(chip, range(8))],
    Target("tpu", 8, 1))  # fmt: skip
  asked = []
  mesh = meshes.make_mesh()
  monkeypatch.setattr(meshes, "over", lambda *x: (asked.append(x), mesh)[1])
  where.mesh(Axes(fsdp=8))
  ((groups, axes),) = asked
  assert axes == Axes(fsdp=8)
  assert [[d.id for d in group]
    for group in groups] == [[0, 2, 4, 6], [1, 3, 5, 7]]  # fmt: skip
