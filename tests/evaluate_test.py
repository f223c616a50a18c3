"""Tests of brorl_jax/evaluate.py, on a policy that is a table."""

import itertools
import json

import numpy as np
import pytest
import scored
from hypothesis import given, settings
from hypothesis import strategies as st

from brorl_jax import evaluate
from brorl_jax.rollout.dynamic_sampling import TooManyInvalid
from brorl_jax.types import ScoredResponse
from brorl_jax.verdicts.base import Example, Verdict

N, T = 3, 4
# How many of the N answers to each puzzle are right; puzzle i is of f(i % 2).
RIGHT = (3, 0, 1, 2, 3)


def puzzles(count=5):
  return [Example(f"f{i % 2}/heldout/{i}", "gym",
      f"f{i % 2}", ({"role": "user", "content": f"question {i}"},), {"i": i})
    for i in range(count)]  # fmt: skip


class Table:
  """Answers i, and is right as often as RIGHT says."""

  def __init__(self):
    self.calls = []

  def rollouts(self, params, asked, start):
    assert params == "params"
    self.calls.append((start, [p.entry["i"] for p in asked]))
    p = np.array([puzzle.entry["i"] for puzzle in asked], np.int32)
    length = 1 + (p[:, None] + np.arange(N)) % T
    mask = np.arange(T) < length[..., None]
    tokens = np.broadcast_to(p[:, None, None], mask.shape)
    return scored.rollouts(tokens, mask, truncated=length == T)

  def score_responses(self, asked, rollouts):
    assert len(asked) == len(rollouts.tokens)  # fillers are not judged
    out = []
    for puzzle, tokens in zip(asked, rollouts.tokens, strict=True):
      i = puzzle.entry["i"]
      assert (tokens[:, 0] == i).all()  # each is judged on its own answers
      status = lambda n, i=i: "pass" if n < RIGHT[i] else "fail"
      out.append([
        ScoredResponse(
          puzzle.task, Verdict(status(n), 0.25 * n, "", f"{i}.{n}"), 0.0
        )
        for n in range(N)
      ])  # fmt: skip
    return out

  def texts(self, rollouts):
    return [["".join(map(str, row[keep])) for row, keep in zip(*p, strict=True)]
      for p in zip(rollouts.tokens, rollouts.mask, strict=True)]  # fmt: skip


def evaluated(table, examples, **kwargs):
  return evaluate.evaluate(
    "params", examples, rollouts=table.rollouts,
    score_responses=table.score_responses, texts=table.texts, **kwargs,
  )  # fmt: skip


def run(chunk, first=0):
  table = Table()
  got = evaluated(table, puzzles(), chunk=chunk, first=first)
  return list(got), table.calls


def flat(chunks):
  return [record for chunk in chunks for record in chunk]


def test_one_record_for_each_sample():
  chunks, _ = run(chunk=2)
  records = flat(chunks)
  assert [len(c) for c in chunks] == [2 * N, 2 * N, N]
  assert records[3 * N + 1] == {
    "id": "f1/heldout/3", "domain": "gym", "task": "f1", "sample": 1,
    "tokens": 1,  # 1 + (3 + 1) % 4
    "truncated": False, "score": 0.25, "pass": True, "status": "pass",
    "reason": "", "answer": "3.1",
  }  # fmt: skip
  assert all((x["status"] == "pass") == x["pass"] for x in records)
  assert records[3 * N]["tokens"] == 4 and records[3 * N]["truncated"] is True
  for i, right in enumerate(RIGHT):
    assert sum([r["pass"] for r in records[i * N : (i + 1) * N]]) == right
  assert json.loads(json.dumps(records)) == records


def test_the_first_responses_of_each_task_are_kept_as_text():
  many = puzzles(9)  # five of f0, four of f1
  table = Table()
  table.score_responses = lambda asked, rollouts: [
    [ScoredResponse(p.task, Verdict("fail", 0.0), 0.0)] * N for p in asked
  ]
  records = flat(evaluated(table, many, chunk=4))
  kept = {r["id"]: r for r in records if "response" in r}
  assert [*kept] == [f"f{i % 2}/heldout/{i}" for i in range(6)]
  for i in range(6):
    one = kept[f"f{i % 2}/heldout/{i}"]
    assert one["sample"] == 0 and one["prompt"] == f"question {i}"
    assert one["response"] == str(i) * (1 + i % T)


@pytest.mark.parametrize("chunk, calls", [
  (2, [(0, [0, 1]), (2, [2, 3]), (4, [4, 4])]),
  (3, [(0, [0, 1, 2]), (3, [3, 4, 3])]), (8, [(0, [0, 1, 2, 3, 4, 0, 0, 0])]),
])  # fmt: skip
def test_chunks_have_one_size_and_what_fills_them_does_not_count(chunk, calls):
  got, asked = run(chunk)
  assert asked == calls
  want, _ = run(chunk=1)
  assert flat(got) == flat(want)


