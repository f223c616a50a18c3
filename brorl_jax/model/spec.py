"""The architecture of a decoder, and the machine that it is compiled for."""

import dataclasses
import functools
import math
import os
import pathlib
import re
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

_PROC, _GROUPS = pathlib.Path("/proc"), pathlib.Path("/sys/fs/cgroup")
# Of a control group, by version: where, its limit, what it uses, its kills.
_FILES = {
  1: "memory limit_in_bytes usage_in_bytes oom_control".split(),
  2: ". max current events".split(),
}
_RECLAIMABLE = "inactive_file active_file slab_reclaimable".split()
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
  """Memory of a device; on a CPU its share of what is available now.

  Rounded down to three binary digits (16, 20, 24, 28 GiB): it differs at every
  start, and with it sizes for which programs are compiled.
  """
  device = jax.local_devices()[0]
  stats = device.memory_stats() or {}
  if "bytes_limit" in stats:
    return stats["bytes_limit"]
  each = available_bytes() // jax.local_device_count()
  spare = max(each.bit_length() - 3, 0)
  return each >> spare << spare


def available_bytes() -> int:
  """What this process can take before it swaps or is killed; without /proc all
  that is built in, of which macOS compresses what is in use.
  """
  left = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
  if kibibytes := _numbers(_PROC / "meminfo").get("MemAvailable"):
    left.append(1024 * kibibytes)
  for group, (_, limit, usage, _) in _groups():
    for most in _numbers(group / f"memory.{limit}").values():  # none of "max"
      stat = _numbers(group / "memory.stat")
      # In version 1 the total has the groups below, as the usage does.
      pages = (stat.get(f"total_{x}", stat.get(x, 0)) for x in _RECLAIMABLE)
      used = _numbers(group / f"memory.{usage}").get("", 0) - sum(pages)
      left.append(most - max(used, 0))
  return max(min(left), 0)


def memory_kills() -> dict[str, int]:
  """Processes killed for memory so far, by control group, or of the machine."""
  found = {str(g): _numbers(g / f"memory.{end}") for g, (*_, end) in _groups()}
  found = {name: x["oom_kill"] for name, x in found.items() if "oom_kill" in x}
  return found or {"all": _numbers(_PROC / "vmstat").get("oom_kill", 0)}


def _groups() -> Iterator[tuple[pathlib.Path, Sequence[str]]]:
  """The control groups of this process and their `_FILES`, its own first: the
  limits of those around it, which a container may not see, are its limits too.
  """
  path = _PROC / "self" / "cgroup"
  for line in path.read_text().splitlines() if path.is_file() else ():
    number, kinds, name = line.split(":", 2)
    if number == "0" or "memory" in kinds.split(","):
      files, own = _FILES[2 if number == "0" else 1], pathlib.PurePath(name[1:])
      for group in (own, *own.parents):
        yield _GROUPS / files[0] / group, files


def _numbers(path: pathlib.Path) -> dict[str, int]:
  """The numbers of a file by name, "" where a line has nothing else."""
  text = path.read_text() if path.is_file() else ""
  return {k: int(n) for k, n in re.findall(r"^(\w*?):? *(\d+)\b", text, re.M)}


