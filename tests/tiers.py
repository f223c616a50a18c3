"""Which cases run at a desk, in CI and at night; no test file."""

from collections.abc import Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], desk: int, ci: int | None = None) -> list[Any]:
  """All cases, as parametrize takes them: `desk` of them run at a desk.

  `ci`, by default all, run in CI, those of a desk among them; others are slow.
  Both are spread over the list, the first among them; a mark is kept.
  """
  cases = list(cases)
  free = [i for i, case in enumerate(cases) if not getattr(case, "marks", ())]
  spread = lambda count: {free[i * len(free) // count] for i in range(count)}
  at_desk = spread(desk)
  in_ci = at_desk | spread(len(free) if ci is None else ci)
  for i in {*free} - at_desk:
    cases[i] = for_ci(cases[i]) if i in in_ci else at_night(cases[i])
  return cases


def for_ci(case: Any) -> Any:
  """A case, or a tuple of arguments, that runs in CI alone."""
  return _marked(case, pytest.mark.ci)


def at_night(case: Any) -> Any:
  """A case, or a tuple of arguments, that is slow."""
  return _marked(case, pytest.mark.slow)


def _marked(case: Any, mark: pytest.MarkDecorator) -> Any:
  named = isinstance(case, type(pytest.param()))
  values = case.values if named else case
  values = values if isinstance(values, tuple) else (values,)
  return pytest.param(*values, marks=mark, id=case.id if named else None)
