"""Fixtures that tests of several files use."""

import pytest

from brorl_jax.learner import packing


@pytest.fixture
def three_lengths(monkeypatch):
  """Responses of 1, 2 and up to 4 tokens have batches of their own."""
  monkeypatch.setattr(packing, "_LEAST_LENGTH", 1)
