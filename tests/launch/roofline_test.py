"""launch/bench/roofline: programs counted by hand, products, a made-up run."""

import dataclasses
from types import SimpleNamespace

import pytest
import runs_ahead as made
from small_policies import EXPERTS, TINY

from brorl_jax.plan.programs import Program
from launch.bench.roofline import __main__ as command
from launch.bench.roofline import costs, hlo
from launch.bench.roofline.__main__ import Launched
from launch.bench.roofline.costs import Counts, Speed, Work
from launch.bench.roofline.hlo import Account, Collective, Text

GATHER = Collective("all-gather", 8, 2)
REDUCE = Collective("all-reduce", 8, 2)
# A loop whose end is not known around one of 16 turns of a message and a copy,
# and a reduction before them.
GPU = """\
%step (p: f32[1]) -> f32[2] {
  %p = f32[1]{0} parameter(0)
  %g-start = (f32[1]{0}, f32[2]{0}) all-gather-start(%p), \
replica_groups={{0,1}}
  %g = f32[2]{0} all-gather-done(%g-start)
  ROOT %c = f32[2]{0} copy(%g)
}

%body (p: f32[2]) -> f32[2] {
  %p.1 = f32[2]{0} parameter(0)
  %n = f32[2]{0} fusion(%p.1), kind=kLoop, calls=%fused
  ROOT %w = f32[2]{0} while(%n), condition=%c, body=%step, \
backend_config={"known_trip_count":{"n":"16"}}
}

%small (p: f32[2]) -> f32[2] {
  %p.2 = f32[2]{0} parameter(0)
  ROOT %b = f32[2]{0} opt-barrier(%p.2)
}

ENTRY %main (a: f32[2]) -> f32[2] {
  %a = f32[2]{0} parameter(0)
  %r = f32[2]{0} all-reduce(%a), replica_groups=[1,2]<=[2], to_apply=%add
  %v = f32[2]{0} while(%r), condition=%c, body=%small
  ROOT %w.1 = f32[2]{0} while(%v), condition=%c, body=%body
}
"""
# A TPU does not write how often its loops turn: here 28 times, and until a
# number that is computed. It sends from inside of fusions, branches have names,
# and the description of a kernel has lines like the end of a computation.
TPU = """\
%sent (p: f32[8]) -> f32[64] {
  %p = f32[8]{0:T(256)} parameter(0)
  ROOT %whole = f32[64]{0:T(256)} all-gather(%p), \
replica_groups=mesh['x'=4,'y'=2,'z'=3] {'x','z'}
}

%fewer (c: (s32[], f32[8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(28), metadata={op_name="f"}
  %c.1 = (s32[]{:T(128)}, f32[8]{0:T(256)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%c.1), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %limit), direction=LT, metadata={}
}

%open (c: (s32[], s32[])) -> pred[] {
  %c.2 = (s32[]{:T(128)}, s32[]{:T(128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%c.2), index=0
  %n = s32[]{:T(128)} get-tuple-element(%c.2), index=1
  ROOT %lt.1 = pred[]{:T(512)} compare(%i.1, %n), direction=LT
}

%body (c: (s32[], f32[8])) -> (s32[], f32[8]) {
  %c.3 = (s32[]{:T(128)}, f32[8]{0:T(256)}) parameter(0)
  %k = f32[8]{0:T(256)} custom-call(%c.3), custom_call_target="tpu", config={
"body": {
}}, metadata={op_name="g"}
  %f = f32[64]{0:T(256)} fusion(%k), kind=kCustom, calls=%sent
  ROOT %t = (s32[]{:T(128)}, f32[8]{0:T(256)}) tuple(%c.3, %k)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0:T(256)} parameter(0)
  %w = (s32[]{:T(128)}, f32[8]{0:T(256)}) while(%a), condition=%fewer, \
body=%body
  %v = (s32[]{:T(128)}, f32[8]{0:T(256)}) while(%w), condition=%open, body=%body
  ROOT %j = f32[8]{0:T(256)} conditional(%a, %v, %v), \
branch_computations={%body, %body}
}
"""


