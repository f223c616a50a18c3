"""The machine of a run: hardware, flags and libraries that decide its bits."""

import contextlib
import importlib.metadata
import json
import os
import pathlib
import platform
from collections import Counter
from collections.abc import Collection
from typing import Any

import jax

PYTHON = platform.python_version()
# Settings of XLA and jax that may change how a number is computed.
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
_JAX_FLAGS = (
  "jax_default_matmul_precision",
  "jax_default_prng_impl",
  "jax_threefry_partitionable",
  "jax_disable_most_optimizations",
  "jax_enable_x64",
)
_CPUINFO = pathlib.Path("/proc/cpuinfo")
_LIBRARIES = (
  "jax",
  "jaxlib",
  "jax-cuda12-plugin",
  "libtpu",
  "flax",
  "optax",
  "orbax-checkpoint",
  "transformers",
  "tokenizers",
  "reasoning-gym",
  "mpmath",
  "sympy",
  "grain",
  "numpy",
)


def versions() -> dict[str, str]:
  """The installed libraries that may affect a number."""
  found = {}
  for name in _LIBRARIES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found[name] = importlib.metadata.version(name)
  return found


def cores() -> Collection[int]:
  """The cores that this process may use; macOS cannot tell which."""
  usable = getattr(os, "sched_getaffinity", None)
  return usable(0) if usable else range(os.cpu_count() or 1)


def here() -> dict[str, Any]:
  """The hardware and flags that may affect the last bits of a number."""
  kinds = Counter(device.device_kind for device in jax.devices())
  flags = {name: os.environ.get(name, "") for name in _FLAGS}
  flags |= {name: str(jax.config.values[name]) for name in _JAX_FLAGS}
  return {
    "cpus": len(cores()),
    "processor": _processor(),
    "devices": dict(kinds),
    "processes": jax.process_count(),
    "flags": flags,
  }


def _processor() -> str:
  """The name of this machine's processor."""
  try:
    lines = _CPUINFO.read_text().splitlines()
  except OSError:  # not on Linux
    lines = []
  named = [x for x in lines if x.startswith(("model name", "CPU part"))]
  return named[0].partition(":")[2].strip() if named else platform.processor()


def differences(workdir: pathlib.Path) -> dict[str, tuple[Any, Any]]:
  """What may change the bits of a run that goes on here: before and now.

  Hardware, flags, libraries and Python are compared with those of the last
  start.
  """
  path = workdir / "config.json"
  if not path.exists():
    return {}
  last = json.loads(path.read_text())
  before, now = last.get("machine") or {}, here()
  before |= before.pop("flags", {})
  now |= now.pop("flags")
  before |= {"Python": last.get("python"), **(last.get("versions") or {})}
  now |= {"Python": PYTHON, **versions()}
  both = {name: (before.get(name), now.get(name)) for name in {**now, **before}}
  return {name: (a, b) for name, (a, b) in both.items() if a != b}
