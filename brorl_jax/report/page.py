"""The numbers of a comparison, its tables and figures -> one HTML file.

The file needs no other: figures are inside, and there are no scripts.
"""

import base64
import html
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from brorl_jax.report import cells, equal, tables
from brorl_jax.report.cells import Cell, Number, Part, Table
from brorl_jax.report.figures import WIDTH, Figure

_SIGNIFICANT = 0.05  # of a two-sided p
_CSS = f"""
body {{ font: 15px/1.5 system-ui, sans-serif; color: #222; margin: 2em auto;
  max-width: 1200px; padding: 0 1em; }}
h1 {{ font-size: 1.6em; }}
h2 {{ font-size: 1.15em; margin: 2.2em 0 .3em; }}
p.caption, figcaption {{ color: #555; font-size: .87em; max-width: 60em; }}
div.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .87em; margin: .5em 0;
  font-variant-numeric: tabular-nums; }}
th, td {{ padding: .25em .6em; text-align: right; vertical-align: top;
  white-space: nowrap; }}
th {{ border-bottom: 1.5px solid #222; vertical-align: bottom;
  white-space: normal; }}
td {{ border-bottom: 1px solid #e4e4e4; }}
th.text, td.text {{ text-align: left; white-space: normal; min-width: 5.5em; }}
figure {{ margin: 0; max-width: {WIDTH * 96:.0f}px; }}
p.summary {{ max-width: 60em; }}
img {{ width: 100%; height: auto; }}
@page {{ size: landscape; }}
@media print {{
  body {{ margin: 0; max-width: none; font-size: 11px; }}
  h2, tr, figure {{ break-inside: avoid; }}
  h2 {{ break-after: avoid; }}
  div.wide {{ overflow: visible; }}
}}
"""


def page(
  data: Mapping[str, Any], figures: Sequence[Figure], folder: pathlib.Path
) -> str:
  """The page.

  Args:
    data: Of `compare.numbers`.
    figures: What was drawn of it.
    folder: Where they lie.
  """
  title = "Comparison of " + ", ".join(run["name"] for run in data["runs"])
  some = tables.every(data)
  return document(
    title,
    [
      paragraph(summary(data), data),
      *(table(one, data) for one in some[:2]),
      *(figure(one, folder) for one in figures),
      *(table(one, data) for one in some[2:]),
    ],
  )


def document(title: str, body: Sequence[str]) -> str:
  """A whole page of what `paragraph`, `table` and `figure` give."""
  head = (
    '<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    f"<title>{html.escape(title)}</title>\n<style>{_CSS}</style>"
  )
  joined = "\n".join([f"<h1>{html.escape(title)}</h1>", *body])
  return (
    f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n'
    f"<body>\n{joined}\n</body>\n</html>\n"
  )


def paragraph(cell: Cell, data: Mapping[str, Any]) -> str:
  """Running text with numbers."""
  return f'<p class="summary">{cells.as_html(cell, data)}</p>'


def summary(data: Mapping[str, Any]) -> list[Part]:
  """What was compared, which run leads in what, and what the test says."""
  names = [run["name"] for run in data["runs"]]
  tasks = sum(map(len, data["tasks"].values()))
  parts: list[Part] = [
    f"{len(names)} {'folder' if len(names) == 1 else 'folders'} on the same ",
    Number(("prompts",), "count"),
    f" held-out prompts of {tasks} {'task' if tasks == 1 else 'tasks'} in ",
    ", ".join(data["domains"]),
    ", ",
    Number(("samples_per_prompt",), "count"),
    " samples of each",
    *_sampled(data),
    ". ",
  ]
  parts += _unfinished(data)
  told = [data["comparisons"][0]["at"], "end"]  # the tables have the others
  for at in dict.fromkeys(told):
    early = equal.too_early(data, at)
    parts += [f"At {at} nothing is ranked: ", *early, ". "] if early else []
    parts += [*_leaders(data, at), *_tested(data, at)]
  return parts


def _where(data: Mapping[str, Any], at: str) -> list[Part]:
  """Where; of ends also after how many steps, if these are not the same."""
  if at != "end":
    return [f"At {at}, "]
  parts: list[Part] = []
  ends = [run["evaluations"][-1]["step"] for run in data["runs"]]
  for i, run in enumerate(data["runs"] if len({*ends} - {None}) > 1 else ()):
    if ends[i] is not None:  # of weights alone
      last = len(run["evaluations"]) - 1
      step = Number(("runs", i, "evaluations", last, "step"), "count")
      parts += [", " if parts else " (", f"{run['name']} after step ", step]
  return ["At the last evaluations", *parts, "), " if parts else ", "]


