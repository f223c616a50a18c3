"""Tests of launch/frontier: problems, measures, rates, statistics, the page."""

import dataclasses
import functools
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import pytest
import scipy.stats

from brorl_jax.configs import frontier
from brorl_jax.main import corpus, settings
from brorl_jax.model import huggingface, tokenizer
from brorl_jax.model.policy import Policy
from brorl_jax.model.spec import Rope
from brorl_jax.report import cells
from brorl_jax.tasks.data import dataset, heldout
from brorl_jax.tasks.domains import DOMAINS
from launch.frontier import (
  analysis,
  arms,
  countdown,
  draw,
  exact,
  machine,
  match,
  own,
  plateau,
  prepare,
  problems,
  report,
  run,
  shared,
  study,
  summary,
  taught,
  tuning,
)
from launch.frontier.arms import Arm

# ---------------------------------------------------------------- the problems


def test_every_expression_is_there_and_comes_to_what_it_says():
  found = dict(countdown.expressions((3, 4, 5, 7)))
  assert len(found) == 24 * 27
  for text, value in found.items():
    assert re.fullmatch(r"\d([-+*]\d){3}", text)
    assert sorted(text[::2]) == ["3", "4", "5", "7"]
    assert eval(text) == value


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


def test_the_shared_rule_sorts_and_its_twin_has_the_same_letter():
  for pair in shared.problems(count=80, seed=1):
    for one in (pair.train, pair.heldout):
      letter, code = one.question[0], one.question[1:]
      assert one.said == ["".join(sorted(code)), code[::-1]]
      assert one.said[0] != one.said[1]
      assert list(one.right) == one.said[: len(one.right)]
    assert pair.heldout.question[0] == letter and pair.train.question != (
      pair.heldout.question
    )


def test_own_answers_are_seldom_those_of_others_with_this_letter():
  pairs = own.problems(count=1024, seed=0)
  hard = [(p.train.question[0], *p.train.right) for p in pairs]
  hard = [one for one, p in zip(hard, pairs, strict=True) if p.wanted == "hard"]
  assert len(set(hard)) > 0.9 * len(hard) and len(hard) == 256
  for pair in pairs:
    assert pair.train.question[:6] == pair.heldout.question[:6]
    assert pair.train.right == pair.heldout.right
  np.testing.assert_allclose(
    own.odds("hard", np.random.default_rng(0)).sum(), 1.0
  )


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


def test_a_pool_has_as_many_of_each_class_by_what_is_measured():
  pairs = own.problems(count=16, seed=0)
  p = [0.01 if pair.wanted != "impossible" else 0.0 for pair in pairs]
  wanted = [i for i, pair in enumerate(pairs) if pair.wanted != "impossible"]
  for i in wanted[:4]:
    p[i] = 0.1
  for i in wanted[4:8]:
    p[i] = 0.5
  got = problems.pool(pairs, p, problems.CLASSES, count=8)
  place = {id(pair): i for i, pair in enumerate(pairs)}
  chosen = [place[id(pair)] for pair in got]
  assert chosen[:6] == [*wanted[8:10], *wanted[:2], *wanted[4:6]]
  assert [pair.wanted for pair in got[6:]] == ["impossible"] * 2
  with pytest.raises(ValueError, match=r"4 of 16 problems are easy \(0\.3 <="):
    problems.pool(pairs, p, ["easy"], count=5)


def test_files_are_read_and_their_sides_share_nothing(tmp_path):
  pairs = countdown.problems(count=40, seed=0)
  for name, side in (("a", "train"), ("b", "heldout")):
    prepare.write(
      tmp_path / f"{name}.jsonl", (getattr(pair, side) for pair in pairs)
    )
  form = corpus.form("", "", own=True)
  read = [
    dataset.read([str(tmp_path / f"{name}.jsonl")], form=form, domains=DOMAINS)
    for name in "ab"
  ]
  assert [len(data.examples) for data in read] == [40, 40]
  heldout.refuse_overlap(*read)


def test_a_response_is_right_if_it_is_a_known_answer():
  example = {"right": ["12", "34"]}
  assert [match.score(x, example) for x in ("12", "34", "1", "", " 12")] == [
    1.0, 1.0, 0.0, 0.0, 0.0,
  ]  # fmt: skip
  assert match.score("", {"right": []}) == 0.0


