"""Tests of brorl_jax/main/commands/advise.py."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from one_step import config

from brorl_jax import meshes
from brorl_jax.errors import UserError
from brorl_jax.main.commands import advise
from brorl_jax.main.commands import train as train_command
from brorl_jax.report import advice
from brorl_jax.rl import advantages

# Of one device: the batches of a run and of advice are laid out alike.
MASKED = {"loss.mean": "sequence", "mask_truncated": True}
MASKED |= {"max_new_tokens": 3, "prompts": 20}
SAME = dict(minibatches=1, max_oversampling=1, theory_prompts=0, eval_every=99)


@pytest.fixture
def one_device(monkeypatch):
  mesh = meshes.over([jax.devices()[:1]], meshes.ONE)
  monkeypatch.setattr(meshes, "make_mesh", lambda **_: mesh)


def small(n, prompts=6, **changes):
  return config(n=n, samples=n * prompts, in_flight=0, **SAME | changes)


def test_powers_of_two_with_which_a_run_could_train():
  assert [*advise.smaller(small(16))] == [16, 8, 4, 2]
  assert [*advise.smaller(small(12))] == [12, 8, 4, 2]
  assert [*advise.smaller(small(2))] == [2]
  # 4 of N are trained on, or k, at most a quarter of N, are a success.
  assert [*advise.smaller(small(16, train_on=4))] == [16, 8, 4]
  some = small(16, advantage="pass_at_k", k=2)
  assert [*advise.smaller(some)] == [16, 8]


@pytest.fixture(scope="module")
def of_16(tmp_path_factory):
  """Advice from 16 rollouts of 6 prompts, and how it was told."""
  with pytest.MonkeyPatch.context() as patch:
    mesh = meshes.over([jax.devices()[:1]], meshes.ONE)
    patch.setattr(meshes, "make_mesh", lambda **_: mesh)
    folder = tmp_path_factory.mktemp("advice")
    advise.run(small(16), folder)
  return folder, advice.read(folder / advice.FILE)


@pytest.mark.ci
def test_the_whole_is_like_itself(of_16):
  folder, data = of_16
  assert [row["n"] for row in data["rows"]] == [16, 8, 4, 2]
  assert data["rows"][0]["cosine"] == pytest.approx(1.0, abs=1e-5)
  cosines = [row["cosine"] for row in data["rows"]]
  assert all(c is None or -1.0 <= c < 0.999 for c in cosines[1:])
  assert len(data["right"]) == 6 and data["blocks"] == 6
  # What is trained on is what differs in the first n, and grows with n.
  shares = [row["informative"] for row in data["rows"]]
  assert shares == sorted(shares, reverse=True) and shares[0] > 0.0
  tokens = [row["tokens"] for row in data["rows"]]
  assert tokens == sorted(tokens, reverse=True)
  assert json.loads((folder / "config.json").read_text())["mode"] == "advise"
  assert (folder / advice.FIGURE).exists()


@pytest.mark.ci
def test_numbers_follow_from_shares_and_tokens(one_device):
  """Of leave-one-out each group with a gradient has n / (n - 1)."""
  c = small(16, advantage="leave_one_out")
  rows = advise.numbers(advise._parts(c))["rows"]
  first = rows[0]
  for row in rows:
    n, share = row["n"], row["informative"]
    assert row["coefficient"] == pytest.approx(share * n / (n - 1), rel=1e-5)
    assert row["samples_per_group"] == (n / share if share else None)
    assert row["rollout_s"] / first["rollout_s"] == pytest.approx(
      row["tokens"] / first["tokens"]
    )
  assert 0.0 < rows[-1]["informative"] < 1.0


@pytest.mark.ci
def test_a_block_is_of_prompts_that_were_drawn(one_device, monkeypatch):
  """Whether the others are kept or not: noise is that of the prompts."""
  parts = advise._parts(small(4))
  drawn = advise._first(advise._drawn(parts), 4)
  reward = np.zeros((6, 4), np.float32)
  reward[[0, 2, 5], 1] = 1.0
  drawn = drawn._replace(scores=drawn.scores._replace(reward=reward))
  found = []
  real = advise._Trained.gradient
  monkeypatch.setattr(
    advise._Trained,
    "gradient",
    lambda self, blocks: (found.append(blocks), real(self, blocks))[1],
  )
  advise._row(parts, drawn, 4)
  assert [x.tolist() for x in found[0]] == [[0], [], [1], [], [], [2]]


@pytest.mark.ci
@pytest.mark.parametrize(
  "changes",
  [{}, tiers.at_night(MASKED)],
  ids=["plain", "masked"],
)
def test_numbers_of_a_smaller_n_are_those_of_its_own_run(
  one_device, tmp_path, changes
):
  """Of advice that draws n, and of the first step of a run that does."""
  n = 4
  whole = advise.numbers(advise._parts(small(16, **changes)))
  (row,) = (x for x in whole["rows"] if x["n"] == n)
  own = advise.numbers(advise._parts(small(n, **changes)))
  same = own["rows"][0]
  for name in ("informative", "tokens", "samples_per_group"):
    assert same[name] == row[name]
  for name in ("coefficient", "norm", "signal", "noise", "signal_error"):
    assert same[name] == pytest.approx(row[name], rel=1e-3, abs=1e-6), name
  c = small(n, steps=1, save_every=1, starved="train", **changes)
  train_command.run(c, tmp_path / "run", allow_change=False)
  step = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
  assert step["sampling/pass_rate"] == pytest.approx(row["informative"])
  assert step["optim/grad_norm"] == pytest.approx(row["norm"], rel=1e-3)
  assert not changes or 0.0 < step["reward/masked_fraction"] < 1.0


@pytest.mark.parametrize(
  "changes, line",
  [
    ({"allocation": "stop", "groups": 4, "n_min": 4}, "sampling.allocation"),
    ({"prompts": 1}, "needs at least 2 prompts"),
  ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, changes, line):
  with pytest.raises(UserError, match=line):
    advise.run(small(16, **changes), tmp_path)
  assert not any(tmp_path.iterdir())


def test_the_first_rollouts_by_hand():
  from one_step import groups

  whole = groups(np.arange(12).reshape(2, 6))
  some = advise._first(whole, 4)
  np.testing.assert_array_equal(
    some.scores.reward, [[0, 1, 2, 3], [6, 7, 8, 9]]
  )
  np.testing.assert_array_equal(
    some.rollouts.tokens, whole.rollouts.tokens[:, :4]
  )
  assert some.rollouts.slot_steps is whole.rollouts.slot_steps


def test_the_coefficient_of_a_group_by_hand():
  """Leave-one-out of 4: every group with both kinds has 4 / 3."""
  right = jnp.array(
    [[1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]], bool
  )
  valid = jnp.ones_like(right)
  plain = advantages.leave_one_out(right.astype(jnp.float32), valid)
  got = advise.coefficient(plain, right, valid)
  np.testing.assert_allclose(got, [4 / 3, 4 / 3, 0, 0], rtol=1e-6)
  # MaxRL divides by the share of right ones, GRPO by the deviation.
  some = advantages.maxrl(right.astype(jnp.float32), valid)
  got = advise.coefficient(some, right, valid)
  np.testing.assert_allclose(got, [4, 4 / 3, 0, 0], rtol=1e-6)
  # Of 2 that count of 3: one kind is left.
  got = advise.coefficient(plain, right, valid.at[0, 0].set(False))
  assert got[0] == 0.0
