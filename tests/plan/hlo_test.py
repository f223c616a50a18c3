"""Tests of brorl_jax/plan/hlo.py: short programs, counted by hand."""

import pytest

from brorl_jax.plan import hlo
from brorl_jax.plan.hlo import Account, Collective, Text

# As compilers for GPUs write: a fusion and a library call, then a loop of 28
# turns around a loop of 3, and a loop whose end is not known.
GPU = """\
HloModule jit_f, is_scheduled=true, \
entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%fused_computation (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %twice = f32[8]{0} add(%p, %p)
  ROOT %four = f32[8]{0} add(%twice, %twice)
}

%inner_body (c: (s32[], f32[8])) -> (s32[], f32[8]) {
  %c = (s32[], f32[8]{0}) parameter(0)
  %x.1 = f32[8]{0} get-tuple-element(%c), index=1
  %gather-start = (f32[8]{0}, f32[16]{0}) all-gather-start(%x.1), \
replica_groups={{0,1},{2,3}}, dimensions={0}
  %gather-done = f32[16]{0} all-gather-done(%gather-start)
  %cut = f32[8]{0} fusion(%gather-done), kind=kLoop, calls=%fused_computation
  ROOT %t = (s32[], f32[8]{0}) tuple(%c, %cut)
}

%known_body (c: (s32[], f32[8])) -> (s32[], f32[8]) {
  %c.1 = (s32[], f32[8]{0}) parameter(0)
  ROOT %inner = (s32[], f32[8]{0}) while(%c.1), condition=%goes_on, \
body=%inner_body, backend_config={"known_trip_count":{"n":"3"},\
"known_init_step":{"init":"0","step":"1"}}
}

%open_body (c: (s32[], f32[8])) -> (s32[], f32[8]) {
  %c.2 = (s32[], f32[8]{0}) parameter(0)
  %x.2 = f32[8]{0} get-tuple-element(%c.2), index=1
  %all-reduce = f32[8]{0} all-reduce(%x.2), replica_groups=[2,4]<=[8], \
to_apply=%add
  %gemm = (f32[8]{0}, s8[64]{0}) custom-call(%all-reduce, %x.2), \
custom_call_target="__cublas$gemm"
  %copy = f32[8]{0} copy(%all-reduce)
  ROOT %t.1 = (s32[], f32[8]{0}) tuple(%c.2, %copy)
}

%small_body (c: (s32[], f32[8])) -> (s32[], f32[8]) {
  %c.3 = (s32[], f32[8]{0}) parameter(0)
  ROOT %f.3 = (s32[], f32[8]{0}) fusion(%c.3), kind=kLoop, \
calls=%fused_computation
}

%goes_on (c: (s32[], f32[8])) -> pred[] {
  %c.4 = (s32[], f32[8]{0}) parameter(0)
  ROOT %less = pred[] fusion(%c.4), kind=kLoop, calls=%fused_computation
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %zero = s32[] constant(0)
  %f = f32[8]{0} fusion(%a), kind=kLoop, calls=%fused_computation
  %call = f32[8]{0} custom-call(%f, %f), custom_call_target="__cublas$gemm"
  %start = (s32[], f32[8]{0}) tuple(%zero, %call)
  %known = (s32[], f32[8]{0}) while(%start), condition=%goes_on, \
body=%known_body, backend_config={"known_trip_count":{"n":"28"}}
  %small = (s32[], f32[8]{0}) while(%known), condition=%goes_on, \
body=%small_body
  %open = (s32[], f32[8]{0}) while(%small), condition=%goes_on, body=%open_body
  ROOT %out = f32[8]{0} get-tuple-element(%open), index=1
}
"""
# As compilers for CPUs and TPUs write: tiles in layouts, axes of a mesh.
TPU = """\
HloModule jit_g, is_scheduled=true

one (p: bf16[4,128]) -> bf16[4,128] {
  p = bf16[4,128]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT c = bf16[4,128]{1,0:T(8,128)(2,1)} copy(p)
}

two (p: bf16[4,128]) -> bf16[4,128] {
  p.1 = bf16[4,128]{1,0:T(8,128)(2,1)} parameter(0)
  c.1 = bf16[4,128]{1,0:T(8,128)(2,1)} copy(p.1)
  ROOT c.2 = bf16[4,128]{1,0:T(8,128)(2,1)} copy(c.1)
}

ENTRY main.1 (a: bf16[4,128]) -> bf16[4,128] {
  a = bf16[4,128]{1,0:T(8,128)(2,1)} parameter(0), sharding={devices=[8]<=[8]}
  s = (bf16[4,128]{1,0:T(8,128)(2,1)}, bf16[4,128]{1,0:T(8,128)(2,1)}, \
u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(a), \
source_target_pairs={{0,1},{1,0}}
  d = bf16[4,128]{1,0:T(8,128)(2,1)} collective-permute-done(s)
  r = (f32[512]{0:T(512)}, f32[]{:T(128)}) all-reduce(d, d), \
replica_groups=mesh['x'=4,'y'=2,'z'=3] {'x','z'}, to_apply=one
  g = bf16[1,8,128]{2,1,0:T(8,128)(2,1)} all-gather(d), replica_groups={{0,1,2}}
  k = bf16[4,128]{1,0:T(8,128)(2,1)} call(d), to_apply=one
  b = s32[]{:T(128)} constant(1)
  i = bf16[4,128]{1,0:T(8,128)(2,1)} conditional(b, k, k), \
branch_computations={one, two}
  q = pred[]{:T(512)} constant(true)
  ROOT j = bf16[4,128]{1,0:T(8,128)(2,1)} conditional(q, i, i), \
true_computation=%one, false_computation=%two
}
"""