@pytest.mark.ci
def test_the_policy_is_taught_with_the_end_of_each_answer(tmp_path):
  pairs = countdown.problems(count=8, seed=0)
  some = [pair.train for pair in pairs]
  taught.teach(tmp_path, some, seed=0, width=16, layers=1, steps=1)
  text = tokenizer.Tokenizer(tmp_path)
  shown = taught.demonstrations(some, text, each=50, seed=0)
  prompt, response = frontier.TASKS["countdown"]
  for row, (question, ids) in enumerate(shown):
    assert ids[-1] == text.stop_ids[0] and text.stop_ids[0] not in ids[:-1]
    assert text.decode([ids])[0] in some[row // 50].said
    assert len(question) <= prompt and len(ids) <= response
  right = [
    text.decode([ids])[0] in some[row // 50].right
    for row, (_, ids) in enumerate(shown)
  ]
  share = np.mean([len(one.right) / len(one.said) for one in some])
  assert abs(np.mean(right) - share) < 4 * np.sqrt(share / len(right))


# ------------------------------------------------------------ what is measured

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


def test_what_is_written_are_the_pools_and_their_twins(tmp_path, monkeypatch):
  aimed = {"hard": 0.01, "medium": 0.1, "easy": 0.5, "impossible": 0.0}
  made = prepare.TASKS["own"](count=1024, seed=0)
  taught_with = {}
  monkeypatch.setattr(taught, "teach", lambda *a, **k: taught_with.update(k))
  monkeypatch.setattr(
    exact, "pass_rates", lambda *_: np.array([aimed[p.wanted] for p in made])
  )
  prepare.prepare(tmp_path, "own", scale=1)
  assert (taught_with["width"], taught_with["layers"]) == (64, 2)
  of = lambda name: [
    *map(json.loads, (tmp_path / name).read_text().split("\n")[:-1])
  ]
  twin = {p.train.question: p.heldout.question for p in made}
  for pool, count in {
    "hard": 128,
    "easy": 128,
    "mixed": 128,
    "large": 256,
  }.items():
    train, held = of(f"{pool}.jsonl"), of(f"{pool}-heldout.jsonl")
    assert len(train) == len(held) == count
    assert [one["prompt"] for one in held] == [
      twin[one["prompt"]] for one in train
    ]
    assert not {one["prompt"] for one in train} & {
      one["prompt"] for one in held
    }
  assert (tmp_path / "done").exists()


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
  for p, a in itertools.product(range(3), range(3)):
    said = known.response[p, a][known.mask[p, a]]
    if not len(said):
      continue
    row = [*known.prompt[p][known.prompt_mask[p]], *said]
    whole = jnp.asarray([row]), jnp.ones((1, len(row)), bool)
    logits = jax.nn.log_softmax(TINY.logits(params, *whole)[0])
    places = np.arange(len(row) - len(said) - 1, len(row) - 1)
    want = float(jnp.sum(logits[places, jnp.asarray(said)]))
    assert np.log(got[p, a]) == pytest.approx(want, abs=1e-4)


@pytest.mark.ci
def test_answers_are_spelt_in_characters_with_an_end(tmp_path):
  some = [pair.train for pair in countdown.problems(count=8, seed=0)]
  taught.teach(tmp_path, some, seed=0, width=16, layers=1, steps=1)
  lines = [problems.example(one) for one in some]
  text = tokenizer.Tokenizer(tmp_path)
  known = exact.Known(lines, text)
  for p, one in enumerate(some):
    for a, answer in enumerate(one.right):
      ids = known.response[p, a][known.mask[p, a]]
      assert len(ids) == len(answer) + 1 and ids[-1] == text.stop_ids[0]
    assert known.some[p].sum() == len(one.right)
  policy, params = huggingface.load(tmp_path)
  each = exact.reader(policy)(params, known)
  np.testing.assert_allclose(
    exact.pass_rates(tmp_path, lines), each.sum(axis=1), rtol=1e-6
  )


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


def test_checkpoints_nearest_to_the_budgets_are_read():
  at = np.array([0, 40, 90, 130, 180, 260, 310, 420])
  steps = [*range(0, 80, 10)]
  assert arms.chosen(steps, at, 100) == [0, 20, 40, 60, 70]
  assert arms.budgets(at, 100) == [0, 2, 4, 7]
  assert arms.budgets(at[:6], 100) == [0, 2, 4]


def test_a_run_is_measured_at_its_checkpoints(tmp_path, monkeypatch):
  folder, data = tmp_path / "run", tmp_path / "own"
  for step in (0, 32, 64):
    (folder / "checkpoints" / str(step)).mkdir(parents=True)
  config = frontier.get_config("own/16/2048/maxrl/plain").to_dict()
  config["data"]["files"] = ["x/hard.jsonl"]
  data.mkdir()
  for side in ("hard", "hard-heldout"):
    (data / f"{side}.jsonl").write_text('{"prompt": "a", "right": ["1"]}\n')
  (folder / "metrics.jsonl").write_text(
    "".join(
      json.dumps(
        {"step": s, "data/samples_total": 2048 * s, "time/busy_s": 0.5}
      )
      + "\n"
      for s in range(1, 65)
    )
  )

  def of_run(of, sides, steps):
    assert of == folder and [*sides] == ["train", "heldout"]
    for step in steps:
      yield step, {"train": np.array([[step / 100]]), "heldout": np.eye(1)}

  monkeypatch.setattr(exact, "of_run", of_run)
  for seed, kept in ((3, [0, 3200, 6400]), (arms.TUNING_SEED, [])):
    config["run"]["seed"] = seed
    told = {
      "config": config,
      "machine": {"processor": "AMD EPYC", "devices": {"cpu": 1}},
      "versions": {"jax": "0.10.2"},
    }
    (folder / "config.json").write_text(json.dumps(told))
    got = arms.measured(folder, data)
    assert got["machine"] == "AMD EPYC, jax 0.10.2"
    assert got["points"]["step"] == [0, 32, 64]
    assert got["points"]["samples"] == [0, 2**16, 2**17]
    assert got["points"]["busy_s"] == [0.0, 16.0, 32.0]
    assert got["points"]["pass_at_1"] == [0.0, 0.32, 0.64]
    assert got["points"]["heldout"] == [1.0] * 3
    assert got["config"]["advantage.kind"] == "maxrl"
    assert [row[0] for row in got["prompts"]["train"]] == kept


# ---------------------------------------------------------------- arms, configs


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


def test_each_arm_of_each_question_can_be_trained():
  """With N = 512 and 512 samples a step has one prompt, and one update."""
  every = [cell for q, doubled in run.questions() for cell in q.cells(doubled)]
  for arm in [*every, *plateau.cells().values(), plateau.START]:
    which = arms.config(arm, scale=1).split(":")[1]
    settings.training(frontier.get_config(which))
  accelerator = {"processor": "AMD EPYC", "devices": {"NVIDIA H200": 1}}
  told = {"machine": accelerator, "versions": {"jax": "0.11.2"}}
  assert arms.machine_of(told) == "NVIDIA H200, jax 0.11.2"


def test_recipes_differ_in_what_they_say():
  of = lambda which: settings.typed(frontier.get_config(which))
  plain, whole, anchored = (
    of(f"own/16/2048/tokens/{recipe}") for recipe in frontier.RECIPES
  )
  weights = [c.reference.kl_weight for c in (plain, whole, anchored)]
  assert weights == [0.0, 1e-3, 0.6]
  assert (whole.reference.reset_every, anchored.reference.reset_every) == (
    100, 100_000,
  )  # fmt: skip
  assert {c.optim.warmup for c in (plain, whole, anchored)} == {2}
  assert {c.theory.prompts for c in (plain, whole, anchored)} == {0}
  one = of("reasoning/512/512/tokens/whole")
  assert (one.optim.minibatches, one.eval.temperature) == (1, 1.0)
  few = of("own/adaptive/128/tokens/plain")
  assert few.sampling.prompts == 4


ARM = Arm("own", "hard", 16, 2048, "maxrl", power=-10.5, seed=3, budget=2**17)


def test_arms_that_differ_have_folders_of_their_own():
  other = lambda **changed: dataclasses.replace(ARM, **changed)
  every = [
    ARM, other(task="shared"), other(pool="easy"), other(n="adaptive"),
    other(samples=1024), other(advantage="grpo"), other(recipe="whole"),
    other(power=-10.0), other(seed=4), other(decayed=True),
    other(decayed=True, budget=2**18), other(start="plateau/policy"),
  ]  # fmt: skip
  assert len({arm.name for arm in every}) == len(every)
  assert other(budget=2**18).name == ARM.name  # it goes on


def test_the_command_of_an_arm(tmp_path, monkeypatch):
  called = []

  def call(folder, cores, *args):
    called.append([folder, *map(str, args)])
    (tmp_path / "result.json").write_text(json.dumps(result({0: 0.1})))

  monkeypatch.setattr(arms, "call", call)
  arms.run(ARM, {0}, root=tmp_path, path=tmp_path / "result.json", scale=2)
  trains, reads = called
  for flag in (
    "--config=configs/frontier.py:own/16/4096/maxrl/plain",
    "--config.run.max_samples=131072",
    "--config.run.seed=3",
    f"--config.optim.lr={2.0**-10.5}",
    "--config.run.save_every=16",
    f"--config.policy.checkpoint={tmp_path}/own/policy",
    f"--config.data.files=('{tmp_path}/own/hard.jsonl',)",
    f"--config.data.heldout_files=('{tmp_path}/own/hard-heldout.jsonl',)",
  ):
    assert flag in trains
  assert reads[-1] == str(tmp_path / "result.json")
  other = dataclasses.replace(ARM, start="plateau/policy")
  got = arms.flags(other, tmp_path, scale=1)
  assert got["policy.checkpoint"] == tmp_path / "plateau/policy"
  falls = dataclasses.replace(ARM, decayed=True)
  with pytest.raises(SystemExit, match=r"decayed131072.* constant rate; copy"):
    arms.flags(falls, tmp_path, scale=1)
  whole = dataclasses.replace(ARM, recipe="whole")
  assert arms.flags(whole, tmp_path, scale=1)["run.save_every"] == 8


def test_lanes_have_cores_of_their_own(monkeypatch):
  monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7})
  both, seen = threading.Barrier(2, timeout=30), []

  def do(what, cores):
    both.wait()  # a lane that waits leaves the other one to the next
    seen.append((what, frozenset(cores)))

  machine.Machine(2).each(do, ["a", "b"])
  assert {what for what, _ in seen} == {"a", "b"}
  assert {cores for _, cores in seen} == {frozenset({3}), frozenset({5})}
  machine.Machine(1).each(lambda _, cores: seen.append(cores), ["c"])
  assert seen[-1] == {3, 5, 7}


