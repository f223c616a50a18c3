"""Tests of launch/revival: prompts, measures, and how it decides."""

import itertools
import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from brorl_jax.configs import revival
from brorl_jax.main import settings
from brorl_jax.model import tokenizer
from brorl_jax.model.attention import Rope
from brorl_jax.model.policy import Policy
from brorl_jax.report import cells
from brorl_jax.tasks import gym
from brorl_jax.tasks.data import dataset, heldout
from launch.revival import (
  countdown,
  draw,
  exact,
  machine,
  objectives,
  puzzles,
  queens,
  run,
  study,
  taught,
)
from launch.revival import report as revival_report

# The experiment has ended; its code does not change.
pytestmark = pytest.mark.slow

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
    entry = taught.example(puzzle)["entry"]
    assert kind.fewest <= len(puzzle.right) <= kind.most
    for said in puzzle.right:
      assert gym.verify(said, entry).status == "pass", said
    for said in puzzle.wrong[::7]:
      assert gym.verify(said, entry).status == "fail", said


def attacked(columns):
  """Pairs of queens in a column or on a diagonal."""
  return sum(
    b - a in (0, j - i, i - j)
    for (i, a), (j, b) in itertools.combinations(enumerate(columns), 2)
  )


def test_queens_are_all_found():
  """92 boards of 8 by 8, as is known, and those of 5 by trying all."""
  assert len(set(queens.boards(8))) == 92
  tried = {p for p in itertools.permutations(range(5)) if not attacked(p)}
  assert set(queens.boards(5)) == tried


def test_queens_are_judged_as_they_were_made():
  some = queens.puzzles(prompts=128, side=10, seed=0)
  assert len({p.id for p in some}) == len({p.question for p in some}) == 128
  assert some == queens.puzzles(prompts=128, side=10, seed=0)
  every = [*queens.boards(10)]
  for puzzle in some[:3]:
    asked = re.fullmatch(r"10: (\d)(\d) (\d)(\d)", puzzle.question).groups()
    row, column, other, another = map(int, asked)
    right = [b for b in every if b[row] == column and b[other] == another]
    assert puzzle.right == ["".join(map(str, board)) for board in sorted(right)]
    assert len(right) >= queens.FEWEST
    entry = taught.example(puzzle)["entry"]
    for said in puzzle.right:
      assert gym.verify(said, entry).status == "pass", said
    for said in puzzle.wrong:
      assert gym.verify(said, entry).status == "fail", said
      columns = [*map(int, said)]
      assert (columns[row], columns[other]) == (column, another)
      assert sorted(columns) == [*range(10)] and attacked(columns)
  larger = queens.puzzles(prompts=40, side=11, seed=0)
  assert any("a" in said for p in larger for said in p.right)


def test_files_are_read_and_their_sides_share_nothing(tmp_path):
  kind = countdown.kind(paths=False, scale=1)
  some = countdown.puzzles(kind, seed=0)
  sides = {"train": some[: kind.prompts], "heldout": some[kind.prompts :]}
  taught.write(tmp_path, sides)
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
  assert (len(train.examples), len(held.examples)) == (8 * 6, 8 * 6)
  assert len({e.question for e in train.examples}) == 8 * 6
  heldout.refuse_overlap(train, held)


def test_the_control_holds_out_what_is_asked_in_other_letters(tmp_path):
  """All of it: "Tass" is drawn for one side and "tass" for the other."""
  puzzles.write(tmp_path, scale=1)
  train, held = (
    dataset.read([str(tmp_path / f"{n}.jsonl")]) for n in ("train", "heldout")
  )
  assert (len(train.examples), len(held.examples)) == (480, 960)
  heldout.refuse_overlap(train, held)


def test_a_family_with_too_few_questions_is_refused():
  one = gym.Family("gcd", {"min_value": 2, "max_value": 3})
  with pytest.raises(ValueError, match="gcd has fewer than 50 different"):
    puzzles.train(one, 50, held_out=())


