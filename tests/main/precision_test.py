"""Tests of brorl_jax/main/precision.py: which dtype, why, and for how long."""

import json
from typing import Any

import configured
import jax
import numpy as np
import pytest
import runs_for_tests as made

from brorl_jax.configs import sft
from brorl_jax.errors import UserError
from brorl_jax.main import precision, programs, settings
from brorl_jax.main.commands import evaluate, plan, train, warmup
from brorl_jax.model.target import Target
from brorl_jax.runs import folder, machine, sections

CPU, GPU = Target("cpu", 8, 2**30), Target("gpu", 8, 2**36)
ZEN = {"float32": 102e9, "bfloat16": 203e9}
INTEL = {"float32": 61e9, "bfloat16": 34e9}


@pytest.fixture
def measures(monkeypatch, tmp_path):
  """(rates) -> a list that grows by one with each measurement of them."""
  monkeypatch.setattr(programs, "place", lambda: tmp_path)

  def of(rates):
    times = []
    monkeypatch.setattr(
      precision, "measured", lambda: times.append(0) or dict(rates)
    )
    return times

  return of


def auto(**fields):
  return configured.config(dtype="auto", **fields)


# -------------------------------------------------------------- the decision


@pytest.mark.parametrize(
  "float32, bfloat16, dtype",
  [
    (102e9, 203e9, "bfloat16"),
    (61e9, 34e9, "float32"),
    (100e9, 120e9, "bfloat16"),
    (100e9, 119e9, "float32"),  # not worth the rounding
    (1e9, 1e9, "float32"),
  ],
)
def test_bfloat16_must_be_clearly_faster(float32, bfloat16, dtype):
  assert precision.faster(dict(float32=float32, bfloat16=bfloat16)) == dtype


def test_the_line_says_both_rates():
  assert precision.line(ZEN) == "dtype bfloat16: 203 GFLOP/s, float32 102"
  said = precision.line(INTEL)
  assert said == "dtype float32: 61 GFLOP/s, bfloat16 34 (it needs 73)"


@pytest.mark.parametrize("rates", [ZEN, INTEL])
def test_a_cpu_has_the_faster_dtype(measures, rates):
  times = measures(rates)
  c, why = precision.settled(auto(n=16), CPU)
  assert c == configured.config(n=16, dtype=precision.faster(rates))
  assert why == [precision.line(rates)] and len(times) == 1


def test_an_accelerator_is_not_measured(measures):
  times = measures(INTEL)
  c, why = precision.settled(auto(), GPU)
  assert c.policy.dtype == "bfloat16" and times == []
  assert why == ["dtype bfloat16, for gpu"]


@pytest.mark.parametrize("given", ["float32", "bfloat16"])
@pytest.mark.parametrize("began", [None, "float32", "bfloat16"])
def test_what_is_given_stays(measures, given, began):
  times = measures(ZEN)
  c = configured.config(dtype=given)
  assert precision.settled(c, CPU, began) == (c, []) and times == []


@pytest.mark.parametrize("began", ["float32", "bfloat16"])
@pytest.mark.parametrize("machine", [CPU, GPU])
def test_a_run_keeps_what_it_began_with(measures, began, machine):
  times = measures(ZEN if began == "float32" else INTEL)
  c, why = precision.settled(auto(), machine, began)
  assert c.policy.dtype == began and times == []
  assert why == [f"dtype {began}, as this run began"]


def test_a_supervised_start_has_the_same_field(measures):
  measures(ZEN)
  values = sft.get_config()
  values.policy.dtype = "auto"
  c, _ = precision.settled(settings.typed(values, sections.Warmup), CPU)
  assert isinstance(c, sections.Warmup) and c.policy.dtype == "bfloat16"


# ---------------------------------------------------------- several processes


