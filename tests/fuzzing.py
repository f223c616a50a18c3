"""Fuzz tests in two tiers, and what their examples have in common; no test."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st


def tiers(
  *strategies: st.SearchStrategy[Any],
  few: int,
  many: int,
  known: Mapping[str, tuple[Any, ...]] | None = None,
) -> Callable[[Callable[..., None]], tuple[Any, Any]]:
  """A check as two tests: a short one and a slow one.

    test_lines, test_many_lines = fuzzing.tiers(LINES, few=99, many=9999)(check)

  The short one has the same examples each time: what fails is due to a change.
  The slow one has new ones each time, and prints what reproduces a failure.
  Both begin with `known`: arguments that failed once, by what was wrong.
  """

  def of(check: Callable[..., None]) -> tuple[Any, Any]:
    def test(count: int, **how: Any) -> Any:
      out = hypothesis.given(*strategies)(check)
      for why, values in (known or {}).items():
        out = hypothesis.example(*values).via(why)(out)
      return hypothesis.settings(
        max_examples=count, deadline=None, database=None, print_blob=True,
        suppress_health_check=[*hypothesis.HealthCheck], **how,
      )(out)  # fmt: skip

    slow = pytest.mark.timeout(3600)(test(many))
    return test(few, derandomize=True), pytest.mark.slow(slow)

  return of


def spliced(data: bytes, at: int, taken: int, new: bytes) -> bytes:
  """The data with other bytes in place of some of it."""
  at = at % (len(data) + 1)
  return data[:at] + new + data[at + taken :]


@contextlib.contextmanager
def within(seconds: float):
  """Fails if what is inside takes more CPU time; other load does not count."""
  start = time.thread_time()
  yield
  spent = time.thread_time() - start
  assert spent <= seconds, f"took {spent:.1f} CPU-seconds of {seconds}"


def one_line(error: BaseException, *, longest: int = 2000) -> str:
  """The text of an error, which must be one line that can be read."""
  text = str(error)
  assert text.strip() and len(text.splitlines()) == 1, repr(text)
  assert len(text) <= longest, f"{len(text)} characters: {text[:200]}"
  return text


# Values that few fields expect. Python's own JSON writes and reads all of them.
NUMBERS = st.sampled_from([
  0, -1, 1, 2, 3, 7, 2**31, 2**63, 2**64, -(2**63), 10**40, 10**400, 0.0, -0.0,
  0.5, -1.5, 1e-320, 1e308, -1e308, 3.0, float("nan"), float("inf"),
  float("-inf"),
])  # fmt: skip
TEXTS = st.sampled_from([
  *"x 1 -1 nan None true float32 a:b ../.. / %s{0} step config".split(),
  *("", " ", "a\nb", "a\rb", "\x00", "\x1b[2J", "\u202e", "\ufeff", "\u65e5"),
  *("\U0001f600", "\ud800", "\xb2", "x" * 5000, "'\"\\"),
])  # fmt: skip
JSON = st.recursive(
  st.none() | st.booleans() | NUMBERS | TEXTS,
  lambda each: (
    st.lists(each, max_size=3) | st.dictionaries(TEXTS, each, max_size=3)
  ),
  max_leaves=5,
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
  """Every container below a value with a key of it, from the top down."""
  keys = value if isinstance(value, dict) else range(len(value))
  for key in [*keys]:
    yield value, key
    if isinstance(value[key], dict | list):
      yield from places(value[key])


def mutate(draw: Callable[[st.SearchStrategy[Any]], Any], value: Any) -> None:
  """Takes, replaces or renames something anywhere below a value, in place."""
  every = [*places(value)]
  if not every:
    return
  inside, key = every[draw(st.integers(0, 10**6)) % len(every)]
  what = draw(st.sampled_from(["replace", "replace", "take", "rename"]))
  if what == "replace":
    inside[key] = draw(JSON)
  else:
    old = inside.pop(key)
    if what == "rename" and isinstance(inside, dict):
      inside[draw(TEXTS)] = old