def test_an_evaluation_may_begin_anywhere():
  got, asked = run(chunk=2, first=3)
  assert asked == [(3, [3, 4])]
  assert flat(got) == flat(run(chunk=5)[0])[3 * N :]
  assert run(chunk=2, first=5) == ([], [])


def test_nothing_is_sampled_before_it_is_asked_for():
  table = Table()
  chunks = evaluated(table, puzzles(), chunk=2)
  assert table.calls == []
  next(chunks)
  assert len(table.calls) == 1


def prompt(name, statuses, *, domain="gym", answers=None, **fields):
  """Records of samples that pass (p), fail (f) or could not be judged (i)."""
  word = {"p": "pass", "f": "fail", "i": "invalid"}
  return [{"id": name, "domain": domain,
      "task": name.split("/")[0], "sample": n, "tokens": 2 + n,
      "truncated": n == 0, "score": float(s == "p"), "pass": s == "p",
      "status": word[s], "reason": "broken: x" if s == "i" else "",
      "answer": answers[n] if answers else s, **fields}
    for n, s in enumerate(statuses)]  # fmt: skip


def all_of(records):
  return evaluate.summary(records)["all"]


def test_summary_by_hand():
  got = evaluate.summary(prompt("a/0", "pppp") + prompt("a/1", "pfff")
    + prompt("b/0", "ffff") + prompt("m/0", "ppff", domain="math"))  # fmt: skip
  assert got.keys() == {"all", "by_domain"}
  assert got["by_domain"].keys() == {"gym", "math"}
  a, b = (got["by_domain"]["gym"]["by_task"][task] for task in "ab")
  math = got["by_domain"]["math"]
  assert math["by_task"] == {"m": {k: math[k] for k in math if k != "by_task"}}
  assert a["pass_at_k"] == pytest.approx({"1": 5 / 8, "2": 3 / 4, "4": 1.0})
  assert b["pass_at_k"] == {"1": 0.0, "2": 0.0, "4": 0.0}
  # Of ppff 1 of 6 pairs is wrong.
  assert math["pass_at_k"] == pytest.approx({"1": 1 / 2, "2": 5 / 6, "4": 1.0})
  # pf and ff: the first is a tie; pfff as one block: f wins.
  assert a["majority_at_k"] == pytest.approx(
    {"1": 5 / 8, "2": (1 + 1 / 4) / 2, "4": 1 / 2}
  )
  # The domain over its tasks, everything over prompts.
  domain, everything = got["by_domain"]["gym"], got["all"]
  assert domain["pass_at_k"]["1"] == pytest.approx((5 / 8 + 0) / 2)
  assert everything["pass_at_k"]["1"] == pytest.approx((1 + 0.25 + 0 + 0.5) / 4)
  counts = [(s["prompts"], s["samples"]) for s in (a, b, domain, everything)]
  assert counts == [(2, 4), (1, 4), (3, 4), (4, 4)]
  assert everything["mean_score"] == pytest.approx(7 / 16)
  assert everything["mean_at_k"] == pytest.approx({"4": 7 / 16})
  assert everything["tokens_mean"] == 3.5
  assert (everything["truncated_fraction"], everything["invalid"]) == (0.25, 0)
  assert json.loads(json.dumps(got)) == got


def test_lengths_by_hand():
  """Tokens 2, 3, 4, 5 of each prompt."""
  got = evaluate.summary(prompt("a/0", "ppff") + prompt("b/0", "ffff"))
  task = got["by_domain"]["gym"]["by_task"]["a"]
  assert (task["tokens_right"], task["tokens_wrong"]) == (2.5, 4.5)
  everything = got["all"]
  assert everything["tokens_right"] == 2.5
  assert everything["tokens_wrong"] == pytest.approx((9 + 14) / 6)
  assert got["by_domain"]["gym"]["by_task"]["b"]["tokens_right"] is None
  assert all_of(prompt("a/0", "pppp"))["tokens_wrong"] is None


def test_a_score_is_not_a_pass():
  records = prompt("a/0", "ff", score=0.75) + prompt("a/1", "ff", score=0.25)
  got = all_of(records)
  assert got["mean_score"] == 0.5 and got["pass_at_k"]["1"] == 0.0
  assert got["mean_at_k"] == {"2": 0.0}


@pytest.mark.slow
def test_one_prompt_may_have_very_many_samples():
  """A table over the counts and k took n x n numbers, 27 GB here."""
  n = 100_000
  got = all_of(prompt("a/0", "p" + "f" * (n - 1)))["pass_at_k"]
  assert len(got) == 18
  # The right one is among the k, or is not; 65,536 factors of float32.
  for k, value in got.items():
    assert value == pytest.approx(int(k) / n, abs=2e-4)


