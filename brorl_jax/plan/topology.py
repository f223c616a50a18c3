"""Machines by name, for which programs are compiled on one without them.

The compilers' libraries come with the extras `aot-cuda` and `aot-tpu`.
"""

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from brorl_jax.errors import UserError, first_line
from brorl_jax.many import meshes
from brorl_jax.many.meshes import Axes
from brorl_jax.model.spec import Target, here, pool_fraction


@dataclasses.dataclass(frozen=True)
class Chip:
  """What is known of one device."""

  kind: str
  platform: str  # as in Target
  memory_bytes: int  # of which XLA's pool takes a share
  bandwidth: float  # of its memory, bytes/s
  flops: float  # bfloat16 products, 1/s, dense


# Memory of GPUs as the driver reports it; of TPUs as Google Cloud's pages say.
CHIPS = {
  chip.kind: chip
  for chip in (
    Chip("h100", "gpu", 84_942_979_072, 3.35e12, 989e12),
    Chip("h200", "gpu", 150_754_820_096, 4.8e12, 989e12),
    Chip("v5p", "tpu", int(95.74 * 2**30), 2.765e12, 459e12),
    Chip("v5e", "tpu", int(15.75 * 2**30), 0.819e12, 197e12),
    Chip("v6e", "tpu", int(31.25 * 2**30), 1.64e12, 918e12),
  )
}
# What XLA hears of a GPU that is not there; see its GpuTargetConfigProto. An
# H200 is an H100 with other memory.
_GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  memory_bandwidth: {bandwidth}
  device_memory_size: {memory}
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 2 }}
device_description_str: "NVIDIA {name}"
"""
_NAME = re.compile(r"(?P<kind>\w+):(?P<shape>\d+(x\d+)*)")
# How many numbers a shape has, and what they are.
_SHAPES = {
  "gpu": ((2,), "hosts x GPUs of each"),
  "tpu": ((2, 3), "chips along each axis"),
  "cpu": ((1, 2), "processes x devices of each"),
}
_EXTRA = {"gpu": "aot-cuda", "tpu": "aot-tpu"}
# XLA's products by Triton are chosen by trying them on the device. No kernel is
# run, so none is made fast: a fifth of the time of compiling.
_OPTIONS = {
  "gpu": {
    "xla_gpu_enable_triton_gemm": False,
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_gpu_disable_gpuasm_optimizations": True,
  }
}


@dataclasses.dataclass(frozen=True)
class Name:
  """`KIND:SHAPE`, or `here`."""

  kind: str
  shape: tuple[int, ...] = ()

  @property
  def platform(self) -> str:
    return CHIPS[self.kind].platform if self.kind in CHIPS else self.kind

  @property
  def devices(self) -> int:
    return math.prod(self.shape)

  def __str__(self) -> str:
    if self.kind == "here":
      return "here"
    return f"{self.kind}:{'x'.join(map(str, self.shape))}"


@dataclasses.dataclass(frozen=True)
class Topology:
  """Devices that programs can be compiled for."""

  name: Name
  devices: Sequence[Any]  # none if the compiler for them is not here
  target: Target

  @property
  def options(self) -> dict[str, Any]:
    away = self.name.kind != "here"
    return _OPTIONS.get(self.target.platform, {}) if away else {}

  @property
  def processes(self) -> int:
    """Of a run: one on each host, and of CPUs alone one on each device."""
    if self.target.platform == "tpu":
      hosts = len({device.process_index for device in self.devices})
      return hosts or -(-self.name.devices // 4)  # a host has four chips
    return 1 if self.name.kind == "here" else self.name.shape[0]

  def mesh(self, axes: Axes) -> Mesh:
    """As `meshes.make_mesh`, of these devices."""
    devices, each = self.devices, len(self.devices) // self.processes
    if self.target.platform == "tpu":
      devices = sorted(devices, key=lambda device: device.process_index)
    starts = range(0, len(devices), each)
    return meshes.over([devices[i : i + each] for i in starts], axes)


def named(text: str | None, *, fast: bool) -> Topology | None:
  """The topology of --topology and --fast; raises UserError if none fits.

  It has no devices if their compiler is missing, which --fast needs.
  """
  if text is None and fast:
    raise UserError("--fast needs --topology=, whose programs it compiles")
  if text is None:
    return None
  name = parse(text)
  try:
    prepare(name, fast=fast)
  except UserError as e:
    if fast:
      raise
    print(f"memory by arithmetic alone: {e}")
    return assumed(name)
  return describe(name)


def parse(text: str) -> Name:
  """The name of a topology; raises UserError if there is none like it."""
  if text == "here":
    return Name("here")
  found = _NAME.fullmatch(text)
  examples = (
    "h100:1x8, h200:8x8, v5p:2x2x2, v5e:4x4, v6e:4x4, cpu:64, cpu:8x8 or here"
  )
  if found is None:
    raise UserError(f"--topology={text}: give KIND:SHAPE, such as {examples}")
  name = Name(found["kind"], tuple(map(int, found["shape"].split("x"))))
  if name.kind not in (*CHIPS, "cpu"):
    raise UserError(
      f"--topology={text}: {name.kind!r} is unknown; choose "
      f"{', '.join((*CHIPS, 'cpu', 'here'))}"
    )
  numbers, what = _SHAPES[name.platform]
  if len(name.shape) not in numbers or not name.devices:
    raise UserError(
      f"--topology={text}: the shape of {name.kind} is {what}, such as "
      f"{examples}"
    )
  return name


def prepare(name: Name, *, fast: bool = False) -> None:
  """Tells jax and XLA, before either looks for devices.

  `fast` has XLA make less effort: it is 4 to 6 times faster for a TPU, whose
  programs then need up to a tenth more or less memory. Raises UserError if the
  compiler for these devices is not installed.
  """
  if fast:
    jax.config.update("jax_exec_time_optimization_effort", -1.0)
  # Programs for devices that are not here cannot be read back.
  if name.kind != "here":
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_platforms", "cpu")
  if name.kind == "cpu":
    jax.config.update("jax_num_cpu_devices", name.devices)
  if name.platform == "gpu":
    _require(name, "jax_cuda12_plugin")
    found = _require(name, "nvidia.cuda_nvcc")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    folder, *_ = [*found.submodule_search_locations]
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_cuda_data_dir={folder}"
  if name.platform == "tpu":
    _require(name, "libtpu")
    # Otherwise it asks the cloud's metadata server, which is not there either.
    for key, value in (
      ("TPU_SKIP_MDS_QUERY", "1"),
      ("TPU_WORKER_HOSTNAMES", "localhost"),
      ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
    ):
      os.environ.setdefault(key, value)


def _require(name: Name, module: str) -> Any:
  found = None
  with contextlib.suppress(ModuleNotFoundError):
    found = importlib.util.find_spec(module)
  if found is None:
    raise UserError(
      f"--topology={name}: its compiler is not installed ({module} is "
      f"missing); pip install 'brorl_jax[{_EXTRA[name.platform]}]', in a "
      "separate environment"
    )
  return found


def describe(name: Name) -> Topology:
  """The devices, after `prepare`; UserError if no machine has this shape."""
  if name.kind == "here":
    return Topology(name, jax.devices(), here())
  if name.kind == "cpu":
    devices = jax.devices("cpu")
    share = here().memory_bytes
    return Topology(name, devices, Target("cpu", len(devices), share))
  chip = CHIPS[name.kind]
  try:
    devices = _described(name, chip).devices
  except (RuntimeError, ValueError) as e:
    raise UserError(
      f"--topology={name}: XLA cannot describe it: {first_line(e)}"
    ) from None
  return assumed(name, devices)


def assumed(name: Name, devices: Sequence[Any] = ()) -> Topology:
  """A machine of CHIPS, of which nothing is asked."""
  chip = CHIPS[name.kind]
  usable = int(chip.memory_bytes * pool_fraction(chip.platform))
  target = Target(chip.platform, len(devices) or name.devices, usable)
  return Topology(name, devices, target)


def _described(name: Name, chip: Chip):
  if chip.platform == "tpu":
    return topologies.get_topology_desc(platform="tpu", topology_name=str(name))
  hosts, each = name.shape
  config = _GPU.format(
    bandwidth=int(chip.bandwidth),
    memory=chip.memory_bytes,
    name=f"{chip.kind.upper()} SXM",
  )
  shape = f"1x{hosts}x{each}"
  return topologies.get_topology_desc(
    platform="cuda", topology_name=shape, topology=shape, target_config=config
  )