def test_a_program_of_a_gpu():
  # What starts a message launches it, what ends it and a barrier do not.
  assert Text(GPU).account() == Account(1 + 1 + 16 * 2, {REDUCE: 1, GATHER: 16})
  # A turn is that of the open loop that launches most.
  assert Text(GPU).loop() == Account(1 + 16 * 2, {GATHER: 16})


def test_a_program_of_a_tpu():
  # A loop of 28 turns, one whose end is not known, two branches.
  message, turns = Collective("all-gather", 4 * 64, 12), 28 + 1 + 2
  assert Text(TPU).account() == Account(2 * turns, {message: turns})
  assert Text(TPU).loop() == Account(2, {message: 1})


@pytest.mark.parametrize(
  "kind, text, size, group",
  [
    # Two arrays are sent, two arrive; numbers are not sent.
    (
      "all-gather",
      "((f32[2]{0}, bf16[3,5]{1,0}), (f32[8]{0}, /*index=1*/bf16[12,5]{1,0}), "
      "u32[]{:S(2)}, s32[]{:S(2)}) all-gather-start(%a), "
      "replica_groups=[1,4]<=[4]",
      4 * 8 + 2 * 60,
      4,
    ),
    # A reduction writes where it reads: its start names each array once.
    ("all-reduce",
      "(f32[7]{0}, s32[]) all-reduce-start(%a, %b), replica_groups={{0,2,4}}",
      4 * 7 + 4, 3),
    ("ragged-all-to-all", "pred[5]{0} ragged-all-to-all(%a)", 5, 0),
  ],
)  # fmt: skip
def test_size_and_devices_of_a_message(kind, text, size, group):
  program = f"ENTRY %e (a: f32[2]) -> f32[2] {{\n  %x = {text}\n}}\n"
  assert [*Text(program).account().collectives] == [
    Collective(kind, size, group)
  ]


def test_bytes_of_an_array():
  of = {"f32[]": 4, "bf16[8,128]": 2048, "f8e4m3fn[5]": 5, "token[]": 0}
  assert {array: hlo.size_bytes(array) for array in of} == of


# Of TINY: V 37, D 16, L 2, H 6, G 2, K 4, F 20.
LAYER = 16 * 24 + 2 * 16 * 8 + 24 * 16 + 3 * 16 * 20
HEAD = 16 * 37
SPEED = Speed(10.0, 100.0, 8.0, 4, 2.0)


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
  assert Counts(TINY, copies=3).forward(13, 7, 5).bytes == moved + 3 * weights
  # All experts are read: 16 x 5 decide, 5 lie there.
  each = 16 * 24 + 2 * 16 * 8 + 24 * 16 + 5 * 3 * 16 * 20 + 16 * 5
  assert Counts(EXPERTS, copies=1).weights == 2 * each + HEAD


def test_a_gradient_reads_four_times_and_has_eight_operations_for_a_weight():
  counts = Counts(TINY, copies=1)
  assert counts.gradient(13, 0, 13).flops == 8 * 13 * (2 * LAYER + HEAD)
  assert counts.gradient(13, 7, 5).bytes == 4 * counts.forward(13, 7, 5).bytes


def test_a_step_reads_a_prompt_once_for_each_lane():
  # Keys and values of 2 layers x 2 heads of 4 numbers; logits are float32.
  counts = Counts(TINY, copies=1)
  work = counts.step(12, 3, 7, 5)
  assert work.flops == products(TINY, 12, 7 + 5, 12)
  keys = 2 * 2 * 2 * 4 * 4 * (3 * 7 + 12 * 5)
  assert work.bytes == counts.forward(12, 12, 12).bytes + keys + 4 * 12 * 37
  int8 = Counts(dataclasses.replace(TINY, int8_cache=True), 1)
  assert int8.key_bytes == 2 * 2 * 2 * (4 + 4)