def test_process_0_decides_for_all(measures, monkeypatch, tmp_path):
  """Each is asked in turn; what the first sends is what the second gets."""
  sent = []

  def first(value):
    sent.append(value)
    return sent[0]

  monkeypatch.setattr(precision.processes, "first", first)
  out = []
  for leads, rates in ((True, INTEL), (False, ZEN)):
    times = measures(rates)
    monkeypatch.setattr(precision.processes, "leads", lambda leads=leads: leads)
    (tmp_path / precision.FILE).unlink(missing_ok=True)
    out.append(precision.settled(auto(), CPU)[0].policy.dtype)
    assert len(times) == leads
  assert out == ["float32", "float32"] and len(sent) == 2


def test_a_process_that_asks_for_nothing_does_not_leave_the_others_waiting(
  monkeypatch,
):
  met = []
  monkeypatch.setattr(
    precision.processes, "first", lambda x: met.append(x) or ("bfloat16", [])
  )
  c = configured.config(dtype="float32")
  assert precision.settled(c, CPU) == (c, [])  # and is refused, if it differs
  assert len(met) == 1


# ------------------------------------------------------------- what is kept


def test_the_second_start_does_not_measure(measures, tmp_path):
  times = measures(ZEN)
  assert precision.rates(tmp_path) == precision.rates(tmp_path) == ZEN
  assert len(times) == 1
  assert len(json.loads((tmp_path / precision.FILE).read_text())["of"]) == 2


@pytest.mark.parametrize(
  "text",
  [
    "",
    "{",
    "[]",
    "null",
    '{"of": [], "flops": 1}',
    "\xff",
    pytest.param(None, id="a folder"),
  ],
)
def test_a_file_that_is_none_is_measured_again(measures, tmp_path, text):
  times = measures(ZEN)
  path = tmp_path / precision.FILE
  if text is None:
    path.mkdir()  # nor can anything be written there: it costs .2 s each time
  else:
    path.write_bytes(text.encode("latin1"))
  assert precision.rates(tmp_path) == precision.rates(tmp_path) == ZEN
  assert len(times) == (2 if text is None else 1)


@pytest.mark.parametrize(
  "flops",
  [
    {"float32": 1e9},
    {"float32": 1e9, "bfloat16": 0.0},
    {"float32": 1e9, "bfloat16": -1.0},
    {"float32": 1e9, "bfloat16": float("nan")},
    {"float32": float("inf"), "bfloat16": 1e9},
    {"float32": "fast", "bfloat16": 1e9},
    {"float32": None, "bfloat16": 1e9},
  ],
  ids=str,
)
def test_numbers_that_are_no_rates_are_measured_again(
  measures, tmp_path, flops
):
  times = measures(ZEN)
  precision.rates(tmp_path)
  path = tmp_path / precision.FILE
  path.write_text(json.dumps(json.loads(path.read_text()) | {"flops": flops}))
  assert precision.rates(tmp_path) == ZEN and len(times) == 2
  assert precision.rates(tmp_path) == ZEN and len(times) == 2


def test_another_machine_or_xla_is_measured(measures, tmp_path, monkeypatch):
  times = measures(ZEN)
  precision.rates(tmp_path)
  (other := tmp_path / "other").mkdir()
  measures(INTEL)
  assert precision.rates(other) == INTEL and precision.rates(tmp_path) == ZEN
  assert len(times) == 1
  monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
  assert precision.rates(tmp_path) == INTEL
  versions = machine.versions() | {"jaxlib": "0.0.1"}
  monkeypatch.setattr(precision.machine, "versions", lambda: versions)
  measures(ZEN)
  assert precision.rates(tmp_path) == ZEN


def test_a_folder_that_cannot_be_written_costs_only_time(measures, tmp_path):
  times = measures(ZEN)
  gone = tmp_path / "gone"
  assert precision.rates(gone) == precision.rates(None) == ZEN
  assert len(times) == 2 and not gone.exists()


