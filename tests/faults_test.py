"""Runs that are broken, each in one way, go on and end as their twin.

The short form of launch/soak.sh. One of several processes that is killed,
stopped or told to end at ten moments is in many_test.py.
"""

import json
import os
import pathlib
import shutil
import signal

import compiling
import pytest

from launch.faults import damage, runs, stages, trials

pytestmark = pytest.mark.ci
KILLS, TERMS = 20, 10
# Of a run that was killed after step 8. "*" stands for any name.
FILES = (
  "config.json", "metrics.jsonl", "samples.jsonl", "visits.jsonl",
  "events.jsonl", "eval/curve.jsonl", "eval/records.jsonl",
  "events.out.tfevents.*", "checkpoints/6/_CHECKPOINT_METADATA",
  "checkpoints/6/extra/metadata", "checkpoints/6/state/_METADATA",
  "checkpoints/6/state/_sharding", "checkpoints/6/state/manifest.ocdbt",
  "checkpoints/6/state/ocdbt.process_0/manifest.ocdbt",
  "checkpoints/6/state/ocdbt.process_0/d/*",
  "checkpoints/6/state/d/*",
)  # fmt: skip
FAST = {"programs": pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"]),
  "environment": {"XLA_FLAGS": compiling.QUICK}}  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory):
  with runs.Site(tmp_path_factory.mktemp("faults"), **FAST) as site:
    yield site


@pytest.fixture(scope="module")
def twin(site) -> pathlib.Path:
  return site.twin


@pytest.fixture
def workdir(tmp_path):
  yield tmp_path / "run"
  shutil.rmtree(tmp_path / "run", ignore_errors=True)


def test_a_run_that_is_killed_and_then_told_to_end(site, workdir):
  """One start for each, and one that ends as the twin."""
  assert site.twin
  killed = site.start(workdir, "while a step is written")
  assert killed.ended(trials.LIMIT_S) == -signal.SIGKILL
  assert trials.term(site, workdir, 8) is None


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_at_random_one_after_the_other(site, workdir):
  assert trials.random_kills(site, workdir, KILLS, KILLS) is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(KILLS))
def test_a_kill_at_random(site, workdir, seed):
  assert trials.random_kills(site, workdir, seed) is None


@pytest.mark.slow
@pytest.mark.parametrize("stage", stages.STAGES)
def test_a_kill_at_a_stage(site, workdir, stage):
  assert trials.stage_kill(site, workdir, stage) is None


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tokens", [6, 20])
def test_a_kill_between_the_rounds_of_a_prompt(tmp_path, workdir, tokens):
  """4 to 16 rollouts of a prompt, over prefixes and over slots."""
  flags = f"""--config.sampling.rounds=(4,16) --config.sampling.n=16
    --config.sampling.samples=64
    --config.sampling.stop_right=2
    --config.sampling.max_new_tokens={tokens}""".split()
  with runs.Site(tmp_path / "site", flags=flags, **FAST) as site:
    drawn = {x["drawn"] for x in runs.lines(site.twin / "visits.jsonl")}
    assert drawn == {4, 16}
    killed = site.start(workdir, "while verdicts are awaited")
    assert killed.ended(trials.LIMIT_S) == -signal.SIGKILL
    assert site.start(workdir).ended(trials.LIMIT_S) == runs.DONE
    found = runs.differences(workdir, site.twin)
  # In slots a round follows as soon as the last one has rewards, which is a
  # matter of time: that is all that may differ.
  late = [x for x in found if x.endswith(": rollout/slot_occupancy")]
  assert found == (late if tokens > 16 else [])


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(TERMS))
def test_sigterm_loses_no_step(site, workdir, moment):
  assert trials.term(site, workdir, moment) is None


@pytest.mark.parametrize("way", damage.WAYS)
@pytest.mark.parametrize("file", FILES)
@pytest.mark.slow
def test_damaged_bytes(site, workdir, file, way):
  """Each way of one file of each kind."""
  found = sorted(trials.broken(site).glob(file))
  where = found[0].relative_to(trials.broken(site))
  assert trials.damaged(site, workdir, where, way) is None


def test_no_kind_of_file_is_forgotten(twin):
  known = {x.replace("checkpoints/6", "checkpoints/12") for x in FILES}
  known = {path for file in known for path in twin.glob(file)}
  mark = "commit_success.txt"  # orbax writes it, and nobody reads it
  other = [str(path) for path in damage.files(twin) if twin / path not in known
    and path.parts[:2] != ("checkpoints", "9") and path.parts[0] != "report"
    and path.name not in (mark, "process_0")]  # fmt: skip
  assert other == []


def test_a_difference_is_seen(twin, workdir):
  assert runs.differences(twin, twin) == []
  shutil.copytree(twin, workdir)
  path = workdir / "metrics.jsonl"
  lines = runs.lines(path)
  lines[6]["time/step_s"] += 1.0
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  assert runs.differences(workdir, twin) == []
  lines[6]["loss/total"] += 1e-12
  path.write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))
  assert runs.differences(workdir, twin) == ["metrics.jsonl: 11 lines, not 12",
    "metrics.jsonl, line 7: loss/total"]  # fmt: skip
  shutil.copy(twin / "metrics.jsonl", path)
  shutil.rmtree(workdir / "checkpoints" / "9")
  assert runs.differences(workdir, twin) == ["checkpoints: [12], not [9, 12]"]


def test_other_arrays_are_seen(twin, workdir):
  shutil.copytree(twin, workdir)
  shutil.rmtree(workdir / "checkpoints" / "12" / "state")
  other = workdir / "checkpoints" / "9" / "state"
  shutil.copytree(other, workdir / "checkpoints" / "12" / "state")
  assert runs.differences(workdir, twin) == ["checkpoint 12: its arrays"]


@pytest.mark.slow
def test_a_run_that_is_refused_says_so_in_a_line(site, workdir):
  start = site.start(workdir)
  assert start.ended(trials.LIMIT_S) == runs.DONE, start.said()
  start = site.start(workdir, None, "--config.run.seed=1")
  assert start.ended(60) == runs.REFUSED
  assert runs.complaint(start.said()) is None
