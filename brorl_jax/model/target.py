"""The machine for which programs are compiled; it need not be this one."""

import dataclasses
import functools
import os
import pathlib

import jax

# Where a container's limit stands, by version of its control groups.
_LIMITS = (
  "/sys/fs/cgroup/memory.max",
  "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


_DEFAULT_FRACTION = 0.75  # of a GPU, jax's own


@dataclasses.dataclass(frozen=True)
class Target:
  """What forms of a program, and their sizes, depend on."""

  platform: str  # "cpu", "gpu" (of NVIDIA), "rocm" or "tpu"
  devices: int  # of all its processes
  memory_bytes: int  # of a device

  @property
  def on_cpu(self) -> bool:
    return self.platform == "cpu"


@functools.cache
def here() -> Target:
  """The machine of this process. Asked once, and never while tracing."""
  platform = jax.default_backend()
  if "rocm" in jax.local_devices()[0].client.platform_version.lower():
    platform = "rocm"  # jax calls it a GPU too
  return Target(platform, jax.device_count(), device_bytes())


def pool_fraction(platform: str) -> float:
  """The share of a device's memory that XLA's pool takes, by the settings."""
  if platform != "gpu":
    return 1.0
  names = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
  given = next(filter(None, map(os.environ.get, names)), None)
  return float(given) if given else _DEFAULT_FRACTION


def device_bytes() -> int:
  """Memory of a device; on a CPU its share of what this machine has."""
  device = jax.local_devices()[0]
  stats = device.memory_stats() or {}
  if "bytes_limit" in stats:
    return stats["bytes_limit"]
  host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  for path in map(pathlib.Path, _LIMITS):
    text = path.read_text().strip() if path.is_file() else ""
    host = min(host, int(text)) if text.isdigit() else host
  return host // jax.local_device_count()
