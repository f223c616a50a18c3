"""Tests of launch/revival: prompts, measures, and how it decides."""

import itertools
import json
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

REVIVAL = pathlib.Path(__file__).parents[1] / "launch" / "revival"
sys.path.append(str(REVIVAL))

import countdown
import exact
import puzzles
import report as revival_report
import run
import study

from brorl_jax import warmup
from brorl_jax.attention import Rope
from brorl_jax.policy import Policy
from brorl_jax.report import cells
from brorl_jax.tasks import dataset, gym, heldout
from configs import revival

# ------------------------------------------------------------------ the prompts


def test_every_expression_is_there_and_comes_to_what_it_says():
  found = countdown.responses((3, 4, 5, 7), paths=False)
  assert len(found) == 24 * 27
  for text, value in found.items():
    assert re.fullmatch(r"\d([-+*]\d){3}", text)
    assert sorted(text[::2]) == ["3", "4", "5", "7"]
    assert eval(text) == value


def test_every_path_leads_to_its_answer():
  found = countdown.responses((2, 4, 9), paths=True)
  for text, value in found.items():
    path, answer = text.removesuffix("</answer>").split("<answer>")
    assert eval(answer) == value
    left = [2, 4, 9]
    for said in path.split(","):
      one, sign, other, total = re.fullmatch(
        r"(-?\d+)([-+*])(-?\d+)=(-?\d+)", said
      ).groups()
      left.remove(int(one))
      left.remove(int(other))
      left.append(int(total))
      assert eval(f"({one}){sign}({other})") == int(total)
    assert left == [value]
  # 2 * 4 + 9: two factors in two orders, then two terms in two orders, and as
  # many ways to write the answer.
  assert sum(value == 17 for value in found.values()) == 4 * 4


@pytest.mark.parametrize("paths", [False, True])
def test_puzzles_are_judged_as_they_were_made(paths):
  kind = countdown.kind(paths=paths, scale=1)
  some = countdown.puzzles(kind, seed=0)
  assert len(some) == len({p.id for p in some}) == 2 * kind.prompts
  assert some == countdown.puzzles(kind, seed=0)
  for puzzle in some[:3]:
    entry = countdown.example(puzzle)["entry"]
    assert kind.fewest <= len(puzzle.right) <= kind.most
    for said in puzzle.right:
      assert gym.verify(said, entry).status == "pass", said
    for said in puzzle.wrong[::7]:
      assert gym.verify(said, entry).status == "fail", said


def test_files_are_read_and_their_sides_share_nothing(tmp_path):
  kind = countdown.kind(paths=False, scale=1)
  some = countdown.puzzles(kind, seed=0)
  sides = {"train": some[: kind.prompts], "heldout": some[kind.prompts :]}
  countdown.write(tmp_path, sides)
  read = [dataset.read([str(tmp_path / f"{n}.jsonl")]) for n in sides]
  assert [len(data.examples) for data in read] == [kind.prompts] * 2
  heldout.refuse_overlap(*read)
  known = json.loads((tmp_path / "known.json").read_text())
  for name, data in zip(sides, read, strict=True):
    assert [e.id for e in data.examples] == [*known[name]]


def test_the_files_of_the_control_are_read(tmp_path, monkeypatch):
  monkeypatch.setattr(puzzles, "PROMPTS", 3)
  puzzles.write(tmp_path, scale=2)
  train, held = (
    dataset.read([str(tmp_path / f"{n}.jsonl")]) for n in ("train", "heldout")
  )
  assert (len(train.examples), len(held.examples)) == (8 * 6, 8 * 3)
  assert len({e.question for e in train.examples}) == 8 * 6
  heldout.refuse_overlap(train, held)


def test_a_family_with_too_few_questions_is_refused():
  one = gym.Family("gcd", {"min_value": 2, "max_value": 3})
  with pytest.raises(ValueError, match="gcd has fewer than 50 different"):
    puzzles.train(one, 50)


def test_arms_differ_in_what_they_say():
  arms = {
    name: revival.get_config(f"countdown/{name}") for name in revival.ARMS
  }
  assert {name: (c.n, c.samples) for name, c in arms.items()} == {
    "n16": (16, 32 * 16),
    "n512_equal_samples": (512, 32 * 16),
    "n512_paper": (512, 8 * 32 * 16),
    "n512_equal_prompts": (512, 32 * 512),
    "n16_distinct": (16, 32 * 16),
    "n512_distinct": (512, 32 * 512),
  }
  assert {c.minibatches for c in arms.values()} == {1}
  for name, c in arms.items():
    assert (c.credit == "distinct") == ("distinct" in name)
  with pytest.raises(ValueError, match=r"there is no 'x/n16'; there are puz"):
    revival.get_config("x/n16")
  larger = revival.get_config("countdown/n16/4")
  assert (larger.samples, larger.max_new_tokens) == (4 * 32 * 16, 18)


