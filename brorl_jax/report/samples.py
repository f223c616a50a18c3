"""Samples of rollouts on the page, with filters but without scripts.

Each filter is a list of choices. CSS rules hide the samples that do not match
the choice. Class names are numbers, so that no text of a run gets into a rule.
"""

import html
from collections.abc import Mapping
from typing import Any

from brorl_jax.report import cells
from brorl_jax.report.cells import Number

MOST = 200  # on a page, of all runs together
_LONGEST = 6000  # characters of a prompt or a response
_TITLE = 110  # characters of a prompt in the list
_FILTERS = ("run", "step", "task", "verdict")
_CSS = """
#samples form { display: flex; flex-wrap: wrap; gap: .4em 1.2em;
  font-size: .87em; margin: .8em 0; }
#samples select { font: inherit; max-width: 14em; }
.sample { border-bottom: 1px solid #e4e4e4; padding: .3em 0; }
.sample summary { cursor: pointer; font-size: .87em; overflow-wrap: anywhere; }
.sample summary b { font-weight: 600; }
.sample dt { color: #555; font-size: .8em; margin-top: .5em; }
.sample dd { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere;
  font: .87em/1.45 ui-monospace, monospace; max-height: 28em;
  overflow-y: auto; }
.pass b.verdict { color: #16702f; }
.fail b.verdict { color: #a3261b; }
.invalid b.verdict { color: #7a5c00; }
"""


def style(data: Mapping[str, Any]) -> str:
  """The CSS rules of samples and filters."""
  rules = [
    f'#samples:has(option[value="{one}"]:checked) .sample:not(.{one}) '
    "{ display: none; }\n"
    for name, values in _choices(data).items()
    for one in (f"{name}-{i}" for i in range(len(values)))
  ]
  return _CSS + "".join(rules)


def section(data: Mapping[str, Any]) -> str:
  """Title, filters and samples; empty if no run has samples."""
  samples = data["samples"]
  if not samples:
    return ""
  choices = _choices(data)
  filters = "".join(_filter(name, choices[name]) for name in choices)
  listed = "\n".join(_sample(i, data, choices) for i in range(len(samples)))
  caption = (
    f"The newest {len(samples)} that samples.jsonl holds, a few of each step, "
    "right and wrong in turn: not a measure of either."
  )
  return (
    f'<section id="samples">\n<h2>Samples of training</h2>\n'
    f'<p class="caption">{caption}</p>\n<form autocomplete="off">{filters}'
    f"</form>\n{listed}\n</section>"
  )


def _choices(data: Mapping[str, Any]) -> dict[str, list[Any]]:
  """The values of each filter that has several."""
  out = {
    name: sorted({_of(name, one, data) for one in data["samples"]})
    for name in _FILTERS
  }
  return {name: values for name, values in out.items() if len(values) > 1}


def _of(name: str, sample: Mapping[str, Any], data: Mapping[str, Any]) -> Any:
  return data["runs"][sample["run"]]["name"] if name == "run" else sample[name]


def _filter(name: str, values: list[Any]) -> str:
  options = "".join(
    f'<option value="{name}-{i}">{html.escape(str(value))}</option>'
    for i, value in enumerate(values)
  )
  return (
    f'<label>{name} <select><option value="">all</option>{options}'
    "</select></label>\n"
  )


def _sample(
  i: int, data: Mapping[str, Any], choices: Mapping[str, list[Any]]
) -> str:
  sample = data["samples"][i]
  number = lambda key, kind: cells.as_html(
    Number(("samples", i, key), kind), data
  )
  kinds = [
    f"{name}-{values.index(_of(name, sample, data))}"
    for name, values in choices.items()
  ]
  title = " ".join(sample["prompt"].split())
  cut = f"{title[:_TITLE]}..." if len(title) > _TITLE else title
  verdict = html.escape(sample["verdict"])
  verdict_and_reason = " ".join(
    x for x in (sample["verdict"], sample["reason"]) if x
  )
  parts = (
    ("prompt", html.escape(_short(sample["prompt"]))),
    ("response", html.escape(_short(sample["response"]))),
    ("reference", html.escape(_short(str(sample["gold"] or "")))),
    ("verdict", html.escape(verdict_and_reason)),
    ("reward", number("reward", "decimal")),
    ("tokens", number("tokens", "count")),
  )
  listed = "".join(
    f"<dt>{name}</dt><dd>{text}</dd>" for name, text in parts if text
  )
  return (
    f'<details class="{" ".join(["sample", verdict, *kinds])}"><summary>'
    f"step {number('step', 'count')} "
    f"{html.escape(_of('run', sample, data))} {html.escape(sample['task'])} "
    f'<b class="verdict">{verdict}</b> {html.escape(cut)}</summary>\n'
    f"<dl>{listed}</dl></details>"
  )


def _short(text: str) -> str:
  rest = len(text) - _LONGEST
  return f"{text[:_LONGEST]}\n[{rest:,} more characters]" if rest > 0 else text
