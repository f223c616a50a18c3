"""Flags of a benchmarked system: what they may be, and what they change.

Standard library only, as in workloads.py.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from launch.bench.workloads import (
  FIRST_ID,
  WORKLOADS,
  Workload,
  model_of,
  read_lengths,
)

# Fields of a workload that flags of their names replace.
_FIELDS = "prompts", "n", "dtype", "prompt", "new", "slots"
# Least values of integers; of all others 1. Prompts need a token.
_LEAST = {"vocab": FIRST_ID + 1}


def parser(
  default: str, more: Callable[[argparse.ArgumentParser], None]
) -> argparse.ArgumentParser:
  """Of the flags that all systems have, and of those that `more` adds."""
  out = argparse.ArgumentParser(
    description=_description(),
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  add = out.add_argument
  add("--workload", choices=list(WORKLOADS), default=default)
  add("--prompts", type=int, help="prompts at a time")
  add("--n", type=int, help="responses of each prompt")
  add("--dtype", choices=["float32", "bfloat16"])
  add(
    "--model",
    help="WIDTHxLAYERS instead of the workload's; any others of its sizes "
    "behind it: 256x6:heads=8,kv_heads=2,head_size=32,mlp=704",
  )
  add("--vocab", type=int, help="2048 with --model; at least 11")
  add("--prompt", type=int, help="tokens of a prompt")
  add("--new", type=int, help="tokens of a response, at most")
  add("--slots", type=int, help="responses in progress; more than --n are --n")
  ends = out.add_mutually_exclusive_group()
  ends.add_argument(
    "--ends", type=int, help="one token in this many ends a response"
  )
  ends.add_argument(
    "--lengths",
    help="file with a length of a response in every line; those above --new "
    "are cut to it",
  )
  how = out.add_mutually_exclusive_group()
  how.add_argument("--serve", action="store_true", help="a run for each line")
  how.add_argument("--repeats", type=int, default=3, help="measured runs")
  more(out)
  return out


def workload(
  flags: argparse.Namespace, accelerator: Callable[[], bool]
) -> Workload:
  """The workload that the flags name, as they change it.

  Args:
    flags: Of `parser`.
    accelerator: Whether there is one; asked where it matters, behind all else.

  Raises:
    ValueError: A flag is wrong; the message is a line with its value.
  """
  for name, value in vars(flags).items():
    least = _LEAST.get(name, 1)
    if type(value) is int and value < least:
      raise ValueError(f"--{name}={value} must be at least {least}")
  out = WORKLOADS[flags.workload]
  given = {name: getattr(flags, name) for name in _FIELDS}
  changes: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
  if flags.model is not None:
    changes["model"] = model_of(flags.model, flags.vocab or 2048)
    changes["accelerator"] = False
  elif flags.vocab is not None:
    changes["model"] = dataclasses.replace(out.model, vocab=flags.vocab)
  if flags.ends is not None:
    changes["one_in"] = flags.ends
  if flags.lengths is not None:
    changes["lengths"] = read_lengths(flags.lengths)
  out = dataclasses.replace(out, **changes)
  vocab = out.model.vocab
  if not out.lengths and out.one_in is not None and out.one_in > vocab:
    raise ValueError(
      f"--vocab={vocab} must be at least {out.one_in}, of which one token ends"
      if flags.ends is None
      else f"--ends={flags.ends} must be at most the vocabulary, {vocab}"
    )
  if out.accelerator and not accelerator():
    raise ValueError(
      f"--workload={flags.workload} needs an accelerator, and none is used "
      "here; take another, or a --model"
    )
  return out


def _description() -> str:
  rows = [("", "prompts", "responses", "model", "vocabulary", "")]
  rows += [(name, *_described(w)) for name, w in WORKLOADS.items()]
  wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
  padded = lambda row: zip(row, wide, strict=True)
  lines = ["  ".join(f"{c:{w}}" for c, w in padded(r)).rstrip() for r in rows]
  return "\n".join(
    [
      "Prints JSON. Rollouts are of w1 to w4, training of l1 to l3; number and",
      "tokens of the prompts, and of the responses to each:",
      "",
      *lines,
      "",
      "The fields are explained at the top of launch/bench/rollout.py, for",
      "training of update.py, with --serve of protocol.py.",
    ]
  )


def _described(w: Workload) -> tuple[str, ...]:
  more = [
    f"1 token in {w.one_in} ends" if w.one_in else "",
    f"{w.slots} slots" if w.slots else "",
    w.dtype if w.dtype != "float32" else "",
    "accelerator" if w.accelerator else "",
  ]
  return (
    f"{w.prompts} x {w.prompt}",
    f"{w.n} x {w.new}",
    f"{w.model.width}x{w.model.layers}",
    str(w.model.vocab),
    ", ".join(filter(None, more)),
  )