def _leaders(data: Mapping[str, Any], at: str) -> list[Part]:
  """Which run has the highest score in each domain."""
  names = [run["name"] for run in data["runs"]]
  parts: list[Part] = []
  for one in data["leaders"]:
    if one["at"] != at:
      continue
    who = " and ".join(names[which["run"]] for which in one["who"])
    leads = "leads" if len(one["who"]) == 1 else "lead"
    best = one["who"][0]
    path = ("runs", best["run"], "evaluations", best["evaluation"], "summary")
    path = (*path, "by_domain", one["domain"], "pass_at_k", "1")
    parts += [", "] if parts else _where(data, at)
    parts += [f"{who} {leads} in "]
    parts += [f"{one['domain']} with ", Number(path, "percent"), " %"]
  return [*parts, ". "] if parts else []


def _tested(data: Mapping[str, Any], at: str) -> list[Part]:
  """Tests in words, by the errors that are clustered where there are any."""
  names = [run["name"] for run in data["runs"]]
  parts: list[Part] = []
  for i, one in enumerate(data["tests"]):
    if one["at"] != at:
      continue
    how = "plain" if one["by_task"] is None else "by_task"
    errors = "" if how == "plain" else ", clustered by task"
    first = names[one["first"]["run"]]
    said = f"Minus {first}, paired over prompts{errors}, two-sided: "
    p = one[how]["p_two_sided"]
    verdict = "" if p is not None and p < _SIGNIFICANT else "not "
    parts += ["; " if parts else said, f"{names[one['other']['run']]} "]
    parts += [Number(("tests", i, "difference"), "signed")]
    if one["difference"] == one["plain"]["standard_error"] == 0.0:
      parts += [" (the same score of every prompt)"]
      continue
    parts += [" (p "]
    parts += [Number(("tests", i, how, "p_two_sided"), "p"), ", "]
    parts += [f"{verdict}significant at 5 %)"]
  return [*parts, ". "] if parts else []


def _sampled(data: Mapping[str, Any]) -> list[Part]:
  parts: list[Part] = []
  for i, (name, words) in enumerate(
    (("temperature", "temperature"), ("top_p", "top-p"))
  ):
    if data["sampling"][name] is not None:
      parts += [" and " if i else " at ", f"{words} "]
      parts += [Number(("sampling", name), "value")]
  return parts


def _unfinished(data: Mapping[str, Any]) -> list[Part]:
  parts: list[Part] = []
  for i, run in enumerate(data["runs"]):
    if not run["finished"]:
      parts += [f"{run['name']} is not at its end: step "]
      parts += [Number(("runs", i, "steps"), "count"), " of "]
      parts += [Number(("runs", i, "steps_wanted"), "count"), ". "]
  return parts


def table(what: Table, data: Mapping[str, Any]) -> str:
  """A table with its title and caption."""
  kind = lambda i: ' class="text"' if i < what.labels else ""
  head = "".join(
    f"<th{kind(i)}>{cells.broken(name)}</th>"
    for i, name in enumerate(what.head)
  )
  rows = "\n".join(
    "<tr>"
    + "".join(
      f"<td{kind(i)}>{cells.as_html(cell, data)}</td>"
      for i, cell in enumerate(row)
    )
    + "</tr>"
    for row in what.rows
  )
  return (
    f"<h2>{html.escape(what.title)}</h2>\n"
    f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n'
    f"<tbody>\n{rows}\n</tbody></table></div>\n"
    f'<p class="caption">{cells.as_html(what.caption, data)}</p>'
  )


def figure(what: Figure, folder: pathlib.Path) -> str:
  """A figure of `folder`, inside the page."""
  image = base64.b64encode((folder / what.file).read_bytes()).decode()
  title = html.escape(what.title)
  return (
    f"<h2>{title}</h2>\n<figure>\n"
    f'<img alt="{title}" src="data:image/png;base64,{image}">\n'
    f"<figcaption>{html.escape(what.caption)}</figcaption>\n</figure>"
  )
