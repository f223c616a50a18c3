"""Tests of brorl_jax/plan/chips.py: figures of the data sheets."""

import pytest

from brorl_jax.plan.chips import CHIPS


@pytest.mark.parametrize(
  "kind, gigabytes, bandwidth, flops",
  [
    ("h100", 80, 3.35e12, 989e12),
    ("h200", 141, 4.8e12, 989e12),
    ("v5p", 95, 2.765e12, 459e12),
    ("v5e", 16, 0.819e12, 197e12),
    ("v6e", 32, 1.64e12, 918e12),
  ],
)
def test_memory_and_speed(kind, gigabytes, bandwidth, flops):
  chip = CHIPS[kind]
  assert chip.kind == kind
  assert (chip.bandwidth, chip.flops) == (bandwidth, flops)
  # What a driver reports lies between the decimal and the binary gigabytes of
  # the sheet, or a little below where firmware takes some.
  assert 0.97 * gigabytes * 2**30 < chip.memory_bytes < 1.01 * gigabytes * 2**30


def test_gpus_leave_their_host_and_chips_of_a_slice_do_not():
  gpu, tpu = CHIPS["h100"], CHIPS["v5e"]
  assert (gpu.platform, gpu.joined) == ("gpu", 8)
  # NVLink: 900 GB/s both ways; 400 Gb/s to other hosts.
  assert (gpu.link, gpu.between) == (450e9, 50e9)
  assert tpu.platform == "tpu" and tpu.between == tpu.link == 200e9
