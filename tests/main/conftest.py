"""One training step of the embedded policy, wired once; refused flags."""

import pathlib
import sys

import configured
import jax
import pytest
from absl.testing import flagsaver
from one_step import config

from brorl_jax import meshes
from brorl_jax.learner import state as states
from brorl_jax.main import __main__, programs, settings
from brorl_jax.main.commands import plan
from brorl_jax.main.commands import train as train_command
from brorl_jax.main.stages import learning
from brorl_jax.main.stages.scoring import Scorer
from brorl_jax.model import huggingface, tokenizer
from brorl_jax.rollout import sampler
from brorl_jax.rollout.draw import SamplingParams
from brorl_jax.types import Groups

ROOT = pathlib.Path(__file__).parents[2]
ASSETS = pathlib.Path(tokenizer.__file__).parents[1] / "assets"


@pytest.fixture(scope="session")
def wired():
  """Config, policy, examples, scorer, stages, state and groups of a step."""
  c = config()
  mesh = meshes.over([jax.devices()[:1]], meshes.ONE)
  text = tokenizer.Tokenizer(ASSETS)
  policy, params = huggingface.load(ASSETS, mesh=mesh)
  examples = configured.examples(c, text)
  scorer = Scorer(c.reward, examples)
  plans = plan.make(c, policy, axes=meshes.ONE, keep_reference=True)
  tx, _ = learning.optimizer(c.optim, c.sampling)
  state = states.initial_state(
    params, tx, mesh, keep_reference=True, offload="nothing"
  )
  stages = train_command.phase(
    settings.phases(c)[0], examples, scorer, policy, mesh, keep_reference=True
  ).stages(1)
  prompts = stages.prompts(1, range(4))
  out = sampler.rollouts(
    policy,
    state.params,
    prompts,
    jax.random.fold_in(jax.random.key(c.run.seed), 1),
    n=c.sampling.n,
    max_new_tokens=c.sampling.max_new_tokens,
    sampling=SamplingParams(),
    stop_ids=text.stop_ids,
    slots=plans.rollouts.slots,
    lanes=plans.rollouts.lanes,
    mesh=mesh,
  )
  out = jax.device_get(out)
  kept = Groups(prompts, out, stages.scores(1, prompts, out))
  yield c, policy, examples, scorer, stages, state, kept, mesh
  scorer.close()


@pytest.fixture
def failed(monkeypatch, capsys):
  """The one line in which a command ends, without another process."""

  def line(*args: str) -> str:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["brorl", *args])
    monkeypatch.setattr(__main__, "keep_freed_memory", lambda: None)
    with flagsaver.flagsaver(), pytest.raises(SystemExit) as e:
      __main__.main(settings.parse_flags(sys.argv))
    said = capsys.readouterr()
    assert (e.value.code, said.out) == (2, "")
    (line,) = said.err.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")

  return line


@pytest.fixture
def refused(failed, monkeypatch):
  """The one line in which flags are refused, before a command begins."""

  def accepted(where):
    raise AssertionError("these flags are not refused")

  monkeypatch.setattr(programs, "keep", accepted)
  return failed
