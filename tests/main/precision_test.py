"""Tests of the dtype that a run has where its config says "auto"."""

from typing import Any

import configured
import pytest

from brorl_jax import config
from brorl_jax.configs import sft
from brorl_jax.errors import UserError
from brorl_jax.main import settings, sizes
from brorl_jax.main.commands import evaluate, plan, train, warmup
from brorl_jax.model import target
from brorl_jax.model.target import Target
from brorl_jax.runs import folder

CPU, GPU, TPU = (Target(kind, 8, 2**36) for kind in ("cpu", "gpu", "tpu"))


def auto(**fields):
  return configured.config(dtype="auto", **fields)


@pytest.mark.parametrize(
  "machine, dtype", [(CPU, "float32"), (GPU, "bfloat16"), (TPU, "bfloat16")]
)
def test_a_machine_decides_for_a_new_run(machine, dtype):
  c = sizes.with_dtype(auto(n=16), machine)
  assert c == configured.config(n=16, dtype=dtype)


@pytest.mark.parametrize("given", ["float32", "bfloat16"])
@pytest.mark.parametrize("began", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("machine", [CPU, GPU])
def test_what_is_given_stays(given, began, machine):
  c = configured.config(dtype=given)
  assert sizes.with_dtype(c, machine, began) == c


@pytest.mark.parametrize("began", ["float32", "bfloat16"])
@pytest.mark.parametrize("machine", [CPU, GPU])
def test_a_run_keeps_what_it_began_with(began, machine):
  assert sizes.with_dtype(auto(), machine, began).policy.dtype == began


def test_a_supervised_start_has_the_same_field():
  values = sft.get_config()
  values.policy.dtype = "auto"
  c = sizes.with_dtype(settings.typed(values, config.Warmup), GPU)
  assert isinstance(c, config.Warmup) and c.policy.dtype == "bfloat16"


# ------------------------------------------------------------- run folders


def test_a_folder_tells_its_dtype(tmp_path):
  assert sizes.dtype_of(tmp_path) is None
  assert sizes.dtype_of(tmp_path / "none") is None
  folder.write_config(
    config.as_dict(configured.config(dtype="bfloat16")), tmp_path
  )
  assert sizes.dtype_of(tmp_path) == "bfloat16"


@pytest.mark.parametrize("wrong", ["auto", "int8", None])
def test_a_dtype_that_no_run_writes_is_refused(tmp_path, wrong):
  folder.write_config({"policy": {"dtype": wrong}}, tmp_path)
  with pytest.raises(UserError, match=rf"policy\.dtype = {wrong!r} is not"):
    sizes.dtype_of(tmp_path)


@pytest.mark.parametrize("mode", ["train", "evaluate"])
def test_auto_is_the_same_run_whatever_it_has(tmp_path, mode):
  kept = config.as_dict(configured.config(dtype="bfloat16", lr=0.5))
  folder.write_config(kept, tmp_path, mode=mode)
  values = config.as_dict(auto(lr=0.5))
  how: dict[str, Any] = dict(allow_change=False, mode=mode)
  assert folder.check(values, tmp_path, **how) == {}
  with pytest.raises(UserError, match=r"optim\.lr = 0\.5") as e:
    folder.check(config.as_dict(auto(lr=0.25)), tmp_path, **how)
  assert "dtype" not in str(e.value)
  given = config.as_dict(configured.config(dtype="float32", lr=0.5))
  with pytest.raises(UserError, match=r"policy\.dtype = 'bfloat16' \(now"):
    folder.check(given, tmp_path, **how)


# ---------------------------------------------------------------- commands


@pytest.fixture
def trains(monkeypatch, tmp_path):
  """Starts a run that only writes its config, on some machine; the dtype."""
  workdir = tmp_path / "run"

  def hold(c, workdir, changed, *_, **how):
    workdir.mkdir(exist_ok=True)
    folder.write_config(config.as_dict(c), workdir)
    held.append((c, changed))
    return 1

  held = []
  monkeypatch.setattr(train, "_hold", hold)

  def start(c, machine, *, allow_change=False, **how):
    monkeypatch.setattr(target, "here", lambda: machine)
    with pytest.raises(SystemExit):  # "stopped after step 1"
      train.run(c, workdir, allow_change=allow_change, **how)
    c, changed = held.pop()
    assert sizes.dtype_of(workdir) == c.policy.dtype and changed == {}
    return c.policy.dtype

  return start


def test_a_run_goes_on_in_its_dtype_on_another_machine(trains):
  assert trains(auto(), GPU) == "bfloat16"
  assert trains(auto(), CPU) == "bfloat16"
  assert trains(auto(), CPU, allow_change=True) == "bfloat16"
  assert trains(configured.config(dtype="bfloat16"), CPU) == "bfloat16"
  with pytest.raises(UserError, match=r"policy\.dtype = 'bfloat16'"):
    trains(configured.config(dtype="float32"), CPU)
  assert trains(auto(), CPU, begin_again=True) == "float32"


def test_a_given_dtype_goes_on_as_auto(trains):
  assert trains(configured.config(dtype="float32"), GPU) == "float32"
  assert trains(auto(), GPU) == "float32"


class Seen(ValueError):
  """Ends a command where its parts are built."""


@pytest.fixture
def evaluates(monkeypatch, tmp_path):
  """The dtype in which a command evaluates."""

  def parts(c, workdir):
    raise Seen(c.policy.dtype)

  monkeypatch.setattr(evaluate, "_parts", parts)

  def dtype(**fields):
    with pytest.raises(UserError) as e:
      evaluate.run(auto(**fields), tmp_path / "evaluation")
    return str(e.value)

  return dtype


def test_an_evaluation_has_the_dtype_of_the_run(evaluates, tmp_path):
  assert evaluates() == "float32"
  run = tmp_path / "run"
  (run / "checkpoints").mkdir(parents=True)
  folder.write_config(
    config.as_dict(configured.config(dtype="bfloat16")), run, began_with=""
  )
  assert evaluates(checkpoint=str(run)) == "bfloat16"


def test_an_evaluation_goes_on_in_its_dtype(evaluates, tmp_path):
  workdir = tmp_path / "evaluation"
  workdir.mkdir()
  began = config.as_dict(configured.config(dtype="bfloat16"))
  folder.write_config(began, workdir, mode="evaluate")
  assert evaluates() == "bfloat16"


def test_a_supervised_start_is_built_with_it(monkeypatch, tmp_path):
  def start(c, rows):
    raise Seen(c.policy.dtype)

  monkeypatch.setattr(warmup, "_start", start)
  monkeypatch.setattr(target, "here", lambda: GPU)
  values = sft.get_config()
  values.policy.dtype = "auto"
  with pytest.raises(UserError, match=r"^bfloat16$"):
    warmup.run(values, tmp_path / "out")


@pytest.mark.parametrize(
  "fields, dtypes",
  [
    ({}, ("float32", "bfloat16")),
    ({"memory_bytes": 10**9, "mesh_fsdp": 16}, ("bfloat16", "float32")),
  ],
)
def test_a_plan_is_that_of_the_machine_it_is_for(capsys, fields, dtypes):
  small = dict(n=4, samples=64, in_flight=64, rows=1, blocks=16) | fields
  same, other = (configured.config(dtype=x, **small) for x in dtypes)
  said = []
  for c in (auto(**small), same, other):
    plan.run(c)
    said.append(capsys.readouterr().out)
  assert said[0] == said[1] != said[2]
