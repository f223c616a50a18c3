"""Fixtures that tests of several files use."""

import pytest
from saved_models import TINY, random_params

from brorl_jax.model import huggingface


@pytest.fixture
def saved(tmp_path):
  huggingface.save(tmp_path / "model", TINY, random_params())
  return tmp_path / "model"
