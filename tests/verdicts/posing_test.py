"""Tests of brorl_jax/verdicts/posing.py."""

import pytest

from brorl_jax.verdicts.base import Example
from brorl_jax.verdicts.posing import posed


def example(*said):
  messages = tuple({"role": role, "content": text} for role, text in said)
  return Example("a", "d", "t", messages, {})


ALONE = example(("user", "1 + 1?"))
TURNS = example(("user", "1 + 1?"), ("assistant", "2"), ("user", "2 + 2?"))
TOLD = example(("system", "Be kind."), ("user", "1 + 1?"))


@pytest.mark.parametrize(
  "which, added, want",
  [
    (ALONE, {}, [("user", "1 + 1?")]),
    (ALONE, {"instruction": "Box it."}, [("user", "1 + 1?\nBox it.")]),
    (
      ALONE,
      {"system": "Be brief.", "instruction": "Box."},
      [("system", "Be brief."), ("user", "1 + 1?\nBox.")],
    ),
    (
      TURNS,
      {"system": "Be brief.", "instruction": "I"},
      [
        ("system", "Be brief."),
        ("user", "1 + 1?"),
        ("assistant", "2"),
        ("user", "2 + 2?\nI"),
      ],
    ),
    # An example that says it itself knows better.
    (
      TOLD,
      {"system": "Be brief."},
      [("system", "Be kind."), ("user", "1 + 1?")],
    ),
  ],
)
def test_what_is_added_and_where(which, added, want):
  before = [dict(message) for message in which.messages]
  got = [(m["role"], m["content"]) for m in posed(which, **added)]
  assert got == want
  assert [*which.messages] == before  # an example is never changed
