"""Tests of brorl_jax/plan/functions.py: what users bring along."""

import dataclasses
import re

import configured
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import mentions

from brorl_jax.learner import state as states
from brorl_jax.plan import functions
from brorl_jax.rl import advantages, filtering, losses

# As a user's file has them.
OWN = """
import jax.numpy as jnp

def loss(logp, logp_old, advantage, mask, *, clip_high):
  ratio = jnp.exp(logp - logp_old)
  return -jnp.minimum(ratio, 1 + clip_high) * advantage[:, None]

def of_sequences(logp, logp_old, advantage, mask):
  return -advantage * jnp.sum(logp, axis=1, where=mask)

def advantage(reward, valid, length):
  return reward - 0.5

def keep(reward, valid):
  return reward.mean(axis=1) < 0.9

def scalar(*args, **options):
  return 0.0
"""
FINDERS = {
  "loss.kind": lambda c: functions.loss(c.loss),
  "advantage.kind": lambda c: functions.advantage(c.advantage, rounds=False),
  "filter.keep": lambda c: functions.keep(c.filter),
}


@pytest.fixture
def file(tmp_path):
  path = tmp_path / "mine.py"
  path.write_text(OWN)
  return path


def test_a_name_of_a_table_is_its_value():
  for tables, field in (
    (losses.LOSSES, "loss.kind"),
    (advantages.ADVANTAGES, "advantage.kind"),
    (filtering.KEEP, "filter.keep"),
  ):
    for name, value in tables.items():
      c = configured.config(**{field: name})
      found = FINDERS[field](c)
      assert getattr(found, "func", found) is value
  (made,) = functions.phase_functions(configured.config().phases)
  assert made.digests == {}


def test_an_advantage_gets_the_numbers_of_its_kind():
  reward = jnp.float32([[1, 0, 0, 0, 0, 0]])
  valid, length = jnp.ones_like(reward, bool), jnp.ones_like(reward)
  c = configured.config(**{"advantage.kind": "pass_at_k", "advantage.k": 2})
  got = FINDERS["advantage.kind"](c)(reward, valid, length)
  np.testing.assert_array_equal(got, advantages.pass_at_k(reward, k=2))


def test_the_optimizer_has_every_number_of_the_config():
  how = dict(
    lr=0.1, warmup=2, b1=0.4, b2=0.45, eps=0.25, weight_decay=0.3,
    max_grad_norm=1.5,
  )  # fmt: skip

  def moved(tx):
    params = {"w": jnp.arange(1.0, 4.0)}
    state = tx.init(params)
    for _ in range(3):
      step, state = tx.update({"w": params["w"] ** 2}, state, params)
      params = jax.tree.map(jnp.add, params, step)
    return params["w"]

  tx, _ = functions.optimizer(configured.config(**how))
  np.testing.assert_array_equal(moved(tx), moved(states.adamw(**how)[0]))
  for name in how:  # or it could not be missed
    other, _ = states.adamw(**how | {name: 2 * how[name]})
    assert np.any(moved(other) != moved(tx)), name


def test_an_own_function_is_found_and_its_file_is_told(file):
  names = {"loss.kind": f"{file}:loss", "advantage.kind": f"{file}:advantage"}
  c = configured.config(**names, **{"filter.keep": f"{file}:keep"})
  loss = functions.loss(c.loss)
  assert (loss.unit, loss.options) == ("token", ("clip_high",))
  assert FINDERS["advantage.kind"](c).__name__ == "advantage"
  assert functions.keep(c.filter).__name__ == "keep"
  found = functions.phase_functions(c.phases)[0].digests
  assert found.keys() == {"loss.kind", "advantage.kind", "filter.keep"}
  (digest,) = {f["digest"] for f in found.values()}
  assert re.fullmatch("[0-9a-f]{32}", digest)
  assert found["loss.kind"]["name"] == f"{file}:loss"


def test_a_phase_has_functions_of_its_own(file):
  changes = (
    {"from_step": 3, "loss.kind": f"{file}:loss"},
    {"from_step": 5, "sampling.n": 256},
  )
  found = functions.phase_functions(
    configured.config(**{"run.phases": changes}).phases
  )
  names = [list(made.digests) for made in found]
  assert names == [[], ["run.phases[0]['loss.kind']"], []]
  kinds = [made.objective.loss.options for made in found]
  assert kinds[0] != kinds[1] == kinds[2]


@pytest.mark.parametrize("field", FINDERS)
@pytest.mark.parametrize(
  "name, line",
  [
    ("ppoo", "'ppoo': unknown"),
    ("{file}:nothing", "mine.py ... function 'nothing'"),
    ("nowhere.py:f", "nowhere.py does not exist"),
    ("{file}:scalar", "mine.py:scalar': returns float32[] for"),
  ],
)
def test_what_is_no_function_is_refused_by_its_field(file, field, name, line):
  c = configured.config(**{field: name.format(file=file)})
  with pytest.raises(ValueError) as error:
    functions.phase_functions(c.phases)
  assert mentions(str(error.value), line)
  assert str(error.value).startswith(f"config.{field} = ")
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  "changes, line",
  [
    (
      {"loss": "gspo", "mean": "constant"},
      "config.loss.mean = 'constant' ... loss.kind = 'gspo'",
    ),
    (
      {"loss": "{file}:of_sequences", "mean": "constant"},
      "config.loss.mean = 'constant' ... loss.kind = '{file}:of_sequences'",
    ),
  ],
)
def test_what_a_loss_does_not_have_is_refused(file, changes, line):
  at = lambda x: x.format(file=file) if isinstance(x, str) else x
  c = configured.config(**{k: at(v) for k, v in changes.items()})
  with pytest.raises(ValueError, match=re.escape("config.loss.")) as error:
    functions.phase_functions(c.phases)
  assert mentions(str(error.value), at(line))
  later = dataclasses.replace(
    configured.config(),
    run=dataclasses.replace(
      c.run,
      phases=(
        {
          "from_step": 9,
          **{configured.SHORT[k]: at(v) for k, v in changes.items()},
        },
      ),
    ),
  )
  with pytest.raises(ValueError) as of_phase:
    functions.phase_functions(later.phases)
  assert str(of_phase.value) == f"phase from step 9: {error.value}"


def test_a_changed_file_is_refused_by_name():
  before = {"loss.kind": {"name": "mine.py:loss", "digest": "a" * 32}}
  same = {"loss.kind": {"name": "mine.py:loss", "digest": "a" * 32}}
  other = {"loss.kind": {"name": "mine.py:loss", "digest": "b" * 32}}
  renamed = {"loss.kind": {"name": "yours.py:loss", "digest": "b" * 32}}
  for now in (same, renamed, {}):
    functions.refuse_changes(before, now)
  functions.refuse_changes(None, other)
  functions.refuse_changes({}, other)
  with pytest.raises(ValueError, match=r"mine\.py.*changed") as error:
    functions.refuse_changes(before, other)
  line = str(error.value)
  assert line.startswith("config.loss.kind = 'mine.py:loss': ")
  assert "a" * 32 in line and "b" * 32 in line and "\n" not in line
