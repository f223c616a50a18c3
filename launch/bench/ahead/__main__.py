"""Kernels and messages of a run on a machine that need not be here.

  python -m launch.bench.ahead --config=n512:1p5b --topology=h100:1x8 --fast

It compiles every program of the run, as `--mode=plan --topology=` does, and
prints their kernels and the messages between devices; then all of it as one
line of JSON.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator

import jax
from absl import app, flags
from ml_collections import config_flags

from brorl_jax.errors import UserError
from brorl_jax.main import plan, settings
from brorl_jax.many import meshes
from brorl_jax.plan import programs, topology
from brorl_jax.plan.programs import CompileJob, Program, training_spec
from launch.bench.ahead import hlo
from launch.bench.ahead.hlo import Collective

_MIB, _GIB = 2**20, 2**30


@dataclasses.dataclass(frozen=True)
class Launched:
  """What a program launches on a device."""

  kernels: int  # of a call, loops of unknown length turning once
  token_kernels: int | None  # of one token, where it decodes
  sent: dict[Collective, int]  # -> how often, of a token where it decodes


def launched(
  job: CompileJob, every: Iterable[tuple[Program, jax.stages.Compiled]]
) -> dict[str, Launched]:
  """Each program by its name; of a decode loop of FEW layers that of all."""
  # The loop over tokens looks only after this many steps whether it ends.
  steps = training_spec(job).unchecked
  out: dict[str, Launched] = {}
  for program, done in every:
    text = hlo.Text(done.as_text() or "")
    account = text.account()
    turn = text.loop() if program.name.endswith("decode") else None
    found = Launched(account.kernels, None, account.collectives)
    if turn:
      sent = {which: -(-n // steps) for which, n in turn.collectives.items()}
      found = Launched(account.kernels, -(-turn.kernels // steps), sent)
    if program.name in out:
      found = _of_all_layers(job, out[program.name], found)
    out[program.name] = found
  return out


def _of_all_layers(job: CompileJob, two: Launched, three: Launched) -> Launched:
  line = lambda a, b: programs.of_all_layers(job, a, b)
  number = lambda name: line(getattr(two, name), getattr(three, name))
  messages = two.sent.keys() | three.sent.keys()
  return Launched(
    number("kernels"),
    number("token_kernels"),
    {x: line(two.sent.get(x, 0), three.sent.get(x, 0)) for x in messages},
  )


def messages(found: dict[str, Launched]) -> Iterator[str]:
  """A line for every message of a mebibyte or more."""
  for name, program in found.items():
    large = sorted(program.sent.items(), key=lambda x: -x[0].size_bytes * x[1])
    for x, count in large:
      if x.size_bytes >= _MIB:
        total = x.size_bytes * count / _GIB
        yield (
          f"  {name:22} {x.kind:18} {x.size_bytes / _MIB:9.1f} MiB x "
          f"{count:<5} over {x.group:<3} = {total:.2f} GiB"
        )


def show(
  job: CompileJob,
  where: topology.Topology,
  found: dict[str, Launched],
) -> None:
  """Prints kernels, messages, and the JSON."""
  print(programs.title(job, where), f"  {'kernels of a call':22}", sep="\n")
  for name, program in found.items():
    token = program.token_kernels
    print(
      f"  {name:22} {program.kernels if token is None else token:8}", end=""
    )
    print("" if token is None else " per token")
  if lines := [*messages(found)]:
    print("messages of 1 MiB and more, per call or token", *lines, sep="\n")
  line = {
    "topology": str(where.name),
    "programs": [
      {
        "name": name,
        "kernels": program.kernels,
        "token_kernels": program.token_kernels,
        "messages": [
          {**x._asdict(), "count": n} for x, n in program.sent.items()
        ],
      }
      for name, program in found.items()
    ],
  }
  print(json.dumps(line))


def main(_: list[str]) -> None:
  try:
    c = settings.training(flags.FLAGS.config)
    where = topology.named(flags.FLAGS.topology, fast=flags.FLAGS.fast)
    assert where is not None
    if not where.devices:  # says what is missing
      topology.prepare(where.name)
    run = plan.resolved(c, where)
    mesh = where.mesh(run.machine.axes)
    each = meshes.part(mesh, where.processes)
    job = CompileJob(run, run.phases[0], mesh, each, fast=flags.FLAGS.fast)
    every = programs.compile_all(job, where)
    show(job, where, launched(job, every))
  except (UserError, ValueError) as e:
    raise SystemExit(f"error: {e}") from None


if __name__ == "__main__":
  config_flags.DEFINE_config_file("config", None, "Config of a run.")
  flags.DEFINE_string("topology", "here", "As in --mode=plan.")
  flags.DEFINE_bool("fast", False, "As in --mode=plan.")
  flags.mark_flag_as_required("config")
  app.run(main, flags_parser=settings.parse_flags)
