"""launch/bench/ahead: programs counted by hand, products, a made-up run."""

from types import SimpleNamespace

import pytest
import runs_ahead as made

from brorl_jax.plan.programs import Program
from launch.bench.ahead import __main__ as command
from launch.bench.ahead import hlo
from launch.bench.ahead.__main__ import Launched
from launch.bench.ahead.hlo import Account, Collective, Text

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


@pytest.mark.parametrize("kind, text, size, group", [
  # Two arrays are sent, two arrive; numbers are not sent.
  (
    "all-gather",
    "((f32[2]{0}, bf16[3,5]{1,0}), (f32[8]{0}, /*index=1*/bf16[12,5]{1,0}), "
    "u32[]{:S(2)}, s32[]{:S(2)}) all-gather-start(%a), "
    "replica_groups=[1,4]<=[4]",
    4 * 8 + 2 * 60, 4,
  ),
  # A reduction writes where it reads: its start names each array once.
  ("all-reduce",
    "(f32[7]{0}, s32[]) all-reduce-start(%a, %b), replica_groups={{0,2,4}}",
    4 * 7 + 4, 3),
  ("ragged-all-to-all", "pred[5]{0} ragged-all-to-all(%a)", 5, 0),
])  # fmt: skip
def test_size_and_devices_of_a_message(kind, text, size, group):
  program = f"ENTRY %e (a: f32[2]) -> f32[2] {{\n  %x = {text}\n}}\n"
  assert [*Text(program).account().collectives] == [
    Collective(kind, size, group)
  ]


def test_bytes_of_an_array():
  of = {"f32[]": 4, "bf16[8,128]": 2048, "f8e4m3fn[5]": 5, "token[]": 0}
  assert {array: hlo.size_bytes(array) for array in of} == of


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