def test_a_run_has_its_cores_and_ends_with_its_parent(tmp_path):
  core = min(os.sched_getaffinity(0))
  child = (
    "import os, time; print(os.getpid(), os.sched_getaffinity(0), flush=True)"
  )
  parent = (
    "import pathlib; from launch.frontier import machine; "
    f"machine.call(pathlib.Path({str(tmp_path / 'x')!r}), {{{core}}}, '-c', "
    f"{child + '; time.sleep(60)'!r})"
  )
  process = subprocess.Popen([sys.executable, "-c", parent], cwd=machine.ROOT)
  log, end = tmp_path / "x.log", time.monotonic() + 60
  while not (log.exists() and log.read_text().endswith("\n")):
    assert time.monotonic() < end and process.poll() is None
    time.sleep(0.1)
  pid, cores = log.read_text().split(" ", 1)
  process.kill()
  process.wait()
  assert eval(cores) == {core}
  while pathlib.Path("/proc", pid).exists() and " Z " not in (
    pathlib.Path("/proc", pid, "stat").read_text()
  ):
    assert time.monotonic() < end
    time.sleep(0.1)


def test_runs_share_a_gpu_unless_the_user_says_how(monkeypatch):
  mine, old = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
  for name in (mine, old):
    monkeypatch.setenv(name, "")
  machine.share_a_gpu(3)
  assert os.environ[mine] == "0.250"
  machine.share_a_gpu(2)
  assert os.environ[mine] == "0.250"
  monkeypatch.setenv(mine, "")
  monkeypatch.setenv(old, "0.1")
  machine.share_a_gpu(3)
  assert os.environ[mine] == ""


def test_what_fails_is_named_with_its_last_lines(tmp_path):
  with pytest.raises(SystemExit, match=r"x failed; .*x\.log ends with:\na\nb"):
    machine.call(
      tmp_path / "x",
      {0},
      "-c",
      "print('a'); import sys; sys.exit('b')",
    )


# -------------------------------------------------------------------- the rates


def result(points, *, prompts=None, heldout=None, seed=0):
  """A result with pass@1 by thousands of the smallest budget of `own`."""
  least = arms.LEAST["own"]
  samples = [least * k for k in points]
  value = [*points.values()]
  told = {
    name: value
    for name in ("pass_at_1", "heldout", *study.METRICS)
    if name != "busy_s"
  }
  kept = {"samples": [], "train": [], "heldout": []}
  if prompts is not None:
    kept = {
      "samples": samples,
      "train": prompts,
      "heldout": prompts if heldout is None else heldout,
    }
  return {
    "config": {"run.seed": seed},
    "machine": "AMD EPYC, jax 0.10.2",
    "points": {
      "step": [32 * k for k in points],
      "samples": samples,
      "busy_s": [10.0 * k for k in points],
      **told,
    },
    "prompts": kept,
  }


def experiment(root, score, monkeypatch):
  """An experiment whose runs are made up; what it has run, in order."""
  ran = []

  def fake(arm, cores, *, root, path, scale):
    ran.append((arm.power, arm.budget // arms.LEAST["own"], arm.seed))
    ks = [k for k in (0, 1, 2, 4, 8) if k * arms.LEAST["own"] <= arm.budget]
    found = result({k: score(arm.power, k) for k in ks})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found))
    return found

  monkeypatch.setattr(arms, "run", fake)
  e = tuning.Experiment(
    root, root / "results", 1, machine.Machine(1), float("inf")
  )
  return e, ran


CELL = Arm("own", "hard", 16, 2048, "maxrl")
CELL = dataclasses.replace(CELL, power=0, seed=0)