def test_rates_lie_beside_compiled_programs(tmp_path, monkeypatch):
  """One folder per kind of machine; what is tidied there is not this file."""
  before = {
    name: getattr(jax.config, name)
    for name in ("jax_enable_compilation_cache", "jax_compilation_cache_dir")
  }
  try:
    programs.keep(str(tmp_path))
    place = programs.place()
    assert place == tmp_path / programs.machine()
    monkeypatch.setattr(precision, "measured", lambda: dict(ZEN))
    precision.settled(auto(), CPU)
    monkeypatch.setattr(programs, "MOST_BYTES", 0)
    programs.keep(str(tmp_path))
    monkeypatch.setattr(precision, "measured", None)
    assert precision.settled(auto(), CPU)[1] == [precision.line(ZEN)]
    programs.keep("off")
    assert programs.place() is None
  finally:
    for name, value in before.items():
      jax.config.update(name, value)


# ---------------------------------------------------------------- the probe


@pytest.mark.parametrize(
  "float32_s, bfloat16_s, turns",
  [(2**-7, 2**-6, 6), (2**-10, 2**-10, 68), (0.08, 0.04, 1), (3.0, 1.0, 1)],
)
def test_both_take_turns_for_a_fifth_of_a_second(
  monkeypatch, float32_s, bfloat16_s, turns
):
  seconds = {"float32": float32_s, "bfloat16": bfloat16_s}
  clock, calls = [128.0], []

  def product(dtype):
    def call():
      # The second time nobody else uses the machine; the others do not count.
      slow = turns > 1 and calls.count(dtype) != 1
      calls.append(dtype)
      clock[0] += seconds[dtype] * (1.5 if slow else 1.0)

    return call

  monkeypatch.setattr(precision.time, "perf_counter", lambda: clock[0])
  monkeypatch.setattr(precision, "product", product)
  found = precision.measured()
  work = 2 * 256 * 1024 * 1024
  assert found == pytest.approx({k: work / s for k, s in seconds.items()})
  assert calls == ["float32", "bfloat16"] * turns
  assert turns == 1 or clock[0] - 128.0 <= 0.2


def test_what_is_measured_are_the_policys_products(monkeypatch):
  seen = []
  dot = precision.products.dot

  def spy(x, w, target):
    seen.append((x.shape, w.shape, x.dtype.name, w.dtype.name, target.on_cpu))
    return dot(x, w, target)

  monkeypatch.setattr(precision.products, "dot", spy)
  for dtype in precision.DTYPES:
    out = precision.product(dtype)()
    assert out.dtype == np.float32 and np.all(np.asarray(out) == 1024)
    assert seen.pop() == ((256, 1024), (1024, 1024), dtype, dtype, True)
  assert seen == []


def test_this_machine_has_rates():
  found = precision.measured()
  assert found.keys() == set(precision.DTYPES)
  # An 80486 had 1e7, and no machine of today has 1e15.
  assert all(1e7 < x < 1e15 for x in found.values())


# ------------------------------------------------------------- run folders


def test_a_folder_tells_its_dtype(tmp_path):
  assert precision.of_run(tmp_path) is None
  assert precision.of_run(tmp_path / "none") is None
  folder.write_config(
    sections.as_dict(configured.config(dtype="bfloat16")), tmp_path
  )
  assert precision.of_run(tmp_path) == "bfloat16"
  folder.write_config(made.CONFIG, tmp_path)  # without the field
  with pytest.raises(UserError, match=r"policy\.dtype = None"):
    precision.of_run(tmp_path)


@pytest.mark.parametrize("mode", ["train", "evaluate"])
def test_auto_is_the_same_run_whatever_it_has(tmp_path, mode):
  kept = sections.as_dict(configured.config(dtype="bfloat16", lr=0.5))
  folder.write_config(kept, tmp_path, mode=mode)
  values = sections.as_dict(auto(lr=0.5))
  how: dict[str, Any] = dict(allow_change=False, mode=mode)
  assert folder.check(values, tmp_path, **how) == {}
  with pytest.raises(UserError, match=r"optim\.lr = 0\.5") as e:
    folder.check(sections.as_dict(auto(lr=0.25)), tmp_path, **how)
  assert "dtype" not in str(e.value)
  given = sections.as_dict(configured.config(dtype="float32", lr=0.5))
  with pytest.raises(UserError, match=r"policy\.dtype = 'bfloat16' \(now"):
    folder.check(given, tmp_path, **how)


