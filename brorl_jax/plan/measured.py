"""What the compiler says of every program of a run."""

import dataclasses
import functools
from collections.abc import Iterator
from concurrent import futures
from typing import Any

from brorl_jax.plan import hlo, programs, updates
from brorl_jax.plan.hlo import Measured
from brorl_jax.plan.run import FEW, Compile, Job, Program, training_spec
from brorl_jax.plan.topology import Topology


def every(run: Job, compile: Compile) -> Iterator[Program]:
  """All programs; first those that take longest to compile.

  An evaluation runs those of training's rollouts for other prompts at one time,
  whose memory its plan knows: not compiled if fast.
  """
  yield from updates.updating(run)
  if run.processes > 1:
    yield programs.copying(run)
  yield from programs.sampling(run.alone, compile)
  if not run.fast:
    yield from programs.evaluating(run.alone, compile)


def run(what: Job, where: Topology) -> list[Measured]:
  """Compiles every program, two at a time.

  Raises:
    ValueError: `what.fast`, and the policy has layers of two kinds or too few.
  """
  policy = what.policy
  if what.fast and (policy.layers <= FEW[1] or policy.sliding):
    raise ValueError(
      f"--fast needs more than {FEW[1]} layers of one kind; the "
      f"policy has {policy.layers}"
      + (", some of which slide" if policy.sliding else "")
      + "; leave --fast out"
    )
  compile = functools.cache(
    lambda lowered: lowered.compile(compiler_options=where.options)
  )
  # The loop over tokens looks every so many steps whether it ends.
  steps = training_spec(what).unchecked
  measure = functools.partial(_measured, compile, steps)
  with futures.ThreadPoolExecutor(2) as pool:
    found = [
      (one.layers, pool.submit(measure, one)) for one in every(what, compile)
    ]
  out: dict[str, Measured] = {}
  for layers, future in found:
    one = future.result()
    if layers == FEW[1] and one.name in out:
      more = policy.layers - FEW[0]
      one = _extended(out[one.name], one, more)
    out[one.name] = one
  return [*out.values()]


def _measured(compile: Compile, steps: int, one: Program) -> Measured:
  compiled = compile(one.lowered)
  memory: Any = compiled.memory_analysis()
  text = hlo.Text(compiled.as_text() or "")
  account = text.account()
  sent = account.collectives
  turn = text.loop() if one.name.endswith("decode") else None
  if turn:
    sent = {which: -(-n // steps) for which, n in turn.collectives.items()}
  return Measured(
    one.name,
    one.held_bytes,
    memory.temp_size_in_bytes,
    max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0),
    account.kernels,
    -(-turn.kernels // steps) if turn else None,
    sent,
  )


def _extended(a: Measured, b: Measured, layers: int) -> Measured:
  """`a` with so many more layers, where `b` has one more."""
  line = lambda x, y: x + max(y - x, 0) * layers
  number = lambda name: line(getattr(a, name), getattr(b, name))
  every = a.sent.keys() | b.sent.keys()
  return dataclasses.replace(
    a,
    held_bytes=number("held_bytes"),
    temp_bytes=number("temp_bytes"),
    new_bytes=number("new_bytes"),
    kernels=number("kernels"),
    token_kernels=number("token_kernels"),
    sent={x: line(a.sent.get(x, 0), b.sent.get(x, 0)) for x in every},
  )