def tuned(e, doubled):
  best = tuning.tune(
    e,
    [CELL],
    lambda cell: analysis.budgets(cell.task, doubled),
    lambda _: (-11.0, -10.0, -9.0),
  )
  least = arms.LEAST["own"]
  return {budget // least: power for budget, power in best[CELL].items()}


@pytest.mark.parametrize(
  "best, tried",
  [
    (-10, [-11, -10, -9]),
    (-9, [-11, -10, -9, -8]),
    (-7, [-11, -10, -9, -8, -7, -6]),
    (-13, [-11, -10, -9, -12, -13, -14]),
  ],
)
def test_rates_are_tried_until_the_best_is_between_two(
  best, tried, tmp_path, monkeypatch
):
  score = lambda power, k: 1.0 - 0.05 * abs(power - best)
  e, ran = experiment(tmp_path, score, monkeypatch)
  assert tuned(e, 0) == {1: best}
  assert [power for power, _, _ in ran] == tried
  assert {seed for _, _, seed in ran} == {arms.TUNING_SEED}
  assert tuned(e, 0) == {1: best} and len(ran) == len(tried)  # nothing new


def test_a_grid_that_was_left_is_run_to_its_end(tmp_path, monkeypatch):
  e, ran = experiment(tmp_path, lambda power, _: power / 100 + 1, monkeypatch)
  one = dataclasses.replace(CELL, power=-11.0, seed=arms.TUNING_SEED)
  e.each([dataclasses.replace(one, budget=2**16)])
  tuned(e, 0)
  assert [power for power, _, _ in ran[:4]] == [-11, -10, -9, -8]


def test_an_optimum_at_the_edge_of_the_grid_is_refused(tmp_path, monkeypatch):
  e, ran = experiment(tmp_path, lambda power, _: 0.9 + power / 100, monkeypatch)
  assert tuned(e, 0) == {}
  assert len(ran) == tuning.MOST_RATES


def test_each_budget_has_its_rate_and_the_double_begins_near_it(
  tmp_path, monkeypatch
):
  best = {0: 0, 1: -9, 2: -10, 4: -11, 8: -11}
  score = lambda power, k: 0.5 - 0.02 * abs(power - best[k])
  e, ran = experiment(tmp_path, score, monkeypatch)
  assert tuned(e, 1) == {1: -9, 2: -10}
  # -8 is a neighbour of the best of the smallest budget only.
  assert [*ran[3:]] == [(-8.0, 1, arms.TUNING_SEED)]
  before = len(ran)
  assert tuned(e, 2) == {1: -9, 2: -10, 4: -11}
  assert {power for power, k, _ in ran[before:]} == {-9, -10, -11, -12}
  assert {k for _, k, _ in ran[before:]} == {4}


def test_no_run_begins_when_the_hours_are_spent(tmp_path, monkeypatch):
  e, ran = experiment(tmp_path, lambda *_: 0.5, monkeypatch)
  e.each([ARM])
  late = dataclasses.replace(e, deadline=0.0)
  late.each([ARM])  # has a result
  with pytest.raises(tuning.OutOfTime):
    late.each([dataclasses.replace(ARM, seed=9)])
  assert len(ran) == 1


def test_a_rate_is_run_up_to_the_last_budget_for_which_it_is_the_best():
  assert tuning.last_use({1: -9.0, 2: -9.0, 4: -10.0}) == {-9.0: 2, -10.0: 4}


def test_a_question_is_tuned_and_then_run_with_other_seeds(
  tmp_path, monkeypatch
):
  best = {0: 0, 1: -10, 2: -10, 4: -11, 8: -11}
  score = lambda power, k: 0.5 - 0.02 * abs(power - best[k]) + k / 100
  e, ran = experiment(tmp_path, score, monkeypatch)
  (tmp_path / "own").mkdir()
  (tmp_path / "own" / "done").touch()
  q = run.Question("own", "hard", "maxrl", ns=(8, 32))
  run.answer(e, [q], 2, (0, 1))
  after = [one for one in ran if one[2] != arms.TUNING_SEED]
  assert after == [(-10, 2, 0), (-11, 4, 0)] * 2 + [
    (-10, 2, 1), (-11, 4, 1),
  ] * 2  # fmt: skip
  # The double is predicted before it is run, and never after.
  run.predict(e, [q], 3, (0, 1))
  path = tmp_path / "results" / "predictions" / "frontier-3.json"
  told = json.loads(path.read_text())
  assert [*told] == ["own-hard-maxrl-2048-plain"]
  assert [*told["own-hard-maxrl-2048-plain"]["pass_at_1"]] == ["8", "32"]
  run.answer(e, [q], 3, (0,))
  path.unlink()
  run.predict(e, [q], 3, (0, 1))
  assert not path.exists()


def test_a_decayed_rate_is_run_for_the_largest_budget_alone(
  tmp_path, monkeypatch
):
  e, ran = experiment(tmp_path, lambda p, _: -abs(p + 10), monkeypatch)
  (tmp_path / "own").mkdir()
  (tmp_path / "own" / "done").touch()
  q = run.Question("own", "hard", "maxrl", ns=(8,), decayed=True)
  run.answer(e, [q], 2, (0,))
  assert {k for _, k, _ in ran} == {4}
  assert ran[-1] == (-10, 4, 0)
  names = {path.stem for path in (tmp_path / "results").glob("*.json")}
  assert all("decayed262144" in name for name in names) and len(names) == 4


def test_stages_go_in_their_order_and_are_predicted_first(monkeypatch):
  did = []
  for name in ("predict", "answer"):
    monkeypatch.setattr(
      run, name, lambda e, qs, *rest, name=name: did.append((name, qs, *rest))
    )
  monkeypatch.setattr(run, "ready", lambda *_: None)
  monkeypatch.setattr(plateau, "go", lambda _: did.append(("plateau",)))
  e = tuning.Experiment(
    pathlib.Path("x"), pathlib.Path("x"), 1, machine.Machine(1), 0.0
  )
  run.follow(e)
  want = [
    (name, *stage) for stage in run.STAGES for name in ("predict", "answer")
  ]
  assert did == [*want[:2], ("plateau",), *want[2:]]
  seeds = {seed for _, _, some in run.STAGES for seed in some}
  assert not {arms.TUNING_SEED, plateau.START.seed} & {*seeds, *plateau.SEEDS}
  assert plateau.START.seed != arms.TUNING_SEED


def test_the_command_says_how_long_how_large_and_where(tmp_path, monkeypatch):
  seen = []
  monkeypatch.setattr(run, "follow", seen.append)
  monkeypatch.setattr(machine, "share_a_gpu", lambda _: None)
  command = ["run", str(tmp_path / "x"), "--budget=2", "--scale=3"]
  monkeypatch.setattr(sys, "argv", command)
  run.main()
  (e,) = seen
  assert e.deadline - time.monotonic() == pytest.approx(7200, abs=60)
  assert (e.scale, e.results) == (3, tmp_path / "x" / "results")


def test_a_decayed_question_is_not_predicted(tmp_path, monkeypatch):
  e, _ = experiment(tmp_path, lambda p, k: 0.5 - abs(p + 10) / 99, monkeypatch)
  (tmp_path / "own").mkdir()
  (tmp_path / "own" / "done").touch()
  q = run.Question("own", "hard", "maxrl", ns=(8,))
  run.answer(e, [q], 2, (0,))
  run.predict(e, [dataclasses.replace(q, decayed=True)], 3, (0,))
  assert not (e.results / "predictions").exists()


def test_the_arms_of_the_plateau_are_tuned_run_and_made_to_last(
  tmp_path, monkeypatch
):
  """N = 512 takes half the time of N = 16 here, which stops late."""
  ran, exported = [], []

  def fake(arm, cores, *, root, path, scale):
    ran.append(arm)
    middle = -10.0 + {8192: plateau.SQRT, 4096: 1.0}.get(arm.samples, 0.0)
    ks = [k for k in (0, 4, 8, 10, 16, 17) if k * 2**16 <= arm.budget]
    level = float(0.4 - 0.01 * abs(arm.power - middle))
    rise = 0.01 if arm.seed == plateau.START.seed else 0.0
    values = {k: level + rise * min(k, 8) for k in ks}
    found = result(values, prompts=[[100, 9000]] * len(ks))
    if arm.n == 512:
      found["points"]["busy_s"] = [5.0 * k for k in ks]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found))
    return found

  monkeypatch.setattr(arms, "run", fake)
  monkeypatch.setattr(machine, "call", lambda *a: exported.append(a))
  lanes = machine.Machine(1)
  e = tuning.Experiment(tmp_path, tmp_path / "results", 1, lanes, float("inf"))
  plateau.go(e)
  begun = arms.read(e.results / "plateau.json")
  assert begun is not None and begun["stopped"]
  assert (begun["in_reach"], begun["prompts"]) == (1, 2)
  assert exported[0][-1].endswith(
    f"runs/{plateau.START.name.replace('-11', '-10')}"
  )
  every = {arm: name for name, arm in plateau.cells().items()}
  of = lambda arm: every[dataclasses.replace(arm, power=0, seed=0, budget=(
    arm.budget if arm.decayed else 0))]  # fmt: skip
  after = [arm for arm in ran if arm.start]
  last = [(of(arm), arm.budget) for arm in after if arm.seed == 5]
  assert last[:6] == [(name, plateau.BUDGET) for name in every.values()]
  # Those that take half the time get twice the rollouts, and 5 % more.
  assert last[6:] == [("paper", 17 * 2**16), ("equal", 17 * 2**16)]
  tuned = {of(arm): arm.power for arm in after if arm.seed == 5}
  assert tuned == pytest.approx(
    {name: plateau.middle(name, -10.0) for name in every.values()}
  )


