"""What is known of a processor: memory, speed, links.

Figures of the vendors' data sheets, dense and without sparsity. Memory is what
a program may ask of a device before XLA's pool takes its share.
"""

import dataclasses

GB = 1e9
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
  """One device."""

  kind: str
  platform: str  # as in Target
  memory_bytes: int
  bandwidth: float  # of its memory, bytes/s
  flops: float  # bfloat16 products, 1/s
  link: float  # to the other devices of its host or slice, one way, bytes/s
  joined: int  # devices that such links join
  between: float  # to others, bytes/s


# NVIDIA H100 SXM and H200 data sheets: NVLink 900 GB/s both ways; hosts are
# joined by 400 Gb/s for each GPU. Memory as the driver reports it.
_H100 = Chip(
  "h100", "gpu", 84_942_979_072, 3.35e12, 989e12, 450 * GB, 8, 50 * GB
)
_H200 = dataclasses.replace(
  _H100, kind="h200", memory_bytes=150_754_820_096, bandwidth=4.8e12
)


def _tpu(kind, gib, bandwidth, flops, link) -> Chip:
  return Chip(kind, "tpu", int(gib * GIB), bandwidth, flops, link, 4096, link)


# Google Cloud's pages of each TPU; links are those of a chip, all directions.
CHIPS = {
  chip.kind: chip
  for chip in (
    _H100,
    _H200,
    _tpu("v5p", 95.74, 2.765e12, 459e12, 600 * GB),
    _tpu("v5e", 15.75, 0.819e12, 197e12, 200 * GB),
    _tpu("v6e", 31.25, 1.64e12, 918e12, 448 * GB),
  )
}
