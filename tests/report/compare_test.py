"""Tests of brorl_jax/report/compare.py, by hand and against scipy."""

import dataclasses
import json

import configured
import numpy as np
import pytest
import runs_for_tests as made
import scipy.stats

from brorl_jax import evaluate
from brorl_jax.report import compare
from brorl_jax.report.load_runs import LoadedEvaluation, LoadedRun

FASTER = {0: made.PASSES[0], 1: made.PASSES[1], 2: made.PASSES[3]}


def run(name, passes=made.PASSES, *, lines=None,
  evaluated=None, prompts=made.PROMPTS, events=(), **config):  # fmt: skip
  evaluations = [LoadedEvaluation(step,
      evaluate.summary(made.records(step, rows, prompts)),
      {id: float(np.mean(row)) for id, row in zip(prompts, rows, strict=True)})
    for step, rows in passes.items()]  # fmt: skip
  if lines is None:
    lines = [] if evaluated else made.metric_lines(max(passes))
  settings = {"n": 4, "samples": 8, "steps": 3, "seed": 0, **config}
  settings = {configured.SHORT.get(k, k): v for k, v in settings.items()}
  return LoadedRun(
    name, name, settings, lines, evaluations, evaluated, prompts, events=events
  )


def numbers(*runs):
  return compare.numbers(runs)


def chosen(data, at):
  (one,) = [c for c in data["comparisons"] if c["at"] == at]
  return one["chosen"]


def test_hours_are_those_of_steps_and_of_saving():
  """Two hours, then one and a tenth each: an evaluation costs nothing."""
  spent = numbers(run("a"))["runs"][0]["evaluations"]
  assert [e["net_hours"] for e in spent] == pytest.approx([0.0, 2.0, 4.2])
  assert [e["cpu_hours"] for e in spent] == pytest.approx([0.0, 0.5, 1.5])
  assert [e["samples"] for e in spent] == [0, 16, 48]


def test_equal_time_is_the_last_that_all_reached():
  """The slow run ends after 4.2 h; the fast one has 0, 1, 1.55 and 2.1 h."""
  slow = run("slow")
  fast = run("fast", FASTER, lines=made.metric_lines(2, step_s=1800.0))
  data = numbers(slow, fast)
  time, *_ = data["comparisons"]
  assert (time["key"], time["reach"]) == ("net_hours", pytest.approx(1.55))
  # The slow one had its second evaluation after 2 h.
  assert chosen(data, "equal time") == [None, 2]
  # 1.5 and 1.0 CPU-hours: the slow one had .5 before.
  assert chosen(data, "equal CPU time") == [None, 2]
  assert chosen(data, "equal samples") == [None, 2]
  assert chosen(data, "end") == [2, 2]


def early(data):
  return {c["at"]: c["early"] for c in data["comparisons"]}


def test_an_early_evaluation_is_not_compared():
  """At equal time the slow run has its start alone, and at its end all."""
  better = {0: made.PASSES[0], 1: made.PASSES[3], 2: made.PASSES[3]}
  lines = made.metric_lines(2, step_s=1800.0)
  data = numbers(run("slow"), run("fast", better, lines=lines))
  # Of CPU time it has .5 of 1 h, of samples 16 of 32.
  equal = {at: [0] for at in compare.EQUAL.values()}
  assert early(data) == equal | {"end": []}
  slow, fast = (arm["at"] for arm in data["arms"])
  assert slow["equal time"] is None
  assert fast["equal time"]["after"] == 0.625
  assert [at for at, x in fast.items() if x["against"]] == ["end"]
  labels = {(r["run"], r["evaluation"]): r["at"] for r in data["rows"][1:]}
  ends = ["equal time", "equal CPU time", "end"]
  assert labels == {(0, 2): ["end"], (1, 2): ends}


@pytest.mark.parametrize("last, who", [(0.89, [1]), (0.90, []), (0.91, [])])
def test_nine_tenths_of_what_is_equal_are_enough(last, who):
  """The second run is evaluated after 90 hours, more or less, of 100."""
  passes = {0: made.PASSES[0], 1: made.PASSES[1]}
  hundred = run("a", passes, lines=made.metric_lines(1, step_s=50 * 3600.0))
  passes = {**passes, 2: made.PASSES[3]}
  lines = made.metric_lines(2)
  for line, hours in zip(lines, (100 * last, 99.0), strict=True):
    line |= {"time/step_s": 3600 * hours, "time/checkpoint_s": 0.0}
  data = numbers(hundred, run("b", passes, lines=lines))
  assert chosen(data, "equal time") == [1, None if who else 1]
  assert early(data)["equal time"] == who


