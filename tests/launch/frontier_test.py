"""Tests of launch/frontier: problems, measures, rates, statistics, the page."""

import html as html_lib
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from brorl_jax.configs import frontier
from brorl_jax.main import settings
from brorl_jax.model.policy import Policy
from brorl_jax.model.spec import Rope
from launch.frontier import (
  analysis,
  arms,
  cells,
  countdown,
  exact,
  plateau,
  prepare,
  problems,
  report,
  study,
  summary,
)


@pytest.mark.parametrize("task", prepare.TASKS)
def test_classes_have_the_share_of_right_demonstrations_that_they_aim_at(task):
  pairs = prepare.TASKS[task](count=80, seed=0)
  assert [*prepare.TASKS[task](count=80, seed=0)][3].train.question == (
    pairs[3].train.question
  )
  wanted = [pair.wanted for pair in pairs]
  found = {name: wanted.count(name) for name in set(wanted)}
  assert found == (
    {"hard": 80} if task == "countdown" else dict.fromkeys(problems.CLASSES, 20)
  )
  asked = [x.question for p in pairs for x in (p.train, p.heldout)]
  assert len(set(asked)) == 2 * len(pairs)
  for pair in pairs:
    low, high = problems.CLASSES[pair.wanted]
    for one in (pair.train, pair.heldout):
      odds = one.odds / one.odds.sum()
      right = [said in set(one.right) for said in one.said]
      assert low <= odds[right].sum() <= high
      assert bool(one.right) == (pair.wanted != "impossible")


def test_countdown_is_right_in_any_order_of_the_numbers():
  for pair in countdown.problems(count=40, seed=0):
    for one in (pair.train, pair.heldout):
      *numbers, arrow, target = one.question.split()
      assert arrow == "->"
      for said in one.right:
        assert eval(said) == int(target)
        assert sorted(said[::2]) == sorted(numbers)
      wrong = set(one.said) - set(one.right)
      assert all(eval(said) != int(target) for said in wrong)
    assert pair.train.right == pair.heldout.right


TINY = Policy(
  vocab=20, width=16, layers=1, heads=2, kv_heads=2, head_size=8, mlp=16,
  rope=Rope(100.0), norm_eps=1e-6, tied=True, qkv_bias=True,
)  # fmt: skip


def test_probabilities_are_those_of_the_policy(monkeypatch):
  monkeypatch.setattr(exact, "_AT_ONCE", 2)  # of three prompts
  params = TINY.init(jax.random.key(0))
  rng = np.random.default_rng(0)
  known = exact.Known.__new__(exact.Known)
  known.prompt = rng.integers(0, 20, (3, 4)).astype(np.int32)
  known.prompt_mask = np.array([[False, True, True, True], [True] * 4] * 2)[:3]
  known.response = rng.integers(0, 20, (3, 3, 5)).astype(np.int32)
  length = np.array([[5, 2, 4], [1, 3, 5], [2, 2, 0]])
  known.mask = np.arange(5) < length[..., None]
  vars(known)["some"] = known.mask.any(axis=2)
  got = exact.reader(TINY)(params, known)
  assert got.shape == (3, 3) and got[2, 2] == 0.0
  for p, a in itertools.product(range(3), (0, 2)):
    said = known.response[p, a][known.mask[p, a]]
    if not len(said):
      continue
    row = [*known.prompt[p][known.prompt_mask[p]], *said]
    whole = jnp.asarray([row]), jnp.ones((1, len(row)), bool)
    logits = jax.nn.log_softmax(TINY.logits(params, *whole)[0])
    places = np.arange(len(row) - len(said) - 1, len(row) - 1)
    want = float(jnp.sum(logits[places, jnp.asarray(said)]))
    assert np.log(got[p, a]) == pytest.approx(want, abs=1e-4)


def test_a_summary_by_hand():
  answers = np.array([[0.5, 0.25], [0.0, 5e-5], [1.0, 0.0], [0.0, 0.0]])
  got = arms.summary(answers.sum(axis=1), answers)
  p = np.array([0.75, 5e-5, 1.0, 0.0])
  assert got["pass_at_1"] == pytest.approx(p.mean())
  assert got["lost"] == 0.5 and got["won"] == 0.5
  assert got["log10_p"] == pytest.approx(
    np.log10([0.75, 5e-5, 1.0, 1e-6]).mean()
  )
  assert got["worst_at_4"] == pytest.approx((0.75**4 + 1.0) / 4, rel=1e-6)
  assert got["best_at_4"] == pytest.approx(
    np.mean([1 - 0.25**4, 2e-4, 1.0, 0.0]), rel=1e-3
  )
  once = 256 * 5e-5
  assert got["distinct"] == pytest.approx((2.0 + once + 1.0) / 4, rel=1e-2)
  assert got["best_at_256"] == pytest.approx((1.0 + once + 1.0) / 4, rel=1e-2)


def test_configs_say_what_their_names_say():
  for which in itertools.product(
    frontier.TASKS, ("16", "512", "adaptive"), ("2048",),
    frontier.ADVANTAGES, frontier.RECIPES,
  ):  # fmt: skip
    task, n, samples, advantage, recipe = which
    if task == "reasoning" and n == "adaptive":
      continue
    c = settings.training(frontier.get_config("/".join(which)))
    assert c.advantage.kind == advantage
    assert (c.reference.kl_weight > 0) == (recipe != "plain")
    assert (c.filter.keep == "differ") == (recipe == "whole")
    assert (c.optim.minibatches > 1) == (recipe != "plain")
    if n == "adaptive":
      assert (c.sampling.rounds[0], c.sampling.prompts) == (16, 32)
    else:
      assert (c.sampling.n, c.sampling.samples) == (int(n), int(samples))
      assert c.sampling.rounds == ()
  for bad in ("own/16/2048/maxrl", "x/16/2048/maxrl/plain", "own/a/1/maxrl/"):
    with pytest.raises(ValueError, match="is not TASK/N/SAMPLES/ADVANTAGE"):
      frontier.get_config(bad)