def test_arms_differ_in_what_they_say():
  arms = {
    name: revival.get_config(f"countdown/{name}") for name in revival.ARMS
  }
  assert {
    name: (c.sampling.n, c.sampling.samples) for name, c in arms.items()
  } == {
    "n16": (16, 32 * 16),
    "n512_equal_samples": (512, 32 * 16),
    "n512_paper": (512, 8 * 32 * 16),
    "n512_equal_prompts": (512, 32 * 512),
    "n16_distinct": (16, 32 * 16),
    "n512_distinct": (512, 8 * 32 * 16),
  }
  assert {c.optim.minibatches for c in arms.values()} == {1}
  for name, c in arms.items():
    assert (c.advantage.credit == "distinct") == ("distinct" in name)
  with pytest.raises(ValueError, match=r"'x/n16' is not WING/ARM/SCALE.*puz"):
    revival.get_config("x/n16")
  larger = revival.get_config("countdown/n16/4")
  assert (larger.sampling.samples, larger.sampling.max_new_tokens) == (
    4 * 32 * 16,
    18,
  )


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
  taught.teach(tmp_path, some, seed=0, width=16, layers=1, steps=1)
  text = tokenizer.Tokenizer(tmp_path)
  shown = taught.demonstrations(some, text, each=200, seed=0)
  right = 0
  for row, (_, ids) in enumerate(shown):
    assert ids[-1] == text.stop_ids[0] and text.stop_ids[0] not in ids[:-1]
    said = text.decode([ids])[0]
    puzzle = some[row // 200]
    assert said in puzzle.right or said in puzzle.wrong
    right += said in puzzle.right
  assert 0.003 * len(shown) < right < 0.5 * len(shown)
  assert max(len(ids) for _, ids in shown) <= revival.WINGS["paths"][2]
  assert max(len(ids) for ids, _ in shown) <= revival.WINGS["paths"][1]


def prepared(folder, kind):
  """Files of two prompts a side, and a policy that has their tokens."""
  some = countdown.puzzles(kind, seed=0)
  taught.write(folder, {"train": some[:2], "heldout": some[2:]})
  source = folder / "policy"
  taught.teach(source, some, seed=0, width=16, layers=1, steps=1)
  return source, some


def test_mass_is_told_since_the_policy_that_the_run_began_with(
  tmp_path, monkeypatch
):
  source, some = prepared(tmp_path, countdown.Kind(3, False, 2, 2, 12))
  told = tmp_path / "run"
  for step in ("2", "4"):
    (told / "checkpoints" / step).mkdir(parents=True)
  config = {"policy": {"checkpoint": str(source)}}
  (told / "config.json").write_text(json.dumps({"config": config}))
  # Every right answer has .25 in the beginning, then .5, then .2.
  first, after = {"p": jnp.array(0.25)}, {2: 0.5, 4: 0.2}
  monkeypatch.setattr(exact.huggingface, "load", lambda _: (None, first))
  monkeypatch.setattr(
    exact.checkpoints, "read_params", lambda _, step, like: (0, after[step])
  )
  monkeypatch.setattr(
    exact,
    "reader",
    lambda _: (
      lambda params, k: np.full(
        k.some.shape,
        np.log(params["p"] if isinstance(params, dict) else params),
      )
    ),
  )
  path = told / "exact.jsonl"
  path.write_text('{"step": 0, "tr')  # killed while it wrote
  exact.measure(tmp_path, told)
  lines = [json.loads(x)["train"] for x in path.read_text().splitlines()]
  count = np.array([len(puzzle.right) for puzzle in some[:2]])
  for line, p, fell, lost in zip(
    lines, (0.25, 0.5, 0.2), (0, 0, 1), (0, 0, 0.05), strict=True
  ):
    assert line["pass_at_1"] == pytest.approx(p * count, rel=1e-6)
    assert line["fell"] == [fell] * 2
    assert line["lost"] == pytest.approx(lost * count, abs=1e-6)
  before = path.read_bytes()
  exact.measure(tmp_path, told)
  assert path.read_bytes() == before


def test_samples_are_judged_by_the_answer_whatever_the_steps(
  tmp_path, monkeypatch
):
  source, some = prepared(tmp_path, countdown.Kind(3, True, 2, 16, 128))
  text = tokenizer.Tokenizer(source)
  known = exact.Known(tmp_path, "train", text)
  assert known.steps
  one, other = (p.right[0].split("<answer>")[1] for p in some[:2])
  wrong = some[0].wrong[0]
  monkeypatch.setattr(exact, "DRAWN", 4)

  def sample(policy, params, prompts, key, *, n, max_new_tokens, stop_ids):
    assert (policy, params, n, max_new_tokens) == ("policy", "params", 4, 48)
    asked = ["".join(text.decode([p])) for p in prompts]
    for said, puzzle in zip(asked, some, strict=False):
      assert puzzle.question in said
    said = [
      [f"1+1=3<answer>{one}", f"<answer>{one}", wrong, some[0].right[1]],
      [wrong] * 3 + [f"1+1=3<answer>{other}"],
    ]
    ids = [[[*text.encode(x), stop_ids[0]] for x in row] for row in said]
    tokens = np.zeros((2, 4, 48), np.int32)
    mask = np.zeros((2, 4, 48), bool)
    for p, n in itertools.product(range(2), range(4)):
      tokens[p, n, : len(ids[p][n])] = ids[p][n]
      mask[p, n, : len(ids[p][n])] = True
    return SimpleNamespace(tokens=tokens, mask=mask)

  monkeypatch.setattr(exact.sampler, "sample", sample)
  got = exact.drawn("policy", "params", text, known, max_new_tokens=48)
  answers = {one.split("<")[0], some[0].right[1].split(">")[1].split("<")[0]}
  assert got == {"pass_at_1": [0.75, 0.25], "distinct": [len(answers), 1]}


# -------------------------------------------------------------------- the study


def made(rates, busy_s=None, samples=None):
  """A run that was measured after each row of rates."""
  rates = np.array(rates, float)
  places = np.arange(len(rates), dtype=float)
  return study.Run(
    places,
    places if busy_s is None else np.array(busy_s, float),
    100 * places if samples is None else np.array(samples, float),
    {"pass_at_1": rates.mean(axis=1), "distinct": 8 - 2 * places},
    rates,
    512,
    32,
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
  same = [made([row, row]) for row in a]
  assert (
    study.against(same, same)["seeds_ahead"] == 0
  )  # none is ahead of itself


def test_an_arm_of_which_a_seed_never_reaches_a_level_has_none(tmp_path):
  folders(tmp_path, ["n16"])
  where = tmp_path / "countdown/start"
  for seed, last in ((0, 0.9), (1, 0.45)):
    path = where / f"n16/lr0.001-seed{seed}" / "exact.jsonl"
    sides = lambda x: {
      side: dict.fromkeys(study.EXACT, [x] * 6) for side in ("train", "heldout")
    }
    some = [(0, 0.1), (4, last)]
    path.write_text(
      "".join(json.dumps({"step": s, **sides(x)}) + "\n" for s, x in some)
    )
  levels = study.branch(where, {"n16": 0.001})["arms"]["n16"]["levels"]
  assert [k for k, told in levels.items() if told] == ["0.2", "0.3", "0.4"]
  assert levels["0.5"] is None  # though one of them does


def test_steps_begun_after_the_time_and_other_prompts_are_left_out(tmp_path):
  folders(tmp_path, ["n16"])
  path = tmp_path / "countdown/start/n16/lr0.001-seed0"
  assert study.read(path).steps.tolist() == [0, 2, 4]
  # A step takes 1.5 s: the third begins at 3.0.
  assert study.read(path, seconds=3.0).steps.tolist() == [0, 2]
  assert study.read(path, seconds=4.6).steps.tolist() == [0, 2, 4]
  (path / "exact.jsonl").unlink()
  (path / "eval").mkdir()
  (path / "eval" / "curve.jsonl").write_text(
    "".join(
      json.dumps({"step": s, "rates": [0.1, 0.5, 0.2, 0.7]}) + "\n"
      for s in (0, 3)
    )
  )
  assert study.read(path).rates.tolist() == [[0.5, 0.7]] * 2
  assert study.read(path).measures["pass_at_1"] == pytest.approx([0.6] * 2)
  deciding = study.read(path, prompts=study.DECIDING, seconds=3.0)
  assert deciding.rates.tolist() == [[0.1, 0.2]]


def test_arms_of_a_branch_are_held_against_both_credits(tmp_path):
  arms = ["n16", "n16_distinct", "n512_paper", "n512_distinct"]
  folders(tmp_path, arms)
  (
    tmp_path / "countdown/start/n512_paper/lr0.001-seed0/config.json"
  ).write_text('{"config": {"sampling": {"samples": 4096, "n": 512}}}')
  got = study.branch(tmp_path / "countdown/start", dict.fromkeys(arms, 0.001))
  last = {
    arm: np.mean(
      [
        study.read(tmp_path / f"countdown/start/{arm}/lr0.001-seed{s}").rates[
          -1
        ]
        for s in (0, 1)
      ]
    )
    for arm in arms
  }
  tested = set()
  for arm, other in itertools.product(arms, ("n16", "n16_distinct")):
    told = got["arms"][arm].get(f"against_{other}")
    if told is not None:
      tested.add((arm, other))
      assert told["difference"] == pytest.approx(last[arm] - last[other])
  assert tested == {
    ("n16_distinct", "n16"),
    ("n512_paper", "n16"),
    ("n512_distinct", "n16"),
    ("n512_distinct", "n16_distinct"),
  }
  assert got["arms"]["n512_paper"]["lr_sqrt_rule"] == pytest.approx(
    0.001 * 8**0.5
  )
  assert got["arms"]["n512_distinct"]["lr_sqrt_rule"] == pytest.approx(0.001)
  prompts = [got["arms"][arm]["prompts_per_step"] for arm in arms]
  assert prompts == [32, 32, 8, 32]


def test_the_sweep_compares_at_equal_samples(tmp_path):
  rng = np.random.default_rng(0)
  passes = rng.uniform(size=(5, 16)) < 0.4
  begin = tmp_path / "start" / "eval"
  begin.mkdir(parents=True)
  (begin / "summary.json").touch()
  (begin / "records.jsonl").write_text(
    "".join(
      json.dumps({"id": str(p), "pass": bool(x)}) + "\n"
      for p, row in enumerate(passes)
      for x in row
    )
  )
  for N, per_step in ((2, 100), (8, 400)):
    folder = tmp_path / f"n{N}"
    (folder / "report").mkdir(parents=True)
    (folder / "eval").mkdir()
    (folder / "config.json").write_text(
      '{"config": {"sampling": {"samples": 64, "n": 2}}}'
    )
    (folder / "metrics.jsonl").write_text(
      "".join(
        json.dumps(
          {
            "step": s,
            "time/busy_s": 2.0,
            "data/samples_total": per_step * s,
            "sampling/pass_rate": 0.5,
            "reward/variance_within_group": 0.2,
          }
        )
        + "\n"
        for s in (1, 2)
      )
    )
    (folder / "eval" / "curve.jsonl").write_text(
      "".join(
        json.dumps({"step": s, "rates": [0.1 + 0.2 * s] * 3}) + "\n"
        for s in (0, 1, 2)
      )
    )
  got = study.sweep(tmp_path)
  assert got["samples_of_all"] == 200
  two, eight = got["points"]
  assert (two["n"], two["prompts_seen"], eight["prompts_seen"]) == (2, 50, 50)
  # 200 samples are both steps of one and half a step of the other.
  assert two["gain_at_equal_samples"] == pytest.approx(0.4)
  assert eight["gain_at_equal_samples"] == pytest.approx(0.1)
  assert eight["gain_per_million_samples"] == pytest.approx(0.1 / 200 * 1e6)
  assert two["gain_at_end"] == eight["gain_at_end"] == pytest.approx(0.4)
  assert (two["samples_per_cpu_s"], eight["samples_per_cpu_s"]) == (50, 200)
  assert two["reward_variance"] == 0.2
  counts = passes.sum(axis=1)
  assert eight["pass_rate_predicted"] == pytest.approx(
    study.kept_at(counts, 16, 8).mean()
  )
  assert eight["reward_variance_predicted"] == pytest.approx(
    study.variance_at(counts, 16, 8)
  )


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


def test_standing_still_is_no_change_over_the_last_third():
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
  assert not run.stands_still(steps, falls)
  slowly = np.array([0.3 + 0.0004 * s + noise() for s in steps])  # by .008
  assert not run.stands_still(steps, slowly)
  # Ten prompts cannot show that nothing was gained, and so it is not shown.
  few = flat[:, :10] + rng.normal(0, 0.1, (7, 10))
  assert not run.stands_still(steps, few)
  assert run.stands_still(steps, np.full((7, 40), 0.5))  # exactly still
  assert not run.stands_still(steps[:3], flat[:3])  # too little to tell
  # What was gained before the last third is no gain of it.
  before = np.full((7, 40), 0.5)
  before[:4] -= 0.2 - 0.05 * np.arange(4)[:, None]
  assert run.stands_still(steps, before)


WING = run.Wing(
  "countdown",
  "countdown",
  1e-3,
  {"start": ("n16",)},
  {"until_saturated": 8.0, "start": 1.0},
  exact=True,
)


def experiment(root):
  return run.Experiment(root, 1, 1.0, machine.Machine(1), machine.Progress(1))


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
  def rates(_, job):
    power = round(np.log(job.lr / 1e-3) / np.log(3))
    # Where each began is not what counts, and the last one is not all.
    rate = np.full((3, 4), 1.0 - 0.1 * abs(power - best))
    rate[0] = power
    rate[1] += 0.14 * power
    rate[2] -= 0.14 * power
    return [0, 1, 2], rate

  jobs = []
  monkeypatch.setattr(run, "rates", rates)
  monkeypatch.setattr(run, "each", lambda _, some: jobs.extend(some))
  which = ("start", "n16")
  got = run.best_rates(experiment(tmp_path), WING, [which])
  assert got == {which: pytest.approx(chosen, rel=0.01)}
  powers = [round(np.log(job.lr / 1e-3) / np.log(3)) for job in jobs]
  assert powers == tried
  assert {job.seed for job in jobs} == {run.TUNING_SEED}
  assert run.TUNING_SEED not in run.SEEDS and len(run.SEEDS) >= 3


@pytest.mark.parametrize("still_after, seconds", [(0, 8), (2, 18), (99, 27)])
def test_n16_goes_on_until_it_stands_still(
  still_after, seconds, tmp_path, monkeypatch
):
  """8, 12, 18, 27 processor seconds: no more than four times 8."""
  asked, jobs, called = [], [], []

  def stands_still(*_):
    asked.append(1)
    return len(asked) > still_after

  def call(folder, cores, *args):
    folder.mkdir(parents=True)
    called.append(args)

  which = run.SATURATING
  monkeypatch.setattr(run, "best_rates", lambda *_: {which: 3e-3})
  monkeypatch.setattr(
    run, "rates", lambda *_: (np.array([0, 40]), np.array([[0.1], [0.5]]))
  )
  monkeypatch.setattr(run, "stands_still", stands_still)
  monkeypatch.setattr(run, "each", lambda _, some: jobs.extend(some))
  monkeypatch.setattr(run, "call", call)
  e = experiment(tmp_path)
  run.saturate(e, WING)
  longest = jobs[-1].seconds if jobs else 8.0
  assert longest == seconds
  assert {(job.lr, job.seed) for job in jobs} <= {(3e-3, run.TUNING_SEED)}
  stood = tmp_path / "countdown" / "saturated" / "stood.json"
  assert json.loads(stood.read_text()) == {
    "still": still_after < 99,
    "pass_at_1": 0.5,
    "steps": 40,
    "busy_s": seconds,
    "lr": 3e-3,
  }
  own = e.folder(run.Job(WING, *which, 3e-3, run.TUNING_SEED, seconds))
  assert f"--config.policy.checkpoint={own}" in called[0]
  assert (stood.parent / "policy").exists()
  run.saturate(e, WING)  # done
  assert len(called) == 1


def test_arms_begin_where_n16_stood_still_or_where_it_began(tmp_path):
  e = experiment(tmp_path)
  job = lambda wing, where: run.Job(wing, where, "n16", 1e-3, 0, 1.0)
  control = run.Wing("puzzles", "puzzles", 1e-3, {}, {}, exact=False)
  for wing in (WING, control):
    stood = tmp_path / wing.name / "saturated" / "policy"
    assert e.policy(job(wing, "saturated")) == stood
  own = tmp_path / "countdown" / "policy"
  assert e.policy(job(WING, "start")) == own
  assert e.policy(job(WING, "until_saturated")) == own
  assert e.policy(job(control, "until_saturated")) == ""  # the embedded one


def test_what_is_told_decides_nothing(tmp_path):
  """Rates and standing still look at the other half of the held-out prompts."""
  folders(tmp_path, ["n16"], wing="puzzles")
  control = run.Wing("puzzles", "puzzles", 1e-3, {}, {}, exact=False)
  e = experiment(tmp_path)
  job = run.Job(control, "start", "n16", 1e-3, 0, 9.0)
  (e.folder(job) / "exact.jsonl").unlink()
  (e.folder(job) / "eval").mkdir()
  (e.folder(job) / "eval" / "curve.jsonl").write_text(
    '{"step": 2, "rates": [0.1, 0.5, 0.2, 0.7]}\n'
  )
  steps, rate = run.rates(e, job)
  assert steps.tolist() == [2]
  assert rate.tolist() == [[0.1, 0.2]]
  assert study.read(e.folder(job)).rates.tolist() == [[0.5, 0.7]]


def test_time_left_is_of_what_has_to_run(capsys, monkeypatch):
  now = iter([0.0, 120.0, 130.0, 190.0])
  monkeypatch.setattr(machine.time, "monotonic", lambda: next(now))
  progress = machine.Progress(lanes=2)
  progress.plan(900.0)
  progress.plan(-500.0)  # had run before
  with progress.run("one", 100.0):  # of two lanes; 300 are left
    pass
  assert capsys.readouterr().out == "one: 120 s, about 3 min left\n"
  progress.plan(100.0)
  with progress.run("two", 50.0):  # 350 are left, at 1.2 s for each
    pass
  assert capsys.readouterr().out == "two: 60 s, about 4 min left\n"


def test_a_run_that_is_done_is_not_done_again(tmp_path, monkeypatch):
  called = []

  def call(folder, cores, *args):
    called.append(args)
    folder.mkdir(parents=True, exist_ok=True)

  monkeypatch.setattr(run, "call", call)
  e = experiment(tmp_path)
  job = run.Job(WING, "start", "n16", 1e-3, 0, 5.0)
  run.each(e, [job])
  assert len(called) == 2  # the run, and what is read of it
  flags = called[0]
  data = tmp_path / "countdown"
  assert f"--config.data.files=('{data}/train.jsonl',)" in flags
  assert f"--config.data.heldout_files=('{data}/heldout.jsonl',)" in flags
  assert "--config=configs/revival.py:countdown/n16/1" in flags
  assert (
    "--config.run.max_busy_s=5.0" in flags and "--config.run.seed=0" in flags
  )
  run.each(e, [job])
  assert len(called) == 2
  longer = run.Job(WING, "start", "n16", 1e-3, 0, 7.0)
  run.each(e, [longer])
  assert len(called) == 4


def test_what_fails_is_named_with_its_last_lines(tmp_path):
  with pytest.raises(SystemExit, match=r"x failed; .*x\.log ends with:\na\nb"):
    machine.call(
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
    (path / "config.json").write_text(
      '{"config": {"sampling": {"samples": 512, "n": 16}}}'
    )
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


def test_an_axis_of_pass_at_1_is_not_wide_for_nothing():
  assert draw._wide((0.733, 0.735)) == pytest.approx((0.684, 0.784))
  assert draw._wide((0.2, 0.8)) == pytest.approx((0.2, 0.8))
  assert draw._wide((0.99, 1.0)) == pytest.approx((0.945, 1.005))


def test_what_has_not_run_yet_is_left_out(tmp_path):
  (tmp_path / "paths").mkdir(parents=True)
  (tmp_path / "paths" / "rates.json").write_text('{"saturated/n16": 0.001}')
  page = revival_report.write(tmp_path)
  data = json.loads((page.parent / "revival.json").read_text())
  assert data == {
    "wings": {"paths": {"saturated": {"arms": {}}}},
    "stood": {},
    "sweep": None,
  }


def test_a_trial_is_not_taken_for_a_part_of_the_whole(tmp_path):
  run.refuse_another(tmp_path, {"scale": 1, "share": 0.05})
  run.refuse_another(tmp_path, {"scale": 1, "share": 0.05})
  with pytest.raises(SystemExit, match=r"'share': 0\.05}, not .*1\.0}; use"):
    run.refuse_another(tmp_path, {"scale": 1, "share": 1.0})


def test_a_folder_without_results_is_named(tmp_path):
  with pytest.raises(SystemExit, match=r"x has no results yet: run launch/rep"):
    revival_report.write(tmp_path / "x")


# --------------------------------------------------------------- the objectives


def test_arms_of_the_objectives_have_their_n_and_their_advantage():
  of = lambda arm: revival.get_config(f"countdown/{arm}/1")
  assert [*objectives.ARMS] == [
    "n16", "n512_paper", "adaptive", "n16_maxrl", "n512_maxrl",
    "n16_maxrl_wide", "adaptive_maxrl",
  ]  # fmt: skip
  for arm in objectives.ARMS:
    c = settings.typed(of(arm))
    settings.check_training(c)
    assert c.advantage.kind == ("maxrl" if "maxrl" in arm else "tokens")
    prompts = {"n512_paper": 8, "n512_maxrl": 8, "n16_maxrl_wide": 256}
    assert c.sampling.prompts == prompts.get(arm, 32)
    assert c.sampling.allocation == ("stop" if "adaptive" in arm else "fixed")


def test_a_row_of_the_objectives_by_hand(tmp_path):
  """Of four prompts: one in reach, one lost, two that were never lost."""
  arms = [objectives.Arm(tmp_path, "n16", seed, 1.0) for seed in (0, 1)]
  for arm, last in zip(
    arms, ([0.9, 0.0, 1, 1], [0.04, 0.0, 1, 1]), strict=True
  ):
    arm.folder.mkdir()
    points = [[0.01, 0.0, 0.5, 0.3], [1.0] * 4, last]
    (arm.folder / "exact.jsonl").write_text(
      "".join(
        json.dumps({"step": i, "train": {"pass_at_1": p}}) + "\n"
        for i, p in enumerate(points)
      )
    )
    (arm.folder / "metrics.jsonl").write_text(
      json.dumps({"step": 1, "data/samples_total": 1000 + arm.seed}) + "\n"
    )
  assert objectives.row(arms) == [
    "0.725, 0.510", "1, 2", "0.90, 0.04", "1,000, 1,001",
  ]  # fmt: skip