# A TPU does not write how often its loops turn: here 28 times, and until a
# number that is computed. It sends from inside of fusions, and the description
# of a kernel has lines that begin like the end of a computation.
TPU_LOOPS = """\
HloModule jit_h, is_scheduled=true

%sent (p: f32[8]) -> f32[64] {
  %p = f32[8]{0:T(256)} parameter(0)
  ROOT %whole = f32[64]{0:T(256)} all-gather(%p), replica_groups={{0,1,2,3}}
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

%either (c: (s32[], f32[8])) -> pred[] {
  %limit.1 = s32[]{:T(128)} constant(28)
  %c.6 = (s32[]{:T(128)}, f32[8]{0:T(256)}) parameter(0)
  %i.2 = s32[]{:T(128)} get-tuple-element(%c.6), index=0
  %one = pred[]{:T(512)} compare(%i.2, %limit.1), direction=LT
  ROOT %other = pred[]{:T(512)} not(%one)
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
  ROOT %u = (s32[]{:T(128)}, f32[8]{0:T(256)}) while(%v), condition=%either, \
body=%body
}
"""


def test_a_loop_that_counts_to_a_constant():
  of = Text(TPU_LOOPS).account()
  turns = 28 + 1 + 1  # loops with other ends count once
  assert of.kernels == 2 * turns
  assert of.collectives == {Collective("all-gather", 4 * 64, 4): turns}
  assert Text(TPU_LOOPS).loop() == Account(
    2, {Collective("all-gather", 4 * 64, 4): 1}
  )


def test_a_program_of_a_gpu():
  # In turn: a fusion and a call; 28 x 3 turns of a gather and a fusion; a turn
  # of one fusion; a turn of a reduction, a call and a copy. What starts a
  # message launches it, what ends it does not.
  of = Text(GPU).account()
  assert of.kernels == 2 + 28 * 3 * 2 + 1 + 3
  assert of.collectives == {
    Collective("all-gather", 64, 2): 28 * 3,
    Collective("all-reduce", 32, 4): 1,
  }


def test_a_turn_is_that_of_the_open_loop_that_launches_most():
  assert Text(GPU).loop() == Account(3, {Collective("all-reduce", 32, 4): 1})


def test_a_program_without_an_open_loop_has_no_turn():
  assert Text(TPU).loop() is None


def test_a_program_of_a_tpu():
  # A permutation, a reduction, a gather, a call of one copy, and two
  # conditionals with branches of one and two copies.
  of = Text(TPU).account()
  assert of.kernels == 3 + 1 + 2 * (1 + 2)
  assert of.collectives == {
    Collective("collective-permute", 2 * 4 * 128, 0): 1,
    Collective("all-reduce", 4 * 512 + 4, 12): 1,
    Collective("all-gather", 2 * 8 * 128, 3): 1,
  }


def message(kind, text):
  program = f"ENTRY %e (a: f32[2]) -> f32[2] {{\n  %x = {text}\n}}\n"
  (which,) = Text(program).account().collectives
  assert which.kind == kind
  return which.size_bytes, which.group


@pytest.mark.parametrize(
  "kind, text, size, group",
  [
    # Two arrays are sent, two arrive.
    (
      "all-gather",
      "((f32[2]{0}, bf16[3,5]{1,0}), (f32[8]{0}, /*index=1*/bf16[12,5]{1,0})) "
      "all-gather-start(%a, %b), replica_groups=[1,4]<=[4]",
      4 * 8 + 2 * 60,
      4,
    ),
    (
      "reduce-scatter",
      "((f32[512,64]{1,0}), f32[64,64]{1,0}) reduce-scatter-start(%a), "
      "replica_groups={{0,1,2,3,4,5,6,7}}",
      4 * 64 * 64,
      8,
    ),
    # A reduction writes where it reads: its start names each array once.
    (
      "all-reduce",
      "(f32[7]{0}, s32[]) all-reduce-start(%a, %b), replica_groups={{0,2,4}}",
      4 * 7 + 4,
      3,
    ),
    (
      "all-to-all",
      "s8[3,11]{1,0} all-to-all(%a), replica_groups=[2,3]<=[3,2]T(1,0)",
      33,
      3,
    ),
    (
      "all-gather",
      "f16[6]{0} all-gather(%a), "
      "replica_groups=mesh['axis_0'=8,'axis_1'=2] {'axis_1'}",
      12,
      2,
    ),
    ("ragged-all-to-all", "pred[5]{0} ragged-all-to-all(%a)", 5, 0),
  ],
)
def test_size_and_devices_of_a_message(kind, text, size, group):
  assert message(kind, text) == (size, group)


@pytest.mark.parametrize(
  "array, size",
  [
    ("f32[]", 4),
    ("bf16[8,128]", 2048),
    ("pred[3]", 3),
    ("s8[2,3]{1,0}", 6),
    ("f8e4m3fn[5]", 5),
    ("c64[2]", 16),
    ("u32[0,4]", 0),
    ("token[]", 0),
    ("tuple", 0),
  ],
)
def test_bytes_of_an_array(array, size):
  assert hlo.size_bytes(array) == size


def test_a_barrier_launches_nothing_and_numbers_are_not_sent():
  text = """\
ENTRY %e (a: f32[2]) -> f32[2] {
  %a = f32[2]{0} parameter(0)
  %b = f32[2]{0} opt-barrier(%a)
  %s = (f32[2]{0}, f32[4]{0}, u32[]{:S(2)}, s32[]{:S(2)}) \\
all-gather-start(%b), replica_groups={{0,1}}
  ROOT %d = f32[4]{0} all-gather-done(%s)
}
""".replace("\\\n", "")
  assert Text(text).account() == Account(
    1, {Collective("all-gather", 16, 2): 1}
  )