# ------------------------------------------------------------- what is measured

TINY = Policy(
  vocab=20,
  width=16,
  layers=1,
  heads=2,
  kv_heads=2,
  head_size=8,
  mlp=16,
  rope=Rope(100.0),
  norm_eps=1e-6,
  tied=True,
  qkv_bias=True,
)


def test_measures_by_hand():
  p = np.array([[0.5, 0.25, 0.0, 0.0]])
  before = np.array([[0.1, 0.5, 0.2, 0.9]])
  some = np.array([[True, True, True, False]])
  with np.errstate(divide="ignore"):
    told = exact.measures(np.log(p), np.log(before), some)
  assert told["pass_at_1"] == [0.75]
  assert told["covered"] == pytest.approx([2 / 3])
  assert told["distinct"] == pytest.approx([2.0])  # both are sure to be drawn
  assert told["fell"] == pytest.approx([2 / 3])
  assert told["lost"] == pytest.approx([0.25 + 0.2])


def test_distinct_answers_are_those_of_256_samples():
  p, draws = np.array([0.3, 0.01, 0.002, 1e-4]), 256
  logp = np.log(p)[None]
  told = exact.measures(logp, logp, np.ones((1, 4), bool))["distinct"][0]
  rng = np.random.default_rng(0)
  odds = [*p, 1 - p.sum()]
  counts = rng.multinomial(draws, odds, size=4000)[:, :4] > 0
  mean, se = counts.sum(1).mean(), counts.sum(1).std() / 4000**0.5
  assert abs(told - mean) < 4 * se


def test_probabilities_are_those_of_the_policy():
  params = TINY.init(jax.random.key(0))
  rng = np.random.default_rng(0)
  known = exact.Known.__new__(exact.Known)
  known.prompt = rng.integers(0, 20, (2, 4)).astype(np.int32)
  known.prompt_mask = np.array([[False, True, True, True], [True] * 4])
  known.response = rng.integers(0, 20, (2, 3, 5)).astype(np.int32)
  length = np.array([[5, 2, 4], [1, 3, 5]])
  known.mask = np.arange(5) < length[..., None]
  got = exact.reader(TINY)(params, known)
  for p, a in itertools.product(range(2), range(3)):
    said = known.response[p, a][known.mask[p, a]]
    row = [*known.prompt[p][known.prompt_mask[p]], *said]
    whole = jnp.asarray([row]), jnp.ones((1, len(row)), bool)
    logits = jax.nn.log_softmax(TINY.logits(params, *whole)[0])
    places = np.arange(len(row) - len(said) - 1, len(row) - 1)
    want = float(jnp.sum(logits[places, jnp.asarray(said)]))
    assert got[p, a] == pytest.approx(want, abs=1e-4)


