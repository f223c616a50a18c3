"""Tests of brorl_jax/plan/measured.py: sums and lines through two."""

from types import SimpleNamespace

import pytest
import runs_ahead as made
from messages import mentions
from small_policies import GEMMA2, TINY, changed

from brorl_jax.plan import measured
from brorl_jax.plan.hlo import Collective
from brorl_jax.plan.run import Program

GATHER = Collective("all-gather", 8, 2)
REDUCE = Collective("all-reduce", 8, 2)
DEEP = changed(layers=7)
# A loop whose end is not known around one of 16 steps of a gather and a copy,
# and a reduction before them.
LOOPS = """\
%step (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  %g = f32[2]{0} all-gather(%p), replica_groups={{0,1}}
  ROOT %c = f32[2]{0} copy(%g)
}

%body (p: f32[2]) -> f32[2] {
  %p.1 = f32[2]{0} parameter(0)
  %n = f32[2]{0} negate(%p.1)
  ROOT %w = f32[2]{0} while(%n), condition=%c, body=%step, \
backend_config={"known_trip_count":{"n":"16"}}
}

ENTRY %main (a: f32[2]) -> f32[2] {
  %a = f32[2]{0} parameter(0)
  %r = f32[2]{0} all-reduce(%a), replica_groups={{0,1}}, to_apply=%add
  ROOT %w.1 = f32[2]{0} while(%r), condition=%c, body=%body
}
"""


class Compiled:
  """As XLA's, of a program with this text."""

  def __init__(self, outputs=50, aliased=30):
    self.sizes = outputs, aliased

  def as_text(self):
    return LOOPS

  def memory_analysis(self):
    return SimpleNamespace(
      temp_size_in_bytes=40,
      output_size_in_bytes=self.sizes[0],
      alias_size_in_bytes=self.sizes[1],
    )


def read(name, steps=1, **sizes):
  program = Program(name, None, 100, 2)
  return measured._measured(lambda _: Compiled(**sizes), steps, program)


def test_a_program_that_is_called_once():
  one = read("prefill")
  assert (one.held_bytes, one.temp_bytes, one.new_bytes) == (100, 40, 20)
  assert one.peak_bytes == 160
  assert one.kernels == 1 + 1 + 16 * 2 and one.token_kernels is None
  assert one.sent == {REDUCE: 1, GATHER: 16}


def test_results_that_are_all_written_over_arguments_need_nothing():
  assert read("prefill", outputs=30, aliased=30).new_bytes == 0
  assert read("prefill", outputs=20, aliased=30).new_bytes == 0


@pytest.mark.parametrize("name", ["decode", "evaluation: decode"])
def test_a_program_that_decodes_is_told_by_token(name):
  # 33 kernels and 16 messages in a turn of the open loop, which is so many
  # tokens; the last one is not a whole one.
  assert read(name).token_kernels == 33
  one = read(name, steps=16)
  assert one.token_kernels == 3 and one.sent == {GATHER: 1}
  assert one.kernels == 34


def test_two_and_three_layers_stand_for_more():
  two = made.measured(
    "decode",
    held_bytes=100,
    temp_bytes=50,
    new_bytes=9,
    kernels=20,
    token_kernels=14,
    sent={GATHER: 4, REDUCE: 1},
  )
  three = made.measured(
    "decode",
    held_bytes=130,
    temp_bytes=40,
    new_bytes=9,
    kernels=27,
    token_kernels=20,
    sent={GATHER: 6, Collective("all-reduce", 4, 2): 1},
  )
  # Of 7 layers 5 are more than those of `two`. Less for more layers is chance.
  assert measured._extended(two, three, 5) == made.measured(
    "decode",
    held_bytes=250,
    temp_bytes=50,
    new_bytes=9,
    kernels=55,
    token_kernels=44,
    sent={GATHER: 14, REDUCE: 1, Collective("all-reduce", 4, 2): 5},
  )


@pytest.mark.parametrize(
  "policy, says",
  [
    (changed(layers=3), "--fast ... 3 layers ... has 3 ... leave --fast out"),
    (TINY, "has 2 ... leave --fast out"),
    (GEMMA2, "--fast ... some of which slide"),
    (
      changed(layers=4, window=3, sliding=(True, False, True, False)),
      "has 4 ... some of which slide",
    ),
  ],
)
def test_a_policy_that_few_layers_do_not_stand_for(policy, says):
  with pytest.raises(ValueError) as e:
    measured.run(made.run(policy, fast=True), made.topology())
  (line,) = str(e.value).splitlines()
  assert mentions(line, says), line


@pytest.fixture
def compiled(monkeypatch):
  """What was compiled: each program once, for these options."""
  seen = []

  class Lowered:
    def __init__(self, layers):
      self.layers = layers

    def compile(self, compiler_options):
      assert compiler_options == {}
      seen.append(self.layers)
      return Compiled(outputs=30 + self.layers)

  def every(run, compile):
    first = Lowered(7)
    compile(first)
    yield Program("prefill", first, 100, 7)
    for layers in (2, 3) if run.fast else (7,):
      yield Program("decode", Lowered(layers), 100 + 10 * layers, layers)

  monkeypatch.setattr(measured, "every", every)
  return seen


def test_every_program_is_compiled_once(compiled):
  of = measured.run(made.run(DEEP), made.topology())
  assert [m.name for m in of] == ["prefill", "decode"]
  assert [m.held_bytes for m in of] == [100, 170] and compiled == [7, 7]


def test_a_fast_plan_measures_what_a_whole_one_does(compiled):
  fast, whole = (
    measured.run(made.run(DEEP, fast=f), made.topology()) for f in (True, False)
  )
  assert fast == whole
  assert sorted(compiled) == [2, 3, 7, 7, 7]