def test_the_best_n_is_as_certain_as_a_bootstrap_says():
  """Prompts alone are drawn again: each N has one seed."""
  rng = np.random.default_rng(1)
  a = rng.uniform(size=40)
  b = a + rng.normal(0.01, 0.05, size=40)
  got = analysis.best_n({8: a[None], 32: b[None]}, draws=4000)
  want = scipy.stats.bootstrap(
    (b - a,), np.mean, n_resamples=4000, method="percentile", rng=2
  ).bootstrap_distribution
  assert got["share"]["32"] == pytest.approx((want > 0).mean(), abs=0.03)
  assert got["n"] == (32 if b.mean() > a.mean() else 8)
  assert (got["low"], got["high"]) == (8, 32)
  sure = analysis.best_n({8: a[None], 32: a[None] + 1.0})
  assert (sure["n"], sure["low"], sure["high"]) == (32, 32, 32)


def test_a_histogram_counts_lost_and_won():
  # .00006 was kept as .0001, and is lost.
  p = np.array([[0.0, 1e-4, 5e-4, 0.05], [0.3, 0.7, 0.95, 1.0]])
  got = analysis.histogram(p, 0.25)
  assert got == [0.25, 0.125, 0, 0.125, 0.125, 0.125, 0.25]


def test_differences_are_those_of_scipy_on_prompts():
  rng = np.random.default_rng(0)
  a, b = rng.uniform(size=(2, 3, 30))
  got = plateau.difference(a, b)
  want = scipy.stats.ttest_rel(a.mean(axis=0), b.mean(axis=0))
  assert got["mean"] == pytest.approx((a - b).mean(), abs=1e-6)
  assert got["p"] == pytest.approx(want.pvalue, rel=1e-3)
  error = scipy.stats.sem((a - b).mean(axis=0))
  assert got["high"] - got["low"] == pytest.approx(2 * 1.96 * error, rel=1e-4)


def arm_against(mean, low, at_time, near=0.02, others=0.0):
  rest = dict(heldout_at_time=at_time, in_reach=near, others=others)
  return {"heldout": {"mean": mean, "low": low}, **rest}


GOOD = arm_against(0.02, 0.01, 0.01)


@pytest.mark.parametrize(
  "wide, decayed, said",
  [
    (GOOD, GOOD, "supported"),
    (arm_against(0.005, 0.001, 0.01), GOOD, "falsified"),
    (GOOD, arm_against(-0.1, -0.2, 0.01), "falsified"),
    (arm_against(0.02, -0.01, 0.01), GOOD, "undecided"),
    (arm_against(0.02, 0.01, 0.005), GOOD, "undecided"),
    (GOOD, arm_against(0.02, 0.01, -0.01), "undecided"),
    (arm_against(0.02, 0.01, 0.01, 0.01, 0.02), GOOD, "undecided"),
  ],
)
def test_the_verdict_is_what_was_written_down(wide, decayed, said):
  wide, decayed = wide | {"arm": "wide"}, decayed | {"arm": "decayed"}
  assert plateau.verdict([wide, decayed]) == said
  assert plateau.verdict([wide]) == "undecided"


RESULTS = pathlib.Path(__file__).parents[2] / "launch" / "frontier" / "results"


@pytest.mark.slow
def test_the_page_and_the_readme_say_what_the_results_say(tmp_path):
  html = html_lib.unescape(report.write(RESULTS, tmp_path).read_text())
  data = json.loads((tmp_path / "frontier.json").read_text())
  tables = [*plateau.tables(data), report.best_table(data), report.cost_table()]
  for table in (cells.filled(one, data) for one in tables):
    for row in table.rows:
      assert "".join(f"<td>{x}</td>" for x in row) in html
    assert table.caption in html
  text = (RESULTS.parent / "README.md").read_text()
  for line in (*summary.of_n(data), *summary.of_plateau(data)):
    assert line in text
  assert f"verdict: {data['plateau']['verdict']}" in text
  for one in data["cost"]["machines"]:
    hours = f"{one['hours']:.1f} hours of an {one['name']}"
    assert hours in " ".join(text.split())


@pytest.mark.slow
def test_the_front_page_has_the_numbers_of_the_results():
  """Of what is compared each rate was tuned, at the budget that is named."""
  text = (RESULTS.parents[2] / "README.md").read_text().replace("**", "")
  data = study.numbers(RESULTS)
  ns = ["8", "32", "128", "512"]
  named = {q["name"]: q for q in data["questions"] if q["ns"] == ns}
  for question, budget, seeds in (
    ("own-hard-maxrl-2048-plain", 2**16, 5),
    ("own-hard-maxrl-2048-plain", 2**18, 5),
    ("own-hard-maxrl-2048-plain", 2**20, 5),
    ("own-hard-grpo-2048-plain", 2**18, 2),
    ("shared-hard-maxrl-2048-plain", 2**16, 5),
  ):
    (told,) = [b for b in named[question]["budgets"] if b["budget"] == budget]
    rates = {c["n"]: c["pass_at_1"]["mean"] for c in told["cells"]}
    row = [summary.short(rates[n]) for n in ns]
    assert f"{round(budget, -3):,} | {' | '.join(row)} |" in text
    assert told["seeds"] == seeds
  said = " ".join(text.split())
  assert "its own tuned rate" in said and "five seeds" in said
  assert f"lifts a plateau is {data['plateau']['verdict']} there" in said
  assert "1.5 billion parameters" in said