@pytest.mark.parametrize("answers, statuses, k, want", [
  ("abab", "pfpf", 4, 1 / 2),  # a tie
  ("aabc", "ppff", 4, 1.0), ("abbc", "pfff", 4, 0.0),
  ("aabb", "ppff", 2, 1 / 2),  # blocks of two: right, wrong
  ("abcc", "ppff", 2, 1 / 2),  # a tie of two right ones, then a wrong one
  ("abca", "pffp", 2, 1 / 2),  # two ties
  ("   a", "fffp", 4, 1.0),  # who does not answer does not vote
  ("    ", "ffff", 4, 0.0), ("   a", "fffp", 2, 1 / 2),
  ("abcd", "pppf", 4, 3 / 4),
  # Passes in one form of the response, and not in the other.
  ("aaab", "pffp", 4, 1 / 3),
])  # fmt: skip
def test_majority_by_hand(answers, statuses, k, want):
  answers = [a.strip() for a in answers]
  got = all_of(prompt("a/0", statuses, answers=answers))["majority_at_k"]
  assert got[str(k)] == pytest.approx(want)


def test_majority_leaves_out_what_fills_no_block():
  """Five samples in blocks of two: the last one is in none."""
  got = all_of(prompt("a/0", "pffff", answers="abbbb"))["majority_at_k"]
  assert got == pytest.approx({"1": 1 / 5, "2": 1 / 4, "4": 0.0, "5": 0.0})
  got = all_of(prompt("a/0", "ffffp", answers="bbbba"))["majority_at_k"]
  assert got == pytest.approx({"1": 1 / 5, "2": 0.0, "4": 0.0, "5": 0.0})


def test_what_could_not_be_judged_does_not_count():
  one = lambda statuses: all_of(prompt("a/0", statuses))
  got, want = one("ipfi"), one("pf")
  assert got["invalid"] == 2 and want["invalid"] == 0
  for name in ("pass_at_k", "majority_at_k"):
    # Of two that count, four is taken as two.
    assert got[name] == pytest.approx(want[name] | {"4": want[name]["2"]})
  assert got["mean_score"] == 0.5
  assert got["tokens_mean"] == 3.5  # of all: they were sampled
  none = one("iiii")
  assert set(none["pass_at_k"].values()) == {0.0}
  assert set(none["majority_at_k"].values()) == {0.0}
  assert (none["mean_score"], none["invalid"]) == (0.0, 4)


def test_what_could_not_be_judged_is_counted_not_averaged():
  """2 + 1 of task a, 1 of b, 0 and 1 of m in another domain."""
  got = evaluate.summary(
    prompt("a/0", "ii") + prompt("a/1", "ip") + prompt("b/0", "fi")
    + prompt("m/0", "pp", domain="math") + prompt("m/1", "pi", domain="math")
  )  # fmt: skip
  gym, math = got["by_domain"]["gym"], got["by_domain"]["math"]
  assert got["all"]["invalid"] == 5
  assert (gym["invalid"], math["invalid"]) == (4, 1)
  assert [gym["by_task"][task]["invalid"] for task in "ab"] == [3, 1]
  assert math["by_task"]["m"]["invalid"] == 1


def test_a_score_of_what_could_not_be_judged_does_not_count():
  assert all_of(prompt("a/0", "pi", score=0.5))["mean_score"] == 0.5


def test_every_group_is_drawn_from_itself():
  """Members of a group share a value, so that its mean cannot move."""
  groups = np.array([2, 0, 1, 0, 2, 2])
  values = np.array([0.5, 3.0, 8.0, 3.0, 0.5, 0.5])
  means = evaluate.bootstrap_means(values, groups, draws=50)
  np.testing.assert_array_equal(means, np.tile([3.0, 8.0, 0.5], (50, 1)))


def test_a_mean_of_two_takes_its_three_values_as_often_as_chance_has_it():
  values, groups = np.array([0.0, 1.0]), np.zeros(2, int)
  means = evaluate.bootstrap_means(values, groups, draws=20_000)
  assert set(np.unique(means)) == {0.0, 0.5, 1.0}
  for value, chance in ((0.0, 0.25), (0.5, 0.5), (1.0, 0.25)):
    share = float(np.mean(means == value))
    noise = 5 * (chance * (1 - chance) / 20_000) ** 0.5
    assert share == pytest.approx(chance, abs=noise)


def test_draws_do_not_depend_on_the_order_of_groups():
  values = np.random.default_rng(0).uniform(size=40)
  groups = np.arange(40) % 3
  want = evaluate.bootstrap_means(values, groups, draws=7)
  order = np.argsort(groups, kind="stable")
  got = evaluate.bootstrap_means(values[order], groups[order], draws=7)
  np.testing.assert_array_equal(got, want)
  assert len(np.unique(want, axis=0)) == 7


