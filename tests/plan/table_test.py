"""Tests of brorl_jax/plan/table.py: lines, and all in one of JSON."""

import json

import pytest
import runs_ahead as made

from brorl_jax.plan import table
from brorl_jax.plan.chips import Chip
from brorl_jax.plan.costs import Work
from brorl_jax.plan.hlo import Collective
from brorl_jax.plan.schedule import Part, Schedule

CHIP = Chip("x", "gpu", 1, 1e9, 1e12, 2.0**28, 64, 1.0)
GATHER = Collective("all-gather", 3 * 2**20, 8)
LITTLE = Collective("all-reduce", 2**20 - 1, 8)
REDUCE = Collective("reduce-scatter", 2**20, 16)
PLAN = Schedule(
  [Part("gradient", 20, Work(3e12, 5e9), 30.0)], 6.4, 1200, 180, 8
)


def test_memory_is_that_of_each_program_and_of_the_pool():
  some = [
    made.measured("gradient"),
    made.measured("decode", token_kernels=412, temp_bytes=500 * 2**20),
  ]
  head, first, second, last = table.memory(some, made.topology())
  assert head.split() == ("per device held itself peak of pool kernels".split())
  assert first.split() == ("gradient 2.00 MiB 3.00 MiB 5.00 MiB 0.5% 7".split())
  assert second.split() == (
    "decode 2.00 MiB 0.49 GiB 0.49 GiB 50.4% 412 per token".split()
  )
  assert last.split() == "pool 0.98 GiB".split()
  # Columns end below each other.
  ends = {line.index("MiB") for line in (first, second)}
  assert len(ends) == 1 and first.index("0.5%") + 4 == second.index("50.4%") + 5
  assert last.index("0.98 GiB") + 8 == second.rindex("0.49 GiB") + 8


def test_messages_of_a_mebibyte_with_the_largest_sum_first():
  some = [
    made.measured("apply", sent={LITTLE: 99}),
    made.measured("gradient", sent={REDUCE: 2, LITTLE: 1, GATHER: 512}),
  ]
  first, second = table.messages(some)
  assert first.split() == (
    "gradient all-gather 3.0 MiB x 512 over 8 = 1.50 GiB".split()
  )
  assert second.split() == (
    "gradient reduce-scatter 1.0 MiB x 2 over 16 = 0.00 GiB".split()
  )


def test_time_of_each_part_and_of_the_run():
  # 3 MiB 512 times, 7 of 8 parts of it, at 2^28 bytes a second: 5.25 s.
  some = [made.measured("gradient", sent={GATHER: 512})]
  head, part, total = table.time(PLAN, some, CHIP)
  assert head.split() == (
    "roofline of a step calls TFLOP each GB each links seconds".split()
  )
  assert part.split() == "gradient 20 3.00 5.0 105.0 s 30.0".split()
  assert total == (
    "  a step of 1,200 rollouts of 6 tokens: 30 s at best, 144,000 rollouts "
    "per hour; 180 steps: 12 device-hours"
  )


def test_json_says_all_of_it_in_one_line():
  some = [
    made.measured("gradient", sent={REDUCE: 3}),
    made.measured("decode", token_kernels=412),
  ]
  line = table.as_json(made.topology(), some, PLAN, {"more": {"a": 1}})
  assert "\n" not in line
  read = json.loads(line)
  assert read.pop("programs") == [
    {
      "name": "gradient",
      "held_bytes": 2 * 2**20,
      "temp_bytes": 2**20,
      "new_bytes": 2 * 2**20,
      "peak_bytes": 5 * 2**20,
      "kernels": 7,
      "token_kernels": None,
      "messages": [
        {"kind": "reduce-scatter", "size_bytes": 2**20, "group": 16, "count": 3}
      ],
    },
    {
      "name": "decode",
      "held_bytes": 2 * 2**20,
      "temp_bytes": 2**20,
      "new_bytes": 2 * 2**20,
      "peak_bytes": 5 * 2**20,
      "kernels": 7,
      "token_kernels": 412,
      "messages": [],
    },
  ]
  assert read == {
    "topology": "cpu:1x8",
    "devices": 8,
    "pool_bytes": made.POOL,
    "fits": True,
    "more": {"a": 1},
    "tokens": 6.4,
    "step_seconds": 30.0,
    "device_hours": 12.0,
    "rollouts_per_hour": 144000.0,
    "parts": [
      {
        "name": "gradient",
        "calls": 20,
        "flops": 3e12,
        "bytes": 5e9,
        "seconds": 30.0,
      }
    ],
  }


def test_json_of_a_machine_of_unknown_speed_has_no_time():
  line = table.as_json(made.topology(), [made.measured("a")], None, {})
  assert {"tokens", "parts", "step_seconds"}.isdisjoint(json.loads(line))


@pytest.mark.parametrize("over, fits", [(0, True), (1, False)])
def test_json_says_whether_all_fit(over, fits):
  # 4 MiB are held or new.
  large = made.measured("a", temp_bytes=made.POOL - 4 * 2**20 + over)
  some = [large, made.measured("b")]
  read = json.loads(table.as_json(made.topology(), some, None, {}))
  assert read["fits"] is fits