# --------------------------------------------------------------- the statistics


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


def test_seeds_are_drawn_again_too():
  """One prompt: all of the spread is between seeds."""
  a, b = np.array([[0.0], [1.0]]), np.array([[0.45], [0.45]])
  got = analysis.best_n({8: a, 32: b}, draws=4000)
  # Of (0, 0), (0, 1), (1, 0), (1, 1) three have a mean above .45.
  assert got["share"]["8"] == pytest.approx(0.75, abs=0.03)


def test_a_line_in_log_odds_goes_on():
  budgets = [2**16, 2**17, 2**18]
  p = lambda c: 1 / (1 + np.exp(-(0.7 * np.log2(c) - 12)))
  got = analysis.extrapolated(budgets, [p(c) for c in budgets], 2**19)
  assert got == pytest.approx(p(2**19))


def test_the_largest_budget_is_predicted_from_those_below(
  tmp_path, monkeypatch
):
  path = lambda arm: tmp_path / f"{arm.name}.json"
  made = []
  for n, slope in ((8, 0.02), (32, 0.05)):
    cell = dataclasses.replace(CELL, n=n)
    for seed, power in ((arms.TUNING_SEED, p) for p in (-11, -10, -9)):
      arm = dataclasses.replace(cell, power=power, seed=seed)
      found = {k: 0.1 + slope * k - 0.01 * abs(power + 10) for k in (0, 1, 2)}
      path(arm).write_text(json.dumps(result(found)))
    for seed in (0, 1):
      arm = dataclasses.replace(cell, power=-10, seed=seed)
      found = {k: 0.1 + slope * k for k in (0, 1, 2)}
      path(arm).write_text(json.dumps(result(found, prompts=[[1]] * 3)))
    made.append(analysis.Cell(tmp_path, cell, (0, 1)))
  got = analysis.predicted(made, 4 * arms.LEAST["own"])
  assert got is not None and got["n"] == "32"
  odds = lambda p: np.log(p / (1 - p))
  line = odds(0.2) + (odds(0.2) - odds(0.15))
  assert got["pass_at_1"]["32"] == pytest.approx(1 / (1 + np.exp(-line)))
  # Nothing is predicted that was run, or of which too little is known.
  assert analysis.predicted(made, 2 * arms.LEAST["own"]) is None
  assert analysis.predicted(made[:1], 1 * arms.LEAST["own"]) is None


def test_a_histogram_counts_lost_and_won():
  # .00006 was kept as .0001, and is lost.
  p = np.array([[0.0, 1e-4, 5e-4, 0.05], [0.3, 0.7, 0.95, 1.0]])
  got = analysis.histogram(p, 0.25)
  assert got == [0.25, 0.125, 0, 0.125, 0.125, 0.125, 0.25]


