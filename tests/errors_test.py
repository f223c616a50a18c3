"""Tests of brorl_jax/errors.py."""

import pytest

from brorl_jax.errors import UserError


@pytest.mark.parametrize(
  "text, shown",
  [
    ("lr = 0 must be positive", "lr = 0 must be positive"),
    ("it is \u00e9, \u65e5 \u00b1 1", "it is \u00e9, \u65e5 \u00b1 1"),
    ("file a\nb\r", r"file a\nb\r"),
    ("\x1b[2Jgone", r"\x1b[2Jgone"),
    ("to the \u202eleft", r"to the \u202eleft"),
    ("half \ud800", r"half \ud800"),
  ],
)
def test_an_error_is_one_line_that_changes_no_terminal(text, shown):
  assert str(UserError(text)) == shown
