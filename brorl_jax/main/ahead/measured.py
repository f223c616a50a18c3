"""What the compiler says of every program of a run."""

import dataclasses
from collections.abc import Iterator

import jax

from brorl_jax.errors import UserError
from brorl_jax.main.ahead import hlo, programs
from brorl_jax.main.ahead.hlo import Collective
from brorl_jax.main.ahead.programs import Run
from brorl_jax.main.ahead.topology import Topology

# Layers that --fast compiles. A loop of one layer would not be a loop; from two
# on memory, kernels and messages grow by the same with every layer.
_FEW = (2, 3)


@dataclasses.dataclass(frozen=True)
class Measured:
  """A program, per device."""

  name: str
  held_bytes: int  # before it starts: its arguments and all else that is kept
  temp_bytes: int  # for itself
  new_bytes: int  # results that are not written over arguments
  kernels: int  # of a call, loops of unknown length turning once
  token_kernels: int | None  # of one token, where it decodes
  sent: dict[Collective, int]  # messages -> how often, counted like `kernels`

  @property
  def peak_bytes(self) -> int:
    return self.held_bytes + self.temp_bytes + self.new_bytes


def run(what: Run, where: Topology) -> list[Measured]:
  """Compiles every program."""
  return [*_measured(what, where)]


def fast(what: Run, where: Topology) -> list[Measured]:
  """Compiles every program with two and three layers, and extends the line.

  Raises:
    UserError: The policy has layers of two kinds, or too few.
  """
  policy = what.policy
  if policy.layers <= _FEW[1] or policy.sliding:
    raise UserError(
      f"--fast needs more than {_FEW[1]} layers of one kind; the policy has "
      f"{policy.layers}"
      + (", some of which slide" if policy.sliding else "")
      + "; leave --fast out"
    )
  few, more = (
    run(
      dataclasses.replace(
        what,
        policy=dataclasses.replace(policy, layers=layers),
        sampling_bytes=what.bytes_of(layers)[0],
        applying_bytes=what.bytes_of(layers)[1],
      ),
      where,
    )
    for layers in _FEW
  )
  return [
    _extended(a, b, policy.layers - _FEW[0])
    for a, b in zip(few, more, strict=True)
  ]


def _measured(what: Run, where: Topology) -> Iterator[Measured]:
  def compile(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    return lowered.compile(compiler_options=where.options)

  for name, compiled, held_bytes in programs.every(what, compile):
    memory = compiled.memory_analysis()
    text = hlo.Text(compiled.as_text())
    account, turn = text.account(), text.loop()
    decodes = name.endswith("decode")
    # The loop over tokens looks every so many steps whether it ends.
    steps = what.unchecked
    yield Measured(
      name,
      held_bytes,
      memory.temp_size_in_bytes,
      max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0),
      account.kernels,
      -(-turn.kernels // steps) if decodes and turn else None,
      turn.collectives if decodes and turn else account.collectives,
    )


def _extended(a: Measured, b: Measured, layers: int) -> Measured:
  """`a` with so many more layers, where `b` has one more."""
  line = lambda x, y: x + (y - x) * layers
  number = lambda name: line(getattr(a, name), getattr(b, name))
  return Measured(
    a.name,
    number("held_bytes"),
    max(number("temp_bytes"), a.temp_bytes),
    number("new_bytes"),
    number("kernels"),
    None if a.token_kernels is None else number("token_kernels"),
    _sent(a.sent, b.sent, line),
  )


def _sent(a: dict[Collective, int], b: dict[Collective, int], line):
  """Messages of one size are more with every layer, or larger."""
  out = {x: line(a[x], b[x]) for x in a.keys() & b.keys()}
  rank = lambda of: sorted(of, key=lambda x: (x.kind, x.group, x.size_bytes))
  for x, y in zip(rank(a.keys() - b.keys()), rank(b.keys() - a.keys())):
    if (x.kind, x.group) == (y.kind, y.group):
      grown = x._replace(size_bytes=line(x.size_bytes, y.size_bytes))
      out[grown] = out.get(grown, 0) + a[x]
  return out
