"""How a policy answers: lengths over time, before and after.

Responses of held-out prompts come from eval/records.jsonl, pass rates of the
training prompts from metrics.jsonl.
"""

import html
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np

from brorl_jax.report import cells, figures
from brorl_jax.report.cells import Number, Table
from brorl_jax.report.figures import Figure
from brorl_jax.runs.metrics import RATE_EDGES

_BINS = ("none", *(f"below_{edge}" for edge in RATE_EDGES), "all")
_BIN_NAMES = ("0", *(f"<{edge}" for edge in RATE_EDGES), "100")
_RATE = "sampling/rate_share/"
_OPEN = 12  # prompts that are shown without a click
_LONGEST = 3000  # characters of a response
CSS = """
#answers table { width: 100%; table-layout: fixed; }
#answers td { white-space: pre-wrap; overflow-wrap: anywhere;
  text-align: left; }
#answers td.said { font: .95em/1.4 ui-monospace, monospace; }
#answers small { display: block; margin-top: .3em; color: #555; }
#answers .pass small b { color: #16702f; }
#answers .fail small b { color: #a3261b; }
"""


def rates(metrics: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
  """Histograms of the training prompts' pass rates, at start and end.

  Means over the first fifth of the steps and over the last, which do not
  overlap; empty if the run did not record them, or has a single step.
  """
  lines = [m for m in metrics if m.get(_RATE + _BINS[1]) is not None]
  if len(lines) < 2:
    return {}
  some = max(len(lines) // 5, 1)
  of = lambda part: [
    float(np.mean([line.get(_RATE + name) or 0.0 for line in part]))
    for name in _BINS
  ]
  return {"start": of(lines[:some]), "end": of(lines[-some:])}


def pairs(
  before: Sequence[Mapping[str, Any]],
  after: Sequence[Mapping[str, Any]],
  rates: tuple[Mapping[str, float], Mapping[str, float]],
) -> list[dict[str, Any]]:
  """The prompts of which both have a response, one of each task first.

  Args:
    before: Records with "response" of an evaluation.
    after: Those of a later one.
    rates: Pass@1 of each prompt, by id, in both.
  """
  later = {record["id"]: record for record in after}
  seen: dict[str, int] = {}
  out = []
  for record in before:
    if (name := record["id"]) in later:
      task = record["task"]
      seen[task] = seen.get(task, -1) + 1
      said = {
        "before": _said(record) | {"rate": rates[0][name]},
        "after": _said(later[name]) | {"rate": rates[1][name]},
      }
      asked = {"task": task, "prompt": record["prompt"]}
      out.append((seen[task], asked | said))
  return [one for _, one in sorted(out, key=lambda x: x[0])]


def _said(record: Mapping[str, Any]) -> dict[str, Any]:
  return {name: record[name] for name in ("response", "pass", "tokens")}


def draw(folder: pathlib.Path, data: Mapping[str, Any]) -> list[Figure]:
  """Lengths over time, and pass rates at start and end, if there are any."""
  out = []
  with matplotlib.rc_context(figures.STYLE):
    if any(run["training"] for run in data["runs"]):
      out.append(_lengths(folder, data))
    if any(run["rates"] for run in data["runs"]):
      out.append(_rates(folder, data))
  return out


def _lengths(folder: pathlib.Path, data: Mapping[str, Any]) -> Figure:
  panels = [
    ("right answers", "tokens_right"),
    ("wrong answers", "tokens_wrong"),
  ]
  scale, unit = figures.time_unit(data)
  figure, axes = figures.axes_of(len(panels), height=2.5)
  for axis, (title, name) in zip(axes, panels, strict=True):
    for i, run in enumerate(data["runs"]):
      if run["training"]:
        x = [one["net_hours"] * scale for one in run["evaluations"]]
        y = [one["summary"]["all"][name] for one in run["evaluations"]]
        y = np.array(y, float)  # None: a gap
        axis.plot(x, y, ms=4, **figures.look(i, run))
    axis.set(title=title, xlabel=unit, ylabel="tokens, mean")
    top = 1.05 * axis.dataLim.y1  # a marker at the top has room
    axis.set_ylim(0.0, top if top > 0.0 else 1.0)
  figures.legend(figure, axes)
  figures.save(figure, folder / "answers.png")
  caption = (
    "Tokens of held-out responses, right and wrong, the end token included."
  )
  return Figure("answers.png", "Length of the responses", caption)


def _rates(folder: pathlib.Path, data: Mapping[str, Any]) -> Figure:
  runs = [(i, run) for i, run in enumerate(data["runs"]) if run["rates"]]
  figure, axes = figures.axes_of(len(runs), height=2.5)
  place = np.arange(len(_BINS))
  for axis, (i, run) in zip(axes, runs, strict=True):
    for side, (when, shift) in enumerate((("start", -0.2), ("end", 0.2))):
      height = 100 * np.array(run["rates"][when])
      color = figures.look(i, run)["color"]
      how = {"color": color, "alpha": 1.0} if side else {"color": "0.75"}
      axis.bar(place + shift, height, 0.4, label=when, **how)
    axis.set_xticks(place, _BIN_NAMES, rotation=60)
    title = figures.look(i, run)["label"]
    axis.set(title=title, xlabel="pass rate, %", ylabel="prompts, %")
    axis.legend(frameon=False)
  figures.save(figure, folder / "rates.png")
  caption = (
    "Training prompts by the mean reward of their rollouts, over all that were "
    "drawn in the first and in the last fifth of the steps. The bins are "
    "narrow near 0 and 100, where prompts have no gradient; what a rollout can "
    "resolve is 1 / N."
  )
  return Figure("rates.png", "Pass rates of the training prompts", caption)


def table(data: Mapping[str, Any], number: int) -> Table:
  """Lengths of each run, before and after."""
  rows = []
  for i, run in enumerate(data["runs"]):
    if not run["training"]:
      continue
    first, last = _ends(run)
    at = lambda j, name, i=i: Number(
      ("runs", i, "evaluations", j, "summary", "all", name), "mean"
    )
    both = lambda name, at=at, first=first, last=last: [
      at(first, name),
      " → ",
      at(last, name),
    ]
    rows.append([run["name"], both("tokens_right"), both("tokens_wrong")])
  caption = "Of all held-out responses, at the first evaluation → at the last."
  head = ["run", "tokens, right", "tokens, wrong"]
  return Table(f"Table {number}. Length", caption, head, rows, 1)


def section(data: Mapping[str, Any]) -> str:
  """The responses of the first run that has some, before and after."""
  chosen = next((i for i, x in enumerate(data["runs"]) if x["answers"]), None)
  if chosen is None:
    return ""
  run = data["runs"][chosen]
  steps = (
    cells.as_html(Number(("runs", chosen, *place), "count"), data)
    for place in (("evaluations", j, "step") for j in _ends(run))
  )
  columns = "".join(f'<th class="text">step {step}</th>' for step in steps)
  head = f'<thead><tr><th class="text">prompt</th>{columns}</tr></thead>'
  rows = [_row(data, chosen, j) for j in range(len(run["answers"]))]
  of = lambda some: f"<table>{head}<tbody>{''.join(some)}</tbody></table>"
  rest = rows[_OPEN:]
  more = f"<details><summary>{len(rest)} more</summary>{of(rest)}</details>"
  caption = (
    f"{run['name']}: the first sample of the first held-out prompts of each "
    "task, not chosen by what they say; and the share of right ones among all "
    "samples of the prompt."
  )
  return (
    '<section id="answers">\n<h2>The same prompts, before and after</h2>\n'
    f'<p class="caption">{html.escape(caption)}</p>\n{of(rows[:_OPEN])}'
    f"{more if rest else ''}\n</section>"
  )


def _ends(run: Mapping[str, Any]) -> tuple[int, int]:
  return 0, len(run["evaluations"]) - 1


def _row(data: Mapping[str, Any], run: int, j: int) -> str:
  one = data["runs"][run]["answers"][j]
  said = "".join(
    _said_cell(data, ("runs", run, "answers", j, when))
    for when in ("before", "after")
  )
  return (
    f'<tr><td class="text">{html.escape(_cut(one["prompt"]))}'
    f"<small>{html.escape(one['task'])}</small></td>{said}</tr>"
  )


def _said_cell(data: Mapping[str, Any], place: tuple[str | int, ...]) -> str:
  said = cells.value(place, data)
  verdict = "pass" if said["pass"] else "fail"
  tokens = cells.as_html(Number((*place, "tokens"), "count"), data)
  rate = cells.as_html(Number((*place, "rate"), "percent1"), data)
  return (
    f'<td class="text said {verdict}">{html.escape(_cut(said["response"]))}'
    f"<small><b>{verdict}</b>, {tokens} tokens; {rate} % of all samples right"
    "</small></td>"
  )


def _cut(text: str) -> str:
  rest = len(text) - _LONGEST
  return f"{text[:_LONGEST]}\n[{rest:,} more characters]" if rest > 0 else text