@pytest.mark.parametrize("work, busy", [((1200, 30), 4.0), ((1200, 150), 5.0)])
def test_longer_of_products_and_memory_counts_and_messages_follow(work, busy):
  # 1,200 / 100 = 12 s of products, 150 / 10 = 15 s of memory, on 3 devices.
  sent = {Collective("all-to-all", 16, 2): 3}
  seconds = costs.seconds(Work(*work), sent, SPEED, 3)
  assert seconds == busy + 3 * 16 / 2 / 8


@pytest.mark.parametrize("kind, size, group, seconds", [
  # Of 120 bytes on 4 devices, what one sends: all but its own quarter; twice
  # that to add up and to spread; 3 parts of the size of what it keeps; all.
  ("all-gather", 120, 4, 90 / 8),
  ("all-reduce", 120, 4, 180 / 8),
  ("reduce-scatter", 120, 4, 360 / 8),
  ("collective-permute", 120, 4, 120 / 8),
  # 5 devices are one more than are joined: slower, between hosts.
  ("all-gather", 20, 5, 20 * 4 / 5 / 2),
])  # fmt: skip
def test_messages_around_a_ring(kind, size, group, seconds):
  sent = {Collective(kind, size, group): 5}
  assert costs.link_seconds(sent, SPEED) == pytest.approx(5 * seconds)


def test_a_step_of_a_large_policy_is_bound_by_memory():
  """1.5 billion weights on an H100: 3.1 GB at 3.35 TB/s."""
  large = dataclasses.replace(
    TINY, vocab=151_936, width=1536, layers=28, heads=12, kv_heads=2,
    head_size=128, mlp=8960, dtype="bfloat16",
  )  # fmt: skip
  step = Counts(large, copies=1).step(8, 1, 0, 0)
  least = costs.seconds(step, {}, costs.SPEEDS["h100"], 1)
  assert least == pytest.approx(0.92e-3, rel=0.02)


NAMES = "prefill", "decode", "read", "compact", "score", "gradient", "apply"


def parts(job, **sent):
  every = {name: sent.get(name, {}) for name in NAMES}
  speed = Speed(1e9, 1e12, 8.0, 64, 8.0)
  return {p.name: p for p in costs.step_of(job, every, speed).parts}


def test_a_step_of_a_run_by_hand():
  # 16 of 24 prompts are read together, the others then. 24 x 4 responses of 6
  # tokens in 16 lanes of 3 slots; 8 x 4 x 6 tokens to a microbatch. Two
  # minibatches, whose second needs old log-probabilities.
  job = made.run(kl_weight=0.0)
  found = parts(job)
  assert {k: v.calls for k, v in found.items()} == {
    "prefill": 1, "read": 0.5, "decode": 576 / 48, "score": 3.0,
    "gradient": 3.0, "apply": 2,
  }  # fmt: skip
  # Prompts have 10 tokens, each of which sees 5; responses are half done.
  cost = Counts(job.policy, copies=8)
  assert found["read"].work == cost.forward(160, 5, 16)
  assert found["decode"].work == cost.step(48, 16, 10, 3)
  both = cost.gradient(80, 5, 0) + cost.gradient(192, 13, 192)
  assert found["gradient"].work == both
  assert found["apply"].work == Work(20 * job.parameters, 28 * job.parameters)
  slow = parts(job, decode={Collective("collective-permute", 16, 8): 5})
  more = slow["decode"].seconds - found["decode"].seconds
  assert more == pytest.approx(12 * 5 * 16 / 8)
  assert parts(made.run(mean_tokens=2))["gradient"].calls == 1.0
  assert "score" not in parts(made.run(minibatches=1, kl_weight=0.0))


def test_a_loop_over_tokens_is_counted_by_token():
  done = SimpleNamespace(as_text=lambda: GPU)
  program = lambda name: (Program(name, None, 0), done)
  job = made.run()
  steps = command.training_spec(job).unchecked
  found = command.launched(job, [program("decode"), program("apply")])
  assert found["apply"] == Launched(34, None, {REDUCE: 1, GATHER: 16})
  assert found["decode"] == Launched(
    34, -(-33 // steps), {GATHER: -(-16 // steps)}
  )
