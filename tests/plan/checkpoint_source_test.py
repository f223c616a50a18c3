"""Where a checkpoint comes from."""

import numpy as np
import pytest

from brorl_jax.many import meshes
from brorl_jax.model import huggingface
from brorl_jax.plan import checkpoint_source
from brorl_jax.runs import checkpoints
from brorl_jax.types import State
from tests.main.evaluate_test import make_run, one_device  # noqa: F401


def test_what_a_checkpoint_names(tmp_path):
  training = make_run(tmp_path / "training", [3])
  assets = huggingface.ASSETS
  assert checkpoint_source.locate("") == (assets, None, None)
  assert checkpoint_source.locate(str(assets)) == (assets, None, None)
  assert checkpoint_source.locate(str(training)) == (assets, training, None)
  one = checkpoint_source.locate(f"{training}/checkpoints/3")
  assert one == (assets, training, 3)
  around = f"{training}/../x/../training/checkpoints/3"
  (tmp_path / "x").mkdir()
  assert checkpoint_source.locate(around) == one  # as messages name it
  assert checkpoint_source.find_run(str(assets)) is None
  assert checkpoint_source.find_run("") is None


@pytest.mark.ci
def test_weights_of_another_run_are_not_read(tmp_path):
  run = make_run(tmp_path / "run", [1])
  _, params = huggingface.load(huggingface.ASSETS)
  store = checkpoints.Store(run / "checkpoints", keep=9, run="yours")
  store.save(2, State(np.int32(2), params, {}, None), {})
  store.close()
  mesh = meshes.make_mesh(fsdp=1)
  which = checkpoint_source.locate(str(run))
  with pytest.raises(ValueError, match=r"checkpoint 2 .*another run"):
    checkpoint_source.load(which, mesh, dtype="float32")
  mine = checkpoint_source.locate(str(run / "checkpoints" / "1"))
  assert checkpoint_source.load(mine, mesh, dtype="float32")[2] == 1
