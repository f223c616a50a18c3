"""The dtype of activations where the config leaves it to the machine.

`policy.dtype = "auto"` is bfloat16 on accelerators. On a CPU a rate decides,
because neither the name of a processor nor its instructions tell: an AMD Zen 5
multiplies bfloat16 twice as fast as float32 (192 GFLOP/s on two cores against
102), an Intel with AVX512_BF16 but without AMX half as fast.

What was decided takes the place of "auto" before anything is compiled or
written. A run is therefore what its config.json says: it goes on in the dtype
that it began with, on any processor, and its evaluations are made in it.
"""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from brorl_jax import processes
from brorl_jax.errors import UserError
from brorl_jax.main import programs
from brorl_jax.model import products
from brorl_jax.model.target import Target
from brorl_jax.runs import folder, lines, machine, sections
from brorl_jax.runs.sections import Config, Warmup

AUTO = "auto"
DTYPES = ("float32", "bfloat16")
FILE = "rates.json"  # beside compiled programs
# Products twice as fast made a step 1.25 times as fast (27.6 to 22 CPU-seconds,
# learner/README.md): they are .4 of it. 1.2 times as fast, they would make it
# 1.07 times as fast. Less is not worth the rounding, and as much may be the
# noise of a busy machine.
_LEAST = 1.2
_ROWS, _WIDTH = 256, 1024  # of a product: 5 ms at 100 GFLOP/s
_PROBE_S = 0.2  # of all products, however many fit

C = TypeVar("C", Config, Warmup)


def settled(
  c: C, machine: Target, began: str | None = None
) -> tuple[C, list[str]]:
  """The config with a dtype in place of "auto", and a line that says why.

  Called by all processes of a run. Process 0 decides for all: another
  processor may measure something else.

  Args:
    c: The config.
    machine: That programs are compiled for. If it is a CPU, it is this one.
    began: The dtype of the run that goes on or is evaluated; None: of none.

  Returns:
    The config, and lines for the log: none if nothing was left to decide.
  """
  found: tuple[str, list[str]] = c.policy.dtype, []
  if c.policy.dtype == AUTO and processes.leads():
    found = _decided(machine, began)
  # Also where nothing is to be decided, or a process whose config differs would
  # wait here alone instead of being refused.
  dtype, why = processes.first(found)
  if c.policy.dtype != AUTO:
    return c, []
  policy = dataclasses.replace(c.policy, dtype=dtype)
  return dataclasses.replace(c, policy=policy), why


def of_run(workdir: pathlib.Path) -> str | None:
  """The dtype of the run or evaluation in a folder; None without one.

  Raises:
    UserError: Its config.json cannot be read.
  """
  if not (starts := folder.configs(workdir)):
    return None
  dtype = sections.flat(starts[0]).get("policy.dtype")
  if dtype not in (*DTYPES, AUTO):
    raise UserError(
      f"{workdir / 'config.json'}: policy.dtype = {dtype!r} is not what a run "
      f"writes; it must be one of {', '.join(DTYPES)}"
    )
  return dtype


def _decided(machine: Target, began: str | None) -> tuple[str, list[str]]:
  """The dtype, and a line that says why."""
  if began is not None:
    return began, [f"dtype {began}, as this run began"]
  if not machine.on_cpu:
    return "bfloat16", [f"dtype bfloat16, for {machine.platform}"]
  found = rates(programs.place())
  return faster(found), [line(found)]


def faster(found: Mapping[str, float]) -> str:
  """The dtype for these rates: bfloat16 only if it is clearly faster."""
  enough = found["bfloat16"] >= _LEAST * found["float32"]
  return "bfloat16" if enough else "float32"


def line(found: Mapping[str, float]) -> str:
  """A line for the log; the rates in FLOP/s."""
  plain, half = (found[name] / 1e9 for name in DTYPES)
  if faster(found) == "bfloat16":
    return f"dtype bfloat16: {half:.0f} GFLOP/s, float32 {plain:.0f}"
  needs = f"it needs {_LEAST * plain:.0f}"
  return f"dtype float32: {plain:.0f} GFLOP/s, bfloat16 {half:.0f} ({needs})"


def rates(place: pathlib.Path | None) -> dict[str, float]:
  """FLOP/s of products by dtype, measured once for a kind of machine.

  Args:
    place: The folder of this kind of machine, in which they are kept; None:
      they are measured at every start.
  """
  if place is None:
    return measured()
  # XLA's products change with its version and flags.
  of = [machine.versions()["jaxlib"], os.environ.get("XLA_FLAGS", "")]
  path = place / FILE
  if (found := _kept(path, of)) is None:
    found = measured()
    with contextlib.suppress(OSError):  # a full disk: measured again next time
      lines.write_whole(path, json.dumps({"of": of, "flops": found}) + "\n")
  return found


def _kept(path: pathlib.Path, of: list[str]) -> dict[str, float] | None:
  """Rates from a file; None if they are of another XLA or not rates."""
  try:
    record = json.loads(path.read_text())
    found = {name: float(record["flops"][name]) for name in DTYPES}
    good = all(0.0 < x < math.inf for x in found.values())
    return found if good and record["of"] == of else None
  except (OSError, ValueError, KeyError, TypeError):
    return None


def measured() -> dict[str, float]:
  """FLOP/s of a product by dtype, on this CPU.

  Both take turns, for 0.2 s or once each, and the best of each counts: what
  else the machine does slows some of them down.
  """
  calls = {name: product(name) for name in DTYPES}
  best = {name: math.inf for name in calls}
  begin = now = time.perf_counter()
  spent = 0.0  # in the last turn
  while now - begin + spent <= _PROBE_S:
    turn = now
    for name, call in calls.items():
      start = now
      call()
      now = time.perf_counter()
      best[name] = min(best[name], now - start)
    spent = now - turn
  work = 2 * _ROWS * _WIDTH**2
  return {name: work / seconds for name, seconds in best.items()}


def product(dtype: str) -> Callable[[], Any]:
  """A product as the policy's are on a CPU, compiled; it waits for the end."""
  cpu = Target("cpu", 1, 0)
  x = jnp.ones((_ROWS, _WIDTH), dtype)
  w = jnp.ones((_WIDTH, _WIDTH), dtype)
  dot = jax.jit(lambda x, w: products.dot(x, w, cpu)).lower(x, w).compile()
  return lambda: dot(x, w).block_until_ready()