def test_intervals_are_those_of_prompts_within_tasks():
  """Task a: 60 prompts of which half are solved; b: 20, all solved."""
  records = [record for i in range(60)
    for record in prompt(f"a/{i}", "pp" if i % 2 else "ff")]  # fmt: skip
  records += [r for i in range(20) for r in prompt(f"b/{i}", "pp")]
  got = evaluate.summary(records)
  domain = got["by_domain"]["gym"]
  a, b = domain["by_task"]["a"], domain["by_task"]["b"]
  assert (b["low"], b["high"]) == (1.0, 1.0)
  half = 1.96 * (0.25 / 60) ** 0.5
  width = a["high"] - a["low"]
  assert width == pytest.approx(2 * half, rel=0.15)
  assert (a["low"] + a["high"]) / 2 == pytest.approx(0.5, abs=0.03)
  # b does not vary: a counts half in the domain, 60 of 80 in everything.
  assert domain["high"] - domain["low"] == pytest.approx(width / 2, rel=1e-3)
  everything = got["all"]
  wide = everything["high"] - everything["low"]
  assert wide == pytest.approx(width * 3 / 4, rel=1e-3)
  assert evaluate.summary(records) == got  # the same draws


def test_there_is_no_interval_where_no_task_has_two_prompts():
  alone = prompt("a/0", "ppf") + prompt("b/0", "fff")
  got = evaluate.summary(alone)
  for s in (got["all"], got["by_domain"]["gym"]):
    assert (s["low"], s["high"]) == (None, None)
  got = evaluate.summary(alone + prompt("a/1", "fff"))
  a, b = (got["by_domain"]["gym"]["by_task"][name] for name in "ab")
  assert (b["low"], b["high"]) == (None, None)
  assert a["low"] < a["high"] and got["all"]["low"] < got["all"]["high"]
  json.dumps(got, allow_nan=False)


def test_tasks_of_one_name_in_two_domains_are_two():
  got = evaluate.summary(prompt("a/0", "p") + prompt("a/1", "f", domain="math"))
  assert got["by_domain"]["gym"]["by_task"]["a"]["pass_at_k"]["1"] == 1.0
  assert got["by_domain"]["math"]["by_task"]["a"]["pass_at_k"]["1"] == 0.0


@pytest.mark.ci
@given(st.lists(st.text("pfi", min_size=5, max_size=5), min_size=1, max_size=4),
  st.randoms(use_true_random=False))  # fmt: skip
@settings(deadline=None, max_examples=30)
def test_summary_of_anything(prompts, random):
  records = [r for i, s in enumerate(prompts) for r in prompt(f"a/{i}", s)]
  got = all_of(records)
  passed = list(got["pass_at_k"].values())
  assert all(x <= y + 1e-6 for x, y in itertools.pairwise(passed))
  assert all(0.0 <= x <= 1.0 for x in got["majority_at_k"].values())
  one = pytest.approx(passed[0], abs=1e-6)
  assert got["majority_at_k"]["1"] == one == got["mean_score"]
  if len(prompts) > 1:
    assert got["low"] - 1e-6 <= passed[0] <= got["high"] + 1e-6
  assert np.mean(evaluate.rates(records)) == one
  random.shuffle(records)  # nothing depends on their order but the draws'
  again = all_of(records)
  assert again["pass_at_k"] == pytest.approx(got["pass_at_k"])
  assert again["majority_at_k"] == pytest.approx(got["majority_at_k"])


def test_rates_are_those_of_each_prompt():
  records = prompt("a/0", "ppf") + prompt("b/0", "fff") + prompt("a/1", "pii")
  assert evaluate.rates(records) == pytest.approx([2 / 3, 0.0, 1.0])


@pytest.mark.parametrize("records, said", [
  ([], "there are no records"),
  (prompt("a/0", "pf") + prompt("a/0", "p"),
    "sample 0 of 'a/0' occurs twice; give the records of one evaluation"),
  (prompt("a/0", "pf") + prompt("a/1", "pff"),
    "'a/1' has 3 samples, but 'a/0' has 2; "),
])  # fmt: skip
def test_records_of_no_evaluation_are_refused(records, said):
  for of in (evaluate.summary, evaluate.rates):
    with pytest.raises(ValueError) as error:
      of(records)
    assert str(error.value).startswith(said)


def test_an_evaluation_that_cannot_be_judged_is_refused():
  some = [r for i in range(33) for r in prompt(f"a/{i}", "ppp")]
  evaluate.check_invalid(prompt("f/0", "ipp") + some)  # 1 of 102
  with pytest.raises(
    TooManyInvalid, match=r"failed on 2 of 102 .*1% .* f: broken: "
  ):
    evaluate.check_invalid(prompt("f/0", "iip") + some)