# ---------------------------------------------------------------- commands


@pytest.fixture
def trains(monkeypatch, tmp_path):
  """Starts a run that only writes its config; the dtype, and what it says."""
  workdir = tmp_path / "run"

  def hold(c, workdir, changed, log_lines, *_, **how):
    workdir.mkdir(exist_ok=True)
    folder.write_config(sections.as_dict(c), workdir)
    held.append((c, changed, log_lines))
    return 1

  held = []
  monkeypatch.setattr(train, "_hold", hold)

  def start(c, *, allow_change=False, **how):
    with pytest.raises(SystemExit):  # "stopped after step 1"
      train.run(c, workdir, allow_change=allow_change, **how)
    c, changed, log_lines = held.pop()
    assert precision.of_run(workdir) == c.policy.dtype and changed == {}
    return c.policy.dtype, log_lines

  return start


def test_a_run_goes_on_in_its_dtype_on_another_processor(
  measures, trains, tmp_path
):
  measures(ZEN)
  assert trains(auto()) == ("bfloat16", [precision.line(ZEN)])
  (tmp_path / precision.FILE).unlink()
  times = measures(INTEL)
  kept = ("bfloat16", ["dtype bfloat16, as this run began"])
  assert trains(auto()) == kept
  assert trains(auto(), allow_change=True) == kept and times == []
  assert trains(configured.config(dtype="bfloat16")) == ("bfloat16", [])
  with pytest.raises(UserError, match=r"policy\.dtype = 'bfloat16'"):
    trains(configured.config(dtype="float32"))
  again = trains(auto(), begin_again=True)
  assert again == ("float32", [precision.line(INTEL)])


def test_a_given_dtype_goes_on_as_auto(measures, trains):
  times = measures(ZEN)
  assert trains(configured.config(dtype="float32")) == ("float32", [])
  assert trains(auto())[0] == "float32" and times == []


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


def test_an_evaluation_has_the_dtype_of_the_run(measures, evaluates, tmp_path):
  measures(INTEL)
  assert evaluates() == "float32"
  run = tmp_path / "run"
  (run / "checkpoints").mkdir(parents=True)
  folder.write_config(
    sections.as_dict(configured.config(dtype="bfloat16")), run, began_with=""
  )
  assert evaluates(checkpoint=str(run)) == "bfloat16"


def test_an_evaluation_goes_on_in_its_dtype(measures, evaluates, tmp_path):
  times = measures(INTEL)
  workdir = tmp_path / "evaluation"
  workdir.mkdir()
  began = sections.as_dict(configured.config(dtype="bfloat16"))
  folder.write_config(began, workdir, mode="evaluate")
  assert evaluates() == "bfloat16" and times == []


def test_a_supervised_start_is_built_with_it(measures, monkeypatch, tmp_path):
  measures(ZEN)

  def start(c, rows):
    raise Seen(c.policy.dtype)

  monkeypatch.setattr(warmup, "_start", start)
  values = sft.get_config()
  values.policy.dtype = "auto"
  with pytest.raises(UserError, match=r"^bfloat16$"):
    warmup.run(values, tmp_path / "out")


@pytest.mark.parametrize(
  "fields, line",
  [
    ({}, precision.line(ZEN)),
    ({"memory_bytes": 10**9, "mesh_fsdp": 16}, "dtype bfloat16, for gpu"),
  ],
)
def test_a_plan_is_that_of_the_machine_it_is_for(
  measures, capsys, fields, line
):
  measures(ZEN)
  small = dict(n=4, samples=64, in_flight=64, rows=1, blocks=16) | fields
  plan.run(auto(**small))
  said, rest = capsys.readouterr().out.split("\n", 1)
  plan.run(configured.config(dtype="bfloat16", **small))
  assert (said, rest) == (line, capsys.readouterr().out)
  plan.run(configured.config(dtype="float32", **small))
  assert rest != capsys.readouterr().out