def test_rows_have_a_start_once():
  data = numbers(
    *(run("a"), run("b"), run("c", {**made.PASSES, 0: made.PASSES[1]})),
    run("d", {0: made.PASSES[1]}, evaluated="x"),
  )
  rows = [(r["run"], r["evaluation"], r["at"]) for r in data["rows"]]
  ends = ["equal time", "equal CPU time", "end"]
  assert rows == [(0, 0, ["start"]), (0, 2, ends), (1, 2, ends),
    (2, 0, ["start"]), (2, 2, ends), (3, 0, ["evaluation"])]  # fmt: skip
  policy = data["runs"][3]
  assert policy["evaluated"] == "x" and policy["finished"]
  assert policy["throughput"] is None
  spent = policy["evaluations"][0]
  assert {spent[k] for k in ("step", *compare.EQUAL)} == {None}


@pytest.mark.parametrize("passes, steps", [
  (made.PASSES, 4), ({0: made.PASSES[0], 1: made.PASSES[1]}, 3)
])  # fmt: skip
def test_a_run_that_was_not_evaluated_at_its_end_says_so(passes, steps):
  a = run("a", passes, lines=made.metric_lines(3), steps=steps)
  data = numbers(a, run("b"))
  assert [r["finished"] for r in data["runs"]] == [False, True]
  assert [r["steps"] for r in data["runs"]] == [3, 3]


def test_throughput_by_hand():
  """Steps 2 and 3: 16 samples each, 900 s of rollouts of 3,960 s; a step keeps
  a fourth or a half."""
  assert numbers(run("a"))["runs"][0]["throughput"] == {
    "steps": 2, "pass_rate": pytest.approx((0.25 + 0.5) / 2),
    "generated_per_generation_s": pytest.approx(32 / 1800),
    "generated_per_s": pytest.approx(32 / 7920),
    "tokens_per_generation_s": pytest.approx(320 / 1800),
    "kept_per_s": pytest.approx(12 / 7920),
    "generation_share": pytest.approx(1800 / 7920),
    "reward_std_within_group": pytest.approx(0.3125),
  }  # fmt: skip


def test_throughput_weighs_steps_by_their_samples():
  lines = made.metric_lines(3)
  lines[2]["data/samples_total"] = 32 + 48
  t = numbers(run("a", lines=lines))["runs"][0]["throughput"]
  assert t["pass_rate"] == pytest.approx((16 * 0.25 + 48 * 0.5) / 64)


def against(*runs):
  """The test of the second arm at the end."""
  return numbers(*runs)["arms"][1]["at"]["end"]["against"]


def test_tests_are_scipys_and_of_the_second_less_the_first():
  other = {**made.PASSES, 3: ([1, 0], [0, 0], [1, 1], [0, 1])}
  a = [np.mean(row) for row in made.PASSES[3]]
  b = [np.mean(row) for row in other[3]]
  test = against(run("a"), run("b", other))
  ours, theirs = test["plain"], scipy.stats.ttest_rel(b, a)
  assert test["difference"] == pytest.approx(np.mean(b) - np.mean(a))
  assert ours["t"] == pytest.approx(theirs.statistic, rel=1e-5)
  assert ours["p_two_sided"] == pytest.approx(theirs.pvalue, rel=1e-5)
  greater = scipy.stats.ttest_rel(b, a, alternative="greater").pvalue
  assert ours["p_one_sided"] == pytest.approx(greater, rel=1e-5)
  d = np.subtract(b, a)
  assert test["effect_size"] == pytest.approx(d.mean() / d.std(ddof=1))
  assert (test["n"], ours["clusters"], ours["dof"]) == (4, 4, 3)
  # Differences -.5, -.5, .5, 0 of three tasks, less their mean of -1/8.
  sums = np.array([-0.75, 0.625, 0.125])
  error = np.sqrt(3 / 2 * (sums**2).sum()) / 4
  by_task = test["by_task"]
  assert by_task["standard_error"] == pytest.approx(error, rel=1e-5)
  assert by_task["t"] == pytest.approx(d.mean() / error, rel=1e-5)
  assert (by_task["clusters"], by_task["dof"]) == (3, 2)


def test_prompts_are_paired_by_their_ids():
  turned = run("b")
  last = turned.evaluations[-1]
  rates = dict(reversed(last.rates.items()))
  turned.evaluations[-1] = last._replace(rates=rates)
  test = against(run("a"), turned)
  assert test["difference"] == 0.0 and test["plain"]["standard_error"] == 0.0


