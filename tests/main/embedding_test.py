"""Tests of brorl_jax/main/embedding.py, and of the rules of its configs."""

import itertools

import jax
import ml_collections
import numpy as np
import pytest
import tiers

from brorl_jax.configs import warmup, warmup_steps
from brorl_jax.errors import UserError
from brorl_jax.learner import warmup as warmups
from brorl_jax.main import embedding, settings
from brorl_jax.model import huggingface, tokenizer
from brorl_jax.tasks import dials

SMALL = dict(width=16, layers=1, heads=2, kv_heads=1, mlp=16, puzzles=40)
SMALL |= dict(vocab=420, rows=2, microbatches=2, steps=4, mixed_steps=2)


def small(of, **changed) -> ml_collections.ConfigDict:
  c = of.get_config()
  with c.unlocked():
    c.families = {name: c.families[name] for name in [*c.families][:2]}
    c.update(SMALL | changed)
  return c


@pytest.mark.ci
@pytest.mark.parametrize("of", [tiers.at_night(warmup), warmup_steps])
def test_the_same_config_makes_the_same_bytes(of, tmp_path):
  seeds = (0, 0, 1)
  for number, seed in enumerate(seeds):
    embedding.run(small(of, seed=seed), tmp_path / f"{number}")
  first, again, other = (
    {f.name: f.read_bytes() for f in (tmp_path / f"{i}").iterdir()}
    for i in range(3)
  )
  assert first == again
  assert first["model.safetensors"] != other["model.safetensors"]
  assert {"config.json", "tokenizer.json"} < first.keys()


@pytest.mark.ci
def test_each_stage_has_its_own_demonstrations_and_seed(tmp_path, monkeypatch):
  """None of a puzzle that is trained or tested on."""
  seen, shares = [], []
  demonstrations, solutions = warmups.demonstrations, warmups.solutions

  def spy(puzzles, *args, **how):
    seen.append(([x.id.split("/")[1] for x in puzzles], how["seed"]))
    return demonstrations(puzzles, *args, **how)

  def of(write, some, at_once):
    shares.append(some)
    return solutions(write, some, at_once)

  monkeypatch.setattr(warmups, "demonstrations", spy)
  monkeypatch.setattr(warmups, "solutions", of)
  c = small(warmup_steps, seed=3, steps=1, mixed_steps=1)
  embedding.run(c, tmp_path / "policy")
  assert shares == [c.qualities.to_dict(), c.mixed_qualities.to_dict()]
  assert shares[0] != shares[1]
  assert [set(splits) for splits, _ in seen] == [{"warmup"}] * 2
  assert [seed for _, seed in seen] == [13, 15]


@pytest.mark.slow
def test_the_second_stage_changes_what_the_policy_prefers(tmp_path):
  """Steps after the first stage, none after a second of direct answers."""
  changed = dict(steps=60, mixed_steps=60, lr=1e-2, mixed_lr=1e-2)
  shares = {
    "steps": {"careful": 1.0, "direct": 0.0},
    "none": {"careful": 0.0, "direct": 1.0},
  }
  preferred = {}
  for name, mixed in shares.items():
    c = small(warmup_steps, at_once="", **changed)
    with c.unlocked():
      c.qualities = {"careful": 1.0, "direct": 0.0}
      c.mixed_qualities = mixed
    embedding.run(c, tmp_path / name)
    policy, params = huggingface.load(tmp_path / name)
    text = tokenizer.Tokenizer(tmp_path / name)
    first = []
    for puzzle in itertools.islice(embedding.draw(c), 10):
      prompt = text.render(puzzle.messages)
      (tag,) = text.encode("<answer>")
      ids = np.array([[*prompt, tag]])
      logp = jax.jit(policy.packed_logp)(params, ids, np.ones_like(ids))
      first.append(float(np.asarray(logp)[0].ravel()[-1]))
    preferred[name] = np.mean(first)
  assert preferred["none"] > preferred["steps"] + 1.0


def test_the_shipped_policy_reads_every_puzzle_of_its_tasks():
  c = warmup_steps.get_config()
  assert set(c.families) == set(dials.DIALS)
  settings.check_warmup(c)
  settings.check_warmup(warmup.get_config())


@pytest.mark.parametrize(
  ("of", "field", "value", "must"),
  [
    (warmup, "right", {"gcd": 1.5}, "shares between 0 and 1"),
    (warmup_steps, "qualities", {"careful": 0.0}, "one is positive"),
    (warmup_steps, "mixed_qualities", {"careful": -1.0}, "one is positive"),
    (warmup_steps, "qualities", {"carefull": 1.0}, "careful, detour"),
    (warmup_steps, "merges", 0, "at least 1"),
    (warmup, "kv_heads", 3, "a divisor of heads"),
    (warmup_steps, "microbatches", 3, "a divisor of rows = 28"),
  ],
)
def test_refuses(of, field, value, must, tmp_path):
  c = of.get_config()
  with c.unlocked():
    c[field] = value
  with pytest.raises(UserError, match=rf"config\.{field} = .*{must}"):
    embedding.run(c, tmp_path / "out")
