"""Tests of brorl_jax/errors.py."""

import errno

import pytest

from brorl_jax import errors
from brorl_jax.many import processes


@pytest.mark.parametrize("number, status", [
  (errno.ENOSPC, 74), (errno.EROFS, 74), (errno.EDQUOT, 74), (errno.EIO, 74),
  (errno.EMFILE, 74), (errno.ESTALE, 74), (errno.ENOENT, 2),
  (errno.EACCES, 2), (errno.ECONNREFUSED, 2),
])  # fmt: skip
def test_a_failing_storage_is_told_from_a_wrong_name(number, status):
  assert errors.status(OSError(number, "x")) == status


def test_an_error_of_the_system_without_a_number_is_the_users():
  assert errors.status(OSError("no connection")) == errors.REFUSED


def test_each_way_to_end_has_its_own_status():
  known = errors.REFUSED, errors.STORAGE, processes.LOST, processes.STOPPED
  assert known == (2, 74, 70, 75)
  assert errors.UserError.status == 2 and errors.StorageError.status == 74


@pytest.mark.parametrize("text, shown", [
  ("lr = 0 must be positive", "lr = 0 must be positive"),
  ("it is \u00e9, \u65e5 \u00b1 1", "it is \u00e9, \u65e5 \u00b1 1"),
  ("file a\nb\r", r"file a\nb\r"), ("\x1b[2Jgone", r"\x1b[2Jgone"),
  ("to the \u202eleft", r"to the \u202eleft"), ("half \ud800", r"half \ud800"),
])  # fmt: skip
def test_an_error_is_one_line_that_changes_no_terminal(text, shown):
  assert str(errors.UserError(text)) == shown


def test_the_first_line_of_what_a_library_says():
  assert errors.first_line(OSError("disk\nat 7")) == "disk"
  assert errors.first_line(OSError()) == "OSError"
