"""Advice on N: table, figure and recommendation of `--mode=advise`."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np

from brorl_jax.errors import UserError
from brorl_jax.report import figures
from brorl_jax.runs import intact

FILE, FIGURE = "advice.json", "advice.png"
# A smaller N that is this good is as good: the noise of the measurement.
_ALIKE = 0.9
# A signal must be more than so many times what noise alone gives.
_ERRORS = 2.0
_LEAST_BLOCKS = 8


def show(workdir: pathlib.Path) -> None:
  """Draws the figure beside the numbers and prints table and advice."""
  data = read(workdir / FILE)
  draw(workdir / FIGURE, data)
  print(table(data), advice(data), f"  {workdir / FIGURE}", sep="\n")


def read(path: pathlib.Path) -> dict[str, Any]:
  """The numbers; raises UserError if the file holds none."""
  try:
    data = json.loads(path.read_text())
    if not data["right"]:
      raise ValueError("it has no prompts")
    table(data)
    advice(data)
  except (OSError, ValueError, LookupError, TypeError) as e:
    raise UserError(
      f"{path} is no advice: {intact.one_line(e)}; run --mode=advise again"
    ) from None
  return data


def per_second(row: Mapping[str, Any]) -> float | None:
  """Signal to noise that a second of a step brings."""
  seconds = row["rollout_s"] + row["update_s"]
  if row["snr"] is None or not seconds:
    return None
  return row["snr"] / seconds


def _sure(row: Mapping[str, Any]) -> bool:
  """Whether the signal is more than its own uncertainty."""
  return row["signal"] > _ERRORS * row["signal_error"]


def recommended(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
  """The row with most signal to noise per second; None if noise hides it.

  Signal to noise and seconds both grow with the number of prompts, so that
  their ratio tells of N alone. Of rows that are about as good the largest N,
  which reaches the rarest right answers.
  """
  if data["blocks"] < _LEAST_BLOCKS:
    return None
  rows = data["rows"]
  found = [(per_second(row) or 0.0, row) for row in rows if _sure(row)]
  best = max((gain for gain, _ in found), default=0.0)
  if best <= 0.0:
    return None
  return max(
    (row for gain, row in found if gain >= _ALIKE * best),
    key=lambda row: row["n"],
  )


def advice(data: Mapping[str, Any]) -> str:
  """One paragraph: which N, and why."""
  rows, P = data["rows"], len(data["right"])
  whole, row = rows[0], recommended(data)
  rate = np.array(data["right"]) / data["n"]
  hard = f"{np.mean(rate == 0):.2f} of {P} prompts have no right rollout of "
  hard += f"{data['n']}, {np.mean((rate > 0) & (rate < 0.1)):.2f} some but less"
  hard += f" than a tenth, {np.mean(rate >= 0.9):.2f} nine tenths or more"
  if row is None:
    return (
      f"No N is recommended: for none is the signal more than {_ERRORS:.0f} "
      f"times what noise gives, from {data['blocks']} blocks of prompts "
      f"(at least {_LEAST_BLOCKS} are needed). {hard}. Raise "
      "config.sampling.samples for more prompts."
    )
  return (
    f"N = {row['n']} is recommended: with {data['advantage']!r} advantages it "
    f"has the largest signal-to-noise ratio per second, or the largest N of "
    f"those within {1 - _ALIKE:.0%} of it. Prompts with a gradient: "
    f"{row['informative']:.2f}, and {whole['informative']:.2f} at N = "
    f"{whole['n']}. {hard}. Measured on {P} prompts in {data['blocks']} blocks."
    f"{_open(rows, row)}"
  )


def _open(rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> str:
  """Which N may be better than the recommended one, for all that is known."""
  least = per_second(row) or 0.0
  names = [
    f"{other['n']}"
    for other in rows
    if not _sure(other) and (per_second(other) or 0.0) > least
  ]
  if not names:
    return ""
  return (
    f" N = {' or '.join(names)} may be better still: too few prompts to tell, "
    "raise config.sampling.samples."
  )


_COLUMNS = (
  ("N", "n", "{:d}"),
  ("informative", "informative", "{:.3f}"),
  ("samples/group", "samples_per_group", "{:.1f}"),
  ("coefficient", "coefficient", "{:.4f}"),
  ("norm", "norm", "{:.4f}"),
  ("cosine", "cosine", "{:.3f}"),
  ("signal/noise", "snr", "{:.3f}"),
  ("+-", "snr_error", "{:.3f}"),
  ("rollout s", "rollout_s", "{:.2f}"),
  ("update s", "update_s", "{:.2f}"),
)


def table(data: Mapping[str, Any]) -> str:
  """The rows as text."""
  form = lambda row, name, how: (
    "n/a" if row[name] is None else how.format(row[name])
  )
  cells = [[head for head, *_ in _COLUMNS]]
  cells += [[form(row, *of) for _, *of in _COLUMNS] for row in data["rows"]]
  width = [max(map(len, column)) for column in zip(*cells, strict=True)]
  return "\n".join(
    "  ".join(x.rjust(w) for x, w in zip(line, width, strict=True))
    for line in cells
  )


def draw(path: pathlib.Path, data: Mapping[str, Any]) -> None:
  """Five panels over N, and the pass rates of the prompts."""
  rows = data["rows"]
  row = recommended(data)
  error = lambda r: r["snr_error"] / (r["rollout_s"] + r["update_s"])
  panels = (
    ("prompts with a gradient", lambda r: r["informative"], None),
    ("rollouts per such prompt", lambda r: r["samples_per_group"], None),
    (f"cosine to N = {data['n']}", lambda r: r["cosine"], None),
    ("signal to noise", lambda r: r["snr"], lambda r: r["snr_error"]),
    ("the same per second", per_second, error),
  )
  with matplotlib.rc_context(figures.STYLE):
    figure, axes = figures.axes_of(len(panels) + 1, height=2.3)
    ticks = [r["n"] for r in rows][::2]
    for axis, (title, of, off) in zip(axes, panels, strict=False):
      some = [r for r in rows if of(r) is not None]
      axis.errorbar(
        [r["n"] for r in some],
        [of(r) for r in some],
        off and [off(r) for r in some],
        fmt="o-",
        ms=4,
        capsize=2,
      )
      axis.set_xscale("log", base=2)
      axis.set_xticks(ticks, map(str, ticks))
      axis.set(title=title, xlabel="N")
      axis.set_ylim(bottom=min(0.0, *axis.get_ylim()))
      if row is not None:
        axis.axvline(row["n"], color="0.6", lw=1, ls="--")
    rate = np.array(data["right"]) / data["n"]
    axes[-1].hist(rate, bins=np.linspace(0.0, 1.0, 21))
    axes[-1].set(
      title="pass rates", xlabel=f"right of {data['n']}", ylabel="prompts"
    )
    figures.save(figure, path)