def test_measures_at_a_budget_by_hand(tmp_path):
  """N = 8: half of the prompts at 1, all in odd seeds; N = 32: all at .9."""
  q = run.Question("own", "hard", "maxrl", ns=(8, 32))
  cells = []
  for cell in q.cells(0):
    for power in (-11.0, -10.0, -9.0):
      told = result({0: 0.0, 1: 0.5 - 0.01 * abs(power + 10)})
      arm = dataclasses.replace(cell, power=power, seed=arms.TUNING_SEED)
      (tmp_path / f"{arm.name}.json").write_text(json.dumps(told))
    for seed in range(4):
      p = [10_000, 10_000 * (seed % 2)] if cell.n == 8 else [9000] * 2
      told = result({0: 0.0, 1: 0.5}, prompts=[[0, 0], p])
      arm = dataclasses.replace(cell, power=-10.0, seed=seed)
      (tmp_path / f"{arm.name}.json").write_text(json.dumps(told))
    cells.append(analysis.Cell(tmp_path, cell, study.SEEDS))
  got = study.at_budget(cells, 2**16, None)
  assert {name: one["n"] for name, one in got["sets"].items()} == {
    "even": 32, "odd": 8,
  }  # fmt: skip
  assert got["best"]["n"] == 32
  assert got["best_worst_at_4"]["n"] == 8  # .75 against .9^4, but .9^2 is .81
  assert got["best_best_at_4"]["n"] == 32
  assert got["seeds"] == 4 and got["foretold"] is None


def test_prompts_between_two_checkpoints_are_on_a_line_as_their_mean_is(
  tmp_path,
):
  """Dynamic sampling leaves no checkpoint at a budget: 0, 1.5 and 3 are."""
  for power in (-11.0, -10.0, -9.0):
    less = 0.01 * abs(power + 10)
    told = result({0: 0.2, 1.5: 0.5 - less, 3: 0.6 - less})
    arm = dataclasses.replace(CELL, power=power, seed=arms.TUNING_SEED)
    (tmp_path / f"{arm.name}.json").write_text(json.dumps(told))
  told = result(
    {0: 0.2, 1.5: 0.5, 3: 0.6},
    prompts=[[0, 4000], [1000, 9000], [3000, 9000]],
    heldout=[[0, 0], [3000, 0], [3000, 0]],
  )
  arm = dataclasses.replace(CELL, power=-10, seed=0)
  (tmp_path / f"{arm.name}.json").write_text(json.dumps(told))
  cell, least = analysis.Cell(tmp_path, CELL, (0,)), arms.LEAST["own"]
  for budget, p in ((1, [0.2 / 3, 2.2 / 3]), (2, [0.5 / 3, 0.9])):
    got = cell.prompts(budget * least, "train")
    np.testing.assert_allclose(got, [p], rtol=1e-6)
    assert cell.values(budget * least, "pass_at_1") == [
      pytest.approx(np.mean(p))
    ]
  assert cell.prompts(least, "heldout")[0, 0] == pytest.approx(0.2)
  np.testing.assert_allclose(cell.prompts(3 * least, "train"), [[0.3, 0.9]])


def test_the_gain_of_prompts_in_reach_by_hand(tmp_path):
  """p at the start: .01 is in [1/512, 1/16], .5 and .0001 are not."""
  first = np.array([0.01, 0.5, 0.0001])
  made = {}
  for name, p in (("paper", [4000, 6000, 2000]), ("wide", [1000, 7000, 1000])):
    arm = plateau.cells()[name]
    for power in (-11.0, -10.0, -9.0):
      told = result({k: 0.5 - 0.01 * abs(power + 10) for k in (0, 8)})
      of = dataclasses.replace(arm, power=power, seed=arms.TUNING_SEED)
      (tmp_path / f"{of.name}.json").write_text(json.dumps(told))
    told = result({0: 0.1, 8: 0.5}, prompts=[[0] * 3, p])
    of = dataclasses.replace(arm, power=-10.0, seed=0)
    (tmp_path / f"{of.name}.json").write_text(json.dumps(told))
    made[name] = analysis.Cell(tmp_path, arm, (0,))
  got = plateau._against(made["paper"], "wide", made["wide"], 1.0, first)
  assert got["in_reach"] == pytest.approx(0.3)
  assert got["others"] == pytest.approx(0.0)
  assert got["train"]["mean"] == pytest.approx(0.1)
  arm = plateau._arm("wide", made["wide"], 1.0, first)
  assert arm["in_reach"] == pytest.approx(0.1)
  # From .1 at the start: the mean of its prompts is .3.
  assert arm["heldout_gain"] == pytest.approx(0.2)


def test_only_what_was_tuned_is_at_an_edge(tmp_path):
  cell = run.FIRST[0].cells(2)[0]
  for power in (-11.0, -10.0, -9.0):
    arm = dataclasses.replace(cell, power=power, seed=arms.TUNING_SEED)
    path = tmp_path / f"{arm.name}.json"
    path.write_text(json.dumps(result({0: 0.0, 1: 0.1 - abs(power + 11)})))
  (one,) = study.question(tmp_path, run.FIRST[0], 2)["edges"]
  assert one == {"n": "8", "budget": 2**16}


def test_a_decayed_run_has_one_point(tmp_path):
  """Before its end its rate is not that of a smaller budget."""
  q = dataclasses.replace(run.FIRST[0], decayed=True)
  for cell in q.cells(2):
    for power in (-11.0, -10.0, -9.0):
      told = result({k: 0.1 - 0.01 * abs(power + 10) for k in (0, 1, 2, 4)})
      arm = dataclasses.replace(cell, power=power, seed=arms.TUNING_SEED)
      (tmp_path / f"{arm.name}.json").write_text(json.dumps(told))
    told = result(dict.fromkeys((0, 1, 2, 4), 0.1), prompts=[[1]] * 4)
    arm = dataclasses.replace(cell, power=-10.0, seed=0)
    (tmp_path / f"{arm.name}.json").write_text(json.dumps(told))
  for one in study.question(tmp_path, q, 2)["curves"]:
    assert one["budget"] == [2**18]


def test_a_damaged_result_is_named(tmp_path):
  (tmp_path / "x.json").write_text('{"points": [')
  with pytest.raises(SystemExit, match=r"error: .*x\.json is damaged .*delete"):
    arms.read(tmp_path / "x.json")
  assert arms.read(tmp_path / "y.json") is None


