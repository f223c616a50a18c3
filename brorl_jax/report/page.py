"""The numbers of a comparison, its tables and figures -> one HTML file.

The file is self-contained: it embeds the figures and has no scripts.
"""

import base64
import html
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from brorl_jax.report import cells, lead, samples, tables
from brorl_jax.report.cells import Cell, Number, Part, Table
from brorl_jax.report.figures import WIDTH, Figure

_CSS = f"""
body {{ font: 15px/1.5 system-ui, sans-serif; color: #222; margin: 2em auto;
  max-width: {WIDTH * 96:.0f}px; padding: 0 1em; }}
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
figure {{ margin: 0; }}
table.lead {{ font-size: 1.05em; }}
table.lead td {{ padding: .45em .9em; }}
img {{ width: 100%; height: auto; }}
@media (max-width: 600px) {{
  body {{ margin: 1em auto; font-size: 14px; }}
  th, td {{ padding: .2em .35em; }}
  th.text, td.text {{ min-width: 3.5em; }}
  table.lead {{ font-size: .87em; }}
  table.lead td {{ padding: .3em .35em; }}
}}
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
  """The page of `compare.numbers`, whose figures lie in a folder."""
  title = "Comparison of " + ", ".join(run["name"] for run in data["runs"])
  listed = tables.every(data)
  return document(
    title,
    [
      paragraph(measured(data), data),
      table(lead.table(data), data, look="lead"),
      *(table(one, data) for one in listed[:2]),
      *(figure(one, folder) for one in figures),
      *(table(one, data) for one in listed[2:]),
      samples.section(data),
    ],
    style=samples.style(data),
  )


def document(title: str, body: Sequence[str], *, style: str = "") -> str:
  """A whole page of the results of `paragraph`, `table` and `figure`."""
  head = (
    '<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    f"<title>{html.escape(title)}</title>\n<style>{_CSS}{style}</style>"
  )
  joined = "\n".join([f"<h1>{html.escape(title)}</h1>", *body])
  return (
    f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n'
    f"<body>\n{joined}\n</body>\n</html>\n"
  )


def paragraph(cell: Cell, data: Mapping[str, Any]) -> str:
  """A paragraph with numbers."""
  return f"<p>{cells.as_html(cell, data)}</p>"


def measured(data: Mapping[str, Any]) -> list[Part]:
  """The paragraph about prompts and samples, and unfinished runs."""
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
  return [*parts, *_unfinished(data)]


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


def table(what: Table, data: Mapping[str, Any], *, look: str = "") -> str:
  """A table with its title and caption; `look` is a CSS class of the page."""
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
    f'<div class="wide"><table class="{look}">\n'
    f"<thead><tr>{head}</tr></thead>\n"
    f"<tbody>\n{rows}\n</tbody></table></div>\n"
    f'<p class="caption">{cells.as_html(what.caption, data)}</p>'
  )


def figure(what: Figure, folder: pathlib.Path) -> str:
  """A figure of `folder`, embedded in the page."""
  image = base64.b64encode((folder / what.file).read_bytes()).decode()
  title = html.escape(what.title)
  return (
    f"<h2>{title}</h2>\n<figure>\n"
    f'<img alt="{title}" src="data:image/png;base64,{image}">\n'
    f"<figcaption>{html.escape(what.caption)}</figcaption>\n</figure>"
  )
