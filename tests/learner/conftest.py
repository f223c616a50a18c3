"""Fixtures that tests of several files use."""

import pytest


@pytest.fixture
def three_lengths(monkeypatch):
  """Responses of 1, 2 and up to 4 tokens have batches of their own."""
  monkeypatch.setattr(layout, "_LEAST_LENGTH", 1)