def test_the_policy_is_taught_with_the_end_of_each_answer(tmp_path):
  kind = countdown.Kind(3, True, 2, 16, 128)
  some = countdown.puzzles(kind, seed=0)
  countdown.teach(tmp_path, some, seed=0, width=16, layers=1, steps=1)
  text = countdown.tokenizer.Tokenizer(tmp_path)
  shown = countdown.demonstrations(some, text, each=200, seed=0)
  assert isinstance(shown, warmup.Demonstrations)
  length = shown.mask.sum(axis=1)
  right = 0
  for row, end in enumerate(length):
    ids = shown.response[row, :end].tolist()
    assert ids[-1] == text.stop_ids[0] and text.stop_ids[0] not in ids[:-1]
    said = text.decode([ids])[0]
    puzzle = some[row // 200]
    assert said in puzzle.right or said in puzzle.wrong
    right += said in puzzle.right
  assert 0.01 * len(length) < right < 0.5 * len(length)
  assert length.max() <= revival.WINGS["paths"][2]
  assert shown.prompt.shape[1] <= revival.WINGS["paths"][1]


# -------------------------------------------------------------------- the study


def made(rates, busy_s=None, samples=None):
  """A run that was measured after each row of rates."""
  rates = np.array(rates, float)
  places = np.arange(len(rates), dtype=float)
  return study.Run(
    places if busy_s is None else np.array(busy_s, float),
    100 * places if samples is None else np.array(samples, float),
    {"pass_at_1": rates.mean(axis=1), "distinct": 8 - 2 * places},
    rates,
  )


def test_a_level_is_met_between_two_measurements():
  one = made([[0.1, 0.3], [0.5, 0.3], [0.9, 0.5]])
  got = study.at_level(one, 0.3)  # half way from .2 to .4
  assert got == pytest.approx(
    {"pass_at_1": 0.3, "distinct": 7.0, "busy_s": 0.5, "samples": 50.0}
  )
  assert study.at_level(one, 0.9) is None
  falls = made([[0.5], [0.1], [0.7]])
  assert study.at_level(falls, 0.4)["distinct"] == 8.0  # where it begins


def test_measures_at_equal_samples():
  one = made([[0.2], [0.4], [0.8]])
  assert study.at_samples(one, 150.0)["pass_at_1"] == pytest.approx(0.6)


def test_an_arm_against_another_is_paired_by_prompt_and_seed():
  rng = np.random.default_rng(0)
  a, b = rng.uniform(size=(2, 3, 7))
  got = study.against(
    [made([row, row]) for row in a], [made([row, row]) for row in b]
  )
  want = scipy.stats.ttest_rel(a.ravel(), b.ravel())
  assert got["difference"] == pytest.approx((a - b).mean(), abs=1e-6)
  assert got["p_plain"] == pytest.approx(want.pvalue, rel=1e-4)
  assert got["p_by_prompt"] != pytest.approx(got["p_plain"], rel=1e-2)
  assert got["seeds_ahead"] == (a.mean(axis=1) > b.mean(axis=1)).sum()
  assert got["seeds"] == 3


def test_revived_are_the_prompts_that_were_dead_and_live():
  assert study.revived(made([[0.0, 0.04, 0.9], [0.6, 0.4, 0.0]])) == 0.5
  assert study.revived(made([[0.2, 0.3], [0.9, 0.9]])) is None


def test_kept_prompts_are_foretold_by_brute_force():
  n = 6
  for c, N in itertools.product(range(n + 1), (1, 2, 3, 6)):
    right = [True] * c + [False] * (n - c)
    groups = [*itertools.combinations(right, N)]
    kept = np.mean([0 < sum(group) < N for group in groups])
    (got,) = study.kept_at(np.array([c]), n, N)
    assert got == pytest.approx(kept)


def test_the_variance_of_a_group_is_foretold_by_brute_force():
  n, c = 7, 3
  right = [1.0] * c + [0.0] * (n - c)
  for N in (2, 4):
    groups = np.array([*itertools.combinations(right, N)])
    got = study.variance_at(np.array([c]), n, N)
    assert got == pytest.approx(groups.var(axis=1).mean())


# ---------------------------------------------------------------- the decisions


def test_standing_still_is_no_significant_gain_over_the_last_third():
  rng = np.random.default_rng(0)
  steps = [0, 10, 20, 30, 40, 50, 60]
  noise = lambda: rng.normal(0, 0.02, 40)
  flat = np.array([np.full(40, 0.5) + noise() for _ in steps])
  assert run.stands_still(steps, flat)
  late = np.array([0.3 + 0.005 * s + noise() for s in steps])
  assert not run.stands_still(steps, late)
  early = np.array([min(0.5, 0.1 + 0.02 * s) + noise() for s in steps])
  assert run.stands_still(steps, early)
  falls = np.array([0.9 - 0.005 * s + noise() for s in steps])
  assert run.stands_still(steps, falls)
  assert not run.stands_still(steps[:3], flat[:3])  # too little to tell


WING = run.Wing("countdown", 1e-3, 1.0, 1.0, {"start": ("n16",)}, exact=True)


class Machine:
  """Does nothing, and remembers what."""

  def __init__(self):
    self.jobs = []

  def run(self, jobs):
    self.jobs += jobs


@pytest.mark.parametrize(
  "best, tried, chosen",
  [
    (0, [-1, 0, 1], 1e-3),
    (1, [-1, 0, 1, 2], 3e-3),  # one beyond it is worse
    (2, [-1, 0, 1, 2, 3], 9e-3),
    (9, [-1, 0, 1, 2, 3], 0.027),  # no more are tried
    (-2, [-1, 0, 1, -2, -3], 1.11e-4),
  ],
)
def test_rates_are_tried_until_the_best_is_inside(
  best, tried, chosen, monkeypatch, tmp_path
):
  def rates(folder, wing):
    power = round(
      np.log(float(folder.name[2:].rsplit("-seed", 1)[0]) / 1e-3) / np.log(3)
    )
    return [0, 1, 2], np.full((3, 4), 1.0 - 0.1 * abs(power - best))

  monkeypatch.setattr(run, "rates", rates)
  machine = Machine()
  which = ("start", "n16")
  got = run.best_rates(WING, machine, tmp_path, [which], 1.0, 1)
  assert got == {which: pytest.approx(chosen, rel=0.01)}
  powers = [round(np.log(job.lr / 1e-3) / np.log(3)) for job in machine.jobs]
  assert powers == tried
  assert {job.seed for job in machine.jobs} == {run.TUNING_SEED}
  assert run.TUNING_SEED not in run.SEEDS and len(run.SEEDS) >= 3


def test_a_run_that_is_done_is_not_done_again(tmp_path, monkeypatch):
  called = []

  def call(folder, cores, *args):
    called.append(args)
    folder.mkdir(parents=True, exist_ok=True)

  monkeypatch.setattr(run, "call", call)
  job = run.Job(WING, "start", "n16", 1e-3, 0, 5.0)
  run.train(job, tmp_path, {0})
  assert len(called) == 2  # the run, and what is read of it
  flags = called[0]
  assert "--config=configs/revival.py:countdown/n16/1" in flags
  assert "--config.max_busy_s=5.0" in flags and "--config.seed=0" in flags
  run.train(job, tmp_path, {0})
  assert len(called) == 2
  longer = run.Job(WING, "start", "n16", 1e-3, 0, 7.0)
  run.train(longer, tmp_path, {0})
  assert len(called) == 4


def test_what_fails_is_named_with_its_last_lines(tmp_path):
  with pytest.raises(SystemExit, match=r"x failed; .*x\.log ends with:\na\nb"):
    run.call(
      tmp_path / "x",
      {0},
      "-c",
      "print('a'); import sys; sys.exit('b')",
    )


# --------------------------------------------------------------------- the page


def folders(root, arms, *, wing="countdown", where="start"):
  """Runs as run.py leaves them: two seeds of each arm."""
  rng = np.random.default_rng(0)
  for arm, seed in itertools.product(arms, (0, 1)):
    path = root / wing / where / arm / f"lr0.001-seed{seed}"
    path.mkdir(parents=True)
    lines = [
      {"step": s, "time/busy_s": 1.5, "data/samples_total": 64 * s}
      for s in range(1, 5)
    ]
    write = lambda name, some, path=path: (path / name).write_text(
      "".join(json.dumps(line) + "\n" for line in some)
    )
    write("metrics.jsonl", lines)
    sides = lambda: {
      name: {k: rng.uniform(size=6).tolist() for k in study.EXACT}
      for name in ("train", "heldout")
    }
    write("exact.jsonl", [{"step": s, **sides()} for s in (0, 2, 4)])
    (path / "done").touch()
  chosen = {f"{where}/{arm}": 0.001 for arm in arms}
  (root / wing / "rates.json").write_text(json.dumps(chosen))


def test_the_page_says_what_the_runs_say(tmp_path, capsys):
  folders(tmp_path, ["n16", "n512_paper"])
  page = revival_report.write(tmp_path)
  data = json.loads((page.parent / "revival.json").read_text())
  arm = data["wings"]["countdown"]["start"]["arms"]["n512_paper"]
  ends = []
  for seed in (0, 1):
    path = tmp_path / f"countdown/start/n512_paper/lr0.001-seed{seed}"
    last = json.loads((path / "exact.jsonl").read_text().splitlines()[-1])
    ends.append(np.mean(last["train"]["pass_at_1"]))
  assert arm["end"]["pass_at_1"]["mean"] == pytest.approx(np.mean(ends))
  assert arm["end"]["pass_at_1"]["high"] == pytest.approx(max(ends))
  assert arm["end"]["busy_s"]["mean"] == 6.0
  assert arm["end"]["samples"]["mean"] == 256.0
  html = page.read_text()
  spans = re.findall(r'data-path="([^"]+)" data-kind="(\w+)">([^<]*)<', html)
  assert len(spans) > 30
  for pointer, kind, text in spans:
    path = [
      int(k) if k.isdigit() and "levels" not in pointer else k
      for k in pointer.split("/")[1:]
    ]
    number = cells.Number(tuple(path), kind)
    assert text == cells.written(number, data).replace("<", "&lt;")
  assert html.count("<img ") == 4 and "N = 512, 8 x samples" in html
  assert "Against N = 16" in capsys.readouterr().out


def test_what_has_not_run_yet_is_left_out(tmp_path):
  (tmp_path / "paths").mkdir(parents=True)
  (tmp_path / "paths" / "rates.json").write_text('{"saturated/n16": 0.001}')
  page = revival_report.write(tmp_path)
  data = json.loads((page.parent / "revival.json").read_text())
  assert data == {
    "wings": {"paths": {"saturated": {"arms": {}}}},
    "sweep": None,
  }


def test_a_trial_is_not_taken_for_a_part_of_the_whole(tmp_path):
  run.refuse_another(tmp_path, {"scale": 1, "share": 0.05})
  run.refuse_another(tmp_path, {"scale": 1, "share": 0.05})
  with pytest.raises(SystemExit, match=r"'share': 0\.05}, not .*1\.0}; choose"):
    run.refuse_another(tmp_path, {"scale": 1, "share": 1.0})