def test_what_has_no_finite_value_is_null():
  """All prompts gain the same: t is infinite, which JSON cannot say."""
  none, half = ([0, 0],) * 4, ([1, 0],) * 4
  runs = run("a", {0: none, 3: none}), run("b", {0: none, 3: half})
  test = against(*runs)
  assert test["difference"] == 0.5
  assert test["plain"]["t"] is None and test["effect_size"] is None
  json.dumps(numbers(*runs), allow_nan=False)


def test_a_phase_changes_n_from_its_step():
  phases = [{"from_step": s, "sampling.n": n} for s, n in ((2, 8), (9, 99))]
  (told,) = numbers(run("a", phases=phases))["runs"]
  assert (told["n"], told["prompts_per_step"]) == (8, 1)
  early = {0: made.PASSES[0], 1: made.PASSES[1]}
  (told,) = numbers(run("a", early, phases=phases))["runs"]
  assert (told["n"], told["prompts_per_step"]) == (4, 2)
  exactly = {0: made.PASSES[0], 2: made.PASSES[1]}
  (told,) = numbers(run("a", exactly, phases=phases))["runs"]
  assert told["n"] == 8


def test_differences_name_fields_and_values():
  policy = run("c", n=1, evaluated="x")
  data = numbers(run("a", lr=1e-3, n=4), run("b", lr=2e-3, n=4), policy)
  assert data["differences"] == [{"field": "optim.lr", "values": [1e-3, 2e-3]}]
  assert numbers(run("a"), run("b"))["differences"] == []


OTHER_SEED = {
  0: ([0, 0], [0, 0], [0, 0], [1, 0]), 3: ([1, 0], [1, 1], [0, 0], [1, 1])
}  # fmt: skip


def test_runs_that_differ_in_the_seed_alone_are_one_arm():
  """Gains of a: 1, 0, .5, .5, mean .5; of b: .5, 1, 0, .5, mean .5."""
  a, b = run("a"), run("b", OTHER_SEED, seed=1, git_commit="other")
  first, second = numbers(a, run("c", n=2), b)["arms"]
  assert (first["runs"], first["seeds"]) == ([0, 2], [0, 1])
  assert second["runs"] == [1] and second["n"] == 2
  end = first["at"]["end"]
  assert end["before"] == 0.125 and end["gains"] == [0.5, 0.5]
  assert (end["after"], end["low"], end["high"]) == (0.625, 0.625, 0.625)
  # Eight gains: squares of their deviations are .25 * 4, of 7 * 8.
  half = 1.959964 * np.sqrt(4 * 0.25 / 7 / 8)
  assert end["gain_half"] == pytest.approx(half, rel=1e-6)
  assert end["samples"] == 48 and end["cpu_hours"] == pytest.approx(1.5)
  assert end["step"] == 3 and end["against"] is None


def test_of_several_seeds_the_lowest_and_highest_score_are_told():
  worse = {0: OTHER_SEED[0], 3: made.PASSES[1]}
  (arm,) = numbers(run("a"), run("b", worse, seed=1))["arms"]
  end = arm["at"]["end"]
  assert (end["low"], end["after"], end["high"]) == (0.25, 0.4375, 0.625)


def test_arms_are_paired_seed_by_seed():
  """Puzzles of seeds have equal ids, but are not the same."""
  better = {0: made.PASSES[0], 3: ([1, 1],) * 4}
  data = numbers(*(run("a"), run("c", better, n=2)),
    *(run("b", OTHER_SEED, seed=1), run("d", better, n=2, seed=1)))  # fmt: skip
  against = data["arms"][1]["at"]["end"]["against"]
  a = [np.mean(row) for row in (*made.PASSES[3], *OTHER_SEED[3])]
  theirs = scipy.stats.ttest_rel(np.ones(8), a)
  assert against["n"] == 8 and against["by_task"]["clusters"] == 3
  assert against["difference"] == pytest.approx(0.375)
  assert against["plain"]["t"] == pytest.approx(theirs.statistic)
  assert [r["run"] for r in data["rows"] if r["at"] == ["start"]] == [0, 2, 3]


def test_runs_of_the_same_prompts_are_paired_by_seed():
  """Of each seed both arms have the same scores."""
  prompts = {f"aime/{i}": ("math", "aime") for i in range(4)}
  make = lambda name, passes, **more: run(name, passes, prompts=prompts, **more)
  data = numbers(
    *(make("a", made.PASSES), make("b", OTHER_SEED, seed=1)),
    *(make("c", OTHER_SEED, seed=1, n=2), make("d", made.PASSES, n=2)),
  )
  assert [arm["runs"] for arm in data["arms"]] == [[0, 1], [2, 3]]
  test = data["arms"][1]["at"]["end"]["against"]
  assert (test["n"], test["plain"]["standard_error"]) == (8, 0.0)