@pytest.mark.parametrize("bad", ["--budget=nan", "--budget=inf", "--lanes=0"])
def test_what_no_run_can_do_is_refused(bad, tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(sys, "argv", ["run", str(tmp_path / "x"), bad])
  with pytest.raises(SystemExit) as e:
    run.main()
  assert e.value.code == 2
  assert "at least 1, --budget is above 0" in capsys.readouterr().err
  assert not (tmp_path / "x").exists()


def test_a_file_in_the_way_is_named(tmp_path, monkeypatch):
  (tmp_path / "x").write_text("")
  monkeypatch.setattr(sys, "argv", ["run", str(tmp_path / "x")])
  with pytest.raises(
    SystemExit, match=r"error: .*/x.*: Not a directory|exists"
  ):
    run.main()


def test_at_equal_time_same_is_where_it_was(tmp_path):
  """A seed that took less than the mean has no later point to be read at."""
  times = {0: 90.0, 1: 110.0}
  cell = plateau.cells()["same"]
  for power in (-11.0, -10.0, -9.0):
    arm = dataclasses.replace(cell, power=power, seed=arms.TUNING_SEED)
    told = result({k: 0.5 - 0.01 * abs(power + 10) for k in (0, 8)})
    (tmp_path / f"{arm.name}.json").write_text(json.dumps(told))
  for seed, took in times.items():
    told = result({0: 0.1, 8: 0.4 + seed / 10, 16: 0.9}, prompts=[[1]] * 3)
    told["points"]["busy_s"] = [0.0, took, 2 * took]
    arm = dataclasses.replace(cell, power=-10.0, seed=seed)
    (tmp_path / f"{arm.name}.json").write_text(json.dumps(told))
  got = plateau.at_time(analysis.Cell(tmp_path, cell, times), 100.0, "heldout")
  assert got == pytest.approx([0.4, 0.5])


def test_another_scale_wants_another_folder(tmp_path):
  run.keep_scale(tmp_path / "x", 2)
  run.keep_scale(tmp_path / "x", 2)
  with pytest.raises(SystemExit, match=r"x was begun with --scale=2, not 3"):
    run.keep_scale(tmp_path / "x", 3)


def test_differences_are_those_of_scipy_on_prompts():
  rng = np.random.default_rng(0)
  a, b = rng.uniform(size=(2, 3, 30))
  got = plateau.difference(a, b)
  want = scipy.stats.ttest_rel(a.mean(axis=0), b.mean(axis=0))
  assert got["mean"] == pytest.approx((a - b).mean(), abs=1e-6)
  assert got["p"] == pytest.approx(want.pvalue, rel=1e-3)
  error = scipy.stats.sem((a - b).mean(axis=0))
  assert got["high"] - got["low"] == pytest.approx(2 * 1.96 * error, rel=1e-4)


# ------------------------------------------------------------------ the plateau


@pytest.mark.parametrize(
  "gains, stopped", [([0.3, 0.5, 0.505, 0.506], True), ([0.3] * 4, True),
                     ([0.3, 0.4, 0.5, 0.52], False)],
)  # fmt: skip
def test_it_has_stopped_when_the_last_third_gains_nothing(gains, stopped):
  told = result(dict(enumerate(gains)))
  assert plateau.stopped(told) == stopped


def arm_against(mean, low, at_time, near=0.02, others=0.0):
  return {
    "heldout": {"mean": mean, "low": low},
    "heldout_at_time": at_time,
    "in_reach": near,
    "others": others,
  }


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


def test_an_arm_that_takes_half_the_time_gets_twice_the_rollouts():
  got = plateau.longer(40.0, 80.0)
  assert got == 17 * 2**16  # 1.05 x 2 x 2^19, in whole smallest budgets
  assert plateau.longer(80.0, 80.0) >= plateau.BUDGET


def test_arms_of_the_plateau_differ_in_what_they_say():
  every = plateau.cells()
  same, paper, wide = (every[name] for name in ("same", "paper", "wide"))
  assert (same.n, paper.n, wide.n) == (16, 512, 16)
  assert paper.samples == wide.samples == 8 * same.samples
  assert every["equal"].samples == same.samples and every["equal"].n == 512
  assert every["decayed"].decayed
  assert {arm.start for arm in every.values()} == {"plateau/policy"}
  groups = settings.typed(
    frontier.get_config(arms.config(every["adaptive"], scale=1).split(":")[1])
  ).sampling.prompts
  assert groups == same.samples // 16
  # 2.83 times the rate, as the paper has it.
  assert 2 ** plateau.middle("paper", 0.0) == pytest.approx(8**0.5)
  assert plateau.middle("same", -9.0) == -9.0


# --------------------------------------------------------------------- the page


def folders(root):
  """Results of two questions, and of the plateau, as the runs leave them."""
  rng = np.random.default_rng(0)
  ks = (0, 1, 2, 4)

  def write(arm, level, rows):
    told = result(
      {k: level * (1 + k) for k in ks},
      prompts=rng.integers(0, 10_000, (len(ks), rows)).tolist(),
    )
    (root / f"{arm.name}.json").write_text(json.dumps(told))

  root.mkdir(exist_ok=True)
  for q in run.FIRST[:3:2]:
    for cell in q.cells(2):
      for power in (-11.0, -10.0, -9.0):
        arm = dataclasses.replace(cell, power=power, seed=arms.TUNING_SEED)
        write(arm, 0.1 - 0.01 * abs(power + 10), 8)
      for seed in (0, 1):
        write(dataclasses.replace(cell, power=-10.0, seed=seed), 0.1, 8)
  first = rng.integers(0, 1000, 8).tolist()
  begun = {
    "stopped": True, "pass_at_1": 0.4, "samples": 10**6, "rate": 2.0**-10,
    "prompts": 8, "in_reach": 3, "train": first,
  }  # fmt: skip
  (root / "plateau.json").write_text(json.dumps(begun))
  for name, cell in plateau.cells().items():
    middle = plateau.middle(name, -10.0)
    for power in (middle - 1, middle, middle + 1):
      arm = dataclasses.replace(
        cell, power=power, seed=arms.TUNING_SEED, budget=plateau.BUDGET
      )
      write_plateau(root, arm, 0.5 - 0.01 * abs(power - middle), rng)
    for seed in plateau.SEEDS:
      arm = dataclasses.replace(
        cell, power=middle, seed=seed, budget=plateau.BUDGET
      )
      write_plateau(root, arm, 0.5, rng)


def write_plateau(root, arm, level, rng):
  ks = (0, 4, 8)
  told = result(
    {k: level for k in ks}, prompts=rng.integers(0, 10_000, (3, 8)).tolist()
  )
  (root / f"{arm.name}.json").write_text(json.dumps(told))


@pytest.mark.ci
def test_the_page_says_what_the_results_say(tmp_path, capsys):
  results = tmp_path / "results"
  folders(results)
  (results / "predictions").mkdir()
  name = analysis.question_of(run.FIRST[0].cells(2)[0])
  told = {name: {"n": "32", "pass_at_1": {"32": 0.4}}}
  (results / "predictions/frontier-2.json").write_text(json.dumps(told))
  page = report.write(results, tmp_path / "report")
  data = json.loads((page.parent / "frontier.json").read_text())
  assert [q["advantage"] for q in data["questions"]] == [
    "maxrl", "leave_one_out",
  ]  # fmt: skip
  first = data["questions"][0]["budgets"]
  assert [b["budget"] // 2**16 for b in first] == [1, 2, 4]
  assert [b["foretold"] is not None for b in first] == [False, False, True]
  cell = first[-1]["cells"][0]
  arm = dataclasses.replace(run.FIRST[0].cells(2)[0], power=-10.0)
  rows = [
    json.loads((results / f"{dataclasses.replace(arm, seed=s).name}.json")
               .read_text())["prompts"]["train"][-1]
    for s in (0, 1)
  ]  # fmt: skip
  assert cell["classes"]["hard"] == pytest.approx(np.mean(rows) / 1e4)
  assert cell["pass_at_1"]["mean"] == pytest.approx(0.5)
  assert data["plateau"]["verdict"] in ("supported", "falsified", "undecided")
  assert len(data["plateau"]["arms"]) == 6
  assert len(data["plateau"]["against"]) == 5
  assert [arm["seeds"] for arm in data["plateau"]["arms"]] == [6] * 6
  second = data["plateau"]["sets"][1]
  means = {}
  for name in ("paper", "wide"):
    arm = plateau.cells()[name]
    rows = [
      dataclasses.replace(arm, power=plateau.middle(name, -10.0), seed=seed)
      for seed in (3, 4, 5)
    ]
    told = [
      json.loads((results / f"{row.name}.json").read_text()) for row in rows
    ]
    means[name] = np.mean([one["prompts"]["heldout"][-1] for one in told])
  (told,) = [one for one in second["against"] if one["arm"] == "wide"]
  assert second["seeds"] == 3
  assert told["heldout"]["mean"] == pytest.approx(
    (means["paper"] - means["wide"]) / 1e4
  )
  of_last = {
    one.path[:4]
    for row in report.question_table(data, 0).rows
    for one in row
    if isinstance(one, cells.Number)
  }
  assert of_last == {("questions", 0, "budgets", 2)}
  html = page.read_text()
  spans = re.findall(r'data-path="([^"]+)" data-kind="(\w+)">([^<]*)<', html)
  assert len(spans) > 100
  for pointer, kind, text in spans:
    path = [int(k) if k.isdigit() else k for k in pointer.split("/")[1:]]
    number = cells.Number(tuple(path), kind)
    assert text == cells.written(number, data).replace("<", "&lt;")
  assert html.count("<img ") == 3 and "N = 512, 8 x samples" in html
  assert "1.5 billion parameters" in html
  assert "The best N" in capsys.readouterr().out


def test_what_it_cost_is_told_by_machine(tmp_path):
  for name, where, ks in (("a", "X", (0, 4)), ("b", "Y", (0, 36, 72))):
    told = result(dict.fromkeys(ks, 0.1)) | {"machine": where}
    (tmp_path / f"{name}.json").write_text(json.dumps(told))
  (tmp_path / "plateau.json").write_text("{}")
  cost = study.cost(tmp_path)
  assert (cost["runs"], cost["rollouts"]) == (2, 76 * 2**16)
  assert cost["machines"] == [
    {"name": "X", "hours": 40 / 3600}, {"name": "Y", "hours": 0.2},
  ]  # fmt: skip


def test_crosses_are_what_was_predicted():
  best = {"n": 8, "low": 8, "high": 32}
  q = {
    "ns": ["8", "32", "adaptive"],
    "budgets": [
      {"budget": 2**16, "best": best, "foretold": None},
      {"budget": 2**17, "best": best, "foretold": {"n": "32"}},
    ],
  }
  axis = matplotlib.figure.Figure().subplots()
  draw._best(axis, q)
  (cross,) = [line for line in axis.lines if line.get_marker() == "x"]
  assert cross.get_ydata() == [32.0]


def test_a_folder_without_results_is_named(tmp_path):
  with pytest.raises(
    SystemExit, match=r"x answers no question yet, .* run bash launch/frontier"
  ):
    study.numbers(tmp_path / "x")


FRONTIER = pathlib.Path(__file__).parents[2] / "launch" / "frontier"


@functools.cache
def everything():
  return study.numbers(FRONTIER / "results")


@pytest.mark.ci
def test_the_readme_has_the_tables_of_the_results():
  text = (FRONTIER / "README.md").read_text()
  data = everything()
  for line in (*summary.of_n(data), *summary.of_plateau(data)):
    assert line in text
  assert f"verdict: {data['plateau']['verdict']}" in text
  for one in data["cost"]["machines"]:
    hours = f"{one['hours']:.1f} hours of an {one['name']}"
    assert hours in " ".join(text.split())


@pytest.mark.ci
def test_the_front_page_has_the_numbers_of_the_results():
  """Of what is compared each rate was tuned, at the budget that is named."""
  text = (FRONTIER.parents[1] / "README.md").read_text().replace("**", "")
  data = everything()
  ns = ["8", "32", "128", "512"]
  named = {q["name"]: q for q in data["questions"] if q["ns"] == ns}
  for question, budget, seeds in (
    ("own-hard-maxrl-2048-plain", 2**16, 5),
    ("own-hard-maxrl-2048-plain", 2**18, 5),
    ("own-hard-maxrl-2048-plain", 2**20, 5),
    ("own-hard-leave_one_out-2048-plain", 2**19, 5),
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


@pytest.mark.ci
def test_a_title_has_room_above_its_panel():
  """Three panels abreast: a longer line is cut off at the figure's edge."""
  for question in everything()["questions"]:
    lines = draw._title(question).split("\n")
    assert max(map(len, lines)) <= 37 and len(lines) <= 4
    assert " ".join(lines) == draw.title_of(question)


def test_the_results_are_kept_small():
  files = [*(FRONTIER / "results").rglob("*.json")]
  assert sum(path.stat().st_size for path in files) < 5e6
