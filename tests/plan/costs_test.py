"""Tests of brorl_jax/plan/costs.py, against products counted by hand."""

import dataclasses

import pytest
from small_policies import EXPERTS, TINY

from brorl_jax.plan import costs
from brorl_jax.plan.chips import CHIPS, Chip
from brorl_jax.plan.costs import Counts, Work
from brorl_jax.plan.hlo import Collective

# Of TINY: V 37, D 16, L 2, H 6, G 2, K 4, F 20.
LAYER = 16 * 24 + 2 * 16 * 8 + 24 * 16 + 3 * 16 * 20
HEAD = 16 * 37
CHIP = Chip("x", "gpu", 1, 10.0, 100.0, 8.0, 4, 2.0)


def products(policy, tokens, keys, logits):
  """Operations of every product of a pass, one m x n x k after the other."""
  D, H, G, K = policy.width, policy.heads, policy.kv_heads, policy.head_size
  shapes = [(tokens, D, H * K), (tokens, H * K, D)]  # queries, output
  shapes += 2 * [(tokens, D, G * K)]
  shapes += 2 * [(tokens * H, K, keys)]  # scores, and values by them
  if policy.experts:
    shapes += [(tokens, D, policy.experts)]
  chosen = policy.experts_per_token or 1
  shapes += 2 * chosen * [(tokens, D, policy.mlp)]
  shapes += chosen * [(tokens, policy.mlp, D)]
  shapes = policy.layers * shapes + [(logits, D, policy.vocab)]
  return sum(2 * m * n * k for m, n, k in shapes)


@pytest.mark.parametrize("policy", [TINY, EXPERTS], ids=["dense", "experts"])
def test_a_pass_has_the_operations_of_its_products(policy):
  work = Counts(policy, copies=1).forward(13, 7, 5)
  assert work.flops == products(policy, 13, 7, 5)


def test_bytes_of_a_pass():
  # float32; activations are 10 D + 3 F wide in each layer.
  moved = 13 * 2 * 4 * (10 * 16 + 3 * 20)
  weights = 4 * (2 * LAYER + HEAD)
  assert Counts(TINY, copies=1).forward(13, 7, 5).bytes == moved + weights
  assert Counts(TINY, copies=3).forward(13, 7, 5).bytes == moved + 3 * weights
  half = dataclasses.replace(TINY, dtype="bfloat16")
  work = Counts(half, copies=3).forward(13, 7, 5)
  assert 2 * work.bytes == moved + 3 * weights


def test_all_experts_are_read():
  # 16 x 5 decide; 5 experts lie there, 2 of them work on a token.
  attention = 16 * 24 + 2 * 16 * 8 + 24 * 16
  each = 3 * 16 * 20
  counts = Counts(EXPERTS, copies=1)
  assert counts.weights == 2 * (attention + 5 * each + 16 * 5) + HEAD


def test_a_gradient_is_eight_operations_for_a_weight_and_token():
  work = Counts(TINY, copies=1).gradient(13, 0, 13)
  assert work.flops == 8 * 13 * (2 * LAYER + HEAD)


def test_a_gradient_reads_four_times():
  # Forward, forward again, and twice back.
  counts = Counts(TINY, copies=2)
  once = counts.forward(13, 7, 5).bytes
  assert counts.gradient(13, 7, 5).bytes == 4 * once


def test_tokens_without_logits_pay_nothing_for_the_head():
  work = Counts(TINY, copies=1).gradient(13, 0, 0)
  assert work.flops == 8 * 13 * 2 * LAYER


def test_bytes_of_keys():
  # 2 layers, keys and values of 2 heads of 4 numbers; int8 has a float32 scale
  # for each head.
  of = lambda **x: Counts(dataclasses.replace(TINY, **x), 1).key_bytes
  assert of() == 2 * 2 * 2 * 4 * 4
  assert of(dtype="bfloat16") == 2 * 2 * 2 * 4 * 2
  assert of(int8_cache=True) == 2 * 2 * 2 * (4 + 4)


def test_a_step_reads_a_prompt_once_for_each_lane():
  counts = Counts(TINY, copies=1)
  work = counts.step(12, 3, 7, 5)
  assert work.flops == products(TINY, 12, 7 + 5, 12)
  # Logits are float32.
  keys = 128 * (3 * 7 + 12 * 5)
  assert work.bytes == counts.forward(12, 12, 12).bytes + keys + 4 * 12 * 37


def test_an_update_reads_and_writes_four_numbers():
  # Parameter and two moments both ways, the gradient one way: 7 x 4 bytes.
  assert Counts(TINY, 1).apply(11) == Work(220, 308)


def test_work_adds_and_multiplies():
  assert Work(1, 2) + Work(3, 5) == Work(4, 7)
  assert Work(3, 5).times(2) == Work(6, 10)


@pytest.mark.parametrize(
  "work, busy",
  [
    (Work(1200, 30), 4.0),  # 1,200 / 100 = 12 s of products, on 3 devices
    (Work(1200, 150), 5.0),  # 150 / 10 = 15 s of memory
  ],
)
def test_the_roofline(work, busy):
  assert costs.seconds(work, {}, CHIP, 3) == busy
  # Messages come after it, whatever the number of devices.
  sent = {Collective("all-to-all", 16, 2): 3}
  assert costs.seconds(work, sent, CHIP, 3) == busy + 3 * 16 / 2 / 8


@pytest.mark.parametrize(
  "kind, moved",
  [
    # Of 120 bytes on 4 devices, what one sends: all but its own quarter; twice
    # that to add up and to spread; 3 parts of the size of what it keeps; all.
    ("all-gather", 90),
    ("all-to-all", 90),
    ("ragged-all-to-all", 90),
    ("all-reduce", 180),
    ("reduce-scatter", 360),
    ("collective-permute", 120),
  ],
)
def test_messages_around_a_ring(kind, moved):
  of = lambda group: costs.link_seconds({Collective(kind, 120, group): 5}, CHIP)
  assert of(4) == pytest.approx(5 * moved / 8)


def test_messages_between_hosts_are_slower():
  # 5 devices are one more than are joined.
  of = lambda group: costs.link_seconds(
    {Collective("all-gather", 20, group): 1}, CHIP
  )
  assert of(5) == pytest.approx(20 * 4 / 5 / 2)
  assert of(4) == pytest.approx(20 * 3 / 4 / 8)


def test_messages_follow_each_other():
  some = {Collective("all-gather", 8, 2): 2, Collective("all-reduce", 8, 2): 1}
  assert costs.link_seconds(some, CHIP) == 2 * 0.5 + 1.0
  assert costs.link_seconds({}, CHIP) == 0
  # A message that does not name its devices has two at least.
  unknown = {Collective("all-gather", 8, 0): 2}
  assert costs.link_seconds(unknown, CHIP) == 1.0


def test_a_step_of_a_large_policy_is_bound_by_memory():
  """1.5 billion weights on an H100: 3.1 GB at 3.35 TB/s."""
  large = dataclasses.replace(
    TINY, vocab=151_936, width=1536, layers=28, heads=12, kv_heads=2,
    head_size=128, mlp=8960, dtype="bfloat16",
  )  # fmt: skip
  counts = Counts(large, copies=1)
  assert counts.weights == pytest.approx(1.54e9, rel=0.01)
  least = costs.seconds(counts.step(8, 1, 0, 0), {}, CHIPS["h100"], 1)
  assert least == pytest.approx(0.92e-3, rel=0.02)