def test_the_same_seed_again_is_another_arm():
  data = numbers(run("a"), run("b"))
  assert [arm["runs"] for arm in data["arms"]] == [[0], [1]]
  against = data["arms"][1]["at"]["end"]["against"]
  assert against["difference"] == against["plain"]["standard_error"] == 0.0


def test_an_arm_without_a_start_or_a_cost_has_no_gain():
  later = {1: made.PASSES[1], 3: made.PASSES[3]}
  policy = run("c", {0: made.PASSES[1]}, evaluated="x")
  arms = numbers(run("a", later), policy)["arms"]
  one, other = (arm["at"]["end"] for arm in arms)
  assert one["before"] is one["gains"] is one["gain_half"] is None
  assert other["step"] is other["cpu_hours"] is other["gains"] is None
  assert other["after"] == 0.25


def test_curves_are_the_metrics_by_step():
  lines = made.metric_lines(3)
  for line, none in zip(lines, (0.5, 0.25, None), strict=True):
    line |= {"reward/mean": line["step"] / 8, "sampling/missed": none}
    line |= {"policy/entropy": "x", "policy/kl_ref": 1e30}
  curves = numbers(run("a", lines=lines))["runs"][0]["curves"]
  assert curves == {"step": [1, 2, 3],
    "cpu_hours": [0.5, 1.0, 1.5], "reward": [0.125, 0.25, 0.375],
    "kept": [0.5, 0.25, 0.5], "alive": [0.5, 0.75, None]}  # fmt: skip


def test_which_n_its_advantages_want():
  """Of the last 1,024 at first: p = 1/8 or more. Half right is not won."""
  of = lambda *counts: [{"right": k, "drawn": n} for k, n in counts]
  last = of(*[(0, 512)] * 1023, (2, 4), (4, 4))
  visits = [*zip(of((0, 512), *[(64, 512)] * 1023, (3, 4)), last, strict=True)]
  phases = lambda kind: [{"from_step": 2, "advantage.kind": kind}]
  of = lambda kind, **more: numbers(
    dataclasses.replace(run("a", phases=phases(kind)), **more)
  )["runs"][0]["which_n"]
  known = {"prompts": 1024, "drawn": 512, "won": 1, "missed": 1022, "maxrl": 8}
  known |= {"lost": 1022}
  assert of("maxrl", visits=visits) == {"kind": "maxrl", "n": 8, **known}
  assert of("tokens", visits=visits) == {"kind": "tokens", "n": 2, **known}
  assert of("mine.py:advantage", visits=visits) is of("maxrl") is None


def event(step, kind, second=0, **more):
  time = f"2026-11-25T08:58:{second:02d}.927Z"
  return {"step": step, "time": time, "event": kind, **more}


EVENTS = [
  event(0, "start", pid=7, host="a"),
  event(1, "warning", 1, why="disk 1 is slow"),
  event(1, "phase", 2, changed={"sampling.n": 16, "optim.lr": 0.1}),
  event(2, "config", 5, changed={"n": [1, 2]}),
  event(3, "a new kind", 7, count=3, of=64, task="gcd", why="late"),
  event(9, "end", 9, why="no space", status=2),
]


def test_events_say_all_in_one_line():
  long = event(9, "warning", why="x " * 400)
  rows = numbers(run("a", events=[*EVENTS, long]))["runs"][0]["events"]
  assert [(r["step"], r["event"], r["what"]) for r in rows[:-1]] == [
    (0, "start", ""), (1, "warning", "disk 1 is slow"),
    (1, "phase", "sampling.n = 16; optim.lr = 0.1"),
    (2, "config", "n = [1, 2]"),
    (3, "a new kind", "late; count: 3; of: 64; task: gcd"),
    (9, "end", "no space; status: 2"),
  ]  # fmt: skip
  assert rows[1]["time"] == "2026-11-25T08:58:01.927Z"
  assert len(rows[-1]["what"]) == 303 and rows[-1]["what"].endswith("...")


def test_responses_before_and_after_are_of_the_same_prompt():
  said = lambda id, text: {
    **{"id": id, "task": "gcd", "prompt": "?", "response": text},
    **{"status": "fail", "reason": "wrong answer", "tokens": 3},
  }
  one = run("a")
  for i, texts in ((0, ["p", "q"]), (2, ["q", "r"])):
    responses = [said(text, f"{text}{i}") for text in texts]
    one.evaluations[i] = one.evaluations[i]._replace(responses=responses)
  first, second = numbers(one)["responses"]
  assert first["before"] == {
    "response": "q0", "status": "fail", "reason": "wrong answer"
  }  # fmt: skip
  assert (first["id"], first["after"]["response"]) == ("q", "q2")
  assert second["before"] is None and second["after"]["response"] == "r2"
