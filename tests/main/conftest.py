"""One training step of the embedded policy, wired once; refused flags."""

import pathlib
import sys
from typing import NamedTuple

import jax
import pytest
from absl.testing import flagsaver
from one_step import resolved

from brorl_jax import loop, main
from brorl_jax.learner import state as states
from brorl_jax.main import __main__, settings, train
from brorl_jax.model import huggingface
from brorl_jax.plan import resolve
from brorl_jax.plan.resolve import Run
from brorl_jax.rollout import sampler
from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.runs import checkpoints
from brorl_jax.stages.examples import Examples
from brorl_jax.stages.scoring import Scorer
from brorl_jax.types import Groups, State

ROOT = pathlib.Path(__file__).parents[2]


class Wired(NamedTuple):
  run: Run
  examples: Examples
  scorer: Scorer
  stages: loop.Stages
  state: State
  kept: Groups


@pytest.fixture(scope="session")
def wired():
  this = resolved()
  c, (phase,) = this.config, this.phases
  _, params = huggingface.load(this.source.source, mesh=this.mesh)
  examples = Examples(c, this.text)
  scorer = Scorer(c.reward, examples)
  state = states.initial_state(
    params, phase.tx, this.mesh, keep_reference=True, offload="nothing"
  )
  store = checkpoints.Store("nowhere", keep=1, run="")
  stages = train.stages(this, phase, examples, scorer, store)
  prompts = stages.prompts(1, range(4))
  spec = phase.memory.rollouts.spec(
    SamplingParams(), this.text.stop_ids, this.mesh
  )
  key = jax.random.fold_in(jax.random.key(c.run.seed), 1)
  out = sampler.rollouts(spec, state.params, prompts, key)
  out = jax.device_get(out)
  kept = Groups(prompts, out, stages.scores(1, prompts, out))
  yield Wired(this, examples, scorer, stages, state, kept)
  scorer.close()


@pytest.fixture
def failed(monkeypatch, capsys):
  """The one line in which a command ends, without another process."""

  def line(*args: str) -> str:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["brorl", *args])
    monkeypatch.setattr(main, "keep_freed_memory", lambda: None)
    # Threads of other tests must not end this process.
    monkeypatch.setattr(__main__.os, "_exit", sys.exit)
    with flagsaver.flagsaver(), pytest.raises(SystemExit) as e:
      __main__.main(settings.parse_flags(sys.argv))
    said = capsys.readouterr()
    assert (e.value.code, said.out) == (2, "")
    (line,) = said.err.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")

  return line


@pytest.fixture
def arrived(monkeypatch):
  """What training gets of a command: the config, the folder, and flags."""
  here = lambda c, machine, workdir: c
  monkeypatch.setattr(resolve, "here", lambda devices: None)
  monkeypatch.setattr(resolve, "resolve", here)
  monkeypatch.setattr(main, "keep_freed_memory", lambda: None)
  monkeypatch.setattr(main, "keep_programs", lambda given: None)
  monkeypatch.setattr(__main__.signal, "signal", lambda *_: None)

  def of(*args: str):
    found = []
    monkeypatch.setattr(sys, "argv", ["brorl", *args])
    run = lambda c, workdir, **how: found.append((c, str(workdir), how))
    monkeypatch.setattr(train, "run", run)
    with flagsaver.flagsaver():
      __main__.main(settings.parse_flags(sys.argv))
    return found[0]

  return of


@pytest.fixture
def refused(failed, monkeypatch):
  """The one line in which flags are refused, before a command begins."""

  def accepted(where):
    raise AssertionError("these flags are not refused")

  monkeypatch.setattr(main, "keep_programs", accepted)
  return failed
