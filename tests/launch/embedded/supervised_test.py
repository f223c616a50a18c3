"""Tests of launch/embedded/supervised.py."""

import itertools
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs_for_tests as made
from messages import mentions
from update_cases import POLICY

from brorl_jax.model import huggingface
from brorl_jax.model.tokenizer import Tokenizer
from launch.embedded import supervised
from launch.embedded.supervised import Pair, PairLayout


def test_pairs_wait_for_a_row_with_room():
  lengths, layout = [9, 9, 2, 2, 1], PairLayout(10, 1, 2)
  # 2 and 3 wait, so that 4, which would fit, is not looked at.
  found = [*supervised.epoch(lengths, layout, range(5))]
  assert found == [[[0], [1]], [[2, 3, 4]]]
  lengths = np.random.default_rng(0).integers(2, 11, 99).tolist()
  found = [*supervised.epoch(lengths, layout, range(99))]
  rows = [row for update in found for row in update]
  assert sorted(itertools.chain(*rows)) == [*range(99)]
  assert max(sum(lengths[pair] for pair in row) for row in rows) <= 10
  whole, layout = [Pair([1] * 9, [1] * 7)] * 5, PairLayout(16, 2, 1)
  assert supervised.updates_in(whole, layout, epochs=2, seed=0) == 6


def test_rows_by_hand():
  pairs = [Pair([1, 2], [3]), Pair([4], [5, 6]), Pair([7, 8, 9], [10])]
  layout = PairLayout(tokens=8, rows=1, microbatches=3)
  rows = supervised.pack(pairs, [[2, 0], [1]], layout)
  for found, *want in (
    (rows.tokens, [7, 8, 9, 10, 1, 2, 3, 0], [4, 5, 6, 0, 0, 0, 0, 0]),
    (rows.end, [4, 4, 4, 4, 7, 7, 7, 0], [3, 3, 3, 0, 0, 0, 0, 0]),
    (rows.counts, [0, 0, 0, 1, 0, 0, 1, 0], [0, 1, 1, 0, 0, 0, 0, 0]),
  ):
    assert found[:, 0].astype(int).tolist() == [*want, [0] * 8]
  assert rows.used == 2  # the third microbatch is not computed


RNG = np.random.default_rng(0)
IDS = lambda low, high: RNG.integers(1, 16, RNG.integers(low, high)).tolist()
PAIRS = [Pair(IDS(1, 5), IDS(1, 4)) for _ in range(9)]


def run(layout, count, lr=1.0, seed=0):
  """All pairs are in an update if it has enough rows."""
  looks = []
  trained = supervised.train(POLICY.init(jax.random.key(0)),
    PAIRS, response_logp=POLICY.response_logp, tx=optax.sgd(lr), layout=layout,
    count=count, seed=seed, look=lambda *seen: looks.append(seen))  # fmt: skip
  return trained, looks


@pytest.mark.ci
def test_neither_packing_nor_microbatches_change_an_update():
  want, looks = run(PairLayout(8, 9, 1), 1)  # two short ones share a row
  alone = lambda p, r: POLICY.response_logp(
    POLICY.init(jax.random.key(0)),
    jnp.array([p]), jnp.ones((1, len(p)), bool), jnp.array([[r]]),
  )[0].sum()  # fmt: skip
  loss = -sum(alone(*x) for x in PAIRS) / sum(len(r) for _, r in PAIRS)
  assert looks == [(1, pytest.approx(float(loss), rel=1e-5))]
  got, again = run(PairLayout(24, 2, 3), 1, seed=1)
  chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-6)
  assert again == [(1, pytest.approx(looks[0][1], rel=1e-5))]
  with pytest.raises(FloatingPointError, match=r"update [1-9].*learning rate"):
    run(PairLayout(16, 2, 2), 20, lr=1e30)


def command(monkeypatch, tmp_path, pairs, *more):
  made.dump(tmp_path / "pairs.jsonl", pairs)
  words = [f"{tmp_path}/pairs.jsonl", f"--workdir={tmp_path}/warm", *more]
  monkeypatch.setattr("sys.argv", ["supervised", "--row_tokens=48", *words])
  supervised.main()
  return tmp_path / "warm"


@pytest.mark.ci
def test_a_checkpoint_learns_pairs(tmp_path, monkeypatch, capsys):
  every, start = itertools.product(range(9), repeat=2), tmp_path / "start"
  pairs = [{"prompt": f"{a} + {b}?", "response": str(a + b)} for a, b in every]
  shutil.copytree(huggingface.ASSETS, start)
  (start / "trained_on.json").write_text('{"starts": []}\n')
  more = f"--checkpoint={start} --rows=4 --microbatches=2 --lr=.002 --epochs=5"
  warm = command(monkeypatch, tmp_path, pairs, *more.split())
  said = capsys.readouterr().err.splitlines()
  losses = [float(x.split()[2]) for x in said if "nats" in x]
  assert losses[-1] < 0.6 * losses[0]
  assert huggingface.load(start)[0] == huggingface.load(warm)[0]
  assert (warm / "trained_on.json").read_text() == '{"starts": []}\n'
  text = Tokenizer(warm)
  (one, *_) = supervised.read_pairs(
    [f"{tmp_path}/pairs.jsonl"], text, row_tokens=48
  )
  asked = [{"role": "user", "content": "0 + 0?"}]
  assert one == (text.render(asked), [*text.encode("0"), text.stop_ids[0]])


@pytest.mark.parametrize("pair, more, says", [
  ({"prompt": "1?"}, [], "line 1 ... response: null"),
  ({"prompt": "1?", "response": "7 " * 60}, [], "line 1 ... --row_tokens"),
  ({}, ["--row_tokens=99999999"], "--row_tokens=99999999 must be at most"),
  ({}, ["--lr=0"], "--lr=0.0 must be positive"),
])  # fmt: skip
def test_refuses(pair, more, says, tmp_path, monkeypatch, capsys):
  with pytest.raises(SystemExit) as e:
    command(monkeypatch, tmp_path, [pair], *more)
  assert mentions(capsys.readouterr().err + str(e.value), says)