@dataclasses.dataclass(frozen=True)
class Rope:
  """How fast each pair of a head's components turns with the position.

  default: Su et al. 2021, arXiv:2104.09864. linear: Chen et al. 2023,
  arXiv:2306.15595. yarn: Peng et al. 2023, arXiv:2309.00071, section 3. llama3:
  Llama team 2024, arXiv:2407.21783. dynamic is default up to the positions the
  policy was trained on, and undefined for a cache beyond them.
  """

  theta: float
  kind: str = "default"
  factor: float = 1.0  # by which positions are stretched
  trained: int = 0  # positions before they were stretched
  # llama3: wavelengths above trained / low are stretched, below trained / high
  # left. yarn: pairs with fewer turns than low within `trained` are stretched,
  # with more than high left.
  low: float = 1.0
  high: float = 32.0
  truncate: bool = True  # yarn's limits are whole pairs
  scale: float = 1.0  # of cosine and sine

  KINDS = ("default", "linear", "dynamic", "yarn", "llama3")

  def frequency(self, head_size: int) -> Float[np.ndarray, " half"]:
    """Radians per position of pair i, theta^(-2i/K) before any stretching."""
    pair = np.arange(head_size // 2)
    plain = self.theta ** (-2.0 * pair / head_size)
    if self.kind in ("default", "dynamic"):
      left = np.ones_like(plain)
    elif self.kind == "linear":
      left = np.zeros_like(plain)
    elif self.kind == "llama3":
      turns = self.trained * plain / (2.0 * math.pi)
      left = np.clip((turns - self.low) / (self.high - self.low), 0.0, 1.0)
    else:  # yarn: linear in the pair, not in its turns
      at = lambda turns: (
        head_size
        * math.log(self.trained / (turns * 2.0 * math.pi))
        / (2.0 * math.log(self.theta))
      )
      first, last = at(self.high), at(self.low)
      if self.truncate:
        first, last = math.floor(first), math.ceil(last)
      first, last = max(first, 0), min(last, head_size - 1)
      left = 1.0 - np.clip((pair - first) / (last - first or 1e-3), 0.0, 1.0)
    mixed = left * plain + (1.0 - left) * plain / self.factor
    return mixed.astype(np.float32)

  def turn(
    self, position: Int[Array, "P #M Q"], head_size: int
  ) -> tuple[Float[Array, "P M Q half"], Float[Array, "P M Q half"]]:
    """Cosine and sine of every pair at these positions, in float32."""
    frequency = self.frequency(head_size)
    angle = jnp.multiply.outer(position.astype(jnp.float32), frequency)
    return self.scale * jnp.cos(angle), self.scale * jnp.sin(angle)


@dataclasses.dataclass(frozen=True)
class PolicySpec:
  """Shapes and constants of a decoder; hashable, so jit may close over it."""

  vocab: int  # V, rows of the embedding
  width: int  # D
  layers: int  # L
  heads: int  # H
  kv_heads: int  # G, divides H
  head_size: int  # K, even
  mlp: int  # F, of an expert if there are experts
  rope: Rope
  norm_eps: float
  tied: bool  # the head is the embedding, transposed
  dtype: str = "float32"  # of activations and caches; logits are float32
  max_positions: int = 32768  # of prompt and response together
  int8_cache: bool = False  # keys and values of responses, when sampling
  # What the backward pass recomputes: "layer" keeps only a layer's input,
  # "products" also its matrix products, "nothing" keeps everything.
  remat: str = "layer"
  # The mesh over whose axis "fsdp" parameters are sharded; `response_logp`
  # gathers them layer by layer. None if every row of devices has all of them.
  mesh: Mesh | None = None
  # For which programs are compiled.
  target: Target = dataclasses.field(default_factory=here, repr=False)
  # The config.json that it was read from, so that it can be written back.
  origin: str = dataclasses.field(default="", compare=False, repr=False)

  # Attention.
  qkv_bias: bool = False
  output_bias: bool = False
  qk_norm: bool = False  # RMSNorm of every head's query and key
  query_scale: float | None = None  # of the scores; K^-1/2 if None
  attention_softcap: float = 0.0  # of the scores; 0: none
  window: int = 0  # positions that a sliding layer sees, its own included
  sliding: tuple[bool, ...] = ()  # per layer; empty if none slides
  sliding_rope: Rope | None = None  # of sliding layers, if another

  # Feed-forward.
  mlp_bias: bool = False
  activation: str = "silu"  # or "gelu_tanh"
  experts: int = 0  # E; 0: one feed-forward for all tokens
  experts_per_token: int = 0
  normalize_experts: bool = False  # shares of the chosen ones add up to 1

  # Of the adapter that is trained in place of the weights; see adapters.py.
  lora_rank: int = 0  # r; 0: none
  lora_scale: float = 0.0
  lora_layers: tuple[str, ...] = ()

  # Around them.
  embed_scale: float = 1.0
  norm_offset: float = 0.0  # added to the scale of every norm
  post_norms: bool = False  # norms behind attention and feed-forward too
  final_softcap: float = 0.0  # of the logits; 0: none

  @property
  def attention_scale(self) -> float:
    return self.query_scale or self.head_size**-0.5
