"""Prompts with responses, for supervised training.

A line has the fields of any example (see `dataset`): "prompt" or "messages",
and "response", the text to learn. Other columns are ignored. No verifier runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from brorl_jax.data import dataset
from brorl_jax.data.columns import Form
from brorl_jax.verdicts import strict_json
from brorl_jax.verdicts.base import Domain, Example, Field, Verdict
from brorl_jax.verdicts.strict_json import Refused

FIELDS = ("prompt", "messages", "response", "id")


def read(
  paths: str | Sequence[str],
  *,
  names: Mapping[str, str],
  beside: Sequence[str] = (),
  skip_bad: bool = False,
) -> dataset.Data:
  """Reads pairs; `response` returns the response of each.

  Args:
    paths: As for `dataset.read`.
    names: Field -> column, for fields with another name in the files.
    beside: Other files; default ids differ from theirs.
    skip_bad: Leave bad records out and list them, instead of raising.

  Raises:
    DataError: One line with file, line, field, error and remedy.
  """
  form = Form(names=names, sole=_PAIR)
  return dataset.read(
    paths, form=form, beside=beside, domains={}, skip_bad=skip_bad
  )


def response(example: Example) -> str:
  """The response that the policy learns."""
  return example.entry["response"]


def _text(value: Any) -> str:
  return strict_json.text(value, "response")


def _entry(own: Mapping[str, Any]) -> Mapping[str, Any]:
  if "response" not in own:
    raise Refused(
      "response",
      "missing; add it, or name its column:"
      " --config.data.fields=response:COLUMN",
    )
  return own


def _never(response: str, entry: Mapping[str, Any], jail: Any) -> Verdict:
  del response, entry, jail
  raise RuntimeError("pairs have no verifier")


_PAIR = Domain(
  name="pairs",
  verify=_never,
  fields={"response": Field(_text)},
  check_reference=_entry,
)
